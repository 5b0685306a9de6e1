"""Limits on the structure of JSON that clients send, checked on its bytes as they arrive.

A parser turns each byte pair `[]` into an object of 56 bytes, and validation reports each wrong element. So a body
within the size limit may still take seconds and gigabytes. `JsonScan` counts before anything is parsed.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from pydantic_core import from_json

MAX_DEPTH = 64
MAX_CONTAINERS = 65_536
"""Objects and arrays, and also members of objects."""
MAX_ELEMENTS = 1 << 20
"""Values that a comma follows. Token ids of a prompt are the one legitimate use of so many."""

_OTHER = bytes(set(range(256)) - set(b"[]{}"))
_STEPS = bytes.maketrans(b"[]{}", b"\x01\x00\x01\x00")


class JsonLimitError(ValueError):
    """JSON with more structure than the server takes. The message names the limit and the remedy."""


class JsonScan:
    """Counts the structure of one request body; JSON text held in its strings counts towards the same limits."""

    def __init__(self) -> None:
        self._containers = self._members = self._elements = self._depth = 0
        self._in_string = self._after_backslash = False

    def feed(self, chunk: bytes) -> None:
        """Count the next bytes. Raises JsonLimitError; input that is no JSON is left to the parser."""
        if self._after_backslash and chunk:
            chunk, self._after_backslash = chunk[1:], False
        if b"\\" in chunk:
            chunk = chunk.replace(b"\\\\", b"").replace(b'\\"', b"")
            self._after_backslash = chunk.endswith(b"\\")
        parts = chunk.split(b'"')
        outside = b"".join(parts[int(self._in_string) :: 2])
        self._in_string ^= len(parts) % 2 == 0
        if outside:
            self._count(outside)

    def text(self, text: str) -> None:
        """Count JSON that a string of the body holds. Raises JsonLimitError."""
        self._depth, self._in_string, self._after_backslash = 0, False, False
        self.feed(text.encode(errors="surrogatepass"))

    def _count(self, outside: bytes) -> None:
        brackets = outside.translate(_STEPS, _OTHER)
        self._containers += len(brackets)  # each opens or closes: two of them make a container
        self._members += outside.count(b":")
        self._elements += outside.count(b",")
        if max(self._containers // 2, self._members) > MAX_CONTAINERS:
            raise JsonLimitError(f"it has more than {MAX_CONTAINERS} objects and arrays, or members: send less at once")
        if self._elements > MAX_ELEMENTS:
            raise JsonLimitError(f"it has more than {MAX_ELEMENTS} elements: send less at once")
        depths = list(accumulate((1 if opens else -1 for opens in brackets), initial=self._depth))
        self._depth = depths[-1]
        if max(depths) > MAX_DEPTH:
            raise JsonLimitError(f"it is nested deeper than {MAX_DEPTH} levels: flatten it")


def load_json(text: str, *, scan: JsonScan | None = None) -> Any:
    """Return what a JSON text means. Raises ValueError, JsonLimitError for one with too much structure.

    scan: of the body that the text came in; None counts the text alone.
    """
    (scan or JsonScan()).text(text)
    return from_json(text)
