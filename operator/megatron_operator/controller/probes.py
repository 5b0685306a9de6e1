"""Probes and metrics.

    GET /healthz  200 with the heartbeat as JSON, 503 when a pass hangs or a watch is cut off
    GET /readyz   200 when this process leads and watches, or stands by for the leader; else 503 naming what is missing
    GET /metrics  Prometheus

They run on the same event loop as the tasks: a loop that hangs answers no probe.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

STALLED_SECONDS = 120.0
"""A pass that takes longer hangs: every request and every wait in it has a deadline far below. A watch that has not
shown for so long what is known to exist, or that was to be asked for anew so long ago, is cut off."""
STALLS = ("oldest_pass_seconds", "watch_behind_seconds", "watch_silent_seconds")


class BindError(RuntimeError):
    """The address is taken. The message names it."""


class Probes:
    """One listening socket.

    heartbeat: fields of /healthz; `oldest_pass_seconds` is the age of the longest pass under way.
    missing: what keeps the process from being ready, one phrase each.
    """

    def __init__(
        self,
        *,
        heartbeat: Callable[[], Mapping[str, Any]],
        missing: Callable[[], list[str]],
        registry: CollectorRegistry,
        host: str,
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
                f"cannot bind {self._host}:{self._port} ({error.strerror}); choose another --health-port"
            ) from error

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _healthz(self, _: web.Request) -> web.Response:
        beat = dict(self._heartbeat())
        alive = max(beat.get(key, 0.0) for key in STALLS) < STALLED_SECONDS
        return web.json_response({"alive": alive, **beat}, status=200 if alive else 503)

    async def _readyz(self, _: web.Request) -> web.Response:
        missing = self._missing()
        return web.json_response({"ready": not missing, "missing": missing}, status=503 if missing else 200)

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST})
