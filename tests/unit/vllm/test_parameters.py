"""Sampling parameters become vLLM's, and delivered tokens are forced."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_runtime.requests.sampling_params import SamplingParams


def to_vllm(generated: list[int] | None = None, **params: Any) -> Any:
    from megatron_runtime.backends.vllm.parameters import to_vllm

    return to_vllm(SamplingParams(**params), stop_ids=[2, 9], max_tokens=20, generated=generated or [])


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


def test_tokens_of_another_engine_join_the_prompt_or_are_forced() -> None:
    moved = to_vllm([5, 6, 7], min_tokens=4)
    assert (moved.max_tokens, moved.min_tokens, moved.extra_args) == (17, 1, None)
    for state in ({"presence_penalty": 0.5}, {"structured_output": {"type": "regex", "value": "a"}}):
        forced = to_vllm([5, 6, 7], min_tokens=4, **state)
        assert (forced.max_tokens, forced.min_tokens) == (20, 4)
        assert forced.extra_args == {"megatron_forced_tokens": [5, 6, 7]}


def test_a_row_may_only_have_its_next_forced_token_wherever_the_batch_moves_it() -> None:
    from vllm.v1.sample.logits_processor import BatchUpdate, MoveDirectionality

    from megatron_runtime.backends.vllm.forced_tokens import FORCED, ForcedTokens

    forcing = ForcedTokens(SimpleNamespace(), torch.device("cpu"), is_pin_memory=False)

    def allowed() -> list[list[int]]:
        """Return the tokens that each row may have."""
        logits = forcing.apply(torch.zeros(3, 4))
        return [[token for token, value in enumerate(row) if value > -math.inf] for row in logits.tolist()]

    def update(*, removed: Any = (), added: Any = (), moved: Any = ()) -> None:
        forcing.update_state(BatchUpdate(batch_size=3, removed=[*removed], added=[*added], moved=[*moved]))

    every = [0, 1, 2, 3]
    first: list[int] = []
    second: list[int] = []
    update(
        added=[
            (0, SimpleNamespace(extra_args={FORCED: [3, 1]}), None, first),
            (1, SimpleNamespace(extra_args=None), None, []),
            (2, SimpleNamespace(extra_args={FORCED: [2]}), None, second),
        ]
    )
    assert allowed() == [[3], every, [2]]
    first.append(3)
    second.append(2)
    forcing.update_state(None)
    assert allowed() == [[1], every, every]
    update(moved=[(0, 1, MoveDirectionality.SWAP)])
    assert allowed() == [every, [1], every]
    update(moved=[(1, 2, MoveDirectionality.UNIDIRECTIONAL)])
    assert allowed() == [every, every, [1]]
    update(removed=[2])
    assert allowed() == [every] * 3
