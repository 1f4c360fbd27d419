"""The form that a text must have; the names are vLLM's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(kw_only=True)
class StructuredOutputsParams:
    """What a text must look like: one of these."""

    json: str | Mapping[str, Any] | None = None
    """JSON that follows this schema, an object or its text."""
    regex: str | None = None
    """A regular expression that matches the whole text."""
    choice: Sequence[str] | None = None
    """One of these strings."""
    grammar: str | None = None
    """A grammar in llama.cpp's GBNF or llguidance's Lark."""
    json_object: bool | None = None
    """Any JSON object."""
    disable_fallback: bool = False
    """No effect: there is one implementation."""
    disable_any_whitespace: bool = False
    """No effect: white space between the parts of JSON is bounded."""
    disable_additional_properties: bool = False
    """No effect: objects have the properties that their schema names."""
    whitespace_pattern: str | None = None
    """No effect."""
    structural_tag: str | None = None
    """Refused."""


@dataclass(kw_only=True)
class GuidedDecodingParams(StructuredOutputsParams):
    """The name that vLLM had for `StructuredOutputsParams` before."""

    backend: str | None = None
    """No effect: there is one implementation."""


def fields(params: StructuredOutputsParams) -> dict[str, Any]:
    """The fields of a request to the server that ask for the same."""
    parts = asdict(params)
    parts.pop("backend", None)
    if isinstance(params.json, Mapping):
        parts["json"] = dict(params.json)
    if params.choice is not None:
        parts["choice"] = list(params.choice)
    return {"structured_outputs": parts}
