"""Reads the pickled parts of a Megatron-Core checkpoint without running code from the pickles.

The pickled parts are the index and each tensor. The index maps each chunk of each tensor to a byte range of a file,
which contains the chunk in the format of torch.save().
"""

from __future__ import annotations

import math
import mmap
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.storage import _storage_type_to_dtype_map

from megatron_runtime.checkpoints.mapped import MappedFile
from megatron_runtime.checkpoints.model_files import (
    MAX_INDEX_BYTES,
    MAX_METADATA_BYTES,
    ModelDirectory,
    ModelFile,
    ModelFileError,
    UnsafeNameError,
    require_safe_name,
    size_of,
)
from megatron_runtime.checkpoints.safe_unpickler import Opaque, UnsafePickleError, ordered_dict, read_pickle
from megatron_runtime.checkpoints.torch_dist.chunked import TensorIndex
from megatron_runtime.protocol.text import shown

METADATA_FILE = ".metadata"

_KNOWN_PACKAGES = ("torch", "megatron", "pathlib", "collections", "io", "_io", "numpy")
"""Packages whose objects in the index become inert objects. Names of other packages are rejected."""

_LOCAL_HEADER_BYTES = 30
_LENGTHS_AT = 26
"""Offset of the lengths of the name and the extra field in the header of a zip file's entry."""

