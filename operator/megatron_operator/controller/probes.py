"""Probes and metrics of the operator, on the event loop of its tasks.

GET /livez, /healthz  200 with the heartbeat as JSON; 503 if a pass hangs or a watch is dead
GET /readyz           200 if this process leads and watches, or is a standby; else 503 with what is missing
GET /metrics          Prometheus
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry

from megatron_runtime.process.health import HealthServer
from megatron_runtime.process.listening import EVERY_ADDRESS

STALLED_SECONDS = 120.0
"""A longer pass hangs: every request and every wait in it has a much shorter deadline. A watch that has not shown an
existing object for so long, or whose renewal is overdue by as much, is dead."""
STALLS = ("oldest_pass_seconds", "watch_behind_seconds", "watch_silent_seconds")


class BindError(RuntimeError):
    """The address is in use. The message names it."""


async def serve_probes(
    *,
    heartbeat: Callable[[], Mapping[str, Any]],
    missing: Callable[[], list[str]],
    registry: CollectorRegistry,
    host: str | None,
    port: int,
) -> HealthServer:
    """Start to answer on one listening socket. Raises BindError.

    heartbeat: fields of /livez; `oldest_pass_seconds` is the age of the longest running pass.
    missing:   unmet conditions of readiness, one phrase each.
    host:      None: every address.
    """

    def liveness() -> Mapping[str, object]:
        beat = heartbeat()
        return {"alive": max(beat.get(key, 0.0) for key in STALLS) < STALLED_SECONDS, **beat}

    server = HealthServer(
        missing=missing, liveness=liveness, registry=registry, host=EVERY_ADDRESS if host is None else host, port=port
    )
    try:
        await server.start()
    except OSError as error:
        raise BindError(error.strerror) from error
    return server
