"""Children and pods are listed in pages and kept current; a kind that may not be watched fails alone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from aiohttp import web
from eventually import LONG_SECONDS, eventually
from kubernetes.aio.client import Configuration

from megatron_operator.cluster import api as api_module
from megatron_operator.cluster import watch_ages, watching
from megatron_operator.cluster.api import KubeApi
from megatron_operator.cluster.informers import Informers, Store
from megatron_operator.cluster.kinds import CHILD_KINDS, METADATA_KINDS, POD
from megatron_operator.decision.world import ChildRef

KINDS = (*CHILD_KINDS, POD)
KEY = ("prod", "demo")


def child(name: str, version: int = 1, *, instance: str = "demo", namespace: str = "prod") -> dict[str, Any]:
    labels = {"app.kubernetes.io/instance": instance}
    return {
        "metadata": {
            "name": name,
            "namespace": namespace,
            "uid": f"uid-{name}",
            "labels": labels,
            "resourceVersion": str(version),
        }
    }


class ApiServer:
    """Lists and watches of any collection. `objects` and `statuses` are by the plural of the kind."""

    def __init__(self) -> None:
        self.objects: dict[str, list[dict[str, Any]]] = {}
        self.statuses: dict[str, int] = {}
        self.asked: list[tuple[str, dict[str, str], str]] = []
        """Plural, query and accepted type of each request."""
        self.cut: set[str] = set()
        """Kinds of which the connection breaks once before the second page."""
        self.maximum = 0
        """Most requests that were open at once."""
        self._open = 0
        self._queues: dict[str, asyncio.Queue[dict[str, Any] | None]] = {}
        self._runner: web.AppRunner | None = None

    async def start(self) -> KubeApi:
        app = web.Application()
        app.router.add_get("/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        configuration = Configuration()
        configuration.host = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return KubeApi(configuration)

    async def stop(self) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    async def send(self, plural: str, kind: str, obj: dict[str, Any]) -> None:
        await self._queues[plural].put({"type": kind, "object": obj})

    async def end(self, plural: str) -> None:
        """End the watch as the server does at its timeout."""
        await self._queues[plural].put(None)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        plural, query = request.path.rpartition("/")[2], dict(request.query)
        self.asked.append((plural, query, request.headers["Accept"]))
        self._open += 1
        self.maximum = max(self.maximum, self._open)
        try:
            await asyncio.sleep(0)
            return await self._content(request, plural, query)
        finally:
            self._open -= 1

    async def _content(self, request: web.Request, plural: str, query: dict[str, str]) -> web.StreamResponse:
        if query.get("continue") and plural in self.cut:
            self.cut.discard(plural)
            assert request.transport is not None
            request.transport.abort()
        status = self.statuses.get(plural, 200)
        if status != 200:
            return web.json_response({"reason": "Forbidden", "message": f"cannot list {plural}"}, status=status)
        if query.get("watch") != "true":
            begin, limit = int(query.get("continue") or 0), int(query["limit"])
            objects = self.objects.get(plural, [])
            more = {"continue": str(begin + limit)} if begin + limit < len(objects) else {}
            return web.json_response(
                {"metadata": {"resourceVersion": "10", **more}, "items": objects[begin : begin + limit]}
            )
        response = web.StreamResponse()
        await response.prepare(request)
        queue = self._queues[plural] = asyncio.Queue()
        while (event := await queue.get()) is not None:
            await response.write(json.dumps(event).encode() + b"\n")
        return response


@pytest.fixture
async def server() -> AsyncIterator[ApiServer]:
    made = ApiServer()
    yield made
    await made.stop()


@pytest.fixture
async def inform(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[..., Any]]:
    """inform(): running informers, and what they have woken."""
    monkeypatch.setattr(api_module, "PAGE_OBJECTS", 3)
    monkeypatch.setattr(watch_ages, "DENIED_SECONDS", 0.02)
    monkeypatch.setattr("megatron_operator.cluster.informers.RETRY_SECONDS", (0.01, 0.02))
    api = await server.start()
    tasks: list[asyncio.Task[None]] = []

    def start() -> tuple[Informers, list[Any]]:
        woken: list[Any] = []
        informers = Informers(api, namespaces=("prod",), watch_seconds=30, wake=woken.append)
        tasks.append(asyncio.create_task(informers.run()))
        return informers, woken

    yield start
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await api.close()


def names(informers: Informers, key: tuple[str, str] = KEY) -> list[str]:
    return sorted(seen.ref.name for seen in informers.index.children[key])


async def test_collections_are_listed_in_pages_and_only_the_metadata_of_most_kinds(
    server: ApiServer, inform: Any
) -> None:
    server.objects["services"] = [child(f"s{number}") for number in range(7)]
    informers, _ = inform()
    await informers.listed()
    assert names(informers) == [f"s{number}" for number in range(7)]
    assert [query.get("continue") for plural, query, _ in server.asked if plural == "services"][:3] == [None, "3", "6"]
    lean = {plural for plural, _, accept in server.asked if "PartialObjectMetadata" in accept}
    assert lean == {kind.plural for kind in METADATA_KINDS}


async def test_a_list_that_breaks_between_two_pages_is_repeated(server: ApiServer, inform: Any) -> None:
    server.objects["services"] = [child(f"s{number}") for number in range(7)]
    server.cut.add("services")
    informers, _ = inform()
    async with asyncio.timeout(LONG_SECONDS):
        await informers.listed()
    assert not server.cut
    assert len(names(informers)) == 7


async def test_changes_are_shown_and_wake_the_resource_that_they_belong_to(server: ApiServer, inform: Any) -> None:
    server.objects["services"] = [child("s0")]
    informers, woken = inform()
    await informers.listed()
    await eventually(lambda: _async("services" in server._queues), what="the watch is open")
    assert woken == [KEY]
    await server.send("services", "ADDED", child("s1", 11))
    await server.send("services", "DELETED", child("s0", 12))
    await server.send("services", "BOOKMARK", {"metadata": {"resourceVersion": "20"}})
    await eventually(lambda: _async(names(informers) == ["s1"]), what="both changes are shown")
    assert woken == [KEY] * 3
    await server.send("services", "MODIFIED", child("s1", 21, instance="other"))
    await eventually(lambda: _async(names(informers, ("prod", "other")) == ["s1"]), what="it has moved")
    assert names(informers) == []


async def test_a_watch_continues_at_its_version_and_lists_again_when_that_is_gone(
    server: ApiServer, inform: Any
) -> None:
    informers, _ = inform()
    await informers.listed()
    await eventually(lambda: _async("pods" in server._queues), what="the watch is open")
    await server.send("pods", "BOOKMARK", {"metadata": {"resourceVersion": "20"}})
    before = server._queues["pods"]
    await server.end("pods")
    await eventually(lambda: _async(server._queues["pods"] is not before), what="the watch is renewed")
    assert [query["resourceVersion"] for plural, query, _ in server.asked if plural == "pods" and "watch" in query] == [
        "10",
        "20",
    ]
    server.objects["pods"] = [child("p0")]
    await server.send("pods", "ERROR", {"code": 410, "reason": "Expired", "message": "too old"})
    await eventually(lambda: _async(len(informers.index.pods[KEY]) == 1), what="the pods are listed again")


async def test_a_kind_that_may_not_be_watched_is_named_and_fails_alone_until_it_may(
    server: ApiServer, inform: Any
) -> None:
    server.statuses["configmaps"] = 403
    server.objects["services"] = [child("s0")]
    informers, woken = inform()
    async with asyncio.timeout(LONG_SECONDS):
        await informers.listed()
    assert names(informers) == ["s0"]
    assert informers.denied("prod") == {"configmaps": "403 Forbidden: cannot list configmaps"}
    assert informers.watches.silent_seconds == 0
    assert None in woken
    woken.clear()
    server.objects["configmaps"] = [child("c0")]
    del server.statuses["configmaps"]
    await eventually(lambda: _async(not informers.denied("prod")), what="it is watched")
    assert names(informers) == ["c0", "s0"]
    assert None in woken


async def test_an_object_that_cannot_be_read_hides_no_other(server: ApiServer, inform: Any) -> None:
    broken = child("s1")
    broken["spec"] = {"replicas": "many"}
    server.objects["services"] = [child("s0"), broken, child("s2")]
    informers, _ = inform()
    await informers.listed()
    assert names(informers) == ["s0", "s2"]


async def _async(value: bool) -> bool:
    return value


async def test_a_start_opens_few_connections_at_once(server: ApiServer) -> None:
    api = await server.start()
    lists = [api.request("GET", f"/api/v1/kind{number}", query={"limit": 1}) for number in range(60)]
    await asyncio.gather(*lists)
    assert 1 < server.maximum <= api_module.REQUESTS_AT_ONCE
    await api.close()


def test_a_store_forgets_what_a_later_list_lacks() -> None:
    store: Store[ChildRef] = Store()
    store.replace([("a", KEY, ChildRef("Service", "a")), ("b", ("prod", "other"), ChildRef("Service", "b"))])
    store.replace([("a", KEY, ChildRef("Service", "a"))])
    assert store.of(("prod", "other")) == []
    assert list(store) == [KEY]


def test_a_silent_watch_ends_before_the_next_is_due() -> None:
    assert watching.SILENCE_SECONDS <= watch_ages.GRACE_SECONDS
