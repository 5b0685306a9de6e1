"""Control messages: legal or rejected, confirmed by every engine, at most once."""

import asyncio

import pytest
import zmq
from echo_executor import echo_answer

from megatron_runtime.client.rejection import RequestRejectedError
from megatron_runtime.coordinator.core.settings import RoutingPolicy, Timing
from megatron_runtime.protocol.adapters import Adapter, AdapterList
from megatron_runtime.protocol.headers import ErrorCode, Header, Role
from megatron_runtime.protocol.lifecycle import CoordinatorState, EngineState
from megatron_runtime.protocol.messages import Control, ControlAck, Heartbeat
from megatron_runtime.transport.control_calls import ControlRejectedError

from .simulated_fleet import SimulatedFleet

H, S = Header, CoordinatorState
PATH_TO = {
    S.RUNNING: (),
    S.PAUSED: (H.PAUSE,),
    S.SUSPENDED: (H.PAUSE, H.SUSPEND),
}
OUTCOME = {
    (H.PAUSE, S.RUNNING): S.PAUSED,
    (H.PAUSE, S.PAUSED): S.PAUSED,
    (H.PAUSE, S.SUSPENDED): S.SUSPENDED,
    (H.UNPAUSE, S.PAUSED): S.RUNNING,
    (H.SUSPEND, S.PAUSED): S.SUSPENDED,
    (H.RESUME, S.SUSPENDED): S.PAUSED,
    (H.STOP, S.PAUSED): S.RUNNING,
    (H.STOP, S.SUSPENDED): S.RUNNING,
    (H.DRAIN, S.RUNNING): S.RUNNING,
    (H.SET_GENERATION_EPOCH, S.RUNNING): S.RUNNING,
    (H.SET_GENERATION_EPOCH, S.PAUSED): S.PAUSED,
    (H.SET_GENERATION_EPOCH, S.SUSPENDED): S.SUSPENDED,
    (H.UPDATE_WEIGHTS, S.RUNNING): S.RUNNING,
    (H.UPDATE_WEIGHTS, S.PAUSED): S.PAUSED,
    (H.SET_ADAPTERS, S.RUNNING): S.RUNNING,
    (H.SET_ADAPTERS, S.PAUSED): S.PAUSED,
    **{(kind, state): state for kind in (H.START_CUDA_PROFILER, H.STOP_CUDA_PROFILER) for state in PATH_TO},
}
KINDS = (
    *(H.PAUSE, H.UNPAUSE, H.SUSPEND, H.RESUME, H.STOP, H.DRAIN, H.SET_GENERATION_EPOCH, H.UPDATE_WEIGHTS),
    *(H.SET_ADAPTERS, H.START_CUDA_PROFILER, H.STOP_CUDA_PROFILER),
)
CASES = [(kind, state) for kind in KINDS for state in PATH_TO]


@pytest.fixture
def control(stage):
    """Send control messages with a fence and an id of their own."""
    count = iter(range(1000))

    def send(link, kind, **options):
        defaults = {"operation_id": f"op-{next(count)}", "fence": 1, "timeout_seconds": 10.0}
        if kind in (H.SET_GENERATION_EPOCH, H.UPDATE_WEIGHTS):
            defaults["epoch"] = 7
        if kind is H.UPDATE_WEIGHTS:
            defaults["source"] = "/models/7"
        if kind is H.SET_ADAPTERS:
            defaults["adapters"] = AdapterList((Adapter("sql", "/adapters/sql"),))
        return link.control(kind, **{**defaults, **options})

    return send


@pytest.mark.parametrize(("kind", "state"), CASES, ids=lambda value: getattr(value, "name", str(value)))
async def test_every_verb_in_every_state(stage, control, kind, state) -> None:
    coordinator = stage.coordinator()
    engines = [await stage.engine("engine-0"), await stage.engine("engine-1", ranks=2)]
    link = await stage.admin()
    for step in PATH_TO[state]:
        await control(link, step)
    before = [dict(engine.acted) for engine in engines]
    if (kind, state) in OUTCOME:
        ack = await control(link, kind, expected_engines=2)
        assert ack.state == OUTCOME[kind, state] == coordinator.core.verbs.state
        idle = kind is H.PAUSE and state is not S.RUNNING
        if not idle:
            assert (ack.ranks, ack.total_ranks) == (3, 3)
            assert all(outcome.ok for outcome in ack.engines.values())
        if kind is not H.DRAIN and not idle:
            for engine in engines:
                await engine.until(lambda engine=engine: engine.commits and engine.commits[-1].signal == kind)
                assert engine.acted[kind] == 1
    else:
        with pytest.raises(ControlRejectedError, match=state.value) as rejected:
            await control(link, kind)
        assert rejected.value.code == ErrorCode.ILLEGAL_SIGNAL
        assert rejected.value.state == state == coordinator.core.verbs.state
        assert [dict(engine.acted) for engine in engines] == before


