"""Write tensors, part by part, as torch.distributed.checkpoint files with what Megatron-Core keeps beside them."""

from __future__ import annotations

import json
import math
import pickle
from argparse import Namespace
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as dcp

from megatron_runtime.checkpoints.torch_dist.configuration import COMMON_FILE
from megatron_runtime.checkpoints.torch_dist.metadata import METADATA_FILE

_FORMAT = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
_COMMON_FORMAT = {"common_backend": "torch", "common_backend_version": 1}
_CHECKPOINT_VERSION = 3.0
_DCP_VERSION = "1.0.0"
_FILE_BYTES = 4 << 30
"""A new file is begun once one is this large."""


class TorchDistWriter:
    """Holds one part at a time. Without finish() there is no index, so nothing can be taken for a checkpoint.

    directory: exists and is empty.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._file: BinaryIO | None = None
        self._files = 0
        self._tensors: dict[str, dcp.TensorStorageMetadata] = {}
        self._places: dict[dcp.MetadataIndex, filesystem._StorageInfo] = {}

    def __enter__(self) -> TorchDistWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def add(self, key: str, part: torch.Tensor, *, shape: tuple[int, ...], start: tuple[int, ...]) -> None:
        """Write the box of tensor `key` that begins at `start`. shape: of the whole tensor."""
        file = self._open()
        offset = file.tell()
        # A view would be saved with all the storage it is cut from.
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
