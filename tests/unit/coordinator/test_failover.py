"""No request is lost when engines, clients or coordinators end, send no heartbeats, or return."""

import asyncio
import threading
from dataclasses import replace

import pytest
from echo_executor import echo_answer
from eventually import LONG_SECONDS
from machine import scaled

from megatron_runtime.client.rejection import RequestRejectedError
from megatron_runtime.coordinator.core.settings import Timing
from megatron_runtime.protocol.headers import ErrorCode, Header, Role
from megatron_runtime.protocol.lifecycle import CoordinatorState, EngineState
from megatron_runtime.protocol.messages import (
    Disconnect,
    Final,
    Heartbeat,
    Hello,
    Partial,
    PartialEntry,
    pack,
    tokens_from_bytes,
    tokens_to_bytes,
    unpack,
)
from megatron_runtime.transport.addresses import CoordinatorAddresses
from megatron_runtime.transport.peer_link import PeerLink

from .conftest import PATIENT


async def start_streams(client, params, count, *, tokens=12):
    return [client.add_request_streaming([n], params(tokens)) for n in range(1, count + 1)]


async def check_streams(streams, collect, *, tokens=12) -> None:
    for number, stream in enumerate(streams, start=1):
        got, final = await collect(stream)
        assert got == final["generated_tokens"] == echo_answer([number], tokens)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["vanishes", "leaves", "falls silent", "restarts"])
async def test_requests_of_a_lost_engine_continue_elsewhere_with_their_tokens(stage, params, collect, way) -> None:
    quick = Timing(heartbeat=0.05, suspect=0.4, dead=2.5, client_dead=60.0, recovery=0.0)
    patient = Timing(heartbeat=0.05, suspect=60.0, dead=120.0, client_dead=120.0, recovery=0.0)
    coordinator = stage.coordinator(timing=quick if way == "falls silent" else patient)
    first = await stage.engine("engine-0", step_seconds=None)
    client = await stage.client()
    streams = await start_streams(client, params, 5)
    plain = client.add_request([9], params(12))
    await first.until(lambda: len(first.jobs) == 6)
    for _ in range(4):
        first.step()
    await stage.until(
        lambda: all(entry.tokens_so_far == 4 for entry in coordinator.core.dispatcher.journal if entry.meta.streaming)
    )
    second = await stage.engine("engine-0" if way == "restarts" else "engine-1")
    if way == "vanishes":
        first.close()
    elif way == "leaves":
        first.leave()
    elif way == "falls silent":
        first.heartbeat_seconds = None
    await check_streams(streams, collect)
    assert (await plain)["generated_tokens"] == echo_answer([9], 12)
    assert coordinator.core.counters.replays == 6
    assert {
        len(tokens_from_bytes(dispatch.generated)) for dispatch in second.dispatches if dispatch.meta.streaming
    } == {4}
    await stage.until(lambda: coordinator.core.counters.engines_lost == 1)


async def test_the_event_loop_does_not_wake_up_while_nothing_happens(stage) -> None:
    """No polling: an idle coordinator hears its peers' heartbeats and its own timer, and nothing else."""
    coordinator = stage.coordinator(timing=Timing(heartbeat=1000.0, suspect=5000.0, dead=9000.0, recovery=0.0))
    engine = await stage.engine(heartbeat_seconds=None)
    await stage.client()
    loop = asyncio.get_running_loop()
    await asyncio.sleep(0.05)  # what registration left to do
    calls: list[str] = []
    select = loop._selector.select
    loop._selector.select = lambda timeout: calls.append("turn") or select(timeout)
    await asyncio.sleep(0.5)
    loop._selector.select = select
    assert len(calls) < 10
    assert coordinator.core.engines.named(engine.name) is not None


