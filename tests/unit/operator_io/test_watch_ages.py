"""A watch that the API server did not take again in time makes the operator's liveness fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from eventually import LONG_SECONDS
from prometheus_client import CollectorRegistry

from megatron_operator.cluster import watch_ages
from megatron_operator.cluster.kinds import RESOURCE
from megatron_operator.cluster.watch_ages import DENIED_SECONDS, GRACE_SECONDS, WatchAges
from megatron_operator.controller.main import STALLED_SECONDS, serve_probes

WATCH_SECONDS = 40.0
DUE = WATCH_SECONDS + GRACE_SECONDS


class ApiServer:
    """Begins to answer a watch and says no more; `status` is what it answers."""

    def __init__(self) -> None:
        self.status = 200

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(status=self.status)
        await response.prepare(request)
        await response.write(b"{}\n")
        if self.status == 200 and request.query.get("watch"):
            await asyncio.Event().wait()
        return response

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_get("/{path:.*}", self._answer)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


async def test_only_a_consumed_watch_counts_as_alive() -> None:
    clock, server = Clock(), ApiServer()
    ages = WatchAges(watch_seconds=WATCH_SECONDS, clock=clock)
    async with server.serving() as url, aiohttp.ClientSession(trace_configs=[ages.trace()]) as session:

        async def ask(path: str) -> None:
            async with session.get(f"{url}{path}"):
                pass

        await ask("/pods")
        clock.now += 1000
        assert ages.silent_seconds == 0, "what is no watch has no age"
        await ask("/pods?watch=true&resourceVersion=1")
        await ask("/services?watch=true")
        clock.now += DUE
        assert ages.silent_seconds == 0
        await ask("/services?watch=true")
        clock.now += 7
        assert ages.silent_seconds == 7, "the other one is overdue"
        server.status = 503
        await ask("/pods?watch=true&resourceVersion=2")
        assert ages.silent_seconds == 7, "it was rejected"
        server.status = 200
        await ask("/pods?watch=true&resourceVersion=3")
        assert ages.silent_seconds == 0
        await ask("/services?watch=true")
        server.status = 503
        await ask("/secrets?watch=true")
        clock.now += DUE + 3
        await ask("/secrets?watch=true")
        assert ages.silent_seconds == 3, "it was never taken"


async def test_a_deleted_crd_is_reported_and_its_watchers_get_no_answer() -> None:
    ages, server = WatchAges(watch_seconds=WATCH_SECONDS), ApiServer()
    async with server.serving() as url, aiohttp.ClientSession(trace_configs=[ages.trace()]) as session:
        server.status = 404
        async with session.get(f"{url}/apis/never.seen/v1"):
            pass
        assert not ages.vanished.is_set(), "it was no watch"
        server.status = 200
        async with session.get(f"{url}/pods?watch=true"):
            pass
        server.status = 404
        listing = asyncio.create_task(session.get(f"{url}/pods").__aenter__())
        async with asyncio.timeout(LONG_SECONDS):
            await ages.vanished.wait()
        assert not listing.done()
        listing.cancel()
        await asyncio.gather(listing, return_exceptions=True)


async def test_a_namespace_that_may_not_be_read_becomes_a_broken_connection_and_is_named_until_it_may(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """kopf would end with the rejection, and try again after a broken connection."""
    monkeypatch.setattr(watch_ages, "RETRY_SECONDS", (0.0, 0.0))
    clock, server = Clock(), ApiServer()
    ages = WatchAges(watch_seconds=WATCH_SECONDS, clock=clock)
    path = RESOURCE.path("a")
    async with server.serving() as url, aiohttp.ClientSession(trace_configs=[ages.trace()]) as session:
        server.status = 403
        for _ in range(2):
            with pytest.raises(aiohttp.ClientConnectionError, match="403 Forbidden"):
                await session.get(f"{url}/prefix{path}")
            clock.now += DENIED_SECONDS
        assert ages.denied == {(RESOURCE.plural, "a"): "403 Forbidden"}
        assert ages.silent_seconds == 0
        server.status = 200
        async with session.get(f"{url}/prefix{path}"):
            assert ages.denied == {}


async def test_liveness_fails_once_a_watch_is_overdue_for_too_long(unused_tcp_port: int) -> None:
    beat: dict[str, Any] = {"watch_silent_seconds": STALLED_SECONDS - 1}
    probes = await serve_probes(
        heartbeat=lambda: beat, missing=list, registry=CollectorRegistry(), host="127.0.0.1", port=unused_tcp_port
    )
    try:
        async with aiohttp.ClientSession() as session:
            for silent, status in ((STALLED_SECONDS - 1, 200), (STALLED_SECONDS, 503)):
                beat["watch_silent_seconds"] = silent
                async with session.get(f"http://127.0.0.1:{unused_tcp_port}/healthz") as answer:
                    assert answer.status == status
                    assert (await answer.json())["watch_silent_seconds"] == silent
    finally:
        await probes.stop()
