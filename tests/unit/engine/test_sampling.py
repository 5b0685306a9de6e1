"""Sampling: known random numbers, exact distributions, the filters, and independence of the batch."""

import numpy as np
import pytest

from megatron_runtime.sampling.philox import philox4x32, uniform
from megatron_runtime.sampling.sampler import log_probs, sample

ONES = 0xFFFFFFFF
# Known answers of the authors' library Random123 (kat_vectors, philox4x32 with 10 rounds).
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES, ONES, ONES, ONES), (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def draw(logits: np.ndarray, *, temperature=1.0, top_k=0, top_p=0.0, seeds=0, positions=0) -> np.ndarray:  # type: ignore[no-untyped-def]
    """Sample every row of `logits`; a single value of a parameter holds for all rows."""
    n = len(logits)
    return sample(
        logits.astype(np.float32),
        temperature=np.broadcast_to(np.float32(temperature), n),
        top_k=np.broadcast_to(np.int32(top_k), n),
        top_p=np.broadcast_to(np.float32(top_p), n),
        seeds=np.broadcast_to(np.asarray(seeds, np.uint64), n),
        positions=np.broadcast_to(np.asarray(positions, np.int64), n),
    )


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def test_known_answers() -> None:
    counters, keys, answers = (np.array(column, np.uint64).T for column in zip(*KNOWN_ANSWERS, strict=True))
    assert np.array_equal(philox4x32(counters, keys), answers)


def test_uniform_uses_every_bit_of_seed_and_position() -> None:
    seeds = np.array([0, 1, 1 << 32, 1 << 63, 0, 0], np.uint64)
    positions = np.array([0, 0, 0, 0, 1, 1 << 32], np.int64)
    assert len(set(uniform(seeds, positions))) == 6


def test_uniform_is_uniform_and_never_0_or_1() -> None:
    numbers = uniform(np.full(200_000, 5, np.uint64), np.arange(200_000))
    assert numbers.min() > 0
    assert numbers.max() < 1
    counts, _ = np.histogram(numbers, bins=100, range=(0, 1))
    assert ((counts - 2000) ** 2 / 2000).sum() < 150  # chi-square with 99 degrees of freedom: p = 0.0007


def test_uniform_is_below_1_for_the_largest_words(monkeypatch: pytest.MonkeyPatch) -> None:
    words = np.full((4, 1), ONES, np.uint64)
    monkeypatch.setattr("megatron_runtime.sampling.philox.philox4x32", lambda *_: words)
    assert 0 < uniform(np.zeros(1, np.uint64), np.zeros(1, np.int64))[0] < 1


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 0.0), (0.5, 0, 0.0), (2.0, 0, 1.0), (1.0, 4, 0.0), (1.0, 0, 0.8), (1.5, 6, 0.7), (1.0, 1, 0.0)],
)
def test_frequencies_are_those_of_the_exact_distribution(temperature: float, top_k: int, top_p: float) -> None:
    draws = 40_000
    logits = np.random.default_rng(1).normal(size=12) * 1.5
    tokens = draw(
        np.broadcast_to(logits, (draws, 12)),
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seeds=9,
        positions=np.arange(draws),
    )
    expected = softmax(logits / temperature)
    order = np.argsort(-expected)
    kept = order[:top_k] if top_k else order
    if 0 < top_p < 1:
        cumulative = expected[kept].cumsum() / expected[kept].sum()
        kept = kept[: np.searchsorted(cumulative, top_p) + 1]
    expected[np.setdiff1d(order, kept)] = 0
    expected /= expected.sum()
    counts = np.bincount(tokens, minlength=12)
    assert counts[expected == 0].sum() == 0
    wanted = draws * expected[kept]
    statistic = ((counts[kept] - wanted) ** 2 / wanted).sum()
    assert statistic < 35  # chi-square with at most 11 degrees of freedom: p < 0.0003


def test_large_vocabulary_is_drawn_from_whole_however_flat() -> None:
    """More tokens matter than are sorted at first: every stage of the search must agree with the definition."""
    vocabulary, draws = 9000, 300
    random = np.random.default_rng(2)
    for spread in (0.01, 1.0, 4.0):
        logits = (random.normal(size=vocabulary) * spread).astype(np.float32)
        for top_k, top_p in ((0, 0.0), (5000, 0.0), (0, 0.95), (600, 0.5)):
            tokens = draw(
                np.broadcast_to(logits, (draws, vocabulary)), top_k=top_k, top_p=top_p, positions=np.arange(draws)
            )
            order = np.lexsort((np.arange(vocabulary), -logits))
            weights = np.exp((logits - logits.max())[order]).astype(np.float64)
            if top_k:
                weights = weights[:top_k]
            if top_p:
                weights = weights[: np.searchsorted(weights.cumsum(), top_p * weights.sum()) + 1]
            numbers = uniform(np.zeros(draws, np.uint64), np.arange(draws))
            expected = order[np.searchsorted(weights.cumsum(), numbers * weights.sum(), side="right")]
            assert (tokens == expected).mean() > 0.98  # rounding may move a number over the edge of a token


def test_equal_probabilities_are_ordered_by_id() -> None:
    logits = np.zeros((2000, 1000))
    numbers = uniform(np.zeros(2000, np.uint64), np.arange(2000))
    tokens = draw(logits, positions=np.arange(2000))
    assert np.array_equal(tokens, (numbers * 1000).astype(int))
    assert draw(logits, top_k=10, positions=np.arange(2000)).max() == 9
    assert set(draw(logits, temperature=0.0)) == {0}


def test_a_token_does_not_depend_on_its_batch() -> None:
    random = np.random.default_rng(3)
    logits = random.normal(size=(33, 5000)) * 2
    settings = {
        "temperature": np.tile([0.0, 0.7, 1.0], 11),
        "top_k": np.tile([0, 0, 50, 300, 0, 1, 0, 0, 0, 0, 0], 3),
        "top_p": np.tile([0, 0.9, 0.5], 11),
        "seeds": random.integers(0, 1 << 63, 33),
        "positions": np.arange(33),
    }
    together = draw(logits, **settings)
    backwards = draw(logits[::-1], **{name: values[::-1] for name, values in settings.items()})
    alone = [int(draw(logits[i : i + 1], **{k: v[i : i + 1] for k, v in settings.items()})[0]) for i in range(33)]
    assert together.tolist() == alone
    assert together.tolist() == backwards[::-1].tolist()
    assert together[settings["temperature"] == 0].tolist() == logits.argmax(-1)[settings["temperature"] == 0].tolist()


def test_log_probs_ignore_temperature_and_filters() -> None:
    logits = np.random.default_rng(4).normal(size=(5, 100)).astype(np.float32) * 5
    tokens = np.array([0, 7, 99, 3, 50])
    expected = [np.log(softmax(row.astype(np.float64)))[token] for row, token in zip(logits, tokens, strict=True)]
    assert log_probs(logits, tokens) == pytest.approx(expected, abs=1e-5)