_DTYPES = {("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
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


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor in a file.

    key: name of the tensor's storage.
    offset: position of the tensor's first value in the storage, in values.
    strides: strides in values.
    at: position of the storage's first byte in the file.
    """

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    at: int = 0

    @property
    def span(self) -> int:
        """Number of values in the storage from the tensor's first value to its last value, inclusive."""
        return 1 + sum((extent - 1) * stride for extent, stride in zip(self.shape, self.strides, strict=True))

    def bytes_in(self, file: MappedFile) -> torch.Tensor:
        """Return the tensor as a view of the file, uint8 [*shape, itemsize].

        The view has the type uint8, because the address of a value in a file need not be a multiple of the value's
        size.
        """
        size = self.dtype.itemsize
        storage = file.piece(self.at + self.offset * size, self.span * size)
        return storage.as_strided((*self.shape, size), (*(stride * size for stride in self.strides), 1))


class SavedArchive:
    """An archive that torch.save() wrote. Raises ModelFileError for any other kind of archive.

    view:  the bytes of the file up to the end of the archive. Other data can precede the archive, because a zip file is
           read from its end.
    start: offset of the archive's first byte in the file.
    where: name of the archive, for errors.
    """

    def __init__(self, view: mmap.mmap, start: int, where: str) -> None:
        # Check the size first: zipfile reads the whole directory of an archive, with the size that the archive states.
        end = zipfile._EndRecData(view)  # type: ignore[attr-defined]
        if end is not None and end[zipfile._ECD_SIZE] > MAX_METADATA_BYTES:  # type: ignore[attr-defined]
            raise ModelFileError(
                f"{where} has a directory of {end[zipfile._ECD_SIZE]} bytes: "  # type: ignore[attr-defined]
                f"at most {MAX_METADATA_BYTES} are read"
            )
        self._entries = zipfile.ZipFile(view)  # type: ignore[call-overload]
        pickled = next((name for name in self._entries.namelist() if name.endswith("/data.pkl")), None)
        if pickled is None:
            raise ModelFileError(f"{where} was not written by torch.save(): it has no data.pkl")
        self._prefix = pickled.removesuffix("data.pkl")
        self._view, self._start, self._where = view, start, where

    def pickle(self) -> bytes:
        """Return the pickle in the archive.

        Raises ModelFileError if the pickle is damaged or exceeds the size limit of an index.
        """
        at, size = self.find("data.pkl")
        if size > MAX_INDEX_BYTES:
            raise ModelFileError(f"{self._where} has a pickle of {size} bytes: at most {MAX_INDEX_BYTES} are read")
        data = self._view[at : at + size]
        if zlib.crc32(data) != self._entries.getinfo(f"{self._prefix}data.pkl").CRC:
            raise zipfile.BadZipFile("the checksum of its pickle is wrong")
        return data

    def find(self, name: str) -> tuple[int, int]:
        """Return the offset in the file and the size of the archive's entry `name`, both in bytes.

        Raises ModelFileError if the entry is compressed.
        """
        entry = self._entries.getinfo(self._prefix + name)
        if entry.compress_type != zipfile.ZIP_STORED:
            raise ModelFileError(f"{self._where} is compressed: save the checkpoint without compression")
        if entry.header_offset < self._start:
            raise zipfile.BadZipFile(f"entry {shown(name)} is outside of the archive")
        lengths = struct.unpack_from("<HH", self._view, entry.header_offset + _LENGTHS_AT)
        at = entry.header_offset + _LOCAL_HEADER_BYTES + sum(lengths)
        if at + entry.file_size > len(self._view):
            raise zipfile.BadZipFile(f"entry {shown(name)} is outside of the archive")
        return at, entry.file_size


@contextmanager
def saved_archive(stored: ModelFile, *, where: str, start: int = 0, length: int = 0) -> Iterator[SavedArchive]:
    """Yield the torch.save() archive that is in `length` bytes of a file from `start` on.

    length: size of the archive in bytes; 0 means the rest of the file.
    where:  name of the archive, for errors.

    Raises ModelFileError, also for errors of the archive that occur in the `with` block.
    """
    try:
        with stored.open() as file, mmap.mmap(file.fileno(), start + length, access=mmap.ACCESS_READ) as view:
            yield SavedArchive(view, start, where)
    except ModelFileError:
        raise
    except _ZIP_ERRORS as error:
        raise ModelFileError(
            f"{where} is damaged: {shown(str(error))}; copy the file again from where it was saved"
        ) from error


def find_tensor(stored: ModelFile, *, offset: int, length: int) -> SavedTensor:
    """Return the tensor that torch.save() wrote to `length` bytes of a file from `offset` on.

    Raises ModelFileError or UnsafePickleError.
    """
    where = f"{stored.path} at byte {offset}"
    with saved_archive(stored, where=where, start=offset, length=length) as archive:
        tensor = read_pickle(archive.pickle(), where=where, trusted=_TRUSTED_IN_TENSORS, persistent=_storage)
        if not isinstance(tensor, SavedTensor):
            raise UnsafePickleError(f"{where} holds {type(tensor).__name__}: a tensor was expected")
        at, size = archive.find(f"data/{tensor.key}")
    if min(tensor.shape, default=0) < 1 or (tensor.offset + tensor.span) * tensor.dtype.itemsize > size:
        raise ModelFileError(
            f"{where} has shape {tensor.shape} of {tensor.dtype} and {size} bytes of values: save it again"
        )
    return replace(tensor, at=at)


def _storage(pid: Any) -> SavedTensor:
    """Return the storage that a persistent id of the pickle describes, as a SavedTensor without values."""
    kind, dtype, key, _, _ = pid
    if kind != "storage" or not isinstance(dtype, torch.dtype) or not isinstance(key, str):
        raise ValueError("a persistent id is not a storage")
    return SavedTensor(key, dtype, shape=(0,), strides=(1,), offset=0)


def _rebuild(storage: SavedTensor, offset: int, shape: Any, strides: Any, *others: object) -> SavedTensor:
    """Return a tensor whose values are in `storage`.

    Replaces torch's functions that build tensors; `others` can include the tensor's type.
    """
    if not isinstance(storage, SavedTensor):
        raise ValueError("a tensor has no storage")
    ((first,), extents, steps) = size_of((offset,)), size_of(shape), size_of(strides)
    if len(extents) != len(steps):
        raise ValueError(f"a tensor has {len(extents)} axes and {len(steps)} strides")
    dtype = next((other for other in others if isinstance(other, torch.dtype)), storage.dtype)
    return SavedTensor(storage.key, dtype, extents, steps, first)


_TRUSTED_IN_TENSORS: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): ordered_dict,
    ("torch", "Size"): size_of,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild,
    ("torch._utils", "_rebuild_tensor_v3"): _rebuild,
    ("torch._utils", "_rebuild_parameter"): lambda data, *_: data,
    ("torch.storage", "UntypedStorage"): torch.uint8,
    ("torch", "UntypedStorage"): torch.uint8,
    **{("torch", name): dtype for name, dtype in _storage_type_to_dtype_map().items()},
    **_DTYPES,
}


