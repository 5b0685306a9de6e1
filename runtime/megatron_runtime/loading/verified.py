"""Weights that were looked at while they were read: every value finite, and a signature to compare files by."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields

import torch

from megatron_runtime.loading.checkpoint import Checkpoint
from megatron_runtime.models.llama_config import LlamaConfig

Kinds = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


class UnusableWeightsError(ValueError):
    """The weights must not be used. The message names the tensor or value, what it is and what was wanted."""


@dataclass(frozen=True, slots=True)
class Signature:
    """kinds: shape and type of each tensor. digest: of names, kinds and values; equal files have equal digests."""

    kinds: Kinds
    digest: str


class VerifiedCheckpoint:
    """Implements Checkpoint over another, and looks at each tensor on the way.

    Its signature is there once every tensor was read. tensors() raises UnusableWeightsError at the first value that is
    not finite, and at the first tensor that is not of the kind that `expected` has under its name.
    """

    def __init__(self, checkpoint: Checkpoint, *, expected: Kinds | None = None) -> None:
        self._checkpoint = checkpoint
        self._expected = expected
        self._signature: Signature | None = None

    @property
    def config(self) -> LlamaConfig:
        return self._checkpoint.config

    @property
    def signature(self) -> Signature:
        assert self._signature is not None, "read every tensor first"
        return self._signature

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        kinds: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        digests = {}
        for name, tensor in self._checkpoint.tensors():
            kinds[name] = (tuple(tensor.shape), tensor.dtype)
            if self._expected is not None:
                _require_kind(name, kinds[name], self._expected)
            _require_finite(name, tensor)
            digests[name] = _sum_of_bits(tensor)
            yield name, tensor
        missing = sorted(set(self._expected or ()) - set(kinds))
        if missing:
            raise UnusableWeightsError(f"{len(missing)} tensors are missing, the first is {missing[0]!r}")
        lines = "\n".join(f"{name} {kinds[name]} {digests[name]}" for name in sorted(kinds))
        self._signature = Signature(kinds, hashlib.sha256(lines.encode()).hexdigest())


def require_same_model(config: LlamaConfig, *, wanted: LlamaConfig) -> None:
    """Raise UnusableWeightsError naming the first size or constant in which `config` differs, with both values."""
    for field in fields(LlamaConfig):
        given, own = getattr(config, field.name), getattr(wanted, field.name)
        if given != own:
            raise UnusableWeightsError(
                f"the new weights are of a model with {field.name} {given}, this engine runs one with {own}: "
                "a different model needs a new engine"
            )


def _require_kind(name: str, kind: tuple[tuple[int, ...], torch.dtype], expected: Kinds) -> None:
    own = expected.get(name)
    if own is None:
        raise UnusableWeightsError(f"tensor {name!r} is not among the {len(expected)} tensors of the model in use")
    for what, given, wanted in zip(("shape", "type"), kind, own, strict=True):
        if given != wanted:
            raise UnusableWeightsError(f"tensor {name!r} has {what} {given}, the model in use has {wanted}")


def _require_finite(name: str, tensor: torch.Tensor) -> None:
    # A sum is finite only if all its terms are; one that overflows is looked at again, value by value.
    if not torch.isfinite(tensor.sum(dtype=torch.float32)) and not torch.isfinite(tensor).all():
        raise UnusableWeightsError(f"tensor {name!r} has values that are not finite: the weights are damaged")


def _sum_of_bits(tensor: torch.Tensor) -> tuple[int, bytes]:
    """The sum of its 8-byte words, as fast as memory is, and the bytes after them."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    words = len(data) // 8 * 8
    # Words need an address that is a multiple of 8: a view into a file may begin anywhere.
    aligned = data[:words] if data.data_ptr() % 8 == 0 else data[:words].clone()
    return int(aligned.view(torch.int64).sum()), bytes(data[words:].tolist())
