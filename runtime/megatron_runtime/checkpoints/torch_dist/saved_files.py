"""The pickled parts of a Megatron-Core checkpoint, read without unpickling: the index, and each tensor in a file.

The index maps each part of each tensor to a place in a file, where the part is stored as torch.save() wrote it.
"""

from __future__ import annotations

import io
import math
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, BinaryIO

import torch

from megatron_runtime.checkpoints.mapped import MappedFile
from megatron_runtime.checkpoints.model_files import (
    MAX_INDEX_BYTES,
    MAX_METADATA_BYTES,
    ModelDirectory,
    ModelFile,
    UnsafeNameError,
    require_safe_name,
)
from megatron_runtime.checkpoints.safe_unpickler import Opaque, UnsafePickleError, ordered_dict, read_pickle, size_of
from megatron_runtime.protocol.text import shown

METADATA_FILE = ".metadata"

_KNOWN_PACKAGES = ("torch", "megatron", "pathlib", "collections", "io", "_io", "numpy")
"""Objects of these packages in the index do nothing here; any other name is rejected."""

_LOCAL_HEADER_BYTES = 30
_LENGTHS_AT = 26
"""Position of the lengths of name and extra field in the header of an entry of a zip file."""

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
"""Errors that the standard library raises for a damaged archive."""


class DamagedFileError(ValueError):
    """A file of the checkpoint is cut short or contradicts the index. The message names the file and the cause."""


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """The place of a tensor in a file. at: first byte of its storage; offset and strides count values."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    at: int

    def bytes_in(self, file: MappedFile) -> torch.Tensor:
        """Return the values as bytes, a view of the file if they are contiguous there. The last axis counts bytes.

        The address of a value in a file need not be a multiple of its size, hence bytes.
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
    """A file that torch.save() wrote. prefix: of the names of its entries."""

    file: zipfile.ZipFile
    prefix: str
    where: str

    def pickle(self) -> io.BytesIO:
        """Return the pickle in the archive. Raises DamagedFileError if it is compressed or larger than any index."""
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
    """Yield the archive that torch.save() wrote to a seekable file. Raises DamagedFileError, also from the block."""
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
    """Limit the directory of an archive: zipfile reads it as a whole, with the size that the archive states."""
    end = zipfile._EndRecData(file)  # type: ignore[attr-defined]
    if end is not None and end[zipfile._ECD_SIZE] > MAX_METADATA_BYTES:  # type: ignore[attr-defined]
        raise DamagedFileError(
            f"{where} has a directory of {end[zipfile._ECD_SIZE]} bytes: "  # type: ignore[attr-defined]
            f"at most {MAX_METADATA_BYTES} are read"
        )
    file.seek(0)


def find_tensor(stored: ModelFile, *, offset: int, length: int) -> SavedTensor:
    """Return the tensor in the `length` bytes from `offset`. Raises DamagedFileError, UnsafePickleError."""
    where = f"{stored.path} at byte {offset}"
    with stored.open() as file, saved_archive(_Window(file, offset, length), where=where) as archive:
        found = read_pickle(archive.pickle(), where=where, trusted=_TRUSTED_IN_TENSORS, persistent=_Storage.of_id)
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
    """Return the number of values from the first to the last."""
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


def _rebuild(storage: _Storage, offset: int, shape: Any, strides: Any, *others: object) -> _Rebuilt:
    """Replaces torch's functions that build a tensor on a storage. One of them is called with the tensor's type."""
    if not isinstance(storage, _Storage):
        raise ValueError("a tensor has no storage")
    ((first,), extents, steps) = size_of((offset,)), size_of(shape), size_of(strides)
    if len(extents) != len(steps):
        raise ValueError(f"a tensor has {len(extents)} axes and {len(steps)} strides")
    dtype = next((other for other in others if isinstance(other, torch.dtype)), None)
    return _Rebuilt(storage, first, extents, steps, dtype)


def _rebuild_parameter(data: _Rebuilt, *_: object) -> _Rebuilt:
    return data


_TRUSTED_IN_TENSORS: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): ordered_dict,
    ("torch", "Size"): size_of,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild,
    ("torch._utils", "_rebuild_tensor_v3"): _rebuild,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    ("torch.storage", "UntypedStorage"): torch.uint8,
    **{("torch", name): dtype for name, dtype in _STORAGES.items()},
    **{("torch", name): dtype for name, dtype in DTYPES.items()},
}


class _Window(io.RawIOBase):
    """A part of a file as a file."""

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


# --- the index ---


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor, as one range per axis, and its place in a file."""

    box: tuple[range, ...]
    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class TensorIndex:
    """A stored tensor: its whole shape, and its chunks."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]


def read_index(directory: Path) -> dict[str, TensorIndex]:
    """Return every tensor in `directory`, by key.

    Raises UnsafePickleError, and DamagedFileError if a file is missing or cut short, or if a part of a tensor is in no
    file. No file is opened before these checks.
    """
    place, path = ModelDirectory(directory), directory / METADATA_FILE
    index_file = place.file(METADATA_FILE)
    if index_file is None:
        raise DamagedFileError(f"{path} is missing: copy the whole directory")
    with index_file.open() as file:
        found = read_pickle(file, where=str(path), trusted=_TRUSTED_IN_INDEX, opaque=_may_be_there)
    if not isinstance(found, _Metadata):
        raise UnsafePickleError(f"{path} holds {type(found).__name__}: the index of a distributed checkpoint is wanted")
    try:
        places = _places(found, path)
        index = {
            key: _tensor(key, entry, places, path)
            for key, entry in found.state_dict_metadata.items()
            if isinstance(key, str) and isinstance(entry, _TensorEntry)
        }
    except (AttributeError, TypeError, ValueError) as error:
        if isinstance(error, DamagedFileError | UnsafePickleError):
            raise
        raise UnsafePickleError(f"{path} is no index of torch.distributed.checkpoint: {shown(str(error))}") from error
    sizes: dict[str, int] = {}
    for tensor in index.values():
        for chunk in tensor.chunks:
            sizes[chunk.file] = max(sizes.get(chunk.file, 0), chunk.offset + chunk.length)
    _require_files(place, sizes)
    return index