# --- the index ---


@dataclass(frozen=True, slots=True)
class SavedChunk:
    """A rectangular part of a tensor: one range of indices per axis, and the place of the part's values in a file."""

    box: tuple[range, ...]
    file: str
    offset: int
    length: int


def read_index(directory: Path) -> tuple[dict[str, TensorIndex[SavedChunk]], dict[str, MappedFile]]:
    """Return a map from keys to the tensors in `directory`, and a map from names to the files that contain the chunks.

    Raises UnsafePickleError, and ModelFileError if a file is missing or truncated, or if a chunk is in no file. All
    these checks precede the first read of a file.
    """
    place, path = ModelDirectory(directory), directory / METADATA_FILE
    index_file = place.file(METADATA_FILE)
    if index_file is None:
        raise ModelFileError(f"{path} is missing: copy the whole directory")
    metadata = read_pickle(
        index_file.read_bytes(MAX_INDEX_BYTES),
        where=str(path),
        trusted=_TRUSTED_IN_INDEX,
        opaque=lambda module, name: module.partition(".")[0] in _KNOWN_PACKAGES,
    )
    if not isinstance(metadata, _Metadata):
        raise UnsafePickleError(
            f"{path} holds {type(metadata).__name__}: the index of a distributed checkpoint is wanted"
        )
    try:
        places = _places(metadata, path)
        index = {
            key: _tensor(key, entry, places, path)
            for key, entry in metadata.state_dict_metadata.items()
            if isinstance(key, str) and isinstance(entry, _TensorEntry)
        }
    except ModelFileError:
        raise
    except (AttributeError, TypeError, ValueError) as error:
        raise UnsafePickleError(
            f"{path} is not an index of torch.distributed.checkpoint: {shown(str(error))}"
        ) from error
    sizes: dict[str, int] = {}
    for tensor in index.values():
        for chunk in tensor.chunks:
            sizes[chunk.file] = max(sizes.get(chunk.file, 0), chunk.offset + chunk.length)
    files: dict[str, MappedFile] = {}
    for name, wanted in sorted(sizes.items()):
        stored = place.file(name)
        if stored is None:
            raise ModelFileError(f"{directory / name} is missing: copy the whole directory, it has {len(sizes)} files")
        if (size := stored.status().st_size) < wanted:
            raise ModelFileError(
                f"{stored.path} is cut short: it has {size} bytes, the index needs {wanted}; copy it again"
            )
        files[name] = MappedFile(stored)
    return index, files


