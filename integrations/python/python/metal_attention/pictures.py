"""Pictures in prompts and messages: the bytes of their files, and the last encoded ones."""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import os
import pathlib
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from ._engine import Engine
from ._engine import Picture as EncodedPicture
from .errors import OptionError, PromptError, TemplateError

KEPT_BYTES = 512 << 20
"""The bytes of encoded pictures that are kept."""


class PilImage(Protocol):
    """What is used of Pillow's `Image`."""

    def convert(self, mode: str) -> Any: ...


Picture: TypeAlias = str | os.PathLike[str] | bytes | bytearray | memoryview | PilImage
"""A picture: a file (JPEG, PNG, WebP, BMP, GIF), its bytes, a `data:` address, or an image of Pillow's."""


class Pictures:
    """Encodes the pictures of a model, and keeps the last ones, so that a conversation's are encoded once."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._kept: OrderedDict[bytes, EncodedPicture] = OrderedDict()
        self._n_bytes = 0
        self._lock = threading.Lock()

    def encode(self, file: bytes) -> EncodedPicture:
        """Encodes the bytes of a file."""
        key = hashlib.sha256(file).digest()
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        encoded = self._engine.encode_picture(file)
        with self._lock:
            if key not in self._kept:
                self._kept[key] = encoded
                self._n_bytes += encoded.n_bytes
            while self._n_bytes > KEPT_BYTES:
                self._n_bytes -= self._kept.popitem(last=False)[1].n_bytes
        return encoded


def read(picture: Picture) -> bytes:
    """The bytes of a picture's file."""
    if isinstance(picture, (bytes, bytearray, memoryview)):
        return bytes(picture)
    if isinstance(picture, str) and picture[:5].lower() == "data:":
        return _of_address(picture)
    if isinstance(picture, str) and "://" in picture:
        raise OptionError(f"pictures are not fetched: give the bytes, or the file, of {picture[:200]!r}")
    if isinstance(picture, (str, os.PathLike)):
        return pathlib.Path(picture).read_bytes()
    if hasattr(picture, "convert"):
        file = io.BytesIO()
        # The engine reads no transparency.
        picture.convert("RGB").save(file, format="PNG")
        return file.getvalue()
    raise TypeError(f"a picture is a path, bytes, a data: address or an image of Pillow's, not {type(picture).__name__}")


def _of_address(address: str) -> bytes:
    head, comma, data = address.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise PromptError("a data: address must have its bytes in Base64: data:image/png;base64,...")
    try:
        data = "".join(data.split())
        return base64.b64decode(data + "=" * (-len(data) % 4), validate=True)
    except (binascii.Error, ValueError) as error:
        raise PromptError(f"the Base64 of a picture is damaged: {error}") from None


def listed(pictures: Any) -> list[Any]:
    """One picture, several, or None as a list."""
    if pictures is None:
        return []
    return list(pictures) if isinstance(pictures, (list, tuple)) else [pictures]


def of_messages(messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[bytes]]:
    """The messages with a place for each picture, as JSON has it, and the bytes of the pictures in their order."""
    files: list[bytes] = []
    return [_taken(message, files) for message in messages], files


def _taken(message: Mapping[str, Any], files: list[bytes]) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, (list, tuple)):
        return dict(message)
    parts = []
    for part in content:
        picture = _of_part(part) if isinstance(part, Mapping) else None
        if picture is None:
            parts.append(part)
            continue
        if isinstance(picture, str) and picture[:5].lower() != "data:":
            # Messages may come from others, who could name any file.
            raise PromptError(f"a message has the picture {picture[:200]!r}: give a data: address, bytes, or a path as pathlib.Path")
        files.append(read(picture))
        parts.append({"type": "image_url", "image_url": {"url": "data:"}})
    return {**message, "content": parts}


def _of_part(part: Mapping[str, Any]) -> Picture | None:
    """The picture of a part in the form of OpenAI's interfaces, vLLM's or that of the transformers package; None: it is none."""
    kind = part.get("type")
    if kind not in ("image_url", "input_image", "image_pil", "image"):
        return None
    picture: Any = part.get("image" if kind == "image" else "image_pil" if kind == "image_pil" else "image_url")
    if isinstance(picture, Mapping):
        picture = picture.get("url")
    if picture is None:
        raise TemplateError(f'a part of type "{kind}" cannot be read: it has no picture, but {list(part)}')
    return picture  # type: ignore[no-any-return]
