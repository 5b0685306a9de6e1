"""With batch_invariant, tokens and log-probabilities are the same to the bit, whatever ran beside a request."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from soak import SOAK
from torch import nn

from megatron_runtime.backends.native.build import build_native, select_executor
from megatron_runtime.backends.native.cpu.executor import CpuExecutor
from megatron_runtime.backends.text import ModelText
from megatron_runtime.checkpoints.source import resolve
from megatron_runtime.distributed.shard import ParallelSizes
from megatron_runtime.engine.engine_request import EngineRequest
from megatron_runtime.engine.settings import EngineSettings
from megatron_runtime.megatron_core.apis import MegatronLLM
from megatron_runtime.megatron_core.engines.dynamic_engine import DynamicInferenceEngine
from megatron_runtime.models.batch_invariant import (
    ROWS,
    BatchInvariantDecoder,
    BatchInvariantLinear,
    by_rows,
    equal_rows,
)
from megatron_runtime.models.layers.linear import Linear
from megatron_runtime.requests.config import InferenceConfig, KVCacheManagementMode
from megatron_runtime.requests.sampling_params import IGNORE_EOS, SamplingParams

MakeTiny = Callable[..., tuple[Path, nn.Module]]
Answer = tuple[list[int], list[float], list[float]]
"""Tokens, their log-probabilities, log-probabilities of the prompt."""


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("shape", [(100, 52), (576, 1536), (3072, 576)])
def test_a_row_of_a_product_has_the_same_bits_among_any_number_of_rows(shape: tuple[int, int], packed: bool) -> None:
    torch.manual_seed(0)
    linear = BatchInvariantLinear(torch.randn(shape), packed=packed)
    x_TK = torch.randn(150, shape[1])
    alone = torch.cat([linear(x_TK[row : row + 1]) for row in range(len(x_TK))])
    for start, stop in ((0, 150), (1, 150), (0, 64), (3, 10), (7, 40), (20, 149)):
        assert torch.equal(linear(x_TK[start:stop]), alone[start:stop])
    torch.testing.assert_close(alone, F.linear(x_TK, linear.dense()), atol=1e-3, rtol=1e-3)


def test_numbers_of_rows_that_differ_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def differs_below_8(x_RK: torch.Tensor) -> torch.Tensor:
        return x_RK * (1 if len(x_RK) >= 8 else 1.0001)

    def differs_by_place(x_RK: torch.Tensor) -> torch.Tensor:
        return x_RK * torch.linspace(1, 2, len(x_RK))[:, None]

    assert equal_rows(lambda x_RK: x_RK * 2, 16) == ROWS
    assert equal_rows(differs_below_8, 16) == (64, 32, 16, 8)
    assert equal_rows(differs_by_place, 16) == (1,)
    monkeypatch.setattr(Linear, "__call__", lambda _, x_RK: differs_below_8(x_RK))
    linear = BatchInvariantLinear(torch.randn(8, 16))
    x_TK = torch.randn(77, 16)
    assert torch.equal(linear(x_TK), x_TK)


@pytest.mark.parametrize("width", [100, 96, 1536, 8192])
def test_a_function_of_single_values_gives_each_row_the_same_bits(width: int) -> None:
    x_TF = torch.randn(90, 2 * width)[:, :width]
    whole = by_rows(F.silu, x_TF)
    assert torch.equal(whole, torch.cat([by_rows(F.silu, x_TF[row : row + 1]) for row in range(90)]))
    torch.testing.assert_close(whole, F.silu(x_TF))


def make_executor(model: str, *, kv_cache_memory: int) -> CpuExecutor:
    executor = CpuExecutor(resolve(model), kv_cache_memory=kv_cache_memory, threads=1, batch_invariant=True)
    executor.load()
    return executor


@pytest.fixture(scope="module")
def directory(make_tiny: MakeTiny) -> str:
    directory, _ = make_tiny(hidden_size=60, intermediate_size=100, num_attention_heads=6, num_key_value_heads=2)
    return str(directory)


@pytest.fixture(scope="module")
def tiny(directory: str) -> CpuExecutor:
    return make_executor(directory, kv_cache_memory=2 << 20)


KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 40},
    {"temperature": 0.9, "min_p": 0.05, "logit_bias": {7: 3.0, 9: -5.0}},
    {"temperature": 0.7, "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2},
]


def requests(count: int, *, vocabulary: int, longest: int, answer: int = 16) -> list[EngineRequest]:
    """Requests of several kinds, most of which begin alike."""
    random = np.random.default_rng(11)
    stem = random.integers(3, vocabulary, longest)
    made = []
    for number in range(count):
        own = random.integers(3, vocabulary, random.integers(1, 20))
        prompt = np.concatenate([stem[: random.integers(0, longest)], own]).astype(np.int32)
        params = SamplingParams(
            num_tokens_to_generate=int(random.integers(4, answer)),
            termination_id=IGNORE_EOS,
            return_log_probs=True,
            skip_prompt_log_probs=number % 4 != 0,
            **KINDS[number % len(KINDS)],
        )
        made.append(EngineRequest(number, prompt, np.empty(0, np.int32), params, seed=number))
    return made


def make_engine(executor: CpuExecutor, **config: Any) -> DynamicInferenceEngine:
    defaults = {"max_requests": 32, "max_tokens": 4096, "enable_chunked_prefill": True, "batch_invariant": True}
    return DynamicInferenceEngine(executor, InferenceConfig(**{**defaults, **config}))


def run(
    engine: DynamicInferenceEngine,
    waiting: list[EngineRequest],
    between: Callable[[], None] = lambda: None,
    *,
    at_once: int = 1,
) -> dict[int, Answer]:
    """at_once: how many requests are added before each step."""
    answers: dict[int, Answer] = {request.request_id: ([], [], []) for request in waiting}
    waiting = waiting[::-1]
    while waiting or engine.has_work:
        between()
        for _ in range(min(at_once, len(waiting))):
            engine.add_request(waiting.pop())
        for output in engine.step():
            assert output.error is None
            tokens, log_probs, of_prompt = answers[output.request_id]
            tokens += output.new_tokens
            log_probs += output.new_log_probs or []
            of_prompt += output.prompt_log_probs or []
    engine.check_integrity()
    return answers


def alone(executor: CpuExecutor, asked: list[EngineRequest]) -> dict[int, Answer]:
    answers = {}
    for request in asked:
        answers |= run(make_engine(executor), [request])
    return answers


@pytest.fixture(scope="module")
def expected(tiny: CpuExecutor) -> dict[int, Answer]:
    return alone(tiny, requests(32, vocabulary=320, longest=300))


def test_a_batch_of_32_mixed_requests_equals_each_alone_to_the_bit(
    tiny: CpuExecutor, expected: dict[int, Answer]
) -> None:
    assert run(make_engine(tiny), requests(32, vocabulary=320, longest=300), at_once=32) == expected


@pytest.mark.parametrize("seed", range(100 if SOAK else 3))
def test_no_bit_depends_on_batch_chunks_cache_preemption_suspend_update_or_abort(
    tiny: CpuExecutor, directory: str, expected: dict[int, Answer], seed: int
) -> None:
    random = Random(seed)
    engine = make_engine(
        tiny,
        max_requests=random.randint(2, 24),
        max_tokens=random.randint(24, 300),
        enable_prefix_caching=random.random() < 0.7,
        prefix_caching_eviction_policy="lru",
        block_size_tokens=16,
        kv_cache_management_mode=random.choice(list(KVCacheManagementMode)),
    )

    def disturb() -> None:
        if random.random() < 0.05:
            engine.suspend()
            engine.resume()
        if random.random() < 0.05:
            engine._scheduler.preempt_all()
        if random.random() < 0.03:
            tiny.stage_weights(directory)
            engine.swap_weights(engine.epoch + 1)
        if random.random() < 0.1:
            aborted.update(number for number in random.sample(range(12), 1) if engine.abort_request(number))

    aborted: set[int] = set()
    asked = requests(12, vocabulary=320, longest=300)
    random.shuffle(asked)
    for number, answer in run(engine, asked, disturb).items():
        assert number in aborted or answer == expected[number]


def test_rows_of_the_real_model_do_not_depend_on_the_batch() -> None:
    executor = make_executor("builtin:smollm2-135m", kv_cache_memory=64 << 20)
    asked = requests(3, vocabulary=49_000, longest=20, answer=7)
    engine = make_engine(executor, max_requests=3, max_tokens=16, enable_prefix_caching=True, block_size_tokens=16)
    assert run(engine, asked) == alone(executor, asked)


def test_an_unsupported_use_is_rejected_by_name(make_tiny: MakeTiny) -> None:
    source = resolve(str(make_tiny()[0]))
    select = partial(
        select_executor,
        source,
        ModelText.of_model(source),
        InferenceConfig(batch_invariant=True),
        kv_cache_memory=2 << 20,
    )
    with pytest.raises(ValueError, match=r"batch_invariant.*one rank"):
        select(groups=SimpleNamespace(shard=ParallelSizes(tensor=2).shard(0)))
    with pytest.raises(ValueError, match=r"batch_invariant.*cpu"):
        select(device="cuda")
    with pytest.raises(ValueError, match=r"bfloat16.*batch_invariant"):
        select(dtype="bfloat16")


def test_the_python_interface_and_the_command_accept_it() -> None:
    config = InferenceConfig(batch_invariant=True, buffer_size_gb=0.02, max_sequence_length=64)
    with MegatronLLM.from_pretrained("builtin:smollm2-135m", inference_config=config, threads=1) as llm:
        assert isinstance(llm.controller.inference_wrapped_model.model, BatchInvariantDecoder)
    settings = EngineSettings(coordinator="tcp://127.0.0.1:1", name="e", batch_invariant=True)
    assert build_native(settings).core.config.batch_invariant
