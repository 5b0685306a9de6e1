"""Open a checkpoint of any format, and show the progress of reading it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod

import torch

from megatron_kernels.quantized import QuantizedTensor
from megatron_runtime.checkpoints.gguf import GGUFCheckpoint
from megatron_runtime.checkpoints.safetensors import SafetensorsCheckpoint
from megatron_runtime.checkpoints.source import GGUFSource, ModelInMemory, ModelSource, TorchDistSource
from megatron_runtime.checkpoints.torch_dist.checkpoint import TorchDistCheckpoint
from megatron_runtime.models.config import ModelConfig
from megatron_runtime.models.tensors import Checkpoint, Part, TensorKind


def open_checkpoint(source: ModelSource) -> Checkpoint:
    """Return the checkpoint at `source`. Raises UnsupportedModelError and the errors of the format."""
    if isinstance(source, ModelInMemory):
        return source.checkpoint
    if isinstance(source, GGUFSource):
        return GGUFCheckpoint(source.path)
    if isinstance(source, TorchDistSource):
        return TorchDistCheckpoint(source.directory)
    return SafetensorsCheckpoint(source.directory)


def tensors(checkpoint: Checkpoint) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and the values of every tensor of `checkpoint`."""
    for name in checkpoint.kinds:
        yield name, checkpoint.read(name)


@contextmanager
def with_progress(checkpoint: Checkpoint, *, what: str) -> Iterator[Checkpoint]:
    """Yield `checkpoint` with a progress bar on standard error; unchanged if standard error is not a terminal.

    what: the label of the bar, such as "loading".
    """
    if not sys.stderr.isatty():
        yield checkpoint
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    total = sum(prod(kind.shape) for kind in checkpoint.kinds.values())
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield _Counted(checkpoint, lambda values: bar.advance(task, values))


@dataclass(frozen=True, slots=True)
class _Counted:
    """Implements Checkpoint; calls `count` with the number of values of each read."""

    checkpoint: Checkpoint
    count: Callable[[int], None]

    @property
    def config(self) -> ModelConfig:
        return self.checkpoint.config

    @property
    def kinds(self) -> Mapping[str, TensorKind]:
        return self.checkpoint.kinds

    def read(self, name: str, part: Part = ()) -> torch.Tensor:
        tensor = self.checkpoint.read(name, part)
        self.count(tensor.numel())
        return tensor

    def blocks(self, name: str, part: Part = (), *, wanted: Container[int]) -> QuantizedTensor | None:
        found = self.checkpoint.blocks(name, part, wanted=wanted)
        if found is not None:
            self.count(prod(found.shape))
        return found
