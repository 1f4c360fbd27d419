"""Forms that constrain the generated text; the names are vLLM's."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .errors import OptionError


@dataclass(kw_only=True)
class StructuredOutputsParams:
    """The form of a text: one of `json`, `regex`, `choice`, `grammar` and `json_object`."""

    json: str | Mapping[str, Any] | None = None
    """A JSON schema that the text follows, as an object or a string."""
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
    """No effect: objects have only the properties that their schema names."""
    whitespace_pattern: str | None = None
    """No effect."""
    structural_tag: str | None = None
    """Refused."""


@dataclass(kw_only=True)
class GuidedDecodingParams(StructuredOutputsParams):
    """The earlier name of vLLM's `StructuredOutputsParams`."""

    backend: str | None = None
    """No effect: there is one implementation."""


_FORMS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


def fields(params: StructuredOutputsParams) -> dict[str, Any]:
    """The fields of a request to the server that describe the same form."""
    given = {name: getattr(params, name) for name in _FORMS}
    parts = {name: value for name, value in given.items() if value is not None and value is not False}
    # The server takes an empty object for no form, but an empty object as a string for the schema of any JSON.
    if isinstance(params.json, Mapping):
        parts["json"] = json.dumps(dict(params.json))
    if params.choice is not None:
        parts["choice"] = list(params.choice)
    empty = [name for name, value in parts.items() if value in ("", [])]
    if empty or not parts:
        why = f"{empty[0]} is empty" if empty else "nothing is given"
        raise OptionError(f"structured_outputs restricts no text, as {why}: give one of json, regex, choice, grammar and json_object")
    return {"structured_outputs": parts}