async def test_recovering_takes_no_control_message(stage, control) -> None:
    stage.coordinator(timing=Timing(heartbeat=0.05, recovery=30.0, recovery_settle=30.0))
    link = await stage.admin()
    for kind in KINDS:
        with pytest.raises(ControlRejectedError, match="RECOVERING"):
            await control(link, kind)


async def test_engines_confirm_before_the_coordinator_commits(stage, control) -> None:
    coordinator = stage.coordinator()
    quick, slow = await stage.engine("quick"), await stage.engine("slow", mute={H.PAUSE})
    link = await stage.admin()
    answer = control(link, H.PAUSE, operation_id="pause")
    await quick.until(lambda: quick.acted[H.PAUSE])
    status = await link.status()
    assert status.operations[-1].phase == "InProgress"
    assert not answer.done()
    assert quick.commits == []
    assert coordinator.core.verbs.state is S.RUNNING
    slow.mute.clear()
    slow._control(control_message("pause"))
    ack = await answer
    assert sorted(ack.engines) == ["quick", "slow"]
    assert ack.state == S.PAUSED
    await quick.until(lambda: quick.state is EngineState.PAUSED)


def control_message(operation_id):
    return Control(kind=H.PAUSE, operation_id=operation_id)


async def test_the_same_operation_id_joins_and_later_gets_the_same_answer(stage, control) -> None:
    stage.coordinator()
    engine = await stage.engine(mute={H.PAUSE})
    first, second = await stage.admin(), await stage.admin()
    answers = [control(link, H.PAUSE, operation_id="pause") for link in (first, second)]
    await asyncio.sleep(0.1)
    assert not any(answer.done() for answer in answers)
    engine.mute.clear()
    engine._control(control_message("pause"))
    one, other = await asyncio.gather(*answers)
    assert one == other
    await control(first, H.UNPAUSE)
    assert await control(second, H.PAUSE, operation_id="pause") == one
    assert engine.acted[H.PAUSE] == 1


@pytest.mark.slow
async def test_rejections_are_not_remembered_and_the_last_64_answers_are(stage, control) -> None:
    stage.coordinator()
    engine = await stage.engine()
    link = await stage.admin()
    with pytest.raises(ControlRejectedError):
        await control(link, H.UNPAUSE, operation_id="early")
    for number in range(65):
        await control(link, H.SET_GENERATION_EPOCH, operation_id=f"epoch-{number}", epoch=number)
    operations = (await link.status()).operations
    assert [operation.operation_id for operation in operations] == [f"epoch-{number}" for number in range(1, 65)]
    assert engine.acted[H.SET_GENERATION_EPOCH] == 65


async def test_a_lower_fence_is_rejected_with_the_highest(stage, control) -> None:
    stage.coordinator()
    await stage.engine(fence=3)
    link = await stage.admin()
    await control(link, H.PAUSE, fence=5)
    with pytest.raises(ControlRejectedError) as rejected:
        await control(link, H.UNPAUSE, fence=4)
    assert (rejected.value.code, rejected.value.fence) == (ErrorCode.STALE_FENCE, 5)
    await control(link, H.UNPAUSE, fence=5)


async def test_the_fence_of_an_engine_counts(stage, control) -> None:
    stage.coordinator()
    await stage.engine(fence=9)
    link = await stage.admin()
    with pytest.raises(ControlRejectedError, match="lower than 9"):
        await control(link, H.PAUSE, fence=8)


async def test_one_operation_at_a_time(stage, control) -> None:
    stage.coordinator()
    await stage.engine(mute={H.PAUSE})
    link = await stage.admin()
    pending = control(link, H.PAUSE, operation_id="pause", timeout_seconds=60)
    with pytest.raises(ControlRejectedError, match="PAUSE pause is under way") as rejected:
        await control(link, H.SET_GENERATION_EPOCH)
    assert rejected.value.code == ErrorCode.IN_PROGRESS
    pending.cancel()


