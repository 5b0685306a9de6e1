"""The key-value section of a GGUF file and, when asked for, the index of its tensors; never the tensors themselves.

A server needs the vocabulary and the chat template, not the tensors; reading them this way takes milliseconds where a
reader that makes a NumPy view per array element takes seconds. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from megatron_runtime.checkpoints.model_files import ModelFile
from megatron_runtime.protocol.text import shown

MAGIC = b"GGUF"
SUPPORTED_VERSIONS = (2, 3)

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_ARRAY_DEPTH = 4
_SIZE = struct.Struct("<Q")
_ALIGNMENT_KEY, _DEFAULT_ALIGNMENT, _MAX_ALIGNMENT = "general.alignment", 32, 1 << 20
_MAX_PAIRS, _MAX_TENSORS, _MAX_AXES, _MAX_ELEMENTS = 1 << 16, 1 << 18, 4, 1 << 24
"""Of a file; of a tensor; and of all arrays of a file together."""


class GGUFFormatError(ValueError):
    """The file is not a readable GGUF file. The message names the file and what is wrong."""


def read_gguf_metadata(path: Path, *, keys: Collection[str] | None = None) -> dict[str, Any]:
    """Return the metadata of the file at `path`; only `keys` when given (others are skipped over, not decoded).

    Raises GGUFFormatError when the file is not GGUF, is cut short or is of an unknown version.
    """
    with ModelFile(path).open() as file:
        view = _map(file, path)
        try:
            return _Reader(view, path).metadata(keys)
        finally:
            view.close()


@dataclass(frozen=True, slots=True)
class GGUFTensorInfo:
    """Where one tensor lies. `shape` is row-major (the file's order reversed), `kind` the GGML type number."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int
    """From the start of the file, in bytes."""


def read_gguf_index(
    path: Path, *, keys: Collection[str] | None = None
) -> tuple[dict[str, Any], tuple[GGUFTensorInfo, ...]]:
    """Return metadata (as read_gguf_metadata) and the tensors of the file at `path`. Raises GGUFFormatError."""
    with ModelFile(path).open() as file:
        view = _map(file, path)
        try:
            reader = _Reader(view, path)
            metadata = reader.metadata(None if keys is None else {*keys, _ALIGNMENT_KEY})
            return metadata, reader.tensors(metadata.get(_ALIGNMENT_KEY, _DEFAULT_ALIGNMENT))
        finally:
            view.close()


def _map(file: BinaryIO, path: Path) -> mmap.mmap:
    try:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError as error:
        raise GGUFFormatError(f"{path} is empty: expected a GGUF file") from error


class _Reader:
    def __init__(self, view: mmap.mmap, path: Path) -> None:
        self._view = view
        self._path = path
        self._at = 0
        self._tensor_count = 0
        self._elements_left = _MAX_ELEMENTS

    def metadata(self, keys: Collection[str] | None) -> dict[str, Any]:
        if self._view[:4] != MAGIC:
            raise GGUFFormatError(f"{self._path} does not begin with {MAGIC!r}: it is not a GGUF file")
        self._at = 4
        version = self._scalar("I")
        if version not in SUPPORTED_VERSIONS:
            raise GGUFFormatError(
                f"{self._path} has GGUF version {version}: versions {SUPPORTED_VERSIONS} are supported"
            )
        self._tensor_count, pairs = self._scalar("Q"), self._scalar("Q")
        for count, most, what in ((self._tensor_count, _MAX_TENSORS, "tensors"), (pairs, _MAX_PAIRS, "metadata keys")):
            if count > most:
                raise GGUFFormatError(f"{self._path} says it has {count} {what}: at most {most} are read")
        found: dict[str, Any] = {}
        for _ in range(pairs):
            key = self._string()
            value = self._value(self._scalar("I"), wanted=keys is None or key in keys, depth=0)
            if keys is None or key in keys:
                found[key] = value
        return found

    def tensors(self, alignment: object) -> tuple[GGUFTensorInfo, ...]:
        """The tensor index, which follows the metadata."""
        if not isinstance(alignment, int) or isinstance(alignment, bool) or not 1 <= alignment <= _MAX_ALIGNMENT:
            raise GGUFFormatError(
                f"{self._path} has {_ALIGNMENT_KEY} {shown(alignment)}: want a whole number from 1 to {_MAX_ALIGNMENT}"
            )
        found = []
        for _ in range(self._tensor_count):
            name = self._string()
            axes = self._scalar("I")
            if axes > _MAX_AXES:
                raise GGUFFormatError(
                    f"tensor {shown(name)} of {self._path} has {axes} axes: at most {_MAX_AXES} are supported"
                )
            shape = tuple(self._scalar("Q") for _ in range(axes))[::-1]
            found.append((name, shape, self._scalar("I"), self._scalar("Q")))
        start = -(-self._at // alignment) * alignment
        return tuple(GGUFTensorInfo(name, shape, kind, start + offset) for name, shape, kind, offset in found)

    def _value(self, kind: int, *, wanted: bool, depth: int) -> Any:
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY and depth < _MAX_ARRAY_DEPTH:
            item_kind, count = self._scalar("I"), self._scalar("Q")
            if count > len(self._view) - self._at:  # an element has a byte or more
                raise self._cut_short(count, self._at)
            self._elements_left -= count
            if self._elements_left < 0:
                raise GGUFFormatError(
                    f"{self._path} has arrays of more than {_MAX_ELEMENTS} elements at byte {self._at}: that is no "
                    "metadata of a model"
                )
            return self._array(item_kind, count, wanted=wanted, depth=depth + 1)
        raise GGUFFormatError(f"{self._path} holds a value of unknown type {kind} at byte {self._at}")

    def _array(self, kind: int, count: int, *, wanted: bool, depth: int) -> list[Any]:
        if kind in _SCALARS:
            start = self._advance(count * struct.calcsize(f"<{_SCALARS[kind]}"))
            return list(struct.unpack_from(f"<{count}{_SCALARS[kind]}", self._view, start)) if wanted else []
        if kind == _STRING:
            return self._strings(count, wanted=wanted)
        return [self._value(kind, wanted=wanted, depth=depth) for _ in range(count)]

    def _strings(self, count: int, *, wanted: bool) -> list[str]:
        """A vocabulary has hundreds of thousands: no call for each of them but those of the standard library."""
        view, size_at, end = self._view, _SIZE.unpack_from, len(self._view)
        if not wanted:
            self._skip_strings(count)
            return []
        found, at = [], self._at
        for _ in range(count):
            if at + _SIZE.size > end:
                raise self._cut_short(_SIZE.size, at)
            start = at + _SIZE.size
            (size,) = size_at(view, at)
            at = start + size
            if at > end:
                raise self._cut_short(size, start)
            found.append(view[start:at])
        self._at = at
        return [text.decode("utf-8", errors="replace") for text in found]

    def _skip_strings(self, count: int) -> None:
        size_at, view, at, size = _SIZE.unpack_from, self._view, self._at, _SIZE.size
        try:
            for _ in range(count):
                at += size + size_at(view, at)[0]
        except (struct.error, OverflowError):
            raise self._cut_short(size, min(at, len(view))) from None
        if at > len(view):
            raise self._cut_short(at - len(view), len(view))
        self._at = at

    def _scalar(self, code: str) -> Any:
        layout = f"<{code}"
        return struct.unpack_from(layout, self._view, self._advance(struct.calcsize(layout)))[0]

    def _string(self) -> str:
        size = self._scalar("Q")
        start = self._advance(size)
        return self._view[start : start + size].decode("utf-8", errors="replace")

    def _advance(self, size: int) -> int:
        start = self._at
        if size > len(self._view) - start:
            raise self._cut_short(size, start)
        self._at = start + size
        return start

    def _cut_short(self, size: int, start: int) -> GGUFFormatError:
        return GGUFFormatError(f"{self._path} is cut short: {size} bytes expected at byte {start}")
