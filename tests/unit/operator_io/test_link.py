"""The control link against a real socket: reached, lost, reached again, signals and their answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import msgpack
import pytest
import zmq
from eventually import LONG_SECONDS
from in_memory_cluster import MINIMAL, Cluster
from machine import scaled

from megatron_operator.decision.actions import AskCanary, Signal
from megatron_operator.decision.coordinator_snapshot import CoordinatorSnapshot
from megatron_operator.link.address import AddressTemplateError, service_address, template_resolver
from megatron_operator.link.canary import judge, new_canary
from megatron_operator.link.connection import DEFAULT_SIGNAL_SECONDS, CoordinatorLink, LinkTimings
from megatron_operator.link.snapshot import snapshot_of, without_traffic
from megatron_operator.resource.states import CoordinatorState, EngineState, OperationOutcome, SignalKind
from megatron_runtime.protocol.adapters import Adapter, AdapterList
from megatron_runtime.protocol.headers import ErrorCode
from megatron_runtime.protocol.messages import (
    AnswerFormats,
    ControlAck,
    Disconnect,
    EngineStatus,
    FailedRequest,
    Final,
    MalformedMessageError,
    Status,
    StatusReply,
    decode,
)
from megatron_runtime.transport.security import KeyPair, PeerKeys
from megatron_runtime.transport.zmtp.dealer import CONNECT_SECONDS, RETRY_SECONDS

FAST = LinkTimings(
    hello_retry=0.05,
    status_interval=0.2,
    status_interval_busy=0.05,
    answer_timeout=1.0,
    refresh_timeout=1.0,
    first_contact=1.0,
)
SILENCE = scaled(2.0)
"""Seconds without a heartbeat, for tests of its limit. A loaded machine may delay one."""
PAUSE = Signal(kind=SignalKind.PAUSE, operation_id="op-1", fence=3, expected_engines=1)


class Changes:
    """Counts `on_change`, and waits until a condition holds, looking again after each."""

    def __init__(self) -> None:
        self.count = 0
        self._event = asyncio.Event()

    def __call__(self) -> None:
        self.count += 1
        self._event.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(LONG_SECONDS):
            while not condition():
                self._event.clear()
                await self._event.wait()


@pytest.fixture
async def make_link() -> AsyncIterator[Callable[..., tuple[CoordinatorLink, Changes]]]:
    links: list[CoordinatorLink] = []

    def make(
        address: str, keys: PeerKeys | None = None, *, timings: LinkTimings = FAST, **options: Any
    ) -> tuple[CoordinatorLink, Changes]:
        changes = Changes()
        link = CoordinatorLink(on_change=changes, timings=timings, **options)
        link.point_to((address,), keys)
        links.append(link)
        return link, changes

    yield make
    for link in links:
        await link.close()


async def test_reached_coordinator_is_described_and_wakes_the_task(make_link: Any, admin_port: Any) -> None:
    link, changes = make_link(admin_port.address)
    assert not link.snapshot.reachable
    assert admin_port.address in link.snapshot.error

    await changes.until(lambda: link.snapshot.reachable)

    assert link.snapshot.state is CoordinatorState.RUNNING
    assert [engine.name for engine in link.snapshot.engines] == ["demo-engine-0"]


async def test_traffic_alone_wakes_no_task(make_link: Any, admin_port: Any) -> None:
    link, changes = make_link(admin_port.address)
    await changes.until(lambda: link.snapshot.reachable)
    before = changes.count

    admin_port.in_flight = 17
    snapshot = await link.refresh()

    assert snapshot.engines[0].in_flight == 17
    assert changes.count == before


async def test_refresh_is_never_older_than_the_call(make_link: Any, admin_port: Any) -> None:
    link, changes = make_link(admin_port.address)
    await changes.until(lambda: link.snapshot.reachable)

    for state in (CoordinatorState.PAUSED, CoordinatorState.SUSPENDED, CoordinatorState.RUNNING):
        admin_port.state = state
        assert (await link.refresh()).state.value == state.value


async def test_signal_carries_id_and_fence_once_and_its_answer_wakes(make_link: Any, admin_port: Any) -> None:
    link, changes = make_link(admin_port.address)
    await changes.until(lambda: link.snapshot.reachable)
    admin_port.hold_acks = True

    assert link.signal(PAUSE)
    assert link.signal(PAUSE)
    await link.refresh()
    assert [(c.kind.name, c.operation_id, c.fence, c.expected_engines) for c in admin_port.controls] == [
        ("PAUSE", "op-1", 3, 1)
    ]

    admin_port.answer_controls()
    await changes.until(lambda: not link.awaits("op-1"))
    snapshot = await link.refresh()
    assert snapshot.operations["op-1"].outcome is OperationOutcome.CONFIRMED
    assert snapshot.state is CoordinatorState.PAUSED


@pytest.mark.parametrize(
    "kind", [SignalKind.PAUSE, SignalKind.DRAIN, SignalKind.UPDATE_WEIGHTS, SignalKind.SET_ADAPTERS]
)
async def test_the_deadline_of_a_signal_reaches_the_coordinator(make_link: Any, admin_port: Any, kind: Any) -> None:
    """A load takes longer than the answer to any other signal."""
    lifecycle = {"drainSeconds": 77}
    source = {"persistentVolumeClaim": {"claimName": "models", "path": "/x/{revision}"}}
    weights = {"model": {"source": source}, "weights": {"revision": "6"}}
    cluster = Cluster({**MINIMAL, **weights, "lifecycle": lifecycle, "engine": {"startupSeconds": 1234}})
    cluster.settle()
    goal = {
        SignalKind.PAUSE: {"desiredState": "Paused"},
        SignalKind.DRAIN: {"desiredState": "Stopped"},
        SignalKind.UPDATE_WEIGHTS: {"weights": {"revision": "7"}},
        SignalKind.SET_ADAPTERS: {"model": {"adapters": [{"name": "sql", "source": {"path": "/sql"}}]}},
    }
    cluster.patch(**goal[kind])
    cluster.step()
    (signal,) = (action for action in cluster.step().actions if isinstance(action, Signal))
    now = [0.0]
    link, changes = make_link(admin_port.address, clock=lambda: now[0])
    await changes.until(lambda: link.snapshot.reachable)
    admin_port.hold_acks = True

    assert link.signal(signal)
    seconds = {SignalKind.PAUSE: DEFAULT_SIGNAL_SECONDS, SignalKind.DRAIN: 77}.get(kind, 1234)
    now[0] = seconds
    assert link.awaits(signal.operation_id), "the coordinator may answer until its own deadline"
    now[0] = 0.0
    await link.refresh()
    (control,) = admin_port.controls
    assert (control.kind.name, control.timeout_seconds) == (kind.value, seconds)
    wanted = AdapterList((Adapter("sql", "/model/sql"),)) if kind is SignalKind.SET_ADAPTERS else None
    assert control.adapters == wanted


async def test_rejection_is_an_outcome_although_the_coordinator_forgets_it(make_link: Any, admin_port: Any) -> None:
    link, changes = make_link(admin_port.address)
    await changes.until(lambda: link.snapshot.reachable)
    admin_port.rejection = ControlAck(
        operation_id="x",
        ok=False,
        state=CoordinatorState.RUNNING,
        code=int(ErrorCode.ENGINES_MISSING),
        error="1 expected, none registered",
    )

    link.signal(PAUSE)
    await changes.until(lambda: "op-1" in link.snapshot.operations)

    report = link.snapshot.operations["op-1"]
    assert report.outcome is OperationOutcome.FAILED
    assert report.code == 424
    assert report.message == "ENGINES_MISSING: 1 expected, none registered"


async def test_signal_without_a_connection_is_rejected_not_queued(make_link: Any, admin_port: Any) -> None:
    link, changes = make_link(admin_port.address)
    await changes.until(lambda: link.snapshot.reachable)
    admin_port.mute = True
    await changes.until(lambda: not link.snapshot.reachable)

    assert not link.signal(PAUSE)
    admin_port.mute = False
    await changes.until(lambda: link.snapshot.reachable)
    await link.refresh()

    assert admin_port.controls == []


async def test_silent_coordinator_is_unreachable_and_found_again(make_link: Any, admin_port: Any) -> None:
    link, changes = make_link(admin_port.address)
    await changes.until(lambda: link.snapshot.reachable)

    admin_port.mute = True
    await changes.until(lambda: not link.snapshot.reachable)
    assert "no answer" in link.snapshot.error

    admin_port.mute = False
    await changes.until(lambda: link.snapshot.reachable)


async def test_the_end_of_heartbeats_is_noticed_without_a_question(make_link: Any, admin_port: Any) -> None:
    link, changes = make_link(admin_port.address, timings=replace(FAST, status_interval=600.0, silence=SILENCE))
    await changes.until(lambda: link.snapshot.reachable)
    lost_after = time.monotonic() + 1.5 * SILENCE
    while time.monotonic() < lost_after:
        admin_port.beat()
        await asyncio.sleep(0.02)
        assert link.snapshot.reachable
    asked = len(admin_port.received)

    admin_port.mute = True
    await changes.until(lambda: not link.snapshot.reachable)
    assert not any(isinstance(message, Status) for message in admin_port.received[asked:])


def test_a_lost_coordinator_is_noticed_within_3_5_s() -> None:
    timings = LinkTimings()
    assert timings.status_interval < timings.silence
    assert timings.silence + timings.hello_retry <= 3.5


def test_an_attempt_to_connect_to_a_lost_pod_ends_before_the_pass_that_waits_for_its_successor() -> None:
    assert LinkTimings().first_contact > 2 * (CONNECT_SECONDS + RETRY_SECONDS)


async def test_the_time_since_a_coordinator_was_lost_counts_from_its_last_connection(
    make_link: Any, admin_port: Any
) -> None:
    skipped = 0.0
    link, changes = make_link(admin_port.address, clock=lambda: time.monotonic() + skipped)
    assert link.snapshot.lost_seconds is None, "never reached"
    await changes.until(lambda: link.snapshot.reachable)
    assert link.snapshot.lost_seconds is None

    admin_port.mute = True
    await changes.until(lambda: not link.snapshot.reachable)
    assert link.snapshot.lost_seconds < 3600
    skipped = 3600.0
    assert link.snapshot.lost_seconds >= 3600

    admin_port.mute = False
    await changes.until(lambda: link.snapshot.reachable)
    assert link.snapshot.lost_seconds is None
    link.point_to(("tcp://127.0.0.1:1",), None)
    assert link.snapshot.lost_seconds is None, "another address"


async def test_the_time_without_known_engines_counts_from_the_last_message_until_the_end_of_a_recovery(
    make_link: Any, admin_port: Any
) -> None:
    skipped = 1000.0
    link, changes = make_link(admin_port.address, clock=lambda: time.monotonic() + skipped)
    skipped += 20.0
    assert link.snapshot.unknown_seconds >= 20, "never reached"
    await changes.until(lambda: link.snapshot.reachable)
    assert link.snapshot.unknown_seconds == 0

    admin_port.mute = True
    asked = len(admin_port.received)
    while not any(isinstance(message, Status) for message in admin_port.received[asked:]):
        admin_port.heard.clear()
        await admin_port.heard.wait()
    skipped += 20.0
    await changes.until(lambda: not link.snapshot.reachable)
    assert link.snapshot.lost_seconds < 20 <= link.snapshot.unknown_seconds

    admin_port.state = CoordinatorState.RECOVERING
    admin_port.mute = False
    skipped += 20.0
    await changes.until(lambda: link.snapshot.reachable)
    assert link.snapshot.unknown_seconds >= 20
    admin_port.state = CoordinatorState.RUNNING
    await changes.until(lambda: link.snapshot.state is CoordinatorState.RUNNING)
    assert link.snapshot.unknown_seconds == 0


async def test_restarted_coordinator_gets_hello_and_what_was_in_flight_may_be_sent_again(
    make_link: Any, admin_port: Any
) -> None:
    link, changes = make_link(admin_port.address)
    await changes.until(lambda: link.snapshot.reachable)
    admin_port.hold_acks = True
    link.signal(PAUSE)
    await link.refresh()
    first = link.snapshot.incarnation

    admin_port.restart()
    await changes.until(lambda: link.snapshot.reachable and link.snapshot.incarnation != first)

    assert not link.awaits("op-1")
    assert link.signal(PAUSE)
    await link.refresh()
    assert [control.operation_id for control in admin_port.controls] == ["op-1", "op-1"]


async def test_expected_coordinator_is_waited_for_but_not_for_long(make_link: Any, admin_port: Any) -> None:
    link, _ = make_link(
        admin_port.address, timings=replace(FAST, first_contact=20.0, refresh_timeout=20.0, answer_timeout=20.0)
    )
    assert (await link.refresh(expected=True)).reachable

    admin_port.mute = True
    silent, _ = make_link(admin_port.address)
    assert not (await silent.refresh(expected=True)).reachable


async def test_curve_keys_open_the_port_and_wrong_ones_do_not(make_link: Any, make_admin_port: Any) -> None:
    server, admin = KeyPair.generate(), KeyPair.generate()

    def secure(socket: zmq.Socket[bytes]) -> None:
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = server.public, server.secret

    port = make_admin_port(secure)
    stranger, _ = make_link(port.address, PeerKeys(own=admin, server_public=KeyPair.generate().public))
    plain, _ = make_link(port.address)
    link, changes = make_link(port.address, PeerKeys(own=admin, server_public=server.public))

    await changes.until(lambda: link.snapshot.reachable)
    assert not stranger.snapshot.reachable
    assert not plain.snapshot.reachable
    assert len(port.known) == 1


async def test_the_link_finds_the_current_one_of_two_coordinator_keys(make_link: Any, make_admin_port: Any) -> None:
    server, admin = KeyPair.generate(), KeyPair.generate()

    def secure(socket: zmq.Socket[bytes]) -> None:
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = server.public, server.secret

    port = make_admin_port(secure)
    keys = PeerKeys(own=admin, server_public=KeyPair.generate().public, other_server_publics=(server.public,))
    link, changes = make_link(port.address, keys)
    await changes.until(lambda: link.snapshot.reachable)


async def test_new_address_moves_the_link_and_close_says_goodbye(make_link: Any, make_admin_port: Any) -> None:
    old, new = make_admin_port(), make_admin_port()
    link, changes = make_link(old.address)
    await changes.until(lambda: link.snapshot.reachable)

    new.state = CoordinatorState.PAUSED
    link.point_to((new.address,), None)
    assert not link.snapshot.reachable
    await changes.until(lambda: link.snapshot.reachable)
    assert link.snapshot.state is CoordinatorState.PAUSED

    await link.close()
    async with asyncio.timeout(LONG_SECONDS):
        while not isinstance(new.received[-1], Disconnect):
            new.heard.clear()
            await new.heard.wait()


def test_addresses() -> None:
    assert service_address("demo", "prod", "10.96.0.7") == "tcp://10.96.0.7:5557"
    assert service_address("demo", "prod", "fd00::7") == "tcp://[fd00::7]:5557"
    assert service_address("demo", "prod", "") is None
    assert template_resolver("{name}-coordinator.{namespace}.svc")("demo", "prod", "") == (
        "tcp://demo-coordinator.prod.svc:5557"
    )
    assert template_resolver("127.0.0.1:7001")("demo", "prod", "10.96.0.7") == "tcp://127.0.0.1:7001"
    with pytest.raises(AddressTemplateError, match="only"):
        template_resolver("{nane}.svc")


def test_a_request_that_waits_is_worth_waking_for_only_while_all_sleeps() -> None:
    running = CoordinatorSnapshot(reachable=True, state=CoordinatorState.RUNNING)
    asleep = replace(running, state=CoordinatorState.SUSPENDED)
    assert without_traffic(replace(running, queue_length=3)) == without_traffic(running)
    assert without_traffic(replace(asleep, queue_length=3)) != without_traffic(asleep)
    assert without_traffic(replace(asleep, queue_length=3)) == without_traffic(replace(asleep, queue_length=4))


def test_the_formats_of_servers_are_read_and_unprintable_characters_escaped() -> None:
    formats = AnswerFormats(tool_calls="mistral\x1b", reasoning="think")
    reply = StatusReply(incarnation=1, state=CoordinatorState.RUNNING, formats=formats)
    before, after = (snapshot_of(one, rejections={}) for one in (reply.model_copy(update={"formats": None}), reply))
    assert without_traffic(before) != without_traffic(after)
    assert after.formats is not None
    assert (after.formats.tool_calls, after.formats.reasoning) == ("mistral\\x1b", "think")


def test_failed_requests_are_read_and_are_worth_waking_for() -> None:
    failed = FailedRequest(uid="0f" * 16, engines=["engine-0", "bad\x1b[31m"], at=1.5)
    reply = StatusReply(incarnation=1, state=CoordinatorState.RUNNING, failed_requests=[failed])
    before, after = (
        snapshot_of(one, rejections={}) for one in (reply.model_copy(update={"failed_requests": None}), reply)
    )
    assert without_traffic(before) != without_traffic(after)
    (found,) = after.failed_requests
    assert (found.id, found.engines) == ("0f" * 16, ("engine-0", "bad?[31m"))
    assert found.time.isoformat() == "1970-01-01T00:00:01.500000+00:00"
    body = msgpack.unpackb(reply.to_frames()[0])
    body[1]["failed_requests"][0]["uid"] = "<script>"
    with pytest.raises(MalformedMessageError, match="failed_requests"):
        decode([msgpack.packb(body)])


@pytest.mark.parametrize(
    ("reply", "tokens", "verdict"),
    [
        ({"status": "COMPLETED", "generated_log_probs": [-0.5, -0.1]}, [7, 8], True),
        ({"status": "COMPLETED", "generated_log_probs": [-0.5, float("nan")]}, [7, 8], False),
        ({"status": "COMPLETED", "generated_log_probs": [-0.5]}, [7, 8], False),
        ({"status": "COMPLETED"}, [7, 8], False),
        ({"status": "COMPLETED", "generated_log_probs": []}, [], False),
        ({"status": "FAILED", "error": {"code": 500, "message": "out of memory"}}, [], False),
        ({"status": "FAILED", "error": {"code": 424, "message": "the engine left"}}, [], None),
    ],
)
def test_a_canary_is_judged_by_its_log_probabilities(
    reply: dict[str, Any], tokens: list[int], verdict: bool | None
) -> None:
    canary = new_canary(AskCanary("demo-engine-0", "abc", "builtin:x"), now=0.0)
    body = b"".join(token.to_bytes(4, "little") for token in tokens)
    report = judge(canary, Final(1, canary.uid, body, msgpack.packb(reply)))
    assert (report.ok if report is not None else None) is verdict
    if report is not None and not report.ok:
        assert report.message


@pytest.mark.parametrize(("tokens", "ok"), [([216, 40, 28, 216], True), ([216, 41, 28, 216], False)])
def test_a_canary_of_a_builtin_model_must_match_its_recorded_answer(tokens: list[int], ok: bool) -> None:
    canary = new_canary(AskCanary("demo-engine-0", "abc", "builtin:smollm2-135m"), now=0.0)
    body = b"".join(token.to_bytes(4, "little") for token in tokens)
    reply = {"status": "COMPLETED", "generated_log_probs": [-0.1] * 4}
    report = judge(canary, Final(1, canary.uid, body, msgpack.packb(reply)))
    assert report is not None
    assert report.ok is ok


@pytest.mark.parametrize("source", [None, "", "/model/x/7"])
def test_the_source_of_an_engines_weights_is_passed_on_and_wakes_the_task(source: str | None) -> None:
    engine = EngineStatus(name="demo-engine-0", state=EngineState.RUNNING, serving=True, source=source)
    sent = StatusReply(incarnation=1, state=CoordinatorState.RUNNING, engines=[engine])
    received = decode(sent.to_frames())
    assert isinstance(received, StatusReply)
    snapshot = without_traffic(snapshot_of(received, rejections={}))
    assert [report.source for report in snapshot.engines] == [source]
