"""Opens checkpoints of any format, validates the weights while they are read, and reports the progress.

Every weight must be finite. A signature identifies the weights of a checkpoint.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from math import prod
from pathlib import Path

import torch

from megatron_kernels.cpu.packing import PackedMatrix
from megatron_kernels.cpu.weight_validation import sum_and_finiteness, sum_and_finiteness_of_panels
from megatron_kernels.quantized import SCALES, QuantizedTensor
from megatron_runtime.checkpoints.gguf import GGUFCheckpoint
from megatron_runtime.checkpoints.packed import PackedCheckpoint
from megatron_runtime.checkpoints.safetensors import SafetensorsCheckpoint
from megatron_runtime.checkpoints.source import ModelInMemory, ModelSource, PublishedModel
from megatron_runtime.checkpoints.torch_dist.checkpoint import TorchDistCheckpoint
from megatron_runtime.models.config import ModelConfig
from megatron_runtime.models.tensors import Checkpoint, Part, TensorKind
from megatron_runtime.process.progress import PROGRESS, Stage

Kinds = Mapping[str, TensorKind]

_FORMATS: Mapping[str, Callable[[Path], Checkpoint]] = {
    "GGUF": GGUFCheckpoint,
    "SafeTensors": SafetensorsCheckpoint,
    "TorchDist": TorchDistCheckpoint,
    "Packed": PackedCheckpoint,
}
_WORD = 8


class UnusableWeightsError(ValueError):
    """Raised if weights must not be used. The message names the tensor or field, its value and the expected value."""


def open_checkpoint(source: ModelSource) -> Checkpoint:
    """Return the checkpoint at `source`. The caller must close it after the last read.

    Raises UnsupportedModelError and the errors of the source's format. For a trainer's weights, raises
    WeightsUnavailableError.
    """
    if isinstance(source, ModelInMemory):
        checkpoint: Checkpoint = source.reopen() if source.reopen is not None else source.checkpoint
        return checkpoint
    if isinstance(source, PublishedModel):
        # Imported here because loading from files does not need the connection code.
        from megatron_runtime.checkpoints.published import PublishedCheckpoint

        return PublishedCheckpoint(source.source, config=source.config, keys_dir=source.keys_dir)
    return _FORMATS[source.format](source.path)


@dataclass(frozen=True, slots=True)
class Signature:
    """A description of a model's weights, by which equal weights are recognised.

    kinds:  shape and type of each tensor.
    digest: digest of the names, shapes, types and values. Reading a file whole or in parts gives the same digest.
    """

    kinds: Kinds
    digest: str


class VerifiedCheckpoint(Checkpoint):
    """A wrapper of a checkpoint that validates the tensors while they are read.

    read(), blocks() and panels() raise UnusableWeightsError at the first tensor with a value that is not finite.
    Several threads can read different tensors at the same time.

    uses_kernels:  whether the CPU kernels validate quantized blocks.
    checks_values: whether to check tensors that are not quantized. False if the caller checks these tensors.

    The constructor reads no tensor. It raises UnusableWeightsError if names, shapes or types differ from `expected`.
    """

    on_read: Callable[[int], None] | None = None
    """Called after each read with the number of values that were read."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        expected: Kinds | None = None,
        uses_kernels: bool = False,
        checks_values: bool = True,
    ) -> None:
        self._checkpoint = checkpoint
        self._checks_values = checks_values
        self._uses_kernels = uses_kernels
        # For each tensor, the sum of its 8-byte words, computed at memory bandwidth, and the remaining bytes. If a
        # tensor is read in parts, its sum is the same as long as the size of every part except the last is a multiple
        # of 8 bytes.
        self._sums: dict[str, tuple[int, bytes]] = {}
        if expected is not None:
            _require_kinds(checkpoint.kinds, expected)
        self.config = checkpoint.config
        self.kinds = checkpoint.kinds
        self.panels_of = checkpoint.panels_of

    def signature(self) -> Signature:
        """Return the signature of the tensors read so far.

        If the same parts of two equal files were read, the digests of the two signatures are equal.
        """
        lines = (
            f"{name} {kind.shape} {kind.dtype} {self._sums.get(name)}" for name, kind in sorted(self.kinds.items())
        )
        return Signature(self.kinds, hashlib.sha256("\n".join(lines).encode()).hexdigest())

    def read(self, name: str, part: Part = ()) -> torch.Tensor:
        # Validate quantized blocks in their stored form, which takes a fraction of the bytes of their values.
        stored = self.blocks(name, part, wanted=SCALES)
        if stored is not None:
            return stored.dequantize()
        tensor = self._checkpoint.read(name, part)
        if self._checks_values and not is_finite(tensor):
            raise _not_finite(name)
        self._add(name, tensor, values=tensor.numel())
        return tensor

    def blocks(self, name: str, part: Part = (), *, wanted: Container[int]) -> QuantizedTensor | None:
        stored = self._checkpoint.blocks(name, part, wanted=wanted)
        if stored is not None:
            result = sum_and_finiteness(stored) if self._uses_kernels else None
            words, is_finite = result if result is not None else (None, stored.is_finite())
            if not is_finite:
                raise _not_finite(name)
            self._add(name, stored.blocks_NB, values=prod(stored.shape), words=words)
        return stored

    def panels(self, name: str, part: Part = (), *, wanted: Container[int]) -> PackedMatrix | None:
        stored = self._checkpoint.panels(name, part, wanted=wanted)
        if stored is not None:
            words, is_finite = sum_and_finiteness_of_panels(stored)
            if not is_finite:
                raise _not_finite(name)
            self._add(name, stored.data, values=stored.outputs * stored.inputs, words=words)
        return stored

    def _add(self, name: str, stored: torch.Tensor, *, values: int, words: int | None = None) -> None:
        """Record for signature() that a tensor or a part of the tensor was read.

        stored: the values or quantized blocks that were read.
        values: number of values in `stored`.
        words:  sum of the 8-byte words of `stored`; None means that this method computes the sum.
        """
        data = stored.detach().contiguous().reshape(-1).view(torch.uint8)
        end = len(data) // _WORD * _WORD
        if words is None:
            # Words must be aligned to their size, but a view of a file can begin at any address.
            aligned = data[:end] if data.data_ptr() % _WORD == 0 else data[:end].clone()
            words = int(aligned.view(torch.int64).sum())
        before, rest = self._sums.get(name, (0, b""))
        self._sums[name] = ((before + words) % (1 << 64), rest + bytes(data[end:].tolist()))
        if self.on_read is not None:
            self.on_read(values)


