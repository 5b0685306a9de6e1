"""Parameters by slot become the rows of a step."""

import numpy as np

from megatron_runtime.requests.sampling_params import SamplingParams
from megatron_runtime.sampling.batch import NO_LOG_PROBS, SamplingBatch, SamplingColumns

NOTHING = np.empty(0, np.int32)


def admit(columns: SamplingColumns, slot: int, prompt=NOTHING, generated=NOTHING, stop_ids=(), **params) -> None:  # type: ignore[no-untyped-def]
    columns.admit(
        slot,
        SamplingParams(**params),
        seed=slot + 100,
        prompt=np.asarray(prompt, np.int32),
        generated=np.asarray(generated, np.int32),
        stop_ids=stop_ids,
    )


def rows(columns: SamplingColumns, *slots: int, generated: int = 0) -> SamplingBatch:
    n = len(slots)
    return columns.rows(
        np.array(slots),
        generated=np.full(n, generated),
        needs_sample=np.ones(n, bool),
        prompt_targets={},
    )


def test_rows_follow_their_slots_in_any_order() -> None:
    columns = SamplingColumns(4)
    admit(columns, 0, temperature=0.5, top_k=3, top_n_logprobs=2)
    admit(columns, 3, temperature=2.0, top_p=0.25, min_p=0.5, return_log_probs=True)
    admit(columns, 1, top_k=1)
    batch = rows(columns, 3, 1, 0, generated=7)
    assert batch.temperature.tolist() == [2.0, 0.0, 0.5]
    assert batch.top_k.tolist() == [0, 1, 3]
    assert batch.top_p.tolist() == [0.25, 0.0, 0.0]
    assert batch.min_p.tolist() == [0.5, 0.0, 0.0]
    assert batch.seeds.tolist() == [103, 101, 100]
    assert batch.positions.tolist() == [7, 7, 7]
    assert batch.num_log_probs.tolist() == [0, NO_LOG_PROBS, 2]
    assert batch.edits == {}


def test_penalties_count_prompt_answer_and_what_was_generated_elsewhere() -> None:
    columns = SamplingColumns(2)
    admit(columns, 1, prompt=[5, 5, 9], generated=[9, 4], presence_penalty=1.0)
    columns.append(np.array([1]), np.array([4], np.int32))
    penalties = rows(columns, 1).edits[0].penalties
    assert penalties is not None
    assert dict(zip(penalties.ids.tolist(), penalties.counts.tolist(), strict=True)) == {5: 0, 9: 1, 4: 2}


def test_penalties_grow_with_the_answer() -> None:
    columns = SamplingColumns(1)
    admit(columns, 0, frequency_penalty=0.1)
    for token in range(1000):
        columns.append(np.array([0]), np.array([token], np.int32))
    penalties = rows(columns, 0).edits[0].penalties
    assert penalties is not None
    assert penalties.ids.tolist() == list(range(1000))
    assert set(penalties.counts.tolist()) == {1}


def test_stop_tokens_are_banned_until_min_tokens() -> None:
    columns = SamplingColumns(1)
    admit(columns, 0, stop_ids={7, 3}, min_tokens=2)
    banned = rows(columns, 0, generated=1).edits[0].banned
    assert banned is not None
    assert banned.tolist() == [3, 7]
    assert rows(columns, 0, generated=2).edits == {}


def test_released_slot_leaves_no_parameters() -> None:
    columns = SamplingColumns(1)
    admit(columns, 0, logit_bias={3: 1.0}, min_p=0.3)
    columns.release(0)
    admit(columns, 0)
    batch = rows(columns, 0)
    assert batch.edits == {}
    assert batch.min_p.tolist() == [0.0]


def test_extreme_values_keep_their_meaning_in_the_types_of_the_columns() -> None:
    columns = SamplingColumns(4)
    admit(columns, 0, top_k=2**31 - 1, temperature=1e6)
    admit(columns, 1, temperature=1e-44)
    admit(columns, 2, top_p=1e-300)
    admit(columns, 3, top_p=1 - 1e-12)
    batch = rows(columns, 0, 1, 2, 3)
    assert batch.top_k[0] == 2**31 - 1
    assert batch.temperature[:2].tolist() == [1e6, 0.0]
    assert batch.top_p[2] > 0, "a top_p of 0 keeps all tokens"
    assert batch.top_p[3] == 1, "as good as 1, which keeps all tokens"