async def test_none_cannot_pass_for_all(stage, control) -> None:
    coordinator = stage.coordinator()
    await stage.engine("engine-0")
    await stage.engine("engine-1", serving=False)
    link = await stage.admin()
    with pytest.raises(ControlRejectedError, match="expects 2 engines; serving: engine-0") as rejected:
        await control(link, H.PAUSE, expected_engines=2)
    assert rejected.value.code == ErrorCode.ENGINES_MISSING
    assert coordinator.core.verbs.state is S.RUNNING


async def test_an_engine_that_misses_the_deadline_is_evicted_and_named(stage, control, params) -> None:
    coordinator = stage.coordinator()
    good = await stage.engine("good")
    mute = await stage.engine("mute", mute={H.PAUSE}, step_seconds=None)
    link, client = await stage.admin(), await stage.client()
    futures = [client.add_request([n], params(4)) for n in range(1, 5)]
    await mute.until(lambda: mute.jobs)
    ack = await control(link, H.PAUSE, timeout_seconds=1.5)
    assert ack.ok
    assert ack.evicted == ["mute"]
    assert ack.engines["mute"].error == "no answer within 1.5 s"
    assert (ack.ranks, ack.total_ranks) == (1, 2)
    await mute.until(lambda: any(error.code is ErrorCode.UNKNOWN_PEER for error in mute.errors))
    await control(link, H.UNPAUSE)
    replies = await asyncio.gather(*futures)
    assert [reply["generated_tokens"] for reply in replies] == [echo_answer([n], 4) for n in range(1, 5)]
    assert coordinator.core.engines.named("mute") is None
    assert good.acted[H.UNPAUSE] == 1


@pytest.mark.parametrize("kind", [H.PAUSE, H.UPDATE_WEIGHTS], ids=lambda kind: kind.name)
@pytest.mark.parametrize("seconds", [5.0, 900.0])
async def test_an_operation_has_the_time_that_its_sender_gives_it(kind, seconds) -> None:
    fleet = SimulatedFleet(suspect=1e9, dead=1e9)
    fleet.engine("engine-0").silent = True
    fleet.control(kind, timeout_seconds=seconds, epoch=1, source="/models/1")
    fleet.driver.advance(seconds - 0.5)
    fleet.turn()
    assert fleet.acks == []
    fleet.driver.advance(0.5)
    fleet.turn()
    (ack,) = fleet.acks
    assert ack.engines["engine-0"].error == f"no answer within {seconds:g} s"


async def test_an_engine_that_fails_is_evicted_and_the_others_commit(stage, control) -> None:
    coordinator = stage.coordinator()
    good, bad = await stage.engine("good"), await stage.engine("bad", failing={H.PAUSE})
    link = await stage.admin()
    ack = await control(link, H.PAUSE)
    assert ack.evicted == ["bad"]
    assert ack.engines["bad"].error == "PAUSE went wrong"
    await good.until(lambda: good.state is EngineState.PAUSED)
    assert bad.commits == []
    assert coordinator.core.verbs.state is S.PAUSED


@pytest.mark.parametrize("how", ["failing", "mute"])
async def test_an_engine_that_cannot_be_profiled_is_named_and_serves_on(stage, control, params, how) -> None:
    coordinator = stage.coordinator()
    good = await stage.engine("good")
    bad = await stage.engine("bad", **{how: {H.START_CUDA_PROFILER}})
    link, client = await stage.admin(), await stage.client()
    with pytest.raises(ControlRejectedError, match=r"not every engine succeeded: bad: [^;]*$") as rejected:
        await control(link, H.START_CUDA_PROFILER, timeout_seconds=1.5)
    assert rejected.value.code == ErrorCode.ENGINE_FAILED
    assert rejected.value.ack is not None
    assert rejected.value.ack.evicted == []
    assert rejected.value.ack.engines["good"].ok
    assert good.acted[H.START_CUDA_PROFILER] == 1
    assert coordinator.core.engines.named("bad") is not None
    await control(link, H.STOP_CUDA_PROFILER, expected_engines=2)
    await asyncio.gather(*(client.add_request([number], params(2)) for number in range(4)))
    assert good.dispatches
    assert bad.dispatches


async def test_when_no_engine_succeeds_nothing_has_changed(stage, control, params) -> None:
    coordinator = stage.coordinator()
    engine = await stage.engine(failing={H.PAUSE})
    link, client = await stage.admin(), await stage.client()
    with pytest.raises(ControlRejectedError, match="PAUSE went wrong") as rejected:
        await control(link, H.PAUSE)
    assert rejected.value.ack is not None
    assert rejected.value.ack.evicted == ["engine-0"]
    assert coordinator.core.verbs.state is S.RUNNING
    engine.say_hello()
    assert await client.add_request([1], params(2))


