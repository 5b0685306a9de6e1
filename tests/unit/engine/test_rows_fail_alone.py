"""A row of a batch can fail, a step cannot: whatever a request, its logits or its grammar contain."""

from __future__ import annotations

from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from echo_executor import EchoExecutor
from random_checkpoint import LLAMA, OVERFLOW, random_tensors, write_model, write_overflowing_model

from megatron_runtime.backends.native.cpu.executor import CpuExecutor
from megatron_runtime.backends.native.cuda.executor import CudaExecutor
from megatron_runtime.backends.native.engine import EngineCore
from megatron_runtime.backends.native.torch_executor import TorchExecutor
from megatron_runtime.checkpoints.source import resolve
from megatron_runtime.engine.engine_request import EngineRequest, RequestOutput
from megatron_runtime.models.cpp_decoder import CppDecoder
from megatron_runtime.models.decoder import Decoder
from megatron_runtime.protocol.headers import ErrorCode
from megatron_runtime.requests.config import InferenceConfig
from megatron_runtime.requests.errors import NotFiniteError
from megatron_runtime.requests.sampling_params import IGNORE_EOS, InvalidSamplingParamsError, SamplingParams
from megatron_runtime.sampling.structured_output import GrammarState

NOTHING = np.empty(0, np.int32)
CONFIG = InferenceConfig(
    max_requests=4, max_tokens=24, max_sequence_length=96, enable_prefix_caching=True, enable_chunked_prefill=True,
    block_size_tokens=16,
)  # fmt: skip

