"""The weights of one rank: where they come from, in use, and staged to take their place."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_runtime.engines.memory import require_memory
from megatron_runtime.loading.checkpoint import open_checkpoint
from megatron_runtime.loading.source import ModelSource, resolve
from megatron_runtime.loading.verified import Signature, UnusableWeightsError, VerifiedCheckpoint, require_same_model
from megatron_runtime.models.llama import LlamaWeights
from megatron_runtime.models.llama_config import LlamaConfig
from megatron_runtime.models.llama_weights import load_llama_weights


@dataclass(frozen=True, slots=True)
class _Staged:
    source: ModelSource
    weights: LlamaWeights
    signature: Signature


class WeightStore:
    """Weights are verified while they are read, and never used before.

    stage() may run beside a step, in another thread; all else belongs to the thread that runs the steps.

    source: what load() reads.
    """

    def __init__(self, source: ModelSource, dtype: torch.dtype) -> None:
        self.config = open_checkpoint(source).config
        self.source = source
        self.weights: LlamaWeights | None = None
        self._dtype = dtype
        self._signature: Signature | None = None
        self._staged: _Staged | None = None

    @property
    def num_bytes(self) -> int:
        return _num_elements(self.config) * self._dtype.itemsize

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
    def _read(self, source: ModelSource, like: Signature | None, *, what: str) -> tuple[LlamaWeights, Signature]:
        checkpoint = VerifiedCheckpoint(open_checkpoint(source), expected=like.kinds if like is not None else None)
        require_same_model(checkpoint.config, wanted=self.config)
        require_memory(self.num_bytes, what=what)
        weights = load_llama_weights(checkpoint, self._dtype)
        return weights, checkpoint.signature


def _num_elements(config: LlamaConfig) -> int:
    hidden, feed = config.hidden_size, config.intermediate_size
    attention = hidden * config.head_dim * (2 * config.num_heads + 2 * config.num_kv_heads)
    layer = attention + 3 * hidden * feed + 2 * hidden
    tables = config.vocab_size * hidden * (1 if config.tie_embeddings else 2)
    return config.num_layers * layer + tables + hidden
