"""Hidden states are those of transformers, whatever runs beside the request, is cached or is cut into chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from megatron_runtime.backends.native.cpu.executor import CpuExecutor
from megatron_runtime.backends.native.engine import EngineCore
from megatron_runtime.checkpoints.source import resolve
from megatron_runtime.engine.engine_request import EngineRequest
from megatron_runtime.requests.config import InferenceConfig
from megatron_runtime.requests.sampling_params import IGNORE_EOS, InvalidSamplingParamsError, SamplingParams

MakeTiny = Callable[..., tuple[Path, nn.Module]]
PROMPTS = [np.random.default_rng(seed).integers(3, 320, length).tolist() for seed, length in enumerate([40, 1, 90, 17])]
TOLERANCE = 1e-4


def embed(executor: CpuExecutor, config: InferenceConfig, prompts: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """The hidden state after each prompt, while another request of each prompt generates tokens."""
    engine = EngineCore(executor, config)
    for index, prompt in enumerate(prompts):
        for number, params in (
            (index, SamplingParams(num_tokens_to_generate=1, termination_id=IGNORE_EOS, return_hidden_state=True)),
            (1000 + index, SamplingParams(num_tokens_to_generate=3, termination_id=IGNORE_EOS)),
        ):
            engine.add_request(EngineRequest(number, np.array(prompt, np.int32), np.empty(0, np.int32), params, seed=1))
    found: dict[int, np.ndarray] = {}
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            if output.request_id < 1000:
                assert output.hidden_state is not None
                found[output.request_id] = output.hidden_state
            else:
                assert output.hidden_state is None
    engine.check_integrity()
    return [found[index] for index in range(len(prompts))]


@torch.inference_mode()
def exact(reference: nn.Module, prompt: Sequence[int]) -> np.ndarray:
    """The last hidden state of transformers, after the last norm."""
    states: np.ndarray = reference.model(torch.tensor([prompt])).last_hidden_state[0, -1].numpy()
    return states


@pytest.mark.parametrize(
    "config",
    [{}, {"max_tokens": 7, "max_requests": 4, "enable_chunked_prefill": True}, {"enable_prefix_caching": False}],
    ids=["whole prompts", "chunks", "no prefix cache"],
)
@pytest.mark.parametrize("page_size", [16, 8], ids=["kernels", "torch"])
def test_a_hidden_state_is_that_of_transformers(make_tiny: MakeTiny, config: dict[str, Any], page_size: int) -> None:
    directory, reference = make_tiny()
    executor = CpuExecutor(resolve(str(directory)), dtype="float32", kv_cache_memory=8 << 20, page_size=page_size)
    executor.load()
    repeated = [*PROMPTS, PROMPTS[0], PROMPTS[2][:50]]
    for prompt, state in zip(repeated, embed(executor, InferenceConfig(**config), repeated), strict=True):
        assert state.dtype == np.float32
        np.testing.assert_allclose(state, exact(reference, prompt), atol=TOLERANCE)


def test_a_hidden_state_needs_exactly_one_token() -> None:
    for limit in ({}, {"num_tokens_to_generate": 2}, {"num_tokens_total": 9}):
        with pytest.raises(InvalidSamplingParamsError, match="num_tokens_to_generate=1"):
            SamplingParams(return_hidden_state=True, **limit)
