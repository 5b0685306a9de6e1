"""Requests with parameters that only some engines support, in a pool of native and vLLM engines."""

from __future__ import annotations

import asyncio
import random

import pytest
from echo_executor import echo_answer

from megatron_runtime.client.rejection import DeadlineExceededError, InvalidRequestError
from megatron_runtime.coordinator.core import records
from megatron_runtime.coordinator.core.settings import RoutingPolicy, Timing
from megatron_runtime.protocol.headers import ErrorCode, Header
from megatron_runtime.protocol.lifecycle import EngineState
from megatron_runtime.protocol.messages import (
    Control,
    ControlAck,
    Error,
    Heartbeat,
    RequestMeta,
    Submit,
    tokens_to_bytes,
)
from megatron_runtime.requests import capabilities

from .simulated_fleet import SimulatedFleet
from .test_core import ADMIN, CLIENT, FIRST, PARAMS, SECOND, Scene

VLLM = {"backend": "vllm", "lacks": ("HIDDEN_STATES", "HIGH_TEMPERATURE")}
HOT = {"temperature": 3.0}


@pytest.mark.parametrize("policy", RoutingPolicy)
async def test_a_request_goes_to_an_engine_that_supports_it(stage, params, policy) -> None:
    """Also if the other one holds its whole prompt."""
    stage.coordinator(routing_policy=policy)
    vllm = await stage.engine("vllm", block_size_tokens=4, **VLLM)
    client = await stage.client()
    prompt = list(range(1, 17))
    await client.add_request(prompt, params(1))
    native = await stage.engine("native", block_size_tokens=4, backend="native")
    before = len(vllm.dispatches)
    answers = await asyncio.gather(*(client.add_request(prompt, params(4, **HOT)) for _ in range(8)))
    assert [answer["generated_tokens"] for answer in answers] == [echo_answer(prompt, 4)] * 8
    assert (len(native.dispatches), len(vllm.dispatches)) == (8, before)
    await asyncio.gather(*(client.add_request([number], params(4)) for number in range(8)))
    assert len(vllm.dispatches) > before


@pytest.mark.parametrize("is_full", [False, True], ids=["with room", "full"])
@pytest.mark.parametrize(
    ("field", "values", "feature"),
    [
        ("temperature", HOT, "temperatures above 2"),
        ("return_hidden_state", {"return_hidden_state": True}, "hidden states"),
    ],
)
async def test_a_request_that_no_engine_supports_is_rejected_at_once_by_parameter_and_backend(
    stage, params, field, values, feature, is_full
) -> None:
    coordinator, engine, client = await stage.all("vllm", max_requests=1, step_seconds=None, **VLLM)
    if is_full:
        client.add_request([1], params(1))
        await engine.until(lambda: engine.jobs)
    with pytest.raises(InvalidRequestError, match=rf"{field} needs {feature}, .*\(backend 'vllm'\)") as rejected:
        await client.add_request([2], params(1, **values))
    assert (rejected.value.code, rejected.value.field) == (400, field)
    assert len(engine.dispatches) == len(coordinator.core.dispatcher.journal) == is_full


async def test_a_request_waits_for_an_engine_that_supports_it_and_others_overtake_it(stage, params) -> None:
    coordinator = stage.coordinator()
    native = await stage.engine("native", max_requests=1, step_seconds=None, backend="native")
    await stage.engine("vllm", **VLLM)
    client = await stage.client()
    waiting = [client.add_request([number], params(1, **HOT)) for number in range(3)]
    await stage.until(lambda: coordinator.core.dispatcher.queue.length == 2)
    assert (await client.add_request([9], params(1)))["generated_tokens"] == echo_answer([9], 1)
    for number in range(3):
        await native.until(lambda number=number: len(native.dispatches) == number + 1)
        native.step()
    answers = await asyncio.gather(*waiting)
    assert [answer["generated_tokens"] for answer in answers] == [echo_answer([number], 1) for number in range(3)]


