"""Reads the header of a GGUF file: the metadata and the index of the tensors. This module does not import torch.

The reader of the `gguf` package is not used, because it has no limits, and takes 2 to 10 s and 160 to 710 MiB for the
metadata of a model (docs/decisions/012). Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_runtime.checkpoints.model_files import ModelFile, ModelFileError
from megatron_runtime.protocol.text import shown

MAGIC = b"GGUF"
SUPPORTED_VERSIONS = (2, 3)

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_ARRAY_DEPTH = 4
_SIZE = struct.Struct("<Q")
_TOKENIZER_PREFIX = "tokenizer."
_ALIGNMENT_KEY, _DEFAULT_ALIGNMENT, _MAX_ALIGNMENT = "general.alignment", 32, 1 << 20
_MAX_PAIRS, _MAX_TENSORS, _MAX_AXES, _MAX_ELEMENTS = 1 << 16, 1 << 18, 4, 1 << 24
"""Maximum numbers of metadata pairs and tensors per file, of axes per tensor, and of elements of all arrays in a
file.
"""
_PART_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class GGUFTensorInfo:
    """The description of one tensor, from the index of a .gguf file.

    shape:  row-major, as in torch; the file has the opposite order.
    kind:   GGML type number.
    offset: position in bytes, from the start of the file.
    """

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


def gguf_parts(path: Path) -> list[Path]:
    """Return the paths of all files of the model to which the file `path` belongs. The first file has the metadata.

    A large model has several files, with names such as NAME-00001-of-00003.gguf. The files need not exist.
    """
    match = _PART_NAME.fullmatch(path.name)
    if match is None or not int(match[3]):
        return [path]
    name, _, count = match.groups()
    return [path.with_name(f"{name}-{number:05}-of-{count}.gguf") for number in range(1, int(count) + 1)]


def read_gguf_header(path: Path, *, vocabulary: bool) -> tuple[dict[str, Any], tuple[GGUFTensorInfo, ...]]:
    """Return the metadata of the file at `path`, and the index of its tensors.

    vocabulary: whether to read the tokenizer's arrays. If False, these arrays are empty and the read takes a quarter of
                the time.

    Raises ModelFileError if the file is not GGUF, is truncated, has an unknown version, or exceeds a limit.
    """
    with ModelFile(path).open() as file:
        try:
            view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError as error:
            raise ModelFileError(f"{path} is empty: expected a GGUF file") from error
        with view:
            return _Reader(view, path).header(vocabulary=vocabulary)


class _Reader:
    def __init__(self, view: mmap.mmap, path: Path) -> None:
        self._view = view
        self._path = path
        self._at = 0
        self._elements_left = _MAX_ELEMENTS

    def header(self, *, vocabulary: bool) -> tuple[dict[str, Any], tuple[GGUFTensorInfo, ...]]:
        if self._view[:4] != MAGIC:
            raise ModelFileError(f"{self._path} does not begin with {MAGIC!r}: it is not a GGUF file")
        self._at = 4
        version = self._scalar("I")
        if version not in SUPPORTED_VERSIONS:
            raise ModelFileError(
                f"{self._path} has GGUF version {version}: versions {SUPPORTED_VERSIONS} are supported"
            )
        tensors, pairs = self._scalar("Q"), self._scalar("Q")
        for count, maximum, what in ((tensors, _MAX_TENSORS, "tensors"), (pairs, _MAX_PAIRS, "metadata keys")):
            if count > maximum:
                raise ModelFileError(f"{self._path} declares {count} {what}: at most {maximum} are allowed")
        metadata: dict[str, Any] = {}
        for _ in range(pairs):
            key = self._string()
            wanted = vocabulary or not key.startswith(_TOKENIZER_PREFIX)
            metadata[key] = self._value(self._scalar("I"), wanted=wanted, depth=0)
        return metadata, self._index(tensors, metadata.get(_ALIGNMENT_KEY, _DEFAULT_ALIGNMENT))

    def _index(self, count: int, alignment: object) -> tuple[GGUFTensorInfo, ...]:
        if not isinstance(alignment, int) or isinstance(alignment, bool) or not 1 <= alignment <= _MAX_ALIGNMENT:
            raise ModelFileError(
                f"{self._path} has {_ALIGNMENT_KEY} {shown(alignment)}: want a whole number from 1 to {_MAX_ALIGNMENT}"
            )
        entries = []
        for _ in range(count):
            name = self._string()
            axes = self._scalar("I")
            if axes > _MAX_AXES:
                raise ModelFileError(
                    f"tensor {shown(name)} of {self._path} has {axes} axes: at most {_MAX_AXES} are supported"
                )
            shape = tuple(self._scalar("Q") for _ in range(axes))[::-1]
            entries.append((name, shape, self._scalar("I"), self._scalar("Q")))
        start = -(-self._at // alignment) * alignment
        return tuple(GGUFTensorInfo(name, shape, kind, start + offset) for name, shape, kind, offset in entries)

    def _value(self, kind: int, *, wanted: bool, depth: int) -> Any:
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY and depth < _MAX_ARRAY_DEPTH:
            return self._array(self._scalar("I"), self._scalar("Q"), wanted=wanted, depth=depth + 1)
        raise ModelFileError(f"{self._path} holds a value of unknown type {kind} at byte {self._at}")

    def _array(self, kind: int, count: int, *, wanted: bool, depth: int) -> list[Any]:
        if count > len(self._view) - self._at:  # each element takes one byte or more
            raise self._cut_short(count, self._at)
        self._elements_left -= count
        if self._elements_left < 0:
            raise ModelFileError(
                f"{self._path} has arrays of more than {_MAX_ELEMENTS} elements at byte {self._at}: this is not "
                "the metadata of a model"
            )
        if kind == _STRING:
            return self._strings(count, wanted=wanted)
        if kind in _SCALARS:
            layout = struct.Struct(f"<{count}{_SCALARS[kind]}")
            start = self._advance(layout.size)
            return list(layout.unpack_from(self._view, start)) if wanted else []
        return [self._value(kind, wanted=wanted, depth=depth) for _ in range(count)]

    def _strings(self, count: int, *, wanted: bool) -> list[str]:
        """Read and return an array of `count` strings. wanted: if False, skip the strings and return an empty list.

        A vocabulary has hundreds of thousands of strings, so no function is called per string.
        """
        view, size_at, header, at, end = self._view, _SIZE.unpack_from, _SIZE.size, self._at, len(self._view)
        texts = []
        try:
            for _ in range(count):
                start = at + header
                at = start + size_at(view, at)[0]
                if at > end:  # check before slicing, which would copy the rest of the file
                    raise self._cut_short(at - end, end)
                if wanted:
                    texts.append(view[start:at])
        except (struct.error, OverflowError):
            raise self._cut_short(header, min(at, end)) from None
        self._at = at
        return [text.decode("utf-8", errors="replace") for text in texts]

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

    def _cut_short(self, size: int, start: int) -> ModelFileError:
        return ModelFileError(f"{self._path} is cut short: {size} bytes expected at byte {start}")
