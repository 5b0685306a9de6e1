"""Which engine a request goes to: pure decisions, then the same over sockets."""

import json
import random
from collections import Counter

import pytest
from soak import SOAK

from megatron_runtime.coordinator.core.records import Engine
from megatron_runtime.coordinator.core.routing import (
    MAX_COMPARED,
    MAX_HOLDERS,
    MAX_KNOWN_BLOCKS,
    EngineRouter,
    EnginesByLoad,
    PromptHashes,
    load_by,
)
from megatron_runtime.coordinator.core.settings import RoutingPolicy
from megatron_runtime.protocol.lifecycle import EngineState
from megatron_runtime.protocol.messages import tokens_to_bytes

BLOCK = 4
PROMPT = list(range(16))


def hashes_of(router: EngineRouter, prompt: list[int], **options: str) -> PromptHashes:
    return router.hashes_of(tokens_to_bytes(prompt), **options)


@pytest.fixture
def engines():
    def make(count: int, *, max_requests: int = 10) -> list[Engine]:
        return [Engine(f"engine-{n}", (1, bytes([n])), n, n, 0.0, max_requests=max_requests) for n in range(count)]

    return make


def load(engine: Engine, requests: int) -> None:
    engine.in_flight = {number: object() for number in range(requests)}


def have_rates(engine: Engine, *, prefill: float, decode: float, queued: int, held: int) -> None:
    """Give an engine rates in tokens per second, and the work of one prompt."""
    engine.prefill_cost, engine.held_cost, engine.queued, engine.held = 1 / prefill, 1 / decode, queued, held
    engine.waiting = int(queued > 0)


def router(policy=RoutingPolicy.LONGEST_PREFIX, **options) -> EngineRouter:
    return EngineRouter(policy, block_size_tokens=BLOCK, **options)


def test_without_prefixes_the_fewest_in_flight_and_the_lowest_index_win(engines) -> None:
    pool = engines(3)
    load(pool[0], 2)
    choose = router(RoutingPolicy.LOAD_BALANCED)
    assert hashes_of(choose, PROMPT) == {}
    assert choose.select(pool, {}) is pool[1]
    load(pool[1], 1)
    assert choose.select(pool, {}) is pool[2]


def test_in_turn(engines) -> None:
    pool = engines(3)
    choose = router(RoutingPolicy.ROUND_ROBIN)
    assert [choose.select(pool, {}).index for _ in range(5)] == [0, 1, 2, 0, 1]
    assert choose.select([pool[0], pool[1]], {}) is pool[0]


def test_the_longest_prefix_wins_among_equally_loaded_engines(engines) -> None:
    pool = engines(3)
    choose = router()
    choose.assigned(pool[1], hashes_of(choose, PROMPT[:8]), request=b"a")
    choose.assigned(pool[2], hashes_of(choose, PROMPT[:4]), request=b"b")
    assert choose.select(pool, hashes_of(choose, PROMPT)) is pool[1]


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("policy", [RoutingPolicy.LONGEST_PREFIX, RoutingPolicy.FIRST_PREFIX_BLOCK])
def test_the_search_by_load_and_by_holder_finds_what_a_look_at_every_engine_does(policy, alpha) -> None:
    for seed in range(400 if SOAK else 40):
        rng = random.Random(seed)
        choose = router(policy, alpha=alpha)
        by_load = EnginesByLoad(load_by(policy, alpha=alpha))
        pool = []
        for number in range(rng.randint(2, 12)):
            engine = Engine(f"engine-{number}", (1, bytes([number])), 1, number, 0.0, serving=True)
            engine.state, engine.max_requests = EngineState.RUNNING, rng.choice([4, 8, 12])
            pool.append(engine)
            by_load.put(engine)
        chains = [[rng.getrandbits(60) for _ in range(rng.randint(1, 6))] for _ in range(4)]
        chains += [[*chains[0][:2], rng.getrandbits(60)], chains[1][:1] + chains[0][1:]]
        for _ in range(60):
            engine, chain = rng.choice(pool), rng.choice(chains)
            step = rng.random()
            if step < 0.3:
                load(engine, rng.randint(0, engine.max_requests))
                by_load.put(engine)
            elif step < 0.5:
                choose.blocks.give(engine, chain[: rng.randint(1, len(chain))])
            elif step < 0.6:
                choose.stored(engine, rng.sample(chain, k=rng.randint(1, len(chain))))
            elif step < 0.7:
                choose.blocks.evict(engine, rng.sample(chain, k=1))
            elif step < 0.73:
                choose.blocks.forget(engine)
            elif step < 0.8:
                engine.suspect = not engine.suspect
            open_engines = [each for each in pool if each.has_room()]
            assert {each for each in by_load if each.has_room()} == set(open_engines)
            first = next((each for each in by_load if each.has_room()), None)
            if first is not None:
                found = choose.with_prefix({BLOCK: chain}, min_loaded=first, fits=Engine.has_room)
                assert found is choose.select(open_engines, {BLOCK: chain})


