"""Whatever its parameters and logits are, a row gets a token of the vocabulary or fails, and changes no other row."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from device_step import on_device
from hypothesis import example, given
from hypothesis import strategies as st

from megatron_kernels import sampling
from megatron_runtime.backends.native.torch_executor import ForwardStep, LogitRows
from megatron_runtime.requests.sampling_params import BIASES, PARAMETERS, SamplingParams
from megatron_runtime.sampling.batch import Float32, RowFailure, SamplingColumns
from megatron_runtime.sampling.sampler import LogProbs, sample_step

VOCABULARY = 300
PROMPT = np.array([0, 5, 299], np.int32)
MAX = float(np.finfo(np.float32).max)
INNOCENT = np.random.default_rng(0).normal(size=VOCABULARY).astype(np.float32)
INNOCENT_PARAMS = SamplingParams(temperature=0.8, top_p=0.9, seed=1, return_log_probs=True)


ROWS = np.arange(3)


def step_of(
    logits_V: Float32,
    *,
    prompt: Float32 = INNOCENT,
    hidden: float = 1.0,
    not_finite: tuple[int, ...] = (),
    columns: SamplingColumns | None = None,
    raw: bool = True,
) -> ForwardStep:
    """Return a step of three rows, of which two are innocent.

    prompt:  logits of a prompt token of the other row.
    hidden:  a number of its hidden state.
    columns: sample with these parameters as on a GPU, by the reference of the kernel; None: on the host.
    """
    step = ForwardStep(
        rows=LogitRows(order=ROWS, sampled_rows=ROWS, targets=[(1, slice(0, 2)), (1, slice(2, 3))]),
        logits_BV=torch.from_numpy(np.stack([INNOCENT, logits_V, INNOCENT])),
        logits_of=lambda x_ND: x_ND,
        hidden_of=lambda which: torch.tensor([[0.0, hidden]]).expand(len(which), 2),
        not_finite=lambda: np.array(not_finite, np.int64),
        x_TD=torch.from_numpy(np.stack([INNOCENT, prompt, INNOCENT])),
    )
    return step if columns is None else on_device(step, rows(columns), sampling.sample, reports_raw=raw)


def rows(columns: SamplingColumns) -> Any:
    targets = {1: np.array([1, 2, 299], np.int32)}
    return columns.rows(np.arange(3), generated=np.full(3, 2), needs_sample=np.ones(3, bool), prompt_targets=targets)


def admit(params: SamplingParams) -> SamplingColumns:
    columns = SamplingColumns(3)
    for slot, of_slot in enumerate((INNOCENT_PARAMS, params, INNOCENT_PARAMS)):
        columns.admit(
            slot,
            of_slot,
            seed=of_slot.seed or 0,
            prompt=PROMPT,
            generated=np.array([3, 3], np.int32),
            stop_ids=[token for token in of_slot.stop_token_ids or () if token < VOCABULARY],
            bad_words=[(token,) for token in range(VOCABULARY)] if of_slot.bad_words else (),
        )
    return columns


def numbers(name: str) -> st.SearchStrategy[Any]:
    bounds = PARAMETERS[name].rule.bounds
    assert bounds is not None
    if bounds.is_whole:
        return st.integers(int(bounds.minimum), int(bounds.maximum)) | st.integers(0, VOCABULARY + 1)
    return st.floats(bounds.minimum, bounds.maximum)


PARAMS = st.fixed_dictionaries(
    {},
    optional={
        **{
            name: numbers(name)
            for name in ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "seed")
        },
        "repetition_penalty": numbers("repetition_penalty"),
        "min_tokens": st.sampled_from([0, 3, 2**31 - 1]),
        "top_n_logprobs": st.sampled_from([0, 1, 299, 300, 1000]),
        "logit_bias": st.dictionaries(
            st.integers(0, VOCABULARY - 1), st.floats(BIASES.minimum, BIASES.maximum), max_size=4
        ),
        "stop_token_ids": st.lists(st.integers(0, 2**31 - 1) | st.integers(0, VOCABULARY), max_size=4),
        "bad_words": st.just(["every token"]),
        "return_log_probs": st.booleans(),
    },
)
NUMBERS = st.floats(width=32) | st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -0.0, MAX, -MAX, 1e-45])
LOGITS = st.tuples(NUMBERS, st.dictionaries(st.integers(0, VOCABULARY - 1), NUMBERS, max_size=6))
"""A number of all tokens, and numbers of some."""


def check(fields: dict[str, Any], of_all: float, of_some: dict[int, float], *, on_gpu: bool, raw: bool) -> int:
    """Sample one row between two innocent ones. Return its token."""
    params = SamplingParams(**fields)
    logits_V = np.full(VOCABULARY, of_all, np.float32)
    for token, value in of_some.items():
        logits_V[token] = value
    columns = admit(params)
    with np.errstate(all="raise", under="ignore"):  # no warning reaches the caller either
        step = step_of(logits_V, columns=columns if on_gpu else None, raw=raw)
        tokens, reported, of_prompts, _ = sample_step(step, rows(columns), reports_raw=raw)
    expected, _, _, _ = sample_step(step_of(INNOCENT), rows(admit(INNOCENT_PARAMS)), reports_raw=raw)
    assert tokens[[0, 2]].tolist() == expected[[0, 2]].tolist()
    token = int(tokens[1])
    if token < 0:
        assert RowFailure(token).message
        assert not np.isfinite(logits_V).all() or params.has_penalties or params.logit_bias
    else:
        assert token < VOCABULARY
        assert logits_V[token] > -math.inf or on_gpu
        assert np.isfinite(logits_V.max())
    for row, found in reported.items():
        assert_log_probs(found)
        assert tokens[row] >= 0
    assert_log_probs(of_prompts[1])
    return token


def assert_log_probs(found: LogProbs) -> None:
    for values in (found.chosen_N, found.top_NK):
        assert not np.isnan(values).any()
        assert (values <= 1e-3).all()


@pytest.mark.parametrize("raw", [True, False], ids=["raw log-probabilities", "processed log-probabilities"])
@pytest.mark.parametrize("on_gpu", [False, True], ids=["host", "device"])
@given(fields=PARAMS, logits=LOGITS)
@example(fields={"top_p": 0.9, "repetition_penalty": 0.01}, logits=(MAX, {}))
@example(fields={"repetition_penalty": 100, "logit_bias": {5: -100}}, logits=(-MAX, {5: -MAX}))
@example(fields={"temperature": 1e-5, "top_n_logprobs": 5}, logits=(-MAX, {7: MAX}))
@example(fields={"temperature": 1e6, "top_p": 1e-300, "min_p": 1e-300}, logits=(0.0, {7: 1.0}))
@example(fields={"min_p": 1.0, "top_k": 2**31 - 1, "top_p": 1 - 1e-16}, logits=(-math.inf, {299: -MAX}))
@example(fields={"top_n_logprobs": 1000, "return_log_probs": True}, logits=(0.0, {3: math.nan}))
@example(fields={"top_n_logprobs": 5}, logits=(-math.inf, {}))
@example(fields={"min_tokens": 3, "stop_token_ids": list(range(300))}, logits=(-math.inf, {4: 1.0}))
@example(fields={"bad_words": ["every token"], "temperature": 0}, logits=(math.inf, {}))
def test_a_row_gets_a_token_or_fails_alone(fields: Any, logits: Any, on_gpu: bool, raw: bool) -> None:
    check(fields, *logits, on_gpu=on_gpu, raw=raw)


@pytest.mark.parametrize("on_gpu", [False, True], ids=["host", "device"])
@pytest.mark.parametrize(
    ("fields", "logits", "failure"),
    [
        ({}, (0.0, {9: math.nan}), RowFailure.MODEL),
        ({"temperature": 0}, (0.0, {9: math.inf}), RowFailure.MODEL),
        ({"logit_bias": {9: -100}}, (0.0, {9: math.inf}), RowFailure.MODEL),
        ({}, (-math.inf, {}), RowFailure.MODEL),
        ({"repetition_penalty": 100}, (-1.0, {token: MAX for token in (0, 5)}), None),
        ({"repetition_penalty": 0.01}, (-1.0, {5: MAX}), RowFailure.EDITS),
        ({}, (-math.inf, {9: 3.0}), None),
    ],
)
def test_the_failure_names_its_cause(fields: Any, logits: Any, failure: RowFailure | None, on_gpu: bool) -> None:
    token = check(fields, *logits, on_gpu=on_gpu, raw=True)
    assert token == failure if failure is not None else token >= 0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_numbers_of_a_prompt_and_hidden_states_that_are_not_finite_fail_their_row(bad: float) -> None:
    expected, _, _, _ = sample_step(step_of(INNOCENT), rows(admit(INNOCENT_PARAMS)), reports_raw=True)
    prompt = INNOCENT.copy()
    prompt[200] = bad
    params = SamplingParams(top_n_logprobs=5, num_tokens_to_generate=1, return_hidden_state=True)
    for step in (step_of(INNOCENT, prompt=prompt), step_of(INNOCENT, hidden=bad), step_of(INNOCENT, not_finite=(1,))):
        tokens, _, _, _ = sample_step(step, rows(admit(params)), reports_raw=True)
        assert tokens.tolist() == [expected[0], RowFailure.MODEL, expected[2]]
