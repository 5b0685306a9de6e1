"""A forward pass on the CPU that draws its tokens like the executor for GPUs."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import torch

from megatron_kernels.operations import Sample
from megatron_runtime.backends.native.cuda.sampling import DeviceForwardStep, draw, rows_drawn_later
from megatron_runtime.backends.native.cuda.step_buffers import StepBuffers
from megatron_runtime.backends.native.executor import StepPlan
from megatron_runtime.backends.native.torch_executor import ForwardStep
from megatron_runtime.sampling.batch import SamplingBatch


def on_device(step: ForwardStep, batch: SamplingBatch, kernel: Sample, *, reports_raw: bool) -> DeviceForwardStep:
    """Return `step` in the form that the executor for GPUs returns: all rows are sampled, in the order of the plan."""
    count = len(step.sampled_rows)
    plan = StepPlan(
        token_ids=np.zeros(count, np.int32),
        positions=np.zeros(count, np.int32),
        query_lengths=np.ones(count, np.int32),
        context_lengths=np.ones(count, np.int32),
        block_tables=np.zeros((count, 1), np.int32),
        slot_mapping=np.zeros(count, np.int64),
        needs_sample=np.ones(count, np.bool_),
        sampling=batch,
    )
    buffers = StepBuffers(max_tokens=count, max_rows=count, max_pages=1, device=torch.device("cpu"))
    staged = buffers.stage(plan, later=rows_drawn_later(batch, plan.needs_sample, reports_raw=reports_raw))
    tokens_B, log_probs_B = draw(kernel, step.logits_BV, staged.step)
    return DeviceForwardStep(
        **{field.name: getattr(step, field.name) for field in fields(ForwardStep)},
        staged=staged,
        at=np.arange(count),
        kernel=kernel,
        tokens_B=tokens_B,
        log_probs_B=log_probs_B,
        read_tokens=tokens_B.numpy,
    )
