"""Frames between a run and its engine process: four bytes of length, then one JSON object.

The length counts the bytes of the JSON text (UTF-8) and is little-endian. JSON, because nothing
that arrives can run code; Python writes a float32 as the shortest text of its double, so it comes
back as the same bits.
"""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Mapping
from typing import Any, BinaryIO

from sidestep.errors import EngineError

_LENGTH = struct.Struct("<I")
MAX_FRAME_BYTES = 1 << 30


def encode_frame(message: Mapping[str, Any]) -> bytes:
    """One frame. ValueError for NaN and infinity, or over MAX_FRAME_BYTES."""
    body = json.dumps(message, allow_nan=False, separators=(",", ":")).encode()
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(
            f"a frame of {len(body)} bytes is over {MAX_FRAME_BYTES}: ask for less at once"
        )
    return _LENGTH.pack(len(body)) + body


def read_frame(stream: BinaryIO) -> dict[str, Any] | None:
    """Next frame of a blocking stream, None at its end. EngineError for a broken or cut frame."""
    header = stream.read(_LENGTH.size)
    if not header:
        return None
    size = _body_size(header)
    return _decode_body(stream.read(size), size)


async def receive_frame(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    """`read_frame` for an asyncio stream."""
    try:
        size = _body_size(await reader.readexactly(_LENGTH.size))
        return _decode_body(await reader.readexactly(size), size)
    except asyncio.IncompleteReadError as error:
        if error.partial or error.expected != _LENGTH.size:
            raise EngineError(
                f"the stream ended inside a frame: {len(error.partial)} of {error.expected} bytes"
            ) from error
        return None


def _body_size(header: bytes) -> int:
    if len(header) != _LENGTH.size:
        raise EngineError(f"the stream ended inside a frame: {len(header)} of {_LENGTH.size} bytes")
    size: int = _LENGTH.unpack(header)[0]
    if size > MAX_FRAME_BYTES:
        raise EngineError(
            f"a frame claims {size} bytes, over {MAX_FRAME_BYTES}: something else wrote there"
        )
    return size


def _decode_body(body: bytes, size: int) -> dict[str, Any]:
    if len(body) != size:
        raise EngineError(f"the stream ended inside a frame: {len(body)} of {size} bytes")
    try:
        message = json.loads(body)
    except ValueError as error:
        raise EngineError(f"a frame of {size} bytes is not JSON: {body[:80]!r}") from error
    if not isinstance(message, dict):
        raise EngineError(f"a frame holds {type(message).__name__}, not an object: {body[:80]!r}")
    return message