def _tensor(
    key: str, entry: _TensorEntry, places: Mapping[tuple[str, str], _Place], path: Path
) -> TensorIndex[SavedChunk]:
    shape, named = size_of(entry.size), shown(key)
    chunks = []
    for chunk in entry.chunks:
        start, extent = size_of(chunk.offsets), size_of(chunk.sizes)
        place = places.get(_place_key(key, start))
        if place is None:
            raise ModelFileError(f"{path} does not say where the part of {named} at {start} is: save it again")
        box = tuple(range(first, first + count) for first, count in zip(start, extent, strict=False))
        if not len(start) == len(extent) == len(shape) or any(
            axis.stop > whole for axis, whole in zip(box, shape, strict=True)
        ):
            raise ModelFileError(f"{path} has a part of {named} at {start} of {extent}: its shape is {shape}")
        if all(extent):
            chunks.append(SavedChunk(box, place.relative_path, place.offset, place.length))
    held = sum(math.prod(axis.stop - axis.start for axis in chunk.box) for chunk in chunks)
    if held != math.prod(shape):
        raise ModelFileError(
            f"{path} lists {held} of the {math.prod(shape)} values of {named}: a rank's files were not saved or lost"
            if held < math.prod(shape)
            else f"{path} lists {held} values of {named}, which has {math.prod(shape)}: parts overlap; save it again"
        )
    return TensorIndex(shape, entry.properties.dtype, tuple(chunks))


def _places(metadata: _Metadata, path: Path) -> dict[tuple[str, str], _Place]:
    """Return the file, offset and length of each chunk, by _place_key().

    If the index lists a chunk more than once, the last entry counts.
    """
    if not isinstance(metadata.storage_data, Mapping):
        raise UnsafePickleError(f"{path} does not say where its tensors are: it was not saved to a file system")
    places = {}
    for where, place in metadata.storage_data.items():
        if not isinstance(where, _ChunkName) or not isinstance(where.fqn, str) or not isinstance(place, _Place):
            raise UnsafePickleError(f"{path} lists {type(place).__name__} as a place: a file and an offset are wanted")
        if place.transform_descriptors:
            raise ModelFileError(
                f"{path} says {shown(where.fqn)} is stored through {shown(place.transform_descriptors)}: "
                "save it without extensions"
            )
        try:
            require_safe_name(place.relative_path)
        except UnsafeNameError as error:
            raise UnsafePickleError(f"{path} refers to a file outside of its directory: {error}") from error
        # This check limits the offset and the length to 63 bits. Their sum is compared with the file size later.
        size_of((place.offset, place.length))
        places[_place_key(where.fqn, size_of(where.offset or ()))] = place
    return places


def _place_key(name: str, start: tuple[int, ...]) -> tuple[str, str]:
    """Return the key of a chunk in the result of _places(): its tensor's name and its first index, as strings.

    A malicious file could contain integers whose hashes collide. It cannot do this with strings.
    """
    return name, ",".join(map(str, start))


class _Metadata(SimpleNamespace):
    """Replaces torch's class `Metadata` in the unpickled index. It has only the attributes that the pickle sets.

    The classes below replace other classes of torch.
    """


class _TensorEntry(SimpleNamespace): ...


class _ChunkEntry(SimpleNamespace): ...


class _ChunkName(SimpleNamespace):
    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__
    offset: Any = None


class _Place(SimpleNamespace):
    transform_descriptors: Any = None


class _Properties:
    """A replacement for torch's class of a tensor's properties. Only the tensor's type is read."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.dtype = state[0]
        if not isinstance(self.dtype, torch.dtype):
            raise TypeError(f"{shown(self.dtype)} is not the type of a tensor")


_MODULE = "torch.distributed.checkpoint.metadata"
_TRUSTED_IN_INDEX: dict[tuple[str, str], Any] = {
    ("builtins", "set"): Opaque,
    ("builtins", "frozenset"): Opaque,
    ("builtins", "getattr"): Opaque,
    ("collections", "OrderedDict"): ordered_dict,
    ("torch", "Size"): size_of,
    ("torch.serialization", "_get_layout"): Opaque,
    (_MODULE, "Metadata"): _Metadata,
    (_MODULE, "MetadataIndex"): _ChunkName,
    (_MODULE, "TensorStorageMetadata"): _TensorEntry,
    (_MODULE, "ChunkStorageMetadata"): _ChunkEntry,
    (_MODULE, "TensorProperties"): _Properties,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _Place,
    # the name of the module in older releases of torch
    ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"): _Properties,
    **_DTYPES,
}