async def test_an_engine_wrongly_thought_dead_cannot_double_a_token(stage, params, collect) -> None:
    coordinator, zombie, client = await stage.all("zombie", step_seconds=None)
    streams = await start_streams(client, params, 3)
    await zombie.until(lambda: len(zombie.jobs) == 3)
    zombie.step()
    coordinator.remove_engine(coordinator.core.engines.named("zombie"), "a test removes it")
    for _ in range(5):
        zombie.step()
    await stage.engine("healthy")
    await check_streams(streams, collect)
    for _ in range(20):
        zombie.step()
    zombie.step_seconds = 0.0
    zombie.say_hello()
    await zombie.until(lambda: len(zombie.acks) == 2)


@pytest.mark.parametrize("streaming", [False, True])
async def test_the_answer_of_an_engine_already_removed_is_delivered(stage, params, collect, caplog, streaming) -> None:
    coordinator, removed, client = await stage.all("removed", step_seconds=None)
    make = client.add_request_streaming if streaming else client.add_request
    answer = make([1], params(3))
    await removed.until(lambda: removed.jobs)
    coordinator.remove_engine(coordinator.core.engines.named("removed"), "a test removes it")
    other = await stage.engine("other", step_seconds=None)
    await other.until(lambda: other.jobs)
    for _ in range(3):
        removed.step()
    final = (await collect(answer))[1] if streaming else await answer
    assert final["generated_tokens"] == echo_answer([1], 3)
    await other.until(lambda: other.aborted)
    assert (coordinator.core.counters.late, coordinator.core.counters.completed) == (1, 1)
    assert "removed or silent engine answered a request" in caplog.text


async def test_a_late_answer_that_failed_or_contradicts_the_sent_tokens_is_rejected(stage, params, collect) -> None:
    coordinator, removed, client = await stage.all("removed", step_seconds=None)
    stream = client.add_request_streaming([1], params(3))
    await removed.until(lambda: removed.jobs)
    removed.step()
    await stage.until(lambda: next(iter(coordinator.core.dispatcher.journal)).tokens_so_far == 1)
    dispatch = removed.dispatches[0]
    coordinator.remove_engine(coordinator.core.engines.named("removed"), "a test removes it")
    good = tokens_to_bytes(echo_answer([1], 3))
    completed, failed = pack({"status": "COMPLETED"}), pack({"status": "FAILED"})
    for body, reply in ((tokens_to_bytes([9, 9]), completed), (good, failed), (b"", completed)):
        removed.send(Final(dispatch.dispatch_id, dispatch.uid, body, reply))
    removed.send(Final(dispatch.dispatch_id, bytes(16), good, completed))
    stranger = await stage.engine("stranger", serving=False)
    coordinator.remove_engine(coordinator.core.engines.named("stranger"), "a test removes it")
    stranger.send(Final(dispatch.dispatch_id, dispatch.uid, good, completed))
    await stage.until(lambda: coordinator.core.counters.rejected["unknown_peer"] >= 5)
    assert len(coordinator.core.dispatcher.journal) == 1
    await stage.engine("other")
    assert (await collect(stream))[0] == echo_answer([1], 3)
    assert coordinator.core.counters.late == 0


