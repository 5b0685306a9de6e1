"""The weights of one rank: where they come from, in use, and staged to take their place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from megatron_kernels.cpu.switches import Switch, is_on
from megatron_runtime.backends.native.device import Device
from megatron_runtime.checkpoints.checkpoint import open_checkpoint, with_progress
from megatron_runtime.checkpoints.source import ModelSource, resolve
from megatron_runtime.checkpoints.verified import (
    Signature,
    UnusableWeightsError,
    VerifiedCheckpoint,
    require_same_model,
)
from megatron_runtime.distributed.shard import Shard
from megatron_runtime.models.decoder import DecoderWeights
from megatron_runtime.models.layers.compiled_linear import NativeLinears
from megatron_runtime.models.tensors import num_expert_parameters, num_parameters
from megatron_runtime.models.weights import load_weights


@dataclass(frozen=True, slots=True)
class _Staged:
    source: ModelSource
    weights: DecoderWeights
    signature: Signature


class WeightStore:
    """Weights are verified while they are read, and never used before.

    stage() may run beside a step, in another thread; all else belongs to the thread that runs the steps.

    source: what load() reads.
    device: where they go.
    shard:  which part of it.
    """

    def __init__(self, source: ModelSource, dtype: torch.dtype, device: Device, *, shard: Shard | None = None) -> None:
        self.config = open_checkpoint(source).config
        self._shard = shard or Shard()
        self.source = source
        self.weights: DecoderWeights | None = None
        self._dtype = dtype
        self._device = device
        self._signature: Signature | None = None
        self._staged: _Staged | None = None

    @property
    def num_bytes(self) -> int:
        """About: of a part, its share of the whole model."""
        config, shard = self.config, self._shard
        of_experts = num_expert_parameters(config)
        values = num_parameters(config) - of_experts + of_experts // shard.expert_size
        return values * self._dtype.itemsize // (shard.tensor_size * shard.pipeline_size)

    @property
    def digest(self) -> str | None:
        """Of the weights that were loaded last."""
        return self._signature.digest if self._signature is not None else None

    def load(self) -> None:
        """Read the weights, if they are not there. What was in use before must not have changed on its way.

        Raises UnusableWeightsError, MemoryShortError, and the errors of opening a checkpoint.
        """
        if self.weights is not None:
            return
        weights, signature = self._read(self.source, self._signature, what="loading the weights")
        if self._signature is not None and signature.digest != self._signature.digest:
            raise UnusableWeightsError(
                f"the weights at {self.source} have digest {signature.digest[:12]}, those given back had "
                f"{self._signature.digest[:12]}: restore the files, or update the weights under a new epoch"
            )
        self.weights, self._signature = weights, signature

    def release(self) -> None:
        """Let go of the weights in use and of staged ones."""
        self.weights = None
        self._staged = None

    def use_source(self, source: str) -> None:
        """load() reads these from now on; only while no weights are there."""
        assert self.weights is None, "weights are in use: stage() and swap()"
        self.source = resolve(source)
        self._signature = None

    def stage(self, source: str) -> None:
        """Read and verify weights beside those in use; they must be of the same model. Raises as load() does."""
        self._staged = None
        found = resolve(source)
        self._staged = _Staged(found, *self._read(found, self._signature, what="staging the new weights"))

    def swap(self) -> None:
        """What was staged is in use from here on."""
        if self._staged is None:
            raise RuntimeError("swap_weights() without staged weights: stage_weights() first")
        self.source, self.weights, self._signature = self._staged.source, self._staged.weights, self._staged.signature
        self._staged = None

    def drop_staged(self) -> None:
        self._staged = None

    @torch.inference_mode()
    def _read(self, source: ModelSource, like: Signature | None, *, what: str) -> tuple[DecoderWeights, Signature]:
        found = open_checkpoint(source)
        require_same_model(found.config, wanted=self.config)
        linears = self._device.linears(self._dtype)
        is_compiled = isinstance(linears, NativeLinears)
        expected = like.kinds if like is not None else None
        checkpoint = VerifiedCheckpoint(found, expected=expected, is_compiled=is_compiled)
        self._device.require_memory(self.num_bytes, what=what)
        threads = torch.get_num_threads() if is_compiled and is_on(Switch.PARALLEL_LOAD) else 1
        with _one_thread(), with_progress(checkpoint, what=what) as shown:
            weights = load_weights(shown, self._dtype, shard=self._shard, linears=linears, threads=threads)
        if isinstance(linears, NativeLinears):
            linears.settle()
        return weights, checkpoint.signature()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Of each operation. Loading is thousands of short ones: threads that meet after each cost more than they give.

    Measured with 135M quantised weights on two busy processors: 2.9 s of processor time on two threads, 0.4 on one.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
