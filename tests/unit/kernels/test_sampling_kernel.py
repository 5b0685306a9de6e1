"""Sampling without sorting: the kernel equals its reference, and both equal the runtime's sampler."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_kernels import sampling, sampling_triton
from megatron_kernels.tuning import Tile
from megatron_runtime.sampling.sampler import kept_ids, uniform

from .conftest import few


def parameters(*, rows=1, temperature=1.0, top_k=0, top_p=0.0, min_p=0.0, seed=0, position=0):
    def column(value, dtype):
        return torch.tensor(value if isinstance(value, list) else [value] * rows, dtype=dtype)

    return {
        "temperature_N": column(temperature, torch.float32),
        "top_k_N": column(top_k, torch.int32),
        "top_p_N": column(top_p, torch.float32),
        "min_p_N": column(min_p, torch.float32),
        "seeds_N": column(seed, torch.int64),
        "positions_N": column(position, torch.int64),
    }


@pytest.fixture
def small_tiles(monkeypatch):
    """Small tiles, so that short rows have several, the last one partial."""
    monkeypatch.setattr(sampling_triton, "vocabulary_tile", lambda _vocabulary, _size: Tile(64, 1))


@pytest.fixture(params=[8, 256], ids=["few candidates", "many candidates"])
def candidates(request, monkeypatch):
    """A buffer that overflows for a flat row, and one that holds every row of these tests."""
    monkeypatch.setattr(sampling_triton, "CANDIDATES", request.param)


def check(logits, arguments):
    processed, expected_processed = torch.full((2, *logits.shape), torch.nan)
    tokens, log_probs = sampling_triton.sample(logits, **arguments, processed_NV=processed)
    expected_tokens, expected_log_probs = sampling.sample(logits, **arguments, processed_NV=expected_processed)
    assert tokens.tolist() == expected_tokens.tolist() == sampling_triton.sample(logits, **arguments)[0].tolist()
    torch.testing.assert_close(log_probs, expected_log_probs, rtol=1e-5, atol=1e-5, equal_nan=True)
    is_finite = tokens >= 0
    torch.testing.assert_close(processed[is_finite], expected_processed[is_finite], rtol=1e-5, atol=1e-5)


@given(
    temperature=st.sampled_from([0.0, 0.3, 1.0, 5.0]),
    top_k=st.sampled_from([0, 1, 7, 149, 150, 400]),
    top_p=st.sampled_from([0.0, 0.1, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
    position=st.integers(0, 2**40),
    has_ties=st.booleans(),
)
@few
def test_every_mix_of_filters(
    temperature, top_k, top_p, min_p, position, has_ties, dtype, generator, small_tiles, candidates
):
    logits = 3 * torch.randn(1, 150, generator=generator)
    logits = (logits.round() if has_ties else logits).to(dtype)
    # A masked token.
    logits[0, 5] = float("-inf")
    check(
        logits,
        parameters(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=-3, position=position),
    )


def test_each_row_is_sampled_with_its_own_parameters(generator, small_tiles):
    logits = 2 * torch.randn(4, 130, generator=generator)[:, :100]
    arguments = parameters(
        temperature=[0.0, 1.0, 0.7, 1.0],
        top_k=[0, 3, 0, 0],
        top_p=[0.0, 0.0, 0.8, 0.0],
        min_p=[0.0, 0.0, 0.0, 0.2],
        seed=[1, 2**63 - 1, -(2**63), 7],
        position=[0, 1, 2, 3],
    )
    check(logits, arguments)
    together, _ = sampling_triton.sample(logits, **arguments)
    alone = [
        sampling_triton.sample(logits[i : i + 1], **{k: v[i : i + 1] for k, v in arguments.items()}) for i in range(4)
    ]
    assert together.tolist() == [int(token) for token, _ in alone]


def test_greedy_chooses_the_lowest_of_equal_tokens(small_tiles):
    logits = torch.zeros(1, 200)
    logits[0, [70, 150]] = 1.0
    assert sampling_triton.sample(logits, **parameters(temperature=0.0))[0].tolist() == [70]


@pytest.mark.parametrize("filters", [{"top_k": 3}, {"top_p": 0.5}, {"min_p": 1.0}, {"top_k": 3, "min_p": 1.0}])
def test_filters_among_equal_weights_keep_the_lowest_ids(filters, small_tiles):
    """Of eight equal tokens, top_k=3 keeps three, top_p=0.5 four, and min_p=1 all eight."""
    logits = torch.full((1, 128), -1e4)
    ids = [2, 9, 60, 63, 64, 65, 100, 127]
    logits[0, ids] = 0.0
    kept = {"top_k": 3, "top_p": 4}.get(next(iter(filters)), 8)
    rows = 16
    drawn, _ = sampling_triton.sample(
        logits.expand(rows, -1), **parameters(rows=rows, seed=5, position=list(range(rows)), **filters)
    )
    expected = [ids[int(sampling.uniform(5, position) * kept)] for position in range(rows)]
    assert drawn.tolist() == expected


@pytest.mark.parametrize("filters", [{"top_k": 5}, {"top_p": 0.99999}, {"top_k": 90, "top_p": 0.99999}])
def test_filters_that_keep_more_than_the_likeliest_tokens(filters, small_tiles):
    """Three tokens are likely, and the filters keep more than these."""
    logits = torch.linspace(-12, -10, 100)[None].clone()
    logits[0, [3, 50, 97]] = torch.tensor([0.0, 1.0, 2.0])
    for position in range(3):
        check(logits, parameters(seed=9, position=position, temperature=1.0, **filters))


@given(seed=st.integers(-(2**63), 2**63 - 1), position=st.integers(0, 2**62))
def test_the_uniform_number_equals_the_runtimes(seed, position):
    expected = uniform(np.array([seed], dtype=np.int64).view(np.uint64), np.array([position]))[0]
    assert sampling.uniform(seed, position) == expected


@given(
    top_k=st.sampled_from([0, 5, 90]),
    top_p=st.sampled_from([0.0, 0.3, 0.95]),
    min_p=st.sampled_from([0.0, 0.02]),
    position=st.integers(0, 10**6),
)
def test_the_reference_samples_the_runtimes_tokens(top_k, top_p, min_p, position):
    logits = 2 * torch.randn(300, generator=torch.Generator().manual_seed(position))
    arguments = parameters(temperature=0.8, top_k=top_k, top_p=top_p, min_p=min_p, seed=11, position=position)
    token = int(sampling.sample(logits[None], **arguments)[0])
    weights = np.exp((logits.numpy() - logits.max().item()) / np.float32(0.8))
    ids = kept_ids(weights, top_k=top_k, top_p=top_p, min_p=min_p)
    ids = np.arange(300) if ids is None else ids
    cumulative = weights[ids].cumsum(dtype=np.float64)
    assert token == ids[np.searchsorted(cumulative, sampling.uniform(11, position) * cumulative[-1], side="right")]


@pytest.mark.parametrize("filters", [{}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.filterwarnings("ignore:invalid value encountered", "ignore:divide by zero", "ignore:All-NaN slice")
def test_a_row_that_is_not_finite_has_no_token_and_changes_no_other(temperature, filters, generator, small_tiles):
    """Wherever in the row it is, in a whole tile or the partial one at the end."""
    logits = torch.randn(10, 150, generator=generator)
    logits[9] = float("nan")
    logits[1, 3] = logits[2, 149] = float("nan")
    logits[3, 70] = logits[4, 149] = float("inf")
    logits[5] = float("-inf")
    logits[6, :64] = float("-inf")  # the first tile
    logits[7] = torch.where(torch.arange(150) == 149, -1e38, float("-inf"))
    arguments = parameters(rows=10, temperature=temperature, seed=4, position=list(range(10)), **filters)
    check(logits, arguments)
    tokens, _ = sampling_triton.sample(logits, **arguments)
    assert tokens[[1, 2, 3, 4, 5, 9]].tolist() == [sampling.NOT_FINITE] * 6
    assert tokens[7] == 149
    for row in (0, 6, 8):
        alone, _ = sampling_triton.sample(logits[row : row + 1], **{k: v[row : row + 1] for k, v in arguments.items()})
        assert tokens[row] == alone >= 0
