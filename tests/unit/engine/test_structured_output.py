"""Answers match what was asked for: the real model, sampled, 200 times of 200."""

import json
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from megatron_runtime.config import InferenceConfig
from megatron_runtime.engines.dynamic_engine import DynamicInferenceEngine
from megatron_runtime.engines.engine_request import EngineRequest
from megatron_runtime.engines.torch_executor import TorchExecutor
from megatron_runtime.sampling_params import IGNORE_EOS, InvalidSamplingParamsError, SamplingParams

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
    executor: TorchExecutor, requests: list[SamplingParams], generated: list[list[int]] | None = None
) -> list[tuple[list[int], str | None]]:
    """The tokens and the finish reason of each request, all in one batch."""
    engine = DynamicInferenceEngine(executor, InferenceConfig(max_requests=64))
    prompt = np.array(executor.controller.tokenize_prompt("An example, please:"), np.int32)
    before = generated or [[] for _ in requests]
    for index, params in enumerate(requests):
        grammar = executor.controller.begin_grammar(params, before[index])
        engine.add_request(
            EngineRequest(index, prompt, np.array(before[index], np.int32), params, seed=index, grammar=grammar)
        )
    answers: list[tuple[list[int], str | None]] = [(list(tokens), None) for tokens in before]
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            answers[output.request_id] = (answers[output.request_id][0] + output.new_tokens, output.finish_reason)
    engine.check_integrity()
    return answers


def test_200_of_200_answers_match(smollm: TorchExecutor) -> None:
    requests = [
        SamplingParams(temperature=1.0, num_tokens_to_generate=120, structured_output=STRUCTURES[i % 5][0])
        for i in range(200)
    ]
    finished = 0
    for start in range(0, 200, 50):
        for index, (tokens, reason) in enumerate(answers_of(smollm, requests[start : start + 50])):
            text, matches = smollm.controller.detokenize(tokens), STRUCTURES[(start + index) % 5][1]
            if reason == "stop":
                assert matches(text), (STRUCTURES[(start + index) % 5][0], text)
                finished += 1
            else:
                # Only where the length ran out, in a structure that knows no bound.
                assert (start + index) % 5 == 4
                assert re.fullmatch(r"\(*x?\)*", text)
    assert finished >= 190


def test_an_answer_goes_on_from_the_tokens_it_came_with(smollm: TorchExecutor) -> None:
    structure = {"type": "json_schema", "value": PERSON}
    params = SamplingParams(temperature=0.0, num_tokens_to_generate=80, structured_output=structure)
    ((whole, reason),) = answers_of(smollm, [params])
    assert reason == "stop"
    for cut in (1, len(whole) // 2, len(whole) - 1):
        assert answers_of(smollm, [params], [whole[:cut]]) == [(whole, "stop")]


def test_the_end_of_the_structure_ends_the_request_though_no_token_may(smollm: TorchExecutor) -> None:
    params = SamplingParams(
        num_tokens_to_generate=30, termination_id=IGNORE_EOS, structured_output={"type": "choice", "value": ["yes"]}
    )
    ((tokens, reason),) = answers_of(smollm, [params])
    assert (smollm.controller.detokenize(tokens), reason) == ("yes", "stop")


@pytest.mark.parametrize(
    "structure",
    [
        {"type": "regex", "value": "(((("},
        {"type": "regex", "value": "(a{1000}){1000}"},
        {"type": "grammar", "value": "start: nothing"},
        {"type": "json_schema", "value": {"type": "no type"}},
        {"type": "json_schema", "value": {"$ref": "#"}},
        {"type": "regex", "value": "a" * 100_000},
    ],
    ids=["syntax", "explodes", "unknown rule", "unknown type", "endless", "large"],
)
def test_a_structure_that_cannot_be_is_refused_by_name(smollm: TorchExecutor, structure: dict[str, Any]) -> None:
    params = SamplingParams(structured_output=structure)
    with pytest.raises(InvalidSamplingParamsError, match="structured_output"):
        smollm.controller.begin_grammar(params)


def test_without_a_grammar_state_it_is_refused_not_ignored(smollm: TorchExecutor) -> None:
    engine = DynamicInferenceEngine(smollm, InferenceConfig())
    params = SamplingParams(structured_output={"type": "json_object"})
    with pytest.raises(InvalidSamplingParamsError, match="structured_output"):
        engine.add_request(EngineRequest(1, np.array([5], np.int32), np.empty(0, np.int32), params))