def is_finite(tensor: torch.Tensor) -> bool:
    """Return whether all values of a tensor are finite. The check runs on the tensor's device."""
    # A sum is finite only if all its terms are finite. If the sum is not finite, check each value, because the sum may
    # have overflowed.
    return bool(tensor.sum(dtype=torch.float32).isfinite()) or bool(tensor.isfinite().all())


@contextmanager
def with_progress(checkpoint: VerifiedCheckpoint, *, what: str) -> Iterator[VerifiedCheckpoint]:
    """Return a context that yields `checkpoint` and reports the progress of reading it.

    The reports go to the probes of this process and, if standard error is a terminal, to a progress bar.

    what: the label of the progress bar, such as "loading".
    """
    total = sum(prod(kind.shape) for kind in checkpoint.kinds.values())
    size = sum(prod(kind.shape) * kind.dtype.itemsize for kind in checkpoint.kinds.values())
    done = 0

    def report(values: int) -> None:
        nonlocal done
        done += values
        PROGRESS.report(Stage.LOAD, done * size // total, size)

    PROGRESS.report(Stage.LOAD, 0, size)
    checkpoint.on_read = report
    if not sys.stderr.isatty():
        yield checkpoint
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as bar:
        task = bar.add_task(what, total=total)

        def advance(values: int) -> None:
            report(values)
            bar.advance(task, values)

        checkpoint.on_read = advance
        yield checkpoint


def require_same_model(config: ModelConfig, *, wanted: ModelConfig) -> None:
    """Raise UnusableWeightsError if `config` describes another model than `wanted`.

    The message names the first size or constant that differs, with both values.
    """
    for field in fields(ModelConfig):
        given, own = getattr(config, field.name), getattr(wanted, field.name)
        if given != own:
            raise UnusableWeightsError(
                f"the new weights are of a model with {field.name} {given}, this engine runs one with {own}: "
                "a different model needs a new engine"
            )


def _require_kinds(kinds: Kinds, expected: Kinds) -> None:
    for name, kind in kinds.items():
        own = expected.get(name)
        if own is None:
            raise UnusableWeightsError(f"tensor {name!r} is not among the {len(expected)} tensors of the model in use")
        for what, given, wanted in (("shape", kind.shape, own.shape), ("type", kind.dtype, own.dtype)):
            if given != wanted:
                raise UnusableWeightsError(f"tensor {name!r} has {what} {given}, the model in use has {wanted}")
    missing = sorted(set(expected) - set(kinds))
    if missing:
        raise UnusableWeightsError(f"{len(missing)} tensors are missing, the first is {missing[0]!r}")


def _not_finite(name: str) -> UnusableWeightsError:
    return UnusableWeightsError(f"tensor {name!r} has values that are not finite: the weights are damaged")
