"""A proxy between peers and a coordinator that loses, duplicates and delays acknowledgements and commits."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter

import zmq

from megatron_runtime.megatron_core._event_socket import EventSocket
from megatron_runtime.protocol.messages import ControlAck, ControlCommit, MalformedMessageError, decode


class FaultProxy:
    """Peers connect to `address`. The proxy opens one connection per peer to the coordinator at `target`.

    share: the share of acknowledgements and commits that get a fault, by `rng`. All other messages pass in order.
    fates: number of messages by fault, and number of faults by message type.
    """

    MAX_SECONDS_LATE = 0.6

    def __init__(self, target: str, *, rng: random.Random, share: float = 0.3) -> None:
        self.share = share
        self.fates: Counter[str] = Counter()
        self._target = target
        self._rng = rng
        self._context = zmq.Context()
        front = self._context.socket(zmq.ROUTER)
        front.setsockopt(zmq.SNDHWM, 0)
        front.setsockopt(zmq.RCVHWM, 0)
        port = front.bind_to_random_port("tcp://127.0.0.1")
        self.address = f"tcp://127.0.0.1:{port}"
        self._front = EventSocket(front, self._from_peer)
        self._backs: dict[bytes, EventSocket] = {}
        self._timers: set[asyncio.TimerHandle] = set()

    def close(self) -> None:
        for timer in self._timers:
            timer.cancel()
        for back in self._backs.values():
            back.close()
        self._front.close()
        self._context.term()

    def _from_peer(self, frames: list[bytes]) -> None:
        peer, message = frames[0], frames[1:]
        if peer not in self._backs:
            socket = self._context.socket(zmq.DEALER)
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.connect(self._target)
            self._backs[peer] = EventSocket(socket, lambda frames: self._pass(self._front, [peer, *frames]))
        self._pass(self._backs[peer], message)

    def _pass(self, socket: EventSocket, frames: list[bytes]) -> None:
        fate = self._fate(frames)
        if fate == "lost":
            return
        if fate == "late":
            seconds = self._rng.uniform(0.0, self.MAX_SECONDS_LATE)
            timer = asyncio.get_running_loop().call_later(seconds, lambda: self._send(socket, frames))
            self._timers.add(timer)
            return
        self._send(socket, frames)
        if fate == "doubled":
            self._send(socket, frames)

    def _send(self, socket: EventSocket, frames: list[bytes]) -> None:
        if not socket.socket.closed:
            with contextlib.suppress(zmq.ZMQError):
                socket.send(frames)

    def _fate(self, frames: list[bytes]) -> str:
        # A message to a peer begins with the routing identity.
        for candidate in (frames, frames[1:]):
            with contextlib.suppress(MalformedMessageError):
                message = decode(candidate) if candidate else None
                if isinstance(message, ControlAck | ControlCommit):
                    break
        else:
            return "passed"
        fate = self._rng.choice(("lost", "doubled", "late")) if self._rng.random() < self.share else "passed"
        self.fates[fate] += 1
        if fate != "passed":
            self.fates[type(message).__name__] += 1
        return fate