async def test_an_engine_that_dies_leaves_the_barrier(stage, control) -> None:
    stage.coordinator()
    await stage.engine("good")
    dying = await stage.engine("dying", mute={H.PAUSE})
    link = await stage.admin()
    answer = control(link, H.PAUSE, timeout_seconds=60)
    await dying.until(lambda: dying.controls)
    dying.close()
    ack = await answer
    assert ack.ok
    assert ack.evicted == []
    assert "lost" in (ack.engines["dying"].error or "")


async def test_without_engines_a_verb_is_confirmed_with_zero_ranks(stage, control) -> None:
    coordinator = stage.coordinator()
    link = await stage.admin()
    ack = await control(link, H.PAUSE, expected_engines=0)
    assert (ack.state, ack.ranks, ack.total_ranks) == (S.PAUSED, 0, 0)
    assert coordinator.core.verbs.state is S.PAUSED


async def test_pause_stops_running_requests_and_queues_new_ones(stage, control, params, collect) -> None:
    coordinator = stage.coordinator()
    engine = await stage.engine(step_seconds=0.005)
    link, client = await stage.admin(), await stage.client()
    stream = client.add_request_streaming([1], params(200))
    await engine.until(lambda: any(len(job.generated) > 3 for job in engine.jobs.values()))
    await control(link, H.PAUSE)
    tokens_at_pause = [len(job.generated) for job in engine.jobs.values()]
    later = client.add_request([2], params(4))
    await stage.until(lambda: coordinator.core.dispatcher.queue.length == 1)
    await asyncio.sleep(0.1)
    assert [len(job.generated) for job in engine.jobs.values()] == tokens_at_pause
    assert not later.done()
    await control(link, H.SUSPEND)
    await control(link, H.RESUME)
    assert not later.done()
    await control(link, H.UNPAUSE)
    tokens, final = await collect(stream)
    assert tokens == final["generated_tokens"] == echo_answer([1], 200)
    assert (await later)["generated_tokens"] == echo_answer([2], 4)
    assert len(engine.dispatches) == 2


async def test_pause_with_reject_rejects_new_requests(stage, control, params) -> None:
    stage.coordinator(pause_mode="Reject")
    await stage.engine()
    link, client = await stage.admin(), await stage.client()
    await control(link, H.PAUSE)
    with pytest.raises(RequestRejectedError, match="paused") as rejected:
        await client.add_request([1], params(4))
    assert (rejected.value.code, rejected.value.retry_after_seconds) == (503, 1.0)
    await control(link, H.UNPAUSE)
    assert (await client.add_request([1], params(4)))["generated_tokens"] == echo_answer([1], 4)


async def test_stop_answers_open_requests_and_the_coordinator_serves_the_next_engines(stage, control, params) -> None:
    stage.coordinator()
    engine = await stage.engine(step_seconds=None, max_requests=1)
    link, client = await stage.admin(), await stage.client()
    futures = [client.add_request([n], params(4)) for n in (1, 2)]
    stream = client.add_request_streaming([3], params(4))
    await engine.until(lambda: engine.jobs)
    await control(link, H.PAUSE)
    ack = await control(link, H.STOP)
    assert ack.state == S.RUNNING
    for future in futures:
        with pytest.raises(RequestRejectedError) as rejected:
            await future
        assert rejected.value.code == 503
    with pytest.raises(RequestRejectedError):
        await anext(stream)
    engine.leave()
    await stage.engine("engine-1")
    assert (await client.add_request([4], params(4)))["generated_tokens"] == echo_answer([4], 4)


async def test_an_engine_that_joins_learns_state_epoch_and_fence(stage, control) -> None:
    stage.coordinator()
    await stage.engine("engine-0")
    link = await stage.admin()
    await control(link, H.SET_GENERATION_EPOCH, epoch=41, fence=6)
    await control(link, H.PAUSE, fence=6)
    late = await stage.engine("engine-1", serving=False)
    assert (late.acks[-1].state, late.acks[-1].epoch, late.acks[-1].fence) == (S.PAUSED, 41, 6)
    late.serving = True
    late.say_hello()
    await late.until(lambda: late.state is EngineState.PAUSED)
    ack = await control(link, H.UNPAUSE, fence=6, expected_engines=2)
    assert sorted(ack.engines) == ["engine-0", "engine-1"]