async def test_log_probs_survive_a_client_that_fell_behind(stage, params) -> None:
    coordinator, engine, client = await stage.all(step_seconds=None)
    stream = client.add_request_streaming([1, 2], params(9))
    await engine.until(lambda: engine.jobs)
    dispatch = engine.dispatches[0]
    peer = coordinator.core.clients.named(Role.CLIENT, client.native.name).peer
    send = coordinator.transport.send
    full = False
    coordinator.transport.send = lambda to, frames: not (full and to == peer) and send(to, frames)

    def emit(offset: int, tokens: list[int], **details) -> None:
        details = {"log_probs": [-float(token) for token in tokens], **details}
        entry = PartialEntry(dispatch.uid, dispatch.dispatch_id, offset, len(tokens))
        engine.send(Partial(dispatch.route, [entry], tokens_to_bytes(tokens), pack({dispatch.uid: details})))

    heard = []
    client.native._link.on_message = lambda message: heard.append(message) if isinstance(message, Partial) else None
    emit(0, [1], prompt_log_probs=[-0.5])
    await stage.until(lambda: heard)
    full = True
    emit(1, [2, 3])
    emit(3, [4])
    entry = next(iter(coordinator.core.dispatcher.journal))
    await stage.until(lambda: entry.tokens_so_far == 4)
    full = False
    coordinator.transport.report_room(peer)
    await stage.until(lambda: len(heard) == 2)
    assert heard[0].extras == pack({dispatch.uid: {"log_probs": [-1.0], "prompt_log_probs": [-0.5]}})
    assert unpack(heard[1].extras) == {dispatch.uid: {"log_probs": [-2.0, -3.0, -4.0]}}
    entry.forwarded, entry.client.behind = 2, True
    await stage.until(lambda: len(heard) == 3)
    assert unpack(heard[2].extras) == {dispatch.uid: {"log_probs": [-3.0, -4.0]}}
    await stream.aclose()


async def test_a_dropped_connection_is_noticed_at_once(stage, params, collect) -> None:
    """By the connection itself, not by the next heartbeat that cannot be sent."""
    patient = Timing(heartbeat=600.0, suspect=600.0, dead=600.0, recovery=0.0)
    coordinator = stage.coordinator(timing=patient)
    killed = await stage.engine("killed", step_seconds=None)
    client = await stage.client()
    streams = await start_streams(client, params, 3)
    await killed.until(lambda: len(killed.jobs) == 3)
    await stage.engine("other")
    killed.close()
    await check_streams(streams, collect)
    assert coordinator.core.counters.engines_lost == 1


async def test_stale_dispatches_and_offsets_are_dropped_and_counted(stage, params, collect) -> None:
    coordinator, engine, client = await stage.all(step_seconds=None)
    stream = client.add_request_streaming([1], params(6))
    await engine.until(lambda: engine.jobs)
    dispatch = engine.dispatches[0]
    engine.step()
    for dispatch_id, offset in ((dispatch.dispatch_id, 0), (dispatch.dispatch_id, 5), (dispatch.dispatch_id - 1, 1)):
        entry = PartialEntry(dispatch.uid, dispatch_id, offset, 1)
        engine.send(Partial(dispatch.route, [entry], tokens_to_bytes([666])))
    engine.send(Final(dispatch.dispatch_id - 1, dispatch.uid, tokens_to_bytes([666]), pack({"status": "COMPLETED"})))
    while engine.jobs:
        engine.step()
    tokens, _ = await collect(stream)
    assert tokens == echo_answer([1], 6)
    assert (coordinator.core.counters.stale, coordinator.transport.handler_errors) == (4, 0)


async def test_an_engine_that_falls_silent_gets_no_new_work(stage, params) -> None:
    coordinator = stage.coordinator(timing=Timing(heartbeat=0.05, suspect=0.3, dead=60.0, recovery=0.0))
    silent = await stage.engine("silent")
    silent.heartbeat_seconds = None
    await stage.until(lambda: coordinator.core.engines.named("silent").suspect)
    client = await stage.client()
    future = client.add_request([1], params(4))
    await stage.until(lambda: coordinator.core.dispatcher.queue.length == 1)
    await asyncio.sleep(0.1)
    assert silent.dispatches == []
    (reported,) = coordinator.core.status().engines
    assert (reported.serving, reported.suspect) == (True, True)
    silent.heartbeat_seconds = 0.05
    silent._beat()
    await future
    (reported,) = coordinator.core.status().engines
    assert not reported.suspect


