"""Clients and engines that do as little as the protocol allows, so that the coordinator is what is measured.

They run on the event loop of the benchmark and share its clock: the time a message spends in the coordinator is what
lies between two stamps of one process.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable

import zmq

from megatron_runtime.wire.event_socket import EventSocket
from megatron_runtime.wire.headers import Header, Role
from megatron_runtime.wire.messages import (
    Abort,
    Disconnect,
    Error,
    Final,
    Frames,
    Heartbeat,
    Hello,
    HelloAck,
    Partial,
    PartialEntry,
    RequestMeta,
    Submit,
    decode,
    pack,
    tokens_to_bytes,
    unpack,
)
from megatron_runtime.wire.states import CoordinatorState, EngineState

_REPLY = pack({"status": "COMPLETED", "finish_reason": "length", "generated_length": 1})
_TOKEN = tokens_to_bytes([1])
_PARAMS = pack({"num_tokens_to_generate": 1})


class LeanPeer:
    """One registered connection."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, hello: Hello) -> None:
        self.registered = asyncio.Event()
        self._hello = hello
        socket = context.socket(zmq.DEALER)
        for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
            socket.setsockopt(option, 0)
        socket.connect(address)
        self.socket = EventSocket(socket, self._receive)
        self.socket.start()
        self.socket.send(hello.to_frames())
        self._beating = asyncio.create_task(self._beat())

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(0.5)
            state = EngineState.RUNNING if self._hello.role is Role.ENGINE else None
            self.socket.send(Heartbeat(incarnation=self._hello.incarnation, state=state).to_frames())

    async def close(self) -> None:
        self._beating.cancel()
        await asyncio.wait([self._beating])
        self.socket.send(Disconnect(reason="done").to_frames())
        self.socket.close(linger_ms=1000)

    def _receive(self, frames: Frames) -> None:
        head = unpack(frames[0])
        if head[0] == Header.HELLO_ACK:
            self.acknowledged(HelloAck.model_validate(head[1]))
            self.registered.set()
        elif head[0] == Header.ERROR:
            error = decode(frames)
            assert isinstance(error, Error)
            raise RuntimeError(f"the coordinator refused: {error.code.name}: {error.message}")
        elif head[0] != Header.HEARTBEAT:
            self.handle(head, frames)

    def acknowledged(self, ack: HelloAck) -> None:
        """Registered."""

    def handle(self, head: list[object], frames: Frames) -> None:
        """A message of the request path."""


class LeanEngine(LeanPeer):
    """Answers each request at once with one token, or, when `answers` is false, keeps it open.

    taken: by uid, when a dispatch arrived and when its final was sent.
    open:  dispatch ids and uids of what is kept open, and the route of its client.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        name: str,
        *,
        max_requests: int,
        answers: bool = True,
    ) -> None:
        self.answers = answers
        self.taken: dict[bytes, tuple[float, float]] = {}
        self.open: list[tuple[int, bytes]] = []
        self.route = 0
        hello = Hello(
            role=Role.ENGINE,
            name=name,
            incarnation=secrets.randbits(63),
            serving=True,
            state=EngineState.RUNNING,
            max_requests=max_requests,
            block_size_tokens=256,
        )
        super().__init__(context, address, hello)

    def handle(self, head: list[object], frames: Frames) -> None:
        if head[0] != Header.DISPATCH:
            return
        arrived = time.perf_counter()
        _, dispatch_id, uid, route, *_ = head
        assert isinstance(dispatch_id, int)
        assert isinstance(uid, bytes)
        assert isinstance(route, int)
        if not self.answers:
            self.open.append((dispatch_id, uid))
            self.route = route
            return
        self.taken[uid] = (arrived, time.perf_counter())
        self.socket.send(Final(dispatch_id, uid, _TOKEN, _REPLY).to_frames())

    def send_step(self, number: int) -> None:
        """One token for each request that is kept open, in one message."""
        entries = [PartialEntry(uid, dispatch_id, number, 1) for dispatch_id, uid in self.open]
        self.socket.send(Partial(self.route, entries, _TOKEN * len(entries)).to_frames())


class DirectEngine:
    """Answers clients with no coordinator between: what the machine and the load itself take.

    Clients connect to its `address`, or reach it through the forwarder at `forwarder_address`.
    taken: as LeanEngine has it.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], *, forwarder_address: str | None = None) -> None:
        self.taken: dict[bytes, tuple[float, float]] = {}
        socket = context.socket(zmq.ROUTER if forwarder_address is None else zmq.DEALER)
        for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
            socket.setsockopt(option, 0)
        if forwarder_address is None:
            self.address = f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}"
        else:
            self.address = forwarder_address
            socket.connect(forwarder_address)
        self.socket = EventSocket(socket, self._receive)
        self.socket.start()

    def _receive(self, frames: Frames) -> None:
        arrived = time.perf_counter()
        peer, head = frames[0], unpack(frames[1])
        if head[0] == Header.HELLO:
            self.socket.send([peer, *HelloAck(incarnation=1, state=CoordinatorState.RUNNING).to_frames()])
        elif head[0] == Header.SUBMIT:
            self.taken[head[1]] = (arrived, time.perf_counter())
            self.socket.send([peer, *Final(0, head[1], _TOKEN, _REPLY).to_frames()])


class LeanClient(LeanPeer):
    """on_final: called with the uid of each answer. on_partial: called for each message of partials."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, name: str) -> None:
        self.on_final: Callable[[bytes], None] = lambda uid: None
        self.on_partial: Callable[[], None] = lambda: None
        hello = Hello(role=Role.CLIENT, name=name, incarnation=secrets.randbits(63))
        super().__init__(context, address, hello)

    def submit(self, prompt: bytes, *, streaming: bool = False) -> bytes:
        uid = secrets.token_bytes(16)
        self.socket.send(Submit(uid, RequestMeta(streaming=streaming, seed=1), prompt, b"", _PARAMS).to_frames())
        return uid

    def abort(self, uid: bytes) -> None:
        self.socket.send(Abort(uid).to_frames())

    def handle(self, head: list[object], frames: Frames) -> None:
        if head[0] == Header.FINAL:
            uid = head[2]
            assert isinstance(uid, bytes)
            self.on_final(uid)
        elif head[0] == Header.PARTIAL:
            self.on_partial()