@pytest.mark.slow
async def test_an_engine_that_joins_during_a_verb_enters_where_it_ends(stage, control) -> None:
    stage.coordinator()
    first = await stage.engine("first", mute={H.PAUSE})
    link = await stage.admin()
    answer = control(link, H.PAUSE, operation_id="pause", timeout_seconds=4)
    await first.until(lambda: first.controls)
    late = await stage.engine("late", heartbeat_seconds=None)  # which would tell that it missed the outcome
    assert late.acks[0].state == S.PAUSED
    with pytest.raises(ControlRejectedError):
        await answer
    await late.until(lambda: late.acks[-1].state == S.RUNNING)
    assert first.commits == []


async def test_an_answer_that_is_not_awaited_is_counted_and_changes_nothing(stage, control) -> None:
    coordinator = stage.coordinator()
    engine = await stage.engine()
    link = await stage.admin()
    await control(link, H.PAUSE)
    assert coordinator.core.counters.stale == 0
    engine.send(ControlAck(operation_id="of-another-time", ok=True, state=EngineState.PAUSED))
    await stage.until(lambda: coordinator.core.counters.stale)
    assert coordinator.core.verbs.state is S.PAUSED


async def test_the_status_describes_every_engine(stage) -> None:
    stage.coordinator()
    await stage.engine("a", ranks=3, revision="r", epoch=4)
    await stage.engine("b", serving=False, state=EngineState.PAUSED)
    link = await stage.admin()
    first, second = (await link.status()).engines
    assert (first.name, first.state, first.serving, first.ranks) == ("a", EngineState.RUNNING, True, 3)
    assert (first.revision, first.epoch, first.in_flight) == ("r", 4, 0)
    assert (first.draining, first.digest) == (False, "")
    assert (second.name, second.state, second.serving) == ("b", EngineState.PAUSED, False)


async def test_drain_waits_until_the_engine_is_idle_and_sends_it_nothing_more(stage, control, params) -> None:
    coordinator = stage.coordinator()
    drained = await stage.engine("drained", step_seconds=None)
    link, client = await stage.admin(), await stage.client()
    running = client.add_request([1], params(3))
    await drained.until(lambda: drained.jobs)
    answer = control(link, H.DRAIN, engine="drained")
    await stage.until(lambda: coordinator.core.engines.named("drained").draining)
    waiting = client.add_request([2], params(3))
    await stage.until(lambda: coordinator.core.dispatcher.queue.length == 1)
    assert not answer.done()
    for _ in range(3):
        drained.step()
    assert (await answer).engines["drained"].ok
    await running
    assert not waiting.done()
    await stage.engine("other")
    await waiting
    assert len(drained.dispatches) == 1


async def test_a_drain_that_times_out_fails_and_names_the_busy_engines(stage, control, params) -> None:
    stage.coordinator()
    engine = await stage.engine(step_seconds=None)
    link, client = await stage.admin(), await stage.client()
    future = client.add_request([1], params(1))
    await engine.until(lambda: engine.jobs)
    with pytest.raises(ControlRejectedError, match=r"engine-0 \(1\)") as rejected:
        await control(link, H.DRAIN, timeout_seconds=0.2)
    assert rejected.value.code == ErrorCode.DEADLINE
    engine.step()
    await future


@pytest.mark.parametrize("verbs", [(H.UNPAUSE,), (H.PAUSE, H.UNPAUSE)], ids=["running", "paused"])
async def test_after_a_drain_of_all_unpause_gives_work_again(stage, control, params, verbs) -> None:
    coordinator = stage.coordinator()
    engine = await stage.engine()
    link, client = await stage.admin(), await stage.client()
    await control(link, H.DRAIN)
    assert (await link.status()).drained_all
    future = client.add_request([1], params(3))
    await stage.until(lambda: coordinator.core.dispatcher.queue.length == 1)
    for verb in verbs:
        assert not engine.dispatches
        await control(link, verb)
    assert (await future)["generated_tokens"] == echo_answer([1], 3)
    assert not (await link.status()).drained_all
    assert engine.acted[H.UNPAUSE] == len(verbs) - 1


async def test_drain_of_an_unknown_engine_names_the_known(stage, control) -> None:
    stage.coordinator()
    await stage.engine("engine-0")
    link = await stage.admin()
    with pytest.raises(ControlRejectedError, match="no engine 'engine-9' is registered; serving: engine-0"):
        await control(link, H.DRAIN, engine="engine-9")


