"""Clients and engines that do not read: what they are owed costs the coordinator nothing, and no other peer waits."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import zmq
from eventually import eventually
from soak import size

from megatron_runtime.coordinator.core import replies
from megatron_runtime.coordinator.core.context import SHARED_PORT
from megatron_runtime.coordinator.core.replies import CATCH_UP_BYTES
from megatron_runtime.coordinator.metrics import CoordinatorMetrics
from megatron_runtime.coordinator.plain import messages as plain_messages
from megatron_runtime.protocol import extras, messages
from megatron_runtime.protocol.headers import Header, Role
from megatron_runtime.protocol.messages import (
    Dispatch,
    Error,
    Final,
    Heartbeat,
    Hello,
    Partial,
    PartialEntry,
    Plain,
    RequestMeta,
    Submit,
    decode,
    pack,
    tokens_from_bytes,
    tokens_to_bytes,
    unpack,
)

from .conftest import PATIENT
from .test_core import CLIENT, FIRST, SECOND, Scene

STREAMS, TOKENS = size(100, soak=300), size(1000, soak=3000)
UNREAD_STREAMS = 300
"""Their messages are more than sockets take."""
COMPLETED = pack({"status": "COMPLETED"})


@pytest.fixture
def operations(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the messages and bodies that the replies to clients pack, decode and unpack."""
    counts: Counter[str] = Counter()

    def counted(module: Any, name: str) -> None:
        function = getattr(module, name)

        def count(*arguments: Any, **options: Any) -> Any:
            counts[name] += 1
            return function(*arguments, **options)

        monkeypatch.setattr(module, name, count)

    for module, names in {
        replies: ("pack", "unpack", "decode"),
        plain_messages: ("pack", "unpack", "token_list_from_bytes"),
        messages: ("pack",),
        extras: ("values_of_map",),
    }.items():
        for name in names:
            counted(module, name)
    return counts


class Streams:
    """Open streams of one client of a scene."""

    def __init__(self, scene: Scene, *, is_plain: bool = False, has_log_probs: bool = False) -> None:
        self.scene = scene
        self.peer = (SHARED_PORT, b"plain client") if is_plain else CLIENT
        self.has_log_probs = has_log_probs
        self.sent = 0
        scene.engine(FIRST, max_requests=STREAMS)
        if is_plain:
            scene.driver.receive(self.peer, [pack([int(Header.CONNECT)])])
            params = {"num_tokens_to_generate": TOKENS, "streaming": True}
            for number in range(STREAMS):
                scene.driver.receive(self.peer, [pack([int(Header.SUBMIT_REQUEST), number, [1], params, None])])
        else:
            params = pack({"num_tokens_to_generate": TOKENS})
            for _ in range(STREAMS):
                meta = RequestMeta(True, 1)
                scene.say(CLIENT, Submit(random.randbytes(16), meta, tokens_to_bytes([1]), b"", params))
        self.dispatches: list[Dispatch] = scene.dispatched()[FIRST]
        assert len(self.dispatches) == STREAMS
        self.client = scene.core.clients.at(self.peer)

    def partial(self, number: int = 10) -> list[bytes]:
        """Return the frames of the next step: `number` tokens of each stream."""
        tokens = list(range(self.sent, self.sent + number))
        entries = [PartialEntry(each.uid, each.dispatch_id, self.sent, number) for each in self.dispatches]
        details = {each.uid: {"log_probs": [-float(token) for token in tokens]} for each in self.dispatches}
        self.sent += number
        extras = pack(details) if self.has_log_probs else b""
        return Partial(self.client.route, entries, tokens_to_bytes(tokens) * STREAMS, extras).to_frames()

    def received(self) -> tuple[dict[Any, list[int]], dict[Any, list[float]], int]:
        """Return tokens and log-probs by stream, in the order of their messages, and the number of messages."""
        tokens: dict[Any, list[int]] = {}
        log_probs: dict[Any, list[float]] = {}
        number = 0
        for peer, message in self.scene.take():
            if peer != self.peer:
                continue
            number += 1
            match message:
                case Plain(items=[Header.ENGINE_REPLY_PARTIAL, stream, {"new_tokens": new} as frame]):
                    tokens.setdefault(stream, []).extend(new)
                    log_probs.setdefault(stream, []).extend(frame.get("new_log_probs", ()))
                case Partial():
                    new = iter(tokens_from_bytes(message.tokens).tolist())
                    extras = unpack(message.extras) if message.extras else {}
                    for uid, _, offset, count in message.entries:
                        own = tokens.setdefault(uid, [])
                        assert offset == len(own), "tokens are missing or sent again"
                        own += [next(new) for _ in range(count)]
                        log_probs.setdefault(uid, []).extend(extras.get(uid, {}).get("log_probs", ()))
        return tokens, log_probs, number


