"""Read any part of any tensor of a Megatron-Core checkpoint from the mapped files, and write such a checkpoint."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby, product
from operator import attrgetter
from pathlib import Path

import torch

from megatron_runtime.checkpoints.model_files import ModelFileError
from megatron_runtime.checkpoints.source import LATEST_FILE, RELEASE
from megatron_runtime.checkpoints.torch_dist.configuration import COMMON_FILE, arguments_of, read_config
from megatron_runtime.checkpoints.torch_dist.names import (
    EMBEDDING,
    HEAD,
    Stored,
    find_layout,
    layout_for,
    pieces,
    stored_tensors,
)
from megatron_runtime.checkpoints.torch_dist.saved_files import (
    METADATA_FILE,
    Chunk,
    SavedTensor,
    TensorIndex,
    find_tensor,
    read_index,
)
from megatron_runtime.models.config import UnsupportedModelError
from megatron_runtime.models.families import FAMILIES
from megatron_runtime.models.tensors import Checkpoint, Part, TensorKind
from megatron_runtime.protocol.text import escaped, shown

_TRAINING_PREFIXES = ("optimizer.", "chained_", "rng_state", "rerun_state_machine_state", "opt_param_scheduler")
_MAX_PLACES = 1 << 20
"""Limit of the number of indices on the leading axes that the chunks of one stored tensor cover."""

_DATA_FILE = "__0_0.distcp"
_FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
_CHECKPOINT_VERSION = 3.0
_DCP_VERSION = "1.0.0"


class TorchDistCheckpoint(Checkpoint):
    """The constructor reads the index and rejects missing and unknown tensors and wrong shapes.

    directory: has `.metadata`.

    Raises UnsupportedModelError, ModelFileError, UnsafePickleError.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        index, self._files = read_index(directory)
        weights = {key for key in index if not key.startswith(_TRAINING_PREFIXES) and not key.endswith("._extra_state")}
        layout = find_layout(weights)
        self.config = read_config(directory)
        stored = stored_tensors(self.config, layout)
        if self.config.tie_embeddings:
            # Some programs save a head although it is tied to the embedding.
            weights.discard(layout.prefix + HEAD)
        _require_fit(stored, index, weights, directory)
        hf_name = FAMILIES[self.config.family].hf_name
        self._pieces = {hf_name(piece.name): piece for piece in pieces(self.config, layout)}
        self._chunks = {key: _chunks_by_place(index[key], axes=len(tensor.grid)) for key, tensor in stored.items()}
        self._saved: dict[Chunk, SavedTensor] = {}
        self.kinds = {name: TensorKind(piece.shape, index[piece.key].dtype) for name, piece in self._pieces.items()}

    def read(self, name: str, part: Part = ()) -> torch.Tensor:
        """Return a copy of the tensor, or of a part of it."""
        piece, dtype = self._pieces[name], self.kinds[name].dtype
        cuts = (*part, *(slice(None) for _ in piece.shape[len(part) :]))
        wanted = [range(extent)[cut] for extent, cut in zip(piece.shape, cuts, strict=True)]
        out = torch.empty(*map(len, wanted), dtype=dtype)
        out_bytes = out.view(torch.uint8).view(*out.shape, dtype.itemsize)
        filled = at = 0
        for first, count in piece.rows:
            # In the stored tensor, these rows of the piece begin `shift` rows later.
            shift, rows = first - at, _overlap(wanted[0], range(at, at + count))
            at += count
            box = (range(rows.start + shift, rows.stop + shift), *wanted[1:])
            origin = (wanted[0].start + shift, *(axis.start for axis in wanted[1:]))
            for chunk in self._chunks[piece.key].get(piece.index, ()) if rows else ():
                held = chunk.box[len(piece.index) :]
                common = [_overlap(axis, other) for axis, other in zip(box, held, strict=True)]
                if all(common):
                    source = self._values(chunk, piece.index, dtype)[_slices(common, [axis.start for axis in held])]
                    out_bytes[_slices(common, origin)] = source
                    filled += source.numel()
        if filled != out.nbytes:
            raise ModelFileError(
                f"{self._directory} holds {filled} of the {out.nbytes} bytes of {name!r}: a part was not saved"
            )
        return out

    def _values(self, chunk: Chunk, index: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return the bytes of a chunk at one index of the leading axes, a last axis for those of each value.

        Raises ModelFileError for another type.
        """
        file = self._files[chunk.file]
        if chunk not in self._saved:
            saved = find_tensor(file.file, offset=chunk.offset, length=chunk.length)
            shape = tuple(map(len, chunk.box))
            if (saved.shape, saved.dtype) != (shape, dtype):
                raise ModelFileError(
                    f"{file.file.path} at byte {chunk.offset} has shape {saved.shape} and type {saved.dtype}, "
                    f"the index says {shape} and {dtype}"
                )
            self._saved[chunk] = saved
        place = tuple(at - axis.start for at, axis in zip(index, chunk.box, strict=False))
        return self._saved[chunk].bytes_in(file)[place]


def _overlap(one: range, other: range) -> range:
    start = max(one.start, other.start)
    return range(start, max(start, min(one.stop, other.stop)))


def _slices(box: Sequence[range], origin: Sequence[int]) -> tuple[slice, ...]:
    """Return the slices that select `box` in a tensor whose first value is at `origin`."""
    return tuple(slice(axis.start - first, axis.stop - first) for axis, first in zip(box, origin, strict=True))


def _chunks_by_place(index: TensorIndex, *, axes: int) -> dict[tuple[int, ...], list[Chunk]]:
    """Return the chunks of a stored tensor by index on the leading axes; a chunk may span several indices."""
    found: dict[tuple[int, ...], list[Chunk]] = {}
    count = 0
    for chunk in index.chunks:
        count += math.prod(map(len, chunk.box[:axes]))
        if count > _MAX_PLACES:
            raise ModelFileError(f"a tensor has more than {_MAX_PLACES} parts: save the checkpoint again")
        for place in product(*chunk.box[:axes]):
            found.setdefault(place, []).append(chunk)
    return found


def _require_fit(
    stored: Mapping[str, Stored], index: Mapping[str, TensorIndex], weights: set[str], directory: Path
) -> None:
    missing, extra = sorted(set(stored) - weights), sorted(weights - set(stored))
    if missing or extra:
        lists = [
            f"{what} {len(keys)}: {', '.join(map(escaped, keys[:6]))}"
            for what, keys in (("lacks", missing), ("has", extra))
            if keys
        ]
        raise UnsupportedModelError(
            f"{directory} does not hold the model its configuration describes; of its {len(stored)} tensors it "
            f"{'; beside them it '.join(lists)}: correct config.json or the arguments, or save the model again"
        )
    for key, wanted in stored.items():
        shape = index[key].shape
        is_padded = key.endswith((EMBEDDING, HEAD)) and len(shape) == 2 and shape[0] > wanted.shape[0]
        if shape != wanted.shape and not (is_padded and shape[1] == wanted.shape[1]):
            raise UnsupportedModelError(
                f"tensor {shown(key)} of {directory} has shape {shape}: "
                f"the model's configuration asks for {wanted.shape}"
            )
        if not index[key].dtype.is_floating_point:
            raise UnsupportedModelError(
                f"tensor {key!r} of {directory} has type {index[key].dtype}: want floating point"
            )


def write_torch_dist(checkpoint: Checkpoint, directory: Path, *, written: Callable[[int], None]) -> None:
    """Write `checkpoint` to `directory`, which exists and is empty, in the format that Megatron-LM loads.

    One chunk of one stored tensor is in memory at a time: torch's own writer keeps a reference to every tensor. The
    index is written last, so that an incomplete directory cannot be mistaken for a checkpoint.

    written: called with the number of bytes of each chunk written.

    Raises UnsupportedModelError for a model that Megatron-LM cannot describe.
    """
    # This import takes half a second.
    from torch.distributed.checkpoint import filesystem
    from torch.distributed.checkpoint import metadata as dcp

    config = checkpoint.config
    arguments, layout = arguments_of(config), layout_for(config)
    stored = stored_tensors(config, layout)
    found = sorted(pieces(config, layout), key=attrgetter("index", "key"))
    names = {piece.name: FAMILIES[config.family].hf_name(piece.name) for piece in found}
    types: dict[str, torch.dtype] = {}
    for piece in found:
        own = checkpoint.kinds[names[piece.name]].dtype
        types[piece.key] = torch.promote_types(types.get(piece.key, own), own)
    tensors = {
        key: dcp.TensorStorageMetadata(dcp.TensorProperties(dtype=types[key]), torch.Size(tensor.shape), [])
        for key, tensor in stored.items()
    }
    places: dict[dcp.MetadataIndex, filesystem._StorageInfo] = {}
    release = directory / RELEASE
    release.mkdir()
    with (release / _DATA_FILE).open("wb") as file:
        for (index, key), group in groupby(found, key=attrgetter("index", "key")):
            values = torch.empty(stored[key].cell, dtype=types[key])
            for piece in group:
                tensor, at = checkpoint.read(names[piece.name]), 0
                for first, count in piece.rows:
                    values[first : first + count] = tensor[at : at + count]
                    at += count
            chunk = values.view(*(1 for _ in index), *values.shape)
            start, offset = torch.Size((*index, *(0 for _ in values.shape))), file.tell()
            torch.save(chunk, file)
            entry = tensors[key]
            place = dcp.MetadataIndex(key, start, len(entry.chunks))
            places[place] = filesystem._StorageInfo(_DATA_FILE, offset, file.tell() - offset)
            entry.chunks.append(dcp.ChunkStorageMetadata(start, chunk.shape))
            written(values.nbytes)
    common = {"args": arguments, "checkpoint_version": _CHECKPOINT_VERSION, "iteration": 0}
    torch.save(common, release / COMMON_FILE)
    (release / "metadata.json").write_text(json.dumps(_FORMAT))
    metadata = dcp.Metadata(
        state_dict_metadata=dict(tensors),
        planner_data={key: (key,) for key in tensors},
        storage_data=places,
        storage_meta=dcp.StorageMeta(),
        version=_DCP_VERSION,
    )
    with (release / METADATA_FILE).open("wb") as file:
        pickle.dump(metadata, file)
    (directory / LATEST_FILE).write_text(RELEASE)
