"""Tenants share the engines: no tenant keeps more than its share while others wait, and no token is lost."""

import asyncio

import pytest
from echo_executor import echo_answer

from megatron_runtime.client.rejection import RequestRejectedError
from megatron_runtime.coordinator.core import dispatch
from megatron_runtime.protocol.messages import Final, pack, tokens_to_bytes


def prompts_of(dispatches) -> list[int]:
    """The first prompt token of each dispatch, in their order."""
    return [int.from_bytes(dispatch.prompt[:4], "little") for dispatch in dispatches]


async def test_a_tenant_that_fills_every_slot_makes_room_for_another_at_once(stage, params, collect) -> None:
    coordinator, engine, client = await stage.all(max_requests=8, step_seconds=None)
    greedy = [client.add_request_streaming([1, n], params(30), tenant="greedy") for n in range(60)]
    await engine.until(lambda: len(engine.jobs) == 8)
    for _ in range(3):
        engine.step()
    await stage.until(lambda: all(entry.tokens_so_far == 3 for entry in list(coordinator.core.dispatcher.journal)[:8]))
    other = [client.add_request_streaming([2, n], params(30), tenant="other") for n in range(6)]
    await engine.until(lambda: prompts_of(engine.dispatches).count(2) == 4)
    running = prompts_of(job.dispatch for job in engine.jobs.values())
    assert (running.count(1), running.count(2)) == (4, 4)
    assert coordinator.core.counters.moved == len(engine.aborted) == 4
    # The four most recent requests made room, because they had the fewest tokens.
    assert engine.aborted == [dispatch.dispatch_id for dispatch in reversed(engine.dispatches[4:8])]
    engine.step_seconds = 0.0
    engine._schedule()
    answers = await asyncio.gather(*(collect(stream) for stream in [*greedy, *other]))
    for (tokens, final), prompt in zip(
        answers, [*([1, n] for n in range(60)), *([2, n] for n in range(6))], strict=True
    ):
        assert tokens == final["generated_tokens"] == echo_answer(prompt, 30)
    again = [dispatch for dispatch in engine.dispatches if len(dispatch.generated)]
    assert len(again) >= 4, "a request that made room continues with its tokens"
    assert len(coordinator.core.dispatcher.tenants) == 0


async def test_a_tenant_alone_has_every_slot(stage, params) -> None:
    coordinator, engine, client = await stage.all(max_requests=8, step_seconds=None)
    for number in range(20):
        client.add_request([1, number], params(4), tenant="only")
    await engine.until(lambda: len(engine.jobs) == 8)
    await stage.until(lambda: coordinator.core.dispatcher.queue.length == 12)
    for number in range(12):
        engine.finish(next(iter(engine.jobs)))
        await engine.until(lambda number=number: len(engine.dispatches) == 9 + number)
    assert [dispatch.prompt[4] for dispatch in engine.dispatches] == list(range(20))
    assert coordinator.core.counters.moved == 0


async def test_a_request_without_a_tenant_belongs_to_that_of_its_connection(stage, params) -> None:
    coordinator = stage.coordinator()
    engine = await stage.engine(max_requests=4, step_seconds=None)
    greedy, other = await stage.client(), await stage.client()
    for number in range(9):
        greedy.add_request([1, number], params(4))
    await engine.until(lambda: len(engine.jobs) == 4)
    for number in range(2):
        other.add_request([2, number], params(4))
    await engine.until(lambda: len(engine.dispatches) == 6)
    assert sorted(prompts_of(job.dispatch for job in engine.jobs.values())) == [1, 1, 2, 2]
    assert len(coordinator.core.dispatcher.tenants) == 2
    named = [client.add_request([3], params(4), tenant="shared") for client in (greedy, other)]
    await stage.until(lambda: coordinator.core.dispatcher.queue.length == 9)
    assert len(coordinator.core.dispatcher.tenants) == 3, "a tenant that is named is the same on every connection"
    other.stop()
    greedy.stop()
    await stage.until(lambda: not len(coordinator.core.dispatcher.tenants))
    assert all(future.cancelled() for future in named)