async def test_a_draining_engine_keeps_its_requests_and_takes_no_part_in_verbs(stage, control, params) -> None:
    stage.coordinator()
    leaving = await stage.engine("leaving", step_seconds=None)
    link, client = await stage.admin(), await stage.client()
    future = client.add_request([1], params(1))
    await leaving.until(lambda: leaving.jobs)
    leaving.serving = False
    leaving.say_hello()
    await leaving.until(lambda: len(leaving.acks) == 2)
    await stage.engine("other")
    ack = await control(link, H.PAUSE)
    assert list(ack.engines) == ["other"]
    leaving.step()
    assert (await future)["generated_tokens"] == echo_answer([1], 1)


async def test_the_admin_port_wants_id_and_fence(stage, control) -> None:
    coordinator = stage.coordinator()
    link = await stage.admin()
    with pytest.raises(ControlRejectedError, match="operation_id and fence are required"):
        await link.control(H.PAUSE, operation_id="x")
    assert coordinator.core.verbs.state is S.RUNNING


async def test_the_client_port_takes_no_control_and_the_only_port_does(stage) -> None:
    coordinator = stage.coordinator()
    client = await stage.client()
    with pytest.raises(ControlRejectedError) as rejected:
        await client.pause_engines()
    assert rejected.value.code == ErrorCode.WRONG_ROLE
    assert coordinator.core.counters.rejected["wrong_role"] == 1

    stage.coordinator(single_port=True)
    engine = await stage.engine()
    client = await stage.client()
    assert (await client.pause_engines()).state == S.PAUSED
    await client.suspend_engines()
    await client.resume_engines()
    await client.set_generation_epoch(5)
    await client.unpause_engines()
    await client.drain("engine-0")
    assert (await client.status()).epoch == 5
    await client.pause_engines()
    assert (await client.stop_engines()).state == S.RUNNING
    await engine.until(lambda: engine.state is EngineState.STOPPED)


async def test_an_update_of_weights_is_committed_and_empties_the_table_of_prefixes(stage, control, params) -> None:
    coordinator = stage.coordinator(routing_policy=RoutingPolicy.LONGEST_PREFIX)
    engines = [await stage.engine(f"engine-{n}", block_size_tokens=4) for n in range(2)]
    link, client = await stage.admin(), await stage.client()
    await client.add_request(list(range(8)), params(1))
    assert any(coordinator.core.router.blocks._held.values())
    ack = await control(link, H.UPDATE_WEIGHTS, source="/models/8", epoch=8, expected_engines=2)
    assert (ack.ok, ack.ranks) == (True, 2)
    assert coordinator.core.verbs.epoch == 8
    assert not coordinator.core.router.blocks._held
    for engine in engines:
        await engine.until(lambda engine=engine: engine.epoch == 8)
        assert [(c.kind, c.source, c.epoch) for c in engine.controls] == [(H.UPDATE_WEIGHTS, "/models/8", 8)]
    again = await control(link, H.UPDATE_WEIGHTS, source="/models/8", epoch=8)
    assert again.ok
    assert coordinator.core.verbs.epoch == 8, "the target is absolute"


async def test_the_status_has_source_and_digest_of_the_weights_in_use(stage, control) -> None:
    coordinator = stage.coordinator(timing=Timing(heartbeat=60.0, suspect=60.0, dead=120.0, recovery=0.0))
    engine = await stage.engine("a", heartbeat_seconds=None)
    link = await stage.admin()

    async def weights_after(**heartbeat):
        record = coordinator.core.engines.named("a")
        before = record.heard
        engine.send(Heartbeat(incarnation=engine.incarnation, state=EngineState.RUNNING, **heartbeat))
        await stage.until(lambda: record.heard > before)
        (told,) = (await link.status()).engines
        return told.epoch, told.source, told.digest

    assert await weights_after(epoch=0, digest="old") == (0, "", "old")
    await control(link, H.UPDATE_WEIGHTS, source="/models/8", epoch=8)
    assert await weights_after(epoch=0, digest="old") == (8, "/models/8", ""), "it was sent before the commit arrived"
    assert await weights_after(epoch=8, source="/models/8", digest="new") == (8, "/models/8", "new")