async def test_an_engine_that_said_it_is_busy_may_be_silent(stage) -> None:
    coordinator = stage.coordinator(timing=Timing(heartbeat=0.02, suspect=0.05, dead=2.0, recovery=0.0))
    engine = await stage.engine()
    engine.heartbeat_seconds = None
    for timer in engine._timers:
        timer.cancel()
    engine.send(Heartbeat(incarnation=engine.incarnation, busy_for=600.0))
    await asyncio.sleep(2.5)  # longer than an engine may be silent that is not busy
    await stage.until(lambda: coordinator.core.engines.named("engine-0").suspect)
    (reported,) = coordinator.core.status().engines
    assert not reported.suspect, "a long step that was announced is no error"
    engine.send(Heartbeat(incarnation=engine.incarnation, busy_for=0.1))
    await stage.until(lambda: coordinator.core.engines.named("engine-0") is None)


async def test_the_connection_of_a_busy_engine_whose_event_loop_is_blocked_is_kept(stage) -> None:
    coordinator = stage.coordinator(timing=replace(PATIENT, connection_check=0.1))
    address, unblock = stage.address(Role.ENGINE), threading.Event()

    async def engine() -> None:
        link = PeerLink(
            CoordinatorAddresses(address),
            keys=None,
            hello=lambda incarnation: Hello(role=Role.ENGINE, name="engine-0", incarnation=incarnation, max_requests=1),
            heartbeat=lambda incarnation: Heartbeat(incarnation=incarnation, busy_for=600.0),
            on_ack=lambda ack, forgotten: None,
            on_message=lambda message: None,
        )
        await link.start(connect_timeout_seconds=LONG_SECONDS)
        link.beat()
        await asyncio.sleep(0.05)  # it leaves
        unblock.wait()  # as a load does that holds the interpreter's lock
        link.close()

    running = asyncio.create_task(asyncio.to_thread(asyncio.run, engine()))
    try:
        await stage.until(lambda: (found := coordinator.core.engines.named("engine-0")) and found.busy_until)
        before = coordinator.core.engines.named("engine-0")
        await asyncio.sleep(1.0)
        assert coordinator.core.engines.named("engine-0") is before
        assert coordinator.transport.is_connected(before.peer)
    finally:
        unblock.set()
        await running


async def test_requests_of_a_client_that_leaves_are_aborted_at_the_engine(stage, params) -> None:
    coordinator, engine, client = await stage.all(step_seconds=None, max_requests=2)
    futures = [client.add_request([n], params(4)) for n in range(1, 5)]
    await engine.until(lambda: len(engine.jobs) == 2)
    client.stop()
    await engine.until(lambda: len(engine.aborted) == 2)
    await stage.until(lambda: len(coordinator.core.dispatcher.journal) == 0)
    assert all(future.cancelled() for future in futures)
    assert engine.jobs == {}


async def test_waiting_requests_replace_those_of_a_client_that_leaves(stage, params) -> None:
    coordinator = stage.coordinator()
    engine = await stage.engine(step_seconds=None, max_requests=1)
    leaving, staying = await stage.client(), await stage.client()
    leaving.add_request([1], params(1))
    await engine.until(lambda: engine.jobs)
    future = staying.add_request([2], params(1))
    await stage.until(lambda: coordinator.core.dispatcher.queue.length == 1)
    leaving.native._link.send(Disconnect(reason="test").to_frames())  # stop() would abort its request first
    await engine.until(lambda: len(engine.dispatches) == 2)
    engine.step()
    assert (await future)["generated_tokens"] == echo_answer([2], 1)


async def test_requests_of_a_client_that_dies_are_aborted_after_its_silence(stage, params) -> None:
    coordinator = stage.coordinator(timing=Timing(heartbeat=0.05, client_dead=1.2, recovery=0.0))
    engine = await stage.engine(step_seconds=None)
    client = await stage.client()
    client.add_request([1], params(4))
    await engine.until(lambda: engine.jobs)
    client.native._link._timer.cancel()
    client.native._link._socket.close()
    client.native._link.registered = False
    await engine.until(lambda: engine.aborted)
    assert coordinator.core.clients.named(Role.CLIENT, client.native.name) is None