Engine = EngineCore
DEVICES: dict[str, tuple[dict[str, Any], type]] = {
    "float32": ({"dtype": "float32"}, CppDecoder),
    "int8": ({"dtype": "int8"}, CppDecoder),
    "int4": ({"dtype": "int4"}, CppDecoder),
    "torch operators": ({"dtype": "float32", "page_size": 8}, CppDecoder),
    "GPU": (
        {"dtype": "float32", "max_rows": 4, "max_tokens": 24, "graph_rows": 0, "device": torch.device("cpu")},
        Decoder,
    ),
}
"""Options of the executor, and its decoder. Pages of 8 tokens are not read by the kernels."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_overflowing_model(tmp_path_factory.mktemp("overflowing") / "model"))


def executor_of(device: str, model: str) -> TorchExecutor:
    options, decoder = DEVICES[device]
    make = CudaExecutor if device == "GPU" else CpuExecutor
    executor = make(resolve(model), kv_cache_memory=1 << 17, max_sequence_length=96, threads=1, **options)
    executor.load()
    assert isinstance(executor.model, decoder)
    return executor


def params_of(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"termination_id": IGNORE_EOS, "num_tokens_to_generate": 8, "top_k": 20, **fields})


def run(
    engine: Engine, prompts: dict[int, list[int]], params: dict[int, SamplingParams] | None = None
) -> dict[int, tuple[list[int], RequestOutput]]:
    """Return the tokens and the last output of each request, which all run at once, and of those that run already."""
    for number, prompt in prompts.items():
        own = (params or {}).get(number) or params_of()
        engine.add_request(EngineRequest(number, np.array(prompt, np.int32), NOTHING, own, seed=number))
    tokens: dict[int, list[int]] = defaultdict(list)
    last: dict[int, RequestOutput] = {}
    while engine.has_work:
        for output in engine.step():
            tokens[output.request_id] += output.new_tokens
            if output.finish_reason is not None:
                last[output.request_id] = output
        engine.check_integrity()
    assert not prompts.keys() - last.keys()
    return {number: (tokens[number], output) for number, output in last.items()}


@pytest.mark.parametrize("device", DEVICES)
def test_a_request_whose_numbers_overflow_changes_no_other(model: str, device: str) -> None:
    """In prompt and answer, in the same step and after it, on the pages that it leaves, and with its prefix."""
    executor = executor_of(device, model)
    shared = list(range(20, 37))
    innocent = {1: [*shared, 9], 2: [5, 6], 3: [*range(40, 70)]}
    expected = run(Engine(executor, CONFIG), innocent)
    engine = Engine(executor, CONFIG)
    for poison in ([*shared, OVERFLOW, *range(50, 90)], [OVERFLOW], [*range(100, 140), OVERFLOW]):
        found = run(engine, {0: poison, **innocent})
        tokens, output = found.pop(0)
        assert (tokens, output.finish_reason) == ([], "error")
        assert isinstance(output.error, NotFiniteError)
        assert not output.error.is_transient
        for number, (answer, ending) in found.items():
            assert ending.error is None
            assert answer == expected[number][0], f"answer {number} next to {poison}"
    assert engine.stats().failed_rows == 3


@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("huge", ["v_proj.weight", "weight"], ids=["values", "all weights"])
def test_an_engine_lives_with_huge_finite_weights(tmp_path: Path, huge: str, dtype: str) -> None:
    """The scales of their blocks exceed float16, so that it can answer no request."""
    config = replace(LLAMA, vocab_size=160, hidden_size=64, intermediate_size=64, num_heads=4, head_dim=16)
    tensors = {
        name: tensor * 1e38 if name.endswith(huge) and "norm" not in name else tensor
        for name, tensor in random_tensors(config).items()
    }
    engine = Engine(executor_of(dtype, str(write_model(tmp_path / "model", config, tensors))), CONFIG)
    for prompts in ({0: [5], 1: [*range(20, 60)]}, {2: [9, 8]}):
        for tokens, output in run(engine, prompts, {1: params_of(temperature=0)}).values():
            assert (tokens, type(output.error)) == ([], NotFiniteError)


@pytest.mark.parametrize("device", ["float32", "GPU"])
@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"return_log_probs": True, "skip_prompt_log_probs": True},
        {"top_n_logprobs": 160},
        {"return_hidden_state": True, "num_tokens_to_generate": 1},
        {"repetition_penalty": 1.5, "min_tokens": 4, "stop_token_ids": list(range(160))},
    ],
    ids=["greedy", "log-probabilities", "of the prompt", "hidden state", "edits"],
)
def test_an_overflow_reports_no_numbers(model: str, device: str, fields: dict[str, Any]) -> None:
    """The prompt has the token early, so that its log-probabilities fail before a token is sampled."""
    engine = Engine(executor_of(device, model), CONFIG)
    poison = [OVERFLOW, *range(50, 90)] if fields.get("top_n_logprobs") else [50, OVERFLOW]
    found = run(engine, {0: poison, 1: [5, 6]}, {0: params_of(**fields)})
    tokens, output = found[0]
    assert (tokens, output.finish_reason) == ([], "error")
    assert isinstance(output.error, NotFiniteError)
    assert output.new_log_probs is output.prompt_log_probs is output.hidden_state is None
    assert (len(found[1][0]), found[1][1].error) == (8, None)


class Matcher:
    """Plays llguidance: every token is allowed, until after `tokens` tokens `fault` happens."""

    def __init__(self, fault: str, tokens: int) -> None:
        self._fault, self._left = fault, tokens

    def consume_token(self, token: int) -> None:
        self._left -= 1
        if self._left == 0 and self._fault == "consume":
            raise Panic("consume")

    def compute_bitmask(self) -> bytes:
        if self._left <= 0 and self._fault == "mask":
            raise Panic("mask")
        return bytes([0 if self._left <= 0 and self._fault == "empty" else 255]) * 64

    def is_error(self) -> bool:
        return False

    is_stopped = is_error


class Panic(BaseException):
    """As a panic of a native library: no Exception."""


@pytest.mark.parametrize(("fault", "tokens"), [("empty", 0), ("empty", 3), ("mask", 0), ("mask", 3), ("consume", 3)])
@pytest.mark.parametrize("device", ["float32", "GPU", "echo"])
def test_a_grammar_that_fails_ends_its_answer_alone(model: str, device: str, fault: str, tokens: int) -> None:
    executor = EchoExecutor(vocab_size=160) if device == "echo" else executor_of(device, model)
    executor.load()
    engine = Engine(executor, CONFIG)
    expected = run(engine, {1: [5, 6]})
    with ThreadPoolExecutor(1) as masks:
        grammar = GrammarState(Matcher(fault, tokens), 160, masks=masks.submit)  # type: ignore[arg-type]
        params = params_of(structured_output={"type": "json_object"}, num_tokens_to_generate=20)
        engine.add_request(EngineRequest(0, np.array([8], np.int32), NOTHING, params), grammar=grammar)
        found = run(engine, {1: [5, 6]})
    assert found[1][0] == expected[1][0]
    output = found[0][1]
    assert (output.finish_reason, output.error_code) == ("error", ErrorCode.INVALID_REQUEST)
    assert "structured" in str(output.error)


def test_parameters_that_a_caller_has_changed_are_checked_again(model: str) -> None:
    engine = Engine(EchoExecutor(), CONFIG)
    for name, value in (("repetition_penalty", 1e-44), ("top_k", 1 << 40), ("temperature", float("nan"))):
        params = params_of()
        setattr(params, name, value)
        with pytest.raises(InvalidSamplingParamsError, match=name):
            engine.add_request(EngineRequest(0, np.array([5], np.int32), NOTHING, params))
    assert not engine.has_work
