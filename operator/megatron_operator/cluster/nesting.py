"""Protection against JSON that is nested too deeply for Python's decoder.

A user who may create one custom resource can nest its podTemplate 10,000 levels deep. Without protection, one watch
event of this resource would end the watch of all resources. Valid objects have about 30 levels. Values deeper than
`MAX_LEVELS` are replaced by null. The validation of the spec then rejects the resource.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp

from megatron_runtime.protocol import strict_json as json

MAX_LEVELS = 100
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"')
_TOKEN = re.compile(_STRING.pattern + rb"|[\[\]{}]")
_PAIR = re.compile(rb"\{\}|\[\]")
_NOT_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")


def shallow(text: bytes) -> bytes:
    """Return the JSON text with every array and object that is nested deeper than `MAX_LEVELS` replaced by null."""
    if text.count(b"{") + text.count(b"[") <= MAX_LEVELS or not _is_deep(text):
        return text
    kept, depth, begin = [], 0, 0
    for token in _TOKEN.finditer(text):
        if token.group() in (b"{", b"["):
            depth += 1
            if depth == MAX_LEVELS + 1:
                kept += [text[begin : token.start()], b"null"]
        elif token.group() in (b"}", b"]"):
            if depth == MAX_LEVELS + 1:
                begin = token.end()
            depth -= 1
    return b"".join([*kept, text[begin:]])


def _is_deep(text: bytes) -> bool:
    """Return whether the text is nested too deeply, without decoding it.

    Each iteration removes the innermost brackets.
    """
    brackets = _STRING.sub(b"", text).translate(None, _NOT_BRACKETS)
    for _ in range(MAX_LEVELS):
        if not brackets:
            return False
        brackets = _PAIR.sub(b"", brackets)
    return bool(brackets)


def decode(text: bytes | str) -> Any:
    """Return the value of a JSON text. Raises ValueError if the text is not JSON.

    If the text is nested too deeply for Python's decoder, values deeper than `MAX_LEVELS` become None.
    """
    try:
        return json.loads(text)
    except RecursionError:
        return json.loads(shallow(text.encode() if isinstance(text, str) else text))


class BoundedResponse(aiohttp.ClientResponse):
    """An HTTP response that contains one JSON document, or one document per line, and limits the depth of each
    document.
    """

    async def start(self, connection: Any) -> BoundedResponse:
        await super().start(connection)
        self.content = _BoundedLines(self.content)  # type: ignore[assignment]
        return self

    async def json(
        self,
        *,
        encoding: str | None = None,
        loads: Callable[[str], Any] = decode,
        content_type: str | None = "application/json",
    ) -> Any:
        return await super().json(encoding=encoding, loads=loads, content_type=content_type)


class _BoundedLines:
    """A stream of JSON lines, in which arrays and objects that are nested too deeply are replaced by null.

    The stream can be read line by line, as for a watch, or as a whole.
    """

    def __init__(self, stream: aiohttp.StreamReader) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def iter_chunked(self, size: int) -> AsyncIterator[bytes]:
        """Yield complete lines as soon as they are received."""
        begun: list[bytes] = []
        async for chunk in self._stream.iter_chunked(size):
            *whole, rest = chunk.split(b"\n")
            if not whole:
                begun.append(rest)
                continue
            whole[0] = b"".join([*begun, whole[0]])
            begun = [rest] if rest else []
            yield b"".join(shallow(line) + b"\n" for line in whole)
        if begun:
            yield shallow(b"".join(begun))
