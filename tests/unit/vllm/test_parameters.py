"""Sampling parameters become vLLM's, delivered tokens are forced, and bad words are banned."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
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
    from megatron_runtime.backends.vllm.forced_tokens import BAD_WORDS, FORCED
    from megatron_runtime.backends.vllm.logits_processor import AnswerTokens

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


@dataclass
class Row:
    """A row of Model Runner V2: its slot, its place among the rows of its request, and how that request stands.

    drafts: tokens of the rows before it and its own, after the committed ones.
    only:   tokens that a grammar allows.
    """

    slot: int
    prompt: list[int]
    answer: list[int]
    drafts: list[int] = field(default_factory=list)
    only: Sequence[int] = range(4)


def allowed_by_v2(rows: Sequence[Row], *requests: dict[str, Any]) -> list[list[int]]:
    """Return the tokens that each row may sample. requests: extra_args by slot; a later one takes the slot over."""
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext

    from megatron_runtime.backends.vllm.logits_processor_v2 import AnswerRows

    slots, longest = 4, 16
    tokens = torch.full((slots, longest), 3, dtype=torch.int32)
    prompt_len = torch.zeros(slots, dtype=torch.int32)
    state = SimpleNamespace(device=torch.device("cpu"), max_num_reqs=slots)
    state.prompt_len, state.all_token_ids = SimpleNamespace(gpu=prompt_len), SimpleNamespace(gpu=tokens)
    rows_of_v2 = AnswerRows(SimpleNamespace(), state)
    changes = [
        rows_of_v2.add_request(slot % slots, SimpleNamespace(extra_args=extra)) for slot, extra in enumerate(requests)
    ]
    assert changes == [bool(extra) for extra in requests]
    logits = torch.full((len(rows), 4), -math.inf)
    inputs, places = [], []
    for place, row in enumerate(rows):
        sequence = torch.tensor([*row.prompt, *row.answer])
        tokens[row.slot, : len(sequence)] = sequence
        prompt_len[row.slot] = len(row.prompt)
        inputs.append(row.drafts[-1] if row.drafts else int(sequence[-1]))
        places.append(len(sequence) - 1 + len(row.drafts))
        logits[place, list(row.only)] = 1.0
    mapping = torch.tensor([row.slot for row in rows])
    local = torch.tensor([len(row.drafts) for row in rows])
    batch = mapping[local == 0]
    context = LogitsContext(
        mapping, batch, batch.numpy(), local, torch.tensor(inputs), torch.tensor(places), batch.numpy()
    )
    found = rows_of_v2.apply(logits, context)
    return [[token for token, value in enumerate(row.tolist()) if value > -math.inf] for row in found]


def test_v2_forces_tokens_by_the_place_of_each_row_in_its_answer() -> None:
    """Drafts that differ from the forced tokens make rows that vLLM rejects. A chunk of a prompt has a row, too."""
    from megatron_runtime.backends.vllm.forced_tokens import FORCED

    rows = [
        Row(0, [1, 1], []),
        Row(1, [1], [2], []),
        Row(1, [1], [2], [0]),
        Row(1, [1], [2], [0, 1]),
        Row(2, [3, 3, 3], [1]),
    ]
    assert allowed_by_v2(rows, {FORCED: [3]}, {FORCED: [2, 0, 1]}, {}) == [[3], [0], [1], [0, 1, 2, 3], [0, 1, 2, 3]]
    other = Row(0, [1, 1], [0, 1])
    assert allowed_by_v2([other], {FORCED: [3]}, {}, {}, {}, {FORCED: [0, 1, 2, 2, 2]}) == [[2]]
    assert allowed_by_v2([other], {FORCED: [3, 3, 3]}, {}, {}, {}, {}) == [[0, 1, 2, 3]]


def test_v2_bans_the_ends_of_bad_words_after_committed_and_draft_tokens() -> None:
    from megatron_runtime.backends.vllm.forced_tokens import BAD_WORDS, FORCED

    words = {BAD_WORDS: [[2], [3, 1, 0]]}
    assert allowed_by_v2([Row(0, [3, 1], [])], words) == [[0, 1, 3]], "a prompt is no part of the answer"
    rows = [Row(0, [1], [3]), Row(0, [1], [3], [1]), Row(0, [1], [3], [1, 2]), Row(1, [1], [3, 1])]
    assert allowed_by_v2(rows, words, {}) == [[0, 1, 3], [1, 3], [0, 1, 3], [0, 1, 2, 3]]
    assert allowed_by_v2([Row(0, [1], [3, 1], only=[0, 2])], words) == [[0, 2]], "a grammar overrules them"
    assert allowed_by_v2([Row(0, [1], [3, 1], only=[0, 1, 2])], words) == [[1]]
    both = {**words, FORCED: [3, 1, 0, 1]}
    assert allowed_by_v2([Row(0, [1], [3, 1]), Row(0, [1], [3, 1], [0])], both) == [[0], [1]]
    assert allowed_by_v2([Row(0, [1], [3, 1])], words, {}, {}, {}, {}) == [[0, 1, 2, 3]], "another request's slot"


@pytest.mark.parametrize("seed", range(8))
def test_v2_bans_what_v1_bans(seed: int) -> None:
    from megatron_runtime.backends.vllm.forced_tokens import BAD_WORDS
    from megatron_runtime.sampling.bad_words import BadWords

    rng = random.Random(seed)
    requests = [
        {BAD_WORDS: [rng.choices(range(4), k=rng.randint(1, 3)) for _ in range(rng.randint(1, 6))]} for _ in range(4)
    ]
    rows = []
    for slot in range(4):
        prompt, answer = rng.choices(range(4), k=2), rng.choices(range(4), k=rng.randint(0, 5))
        drafts = rng.choices(range(4), k=3)
        rows += [Row(slot, prompt, answer, drafts[:count]) for count in range(4)]
    for row, allowed in zip(rows, allowed_by_v2(rows, *requests), strict=True):
        banned = set(BadWords(requests[row.slot][BAD_WORDS]).after([*row.answer, *row.drafts]))
        assert allowed == ([token for token in range(4) if token not in banned] or list(range(4)))
