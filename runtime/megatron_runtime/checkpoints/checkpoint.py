"""What a model loads from, whatever the file format: a configuration and named tensors, read in any order."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from megatron_runtime.checkpoints.source import GGUFSource, ModelInMemory, ModelSource, TorchDistSource

if TYPE_CHECKING:
    import torch

    from megatron_kernels.quantized import QuantizedTensor
    from megatron_runtime.models.config import ModelConfig

Part = tuple[slice, ...]
"""A part of a tensor: one slice an axis, of step 1; axes without one are whole."""


class UnsupportedModelError(ValueError):
    """The files are readable but hold a model this runtime does not run. The message names what is not supported."""


@dataclass(frozen=True, slots=True)
class TensorKind:
    """dtype: of what read() gives; float32 for quantised tensors."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Checkpoint(Protocol):
    """One set of weights. Making one reads headers only, and refuses files that are cut short."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def kinds(self) -> Mapping[str, TensorKind]:
        """Every tensor, under its transformers name and in the layout of transformers. Experts are one by one."""

    def read(self, name: str, part: Part = ()) -> torch.Tensor:
        """Values of a tensor, or of a part of it. They may be a view of the file: copy what is kept, change nothing."""

    def blocks(self, name: str, part: Part = (), *, wanted: Container[int]) -> QuantizedTensor | None:
        """A quantised matrix as it is stored, also possibly a view of the file.

        wanted: GGML types. None if it is of no such type, or the part cuts through its blocks.
        """


def tensors(checkpoint: Checkpoint) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of `checkpoint`, whole."""
    for name in checkpoint.kinds:
        yield name, checkpoint.read(name)


def open_checkpoint(source: ModelSource) -> Checkpoint:
    """Return the checkpoint at `source`. Raises UnsupportedModelError and the format's own error."""
    if isinstance(source, ModelInMemory):
        held: Checkpoint = source.checkpoint
        return held
    if isinstance(source, GGUFSource):
        from megatron_runtime.checkpoints.gguf import GGUFCheckpoint

        return GGUFCheckpoint(source.path)
    if isinstance(source, TorchDistSource):
        from megatron_runtime.checkpoints.torch_dist.checkpoint import TorchDistCheckpoint

        return TorchDistCheckpoint(source.directory)
    from megatron_runtime.checkpoints.safetensors import SafetensorsCheckpoint

    return SafetensorsCheckpoint(source.directory)
