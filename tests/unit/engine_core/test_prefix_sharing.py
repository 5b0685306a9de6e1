"""Requests with equal prefixes share their KV, as the scheduler admits them."""

from functools import partial

import pytest
from echo_executor import EchoExecutor, echo_answer, echo_weights

from megatron_runtime.backends.native.engine import EngineCore
from megatron_runtime.engine.engine_request import RequestOutput
from megatron_runtime.megatron_core.engines.dynamic_engine import DynamicInferenceEngine
from megatron_runtime.requests.config import InferenceConfig, InvalidConfigError, KVCacheManagementMode
from megatron_runtime.requests.hashing import block_digests

from . import echo_core
from .echo_core import BLOCK, request

PROMPT = list(range(1, 30))
"""Three complete blocks and five tokens."""


make_engine = partial(
    echo_core.make_engine, enable_prefix_caching=True, prefix_caching_eviction_policy="lru", block_size_tokens=BLOCK
)


def add(engine: EngineCore, number: int, prompt: list[int], length: int = 4, **params: object) -> None:
    engine.add_request(request(number, prompt, length, **params))


def step(engine: EngineCore) -> list[int]:
    outputs = engine.step()
    engine.check_integrity()
    return [output.request_id for output in outputs]


def run(engine: EngineCore) -> dict[int, RequestOutput]:
    """The last output of each request, with all its tokens."""
    tokens: dict[int, list[int]] = {}
    last: dict[int, RequestOutput] = {}
    for _ in range(1000):
        if not engine.has_work:
            break
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.new_tokens)
            last[output.request_id] = output
        engine.check_integrity()
    for number, output in last.items():
        output.new_tokens = tokens[number]
    return last


def computed(engine: EngineCore) -> int:
    return engine.stats().prompt_tokens


def test_a_second_request_computes_only_what_is_not_cached() -> None:
    engine = make_engine()
    add(engine, 0, PROMPT)
    assert run(engine)[0].num_cached_tokens == 0
    before = computed(engine)
    add(engine, 1, [*PROMPT[:20], 99, 98])
    last = run(engine)[1]
    assert last.num_cached_tokens == 16
    assert last.new_tokens == echo_answer([*PROMPT[:20], 99, 98], 4)
    assert computed(engine) - before == 22 - 16
    stats = engine.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (len(PROMPT) + 22, 16)


@pytest.mark.parametrize(("length", "cached"), [(16, 8), (17, 8), (18, 16)])
def test_a_full_hit_still_computes_two_tokens(length: int, cached: int) -> None:
    engine = make_engine()
    for number in (0, 1):
        add(engine, number, PROMPT[:length])
        last = run(engine)[number]
        assert last.new_tokens == echo_answer(PROMPT[:length], 4)
    assert last.num_cached_tokens == cached


def test_only_complete_blocks_of_the_prompt_are_registered() -> None:
    engine = make_engine()
    add(engine, 0, PROMPT, 30)
    run(engine)
    assert engine.take_block_events().stored == block_digests(PROMPT, BLOCK)


def test_blocks_are_stored_only_after_the_step_that_computed_them() -> None:
    engine = make_engine(max_tokens=12)
    add(engine, 0, PROMPT)
    digests = block_digests(PROMPT, BLOCK)
    plan = engine.schedule()
    assert plan is not None
    assert not engine.take_block_events()
    assert not engine.collect(engine.executor.execute(plan))
    assert engine.take_block_events().stored == digests[:1]
    step(engine)
    step(engine)
    assert engine.take_block_events().stored == digests[1:]


def test_a_request_that_shares_a_prefix_under_computation_waits_and_others_run() -> None:
    engine = make_engine()
    add(engine, 0, PROMPT)
    add(engine, 1, PROMPT)
    add(engine, 2, [55] * 20)
    assert step(engine) == [0, 2]
    assert engine.stats().prefix_coordination_waits == 1
    last = run(engine)
    assert last[1].num_cached_tokens == 24
    assert last[1].new_tokens == echo_answer(PROMPT, 4)
    assert engine.stats().prefix_coordination_waits == 1


def test_no_request_waits_for_an_aborted_one() -> None:
    engine = make_engine(max_tokens=12)
    add(engine, 0, PROMPT)
    add(engine, 1, PROMPT)
    step(engine)
    engine.abort_request(0)
    last = run(engine)[1]
    assert last.new_tokens == echo_answer(PROMPT, 4)
    assert last.num_cached_tokens == 8


