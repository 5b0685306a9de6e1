"""Runs a libzmq socket on an asyncio event loop without polling and without a task for each message."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

import zmq
from zmq.backend import zmq_poll

logger = logging.getLogger(__name__)

DRAIN_BUDGET = 256
"""Maximum number of messages handled in one iteration of the event loop."""

_NOBLOCK = int(zmq.NOBLOCK)
_NOBLOCK_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)


class EventSocket:
    """A libzmq socket on the running event loop, which calls `on_message(frames)` for each received message.

    send() does not block. The file descriptor of a libzmq socket is edge-triggered. This class therefore reads all
    messages after every wake-up, and also after every send, because a send can consume the edge. Exceptions in
    `on_message` are logged and counted, and never reach the loop.
    """

    def __init__(self, socket: zmq.Socket[bytes], on_message: Callable[[list[bytes]], None]) -> None:
        self.socket = socket
        self.handler_errors = 0
        self._on_message = on_message
        self._poll_items = [(socket, int(zmq.POLLIN))]
        # Methods of the low-level binding. The methods of zmq.Socket convert flags to enums for each frame, which takes
        # longer than handling the frame.
        self._send_frame = super(zmq.Socket, socket).send
        self._receive_frame = super(zmq.Socket, socket).recv
        self._closed = False
        self._loop = asyncio.get_running_loop()
        self._descriptor = int(socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._descriptor, self._drain, 1)
        self._schedule_drain()

    def close(self, *, linger_ms: int = 0) -> None:
        """Close the socket. Idempotent."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._descriptor)
            self.socket.close(linger=linger_ms)

    def send(self, frames: Sequence[bytes]) -> bool:
        """Pass `frames` to the socket. Return False if its buffer is full.

        Raises: zmq.ZMQError: EHOSTUNREACH, if the socket is a mandatory ROUTER and the peer has disconnected.
        """
        more = len(frames)
        try:
            for frame in frames:
                more -= 1
                self._send_frame(frame, _NOBLOCK_MORE if more else _NOBLOCK, True)
        except zmq.Again:
            return False
        finally:
            if not self._drain_scheduled:
                self._schedule_drain()
        return True

    def _receive(self) -> list[bytes]:
        frame = self._receive_frame(_NOBLOCK, False)
        frames = [frame.bytes]
        while frame.more:
            frame = self._receive_frame(_NOBLOCK, False)
            frames.append(frame.bytes)
        return frames

    def _schedule_drain(self) -> None:
        self._drain_scheduled = True
        self._loop.call_soon(self._drain)

    def _drain(self, expected: int = 0) -> None:
        """Call the handler for all messages that have arrived. expected: number of messages to read without a poll."""
        self._drain_scheduled = True  # a send in a handler does not need to schedule another drain
        for number in range(DRAIN_BUDGET):
            if self._closed:
                return
            # Usually one message arrives per wake-up, and a poll is cheaper than the exception.
            if expected <= number < 2 and not zmq_poll(self._poll_items, 0):
                self._drain_scheduled = False
                return
            try:
                frames = self._receive()
            except zmq.Again:
                self._drain_scheduled = False
                return
            try:
                self._on_message(frames)
            except Exception:
                self.handler_errors += 1
                logger.exception("handler failed on a message of %d frames; the message is dropped", len(frames))
        self._schedule_drain()
