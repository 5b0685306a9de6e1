"""Tenants share the engines: none keeps more than its share of them while others wait, and nothing is lost by it."""

import asyncio

from megatron_runtime.engines.echo_executor import echo_answer


def prompts_of(dispatches) -> list[int]:
    """The first prompt token of each dispatch, in their order."""
    return [int.from_bytes(dispatch.prompt[:4], "little") for dispatch in dispatches]


async def test_a_tenant_that_fills_every_slot_makes_room_for_another_at_once(stage, params, collect) -> None:
    coordinator = stage.coordinator()
    engine = await stage.engine(max_requests=8, step_seconds=None)
    client = await stage.client()
    greedy = [client.add_request_streaming([1, n], params(30), tenant="greedy") for n in range(60)]
    await engine.until(lambda: len(engine.jobs) == 8)
    for _ in range(3):
        engine.step()
    await stage.until(lambda: all(entry.tokens_so_far == 3 for entry in list(coordinator.dispatcher.journal)[:8]))
    other = [client.add_request_streaming([2, n], params(30), tenant="other") for n in range(6)]
    await engine.until(lambda: prompts_of(engine.dispatches).count(2) == 4)
    running = prompts_of(job.dispatch for job in engine.jobs.values())
    assert (running.count(1), running.count(2)) == (4, 4)
    assert coordinator.counters.moved == len(engine.aborted) == 4
    # The most recent four gave way: they had the least to lose, and they wait before what came after them.
    assert engine.aborted == [dispatch.dispatch_id for dispatch in reversed(engine.dispatches[4:8])]
    engine.step_seconds = 0.0
    engine._schedule()
    answers = await asyncio.gather(*(collect(stream) for stream in [*greedy, *other]))
    for (tokens, final), prompt in zip(
        answers, [*([1, n] for n in range(60)), *([2, n] for n in range(6))], strict=True
    ):
        assert tokens == final["generated_tokens"] == echo_answer(prompt, 30)
    again = [dispatch for dispatch in engine.dispatches if len(dispatch.generated)]
    assert len(again) >= 4, "who gave way goes on with the tokens it had"
    assert len(coordinator.dispatcher.tenants) == 0
