"""Reads any part of any tensor of a Megatron-Core checkpoint from mapped files, and writes such checkpoints."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from itertools import groupby
from operator import attrgetter
from pathlib import Path

import torch

from megatron_runtime.checkpoints.model_files import ModelFileError
from megatron_runtime.checkpoints.source import LATEST_FILE, RELEASE
from megatron_runtime.checkpoints.torch_dist.chunked import ChunkedCheckpoint
from megatron_runtime.checkpoints.torch_dist.configuration import COMMON_FILE, arguments_of, read_config
from megatron_runtime.checkpoints.torch_dist.names import layout_for, pieces, stored_tensors
from megatron_runtime.checkpoints.torch_dist.saved_files import (
    METADATA_FILE,
    SavedChunk,
    SavedTensor,
    find_tensor,
    read_index,
)
from megatron_runtime.models.families import FAMILIES
from megatron_runtime.models.tensors import Checkpoint
from megatron_runtime.protocol import strict_json as json

_TRAINING_PREFIXES = ("optimizer.", "chained_", "rng_state", "rerun_state_machine_state", "opt_param_scheduler")
_DATA_FILE = "__0_0.distcp"
_FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
_CHECKPOINT_VERSION = 3.0
_DCP_VERSION = "1.0.0"


class TorchDistCheckpoint(ChunkedCheckpoint[SavedChunk]):
    """A Megatron-Core checkpoint in a directory.

    The constructor reads the index. It raises an error for missing tensors, unknown tensors and wrong shapes.

    directory: directory that contains `.metadata`.

    Raises UnsupportedModelError, ModelFileError or UnsafePickleError.
    """

    def __init__(self, directory: Path) -> None:
        index, self._files = read_index(directory)
        weights = {
            key: tensor
            for key, tensor in index.items()
            if not key.startswith(_TRAINING_PREFIXES) and not key.endswith("._extra_state")
        }
        self._saved: dict[SavedChunk, SavedTensor] = {}
        remedy = "correct config.json or the arguments, or save the model again"
        super().__init__(read_config(directory), weights, where=str(directory), remedy=remedy)

    def _values(self, chunk: SavedChunk, index: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
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

    def _incomplete(self, name: str, *, held: int, wanted: int) -> ModelFileError:
        return ModelFileError(f"{self._where} holds {held} of the {wanted} bytes of {name!r}: a part was not saved")


def write_torch_dist(checkpoint: Checkpoint, directory: Path, *, written: Callable[[int], None]) -> None:
    """Write `checkpoint` to the empty directory `directory`, in the format that Megatron-LM reads.

    Only one chunk of one stored tensor is in memory at a time, whereas torch's own writer keeps a reference to every
    tensor. The index is written last, so that no reader mistakes an incomplete directory for a checkpoint.

    written: called after each chunk, with the number of bytes of the chunk.

    Raises UnsupportedModelError for a model that Megatron-LM cannot describe.
    """
    # Imported here because this import takes 0.5 s.
    from torch.distributed.checkpoint import filesystem
    from torch.distributed.checkpoint import metadata as dcp

    config = checkpoint.config
    arguments, layout = arguments_of(config), layout_for(config)
    stored = stored_tensors(config, layout)
    placed = sorted(pieces(config, layout), key=attrgetter("index", "key"))
    names = {piece.name: FAMILIES[config.family].hf_name(piece.name) for piece in placed}
    types: dict[str, torch.dtype] = {}
    for piece in placed:
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
        for (index, key), group in groupby(placed, key=attrgetter("index", "key")):
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