@pytest.mark.parametrize("ends", ["before", "after"])
async def test_a_client_on_a_new_connection_gets_what_it_missed(stage, params, collect, ends) -> None:
    coordinator, engine, client = await stage.all(step_seconds=None)
    stream = client.add_request_streaming([1], params(8))
    await engine.until(lambda: engine.jobs)
    engine.step()
    assert await anext(stream)
    client.native._link._socket.close()
    for _ in range(3):
        engine.step()
    await stage.until(lambda: next(iter(coordinator.core.dispatcher.journal)).tokens_so_far == 4)
    registered = coordinator.core.clients.named(Role.CLIENT, client.native.name)
    await stage.until(lambda: not registered.reachable)
    if ends == "before":
        for _ in range(4):
            engine.step()
        await stage.until(lambda: len(coordinator.core.dispatcher.journal) == 0)
    client.native._link._lose("test")
    client.native._link._open()
    if ends == "after":
        await stage.until(lambda: client.connected)
        for _ in range(4):
            engine.step()
    tokens, final = await collect(stream)
    answer = echo_answer([1], 8)
    assert final["generated_tokens"] == answer
    # What was missed comes as one partial, or in the final when that is ready by then.
    assert answer[: 1 + len(tokens)] == answer[:1] + tokens
    assert len(engine.dispatches) == 1


async def test_a_client_that_never_reads_is_dropped(stage, params) -> None:
    coordinator = stage.coordinator(timing=Timing(heartbeat=0.05, slow_client=0.3, recovery=0.0))
    engine = await stage.engine(step_seconds=0.01)
    slow = await stage.client()
    peer = coordinator.core.clients.named(Role.CLIENT, slow.native.name).peer
    send = coordinator.transport.send
    coordinator.transport.send = lambda to, frames: to != peer and send(to, frames)
    slow.add_request_streaming([1], params(100_000))
    await stage.until(lambda: coordinator.core.clients.named(Role.CLIENT, slow.native.name) is None)
    await engine.until(lambda: engine.aborted)


async def test_a_coordinator_that_comes_back_takes_state_from_its_engines_and_requests_from_its_clients(
    stage, params, collect
) -> None:
    before = stage.coordinator()
    engines = [await stage.engine(f"engine-{n}", step_seconds=None) for n in range(2)]
    client, link = await stage.client(), await stage.admin()
    streams = await start_streams(client, params, 4)
    await stage.until(lambda: sum(len(engine.jobs) for engine in engines) == 4)
    for engine in engines:
        engine.step()
    await stage.until(lambda: all(entry.forwarded == 1 for entry in before.core.dispatcher.journal))
    await link.control(Header.SET_GENERATION_EPOCH, operation_id="e", fence=4, epoch=12)
    await link.control(Header.PAUSE, operation_id="p", fence=4)
    ports = {role: int(address.rpartition(":")[2]) for role, address in before.transport.addresses.items()}
    before.stop()
    stage.coordinators.clear()
    for engine in engines:
        engine.jobs.clear()
        engine.step_seconds = 0.0
        engine.fence = 4
    after = stage.coordinator(
        client_port=ports[Role.CLIENT],
        engine_port=ports[Role.ENGINE],
        admin_port=ports[Role.ADMIN],
        timing=Timing(heartbeat=0.05, recovery=10.0, recovery_settle=0.5),
    )
    assert after.core.verbs.state is CoordinatorState.RECOVERING
    for engine in engines:
        await engine.until(lambda engine=engine: any(e.code is ErrorCode.UNKNOWN_PEER for e in engine.errors))
        engine.say_hello()
    await stage.until(lambda: after.core.verbs.state is CoordinatorState.PAUSED)
    assert (after.core.verbs.epoch, after.core.verbs.fence) == (12, 4)
    await stage.until(lambda: after.core.dispatcher.queue.length == 4)
    await link.control(Header.UNPAUSE, operation_id="u", fence=4)
    await check_streams(streams, collect)
    assert all(len(tokens_from_bytes(d.generated)) == 1 for engine in engines for d in engine.dispatches[-2:])