def test_a_block_that_a_chunk_of_one_token_completes_is_findable_at_once() -> None:
    engine = make_engine(max_tokens=23)
    add(engine, 0, PROMPT[:24], 50)
    add(engine, 1, [*PROMPT[:24], 99, 98, 97], 50)
    for _ in range(4):
        step(engine)
    assert engine.stats().num_running == 2
    last = run(engine)
    assert last[1].num_cached_tokens == 24


def test_tenants_with_different_salts_share_nothing() -> None:
    engine = make_engine()
    cached = []
    for number, salt in enumerate([None, "a", "b", "a", None]):
        add(engine, number, PROMPT, cache_salt=salt)
        cached.append(run(engine)[number].num_cached_tokens)
    assert cached == [0, 0, 0, 24, 24]


def test_a_request_for_prompt_log_probs_does_not_read_the_cache() -> None:
    engine = make_engine()
    add(engine, 0, PROMPT)
    run(engine)
    add(engine, 1, PROMPT, return_log_probs=True, skip_prompt_log_probs=False)
    assert run(engine)[1].num_cached_tokens == 0


def test_a_request_that_does_not_read_the_cache_does_not_wait_for_another_to_fill_it() -> None:
    engine = make_engine()
    add(engine, 0, PROMPT)
    add(engine, 1, PROMPT, return_log_probs=True, skip_prompt_log_probs=False)
    run(engine)
    assert engine.stats().prefix_coordination_waits == 0


def test_blocks_that_a_preempted_request_computed_itself_do_not_count_as_cached() -> None:
    engine = make_engine()
    add(engine, 0, PROMPT)
    step(engine)
    engine._scheduler.preempt_all()
    last = run(engine)
    assert last[0].new_tokens == echo_answer(PROMPT, 4)[1:]
    assert last[0].num_cached_tokens == engine.stats().prefix_cache_hits == 0
    assert engine.stats().prefix_cache_queries == len(PROMPT)
    assert computed(engine) < 2 * len(PROMPT)  # the cache was read all the same


def test_without_the_cache_nothing_is_shared() -> None:
    engine = make_engine(enable_prefix_caching=False)
    for number in (0, 1):
        add(engine, number, PROMPT)
        assert run(engine)[number].num_cached_tokens == 0
    assert not engine.take_block_events()
    assert engine.stats().prefix_cache_queries == 0


def test_ref_zero_shares_among_requests_that_run_together_only() -> None:
    engine = make_engine(prefix_caching_eviction_policy="ref_zero")
    add(engine, 0, PROMPT, 10)
    step(engine)
    add(engine, 1, PROMPT)
    step(engine)
    last = run(engine)
    assert last[1].num_cached_tokens == 24
    events = engine.take_block_events()
    assert (events.stored, sorted(events.evicted)) == ([], sorted(block_digests(PROMPT, BLOCK)))
    add(engine, 2, PROMPT)
    assert run(engine)[2].num_cached_tokens == 0


def test_cached_blocks_make_room_for_running_requests() -> None:
    engine = make_engine(pages=12)
    for number in range(6):
        prompt = [number + 1] * 20
        add(engine, number, prompt, 10)
        assert run(engine)[number].new_tokens == echo_answer(prompt, 10)
    assert engine.take_block_events().evicted
    assert engine.stats().preemptions == 0


def test_a_prefix_held_only_by_victims_does_not_count_as_free() -> None:
    """Where only a victim holds the matched blocks they are pinned when it goes: they make no room beside."""
    engine = make_engine(pages=9)
    add(engine, 0, PROMPT[:18], 10, priority=1)
    step(engine)
    add(engine, 1, [50] * 5, 6)
    step(engine)
    add(engine, 2, PROMPT[:16] + [90] * 5, 4)
    assert 2 not in step(engine)
    assert engine.stats().preemptions == 0
    last = run(engine)
    assert last[2].new_tokens == echo_answer(PROMPT[:16] + [90] * 5, 4)


def test_pages_shared_with_a_victim_are_not_freed() -> None:
    engine = make_engine(pages=8)
    add(engine, 0, PROMPT[:18], 8)
    step(engine)
    add(engine, 1, [*PROMPT[:16], 80, 81], 6, priority=1)
    step(engine)
    add(engine, 2, [90] * 11, 4)
    assert 2 not in step(engine)
    assert engine.stats().preemptions == 0
    last = run(engine)
    assert last[2].new_tokens == echo_answer([90] * 11, 4)