async def test_an_update_of_weights_evicts_the_engines_that_fail_and_changes_nothing_if_all_do(stage, control) -> None:
    coordinator = stage.coordinator()
    good = await stage.engine("good")
    bad = await stage.engine("bad", failing={H.UPDATE_WEIGHTS})
    link = await stage.admin()
    ack = await control(link, H.UPDATE_WEIGHTS, epoch=3)
    assert ack.evicted == ["bad"]
    await good.until(lambda: good.epoch == 3)
    good.failing.add(H.UPDATE_WEIGHTS)
    with pytest.raises(ControlRejectedError, match="UPDATE_WEIGHTS went wrong"):
        await control(link, H.UPDATE_WEIGHTS, epoch=4, source="/models/broken")
    assert (coordinator.core.verbs.epoch, coordinator.core.verbs.source) == (3, "/models/7")
    assert [commit.epoch for commit in good.commits] == [3]
    assert bad.commits == []


async def test_weights_are_loaded_in_a_second_step_when_every_engine_has_verified_them(stage, control) -> None:
    coordinator = stage.coordinator()
    slow = await stage.engine("slow", must_load=True, mute={H.UPDATE_WEIGHTS})
    fast = await stage.engine("fast", must_load=True)
    beside = await stage.engine("beside")
    link = await stage.admin()
    update = asyncio.ensure_future(control(link, H.UPDATE_WEIGHTS, epoch=3))
    await stage.until(lambda: slow.controls and fast.controls and beside.controls)
    assert not update.done()
    assert [told.load for engine in (slow, fast, beside) for told in engine.controls] == [None] * 3
    slow.mute.clear()
    slow._control(slow.controls.pop())
    ack = await update
    assert (ack.evicted, set(ack.engines)) == ([], {"slow", "fast", "beside"})
    assert [[told.load for told in engine.controls] for engine in (slow, fast, beside)] == [[None, True]] * 2 + [[None]]
    for engine in (slow, fast, beside):
        await engine.until(lambda engine=engine: (engine.epoch, engine.source) == (3, "/models/7"))
    assert coordinator.core.verbs.source == "/models/7"


@pytest.mark.parametrize("end", ["fails", "is lost", "does not answer"])
async def test_if_one_engine_does_not_load_the_weights_all_use_the_old_ones(stage, control, end: str) -> None:
    coordinator = stage.coordinator()
    good = await stage.engine("good", must_load=True, adapters=AdapterList())
    beside = await stage.engine("beside", adapters=AdapterList())
    bad = await stage.engine("bad", must_load=True, adapters=AdapterList())
    link = await stage.admin()
    await control(link, H.UPDATE_WEIGHTS, epoch=2, source="/models/2")
    bad.fails_to_load, bad.mute_load = end == "fails", end != "fails"
    update = asyncio.ensure_future(control(link, H.UPDATE_WEIGHTS, epoch=3, timeout_seconds=1.0))
    if end == "is lost":
        await stage.until(lambda: any(told.load and told.epoch == 3 for told in bad.controls))
        bad.leave()
    with pytest.raises(ControlRejectedError, match="not every engine succeeded: bad: ") as rejected:
        await update
    assert rejected.value.code == ErrorCode.ENGINE_FAILED
    for engine in (good, beside):
        await engine.until(lambda engine=engine: engine.commits[-1].discard)
        assert (engine.epoch, engine.source) == (2, "/models/2")
    assert (coordinator.core.verbs.epoch, coordinator.core.verbs.source) == (2, "/models/2")


async def test_an_engine_that_joins_after_an_update_gets_the_weights_of_its_revision(stage, control) -> None:
    stage.coordinator()
    await stage.engine("engine-0", revision="a")
    link = await stage.admin()
    await control(link, H.UPDATE_WEIGHTS, epoch=5, source="/models/5")
    same = await stage.engine("engine-1", revision="a", serving=False)
    assert (same.acks[-1].source, same.acks[-1].epoch) == ("/models/5", 5)
    other = await stage.engine("engine-2", revision="b", serving=False)
    assert other.acks[-1].source is None


async def test_a_coordinator_that_comes_back_learns_the_weights_from_its_engines(stage) -> None:
    coordinator = stage.coordinator(timing=Timing(heartbeat=0.05, recovery=10.0, recovery_settle=0.3))
    await stage.engine("old", revision="a", epoch=4, source="/models/4")
    await stage.engine("new", revision="a", epoch=5, source="/models/5")
    await stage.until(lambda: coordinator.core.verbs.state is S.RUNNING)
    assert (coordinator.core.verbs.epoch, coordinator.core.verbs.source) == (5, "/models/5")


