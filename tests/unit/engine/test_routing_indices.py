"""The experts of each token, as an engine reports them, are those that the routers of transformers choose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from random_checkpoint import LLAMA, random_model
from torch import nn

from megatron_runtime.backends.native.backend import NativeBackend
from megatron_runtime.backends.native.build import select_executor
from megatron_runtime.backends.native.cpu.executor import CpuExecutor
from megatron_runtime.backends.native.cuda.executor import CudaExecutor
from megatron_runtime.backends.native.engine import EngineCore
from megatron_runtime.backends.native.torch_executor import TorchExecutor
from megatron_runtime.backends.text import ModelText
from megatron_runtime.checkpoints.in_memory import model_in_memory
from megatron_runtime.engine.backend import Capability, UnsupportedVerbError
from megatron_runtime.engine.engine_request import EngineRequest, RequestOutput
from megatron_runtime.models.cpp_decoder import CppDecoder
from megatron_runtime.requests.config import InferenceConfig, KVCacheManagementMode
from megatron_runtime.requests.sampling_params import IGNORE_EOS, SamplingParams

PROMPTS = [list(range(1, 50)), [7], list(range(60, 90))]
NEW_TOKENS = 8
BLOCK = 16
TEXT = ModelText(lambda: pytest.fail("these tests use token ids only"))
Routing = npt.NDArray[Any]


@pytest.fixture(scope="module")
def model() -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(3)
    config = Qwen3MoeConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=6,
        num_experts_per_tok=2,
        mlp_only_layers=[1],
        max_position_embeddings=512,
        initializer_range=0.2,
        eos_token_id=2,
    )
    return Qwen3MoeForCausalLM(config).eval()


def expected(model: nn.Module, tokens: Sequence[int]) -> list[Any]:
    """Return the experts of every token but the last in the layers that have any, by falling share."""
    with torch.inference_mode():
        logits = model(torch.tensor([list(tokens[:-1])]), output_router_logits=True).router_logits
    chosen = [of_layer.softmax(-1).topk(2, dim=-1).indices for of_layer in logits]
    assert len(chosen) == 2
    return torch.stack(chosen, dim=1).tolist()


def engine_on(
    model: nn.Module,
    *,
    make: Callable[..., TorchExecutor] = CpuExecutor,
    pages: int = 64,
    page_size: int = 16,
    **config: Any,
) -> EngineCore:
    bytes_of_token = 4 * 3 * 2 * 2 * 16
    executor = make(
        model_in_memory(model),
        TEXT,
        dtype="float32",
        kv_cache_memory=pages * page_size * bytes_of_token,
        page_size=page_size,
        max_sequence_length=96,
        threads=1,
        records_routing=True,
    )
    executor.load()
    limits = {"max_requests": 4, "max_tokens": 24, "max_sequence_length": 96, "enable_chunked_prefill": True}
    return EngineCore(executor, InferenceConfig(**{**limits, "block_size_tokens": BLOCK, **config}))


def add(engine: EngineCore, number: int, prompt: Sequence[int], generated: Sequence[int] = ()) -> None:
    params = SamplingParams(temperature=0.0, num_tokens_to_generate=NEW_TOKENS, termination_id=IGNORE_EOS)
    engine.add_request(
        EngineRequest(number, np.array(prompt, np.int32), np.array(generated, np.int32), params, seed=number)
    )


def run(engine: EngineCore) -> dict[int, tuple[list[int], Routing | None, RequestOutput]]:
    """Return the new tokens, the routing and the last output of each request."""
    tokens: dict[int, list[int]] = {}
    found = {}
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            tokens.setdefault(output.request_id, []).extend(output.new_tokens)
            if output.finish_reason is not None:
                found[output.request_id] = tokens[output.request_id], output.routing, output
            else:
                assert output.routing is None
    engine.check_integrity()
    return found


def routing_of(output: RequestOutput) -> list[Any]:
    assert output.routing is not None
    return output.routing.tolist()


KERNELS = partial(CudaExecutor, max_rows=4, max_tokens=24, graph_rows=0, device=torch.device("cpu"))


@pytest.mark.parametrize(
    ("make", "page_size"),
    [(CpuExecutor, 16), (CpuExecutor, 8), (KERNELS, 16)],
    ids=["C++", "torch", "operators of a GPU"],
)
def test_every_token_of_a_batch_has_the_experts_of_transformers(model, make, page_size) -> None:
    engine = engine_on(model, make=make, page_size=page_size)
    if make is CpuExecutor:
        assert isinstance(engine.executor.model, CppDecoder)  # which runs pages of 16 tokens in C++
    for number, prompt in enumerate(PROMPTS):
        add(engine, number, prompt)
    for number, (tokens, _, output) in run(engine).items():
        assert len(tokens) == NEW_TOKENS
        assert routing_of(output) == expected(model, [*PROMPTS[number], *tokens])


def test_tokens_from_the_prefix_cache_have_the_experts_that_were_recorded_with_their_kv(model) -> None:
    engine = engine_on(model, enable_prefix_caching=True, prefix_caching_eviction_policy="lru")
    outputs = []
    for number in range(2):
        add(engine, number, PROMPTS[0])
        outputs += [(tokens, output) for tokens, _, output in run(engine).values()]
    assert [output.num_cached_tokens for _, output in outputs] == [0, 2 * BLOCK]
    for tokens, output in outputs:
        assert routing_of(output) == expected(model, [*PROMPTS[0], *tokens])


def test_preempted_requests_have_the_experts_of_all_tokens(model) -> None:
    """Two prompts fit the five pages, their answers do not."""
    prompts = [list(range(60, 90)), list(range(100, 130))]
    engine = engine_on(model, pages=6, max_tokens=64)
    for number, prompt in enumerate(prompts):
        add(engine, number, prompt)
    found = run(engine)
    assert engine.stats().preemptions
    for number, (tokens, _, output) in found.items():
        assert routing_of(output) == expected(model, [*prompts[number], *tokens])


@pytest.mark.parametrize("mode", list(KVCacheManagementMode))
def test_a_suspended_engine_keeps_or_recomputes_the_experts_with_the_kv(model, mode) -> None:
    engine = engine_on(model, kv_cache_management_mode=mode)
    add(engine, 0, PROMPTS[0])
    before = [token for _ in range(4) for output in engine.step() for token in output.new_tokens]
    assert before
    engine.suspend()
    engine.resume()
    tokens, _, output = run(engine)[0]
    assert routing_of(output) == expected(model, [*PROMPTS[0], *before, *tokens])


def test_an_engine_that_continues_an_answer_reports_the_experts_of_all_tokens(model) -> None:
    engine = engine_on(model)
    add(engine, 0, PROMPTS[0])
    tokens, _, first = run(engine)[0]
    add(engine, 1, PROMPTS[0], tokens[:3])
    rest, _, second = run(engine)[1]
    assert rest == tokens[3:]
    assert routing_of(second) == routing_of(first)


def test_an_engine_that_records_experts_exchanges_no_blocks_because_they_come_without_experts(model) -> None:
    backend = NativeBackend(engine_on(model, enable_prefix_caching=True))
    assert backend.kv is None
    with pytest.raises(UnsupportedVerbError, match="without moe_enable_routing_replay"):
        backend.info.require("--role prefill", Capability.KV_TRANSFER)


def test_a_model_without_experts_and_a_wrapper_are_rejected() -> None:
    config, options = InferenceConfig(moe_enable_routing_replay=True), {"device": "cpu", "kv_cache_memory": 1 << 20}
    source = model_in_memory(random_model(LLAMA))
    with pytest.raises(ValueError, match="moe_enable_routing_replay=True: this model has no experts"):
        select_executor(source, TEXT, config, **options)
    with pytest.raises(ValueError, match="a custom inference_wrapper_cls does not record the experts"):
        select_executor(source, TEXT, config, make_forward=lambda model: pytest.fail("not run"), **options)