async def test_a_coordinator_without_peers_is_running_soon(stage) -> None:
    coordinator = stage.coordinator(timing=Timing(heartbeat=0.05, recovery=3600.0, recovery_settle=0.05))
    assert coordinator.core.verbs.state is CoordinatorState.RECOVERING
    await stage.until(lambda: coordinator.core.verbs.state is CoordinatorState.RUNNING)


async def test_an_engine_that_did_not_serve_gets_the_state_when_recovery_ends(stage, params) -> None:
    coordinator = stage.coordinator(timing=Timing(heartbeat=0.05, recovery=3600.0, recovery_settle=3600.0))
    engine = await stage.engine(serving=False, state=EngineState.PAUSED)
    assert engine.acks[-1].state == CoordinatorState.RECOVERING
    coordinator.core.membership.recovery.settle()
    coordinator.core._settle()
    coordinator._perform()
    await engine.until(lambda: engine.acks[-1].state == CoordinatorState.RUNNING)
    client = await stage.client()
    future = client.add_request([1], params(2))
    engine.serving = True
    engine.say_hello()
    await future
    assert coordinator.core.verbs.state is CoordinatorState.RUNNING


async def test_recovery_waits_for_engines_it_heard_of(stage) -> None:
    coordinator = stage.coordinator(timing=Timing(heartbeat=0.05, recovery=3600.0, recovery_settle=0.05))
    coordinator.core.membership.recovery.heard_of((1, b"ghost"))
    await stage.until(lambda: coordinator.core.membership.recovery._settled)
    assert coordinator.core.verbs.state is CoordinatorState.RECOVERING


async def test_recovery_ends_when_the_engine_it_heard_of_has_registered(stage) -> None:
    coordinator = stage.coordinator(timing=Timing(heartbeat=0.05, recovery=3600.0, recovery_settle=3600.0))
    engine = await stage.engine()
    coordinator.core.membership.recovery.heard_of(coordinator.core.engines.named("engine-0").peer)
    coordinator.core.membership.recovery.settle()
    assert coordinator.core.verbs.state is CoordinatorState.RECOVERING
    engine.say_hello()
    await stage.until(lambda: coordinator.core.verbs.state is CoordinatorState.RUNNING)


async def test_recovery_does_not_wait_for_ever(stage) -> None:
    coordinator = stage.coordinator(timing=Timing(heartbeat=0.05, recovery=0.3, recovery_settle=0.1))
    coordinator.core.membership.recovery.heard_of((1, b"ghost"))
    await stage.until(lambda: coordinator.core.verbs.state is CoordinatorState.RUNNING)


async def test_the_first_engine_that_outlived_tells_a_coordinator_that_gave_up_waiting(stage) -> None:
    coordinator = stage.coordinator()
    await stage.engine(state=EngineState.SUSPENDED, epoch=3)
    assert coordinator.core.verbs.state is CoordinatorState.SUSPENDED
    assert coordinator.core.verbs.epoch == 3


@pytest.mark.slow
async def test_without_an_engine_a_request_waits_and_then_its_time_is_up(stage, params) -> None:
    stage.coordinator(max_wait_seconds=2.0)
    client = await stage.client()
    with pytest.raises(RequestRejectedError, match="for an engine") as rejected:
        await client.add_request([1], params(2))
    assert rejected.value.code == 504
    future = client.add_request([1], params(2))
    await stage.engine()
    await future


