"""JSON that no decoder takes: nested too deeply, as one tenant may write it into a resource, or not finite."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st
from kopf._cogs.clients.api import iter_jsonlines
from kubernetes.aio.client import Configuration
from soak import size

from megatron_operator.cluster.api import KubeApi
from megatron_operator.cluster.auth import kopf_session
from megatron_operator.cluster.kinds import RESOURCE
from megatron_operator.cluster.nesting import MAX_LEVELS, decode, shallow
from megatron_operator.cluster.watch_ages import WatchAges

JSON = st.recursive(
    st.none() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
)


def nested(levels: int, *, text: str = '{"a":[', end: str = "]}") -> str:
    return text * (levels // 2) + '"\\"}]{["' + end * (levels // 2)


def levels_of(value: Any) -> int:
    depth = 0
    while isinstance(value, dict | list):
        depth += 1
        value = next(iter(value.values() if isinstance(value, dict) else value), None)
    return depth


@settings(max_examples=size(8, soak=20), deadline=None)
@given(JSON)
def test_shallow_objects_are_unchanged(value: Any) -> None:
    text = json.dumps(value).encode()
    assert decode(text) == value
    assert json.loads(shallow(text)) == value
    wide = json.dumps([value] * 150).encode()
    assert shallow(wide) == wide


@settings(max_examples=size(8, soak=20), deadline=None)
@given(JSON, JSON)
def test_siblings_of_a_deep_value_are_unchanged(before: Any, after: Any) -> None:
    text = f'{{"before": {json.dumps(before)}, "deep": {nested(1_200)}, "after": {json.dumps(after)}}}'
    found = json.loads(shallow(text.encode()))
    assert (found["before"], found["after"]) == (before, after)
    assert levels_of(found["deep"]) == MAX_LEVELS - 1


def test_the_limit_is_exact() -> None:
    exact = nested(MAX_LEVELS).encode()
    assert shallow(exact) == exact
    assert levels_of(json.loads(shallow(nested(MAX_LEVELS + 2).encode()))) == MAX_LEVELS


@pytest.fixture
async def server() -> Any:
    """An API server with one deep resource and one other, in a list and in a watch that comes in pieces."""
    items = [f'{{"metadata": {{"name": "{name}"}}, "spec": {spec}}}' for name, spec in ITEMS.items()]

    async def echo(request: web.Request) -> web.Response:
        return web.json_response({"text": await request.text()})

    async def objects(request: web.Request) -> web.StreamResponse:
        if "watch" not in request.query:
            return web.Response(text=f'{{"items": [{", ".join(items)}]}}', content_type="application/json")
        answer = web.StreamResponse()
        await answer.prepare(request)
        text = "".join(f'{{"type": "ADDED", "object": {item}}}\n' for item in items).encode()
        for begin in range(0, len(text), 7_001):
            await answer.write(text[begin : begin + 7_001])
        return answer

    application = web.Application()
    application.router.add_get("/{path:.*}", objects)
    application.router.add_patch("/{path:.*}", echo)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield Configuration(host=f"http://127.0.0.1:{runner.addresses[0][1]}")
    await runner.cleanup()


ITEMS = {"first": "{}", "deep": nested(9_000), "last": '{"replicas": 2}'}


async def test_a_list_and_a_watch_continue_past_a_deep_resource(server: Configuration) -> None:
    login = kopf_session(server, watches=WatchAges(watch_seconds=40))
    try:
        listed = await (await login.aiohttp_session.get(f"{server.host}/x")).json()
        async with await login.aiohttp_session.get(f"{server.host}/x?watch=true") as response:
            watched = [json.loads(line)["object"] async for line in iter_jsonlines(response.content)]
    finally:
        await login.aiohttp_session.close()
    for objects in (listed["items"], watched):
        assert [each["metadata"]["name"] for each in objects] == list(ITEMS)
        assert objects[-1]["spec"] == {"replicas": 2}
        assert levels_of(objects[1]["spec"]) < MAX_LEVELS


async def test_numbers_that_are_not_finite_are_written_as_null(server: Configuration) -> None:
    body = {"status": {"rate": math.nan, "limits": [math.inf, 1.5]}}
    async with KubeApi(server) as api:
        echoed = await api.request("PATCH", "/x", body=body, content_type="application/merge-patch+json")
    assert echoed == {"text": '{"status": {"rate": null, "limits": [null, 1.5]}}'}


async def test_requests_of_the_operator_continue_past_a_deep_resource(server: Configuration) -> None:
    async with KubeApi(server) as api:
        assert [each["metadata"]["name"] for each in await api.list(RESOURCE, "default")] == list(ITEMS)
