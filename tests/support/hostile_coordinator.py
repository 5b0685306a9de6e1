"""A hostile coordinator, as an image of a tenant may contain: it sends garbage, floods or invalid values."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

from hostile_frames import BOMBS

from megatron_runtime.protocol.headers import Header, Role
from megatron_runtime.protocol.lifecycle import CoordinatorState
from megatron_runtime.protocol.messages import Hello, HelloAck, MalformedMessageError, Status, decode, pack
from megatron_runtime.transport.zmtp.connection import Connection, PeerId
from megatron_runtime.transport.zmtp.handshake import NullHandshake
from megatron_runtime.transport.zmtp.router import Router

HIGHEST = (1 << 64) - 1
_ENGINE = {"name": "demo-engine-0\x1b[2J\nnot a line", "state": "RUNNING", "digest": "\u202e" * 100}


def reply(**fields: object) -> bytes:
    """Return a STATUS_REPLY with these fields, which are not validated."""
    return pack([int(Header.STATUS_REPLY), {"incarnation": 1, "state": "RUNNING", **fields}])


ANSWERS: dict[str, Callable[[], list[bytes]]] = {
    "the highest fence": lambda: [reply(fence=HIGHEST)],
    "a fence at the maximum": lambda: [reply(fence=1 << 53)],
    "a negative fence": lambda: [reply(fence=-1)],
    "the highest epoch": lambda: [reply(epoch=HIGHEST)],
    "an engine of many ranks": lambda: [reply(engines=[{**_ENGINE, "ranks": HIGHEST}])],
    "names that do not print": lambda: [reply(fence=HIGHEST, engines=[_ENGINE])],
    "operations that were never requested": lambda: [
        reply(operations=[{"operation_id": "\x00" * 64, "signal": 45, "phase": "Failed", "error": "\x1b]0;x" * 9000}])
    ],
    "more engines than there can be": lambda: [reply(engines=[_ENGINE] * 13_000)],
    "a FINAL": lambda: [pack([int(Header.FINAL), 1, bytes(16), b"", b"\xc1"])],
    "a verb": lambda: [pack([int(Header.PAUSE), {"operation_id": "x", "fence": HIGHEST}])],
    "noise": lambda: [b"\xc1" * 1000],
    "two megabytes": lambda: [bytes(2 << 20)],
    "many frames": lambda: [b"x"] * 60,
    "nothing": list,
    **{f"a bomb: {name}": (lambda bomb=bomb: [bomb((1 << 20) - 100)]) for name, bomb in BOMBS.items()},
}


class HostileCoordinator:
    """Answers HELLO with the highest fence, and every STATUS with the next of `answers`."""

    def __init__(
        self, answers: dict[str, Callable[[], list[bytes]]] = ANSWERS, *, floods: int = 0, path: Path | None = None
    ) -> None:
        """
        floods: number of additional answers to each STATUS.
        path:   of the Unix socket to listen on; None means loopback.
        """
        self.told: list[str] = []
        self.round = asyncio.Event()
        """Set when each of the answers was sent."""
        self._answers: Iterator[tuple[str, Callable[[], list[bytes]]]] = itertools.cycle(answers.items())
        self._count = len(answers)
        self._floods = floods
        self._connections: dict[PeerId, Connection] = {}
        self._router = Router(
            int(Role.ADMIN),
            connections=self._connections,
            handshake=NullHandshake,
            on_message=self._receive,
            max_message_bytes=64 << 20,
            send_buffer_bytes=256 << 20,
            check_seconds=60,
        )
        self.address = self._router.bind("127.0.0.1", 0) if path is None else self._router.bind_path(path)

    async def close(self) -> None:
        self._router.close()
        await self._router.closed()

    def _receive(self, peer: PeerId, frames: list[bytes]) -> None:
        try:
            message = decode(frames)
        except MalformedMessageError:
            return
        connection = self._connections[peer]
        if isinstance(message, Hello):
            ack = HelloAck(incarnation=1, state=CoordinatorState.RUNNING, fence=HIGHEST)
            connection.send(ack.to_frames())
        elif isinstance(message, Status):
            name, answer = next(self._answers)
            self.told.append(name)
            if len(self.told) >= self._count:
                self.round.set()
            if sent := answer():
                connection.send(sent)
            for _ in range(self._floods):
                connection.send([reply()])
