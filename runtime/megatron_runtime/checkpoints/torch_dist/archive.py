"""One tensor as torch.save() wrote it, somewhere in a larger file: found without running its pickle or copying it."""

from __future__ import annotations

import io
import math
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any, BinaryIO

import torch

from megatron_runtime.checkpoints.inert_pickle import UnsafePickleError, ordered_dict, read_pickle, size_of
from megatron_runtime.checkpoints.mapped import MappedFile
from megatron_runtime.checkpoints.model_files import MAX_INDEX_BYTES, MAX_METADATA_BYTES, ModelFile
from megatron_runtime.checkpoints.quoting import shown

_LOCAL_HEADER_BYTES = 30
_LENGTHS_AT = 26
"""Of name and extra field, in the header before an entry of a zip file."""

_STORAGES = {
    f"{name}Storage": dtype
    for name, dtype in {
        "Float": torch.float32,
        "BFloat16": torch.bfloat16,
        "Half": torch.float16,
        "Double": torch.float64,
        "Byte": torch.uint8,
        "Char": torch.int8,
        "Short": torch.int16,
        "Int": torch.int32,
        "Long": torch.int64,
        "Bool": torch.bool,
        "Untyped": torch.uint8,
    }.items()
}
DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


_ZIP_ERRORS = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    LookupError,
    OSError,
    EOFError,
    ValueError,
    RuntimeError,
    OverflowError,
)
"""What the standard library says of a damaged archive."""


class DamagedFileError(ValueError):
    """A file of the checkpoint is cut short or not what its index says. The message names it and what is wrong."""


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """Where the values of a tensor lie. `at`: byte where its storage begins; offset and strides count values."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    at: int

    def bytes_in(self, file: MappedFile) -> torch.Tensor:
        """Its values as bytes: a view of the file where they lie in order there. The last axis counts bytes.

        The address of a value in a file need not be a multiple of its size, so only bytes may be looked at there.
        """
        size = self.dtype.itemsize
        if self._in_order:
            raw = file.piece(self.at + self.offset * size, math.prod(self.shape) * size)
        else:
            storage = file.piece(self.at, (self.offset + _span(self.shape, self.strides)) * size).clone()
            values = storage.view(self.dtype).as_strided(self.shape, self.strides, self.offset)
            raw = values.contiguous().view(-1).view(torch.uint8)
        return raw.view(*self.shape[:-1], self.shape[-1] * size)

    @property
    def _in_order(self) -> bool:
        stride = 1
        for extent, found in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if extent != 1 and found != stride:
                return False
            stride *= extent
        return True


@dataclass(frozen=True, slots=True)
class SavedArchive:
    """What torch.save() wrote. prefix: of the names of its entries."""

    file: zipfile.ZipFile
    prefix: str
    where: str

    def pickle(self) -> io.BytesIO:
        """Raises DamagedFileError for one that is larger than any index."""
        entry = self.file.getinfo(f"{self.prefix}data.pkl")
        if entry.compress_type != zipfile.ZIP_STORED:
            raise DamagedFileError(f"{self.where} is compressed: save the checkpoint without compression")
        if entry.file_size > MAX_INDEX_BYTES:
            raise DamagedFileError(
                f"{self.where} has a pickle of {entry.file_size} bytes: at most {MAX_INDEX_BYTES} are read"
            )
        return io.BytesIO(self.file.read(entry))


@contextmanager
def saved_archive(file: IO[bytes] | _Window, *, where: str) -> Iterator[SavedArchive]:
    """What torch.save() wrote, in a file that can be sought. Raises DamagedFileError, also for the block."""
    try:
        _require_small_directory(file, where)
        with zipfile.ZipFile(file) as archive:
            pickled = next((name for name in archive.namelist() if name.endswith("/data.pkl")), None)
            if pickled is None:
                raise DamagedFileError(f"{where} was not written by torch.save(): it has no data.pkl")
            yield SavedArchive(archive, pickled.removesuffix("data.pkl"), where)
    except (DamagedFileError, UnsafePickleError):
        raise
    except _ZIP_ERRORS as error:
        raise DamagedFileError(
            f"{where} is damaged: {shown(str(error))}; copy the file again from where it was saved"
        ) from error


def _require_small_directory(file: IO[bytes] | _Window, where: str) -> None:
    """The library reads the directory of an archive as a whole, as large as the archive says it is."""
    end = zipfile._EndRecData(file)  # type: ignore[attr-defined]
    if end is not None and end[zipfile._ECD_SIZE] > MAX_METADATA_BYTES:  # type: ignore[attr-defined]
        raise DamagedFileError(
            f"{where} has a directory of {end[zipfile._ECD_SIZE]} bytes: "  # type: ignore[attr-defined]
            f"at most {MAX_METADATA_BYTES} are read"
        )
    file.seek(0)


def find_tensor(stored: ModelFile, *, offset: int, length: int) -> SavedTensor:
    """Return where the tensor in the `length` bytes from `offset` is. Raises DamagedFileError, UnsafePickleError."""
    where = f"{stored.path} at byte {offset}"
    with stored.open() as file, saved_archive(_Window(file, offset, length), where=where) as archive:
        found = read_pickle(archive.pickle(), where=where, trusted=_TRUSTED, persistent=_Storage.of_id)
        if not isinstance(found, _Rebuilt):
            raise UnsafePickleError(f"{where} holds {type(found).__name__}: a tensor was expected")
        entry = archive.file.getinfo(f"{archive.prefix}data/{found.storage.key}")
        file.seek(offset + entry.header_offset + _LENGTHS_AT)
        name, extra = struct.unpack("<HH", file.read(4))
    if entry.compress_type != zipfile.ZIP_STORED:
        raise DamagedFileError(f"{where} is compressed: save the checkpoint without compression")
    dtype = found.dtype or found.storage.dtype
    values = found.offset + _span(found.shape, found.strides)
    at = offset + entry.header_offset + _LOCAL_HEADER_BYTES + name + extra
    if (
        min(found.shape, default=1) < 1
        or found.offset < 0
        or values * dtype.itemsize > entry.file_size
        or entry.header_offset < 0
        or at + entry.file_size > offset + length
    ):
        raise DamagedFileError(
            f"{where} says it has shape {found.shape} of {dtype}, but holds {entry.file_size} bytes of values"
        )
    return SavedTensor(dtype, found.shape, found.strides, found.offset, at)


def _span(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Values from the first to the last."""
    return 1 + sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))