@pytest.mark.parametrize("has_log_probs", [False, True], ids=["tokens", "log-probs"])
@pytest.mark.parametrize("is_plain", [False, True], ids=["client", "plain client"])
def test_what_a_stuck_client_is_owed_costs_nothing_and_comes_when_there_is_room(
    operations: Counter[str], is_plain: bool, has_log_probs: bool
) -> None:
    scene = Scene(single_port=is_plain)
    streams = Streams(scene, is_plain=is_plain, has_log_probs=has_log_probs)
    number = 50 if has_log_probs else 10
    steps = [streams.partial(number) for _ in range(TOKENS // number)]
    scene.full.add(streams.peer)
    scene.driver.receive(FIRST, steps[0])
    attempts: list[Any] = []
    deliver = scene.driver._deliver
    scene.driver._deliver = lambda peer, frames: attempts.append(peer) or deliver(peer, frames)
    operations.clear()
    for frames in steps[1:]:
        scene.driver.receive(FIRST, frames)
    assert operations.total() == 0, "what a stuck client is owed is packed or decoded for each step"
    scene.driver.advance(5.0)
    assert streams.peer not in attempts, "the coordinator sends to a connection that is full"
    scene.take()
    operations.clear()
    scene.full.clear()
    rounds = 0
    while streams.client.blocked:
        scene.driver.report_room()
        rounds += 1
    tokens, log_probs, messages_received = streams.received()
    assert len(tokens) == messages_received == STREAMS, "each stream gets what it lacks in one message"
    assert all(own == list(range(TOKENS)) for own in tokens.values())
    if has_log_probs:
        assert all(own == [-float(token) for token in range(TOKENS)] for own in log_probs.values())
        translated = STREAMS if is_plain else 0
        searches = operations["values_of_map"] - translated
        assert searches <= len(steps), "a message's log-probs are searched once for all streams"
        assert operations["unpack"] <= STREAMS * len(steps), "each stream's own log-probs are unpacked once"
    size_sent = STREAMS * TOKENS * (4 + 9 * has_log_probs)
    assert rounds <= 2 + size_sent // CATCH_UP_BYTES
    following = streams.partial()
    operations.clear()
    scene.driver.receive(FIRST, following)
    if is_plain:
        assert operations["values_of_map"] == has_log_probs
        assert streams.received()[2] == STREAMS
    else:
        assert operations.total() == 0, "a message for a client that has caught up is forwarded unchanged"
        assert scene.take() == [(CLIENT, decode(following))]


def test_the_answers_of_a_stuck_client_are_packed_once(operations: Counter[str]) -> None:
    """Each final is preceded by the log-probs that its stream lacks, which all streams share."""
    scene = Scene()
    streams = Streams(scene, has_log_probs=True)
    steps = [streams.partial() for _ in range(30)]
    finals = [Final(d.dispatch_id, d.uid, tokens_to_bytes(range(300)), COMPLETED) for d in streams.dispatches]
    ends = [final.to_frames() for final in finals]
    scene.full.add(CLIENT)
    for frames in steps:
        scene.driver.receive(FIRST, frames)
    operations.clear()
    for frames in ends:
        scene.driver.receive(FIRST, frames)
    assert operations["values_of_map"] == len(steps)
    assert operations["unpack"] <= STREAMS * (len(steps) + 1)
    scene.full.clear()
    scene.driver.report_room()
    kinds = [type(message) for peer, message in scene.take() if peer == CLIENT]
    assert kinds == [Partial, Final] * STREAMS


def test_a_client_that_resubmits_while_it_is_stuck_is_sent_nothing(operations: Counter[str]) -> None:
    scene = Scene()
    streams = Streams(scene)
    scene.full.add(CLIENT)
    scene.driver.receive(FIRST, streams.partial())
    again = [Submit(each.uid, each.meta, each.prompt, b"", each.params).to_frames() for each in streams.dispatches]
    operations.clear()
    for frames in again:
        scene.driver.receive(CLIENT, frames)
    assert operations.total() == 0


def test_unread_answers_of_all_clients_have_a_limit_and_the_client_with_the_most_is_removed() -> None:
    scene = Scene(journal_bytes=1 << 20)
    scene.engine(FIRST, max_requests=STREAMS)
    other = (int(Role.CLIENT), b"other")
    scene.say(other, Hello(role=Role.CLIENT, name="other", incarnation=1))
    for peer, number, length in ((CLIENT, 20, 5000), (other, 3, 5000)):
        for _ in range(number):
            params = pack({"num_tokens_to_generate": length})
            scene.say(peer, Submit(random.randbytes(16), RequestMeta(), tokens_to_bytes([1]), b"", params))
    scene.full |= {CLIENT, other}
    for dispatch in scene.dispatched()[FIRST]:
        scene.final(FIRST, dispatch, *range(5000))
    scene.driver.advance(1.0)
    assert scene.core.clients.at(CLIENT) is None
    kept = scene.core.clients.at(other)
    assert kept is not None
    assert (len(kept.outbox), kept.outbox_bytes) == (3, pytest.approx(3 * 20_000, rel=0.01))
    metrics = {metric.name: metric.samples[0].value for metric in CoordinatorMetrics(lambda: scene.core).collect()}
    assert metrics["megatron_coordinator_stuck_clients"] == 1
    assert metrics["megatron_coordinator_unread_bytes"] == kept.outbox_bytes
    scene.full.clear()
    scene.driver.report_room()
    assert kept.outbox_bytes == 0


def test_an_engine_that_does_not_read_is_offered_each_request_once_until_it_has_room() -> None:
    scene = Scene()
    scene.engine(FIRST, max_requests=1 << 20)
    scene.full.add(FIRST)
    for number in range(50):
        scene.submit(number)
    attempts: Counter[Any] = Counter()
    deliver = scene.driver._deliver
    scene.driver._deliver = lambda peer, frames: (
        attempts.update([(peer, type(decode(frames)))]) or deliver(peer, frames)
    )
    scene.driver.advance(60.0)
    assert attempts[FIRST, Dispatch] == 0
    assert scene.core.dispatcher.waiting == 50
    scene.engine(SECOND, max_requests=10)
    assert attempts[SECOND, Dispatch] == 10, "another engine takes what it has room for"
    scene.full.clear()
    scene.driver.report_room()
    assert attempts[FIRST, Dispatch] == 40


class Unread:
    """A client that submits streams and sends heartbeats, and reads nothing before read()."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.RCVHWM, 1)
        # Less than one segment of the loopback interface would leave the transfer to TCP's probes of a closed window,
        # whose interval grows to two minutes.
        self.socket.setsockopt(zmq.RCVBUF, 1 << 17)
        self.socket.connect(address)
        self.send(Hello(role=Role.CLIENT, name="unread", incarnation=1))

    def send(self, message: Any) -> None:
        self.socket.send_multipart(message.to_frames())

    def submit(self) -> None:
        params = pack({"num_tokens_to_generate": TOKENS, "streaming": True})
        self.send(Submit(random.randbytes(16), RequestMeta(True, 1), tokens_to_bytes([1]), b"", params))

    def read(self, streamed: dict[bytes, list[int]]) -> bool:
        """Read what has arrived. Return whether anything had."""
        before = sum(map(len, streamed.values()))
        while self.socket.poll(0):
            match decode(self.socket.recv_multipart()):
                case Partial() as partial:
                    new = iter(tokens_from_bytes(partial.tokens).tolist())
                    for uid, _, offset, count in partial.entries:
                        own = streamed.setdefault(uid, [])
                        assert offset == len(own), "tokens are missing or sent again"
                        own += [next(new) for _ in range(count)]
                case Error() as error:
                    raise AssertionError(error)
        return sum(map(len, streamed.values())) > before

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.mark.slow
async def test_hundreds_of_unread_streams_delay_no_other_and_cost_no_engine(stage, params, collect) -> None:
    """An engine sends as fast as its socket accepts; the messages are more than all buffers on the way take."""
    # Nothing is removed for its silence, however long a loaded machine takes.
    coordinator = stage.coordinator(timing=replace(PATIENT, slow_client=1e6, client_dead=1e6, suspect=1e6, dead=1e6))
    engine = await stage.engine(step_seconds=None, max_requests=UNREAD_STREAMS + 10)
    unread = Unread(stage.address(Role.CLIENT))
    stage.closers.append(unread.close)
    for _ in range(UNREAD_STREAMS):
        unread.submit()
    await engine.until(lambda: len(engine.jobs) == UNREAD_STREAMS)
    dispatches = [job.dispatch for job in engine.jobs.values()]
    client = await stage.client()
    others = [client.add_request_streaming([7, number], params(50)) for number in range(5)]
    await engine.until(lambda: len(engine.jobs) == UNREAD_STREAMS + 5)
    for dispatch in dispatches:
        del engine.jobs[dispatch.dispatch_id]
    slow = coordinator.core.clients.named(Role.CLIENT, "unread")
    rejected, send = 0, coordinator.transport.send

    def counted(to: Any, frames: list[bytes]) -> bool:
        nonlocal rejected
        is_sent = send(to, frames)
        rejected += to == slow.peer and not is_sent
        return is_sent

    coordinator.transport.send = counted
    steps, each = size(900, soak=3000), 3
    for step in range(steps):
        entries = [PartialEntry(d.uid, d.dispatch_id, step * each, each) for d in dispatches]
        tokens = tokens_to_bytes([*range(step * each, (step + 1) * each)] * UNREAD_STREAMS)
        engine.send(Partial(slow.route, entries, tokens))
        if step % (steps // 50) == 0 and engine.jobs:
            received = coordinator.core.counters.partials
            engine.step()  # the others' streams go on in between
            unread.send(Heartbeat(incarnation=1))
            await stage.until(lambda received=received: coordinator.core.counters.partials > received)
    for stream in others:
        assert len((await collect(stream))[0]) <= 50
    await stage.until(lambda: all(len(entry.generated) == 4 * steps * each for entry in slow.open.values()))
    # pytest prints the objects of a failed assertion, and a stuck client refers to all that it is owed.
    assert all(len(repr(record)) < 200 for record in (slow, *slow.open.values(), *coordinator.core.engines))
    assert slow.stuck_since is not None, "the messages fit into the buffers"
    assert rejected <= 2, "the coordinator sends to a connection that is full"
    assert coordinator.core.counters.engines_lost == 0
    streamed: dict[bytes, list[int]] = {}

    async def everything() -> bool:
        unread.send(Heartbeat(incarnation=1))
        unread.read(streamed)
        return sum(map(len, streamed.values())) == UNREAD_STREAMS * steps * each

    # Its socket holds one message, so each look reads few.
    await eventually(everything, what="the client has read everything", look_seconds=0.001)
    assert all(own == list(range(steps * each)) for own in streamed.values())
    assert not slow.blocked
