"""Probes and metrics.

    GET /healthz  200 with the heartbeat as JSON; 503 if a pass hangs or a watch is dead
    GET /readyz   200 if this process leads and watches, or is a standby; else 503 with what is missing
    GET /metrics  Prometheus

They run on the event loop of the tasks, so a blocked loop answers no probe.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from megatron_runtime.protocol import strict_json as json

STALLED_SECONDS = 120.0
"""A longer pass hangs: every request and every wait in it has a much shorter deadline. A watch that has not shown an
existing object for so long, or whose renewal is overdue by as much, is dead."""
STALLS = ("oldest_pass_seconds", "watch_behind_seconds", "watch_silent_seconds")


class BindError(RuntimeError):
    """The address is in use. The message names it."""


class Probes:
    """One listening socket.

    heartbeat: fields of /healthz; `oldest_pass_seconds` is the age of the longest running pass.
    missing: unmet conditions of readiness, one phrase each.
    """

    def __init__(
        self,
        *,
        heartbeat: Callable[[], Mapping[str, Any]],
        missing: Callable[[], list[str]],
        registry: CollectorRegistry,
        host: str | None,
        port: int,
    ) -> None:
        self._heartbeat = heartbeat
        self._missing = missing
        self._registry = registry
        self._host = host
        self._port = port
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Raises BindError."""
        app = web.Application()
        app.add_routes(
            [
                web.get("/healthz", self._healthz),
                web.get("/livez", self._healthz),
                web.get("/readyz", self._readyz),
                web.get("/metrics", self._metrics),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, self._host, self._port).start()
        except OSError as error:
            await self._runner.cleanup()
            raise BindError(
                f"cannot bind {self._host or '*'}:{self._port} ({error.strerror}); choose another --health-port"
            ) from error

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _healthz(self, _: web.Request) -> web.Response:
        beat = dict(self._heartbeat())
        alive = max(beat.get(key, 0.0) for key in STALLS) < STALLED_SECONDS
        return _answer({"alive": alive, **beat}, status=200 if alive else 503)

    async def _readyz(self, _: web.Request) -> web.Response:
        missing = self._missing()
        return _answer({"ready": not missing, "missing": missing}, status=503 if missing else 200)

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST})


def _answer(value: Any, *, status: int) -> web.Response:
    return web.Response(text=json.dumps(value), status=status, content_type="application/json")
