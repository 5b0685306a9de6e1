"""Validate weights while they are read: every value must be finite, and a signature identifies them."""

from __future__ import annotations

import hashlib
from collections.abc import Container, Mapping
from dataclasses import dataclass, fields

import torch

from megatron_kernels.cpu.weight_validation import sum_and_finiteness
from megatron_kernels.quantized import SCALES, QuantizedTensor
from megatron_runtime.models.config import ModelConfig
from megatron_runtime.models.tensors import Checkpoint, Part, TensorKind

Kinds = Mapping[str, TensorKind]

_WORD = 8


class UnusableWeightsError(ValueError):
    """The weights must not be used. The message names the tensor or field, its value and the expected value."""


@dataclass(frozen=True, slots=True)
class Signature:
    """kinds: shape and type of each tensor. digest: of names, kinds and values.

    Equal files have equal digests, whether they are read whole or piece by piece.
    """

    kinds: Kinds
    digest: str


@dataclass(frozen=True, slots=True)
class _Sum:
    """The sum of the 8-byte words of a tensor, computed at memory bandwidth, and the bytes after them.

    A tensor that is read in pieces has the same sum if the size of every piece but the last is a multiple of 8 bytes.
    """

    words: int = 0
    rest: bytes = b""

    def plus(self, tensor: torch.Tensor, *, words: int | None = None) -> _Sum:
        """Return the sum with `tensor` added. words: the sum of its words, if known."""
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        end = len(data) // _WORD * _WORD
        if words is None:
            # Words need an address that is a multiple of their size; a view of a file may begin at any address.
            aligned = data[:end] if data.data_ptr() % _WORD == 0 else data[:end].clone()
            words = int(aligned.view(torch.int64).sum())
        return _Sum((self.words + words) % (1 << 64), self.rest + bytes(data[end:].tolist()))


class VerifiedCheckpoint:
    """Implements Checkpoint over another, and validates what is read.

    read() and blocks() raise UnusableWeightsError at the first tensor with a value that is not finite. Several threads
    may read different tensors.

    is_compiled: blocks are validated by the compiled kernel.

    Raises UnusableWeightsError if the tensors are not those of `expected`, before any is read.
    """

    def __init__(self, checkpoint: Checkpoint, *, expected: Kinds | None = None, is_compiled: bool = False) -> None:
        self._checkpoint = checkpoint
        self._is_compiled = is_compiled
        self._sums: dict[str, _Sum] = {}
        if expected is not None:
            _require_kinds(checkpoint.kinds, expected)

    @property
    def config(self) -> ModelConfig:
        return self._checkpoint.config

    @property
    def kinds(self) -> Kinds:
        return self._checkpoint.kinds

    def signature(self) -> Signature:
        """Return the signature of what was read so far: the same parts of equal files have equal digests."""
        kinds = self.kinds
        lines = (
            f"{name} {kind.shape} {kind.dtype} {self._sums.get(name, _Sum())}" for name, kind in sorted(kinds.items())
        )
        return Signature(kinds, hashlib.sha256("\n".join(lines).encode()).hexdigest())

    def read(self, name: str, part: Part = ()) -> torch.Tensor:
        # Blocks are validated as they are stored: they have a fraction of the bytes of their values.
        stored = self.blocks(name, part, wanted=SCALES)
        if stored is not None:
            return stored.dequantize()
        tensor = self._checkpoint.read(name, part)
        # A sum is finite only if all its terms are. If the sum itself overflows, each value is checked.
        if not torch.isfinite(tensor.sum(dtype=torch.float32)) and not torch.isfinite(tensor).all():
            raise _not_finite(name)
        self._add(name, tensor)
        return tensor

    def blocks(self, name: str, part: Part = (), *, wanted: Container[int]) -> QuantizedTensor | None:
        stored = self._checkpoint.blocks(name, part, wanted=wanted)
        if stored is not None:
            found = sum_and_finiteness(stored) if self._is_compiled else None
            words, is_finite = found if found is not None else (None, stored.is_finite())
            if not is_finite:
                raise _not_finite(name)
            self._add(name, stored.blocks_NB, words=words)
        return stored

    def _add(self, name: str, tensor: torch.Tensor, *, words: int | None = None) -> None:
        self._sums[name] = self._sums.get(name, _Sum()).plus(tensor, words=words)


def require_same_model(config: ModelConfig, *, wanted: ModelConfig) -> None:
    """Raise UnusableWeightsError naming the first size or constant in which `config` differs, with both values."""
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
