"""The core as a table: what each event sends, and what follows from a message that a connection does not accept."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
from coordinator_tables import check_tables

from megatron_runtime.coordinator.core import replies
from megatron_runtime.coordinator.core.context import SHARED_PORT
from megatron_runtime.coordinator.core.settings import CoordinatorSettings, Timing
from megatron_runtime.protocol.headers import ErrorCode, Header, Role
from megatron_runtime.protocol.lifecycle import EngineState
from megatron_runtime.protocol.messages import (
    Abort,
    Control,
    ControlAck,
    ControlCommit,
    Disconnect,
    Dispatch,
    Error,
    Final,
    Heartbeat,
    Hello,
    HelloAck,
    Partial,
    PartialEntry,
    Plain,
    RequestMeta,
    Status,
    StatusReply,
    Submit,
    decode,
    pack,
    tokens_from_bytes,
    tokens_to_bytes,
)

from .core_driver import CoreDriver, Peer
from .simulated_fleet import SimulatedFleet

CLIENT, ADMIN = (int(Role.CLIENT), b"client"), (int(Role.ADMIN), b"admin")
FIRST, SECOND = (int(Role.ENGINE), b"first"), (int(Role.ENGINE), b"second")
STRANGER = (int(Role.CLIENT), b"stranger")
PARAMS = pack({"num_tokens_to_generate": 4})


class Scene:
    """A core with a client and an administrator, whose effects are kept by peer until take()."""

    def __init__(self, **settings: Any) -> None:
        timing = Timing(heartbeat=1.0, suspect=1e6, dead=1e6, client_dead=1e6, slow_client=30.0, recovery=0.0)
        self.sent: list[tuple[Peer, Any]] = []
        self.full: set[Peer] = set()
        self.gone: set[Peer] = set()
        self.driver = CoreDriver(
            CoordinatorSettings(timing=timing, **settings),
            self._deliver,
            is_connected=lambda peer: peer not in self.gone,
            full=self.full,
        )
        self.core = self.driver.core
        self.say = self.driver.say
        self.say(CLIENT, Hello(role=Role.CLIENT, name="client", incarnation=1))
        self.say(ADMIN, Hello(role=Role.ADMIN, name="admin", incarnation=1))
        self.take()

    def _deliver(self, peer: Peer, frames: list[bytes]) -> bool | None:
        if peer in self.gone:
            return None
        if peer in self.full:
            return False
        self.sent.append((peer, decode(frames)))
        return True

    def take(self) -> list[tuple[Peer, Any]]:
        """What was sent since the last call."""
        sent, self.sent = self.sent, []
        check_tables(self.core)
        return sent

    def engine(self, peer: Peer, *, max_requests: int = 8, **announced: Any) -> None:
        hello = Hello(role=Role.ENGINE, name=peer[1].decode(), incarnation=1, serving=True, max_requests=max_requests)
        self.say(peer, hello.model_copy(update={"state": EngineState.RUNNING, **announced}))

    def plain_engine(self) -> Peer:
        peer = (SHARED_PORT, b"plain")
        self.driver.receive(peer, [b""])
        return peer

    def submit(self, number: int = 1, *, streaming: bool = True, peer: Peer = CLIENT, **meta: Any) -> bytes:
        uid = bytes([number]) * 16
        self.say(peer, Submit(uid, RequestMeta(streaming, 1, **meta), tokens_to_bytes([number]), b"", PARAMS))
        return uid

    def partial(self, peer: Peer, dispatch: Dispatch, *tokens: int, offset: int = 0, epoch: int | None = None) -> None:
        route = self.core.clients.at(CLIENT).route
        entry = PartialEntry(dispatch.uid, dispatch.dispatch_id, offset, len(tokens))
        epochs = () if epoch is None else ((0, epoch),)
        self.say(peer, Partial(route, [entry], tokens_to_bytes(list(tokens)), epochs=epochs))

    def final(self, peer: Peer, dispatch: Dispatch, *tokens: int) -> None:
        self.say(
            peer,
            Final(dispatch.dispatch_id, dispatch.uid, tokens_to_bytes(list(tokens)), pack({"status": "COMPLETED"})),
        )

    def dispatched(self) -> dict[Peer, list[Dispatch]]:
        found = defaultdict(list)
        for peer, message in self.take():
            if isinstance(message, Dispatch):
                found[peer].append(message)
        return found


def running(scene: Scene) -> Dispatch:
    """One request runs on the first engine."""
    scene.engine(FIRST)
    scene.submit()
    (dispatch,) = scene.dispatched()[FIRST]
    return dispatch


def missed_tokens(scene: Scene) -> None:
    """The client accepts the answer of a request, but did not accept its first token."""
    dispatch = running(scene)
    scene.full.add(CLIENT)
    scene.partial(FIRST, dispatch, 5)
    scene.full.clear()
    scene.final(FIRST, dispatch, 5, 6)


def control(kind: Header, **options: Any) -> Control:
    return Control(kind=kind, operation_id="op", fence=1, **options)


def paused(scene: Scene) -> None:
    scene.say(ADMIN, Control(kind=Header.PAUSE, operation_id="pause", fence=1))


EVENTS: dict[str, tuple[Callable[[Scene], Any], list[tuple[Peer, type]]]] = {
    "a client registers": (
        lambda scene: scene.say(STRANGER, Hello(role=Role.CLIENT, name="other", incarnation=1)),
        [(STRANGER, HelloAck)],
    ),
    "an engine registers": (lambda scene: scene.engine(FIRST), [(FIRST, HelloAck)]),
    "a request that has to wait": (lambda scene: scene.submit(), []),
    "an engine registers while a request waits": (
        lambda scene: (scene.submit(), scene.engine(FIRST)),
        [(FIRST, HelloAck), (FIRST, Dispatch)],
    ),
    "a request for one engine that does not serve": (lambda scene: scene.submit(engine="first"), [(CLIENT, Error)]),
    "a request of an unregistered peer": (lambda scene: scene.submit(peer=STRANGER), [(STRANGER, Error)]),
    "a frame that is no message": (lambda scene: scene.driver.receive(CLIENT, [b"\xc1"]), [(CLIENT, Error)]),
    "a message of another role": (lambda scene: scene.say(CLIENT, Final(1, bytes(16), b"", b"")), [(CLIENT, Error)]),
    "a status request": (lambda scene: scene.say(ADMIN, Status()), [(ADMIN, StatusReply)]),
    "tokens": (lambda scene: scene.partial(FIRST, running(scene), 5), [(CLIENT, Partial)]),
    "tokens that are not the next": (lambda scene: scene.partial(FIRST, running(scene), 5, offset=1), []),
    "an answer": (lambda scene: scene.final(FIRST, running(scene), 5), [(CLIENT, Final)]),
    "an answer with tokens that were not sent": (
        lambda scene: missed_tokens(scene),
        [(CLIENT, Partial), (CLIENT, Final)],
    ),
    "an abort of a running request": (
        lambda scene: scene.say(CLIENT, Abort(running(scene).uid)),
        [(FIRST, Abort)],
    ),
    "a client that leaves": (lambda scene: running(scene) and scene.say(CLIENT, Disconnect()), [(FIRST, Abort)]),
    "the loss of an engine": (
        lambda scene: (running(scene), scene.engine(SECOND), scene.driver.connection_lost(FIRST, by_peer=True)),
        [(SECOND, HelloAck), (SECOND, Dispatch)],
    ),
    "a verb without engines": (lambda scene: scene.say(ADMIN, control(Header.PAUSE)), [(ADMIN, ControlAck)]),
    "a verb": (
        lambda scene: (scene.engine(FIRST), scene.say(ADMIN, control(Header.PAUSE))),
        [(FIRST, HelloAck), (FIRST, Control)],
    ),
    "the last acknowledgement of a verb": (
        lambda scene: (
            scene.engine(FIRST),
            scene.say(ADMIN, control(Header.PAUSE)),
            scene.take(),
            scene.say(FIRST, ControlAck(operation_id="op", ok=True, state=EngineState.PAUSING, ranks=1)),
        ),
        [(FIRST, ControlCommit), (ADMIN, ControlAck)],
    ),
    "the time of a verb is up": (
        lambda scene: (
            scene.engine(FIRST),
            scene.say(ADMIN, control(Header.PAUSE, timeout_seconds=0.5)),
            scene.take(),
            scene.driver.advance(0.5),
        ),
        [(ADMIN, ControlAck)],
    ),
    "a request while paused": (lambda scene: (paused(scene), scene.take(), scene.submit()), []),
    "the end of a pause": (
        lambda scene: (paused(scene), scene.submit(), scene.take(), scene.say(ADMIN, control(Header.UNPAUSE))),
        [(ADMIN, ControlAck)],
    ),
    "a heartbeat interval": (
        lambda scene: (scene.engine(FIRST), scene.take(), scene.driver.advance(1.0)),
        [(FIRST, Heartbeat), (CLIENT, Heartbeat), (ADMIN, Heartbeat)],
    ),
    "a deadline": (lambda scene: (scene.submit(deadline_ms=500), scene.driver.advance(0.6)), [(CLIENT, Error)]),
    "a full queue": (lambda scene: [scene.submit(number) for number in range(4)], [(CLIENT, Error)]),
}


@pytest.mark.parametrize(("event", "effects"), EVENTS.values(), ids=EVENTS)
def test_each_event_has_its_effects(event, effects) -> None:
    scene = Scene(max_queued=3)
    event(scene)
    assert [(peer, type(message)) for peer, message in scene.take()] == effects


def test_the_same_events_have_the_same_effects() -> None:
    """Nothing but the events and the random numbers that are passed in decides."""

    def play() -> list[tuple[Peer, list[bytes]]]:
        fleet = SimulatedFleet(seed=3)
        sent, deliver = [], fleet.driver._deliver
        fleet.driver._deliver = lambda peer, frames: sent.append((peer, frames)) or deliver(peer, frames)
        for number in range(3):
            fleet.engine(f"engine-{number}")
        for number in range(20):
            fleet.ask(number, tokens=8)
        fleet.crash(fleet.engines["engine-1"])
        fleet.finish()
        return sent

    assert play() == play()


def test_a_shutdown_closes_the_coordinator() -> None:
    scene = Scene(single_port=True)
    peer = (SHARED_PORT, b"client")
    scene.say(peer, Hello(role=Role.CLIENT, name="other", incarnation=1))
    scene.driver.receive(peer, [pack([int(Header.SHUTDOWN)])])
    assert scene.driver.is_shut_down


# --- messages that a connection does not accept -------------------------------------------------------------------


def test_a_dispatch_that_an_engine_does_not_accept_goes_to_another() -> None:
    scene = Scene()
    scene.engine(FIRST)
    scene.engine(SECOND)
    scene.full.add(FIRST)
    scene.take()
    uid = scene.submit()
    assert {peer: [dispatch.uid for dispatch in sent] for peer, sent in scene.dispatched().items()} == {SECOND: [uid]}
    assert scene.core.engines.at(FIRST).full
    assert scene.core.counters.replays == 0
    scene.full.clear()
    scene.driver.advance(1.0)
    assert not scene.core.engines.at(FIRST).full, "it is tried again after a heartbeat interval"


def test_dispatches_that_are_not_accepted_wait_in_their_order() -> None:
    scene = Scene()
    uids = [scene.submit(number) for number in range(5)]
    scene.full.add(FIRST)
    scene.engine(FIRST)
    assert scene.dispatched() == {}
    assert [entry.uid for entry in scene.core.dispatcher.journal if entry.engine] == []
    scene.full.clear()
    scene.driver.advance(1.0)
    assert [dispatch.uid for dispatch in scene.dispatched()[FIRST]] == uids


def test_a_dispatch_that_is_not_accepted_does_not_end_the_time_in_the_queue() -> None:
    scene = Scene()
    ended = scene.core.context.ended = []
    scene.full.add(FIRST)
    scene.engine(FIRST)
    uid = scene.submit(traceparent="00-1-2-01")
    entry = scene.core.dispatcher.journal.get(uid)
    assert (entry.dispatched_at, entry.dispatches) == (None, 0)
    scene.driver.advance(5.0)
    scene.full.clear()
    scene.driver.report_room()
    [dispatch] = scene.dispatched()[FIRST]
    scene.driver.advance(2.0)
    scene.final(FIRST, dispatch, 1)
    [request] = ended
    assert (request.queue_seconds, request.entry.dispatches) == (5.0, 1)


def test_a_request_that_is_rejected_on_arrival_has_a_span() -> None:
    scene = Scene()
    ended = scene.core.context.ended = []
    scene.submit(traceparent="00-1-2-01", engine="missing")
    [request] = ended
    assert (request.engine, request.queue_seconds) == ("", 0.0)
    assert "'missing' does not serve" in request.error


def test_a_plain_engine_is_lost_when_a_dispatch_cannot_be_sent_and_its_end_is_no_crash_of_that_request() -> None:
    scene = Scene(single_port=True)
    peer = scene.plain_engine()
    scene.driver.connection_lost(peer, by_peer=True)
    assert scene.core.engines.at(peer) is not None, "it may come back with its identity"
    scene.gone.add(peer)
    scene.submit(streaming=False)
    assert scene.core.engines.at(peer) is None
    (entry,) = scene.core.dispatcher.journal
    assert (entry.engine, entry.crashes, scene.core.counters.engine_crashes) == (None, (), 0)


def test_tokens_that_a_client_does_not_accept_are_sent_later_as_one_partial() -> None:
    scene = Scene()
    dispatch = running(scene)
    scene.partial(FIRST, dispatch, 5)
    scene.full.add(CLIENT)
    scene.partial(FIRST, dispatch, 6, offset=1)
    scene.partial(FIRST, dispatch, 7, 8, offset=2)
    scene.take()
    scene.full.clear()
    scene.driver.advance(1.0)
    (partial,) = [message for _, message in scene.take() if isinstance(message, Partial)]
    assert (partial.entries[0].offset, tokens_from_bytes(partial.tokens).tolist()) == (1, [6, 7, 8])
    client = scene.core.clients.at(CLIENT)
    assert not client.blocked
    assert client.stuck_since is None


def test_tokens_are_dispatched_and_sent_again_with_the_epochs_of_their_weights() -> None:
    """To the next engine, to a client that fell behind, and by that client to the next coordinator."""
    scene = Scene()
    dispatch = running(scene)
    scene.partial(FIRST, dispatch, 5, epoch=3)
    scene.take()
    scene.full.add(CLIENT)
    scene.partial(FIRST, dispatch, 6, offset=1, epoch=3)
    scene.partial(FIRST, dispatch, 7, offset=2, epoch=4)
    scene.full.clear()
    scene.driver.report_room()
    ((_, owed),) = scene.take()
    assert (owed.epochs, tokens_from_bytes(owed.tokens).tolist()) == (((0, 3), (1, 4)), [6, 7])
    scene.engine(SECOND)
    scene.take()
    scene.say(FIRST, Disconnect())
    (again,) = scene.dispatched()[SECOND]
    assert (again.epochs, tokens_from_bytes(again.generated).tolist()) == (((0, 3), (2, 4)), [5, 6, 7])

    restarted = Scene()
    restarted.engine(FIRST)
    submit = Submit(dispatch.uid, dispatch.meta, dispatch.prompt, again.generated, dispatch.params, epochs=again.epochs)
    restarted.say(CLIENT, submit)
    (dispatch,) = restarted.dispatched()[FIRST]
    assert dispatch.epochs == again.epochs


def test_answers_that_a_client_does_not_accept_are_sent_later_in_their_order() -> None:
    scene = Scene()
    scene.engine(FIRST)
    uids = [scene.submit(number) for number in range(3)]
    dispatches = scene.dispatched()[FIRST]
    scene.full.add(CLIENT)
    for dispatch in dispatches:
        scene.partial(FIRST, dispatch, 5)
        scene.final(FIRST, dispatch, 5, 6)
    scene.say(CLIENT, Status())
    client = scene.core.clients.at(CLIENT)
    assert client.answered == {}, "an answer that was not sent is not an answered request"
    assert len(scene.core.dispatcher.journal) == 0
    scene.driver.advance(1.0)
    assert [message for _, message in scene.take() if not isinstance(message, Heartbeat)] == []
    scene.full.clear()
    scene.driver.advance(1.0)
    sent = [message for peer, message in scene.take() if peer == CLIENT]
    assert [type(message) for message in sent] == [*[Partial, Final] * 3, StatusReply, Heartbeat]
    assert list(client.answered) == uids


def test_a_plain_client_that_reads_slowly_loses_no_token() -> None:
    scene = Scene(single_port=True)
    peer = (SHARED_PORT, b"plain client")
    scene.driver.receive(peer, [pack([int(Header.CONNECT)])])
    scene.engine(FIRST)
    params = {"num_tokens_to_generate": 4, "streaming": True}
    scene.driver.receive(peer, [pack([int(Header.SUBMIT_REQUEST), 7, [1], params, None])])
    (dispatch,) = scene.dispatched()[FIRST]
    route = scene.core.clients.at(peer).route
    scene.full.add(peer)
    for offset, token in enumerate((5, 6)):
        entry = PartialEntry(dispatch.uid, dispatch.dispatch_id, offset, 1)
        scene.say(FIRST, Partial(route, [entry], tokens_to_bytes([token])))
    scene.full.clear()
    scene.driver.advance(1.0)
    (partial,) = [message for _, message in scene.take() if isinstance(message, Plain)]
    assert partial.items[:2] == [Header.ENGINE_REPLY_PARTIAL, 7]
    assert partial.items[2]["new_tokens"] == [5, 6]


def test_a_client_without_a_connection_gets_everything_on_the_next() -> None:
    scene = Scene()
    dispatch = running(scene)
    scene.gone.add(CLIENT)
    scene.partial(FIRST, dispatch, 5)
    assert not scene.core.clients.at(CLIENT).reachable
    scene.final(FIRST, dispatch, 5, 6)
    scene.take()
    peer = (int(Role.CLIENT), b"again")
    scene.say(peer, Hello(role=Role.CLIENT, name="client", incarnation=1))
    assert [type(message) for _, message in scene.take()] == [HelloAck, Partial, Final]


@pytest.mark.parametrize(("accepts_each", "is_removed"), [(None, True), (7, False)])
def test_a_client_is_removed_only_if_it_accepts_nothing_for_long(accepts_each, is_removed) -> None:
    scene = Scene()
    dispatch = running(scene)
    for second in range(100):
        # It reads one message each few seconds; its buffer is full at every heartbeat interval.
        if accepts_each and second % accepts_each == 0:
            scene.full.clear()
            scene.partial(FIRST, dispatch, second, offset=second)
            scene.full.add(CLIENT)
        else:
            scene.full.add(CLIENT)
            scene.partial(FIRST, dispatch, second, offset=second)
        scene.driver.advance(1.0)
        if scene.core.clients.at(CLIENT) is None:
            break
    assert (scene.core.clients.at(CLIENT) is None) is is_removed


def test_a_request_counts_with_its_parameters_and_its_rejection_is_its_only_answer() -> None:
    scene = Scene(journal_bytes=10_000)
    scene.engine(FIRST)
    submit = Submit(b"\1" * 16, RequestMeta(), tokens_to_bytes([1]), b"", bytes(10_000))
    scene.say(CLIENT, submit)
    scene.say(CLIENT, submit)
    (error,) = [message for peer, message in scene.take() if peer == CLIENT]
    assert (error.code, error.uid) == (ErrorCode.QUEUE_FULL, submit.uid)


def test_a_verb_that_an_engine_fails_without_a_text_is_reported_as_failed() -> None:
    scene = Scene()
    scene.engine(FIRST)
    paused(scene)
    scene.say(FIRST, ControlAck(operation_id="pause", ok=False, state=EngineState.RUNNING))
    (ack,) = [message for _, message in scene.take() if isinstance(message, ControlAck)]
    assert ack.engines["first"].error == "failed"


def test_a_client_that_is_behind_is_sent_a_bounded_number_of_bytes_at_once(monkeypatch) -> None:
    monkeypatch.setattr(replies, "CATCH_UP_BYTES", 100)
    scene = Scene()
    scene.engine(FIRST)
    for number in range(6):
        scene.submit(number)
    dispatches = scene.dispatched()[FIRST]
    scene.full.add(CLIENT)
    for dispatch in dispatches:
        scene.partial(FIRST, dispatch, *range(10))
    scene.take()
    scene.full.clear()
    rounds = []
    while scene.core.clients.at(CLIENT).blocked:
        scene.driver.advance(1.0)
        rounds.append(sum(isinstance(message, Partial) for _, message in scene.take()))
        assert len(rounds) < 10
    assert sum(rounds) == 6
    assert max(rounds) == 2, "the limit ends a round after the message that exceeds it"


@pytest.mark.parametrize("seed", range(20))
def test_whatever_connections_accept_no_token_is_lost_or_doubled(seed: int) -> None:
    """Connections of the client and of engines are full at random; engines crash and leave meanwhile."""
    rng = random.Random(seed)
    fleet = SimulatedFleet(seed=seed)
    for number in range(3):
        fleet.engine(f"engine-{number}", max_requests=6)
    asked = []
    for turn in range(300):
        for peer in [fleet.client, *(engine.peer for engine in fleet.engines.values())]:
            if rng.random() < 0.15:
                fleet.full ^= {peer}
        if rng.random() < 0.3:
            asked.append(fleet.ask(rng.randrange(1, 600), tokens=rng.randint(1, 30), streaming=rng.random() < 0.8))
        if turn in (100, 200):
            fleet.crash(fleet.engines[f"engine-{turn // 100}"])
            fleet.engine(f"engine-{turn // 100}", max_requests=6)
        fleet.turn()
    fleet.full.clear()
    fleet.finish(*asked)
    assert len(asked) > 50


def hello_first(
    scene: Scene, peer: Peer, incarnation: int, *, started_ms: int | None = None
) -> list[tuple[Peer, type]]:
    """A process registers under the name of the first engine. Return the answers."""
    hello = Hello(role=Role.ENGINE, name="first", incarnation=incarnation, serving=True, max_requests=8)
    scene.say(peer, hello.model_copy(update={"state": EngineState.RUNNING, "started_ms": started_ms}))
    return [(to, type(message)) for to, message in scene.take()]


OLD, NEW = (int(Role.ENGINE), b"old"), (int(Role.ENGINE), b"new")


@pytest.mark.parametrize("how", ["it was registered until then", "it was removed before", "it was never registered"])
def test_a_process_that_returns_does_not_supersede_a_later_one(how: str) -> None:
    """Its node was cut off, and its pod was replaced meanwhile. It may have a new connection, and the coordinator may
    have restarted."""
    scene = Scene()
    if how != "it was never registered":
        assert hello_first(scene, OLD, 1, started_ms=1000) == [(OLD, HelloAck)]
    if how == "it was removed before":
        scene.say(OLD, Disconnect())
    assert (NEW, HelloAck) in hello_first(scene, NEW, 2, started_ms=2000)
    scene.take()
    for incarnation in (1, 3):
        assert hello_first(scene, OLD, incarnation, started_ms=1000) == [(OLD, Error)]
    scene.submit()
    assert set(scene.dispatched()) == {NEW}
    scene.say(NEW, Disconnect())
    assert (OLD, HelloAck) in hello_first(scene, OLD, 1, started_ms=1000), "it is the only one"


def test_a_later_process_supersedes_one_that_registered_again_first() -> None:
    """Both register with a restarted coordinator, the earlier one first."""
    scene = Scene()
    hello_first(scene, OLD, 1, started_ms=1000)
    assert (NEW, HelloAck) in hello_first(scene, NEW, 2, started_ms=2000)
    assert hello_first(scene, OLD, 1, started_ms=1000) == [(OLD, Error)]


@pytest.mark.parametrize(("before", "after"), [(None, None), (2000, None), (None, 1000), (1000, 1000)])
def test_without_an_order_of_starts_the_last_registration_counts(before: int | None, after: int | None) -> None:
    """The engine is of another release, or one process has opened a new connection."""
    scene = Scene()
    hello_first(scene, OLD, 1, started_ms=before)
    assert (NEW, HelloAck) in hello_first(scene, NEW, 2, started_ms=after)
