"""Megatron-Core name: `GPTInferenceWrapper`."""

from __future__ import annotations

from typing import Any

import torch

from megatron_runtime.backends.native.cpu.executor import ForwardPass, forward
from megatron_runtime.backends.native.executor import StepPlan
from megatron_runtime.backends.native.torch_executor import ForwardStep
from megatron_runtime.models.decoder import DecoderModel


class GPTInferenceWrapper:
    """A causal language model that runs the plan of one engine step at a time, on the CPU.

    By default the engine runs its model without a wrapper. Pass a subclass as `inference_wrapper_cls` of MegatronLLM to
    change how the model runs.

    model: a DecoderModel, or a GPTModel of Megatron-Core to construct an engine with.
    inference_context: the context of the engine.
    """

    def __init__(self, model: Any, inference_context: Any = None) -> None:
        self.model = model
        self.inference_context = inference_context

    def run_one_forward_step(self, plan: StepPlan, cache_LPXE: torch.Tensor) -> ForwardStep:
        """Compute the tokens of the plan, and write their keys and values to the cache."""
        return forward(self.model, plan, cache_LPXE)

    @classmethod
    def forward_of(cls, model: DecoderModel) -> ForwardPass:
        """Return the forward pass for an executor whose model runs through this class."""
        return cls(model).run_one_forward_step