async def test_newer_weights_of_an_engine_that_registers_after_recovery_reach_the_others(stage, params) -> None:
    late = Timing(heartbeat=0.05, recovery=10.0, recovery_settle=0.05)
    coordinator = stage.coordinator(timing=late, routing_policy=RoutingPolicy.LONGEST_PREFIX)
    old = await stage.engine("old", revision="a", epoch=4, source="/models/4", block_size_tokens=4)
    await old.until(lambda: old.acks[-1].state == S.RUNNING)
    client = await stage.client()
    await client.add_request(list(range(8)), params(1))
    assert any(coordinator.core.router.blocks._held.values())
    new = await stage.engine("new", revision="a", epoch=5, source="/models/5", block_size_tokens=4)
    assert (coordinator.core.verbs.epoch, coordinator.core.verbs.source) == (5, "/models/5")
    assert (new.acks[-1].epoch, new.acks[-1].source) == (5, "/models/5")
    assert not coordinator.core.router.blocks._held, "what was computed with the older weights"
    await old.until(lambda: (old.acks[-1].epoch, old.acks[-1].source) == (5, "/models/5"))


@pytest.mark.parametrize("learns", ["update", "recovery"])
async def test_revisions_that_share_an_epoch_share_its_weights(stage, control, learns) -> None:
    """During a rollout, engines of two revisions hold the weights of one UPDATE_WEIGHTS. The coordinator names these
    weights to an engine that joins with one of the two revisions."""
    timing = Timing(heartbeat=0.05, recovery=10.0, recovery_settle=0.3 if learns == "recovery" else 0.0)
    coordinator = stage.coordinator(timing=timing)
    held = {"epoch": 5, "source": "/models/5"} if learns == "recovery" else {}
    for revision in ("a", "b"):
        await stage.engine(f"engine-{revision}", revision=revision, **held)
    await stage.until(lambda: coordinator.core.verbs.state is S.RUNNING)
    if learns == "update":
        await control(await stage.admin(), H.UPDATE_WEIGHTS, source="/models/5", epoch=5)
    newcomers = {
        revision: await stage.engine(f"newcomer-{revision}", revision=revision, epoch=4, source="/models/4")
        for revision in ("a", "b", "c")
    }
    told = {revision: (engine.acks[-1].epoch, engine.acks[-1].source) for revision, engine in newcomers.items()}
    assert told == {"a": (5, "/models/5"), "b": (5, "/models/5"), "c": (5, None)}


@pytest.mark.parametrize("order", [("old", "new"), ("new", "old")])
async def test_a_revision_with_older_weights_does_not_get_the_newer_source(stage, order) -> None:
    coordinator = stage.coordinator(timing=Timing(heartbeat=0.05, recovery=10.0, recovery_settle=0.3))
    epochs = {"old": 4, "new": 5}
    for revision in order:
        epoch = epochs[revision]
        await stage.engine(f"engine-{revision}", revision=revision, epoch=epoch, source=f"/models/{epoch}")
    await stage.until(lambda: coordinator.core.verbs.state is S.RUNNING)
    for revision, source in (("old", None), ("new", "/models/5")):
        newcomer = await stage.engine(f"newcomer-{revision}", revision=revision, serving=False)
        assert (newcomer.acks[-1].epoch, newcomer.acks[-1].source) == (5, source)


@pytest.mark.parametrize("given", [{"epoch": 1}, {"source": "/models/1"}])
async def test_an_update_of_weights_without_a_field_is_rejected_with_its_name(stage, given) -> None:
    stage.coordinator()
    await stage.engine()
    link = await stage.admin()
    absent = ({"epoch", "source"} - set(given)).pop()
    with pytest.raises(ControlRejectedError, match=f"UPDATE_WEIGHTS needs {absent}") as rejected:
        await link.control(H.UPDATE_WEIGHTS, operation_id="u", fence=1, **given)
    assert rejected.value.code == ErrorCode.INVALID_REQUEST


async def test_a_plain_engine_does_not_update_its_weights(stage) -> None:
    stage.coordinator(single_port=True)
    await stage.engine("ours")
    context = zmq.Context()
    with context.socket(zmq.DEALER) as plain:
        plain.setsockopt(zmq.IDENTITY, b"mp-coord-0")
        plain.connect(stage.address(Role.ENGINE))
        plain.send(b"")
        await stage.until(lambda: len(stage.coordinators[-1].core.engines) == 2)
        link = await stage.admin()
        ack = await link.control(H.UPDATE_WEIGHTS, source="/models/2", epoch=2)
        assert ack.evicted == ["mp-coord-0"]
        plain.setsockopt(zmq.LINGER, 0)
    context.term()
