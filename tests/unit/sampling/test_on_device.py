"""A GPU's sampling, run on the CPU by the reference and by Triton's interpreter, equals the host's: tokens, failures,
and log-probabilities, with penalties, bias, banned tokens and masks of grammars."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from device_step import on_device

from megatron_kernels.operations import Sample
from megatron_kernels.registry import Backend, KernelConfig, select_kernels
from megatron_runtime.backends.native.torch_executor import LOGIT_ROWS, ForwardStep, LogitRows
from megatron_runtime.requests.sampling_params import SamplingParams
from megatron_runtime.sampling.batch import RowFailure, SamplingBatch, SamplingColumns, bits_of
from megatron_runtime.sampling.sampler import LogProbs, sample_step

VOCABULARY = 203
PROMPT = np.array([0, 5, 7, 7, 202], np.int32)
ANSWER = np.array([3, 3, 9, 7], np.int32)
DRAWN = {"temperature": 0.8, "top_p": 0.9}
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "greedy, log-probability": {"temperature": 0, "return_log_probs": True},
    "top-p": DRAWN,
    "top-p, log-probability": {**DRAWN, "return_log_probs": True},
    "top-k, likeliest": {"temperature": 1.3, "top_k": 5, "top_n_logprobs": 9},
    "all tokens, likeliest": {"temperature": 1.0, "top_n_logprobs": 3},
    "min-p, likeliest": {"temperature": 2.0, "min_p": 0.05, "top_n_logprobs": 300},
    "presence": {**DRAWN, "presence_penalty": 1.5, "return_log_probs": True},
    "frequency": {**DRAWN, "frequency_penalty": -0.7},
    "repetition": {"temperature": 0, "repetition_penalty": 1.7, "top_n_logprobs": 4},
    "all penalties": {**DRAWN, "repetition_penalty": 0.4, "presence_penalty": -1.0, "frequency_penalty": 0.3},
    "bias": {**DRAWN, "logit_bias": {0: 5.5, 202: -100.0, 17: 3.0}, "top_n_logprobs": 2},
    "banned": {"temperature": 0, "bad_words": ["some"], "return_log_probs": True},
    "only banned": {"temperature": 0, "bad_words": ["all"], "allowed_token_ids": [11, 4]},
    "allowed": {**DRAWN, "allowed_token_ids": [1, 31, 32, 64, 200], "top_n_logprobs": 7},
    "all edits": {
        **DRAWN,
        "repetition_penalty": 1.2,
        "logit_bias": {31: 4.0},
        "allowed_token_ids": list(range(30, 90)),
        "bad_words": ["some"],
        "top_n_logprobs": 3,
    },
}
BAD_WORDS = {"some": [(40,), (41,), (3,), (9, 7, 60)], "all": [(token,) for token in range(VOCABULARY)]}


def batch_of(requests: list[dict[str, Any]]) -> SamplingBatch:
    columns = SamplingColumns(len(requests))
    for slot, fields in enumerate(requests):
        words = fields.get("bad_words")
        columns.admit(
            slot,
            SamplingParams(**fields),
            seed=1000 + slot,
            prompt=PROMPT,
            generated=ANSWER,
            bad_words=BAD_WORDS[words[0]] if words else (),
        )
    count = len(requests)
    targets = {1: np.arange(LOGIT_ROWS + 3, dtype=np.int32)}
    return columns.rows(
        np.arange(count), generated=np.full(count, 4), needs_sample=np.ones(count, bool), prompt_targets=targets
    )


def step_of(logits_NV: torch.Tensor) -> ForwardStep:
    rows = np.arange(len(logits_NV))
    prompt = logits_NV[:1].repeat(LOGIT_ROWS + 3, 1) * torch.linspace(0.5, 2, LOGIT_ROWS + 3)[:, None]
    return ForwardStep(
        rows=LogitRows(order=rows, sampled_rows=rows, targets=[(1, slice(0, len(prompt)))]),
        logits_BV=logits_NV,
        logits_of=lambda x_ND: x_ND,
        hidden_of=lambda which: torch.zeros(len(which), 2),
        not_finite=lambda: np.empty(0, np.int64),
        x_TD=prompt.to(logits_NV.dtype),
    )


def assert_equal(actual: LogProbs, expected: LogProbs) -> None:
    np.testing.assert_allclose(actual.chosen_N, expected.chosen_N, rtol=1e-5, atol=1e-5)
    has_numbers = ~np.isnan(expected.top_NK)  # a row without numbers fails, and its ids mean nothing
    assert actual.top_ids_NK[has_numbers].tolist() == expected.top_ids_NK[has_numbers].tolist()
    np.testing.assert_allclose(actual.top_NK, expected.top_NK, rtol=1e-5, atol=1e-5)


def compare(logits_NV: torch.Tensor, batch: SamplingBatch, kernel: Sample, *, raw: bool) -> list[int]:
    """Sample on the host and as on a device, and return the tokens."""
    step = step_of(logits_NV)
    expected = sample_step(step_of(logits_NV.clone()), batch, reports_raw=raw)  # the host changes logits in place
    actual = sample_step(on_device(step, batch, kernel, reports_raw=raw), batch, reports_raw=raw)
    assert actual[0].tolist() == expected[0].tolist()
    for found, wanted in zip(actual[1:3], expected[1:3], strict=True):
        assert found.keys() == wanted.keys()
        for row, lines in wanted.items():
            assert_equal(found[row], lines)
    return expected[0].tolist()


def logits(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (3 * torch.randn(len(REQUESTS), VOCABULARY, generator=torch.Generator().manual_seed(2))).to(dtype)


@pytest.fixture(params=[Backend.TORCH, Backend.TRITON], ids=str)
def kernel(request: pytest.FixtureRequest) -> Sample:
    return select_kernels(KernelConfig(sample=request.param), torch.device("cpu")).sample


@pytest.mark.parametrize("raw", [True, False], ids=["raw", "processed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)  # bfloat16 has many equal logits
def test_every_kind_of_request_in_one_batch(kernel: Sample, raw: bool, dtype: torch.dtype) -> None:
    tokens = compare(logits(dtype), batch_of(list(REQUESTS.values())), kernel, raw=raw)
    assert min(tokens) >= 0
    assert len(set(tokens)) > 8


@pytest.mark.parametrize("name", ["greedy", "greedy, log-probability", "top-k, likeliest", "all edits"])
def test_each_kind_alone(kernel: Sample, name: str) -> None:
    row = list(REQUESTS).index(name)
    for raw in (True, False):
        compare(logits()[[row, row]], batch_of([REQUESTS[name]] * 2), kernel, raw=raw)


def test_rows_that_fail_name_the_same_cause(kernel: Sample) -> None:
    rows = logits()
    plain, edited = {"return_log_probs": True, **DRAWN}, REQUESTS["all edits"]
    rows[0, 3] = rows[1, 3] = torch.inf
    rows[2] = -torch.inf
    rows[3, 30:90] = -torch.inf  # all that the mask allows
    rows[4, 5] = torch.finfo(torch.float32).max
    overflows = {"repetition_penalty": 0.01, **DRAWN}
    expected = [RowFailure.MODEL] * 3 + [RowFailure.MASK, RowFailure.EDITS]
    for raw in (True, False):
        with np.errstate(all="ignore"):
            tokens = compare(rows[:6], batch_of([plain, edited, plain, edited, overflows, edited]), kernel, raw=raw)
        assert tokens[:5] == expected
        assert tokens[5] >= 0


def test_a_mask_ends_with_its_highest_token() -> None:
    assert len(bits_of([1, 31])) == 1  # shorter than the vocabulary: the tokens after it are not allowed
