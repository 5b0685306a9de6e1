"""A bar on the terminal while weights are read."""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from megatron_runtime.checkpoints.checkpoint import Checkpoint, Part, TensorKind

if TYPE_CHECKING:
    import torch

    from megatron_kernels.quantized import QuantizedTensor
    from megatron_runtime.models.config import ModelConfig


@contextmanager
def with_progress(checkpoint: Checkpoint, *, what: str) -> Iterator[Checkpoint]:
    """`checkpoint`, whose reads move a bar on standard error; unchanged where that is no terminal.

    what: says the bar, such as "loading".
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
    """Implements Checkpoint; `count` is told how many values were read."""

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