async def test_the_waiting_tenant_with_the_lowest_load_goes_next_each_in_the_order_of_arrival(stage, params) -> None:
    coordinator = stage.coordinator()
    client = await stage.client()
    for number in range(6):
        client.add_request([1, number], params(4), tenant="a")
    for number in range(3):
        client.add_request([2, number], params(4), tenant="b")
    client.add_request([3, 0], params(4), tenant="c")
    client.add_request([4, 0], params(4, priority=-1), tenant="a")
    await stage.until(lambda: coordinator.core.dispatcher.queue.length == 11)
    engine = await stage.engine(max_requests=1, step_seconds=None)
    for number in range(11):
        await engine.until(lambda number=number: len(engine.dispatches) == number + 1)
        engine.finish(next(iter(engine.jobs)))
    order = [(dispatch.prompt[0], dispatch.prompt[4]) for dispatch in engine.dispatches]
    assert order == [(4, 0), (2, 0), (3, 0), (1, 0), (2, 1), (1, 1), (2, 2), (1, 2), (1, 3), (1, 4), (1, 5)]


@pytest.mark.parametrize("model", ["", "m"], ids=["any model", "the model of its tokens"])
async def test_requests_of_a_lost_engine_go_before_those_of_every_tenant(stage, params, collect, model) -> None:
    coordinator, lost, client = await stage.all("lost", max_requests=2, step_seconds=None, model=model)
    begun = [client.add_request_streaming([1, n], params(4), tenant="ab"[n]) for n in range(2)]
    await lost.until(lambda: len(lost.jobs) == 2)
    lost.step()
    await stage.until(lambda: all(entry.tokens_so_far for entry in coordinator.core.dispatcher.journal))
    later = [client.add_request([2, n], params(4), tenant="c") for n in range(2)]
    await stage.until(lambda: coordinator.core.dispatcher.queue.length == 2)
    lost.leave()
    await stage.until(lambda: coordinator.core.dispatcher.queue.length == 4)
    engine = await stage.engine("next", max_requests=1, model=model)
    for number, stream in enumerate(begun):
        assert (await collect(stream))[1]["generated_tokens"] == echo_answer([1, number], 4)
    await asyncio.gather(*later)
    assert prompts_of(engine.dispatches) == [1, 1, 2, 2]
    assert [len(dispatch.generated) for dispatch in engine.dispatches] == [4, 4, 0, 0]


async def test_a_request_that_made_room_is_not_taken_again_soon(stage, params, monkeypatch) -> None:
    monkeypatch.setattr(dispatch, "MOVE_AGAIN_SECONDS", 3600.0)
    coordinator, engine, client = await stage.all(max_requests=3, step_seconds=None)
    for number in range(3):
        client.add_request([1, number], params(4), tenant="a")
    await engine.until(lambda: len(engine.jobs) == 3)
    for asked in range(2):
        client.add_request([2, asked], params(4), tenant="b")
        await engine.until(lambda asked=asked: len(engine.dispatches) == 4 + 2 * asked)
        engine.finish(engine.dispatches[-1].dispatch_id)
        await engine.until(lambda asked=asked: len(engine.dispatches) == 5 + 2 * asked)
    assert [dispatch.prompt[4] for dispatch in engine.dispatches if dispatch.prompt[0] == 1] == [0, 1, 2, 2, 1]
    client.add_request([2, 2], params(4), tenant="b")
    await engine.until(lambda: len(engine.dispatches) == 8)
    assert engine.dispatches[-1].prompt[0] == 2, "the third had not made room yet"
    client.add_request([3, 0], params(4), tenant="c")
    await stage.until(lambda: coordinator.core.dispatcher.queue.length == 2)
    stage.pump()
    assert coordinator.core.counters.moved == 3, "each has made room once"
    monkeypatch.setattr(dispatch, "MOVE_AGAIN_SECONDS", 0.0)
    engine.finish(engine.dispatches[-1].dispatch_id)
    await engine.until(lambda: len(engine.dispatches) == 9)


