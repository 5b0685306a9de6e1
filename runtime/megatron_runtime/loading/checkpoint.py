"""What a model loads from, whatever the file format: a configuration and a stream of named tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

from megatron_runtime.loading.source import GGUFSource, ModelInMemory, ModelSource

if TYPE_CHECKING:
    import torch

    from megatron_runtime.models.llama_config import LlamaConfig


class UnsupportedModelError(ValueError):
    """The files are readable but hold a model this runtime does not run. The message names what is not supported."""


class Checkpoint(Protocol):
    """One set of weights on disk. Making one reads headers only."""

    @property
    def config(self) -> LlamaConfig: ...

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor once, under its transformers name and in the layout of transformers."""
        ...


def open_checkpoint(source: ModelSource) -> Checkpoint:
    """Return the checkpoint at `source`. Raises UnsupportedModelError and the format's own error."""
    if isinstance(source, ModelInMemory):
        held: Checkpoint = source.checkpoint
        return held
    if isinstance(source, GGUFSource):
        from megatron_runtime.loading.gguf import GGUFCheckpoint

        return GGUFCheckpoint(source.path)
    from megatron_runtime.loading.safetensors import SafetensorsCheckpoint

    return SafetensorsCheckpoint(source.directory)