@pytest.mark.parametrize("max_engines", [MAX_COMPARED, 3 * MAX_HOLDERS])
@pytest.mark.parametrize("has_rates", [True, False])
def test_the_search_for_the_least_cost_finds_what_a_look_at_every_engine_does(has_rates, max_engines) -> None:
    for seed in range(400 if SOAK else 20):
        rng = random.Random(seed)
        choose = router(RoutingPolicy.LEAST_COST)
        by_load = EnginesByLoad(Engine.cost)
        pool = []
        for number in range(rng.randint(2, max_engines)):
            engine = Engine(f"engine-{number}", (1, bytes([number])), 1, number, 0.0, serving=True)
            engine.state, engine.max_requests = EngineState.RUNNING, rng.choice([4, 8, 12])
            pool.append(engine)
        chains = [[rng.getrandbits(60) for _ in range(rng.randint(1, 6))] for _ in range(4)]
        chains += [[*chains[0][:2], rng.getrandbits(60)], [chains[1][0], rng.getrandbits(60)]]
        for _ in range(60):
            engine, chain = rng.choice(pool), rng.choice(chains)
            load(engine, rng.randint(0, engine.max_requests))
            if has_rates:
                queued, held = rng.choice([0, 3, 30]), rng.choice([0, 10, 100])
                have_rates(engine, prefill=rng.choice([10, 100]), decode=200, queued=queued, held=held)
                engine.waiting, engine.step_tokens = rng.randint(min(queued, 1), queued), rng.choice([0, 8])
            for each in pool:
                by_load.put(each)
            for each in rng.sample(pool, rng.choice([1, len(pool) // 2])):
                choose.blocks.give(each, chain[: rng.randint(1, len(chain))])
            evicted = rng.choice(chain)  # engines evict no block before those that follow it
            after = [block for each in chains if evicted in each for block in each[each.index(evicted) :]]
            choose.blocks.evict(rng.choice(pool), after)
            open_engines = [each for each in by_load if each.has_room()]
            if not open_engines:
                continue
            tokens, fastest = len(chain) * BLOCK + rng.randint(0, 3), min(each.prefill_cost for each in pool)
            found = choose.cheapest(
                by_load,
                {BLOCK: chain},
                tokens=tokens,
                min_prefill_cost=fastest,
                fits=Engine.has_room,
            )
            costs = {}
            for place, each in enumerate(open_engines):
                held = [block for block in chain if choose.blocks.holds(each, block)]
                if place < MAX_COMPARED or any(len(choose.blocks.holders(b)) <= MAX_HOLDERS for b in held):
                    uncached = tokens - len(held) * BLOCK
                    costs[each.index] = each.cost_of(uncached), uncached
            cost, uncached = costs[found.index]
            if has_rates:
                assert cost == pytest.approx(min(costs.values())[0])
            else:
                assert (cost, uncached) == min(costs.values())


def test_a_block_that_many_engines_hold_counts_for_the_least_loaded_engines(engines) -> None:
    pool = engines(2 * MAX_HOLDERS)
    choose = router(RoutingPolicy.LEAST_COST)
    blocks = hashes_of(choose, PROMPT)[BLOCK]
    for engine in pool:
        have_rates(engine, prefill=1000, decode=1e6, queued=engine.index + 5, held=0)
        engine.step_tokens = 100
        if engine.index >= 4:
            choose.blocks.give(engine, blocks[:2])
    assert cheapest(choose, pool, PROMPT) is pool[4], "17 tokens; 21 at the first engine"
    choose.blocks.give(pool[-1], blocks)
    have_rates(pool[-1], prefill=1000, decode=1e6, queued=8, held=0)
    assert cheapest(choose, pool, PROMPT) is pool[-1], "few engines hold the whole prompt"


def cheapest(choose: EngineRouter, pool: list[Engine], prompt: list[int], *, session: str = "") -> Engine:
    by_load = EnginesByLoad(Engine.cost)
    for engine in pool:
        by_load.put(engine)
    hashes = hashes_of(choose, prompt)
    fastest = min(engine.prefill_cost for engine in pool)
    chosen = choose.cheapest(
        by_load,
        hashes,
        tokens=len(prompt),
        min_prefill_cost=fastest,
        fits=lambda _: True,
        session=session,
    )
    choose.assigned(chosen, hashes, request=b"a", session=session)
    return chosen


def test_a_long_prompt_in_the_queue_weighs_more_than_many_short_ones(engines) -> None:
    pool = engines(2)
    load(pool[0], 1)
    load(pool[1], 5)
    have_rates(pool[0], prefill=1000, decode=100_000, queued=30_000, held=30_000)
    have_rates(pool[1], prefill=1000, decode=100_000, queued=150, held=150)
    assert cheapest(router(RoutingPolicy.LEAST_COST), pool, PROMPT) is pool[1]


def test_a_queue_counts_at_most_the_length_of_the_prompt_for_each_waiting_one_and_a_step(engines) -> None:
    long, short = engines(2)
    have_rates(long, prefill=1000, decode=1e6, queued=30_000, held=0)
    have_rates(short, prefill=1000, decode=1e6, queued=400, held=0)
    long.step_tokens = short.step_tokens = 256
    short.waiting = 20
    assert [round(engine.cost_of(100), 6) for engine in (long, short)] == [0.456, 0.5], "it passes the long prompt"
    assert long.cost_of(20_000) > short.cost_of(20_000), "a long one does not"


def test_a_prompt_counts_more_where_it_delays_more_answers(engines) -> None:
    busy, idle = engines(2, max_requests=64)
    load(busy, 32)
    for engine, queued in ((busy, 0), (idle, 300)):
        have_rates(engine, prefill=1000, decode=1e6, queued=queued, held=0)
        engine.step_tokens = 1000
    assert busy.cost_of(400) < idle.cost_of(400)
    assert busy.cost_of(2000) > idle.cost_of(2000)


def test_without_rates_the_fewest_requests_and_then_the_longest_prefix_win(engines) -> None:
    pool = engines(3)
    choose = router(RoutingPolicy.LEAST_COST)
    choose.blocks.give(pool[2], hashes_of(choose, PROMPT)[BLOCK])
    assert cheapest(choose, pool, PROMPT) is pool[2]
    load(pool[2], 1)
    assert cheapest(choose, pool, PROMPT) is pool[0]


def test_a_session_stays_while_its_engine_holds_the_prompt_and_is_not_much_busier(engines) -> None:
    pool = engines(2)
    choose = router(RoutingPolicy.LEAST_COST)
    for engine in pool:
        have_rates(engine, prefill=1000, decode=1e6, queued=0, held=0)
        engine.step_tokens = 100
    assert cheapest(choose, pool, PROMPT, session="a") is pool[0]
    have_rates(pool[0], prefill=1000, decode=1e6, queued=28, held=0)
    # 36 with 8 of its own; the other engine has 20, and 16 would be computed again
    choose.blocks.give(pool[1], hashes_of(choose, PROMPT[:4])[BLOCK])
    turn = [*PROMPT, *range(50, 58)]
    assert cheapest(choose, pool, turn) is pool[1]
    choose.blocks.evict(pool[1], hashes_of(choose, turn)[BLOCK][1:])
    assert cheapest(choose, pool, turn, session="b") is pool[1], "another session"
    choose.blocks.evict(pool[1], hashes_of(choose, turn)[BLOCK][1:])
    assert cheapest(choose, pool, turn, session="a") is pool[0]
    have_rates(pool[0], prefill=1000, decode=1e6, queued=28 + len(turn), held=0)
    assert cheapest(choose, pool, turn, session="a") is pool[1], "its engine is too busy"
    have_rates(pool[0], prefill=1000, decode=1e6, queued=0, held=0)
    choose.blocks.evict(pool[0], hashes_of(choose, turn)[BLOCK])
    have_rates(pool[1], prefill=1000, decode=1e6, queued=1, held=0)
    assert cheapest(choose, pool, turn, session="a") is pool[1], "it moved with its last request"


def test_the_first_block_is_all_that_counts_for_first_prefix_block(engines) -> None:
    pool = engines(3)
    choose = router(RoutingPolicy.FIRST_PREFIX_BLOCK)
    choose.assigned(pool[1], hashes_of(choose, PROMPT), request=b"a")
    choose.assigned(pool[2], hashes_of(choose, [*PROMPT[:4], 99, 99, 99, 99]), request=b"b")
    assert choose.select(pool, hashes_of(choose, PROMPT)) is pool[2]


def test_alpha_weighs_the_prefix_against_the_load(engines) -> None:
    pool = engines(2)
    load(pool[1], 9)
    for alpha, expected in ((1.0, 1), (0.0, 0), (0.2, 0), (0.6, 1)):
        choose = router(alpha=alpha)
        choose.assigned(pool[1], hashes_of(choose, PROMPT), request=b"a")
        assert choose.select(pool, hashes_of(choose, PROMPT)).index == expected


def test_a_hit_on_a_full_engine_ties_with_an_idle_one_and_recency_picks_the_hit(engines) -> None:
    pool = engines(2)
    load(pool[1], 10)
    choose = router(alpha=0.5)
    choose.assigned(pool[1], hashes_of(choose, PROMPT), request=b"a")
    assert choose.select(pool, hashes_of(choose, PROMPT)) is pool[1]


def test_six_identical_prompts_spread_over_three_warm_engines(engines) -> None:
    pool = engines(3)
    choose = router()
    hashes = hashes_of(choose, PROMPT)
    for engine in pool:
        choose.assigned(engine, hashes, request=b"warm")
    counts = Counter()
    for number in range(6):
        engine = choose.select(pool, hashes)
        engine.in_flight[number] = object()
        choose.assigned(engine, hashes, request=b"%d" % number)
        counts[engine.name] += 1
    assert set(counts.values()) == {2}


def test_the_blocks_of_a_lost_engine_are_forgotten_and_the_table_is_bounded(engines) -> None:
    pool = engines(2)
    choose = router(alpha=1.0)
    hashes = hashes_of(choose, PROMPT)
    choose.assigned(pool[1], hashes, request=b"a")
    choose.blocks.forget(pool[1])
    assert choose.select(pool, hashes) is pool[0]
    choose.assigned(pool[1], {BLOCK: range(10**9, 10**9 + MAX_KNOWN_BLOCKS + 50)}, request=b"b")
    assert len(choose.blocks._held[pool[1].index]) == MAX_KNOWN_BLOCKS


def test_the_table_forgets_a_prompt_from_its_end(engines) -> None:
    (engine,) = engines(1)
    choose = router()
    choose.assigned(engine, {BLOCK: [1, 2, 3, 4]}, request=b"a")
    choose.assigned(engine, {BLOCK: range(10**9, 10**9 + MAX_KNOWN_BLOCKS - 2)}, request=b"b")
    assert choose.blocks.match(engine, [1, 2, 3, 4])[0] == 2


def test_evicted_blocks_count_no_more(engines) -> None:
    pool = engines(2)
    choose = router(alpha=1.0)
    hashes = hashes_of(choose, PROMPT)
    choose.assigned(pool[1], hashes, request=b"a")
    blocks = hashes[BLOCK]
    choose.assigned(pool[0], {BLOCK: blocks[:2]}, request=b"b")
    choose.blocks.evict(pool[1], blocks[1:])
    assert choose.select(pool, hashes) is pool[0]
    choose.blocks.evict(pool[0], blocks[:1])
    assert choose.blocks.match(pool[0], blocks) == (0, 0), "a block is of no use without those before it"
    choose.assigned(pool[0], hashes, request=b"c")
    assert choose.blocks.match(pool[0], blocks)[0] == 4
    choose.blocks.forget_all()
    choose.blocks.evict(pool[1], blocks)
    assert choose.blocks.match(pool[0], blocks) == (0, 0)


@pytest.mark.parametrize(
    ("policy", "depth"), [(RoutingPolicy.LONGEST_PREFIX, 4), (RoutingPolicy.FIRST_PREFIX_BLOCK, 0)]
)
def test_blocks_that_an_engine_reports_as_stored_count(engines, policy: RoutingPolicy, depth: int) -> None:
    """The policy that compares first blocks knows them from the prompts that it dispatched."""
    pool = engines(2)
    choose = router(policy, alpha=1.0)
    hashes = hashes_of(router(), PROMPT)
    choose.stored(pool[1], hashes[BLOCK])
    assert choose.blocks.match(pool[1], hashes[BLOCK])[0] == depth
    assert choose.select(pool, hashes) is pool[1 if depth else 0]


def test_recency_is_one_step_a_request_and_a_block_may_be_with_several(engines) -> None:
    pool = engines(3)
    choose = router(alpha=1.0)
    hashes = hashes_of(choose, PROMPT)
    for engine in (pool[2], pool[0]):
        choose.assigned(engine, hashes, request=b"a")
    assert [choose.blocks.match(engine, hashes[BLOCK]) for engine in pool] == [(4, 2), (0, 0), (4, 1)]
    assert choose.select(pool, hashes) is pool[0]
    choose.assigned(pool[2], hashes, request=b"again")
    assert choose.select(pool, hashes) is pool[2]


def test_tenants_with_different_salts_share_no_prefix() -> None:
    plain, one, other = (hashes_of(router(), PROMPT, salt=salt)[BLOCK] for salt in ("", "one", "other"))
    assert len({*plain, *one, *other}) == 12
    assert one == hashes_of(router(), PROMPT, salt="one")[BLOCK]


def test_in_deterministic_mode_neither_registration_nor_load_decides(engines) -> None:
    pool = engines(3)
    load(pool[0], 10)
    orders = [pool, [pool[2], pool[0], pool[1]]]
    turns = []
    for order in orders:
        choose = router(deterministic=True)
        turns.append([choose.select(order, {}).name for _ in range(4)])
    assert turns == [["engine-0", "engine-1", "engine-2", "engine-0"]] * 2


def test_a_prompt_shorter_than_a_block_or_no_block_size_has_no_hashes() -> None:
    assert hashes_of(router(), PROMPT[:3]) == {}
    assert hashes_of(EngineRouter(RoutingPolicy.LONGEST_PREFIX), PROMPT) == {}
    assert len(hashes_of(router(), PROMPT)[BLOCK]) == 4


def test_engines_with_different_block_sizes_are_compared_by_the_share_that_they_hold(engines) -> None:
    """While a change of the block size is rolled out. The third engine announces no size."""
    pool = engines(3)
    for engine, size in zip(pool, (8, 4, 0), strict=True):
        engine.block_size_tokens = size
    choose = EngineRouter(RoutingPolicy.LONGEST_PREFIX, alpha=1.0)
    prompt = tokens_to_bytes(PROMPT)
    hashes = choose.hashes_of(prompt, (8, 4, 0))
    assert {size: len(blocks) for size, blocks in hashes.items()} == {8: 2, 4: 4}
    choose.assigned(pool[0], choose.hashes_of(prompt[: 8 * 4], (8, 4, 0)), request=b"half")
    choose.assigned(pool[1], choose.hashes_of(prompt[: 12 * 4], (8, 4, 0)), request=b"three quarters")
    choose.assigned(pool[2], hashes, request=b"unknown")
    assert [choose.blocks.match(pool[n], hashes[(8, 4)[n]])[0] for n in (0, 1)] == [1, 3]
    assert choose.select(pool, hashes) is pool[1]
    choose.assigned(pool[0], hashes, request=b"whole")
    assert choose.select(pool, hashes) is pool[0]
    assert choose.with_prefix(hashes, min_loaded=pool[2], fits=lambda engine: True) is pool[0]


@pytest.mark.slow
async def test_a_repeated_prompt_goes_where_it_was(stage, params, tmp_path) -> None:
    schedule = tmp_path / "schedule.json"
    coordinator = stage.coordinator(
        routing_policy=RoutingPolicy.LONGEST_PREFIX, alpha=0.9, schedule_output_path=schedule
    )
    engines = [await stage.engine(f"engine-{n}", block_size_tokens=BLOCK, max_requests=8) for n in range(3)]
    client = await stage.client()
    for _ in range(3):
        for start in (0, 100, 200):
            await client.add_request(list(range(start, start + 16)), params(1))
    assert len(engines[0].dispatches) == 9
    streams = [client.add_request_streaming(PROMPT, params(50)) for _ in range(40)]
    await stage.until(lambda: all(engine.dispatches for engine in engines))
    for stream in streams:
        await stream.aclose()
    coordinator.stop()
    decisions = json.loads(schedule.read_text())
    assert [decision["engine"] for decision in decisions[:9]] == ["engine-0"] * 9
    stage.coordinators.clear()


async def test_blocks_given_to_an_engine_while_alone_count_when_another_joins(stage, params) -> None:
    stage.coordinator(routing_policy=RoutingPolicy.LONGEST_PREFIX, alpha=0.9)
    options = {"block_size_tokens": BLOCK, "max_requests": 8, "step_seconds": None}
    first = await stage.engine("first", **options)
    client = await stage.client()
    client.add_request(PROMPT, params(1))
    await stage.until(lambda: len(first.jobs) == 1)
    other = await stage.engine("other", **options)
    client.add_request(PROMPT, params(1))
    await stage.until(lambda: len(first.jobs) + len(other.jobs) == 2)
    assert len(first.jobs) == 2, "it holds the prompt, which outweighs that it is the busier one"


async def test_load_spreads_over_engines(stage, params) -> None:
    stage.coordinator()
    engines = [await stage.engine(f"engine-{n}", step_seconds=None) for n in range(3)]
    client = await stage.client()
    futures = [client.add_request([n], params(1)) for n in range(9)]
    await stage.until(lambda: sum(len(engine.jobs) for engine in engines) == 9)
    assert [len(engine.jobs) for engine in engines] == [3, 3, 3]
    for engine in engines:
        engine.step()
    for future in futures:
        await future
