"""Write a model as a Megatron-Core checkpoint: torch.distributed.checkpoint files with the arguments beside them."""

from __future__ import annotations

import json
import math
import pickle
from argparse import Namespace
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as dcp

from megatron_runtime.checkpoints.source import LATEST_FILE, RELEASE
from megatron_runtime.checkpoints.torch_dist.configuration import COMMON_FILE, arguments_of
from megatron_runtime.checkpoints.torch_dist.names import layout_for, pieces, stored_tensors
from megatron_runtime.checkpoints.torch_dist.saved_files import METADATA_FILE
from megatron_runtime.models.families import FAMILIES
from megatron_runtime.models.tensors import Checkpoint

_FORMAT = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
_COMMON_FORMAT = {"common_backend": "torch", "common_backend_version": 1}
_CHECKPOINT_VERSION = 3.0
_DCP_VERSION = "1.0.0"
_FILE_BYTES = 4 << 30
"""A new file begins when a file has this size."""


def write_torch_dist(checkpoint: Checkpoint, directory: Path, *, written: Callable[[int], None]) -> None:
    """Write `checkpoint` to `directory`, which exists and is empty, in the form that Megatron-LM loads.

    One part of one stored tensor is in memory at a time.

    written: called with the number of bytes of each part written.

    Raises UnsupportedModelError for a model that Megatron-LM cannot describe.
    """
    config = checkpoint.config
    arguments, layout = arguments_of(config), layout_for(config)
    stored = stored_tensors(config, layout)
    found = list(pieces(config, layout))
    names = {piece.name: FAMILIES[config.family].hf_name(piece.name) for piece in found}
    types: dict[str, torch.dtype] = {}
    for piece in found:
        own = checkpoint.kinds[names[piece.name]].dtype
        types[piece.key] = torch.promote_types(types.get(piece.key, own), own)
    release = directory / RELEASE
    release.mkdir()
    with _Writer(release) as writer:
        found.sort(key=lambda piece: (piece.index, piece.key))
        for (index, key), group in groupby(found, key=lambda piece: (piece.index, piece.key)):
            part = torch.empty(stored[key].cell, dtype=types[key])
            for piece in group:
                tensor, at = checkpoint.read(names[piece.name]), 0
                for first, count in piece.rows:
                    part[first : first + count] = tensor[at : at + count]
                    at += count
            start = (*index, *(0 for _ in part.shape))
            writer.add(key, part.view(*(1 for _ in index), *part.shape), shape=stored[key].shape, start=start)
            written(part.nbytes)
        writer.finish(arguments)
    (directory / LATEST_FILE).write_text(RELEASE)


class _Writer:
    """Writes parts to files. Without finish() there is no index, so the files cannot be mistaken for a checkpoint.

    directory: exists and is empty.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._file: BinaryIO | None = None
        self._files = 0
        self._tensors: dict[str, dcp.TensorStorageMetadata] = {}
        self._places: dict[dcp.MetadataIndex, filesystem._StorageInfo] = {}

    def __enter__(self) -> _Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def add(self, key: str, part: torch.Tensor, *, shape: tuple[int, ...], start: tuple[int, ...]) -> None:
        """Write the box of tensor `key` that begins at `start`. shape: of the whole tensor."""
        file = self._open()
        offset = file.tell()
        # torch.save() writes the whole storage of a view.
        whole = part.numel() * part.element_size() == part.untyped_storage().nbytes()
        torch.save(part if whole and part.is_contiguous() else part.clone(memory_format=torch.contiguous_format), file)
        entry = self._tensors.get(key)
        if entry is None:
            properties = dcp.TensorProperties(dtype=part.dtype)
            entry = self._tensors[key] = dcp.TensorStorageMetadata(properties, torch.Size(shape), [])
        index = dcp.MetadataIndex(key, torch.Size(start), len(entry.chunks))
        entry.chunks.append(dcp.ChunkStorageMetadata(torch.Size(start), part.shape))
        self._places[index] = filesystem._StorageInfo(Path(file.name).name, offset, file.tell() - offset)

    def finish(self, arguments: Namespace) -> None:
        """Write the index and what Megatron-LM reads beside it: the arguments and the format."""
        self._close()
        for key, entry in self._tensors.items():
            held = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
            assert held == math.prod(entry.size), f"{key}: {held} of {math.prod(entry.size)} values were added"
        common = {"args": arguments, "checkpoint_version": _CHECKPOINT_VERSION, "iteration": 0}
        torch.save(common, self._directory / COMMON_FILE)
        (self._directory / "metadata.json").write_text(json.dumps({**_FORMAT, **_COMMON_FORMAT}))
        index = dcp.Metadata(
            state_dict_metadata=dict(self._tensors),
            planner_data={key: (key,) for key in self._tensors},
            storage_data=self._places,
            storage_meta=dcp.StorageMeta(),
            version=_DCP_VERSION,
        )
        with (self._directory / METADATA_FILE).open("wb") as file:
            pickle.dump(index, file)

    def _open(self) -> BinaryIO:
        if self._file is not None and self._file.tell() >= _FILE_BYTES:
            self._close()
        if self._file is None:
            self._file = (self._directory / f"__0_{self._files}.distcp").open("wb")
            self._files += 1
        return self._file

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