def test_blocks_computed_during_a_change_of_epoch_are_not_cached() -> None:
    engine = make_engine(max_tokens=12)
    add(engine, 0, PROMPT)
    step(engine)
    assert len(engine.context.prefix_cache) == 1
    engine.set_epoch(3)
    run(engine)
    assert len(engine.context.prefix_cache) == 0
    add(engine, 1, PROMPT)
    assert run(engine)[1].num_cached_tokens == 0


def test_other_weights_empty_the_cache_even_under_the_same_epoch() -> None:
    engine = make_engine()
    add(engine, 0, PROMPT)
    run(engine)
    engine.executor.stage_weights("other")
    engine.swap_weights(engine.epoch)
    add(engine, 1, PROMPT)
    last = run(engine)
    assert last[1].num_cached_tokens == 0
    assert last[1].new_tokens == echo_answer(PROMPT, 4, weights=echo_weights("other"))


def test_an_epoch_of_other_weights_empties_the_cache() -> None:
    engine = make_engine()
    add(engine, 0, PROMPT)
    run(engine)
    engine.set_epoch(0)
    assert len(engine.context.prefix_cache) == 3
    engine.set_epoch(1)
    assert engine.take_block_events().cleared
    add(engine, 1, PROMPT)
    assert run(engine)[1].num_cached_tokens == 0


@pytest.mark.parametrize("mode", KVCacheManagementMode)
def test_a_suspend_clears_the_cache_only_where_the_kv_is_dropped(mode: KVCacheManagementMode) -> None:
    engine = make_engine(kv_cache_management_mode=mode)
    add(engine, 0, PROMPT)
    run(engine)
    engine.take_block_events()
    engine.suspend()
    dropped = mode is KVCacheManagementMode.RECOMPUTE
    assert engine.take_block_events().cleared is dropped
    engine.resume()
    add(engine, 1, PROMPT)
    last = run(engine)[1]
    assert last.num_cached_tokens == (0 if dropped else 24)
    assert last.new_tokens == echo_answer(PROMPT, 4)


@pytest.mark.parametrize("mode", KVCacheManagementMode)
def test_a_suspend_that_fails_midway_restores_the_cache(
    mode: KVCacheManagementMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise OSError("device lost")

    engine = make_engine(kv_cache_management_mode=mode)
    add(engine, 0, PROMPT)
    first = engine.step()
    with monkeypatch.context() as patched:
        patched.setattr(engine.executor, "release_weights", fail)
        with pytest.raises(OSError, match="device lost"):
            engine.suspend()
    assert [*first[0].new_tokens, *run(engine)[0].new_tokens] == echo_answer(PROMPT, 4)


def test_a_block_that_is_no_multiple_of_a_page_is_rejected() -> None:
    with pytest.raises(InvalidConfigError, match=r"block_size_tokens=10.*multiple of 4"):
        make_engine(block_size_tokens=10)


@pytest.mark.parametrize("preserve", [True, False])
def test_a_reset_forgets_requests_and_the_cache_unless_that_is_kept(preserve: bool) -> None:
    engine = make_engine(max_requests=2)
    add(engine, 0, PROMPT)
    run(engine)
    for number in range(1, 5):
        add(engine, number, [number, *PROMPT], 50)
    step(engine)
    engine.reset(preserve_prefix_cache=preserve)
    engine.check_integrity()
    assert not engine.has_work
    assert engine.context.usage == 0
    add(engine, 1, PROMPT)
    last = run(engine)[1]
    assert last.num_cached_tokens == (24 if preserve else 0)
    assert last.new_tokens == echo_answer(PROMPT, 4)
    if not preserve:
        fresh = make_engine().context.prefix_cache
        engine.reset()
        assert engine.context.prefix_cache.num_free == fresh.num_free


async def test_an_engine_that_serves_a_coordinator_is_not_reset() -> None:
    engine = DynamicInferenceEngine(EchoExecutor(), InferenceConfig())
    await engine.start_listening_to_data_parallel_coordinator()
    try:
        with pytest.raises(RuntimeError, match="serves a coordinator"):
            engine.reset()
    finally:
        await engine.stop_listening()
    engine.reset()