def _may_be_there(module: str, name: str) -> bool:
    return module.partition(".")[0] in _KNOWN_PACKAGES


def _tensor(key: str, entry: _TensorEntry, places: Mapping[tuple[str, str], _Place], path: Path) -> TensorIndex:
    shape, named = size_of(entry.size), shown(key)
    chunks = []
    for chunk in entry.chunks:
        start, extent = size_of(chunk.offsets), size_of(chunk.sizes)
        place = places.get(_place_key(key, start))
        if place is None:
            raise DamagedFileError(f"{path} does not say where the part of {named} at {start} is: save it again")
        if len(start) != len(extent):
            raise DamagedFileError(f"{path} has a part of {named} at {start} of {extent}: its shape is {shape}")
        box = tuple(range(first, first + count) for first, count in zip(start, extent, strict=True))
        if len(box) != len(shape) or any(axis.stop > whole for axis, whole in zip(box, shape, strict=True)):
            raise DamagedFileError(f"{path} has a part of {named} at {start} of {extent}: its shape is {shape}")
        if all(extent):
            chunks.append(Chunk(box, place.relative_path, place.offset, place.length))
    held = sum(math.prod(axis.stop - axis.start for axis in chunk.box) for chunk in chunks)
    if held != math.prod(shape):
        raise DamagedFileError(
            f"{path} lists {held} of the {math.prod(shape)} values of {named}: a rank's files were not saved or lost"
            if held < math.prod(shape)
            else f"{path} lists {held} values of {named}, which has {math.prod(shape)}: parts overlap; save it again"
        )
    return TensorIndex(shape, entry.properties.dtype, tuple(chunks))


def _places(found: _Metadata, path: Path) -> dict[tuple[str, str], _Place]:
    if not isinstance(found.storage_data, Mapping):
        raise UnsafePickleError(f"{path} does not say where its tensors are: it was not saved to a file system")
    places = {}
    for where, place in found.storage_data.items():
        if not isinstance(where, _PartName) or not isinstance(where.fqn, str) or not isinstance(place, _Place):
            raise UnsafePickleError(f"{path} lists {type(place).__name__} as a place: a file and an offset are wanted")
        if place.transform_descriptors:
            raise DamagedFileError(
                f"{path} says {shown(where.fqn)} is stored through {shown(place.transform_descriptors)}: "
                "save it plainly"
            )
        _require_inside(place.relative_path, path)
        # Both have at most 63 bits; their sum is compared with the size of the file.
        size_of((place.offset, place.length))
        places[_place_key(where.fqn, size_of(where.offset or ()))] = place
    return places


def _place_key(name: str, start: tuple[int, ...]) -> tuple[str, str]:
    """Return a key of strings: a file could make the hashes of integers collide, but not those of strings."""
    return name, ",".join(map(str, start))


def _require_inside(name: object, path: Path) -> None:
    try:
        require_safe_name(name)
    except UnsafeNameError as error:
        raise UnsafePickleError(f"{path} refers to a file outside of its directory: {error}") from error


def _require_files(directory: ModelDirectory, sizes: Mapping[str, int]) -> None:
    for name, wanted in sorted(sizes.items()):
        file = directory.file(name)
        path = directory.path / name
        if file is None:
            raise DamagedFileError(f"{path} is missing: copy the whole directory, {len(sizes)} files belong to it")
        found = file.status().st_size
        if found < wanted:
            raise DamagedFileError(
                f"{path} is cut short: it has {found} bytes, the index needs {wanted}; copy it again"
            )


class _Record:
    """Replaces a class of torch that has only attributes; the pickle sets them."""

    def __init__(self, *_: object) -> None: ...

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


class _Metadata(_Record): ...


class _TensorEntry(_Record): ...


class _ChunkEntry(_Record): ...


class _PartName(_Record):
    offset: Any = None


class _Place(_Record):
    transform_descriptors: Any = None


class _Properties:
    """Replaces the properties of a tensor. Only the type is needed."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.dtype = state[0]
        if not isinstance(self.dtype, torch.dtype):
            raise TypeError(f"{shown(self.dtype)} is no type of a tensor")


_MODULE = "torch.distributed.checkpoint.metadata"
_TRUSTED_IN_INDEX: dict[tuple[str, str], Any] = {
    ("builtins", "set"): Opaque,
    ("builtins", "frozenset"): Opaque,
    ("builtins", "getattr"): Opaque,
    ("collections", "OrderedDict"): ordered_dict,
    ("torch", "Size"): size_of,
    ("torch.serialization", "_get_layout"): Opaque,
    (_MODULE, "Metadata"): _Metadata,
    (_MODULE, "MetadataIndex"): _PartName,
    (_MODULE, "TensorStorageMetadata"): _TensorEntry,
    (_MODULE, "ChunkStorageMetadata"): _ChunkEntry,
    (_MODULE, "TensorProperties"): _Properties,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _Place,
    # The module of older releases.
    ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"): _Properties,
    **{("torch", name): dtype for name, dtype in DTYPES.items()},
}
