"""A request is answered by the model that it was made for, or that began it, or by none."""

import asyncio

import pytest
from echo_executor import echo_answer

from megatron_runtime.client.rejection import ModelChangedError
from megatron_runtime.coordinator.core.settings import Timing
from megatron_runtime.protocol.headers import ErrorCode, Header, Role


async def test_a_request_whose_model_no_engine_runs_is_rejected_at_once(stage, params) -> None:
    stage.coordinator()
    engine = await stage.engine(model="b")
    client = await stage.client(model="a")
    with pytest.raises(ModelChangedError, match="made for a, the engines run b") as rejected:
        await client.add_request([1], params(2))
    assert rejected.value.code == ErrorCode.MODEL_CHANGED == 409
    assert not engine.dispatches


@pytest.mark.parametrize(("client_model", "engine_model"), [("a", "a"), ("a", ""), ("", "b")])
async def test_a_model_that_one_side_does_not_name_fits(stage, params, client_model, engine_model) -> None:
    stage.coordinator()
    await stage.engine(model=engine_model)
    client = await stage.client(model=client_model)
    assert (await client.add_request([1], params(2)))["generated_tokens"] == echo_answer([1], 2)


async def test_requests_held_while_the_model_is_replaced_are_rejected_on_release(stage, params) -> None:
    coordinator = stage.coordinator()
    old = await stage.engine("engine-0", model="a")
    link = await stage.admin()
    await link.control(Header.PAUSE, operation_id="p", fence=1)
    client = await stage.client(model="a")
    held = client.add_request([1], params(2))
    await stage.until(lambda: coordinator.core.dispatcher.queue.length == 1)
    old.leave()
    await stage.engine("engine-1", model="b")
    await stage.until(lambda: [engine.name for engine in coordinator.core.engines] == ["engine-1"])
    assert not held.done()
    await link.control(Header.UNPAUSE, operation_id="u", fence=1)
    with pytest.raises(ModelChangedError):
        await held


@pytest.mark.parametrize("named", ["a", ""], ids=["by the client", "by its first token"])
async def test_tokens_of_one_model_are_not_continued_by_another(stage, params, named) -> None:
    coordinator = stage.coordinator()
    old = await stage.engine("engine-0", model="a", step_seconds=None)
    client = await stage.client(model=named)
    stream = client.add_request_streaming([1], params(8))
    whole = client.add_request([2], params(8))
    await old.until(lambda: len(old.jobs) == 2)
    old.step()
    items = aiter(stream)
    await anext(items)
    new = await stage.engine("engine-1", model="b")
    old.leave()
    with pytest.raises(ModelChangedError, match=r"begun by a, the engines run b"):
        await anext(items)
    if named:
        with pytest.raises(ModelChangedError):
            await whole
        assert not new.dispatches
    else:  # no token of it was sent to the client: any model may answer it, from its beginning
        assert (await whole)["generated_tokens"] == echo_answer([2], 8)
        assert [dispatch.generated for dispatch in new.dispatches] == [b""]
    assert len(coordinator.core.dispatcher.journal) == 0


async def test_requests_that_wait_for_their_model_are_overtaken_and_served_in_order(stage, params) -> None:
    coordinator = stage.coordinator()
    busy = await stage.engine("engine-0", model="a", step_seconds=None, max_requests=1)
    await stage.engine("engine-1", model="b")
    first, second = await stage.client(model="a"), await stage.client(model="b")
    waiting = [first.add_request([number], params(1)) for number in range(3)]
    await stage.until(lambda: coordinator.core.dispatcher.queue.length == 2)
    assert (await second.add_request([9], params(1)))["generated_tokens"] == echo_answer([9], 1)
    for number in range(3):
        await busy.until(lambda number=number: len(busy.dispatches) == number + 1)
        busy.step()
    answers = await asyncio.gather(*waiting)
    assert [answer["generated_tokens"] for answer in answers] == [echo_answer([number], 1) for number in range(3)]


async def test_a_silent_engine_keeps_requests_that_only_its_model_may_answer(stage, params) -> None:
    timing = Timing(heartbeat=0.05, suspect=0.4, dead=60.0, client_dead=60.0, recovery=0.0)
    coordinator = stage.coordinator(timing=timing)
    silent = await stage.engine("engine-0", model="a", step_seconds=None, heartbeat_seconds=None)
    await stage.engine("engine-1", model="b")
    client = await stage.client(model="a")
    answer = client.add_request([1], params(1))
    await silent.until(lambda: silent.jobs)
    await stage.until(lambda: coordinator.core.engines.named("engine-0").suspect)
    assert not silent.aborted
    silent.step()
    assert (await answer)["generated_tokens"] == echo_answer([1], 1)


async def test_a_pinned_request_is_rejected_if_its_engine_runs_another_model(stage, params) -> None:
    stage.coordinator()
    await stage.engine("engine-0", model="a")
    other = await stage.engine("engine-1", model="b")
    client = await stage.client(model="a")
    with pytest.raises(ModelChangedError):
        await client.add_request([1], params(1), engine="engine-1")
    assert not other.dispatches
    assert stage.coordinators[-1].core.clients.named(Role.CLIENT, client.native.name).model == "a"