async def test_pinned_requests_and_those_of_higher_priority_make_no_room(stage, params) -> None:
    coordinator, engine, client = await stage.all("engine-0", max_requests=3, step_seconds=None)
    client.add_request([1], params(4), tenant="a", engine="engine-0")
    client.add_request([2], params(4, priority=-1), tenant="a")
    client.add_request([3], params(4), tenant="a")
    await engine.until(lambda: len(engine.dispatches) == 3)
    client.add_request([4], params(4), tenant="b")
    await engine.until(lambda: len(engine.dispatches) == 4)
    assert prompts_of(job.dispatch for job in engine.jobs.values()) == [1, 2, 4]
    client.add_request([5], params(4), tenant="c")
    await stage.until(lambda: coordinator.core.dispatcher.queue.length == 2)
    stage.pump()
    assert coordinator.core.counters.moved == 1
    client.add_request([6], params(4, priority=-1), tenant="c")
    await engine.until(lambda: len(engine.dispatches) == 5)
    assert prompts_of(job.dispatch for job in engine.jobs.values()) == [1, 4, 6]


async def test_a_late_answer_of_a_request_that_made_room_is_delivered(stage, params, collect) -> None:
    coordinator, engine, client = await stage.all(max_requests=2, step_seconds=None)
    streams = [client.add_request_streaming([1, n], params(3), tenant="a") for n in range(2)]
    await engine.until(lambda: len(engine.jobs) == 2)
    engine.step()
    await stage.until(lambda: all(entry.tokens_so_far for entry in coordinator.core.dispatcher.journal))
    ended = engine.jobs[engine.dispatches[1].dispatch_id]
    other = client.add_request([2], params(3), tenant="b")
    await engine.until(lambda: engine.aborted)
    assert engine.aborted == [ended.dispatch.dispatch_id]
    tokens = echo_answer([1, 1], 3)
    reply = pack({"status": "COMPLETED", "finish_reason": "length"})
    engine.send(Final(ended.dispatch.dispatch_id, ended.dispatch.uid, tokens_to_bytes(tokens), reply))
    assert (await collect(streams[1]))[1]["generated_tokens"] == tokens
    assert coordinator.core.counters.late == 1
    engine.step_seconds = 0.0
    engine._schedule()
    assert (await collect(streams[0]))[1]["generated_tokens"] == echo_answer([1, 0], 3)
    assert (await other)["generated_tokens"] == echo_answer([2], 3)


async def test_where_only_the_order_of_arrival_decides_there_is_one_tenant(stage, params) -> None:
    coordinator = stage.coordinator(deterministic=True)
    client = await stage.client()
    for number in range(8):
        client.add_request([1 + number % 2, number], params(1), tenant="ab"[number % 3 // 2])
    await stage.until(lambda: coordinator.core.dispatcher.queue.length == 8)
    engine = await stage.engine(max_requests=1, step_seconds=None)
    await engine.until(lambda: len(engine.dispatches) == 8)
    assert [dispatch.prompt[4] for dispatch in engine.dispatches] == list(range(8))


async def test_a_full_queue_has_room_for_the_tenant_with_fewer_requests(stage, params) -> None:
    coordinator = stage.coordinator(max_queued=6)
    client = await stage.client()
    greedy = [client.add_request([1, n], params(1), tenant="a") for n in range(6)]
    other = [client.add_request([2, n], params(1), tenant="b") for n in range(4)]
    rejected = [*greedy[:2:-1], other[3]]
    for future in rejected:
        with pytest.raises(RequestRejectedError, match="try again") as rejected:
            await future
        assert (rejected.value.code, rejected.value.retry_after_seconds) == (429, 1.0)
    assert coordinator.core.dispatcher.queue.length == 6
    engine = await stage.engine(max_requests=1)
    await asyncio.gather(*greedy[:3], *other[:3])
    assert sorted(prompts_of(engine.dispatches)) == [1, 1, 1, 2, 2, 2]


async def test_a_full_journal_has_room_for_the_tenant_with_fewer_bytes(stage, params) -> None:
    coordinator = stage.coordinator(journal_bytes=40_000)
    client = await stage.client()
    greedy = [client.add_request([1] * 2000, params(1), tenant="a") for _ in range(4)]
    other = client.add_request([2] * 2000, params(1), tenant="b")
    with pytest.raises(RequestRejectedError, match="other tenants have fewer"):
        await greedy[3]
    with pytest.raises(RequestRejectedError, match="of 40000"):
        await client.add_request([2] * 4000, params(1), tenant="b")
    assert coordinator.core.dispatcher.queue.length == 4
    await stage.engine()
    await asyncio.gather(*greedy[:3], other)
