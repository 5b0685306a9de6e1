"""The weights of one rank: their source, those in use, and those staged to replace them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from megatron_kernels.cpu.switches import Switch, is_on
from megatron_runtime.backends.native.memory import require_memory as require_host_memory
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
from megatron_runtime.models.layers.linear import LinearFactory
from megatron_runtime.models.tensors import num_expert_parameters, num_parameters
from megatron_runtime.models.weights import load_weights


@dataclass(frozen=True, slots=True)
class _Staged:
    source: ModelSource
    weights: DecoderWeights
    signature: Signature


class WeightStore:
    """Verifies weights while it reads them; unverified weights are never used.

    stage() may run during a step, on another thread; everything else belongs to the thread that runs the steps.

    source:  what load() reads.
    linears: makes the factory of the matrices; None keeps them dense, of type `dtype`.
    require_memory: called as require_memory(bytes, what=...) before weights are read; raises MemoryShortError.
    shard:   the part of the model that this rank holds; None means all of it.
    """

    def __init__(
        self,
        source: ModelSource,
        dtype: torch.dtype,
        linears: Callable[[], LinearFactory] | None = None,
        *,
        require_memory: Callable[..., None] = require_host_memory,
        shard: Shard | None = None,
    ) -> None:
        self.config = open_checkpoint(source).config
        self.source = source
        self.weights: DecoderWeights | None = None
        self._dtype = dtype
        self._linears = linears or LinearFactory
        self._require_memory = require_memory
        self._shard = shard or Shard()
        self._signature: Signature | None = None
        self._staged: _Staged | None = None

    @property
    def num_bytes(self) -> int:
        """Approximate size of the weights; of a part, its share of the whole model."""
        config, shard = self.config, self._shard
        of_experts = num_expert_parameters(config)
        values = num_parameters(config) - of_experts + of_experts // shard.expert_size
        return values * self._dtype.itemsize // (shard.tensor_size * shard.pipeline_size)

    @property
    def digest(self) -> str | None:
        """Digest of the last loaded weights."""
        return self._signature.digest if self._signature is not None else None

    def load(self) -> None:
        """Read the weights if they are missing. Released weights must not have changed meanwhile.

        Raises UnusableWeightsError, MemoryShortError, and the errors of opening a checkpoint.
        """
        if self.weights is not None:
            return
        weights, signature = self._read(self.source, self._signature, what="loading the weights")
        if self._signature is not None and signature.digest != self._signature.digest:
            raise UnusableWeightsError(
                f"the weights at {self.source} have digest {signature.digest[:12]}, those released had "
                f"{self._signature.digest[:12]}: restore the files, or update the weights under a new epoch"
            )
        self.weights, self._signature = weights, signature

    def release(self) -> None:
        """Release the weights in use and the staged ones."""
        self.weights = None
        self._staged = None

    def use_source(self, source: str) -> None:
        """Make load() read these weights from now on; only while none are loaded."""
        assert self.weights is None, "weights are in use: stage() and swap()"
        self.source = resolve(source)
        self._signature = None

    def stage(self, source: str) -> None:
        """Read and verify weights of the same model beside those in use. Raises as load() does."""
        self._staged = None
        found = resolve(source)
        self._staged = _Staged(found, *self._read(found, self._signature, what="staging the new weights"))

    def swap(self) -> None:
        """Use the staged weights from now on."""
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
        linears = self._linears()
        is_compiled = isinstance(linears, NativeLinears)
        expected = like.kinds if like is not None else None
        checkpoint = VerifiedCheckpoint(found, expected=expected, is_compiled=is_compiled)
        self._require_memory(self.num_bytes, what=what)
        threads = torch.get_num_threads() if is_compiled and is_on(Switch.PARALLEL_LOAD) else 1
        with _one_thread(), with_progress(checkpoint, what=what) as shown:
            weights = load_weights(shown, self._dtype, shard=self._shard, linears=linears, threads=threads)
        if isinstance(linears, NativeLinears):
            linears.settle()
        return weights, checkpoint.signature()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Run each torch operation on one thread: loading is thousands of short operations, and a barrier after each costs
    more than the second thread saves (2.9 s of CPU time on two threads, 0.4 s on one, for a quantised 135M model).
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
