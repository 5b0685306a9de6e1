"""Sampling: known random numbers, exact distributions, the filters, and independence of the batch."""

import numpy as np
import pytest
from soak import size

from megatron_runtime.sampling.batch import LogitEdits, Penalties, SamplingBatch
from megatron_runtime.sampling.sampler import apply_edits, log_probs, philox4x32, processed_logits, sample, uniform

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


def batch_of(n: int, *, edits: dict[int, LogitEdits] | None = None, **columns: object) -> SamplingBatch:
    """A batch of n rows; a single value of a column holds for all rows."""
    values = {"temperature": 1.0, "top_k": 0, "top_p": 0.0, "min_p": 0.0, "seeds": 0, "positions": 0, **columns}
    dtypes = {"top_k": np.int32, "seeds": np.uint64, "positions": np.int64}
    arrays = {
        name: np.broadcast_to(np.asarray(value, dtypes.get(name, np.float32)), n) for name, value in values.items()
    }
    no_reports = {"num_log_probs": np.full(n, -1, np.int32), "returns_hidden": np.zeros(n, np.bool_)}
    return SamplingBatch(**no_reports, edits=edits or {}, **arrays)


def draw(logits: np.ndarray, *, edits: dict[int, LogitEdits] | None = None, **columns: object) -> np.ndarray:
    """Sample every row of `logits`, which stay as they are."""
    n = len(logits)
    return sample(logits.astype(np.float32), batch_of(n, edits=edits, **columns), np.arange(n))


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def test_philox_gives_the_published_values() -> None:
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
    monkeypatch.setattr("megatron_runtime.sampling.sampler.philox4x32", lambda *_: words)
    assert 0 < uniform(np.zeros(1, np.uint64), np.zeros(1, np.int64))[0] < 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (0.5, 0, 0.0, 0.0),
        (1.0, 4, 0.0, 0.0),
        (1.0, 0, 0.8, 0.0),
        (1.0, 0, 0.0, 0.2),
        (1.5, 8, 0.9, 0.1),
    ],
)
def test_frequencies_are_those_of_the_exact_distribution(
    temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    draws = size(20_000, soak=100_000)
    logits = np.random.default_rng(1).normal(size=12) * 1.5
    tokens = draw(
        np.broadcast_to(logits, (draws, 12)),
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seeds=9,
        positions=np.arange(draws),
    )
    expected = softmax(logits / temperature)
    order = np.argsort(-expected)
    kept = order[:top_k] if top_k else order
    kept = kept[expected[kept] >= min_p * expected.max()]
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


def test_each_row_of_logits_uses_the_parameters_of_its_plan_row() -> None:
    """Rows without a sample, as of prompts under way, lie between."""
    logits = np.random.default_rng(4).normal(size=(6, 40)).astype(np.float32)
    columns = {
        "temperature": [0.0, 1.0, 0.5, 2.0, 1.0, 1.0],
        "top_k": [0, 3, 0, 0, 7, 0],
        "top_p": [0, 0, 0.5, 0, 0, 0],
        "min_p": [0, 0, 0, 0.3, 0, 0],
        "seeds": [11, 12, 13, 14, 15, 16],
        "positions": [0, 5, 2, 9, 4, 7],
    }
    whole = draw(logits, **columns)
    for rows in ([1, 4], [5, 2, 3], [3]):
        some = sample(logits[rows], batch_of(6, **columns), np.array(rows))
        assert some.tolist() == whole[rows].tolist()


@pytest.mark.parametrize("top_k", [0, 5])
@pytest.mark.parametrize("top_p", [0.0, 0.9])
def test_the_likeliest_token_passes_the_highest_min_p(top_k: int, top_p: float) -> None:
    logits = np.random.default_rng(3).normal(size=(50, 40))
    assert np.array_equal(draw(logits, min_p=1.0, top_k=top_k, top_p=top_p), logits.argmax(axis=-1))


@pytest.mark.slow
def test_every_token_of_a_large_flat_vocabulary_can_be_drawn() -> None:
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
            weights = np.exp(logits - logits.max()).astype(np.float64)
            kept = order[:top_k] if top_k else order
            if top_p:
                kept = kept[: np.searchsorted(weights[kept].cumsum(), top_p * weights[kept].sum()) + 1]
            kept = np.sort(kept)
            numbers = uniform(np.zeros(draws, np.uint64), np.arange(draws))
            cumulative = weights[kept].cumsum()
            expected = kept[np.searchsorted(cumulative, numbers * cumulative[-1], side="right")]
            assert (tokens == expected).mean() > 0.98  # rounding may move a number over the edge of a token


def test_a_token_without_probability_is_never_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even by the smallest and the largest random number."""
    logits = np.full((2, 1000), -np.inf, np.float32)
    logits[:, [3, 700]] = 0.0
    for number, token in ((2.0**-53, 3), (1 - 2.0**-53, 700)):
        monkeypatch.setattr(
            "megatron_runtime.sampling.sampler.uniform", lambda seeds, _, u=number: np.full(len(seeds), u)
        )
        assert draw(logits, top_k=np.array([0, 2])).tolist() == [token, token]


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


def penalised(repetition: float = 1.0, presence: float = 0.0, frequency: float = 0.0) -> LogitEdits:
    """Token 0 was in the prompt, 1 once in the answer, 2 three times."""
    ids, counts = np.array([0, 1, 2], np.int32), np.array([0, 1, 3], np.int32)
    return LogitEdits(Penalties(ids, counts, repetition=repetition, presence=presence, frequency=frequency))


@pytest.mark.parametrize(
    ("edits", "expected"),
    [
        (penalised(repetition=2.0), [1.0, -2.0, 1.5, 4.0]),
        (penalised(presence=0.5), [2.0, -1.5, 2.5, 4.0]),
        (penalised(frequency=0.5), [2.0, -1.5, 1.5, 4.0]),
        (LogitEdits(bias_ids=np.array([3], np.int32), bias=np.array([-10], np.float32)), [2.0, -1.0, 3.0, -6.0]),
        (LogitEdits(banned=np.array([3], np.int32)), [2.0, -1.0, 3.0, -np.inf]),
        (LogitEdits(allowed=np.array([0b0011], np.uint32)), [2.0, -1.0, -np.inf, -np.inf]),
        (
            LogitEdits(banned=np.array([0], np.int32), allowed=np.array([0b0001], np.uint32)),
            [2.0, -np.inf, -np.inf, -np.inf],
        ),
    ],
    ids=["repetition", "presence", "frequency", "bias", "banned", "allowed", "banned but the only one allowed"],
)
def test_edits_change_the_logits_as_defined(edits: LogitEdits, expected: list[float]) -> None:
    logits = np.array([2.0, -1.0, 3.0, 4.0], np.float32)
    apply_edits(logits, edits)
    assert logits.tolist() == expected


def test_edits_change_only_their_row() -> None:
    logits = np.tile(np.array([0.0, 1.0, 2.0, 3.0]), (3, 1))
    edits = {1: LogitEdits(banned=np.array([3, 2], np.int32))}
    assert draw(logits, edits=edits, temperature=0.0).tolist() == [3, 1, 3]


def test_log_probs_and_likeliest_tokens_are_exact() -> None:
    logits = np.random.default_rng(4).normal(size=(5, 100)).astype(np.float32) * 5
    logits[2, 40:43] = 30.0
    tokens = np.array([0, 7, 99, 3, 50])
    found = log_probs(logits, tokens, top_n=4)
    for row in range(5):
        exact = np.log(softmax(logits[row].astype(np.float64)))
        assert found.chosen_N[row] == pytest.approx(exact[tokens[row]], abs=1e-5)
        likeliest = np.lexsort((np.arange(100), -exact))[:4]
        assert [token for token, _ in found.row(row, 4)] == likeliest.tolist()
        assert [value for _, value in found.row(row, 4)] == pytest.approx(exact[likeliest].tolist(), abs=1e-5)
    assert found.row(0, 2) == found.row(0, 4)[:2]
    assert log_probs(logits, tokens, top_n=0).row(0, 0) == []


def test_tokens_are_drawn_from_the_processed_logits() -> None:
    logits = np.array([1.0, 3.0, 2.0, -1.0], np.float32)
    kept = processed_logits(logits, batch_of(1, temperature=0.5, top_k=2), 0)
    assert kept.tolist() == [-np.inf, 6.0, 4.0, -np.inf]
    assert processed_logits(logits, batch_of(1, temperature=0.0), 0).tolist() == logits.tolist()
