"""Defines `GPTInferenceWrapper`, under the module path that the class has in Megatron-Core."""

from __future__ import annotations

from typing import Any

import torch

from megatron_runtime.backends.native.cpu.executor import ForwardPass, forward
from megatron_runtime.backends.native.executor import StepPlan
from megatron_runtime.backends.native.torch_executor import ForwardStep
from megatron_runtime.models.decoder import DecoderModel


class GPTInferenceWrapper:
    """A causal language model that computes the steps of an engine on the CPU, one step at a time.

    By default the engine runs its model without a wrapper. Pass a subclass as `inference_wrapper_cls` of MegatronLLM to
    change how the model runs.

    model: a DecoderModel, or a GPTModel of Megatron-Core from which an engine is to be constructed.
    inference_context: the context of the engine.
    """

    def __init__(self, model: Any, inference_context: Any = None) -> None:
        self.model = model
        self.inference_context = inference_context

    def run_one_forward_step(self, plan: StepPlan, cache_LPXE: torch.Tensor) -> ForwardStep:
        """Compute the tokens of `plan`, write their keys and values to the cache, and return the ForwardStep."""
        return forward(self.model, plan, cache_LPXE)

    @classmethod
    def forward_of(cls, model: DecoderModel) -> ForwardPass:
        """Return the function that an executor calls to run `model`: run_one_forward_step() of a new wrapper."""
        return cls(model).run_one_forward_step