async def test_requests_of_a_lost_engine_wait_until_it_returns_and_lose_no_token(stage, params, collect) -> None:
    """Whether or not tokens were delivered: an engine had accepted them."""
    coordinator, native, client = await stage.all("native", step_seconds=None, backend="native")
    stream = client.add_request_streaming([1], params(8, **HOT))
    whole = client.add_request([2], params(8, **HOT))
    moves = client.add_request_streaming([3], params(8))
    await native.until(lambda: len(native.jobs) == 3)
    for _ in range(3):
        native.step()
    await stage.until(lambda: sum(entry.tokens_so_far for entry in coordinator.core.dispatcher.journal) == 6)
    vllm = await stage.engine("vllm", **VLLM)
    native.close()
    tokens, final = await collect(moves)
    assert tokens == final["generated_tokens"] == echo_answer([3], 8), "what every engine supports continues at once"
    with pytest.raises(InvalidRequestError):
        await client.add_request([4], params(8, **HOT))
    assert coordinator.core.dispatcher.queue.length == 2
    again = await stage.engine("native", backend="native")
    tokens, final = await collect(stream)
    assert tokens == final["generated_tokens"] == echo_answer([1], 8)
    assert (await whole)["generated_tokens"] == echo_answer([2], 8)
    assert {dispatch.prompt[0]: len(dispatch.generated) // 4 for dispatch in again.dispatches} == {1: 3, 2: 0}
    assert [dispatch.prompt[0] for dispatch in vllm.dispatches] == [3]


async def test_a_request_whose_engine_does_not_return_ends_at_its_time(stage, params) -> None:
    coordinator = stage.coordinator(max_wait_seconds=0.3)
    native = await stage.engine("native", step_seconds=None, backend="native")
    vllm = await stage.engine("vllm", **VLLM)
    client = await stage.client()
    stream = client.add_request_streaming([1], params(8, **HOT))
    await native.until(lambda: native.jobs)
    native.step()
    await stage.until(lambda: [entry.tokens_so_far for entry in coordinator.core.dispatcher.journal] == [1])
    native.close()
    with pytest.raises(DeadlineExceededError, match="for an engine that supports temperatures above 2"):
        async for _ in stream:
            pass
    assert not vllm.dispatches


async def test_a_request_for_one_engine_that_lacks_a_feature_is_rejected(stage, params) -> None:
    stage.coordinator()
    await stage.engine("native", backend="native")
    vllm = await stage.engine("vllm", **VLLM)
    client = await stage.client()
    with pytest.raises(InvalidRequestError, match="temperature needs temperatures above 2") as rejected:
        await client.add_request([1], params(1, **HOT), engine="vllm")
    assert rejected.value.field == "temperature"
    assert not vllm.dispatches


async def test_a_tenant_takes_no_slot_of_an_engine_that_lacks_a_feature(stage, params) -> None:
    coordinator, vllm, client = await stage.all("vllm", max_requests=4, step_seconds=None, **VLLM)
    for number in range(6):
        client.add_request([1, number], params(4), tenant="many")
    await vllm.until(lambda: len(vllm.jobs) == 4)
    native = await stage.engine("native", max_requests=2, step_seconds=None, backend="native")
    await native.until(lambda: len(native.jobs) == 2)
    for number in range(3):
        client.add_request([2, number], params(4, **HOT), tenant="hot")
    await stage.until(lambda: len(coordinator.core.dispatcher.journal) == 9)
    stage.pump()
    found = {
        engine.name: sorted(entry.tenant.key for entry in engine.in_flight.values())
        for engine in coordinator.core.engines
    }
    assert found == {"vllm": ["many"] * 4, "native": ["hot"] * 2}
    assert coordinator.core.counters.moved == 2


async def test_a_silent_engine_keeps_requests_that_no_other_engine_supports(stage, params) -> None:
    timing = Timing(heartbeat=0.05, suspect=0.4, dead=60.0, client_dead=60.0, recovery=0.0)
    coordinator = stage.coordinator(timing=timing)
    silent = await stage.engine("native", step_seconds=None, heartbeat_seconds=None, backend="native")
    await stage.engine("vllm", **VLLM)
    client = await stage.client()
    answer = client.add_request([1], params(1, **HOT))
    await silent.until(lambda: silent.jobs)
    await stage.until(lambda: coordinator.core.engines.named("native").suspect)
    assert not silent.aborted
    silent.step()
    assert (await answer)["generated_tokens"] == echo_answer([1], 1)


POOLING = {"backend": "vllm", "task": "embed", "lacks": ("CLASSIFY",), "parameters": ("pooling",)}
NATIVE = {"backend": "native", "lacks": ("EMBED", "CLASSIFY"), "parameters": ("pooling",)}
EMBED = {"pooling": {"task": "embed"}}


@pytest.mark.parametrize("policy", RoutingPolicy)
async def test_a_pooling_model_gets_requests_for_its_task_and_no_others(stage, params, policy) -> None:
    """Also of a client of an earlier release, which names no needs, and if the other engines have no room."""
    stage.coordinator(routing_policy=policy)
    pooling = await stage.engine("pooling", block_size_tokens=4, max_requests=2, **POOLING)
    native = await stage.engine("native", block_size_tokens=4, max_requests=2, **NATIVE)
    client = await stage.client()
    prompt = list(range(1, 17))
    for _ in range(2):  # the second time, an engine has the prefix
        await asyncio.gather(
            *(client.add_request(prompt, params(4)) for _ in range(8)),
            *(client.add_request(prompt, params(0, **EMBED)) for _ in range(8)),
        )
    assert {dispatch.meta.needs for dispatch in native.dispatches} == {""}
    assert {dispatch.meta.needs for dispatch in pooling.dispatches} == {"EMBED pooling"}
    assert len(native.dispatches) == len(pooling.dispatches) == 16


async def test_a_request_that_no_engine_answers_by_its_task_is_rejected_at_once(stage, params) -> None:
    _, _, client = await stage.all("pooling", **POOLING)
    for options in ({}, {"engine": "pooling"}):
        with pytest.raises(InvalidRequestError, match="generates no tokens, its task is embed"):
            await client.add_request([1], params(1), **options)
        with pytest.raises(InvalidRequestError, match="pooling needs labels of texts"):
            await client.add_request([1], params(0, pooling={"task": "classify"}), **options)


async def test_clients_know_the_tasks_of_pooling_models_and_others_as_soon_as_they_serve(stage) -> None:
    """They keep them while no engine serves."""
    stage.coordinator(timing=Timing(heartbeat=60.0, suspect=90.0, dead=120.0, client_dead=120.0, recovery=0.0))
    client = await stage.native_client()
    assert client.tasks == ()
    pooling = await stage.engine("pooling", **POOLING)
    await stage.until(lambda: client.tasks == ("embed",))
    native = await stage.engine("native", **NATIVE)
    await stage.until(lambda: client.tasks == ("embed", "generate"))
    assert (await stage.native_client()).tasks == ("embed", "generate")
    pooling.close()
    native.close()
    coordinator = stage.coordinators[-1]
    await stage.until(lambda: not coordinator.core.engines.serving())
    assert client.tasks == ("embed", "generate")


# --- the core alone -----------------------------------------------------------------------------------------------


def test_peers_of_earlier_releases_name_no_needs_and_lack_nothing() -> None:
    scene = Scene()
    scene.engine(FIRST)  # its HELLO has no `lacks`
    uid = scene.submit(needs="HIGH_TEMPERATURE")
    assert [dispatch.uid for dispatch in scene.dispatched()[FIRST]] == [uid]
    scene.driver.connection_lost(FIRST, by_peer=True)
    scene.engine(SECOND, lacks=("HIGH_TEMPERATURE",))
    assert not scene.dispatched()
    old = scene.submit(2)  # its engine checks the parameters itself
    assert [dispatch.uid for dispatch in scene.dispatched()[SECOND]] == [old]


def test_a_feature_of_a_later_release_is_compared_by_its_name() -> None:
    scene = Scene()
    scene.engine(FIRST, lacks=("OF_A_LATER_RELEASE",))
    scene.take()
    scene.submit(needs="PRIORITY OF_A_LATER_RELEASE")
    [(peer, error)] = scene.take()
    assert (peer, error.code, error.field) == (CLIENT, ErrorCode.INVALID_REQUEST, None)
    assert "OF_A_LATER_RELEASE" in error.message
    scene.engine(SECOND)
    scene.submit(2, needs="PRIORITY OF_A_LATER_RELEASE")
    assert len(scene.dispatched()[SECOND]) == 1


def test_an_engine_that_does_not_know_a_parameter_is_skipped_and_the_request_is_rejected_without_another() -> None:
    """An engine of an earlier release announces no parameters: it knows those of the first release only."""
    scene = Scene()
    scene.engine(FIRST)
    scene.take()
    scene.submit(needs="of_a_later_release")
    [(peer, error)] = scene.take()
    assert (peer, error.code, error.field) == (CLIENT, ErrorCode.INVALID_REQUEST, "of_a_later_release")
    assert "sampling parameter of_a_later_release is of a later release" in error.message
    scene.engine(SECOND, parameters=("temperature", "of_a_later_release"))
    later = scene.submit(2, needs="of_a_later_release")
    others = {scene.submit(number) for number in range(3, 7)}
    sent = {peer: {dispatch.uid for dispatch in dispatches} for peer, dispatches in scene.dispatched().items()}
    assert later in sent[SECOND]
    assert sent[FIRST] | sent[SECOND] == {later, *others}
    assert sent[FIRST] <= others
    scene.submit(7, needs="min_p")
    [(peer, _)] = scene.take()
    assert peer == FIRST, "the other one announces two parameters, of which min_p is none"


@pytest.mark.parametrize("is_later", [False, True], ids=["earlier release", "this release"])
async def test_a_parameter_that_was_added_later_reaches_only_engines_that_announce_it(
    stage, params, monkeypatch, is_later
) -> None:
    monkeypatch.setattr(capabilities, "LATER_PARAMETERS", {"top_p": 0.0})
    monkeypatch.setattr(records, "FIRST_PARAMETERS", capabilities.FIRST_PARAMETERS - {"top_p"})
    _, engine, client = await stage.all(parameters=capabilities.KNOWN_PARAMETERS if is_later else None)
    await client.add_request([1], params(1))
    answer = client.add_request([1], params(1, top_p=0.1))
    if is_later:
        await answer
    else:
        with pytest.raises(InvalidRequestError, match="sampling parameter top_p is of a later release"):
            await answer
    assert [dispatch.meta.needs for dispatch in engine.dispatches] == ["", "top_p"][: 1 + is_later]


def test_a_request_that_comes_with_tokens_waits_at_a_restarted_coordinator() -> None:
    scene = Scene()
    scene.engine(FIRST, lacks=("HIGH_TEMPERATURE",))
    scene.take()
    meta = RequestMeta(True, 1, needs="HIGH_TEMPERATURE")
    scene.say(CLIENT, Submit(b"\1" * 16, meta, tokens_to_bytes([1]), tokens_to_bytes([5, 6]), PARAMS))
    assert scene.take() == []
    scene.engine(SECOND)
    [dispatch] = scene.dispatched()[SECOND]
    assert dispatch.generated == tokens_to_bytes([5, 6])


def test_a_request_waits_during_a_pause_and_is_rejected_at_its_end() -> None:
    """The engines may be replaced meanwhile."""
    scene = Scene()
    scene.say(ADMIN, Control(kind=Header.PAUSE, operation_id="pause", fence=1))
    scene.engine(FIRST, lacks=("HIGH_TEMPERATURE",), state=EngineState.PAUSED)
    scene.take()
    scene.submit(needs="HIGH_TEMPERATURE")
    assert scene.take() == []
    scene.say(ADMIN, Control(kind=Header.UNPAUSE, operation_id="unpause", fence=1))
    scene.say(FIRST, ControlAck(operation_id="unpause", ok=True, state=EngineState.UNPAUSING, ranks=1))
    scene.say(FIRST, Heartbeat(incarnation=1, state=EngineState.RUNNING))
    assert [message.code for _, message in scene.take() if isinstance(message, Error)] == [ErrorCode.INVALID_REQUEST]


def test_a_suspect_is_tried_only_on_an_engine_that_supports_it() -> None:
    fleet = SimulatedFleet()
    fleet.restart_turns = 30
    vllm = fleet.engine("vllm", lacks=("HIGH_TEMPERATURE",))
    fleet.engine("native")
    asked = fleet.ask(1, tokens=60, needs="HIGH_TEMPERATURE")
    for _ in range(2):
        fleet.until(lambda: fleet.engines["native"].alive and fleet.engines["native"].jobs)
        fleet.crash(fleet.engines["native"])
        fleet.turns(10)
    assert (fleet.core.counters.suspects, fleet.core.dispatcher.waiting) == (1, 1)
    other = fleet.ask(2, tokens=5)
    fleet.until(lambda: other.ended)
    fleet.finish(asked)
    assert asked.uid not in vllm.ran


@pytest.mark.parametrize("seed", range(8))
def test_whatever_happens_no_engine_gets_a_request_that_it_does_not_support(seed: int) -> None:
    rng = random.Random(seed)
    features = ("A", "B", "C")
    fleet = SimulatedFleet(seed=seed, max_wait_seconds=1e6)
    fleet.restart_turns = 20
    for number, lacks in enumerate([(), ("A",), ("B", "C"), ("C",)]):
        fleet.engine(f"engine-{number}", lacks=lacks, max_requests=4)
    needs: dict[bytes, set[str]] = {}
    for turn in range(200):
        if turn < 150 and rng.random() < 0.5:
            chosen = {name for name in features if rng.random() < 0.3}
            asked = fleet.ask(turn, tokens=rng.randint(1, 30), tenant=rng.choice("ab"), needs=" ".join(sorted(chosen)))
            needs[asked.uid] = chosen
        unreserved = [engine for engine in fleet.core.engines if not engine.reserved]  # a crash convicts a suspect
        if unreserved and rng.random() < 0.03:
            fleet.crash(fleet.engines[rng.choice(unreserved).name])
        fleet.turn()
        for engine in fleet.engines.values():
            assert not any(needs[uid] & set(engine.lacks) for uid in engine.ran)
    fleet.finish()
    for asked in fleet.asked.values():
        if asked.error is None:
            asked.check()
        else:
            assert asked.error.code is ErrorCode.INVALID_REQUEST, asked.error
            assert not asked.tokens
