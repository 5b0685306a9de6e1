"""All answers match what was asked for, though the model knows nothing of it."""

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from echo_engine import EchoBackend
from hostile_grammars import REJECTED_BY_TRIAL
from soak import size

from megatron_runtime.backends import text as model_text
from megatron_runtime.backends.native.cpu.executor import CpuExecutor
from megatron_runtime.backends.native.engine import EngineCore
from megatron_runtime.backends.text import ModelText
from megatron_runtime.checkpoints.source import resolve
from megatron_runtime.engine.engine_request import EngineRequest
from megatron_runtime.engine.settings import EngineSettings
from megatron_runtime.megatron_core.engines.dynamic_engine import DynamicInferenceEngine
from megatron_runtime.requests.config import InferenceConfig
from megatron_runtime.requests.request import Status
from megatron_runtime.requests.sampling_params import IGNORE_EOS, InvalidSamplingParamsError, SamplingParams
from megatron_runtime.server.formats.call_grammars import written_with
from megatron_runtime.server.formats.table import PARSERS
from megatron_runtime.tokenization import load_tokenizer

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 120}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
POINTS = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "minItems": 2, "maxItems": 3}


def is_person(text: str) -> bool:
    value = json.loads(text)
    return set(value) == {"name", "age"} and len(value["name"]) <= 12 and value["age"] <= 120


def is_points(text: str) -> bool:
    value = json.loads(text)
    return 2 <= len(value) <= 3 and all(0 <= number <= 9 for number in value)


STRUCTURES: list[tuple[dict[str, Any], Callable[[str], Any]]] = [
    ({"type": "json_schema", "value": PERSON}, is_person),
    ({"type": "json_schema", "value": POINTS}, is_points),
    (
        {"type": "regex", "value": "(Mon|Tues|Fri)day, [0-9]{1,2} (May|June)"},
        re.compile(r"(Mon|Tues|Fri)day, \d{1,2} (May|June)").fullmatch,
    ),
    ({"type": "choice", "value": ["yes", "no", 'I "think" so\n']}, ["yes", "no", 'I "think" so\n'].__contains__),
    ({"type": "grammar", "value": 'start: "(" start ")" | "x"'}, re.compile(r"\(*x\)*").fullmatch),
]


def answers_of(
    executor: CpuExecutor, requests: list[SamplingParams], generated: list[list[int]] | None = None
) -> list[tuple[list[int], str | None]]:
    """The tokens and the finish reason of each request, all in one batch."""
    engine = EngineCore(executor, InferenceConfig(max_requests=64))
    prompt = np.array(executor.controller.tokenize_prompt("An example, please:"), np.int32)
    before = generated or [[] for _ in requests]
    for index, params in enumerate(requests):
        grammar = executor.controller.begin_grammar(params, before[index])
        engine.add_request(
            EngineRequest(index, prompt, np.array(before[index], np.int32), params, seed=index), grammar=grammar
        )
    answers: list[tuple[list[int], str | None]] = [(list(tokens), None) for tokens in before]
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            answers[output.request_id] = (answers[output.request_id][0] + output.new_tokens, output.finish_reason)
    engine.check_integrity()
    return answers


@pytest.fixture(scope="module")
def random_model(make_tiny: Callable[..., tuple[Path, Any]]) -> CpuExecutor:
    """A model that chooses nearly at random among the built-in model's vocabulary."""
    directory, _ = make_tiny(vocab_size=49152)
    controller = ModelText(partial(load_tokenizer, "builtin:smollm2-135m"))
    executor = CpuExecutor(resolve(str(directory)), controller, dtype="float32", kv_cache_memory=64 << 20)
    executor.load()
    return executor


def check(executor: CpuExecutor, count: int) -> None:
    chosen = [STRUCTURES[number % len(STRUCTURES)] for number in range(count)]
    requests = [
        SamplingParams(temperature=1.0, num_tokens_to_generate=150, structured_output=structure)
        for structure, _ in chosen
    ]
    for (structure, matches), (tokens, reason) in zip(chosen, answers_of(executor, requests), strict=True):
        text = executor.controller.detokenize(tokens)
        if reason == "length":
            # Only a structure that knows no bound may run out of tokens; it has not been left by then.
            assert structure["type"] == "grammar"
            assert re.fullmatch(r"\(+", text)
        else:
            assert matches(text), (structure, text)


def test_all_answers_match(random_model: CpuExecutor) -> None:
    check(random_model, size(60, soak=200))


def test_answers_of_the_real_model_match(smollm: CpuExecutor) -> None:
    check(smollm, 4)