async def test_a_deadline_ends_a_request_wherever_it_is(stage, params) -> None:
    coordinator, engine, client = await stage.all(step_seconds=None)
    with pytest.raises(RequestRejectedError, match="to be finished") as rejected:
        await client.add_request([1], params(2), deadline_seconds=scaled(1))
    assert rejected.value.code == 504
    assert 0 < engine.dispatches[0].meta.deadline_ms <= 1000 * scaled(1)
    await engine.until(lambda: engine.aborted)
    assert len(coordinator.core.dispatcher.journal) == 0


async def test_requests_of_an_engine_that_falls_silent_go_where_there_is_room_at_once(stage, params, collect) -> None:
    """A frozen engine is dead only later; by then its clients have their answers."""
    coordinator = stage.coordinator(timing=Timing(heartbeat=0.05, suspect=0.3, dead=60.0, recovery=0.0))
    frozen = await stage.engine("frozen", step_seconds=None)
    client = await stage.client()
    streams = await start_streams(client, params, 6)
    await frozen.until(lambda: len(frozen.jobs) == 6)
    frozen.step()
    await stage.until(lambda: all(entry.forwarded == 1 for entry in coordinator.core.dispatcher.journal))
    other = await stage.engine("other", max_requests=2)
    frozen.heartbeat_seconds = None
    await check_streams(streams, collect)
    assert coordinator.core.engines.named("frozen") is not None
    await frozen.until(lambda: len(frozen.aborted) == 6)
    assert len(other.dispatches) == 6
    frozen.heartbeat_seconds, frozen.step_seconds = 0.05, 0.0
    frozen._beat()
    await stage.until(lambda: not coordinator.core.engines.named("frozen").suspect)


async def test_an_engine_gets_no_work_until_it_reports_running(stage, params) -> None:
    coordinator = stage.coordinator()
    engine = await stage.engine(state=EngineState.RUNNING, follows_acks=False)
    engine.state = EngineState.PAUSED
    engine.say_hello()
    await engine.until(lambda: len(engine.acks) == 2)
    client = await stage.client()
    future = client.add_request([1], params(2))
    await stage.until(lambda: coordinator.core.dispatcher.queue.length == 1)
    assert engine.dispatches == []
    engine.state = EngineState.RUNNING
    assert await future


@pytest.mark.parametrize(
    "verbs",
    [
        (Header.PAUSE,),
        (Header.PAUSE, Header.UNPAUSE),
        (Header.PAUSE, Header.SUSPEND),
        (Header.PAUSE, Header.SUSPEND, Header.RESUME),
        (Header.PAUSE, Header.STOP),
        (Header.SET_GENERATION_EPOCH,),
        (Header.UPDATE_WEIGHTS,),
    ],
    ids=lambda verbs: verbs[-1].name,
)
async def test_an_engine_that_missed_its_commit_gets_it_again(stage, verbs) -> None:
    coordinator = stage.coordinator()
    engine = await stage.engine()
    link = await stage.admin()
    commit, missed = engine._commit, []

    def is_in_step() -> bool:
        return (engine.state.value, engine.epoch) == (coordinator.core.verbs.state, coordinator.core.verbs.epoch)

    for number, kind in enumerate(verbs):
        # The answer to a verb may be here before its commit is at the engine.
        await engine.until(is_in_step)
        engine._commit = missed.append if kind is verbs[-1] else commit
        options = (
            {"epoch": 7, "source": "/models/7"} if kind in (Header.SET_GENERATION_EPOCH, Header.UPDATE_WEIGHTS) else {}
        )
        await link.control(kind, operation_id=f"op-{number}", fence=1, **options)
    # The first commit sent again is lost, too. STOP has no other way to be learnt; the others have HELLO_ACK.
    await engine.until(lambda: len(missed) == 2)
    assert missed[0] == missed[1]
    engine._commit = commit
    if verbs[-1] is Header.STOP:
        await engine.until(lambda: engine.state is EngineState.STOPPED)
    else:
        await engine.until(is_in_step)
        assert len(engine.acks) == 2