@dataclass(frozen=True, slots=True)
class _Storage:
    key: str
    dtype: torch.dtype

    @staticmethod
    def of_id(pid: Any) -> _Storage:
        kind, dtype, key, _, _ = pid
        if kind != "storage" or not isinstance(dtype, torch.dtype) or not isinstance(key, str):
            raise ValueError("a persistent id is no storage")
        return _Storage(key, dtype)


@dataclass(frozen=True, slots=True)
class _Rebuilt:
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype | None = None


def _rebuild_v2(storage: _Storage, offset: int, shape: Any, strides: Any, *_: object) -> _Rebuilt:
    return _rebuild_v3(storage, offset, shape, strides, None, None, None)


def _rebuild_v3(
    storage: _Storage,
    offset: int,
    shape: Any,
    strides: Any,
    grad: object,
    hooks: object,
    dtype: torch.dtype | None,
    *_: object,
) -> _Rebuilt:
    if not isinstance(storage, _Storage) or not (dtype is None or isinstance(dtype, torch.dtype)):
        raise ValueError("a tensor has no storage, or a type that is none")
    ((first,), extents, steps) = size_of((offset,)), size_of(shape), size_of(strides)
    if len(extents) != len(steps):
        raise ValueError(f"a tensor has {len(extents)} axes and {len(steps)} strides")
    return _Rebuilt(storage, first, extents, steps, dtype)


def _rebuild_parameter(data: _Rebuilt, *_: object) -> _Rebuilt:
    return data


_TRUSTED: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): ordered_dict,
    ("torch", "Size"): size_of,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_v2,
    ("torch._utils", "_rebuild_tensor_v3"): _rebuild_v3,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    ("torch.storage", "UntypedStorage"): torch.uint8,
    **{("torch", name): dtype for name, dtype in _STORAGES.items()},
    **{("torch", name): dtype for name, dtype in DTYPES.items()},
}


class _Window(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, file: BinaryIO, offset: int, length: int) -> None:
        self._file = file
        self._offset = offset
        self._length = length
        self._at = 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        if start + offset < 0:
            raise OSError(f"seek to {start + offset}, before the start")
        self._at = start + offset
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._length - self._at)
        count = left if size is None or size < 0 else min(size, left)
        self._file.seek(self._offset + self._at)
        found = self._file.read(count)
        self._at += len(found)
        return found