def test_an_answer_continues_from_its_generated_tokens(smollm: CpuExecutor) -> None:
    structure = {"type": "json_schema", "value": PERSON}
    params = SamplingParams(temperature=0.0, num_tokens_to_generate=80, structured_output=structure)
    ((whole, reason),) = answers_of(smollm, [params])
    assert reason == "stop"
    for cut in (1, len(whole) // 2, len(whole) - 1):
        assert answers_of(smollm, [params], [whole[:cut]]) == [(whole, "stop")]


def test_a_budget_ends_the_reasoning_also_after_a_failover(random_model: CpuExecutor) -> None:
    closing = random_model.controller.tokenizer.encode("</think>", add_special=False)
    reasoning = {"closing": closing, "is_open": True, "budget": 5}
    params = SamplingParams(num_tokens_to_generate=20, termination_id=IGNORE_EOS, reasoning=reasoning)
    ((whole, reason),) = answers_of(random_model, [params])
    assert (whole[5 : 5 + len(closing)], len(whole), reason) == (closing, 20, "length")
    for cut in (3, 6, 12):
        assert answers_of(random_model, [params], [whole[:cut]]) == [(whole, "length")]
    outside = {"closing": [10**6], "is_open": True, "budget": 5}
    with pytest.raises(InvalidSamplingParamsError, match="reasoning"):
        answers_of(random_model, [SamplingParams(reasoning=outside)])


def test_a_call_fits_its_schema_from_its_marker_on_also_after_a_failover(random_model: CpuExecutor) -> None:
    structure = PARSERS["hermes"].grammar({"meet": PERSON}, written_with({}), True).structure
    marker = random_model.controller.tokenizer.encode("<tool_call>", add_special=False)
    params = SamplingParams(num_tokens_to_generate=200, call_structure=structure)
    ((whole, reason),) = answers_of(random_model, [params], [marker])
    text = random_model.controller.detokenize(whole)
    assert reason == "stop"
    call = json.loads(text.removeprefix("<tool_call>").removesuffix("</tool_call>"))
    assert call["name"] == "meet"
    assert is_person(json.dumps(call["arguments"]))
    for cut in (len(marker) + 1, len(whole) // 2, len(whole) - 1):
        assert answers_of(random_model, [params], [whole[:cut]]) == [(whole, "stop")]


def test_the_end_of_the_structure_ends_the_request_though_no_token_may(smollm: CpuExecutor) -> None:
    params = SamplingParams(
        num_tokens_to_generate=30, termination_id=IGNORE_EOS, structured_output={"type": "choice", "value": ["yes"]}
    )
    ((tokens, reason),) = answers_of(smollm, [params])
    assert (smollm.controller.detokenize(tokens), reason) == ("yes", "stop")


def test_an_echo_engine_keeps_to_the_structure_too() -> None:
    echo = EchoBackend(EngineSettings(name="echo", coordinator="tcp://127.0.0.1:1"))
    params = SamplingParams(structured_output={"type": "json_schema", "value": PERSON})
    prompt = np.array([1, 2, 3], np.int32)
    assert echo.controller is not None
    echo.core.executor.load()
    grammar = echo.controller.begin_grammar(params, [])
    echo.core.add_request(EngineRequest(1, prompt, np.empty(0, np.int32), params), grammar=grammar)
    tokens = [token for _ in range(500) for output in echo.core.step() for token in output.new_tokens]
    assert is_person(echo.controller.detokenize(tokens))


@pytest.mark.parametrize(
    "structure",
    [
        {"type": "regex", "value": "(((("},
        {"type": "grammar", "value": "start: nothing"},
        {"type": "json_schema", "value": {"type": "no type"}},
        {"type": "json_schema", "value": {"$ref": "#"}},
        {"type": "regex", "value": "a" * 100_000},
    ],
    ids=["syntax", "unknown rule", "unknown type", "endless", "large"],
)
def test_a_structure_that_cannot_be_is_rejected_by_name(smollm: CpuExecutor, structure: dict[str, Any]) -> None:
    params = SamplingParams(structured_output=structure)
    with pytest.raises(InvalidSamplingParamsError, match="structured_output"):
        smollm.controller.begin_grammar(params)


def test_a_hostile_grammar_fails_its_prompt_and_not_the_program(smollm: CpuExecutor) -> None:
    engine = DynamicInferenceEngine(smollm, InferenceConfig())
    hostile, _ = REJECTED_BY_TRIAL["40 references with 10 arrays each"]
    params = [SamplingParams(structured_output=hostile), SamplingParams(num_tokens_to_generate=2)]
    failed, answered = engine.generate(["one", "two"], params)
    assert (failed.status, answered.status) == (Status.FAILED, Status.COMPLETED)
    assert len(answered.generated_tokens) == 2


def test_a_large_vocabulary_is_indexed_before_the_engine_serves(
    smollm: CpuExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller = smollm.controller
    controller.close_grammars()
    controller.prepare_grammars()
    assert controller._grammars is None
    monkeypatch.setattr(model_text, "LARGE_VOCABULARY", 1000)
    controller.prepare_grammars()
    assert controller._grammars is not None


def test_without_a_grammar_state_it_is_rejected_not_ignored(smollm: CpuExecutor) -> None:
    engine = EngineCore(smollm, InferenceConfig())
    params = SamplingParams(structured_output={"type": "json_object"})
    with pytest.raises(InvalidSamplingParamsError, match="structured_output"):
        engine.add_request(EngineRequest(1, np.array([5], np.int32), np.empty(0, np.int32), params))
