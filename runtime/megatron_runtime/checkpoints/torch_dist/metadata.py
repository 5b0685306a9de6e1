"""The index of a torch.distributed.checkpoint directory: which part of which tensor is where in which file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatron_runtime.checkpoints.inert_pickle import Opaque, UnsafePickleError, ordered_dict, read_pickle, size_of
from megatron_runtime.checkpoints.model_files import ModelDirectory, UnsafeNameError, require_safe_name
from megatron_runtime.checkpoints.quoting import shown
from megatron_runtime.checkpoints.torch_dist.archive import DTYPES, DamagedFileError

METADATA_FILE = ".metadata"

_KNOWN_PACKAGES = ("torch", "megatron", "pathlib", "collections", "io", "_io", "numpy")
"""What savers keep of their own in the index does nothing here; a name from anywhere else is refused."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor, as a range of each axis, and where it lies."""

    box: tuple[range, ...]
    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class TensorIndex:
    """A tensor of the files: its whole shape, and the chunks it is made of."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]


def read_index(directory: Path) -> dict[str, TensorIndex]:
    """Every tensor in `directory`, by key.

    Raises UnsafePickleError, and DamagedFileError where the index contradicts itself or the files, before any of them
    is opened: a file that is missing or cut short, a tensor of which a part is nowhere.
    """
    place, path = ModelDirectory(directory), directory / METADATA_FILE
    index_file = place.file(METADATA_FILE)
    if index_file is None:
        raise DamagedFileError(f"{path} is missing: copy the whole directory")
    with index_file.open() as file:
        found = read_pickle(file, where=str(path), trusted=_TRUSTED, opaque=_may_be_there)
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
        # Extents of 63 bits, not both of which can be as large: the sum is compared with the size of a file.
        size_of((place.offset, place.length))
        places[_place_key(where.fqn, size_of(where.offset or ()))] = place
    return places


def _place_key(name: str, start: tuple[int, ...]) -> tuple[str, str]:
    """Of strings, whose hashes a file cannot know: those of integers can be made to collide."""
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
    """Stands for a class of torch's that is nothing but its attributes; they come with the pickle."""

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
    """Of a tensor. What follows its type says where and how it lay in memory."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.dtype = state[0]
        if not isinstance(self.dtype, torch.dtype):
            raise TypeError(f"{shown(self.dtype)} is no type of a tensor")


_MODULE = "torch.distributed.checkpoint.metadata"
_TRUSTED: dict[tuple[str, str], Any] = {
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
    # Where older releases had it.
    ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"): _Properties,
    **{("torch", name): dtype for name, dtype in DTYPES.items()},
}
