"""Sampling parameters become vLLM's, delivered tokens are forced, and bad words are banned."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_runtime.requests.sampling_params import SamplingParams


def to_vllm(generated: Sequence[int] = (), *, sequences: Sequence[Sequence[int]] = (), **params: Any) -> Any:
    from megatron_runtime.backends.vllm.parameters import to_vllm

    return to_vllm(SamplingParams(**params), bad_words=sequences, stop_ids=[2, 9], max_tokens=20, generated=generated)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("temperature", 0.5, {"temperature": 0.5}),
        ("top_k", 7, {"top_k": 7}),
        ("top_p", 0.25, {"top_p": 0.25}),
        ("top_p", 0.0, {"top_p": 1.0}),
        ("min_p", 0.25, {"min_p": 0.25}),
        ("repetition_penalty", 1.5, {"repetition_penalty": 1.5}),
        ("presence_penalty", 0.5, {"presence_penalty": 0.5}),
        ("frequency_penalty", 0.5, {"frequency_penalty": 0.5}),
        ("seed", 2**63 + 5, {"seed": 5}),
        ("logit_bias", {7: -1.5}, {"logit_bias": {7: -1.5}}),
        ("min_tokens", 4, {"min_tokens": 4, "max_tokens": 20, "stop_token_ids": [2, 9], "ignore_eos": True}),
        ("return_log_probs", True, {"logprobs": 0}),
        ("top_n_logprobs", 3, {"prompt_logprobs": 3}),
    ],
)
def test_each_parameter_is_passed(name: str, value: Any, expected: dict[str, Any]) -> None:
    params = to_vllm(**{name: value})
    assert {field: getattr(params, field) for field in expected} == expected


@pytest.mark.parametrize(
    ("kind", "value", "field"),
    [
        ("json_schema", {"type": "object"}, "json"),
        ("regex", "[0-9]", "regex"),
        ("grammar", "root ::= 'a'", "grammar"),
        ("choice", ["a", "b"], "choice"),
    ],
)
def test_structured_output_is_passed(kind: str, value: Any, field: str) -> None:
    found = to_vllm(structured_output={"type": kind, "value": value}).structured_outputs
    assert getattr(found, field) == value
    assert to_vllm(structured_output={"type": "json_object"}).structured_outputs.json_object is True


def test_bad_words_are_passed_as_token_sequences() -> None:
    params = to_vllm(bad_words=["a", "b c"], sequences=[(5,), (6, 7)])
    assert params.extra_args == {"megatron_bad_words": [[5], [6, 7]]}


def test_tokens_of_another_engine_join_the_prompt_or_are_forced() -> None:
    moved = to_vllm([5, 6, 7], min_tokens=4)
    assert (moved.max_tokens, moved.min_tokens, moved.extra_args) == (17, 1, None)
    structure = {"type": "regex", "value": "a"}
    for state in ({"presence_penalty": 0.5}, {"structured_output": structure}, {"bad_words": ["a"]}):
        forced = to_vllm([5, 6, 7], min_tokens=4, **state)
        assert (forced.max_tokens, forced.min_tokens) == (20, 4)
        assert forced.extra_args == {"megatron_forced_tokens": [5, 6, 7]}


def test_a_logits_processor_forces_tokens_first_and_then_bans_the_ends_of_bad_words() -> None:
    from megatron_runtime.backends.vllm.logits_processor import BAD_WORDS, FORCED, AnswerTokens

    def allowed(answer: list[int], *, only: list[int] = [0, 1, 2, 3], **extra: Any) -> list[int]:  # noqa: B006
        """Return the tokens that may follow `answer` where a grammar allows `only` these."""
        apply = AnswerTokens().new_req_logits_processor(SimpleNamespace(extra_args=extra))
        assert apply is not None
        logits = torch.full((4,), -math.inf)
        logits[only] = 1.0
        return [token for token, value in enumerate(apply(answer, logits).tolist()) if value > -math.inf]

    assert AnswerTokens().new_req_logits_processor(SimpleNamespace(extra_args=None)) is None
    assert [allowed([3, 1][:count], **{FORCED: [3, 1]}) for count in range(3)] == [[3], [1], [0, 1, 2, 3]]
    words: dict[str, Any] = {BAD_WORDS: [[2], [3, 1, 0]]}
    assert [allowed(answer, **words) for answer in ([], [3, 1], [1, 3])] == [[0, 1, 3], [1, 3], [0, 1, 3]]
    assert allowed([3, 1], only=[0, 2], **words) == [0, 2]
    assert [allowed([3, 1][:count], **{FORCED: [3, 1]}, **words) for count in range(3)] == [[3], [1], [1, 3]]
