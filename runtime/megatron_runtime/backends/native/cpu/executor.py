"""An executor that runs a model on the CPU, in compiled steps where they exist, else in torch operators."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Unpack

import torch

from megatron_runtime.backends.native.cpu.forward import forward, lay_out, logits_of_step
from megatron_runtime.backends.native.executor import StepPlan
from megatron_runtime.backends.native.memory import require_memory
from megatron_runtime.backends.native.micro_batches import MicroBatch
from megatron_runtime.backends.native.text import ModelText
from megatron_runtime.backends.native.torch_executor import ForwardStep, TorchExecutor, TorchOptions
from megatron_runtime.checkpoints.source import ModelSource
from megatron_runtime.distributed.groups import Groups
from megatron_runtime.models.batch_invariant import BatchInvariantDecoder, BatchInvariantLinears
from megatron_runtime.models.decoder import DecoderModel, DecoderWeights
from megatron_runtime.models.layers.cpu import select_numbers
from megatron_runtime.models.native_decoder import build_decoder

ForwardPass = Callable[[StepPlan, torch.Tensor], ForwardStep]


class CpuExecutor(TorchExecutor):
    """A TorchExecutor on the CPU.

    dtype:           "auto" (bfloat16 where the CPU computes in it, else float32), "float32", "bfloat16"; "int8" and
                     "int4" where steps run compiled.
    batch_invariant: use the operators whose float32 results do not depend on what runs beside a request.
    make_forward:    returns the forward pass of a model, in place of this module's own.
    """

    def __init__(
        self,
        source: ModelSource,
        controller: ModelText | None = None,
        *,
        kv_cache_memory: int,
        dtype: str = "auto",
        batch_invariant: bool = False,
        make_forward: Callable[[DecoderModel, torch.dtype], ForwardPass] | None = None,
        **options: Unpack[TorchOptions],
    ) -> None:
        self.model: DecoderModel | None = None
        self._is_batch_invariant = batch_invariant
        self._make_forward = make_forward
        self._run: ForwardPass | None = None
        if batch_invariant and dtype not in ("auto", "float32"):
            raise ValueError(f"dtype={dtype!r}: batch_invariant=True is for float32: use float32 or auto")
        numbers = select_numbers("float32" if batch_invariant else dtype)
        super().__init__(
            source,
            controller,
            device=torch.device("cpu"),
            dtype=numbers.activations,
            cache_dtype=numbers.cache,
            linears=BatchInvariantLinears if batch_invariant else numbers.linears,
            require_memory=require_memory,
            kv_cache_memory=kv_cache_memory,
            **options,
        )

    def _use_model(self, weights: DecoderWeights | None) -> None:
        self.model = self._run = None
        if weights is None:
            return
        config, groups = self.model_config, self._groups
        if self._is_batch_invariant:
            self.model = BatchInvariantDecoder(config, weights)
        else:
            shard = groups.shard if groups is not None else None
            self.model = build_decoder(config, weights, shard=shard, collectives=groups)
        if self._make_forward is not None:
            self._run = self._make_forward(self.model, self.dtype)

    def _forward(self, plan: StepPlan, cache_LPXE: torch.Tensor) -> ForwardStep:
        if self._run is not None:
            return self._run(plan, cache_LPXE)
        assert self.model is not None, "cache_LPXE is only there with the weights"
        return forward(self.model, plan, cache_LPXE, dtype=self.dtype)

    def _forward_part(
        self, plan: StepPlan, batch: MicroBatch, cache_LPXE: torch.Tensor, groups: Groups
    ) -> ForwardStep | None:
        model, shard, hidden = self.model, groups.shard, self.model_config.hidden_size
        assert model is not None, "cache_LPXE is only there with the weights"
        layout = lay_out(batch.plan, page_size=self.page_size, dtype=self.dtype, window=model.sliding_window)
        groups.begin(batch.tokens_of_experts)
        if shard.has_embedding:
            x_TD = model.embed(layout.token_ids_T)
        else:
            x_TD = groups.receive_from_previous_stage(len(layout.token_ids_T), hidden, dtype=self.dtype)
        x_TD = model.run_layers(x_TD, layout.positions_T, attention=layout.attention, cache_LPXE=cache_LPXE)
        if not shard.has_head:
            groups.send_to_next_stage(x_TD)
            return None
        return logits_of_step(model, layout, x_TD)

    def _trim_memory(self) -> None:
        """Only glibc must be asked: weights and cache are in no reference cycle, so the last reference frees them. A
        garbage collection would stop the heartbeats of an engine in a program with a large heap.
        """
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
