"""The server's view of its own resource, from the coordinator's data: a page at /status and JSON at /v1/status."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from megatron_runtime.protocol.messages import StatusReply
from megatron_runtime.server.errors import try_again
from megatron_runtime.server.openai.service import Service
from megatron_runtime.transport.control_calls import ControlRejectedError
from megatron_runtime.transport.peer_link import CoordinatorUnreachableError

LEAST_SECONDS = 1.0
"""Least time between two questions to the coordinator, however many clients ask."""


class ResourceView:
    """The coordinator's status, as far as every client may see it: no requests, keys or operations."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._asked = float("-inf")
        self._answer: asyncio.Future[StatusReply] | None = None

    async def read(self) -> dict[str, Any]:
        """Return the status, at most `LEAST_SECONDS` old. Raises ApiError 503 if the coordinator does not answer."""
        now = time.monotonic()
        if self._answer is None or (self._answer.done() and now - self._asked >= LEAST_SECONDS):
            self._asked = now
            self._answer = asyncio.ensure_future(self._service.client.status())
            # All clients may have left when it fails.
            self._answer.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            # One client that disconnects must not cancel the answer of the others.
            return self._described(await asyncio.shield(self._answer))
        except (CoordinatorUnreachableError, ControlRejectedError) as error:
            raise try_again(503, f"{error}.", code="coordinator_unreachable", seconds=5) from error

    def _described(self, status: StatusReply) -> dict[str, Any]:
        return {
            "model": self._service.settings.served_name,
            "state": status.state.value,
            "epoch": status.epoch,
            "queued": status.queued,
            "in_flight": status.in_flight,
            "engines": [
                {
                    "name": engine.name,
                    "state": engine.state.value,
                    "serving": engine.serving and not engine.suspect and not engine.draining,
                    "in_flight": engine.in_flight,
                    "epoch": engine.epoch,
                    "ranks": engine.ranks,
                    "seconds_since_heartbeat": round(engine.silent_seconds, 1),
                }
                for engine in status.engines
            ],
            "adapters": [{"name": each.name, "engines": each.engines} for each in status.adapters or ()],
        }
