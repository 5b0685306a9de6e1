"""Clients and engines that do as little as the protocol allows, so that the coordinator is what is measured.

They run on the event loop of the benchmark and share its clock: the time a message spends in the coordinator is what
lies between two stamps of one process.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable

from megatron_runtime.cli.bench.lean_socket import LeanSocket
from megatron_runtime.protocol import limits
from megatron_runtime.protocol.headers import Header, Role
from megatron_runtime.protocol.lifecycle import CoordinatorState, EngineState
from megatron_runtime.protocol.messages import (
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
from megatron_runtime.transport.zmtp.connection import Connection, PeerId
from megatron_runtime.transport.zmtp.handshake import NullHandshake
from megatron_runtime.transport.zmtp.router import Router

_REPLY = pack({"status": "COMPLETED", "finish_reason": "length", "generated_length": 1})
_TOKEN = tokens_to_bytes([1])
_PARAMS = pack({"num_tokens_to_generate": 1})


class LeanPeer:
    """One registered connection, after start()."""

    socket: LeanSocket

    def __init__(self, address: str, hello: Hello) -> None:
        self.registered = asyncio.Event()
        self._address = address
        self._hello = hello

    async def start(self) -> None:
        self.socket = await LeanSocket.connect(self._address, self._receive)
        self.socket.send(self._hello.to_frames())
        self._beating = asyncio.create_task(self._beat())
        await self.registered.wait()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(0.5)
            state = EngineState.RUNNING if self._hello.role is Role.ENGINE else None
            self.socket.send(Heartbeat(incarnation=self._hello.incarnation, state=state).to_frames())

    async def close(self) -> None:
        self._beating.cancel()
        await asyncio.wait([self._beating])
        self.socket.send(Disconnect(reason="done").to_frames())
        self.socket.close()

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
            self.handle(head)

    def acknowledged(self, ack: HelloAck) -> None:
        """Registered."""

    def handle(self, head: list[object]) -> None:
        """A message of the request path."""


class LeanEngine(LeanPeer):
    """Answers each request at once with one token, or, when `answers` is false, keeps it open.

    taken: by uid, when a dispatch arrived and when its final was sent.
    open:  dispatch ids and uids of what is kept open, and the route of its client.
    """

    def __init__(
        self,
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
        super().__init__(address, hello)

    def handle(self, head: list[object]) -> None:
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

    def __init__(self, *, forwarder_address: str | None = None) -> None:
        self.taken: dict[bytes, tuple[float, float]] = {}
        self.address = forwarder_address or ""
        self._forwarder_address = forwarder_address
        self._socket: LeanSocket | None = None
        self._router: Router | None = None
        self._connections: dict[PeerId, Connection] = {}

    async def start(self) -> None:
        if self._forwarder_address is not None:
            self._socket = await LeanSocket.connect(self._forwarder_address, self._forwarded)
            return
        self._router = Router(
            0,
            connections=self._connections,
            handshake=NullHandshake,
            on_message=lambda peer, frames: self._receive(frames[0], self._connections[peer].send),
            max_message_bytes=limits.MAX_CLIENT_MESSAGE_BYTES,
            send_buffer_bytes=limits.MAX_ENGINE_MESSAGE_BYTES,
            check_seconds=60.0,
        )
        self.address = self._router.bind("127.0.0.1", 0)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        if self._router is not None:
            self._router.close()

    def _forwarded(self, frames: Frames) -> None:
        """A client's routing id, and its message."""
        peer, body = frames
        assert self._socket is not None
        send = self._socket.send
        self._receive(body, lambda answer: send([peer, *answer]))

    def _receive(self, body: bytes, send: Callable[[Frames], object]) -> None:
        arrived = time.perf_counter()
        head = unpack(body)
        if head[0] == Header.HELLO:
            send(HelloAck(incarnation=1, state=CoordinatorState.RUNNING).to_frames())
        elif head[0] == Header.SUBMIT:
            self.taken[head[1]] = (arrived, time.perf_counter())
            send(Final(0, head[1], _TOKEN, _REPLY).to_frames())


class LeanClient(LeanPeer):
    """on_final: called with the uid of each answer. on_partial: called for each message of partials."""

    def __init__(self, address: str, name: str) -> None:
        self.on_final: Callable[[bytes], None] = lambda uid: None
        self.on_partial: Callable[[], None] = lambda: None
        hello = Hello(role=Role.CLIENT, name=name, incarnation=secrets.randbits(63))
        super().__init__(address, hello)

    def submit(self, prompt: bytes, *, streaming: bool = False) -> bytes:
        uid = secrets.token_bytes(16)
        self.socket.send(Submit(uid, RequestMeta(streaming=streaming, seed=1), prompt, b"", _PARAMS).to_frames())
        return uid

    def abort(self, uid: bytes) -> None:
        self.socket.send(Abort(uid).to_frames())

    def handle(self, head: list[object]) -> None:
        if head[0] == Header.FINAL:
            uid = head[2]
            assert isinstance(uid, bytes)
            self.on_final(uid)
        elif head[0] == Header.PARTIAL:
            self.on_partial()
