"""An upgrade of the operator with two resources, and a rollout with a surge engine, on a real API server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from eventually import LONG_SECONDS, eventually

from megatron_operator.cluster.api import KubeApi
from megatron_operator.cluster.kinds import POD, RESOURCE
from megatron_operator.cluster.watching import watch
from megatron_operator.resource.names import ANNOTATION_UPDATE

from .conftest import condition
from .in_process_fleet import InProcessFleet
from .operator_process import OperatorProcess

pytestmark = pytest.mark.cluster

OLD = ("--runtime-image", "registry.example/runtime:1", "--coordinator-image", "registry.example/operator:1")
NEW = ("--runtime-image", "registry.example/runtime:2", "--coordinator-image", "registry.example/operator:2")


@pytest.fixture
def make_release(fleet: InProcessFleet, make_operator: Callable[..., OperatorProcess]) -> Callable[..., Any]:
    return lambda *images: make_operator("--no-security", "--coordinator-address", fleet.address_template, *images)


@pytest.fixture
def update(plugin: Any, namespace: str) -> Callable[[str], Awaitable[str]]:
    """`kubectl megatron update NAME`."""

    async def call(name: str) -> str:
        done = await plugin("update", name, "-n", namespace)
        assert done.returncode == 0, done.stdout + done.stderr
        return str(done.stdout)

    return call


async def images(api: KubeApi, resource: Any) -> dict[str, set[str]]:
    """Return the images of the resource's pods by pod uid."""
    pods = await api.list(POD, resource.namespace, selector=f"app.kubernetes.io/instance={resource.name}")
    return {
        pod["metadata"]["uid"]: {container["image"] for container in pod["spec"]["containers"]}
        for pod in pods
        if pod["metadata"].get("deletionTimestamp") is None
    }


def phase(status: dict[str, Any]) -> str:
    return str((status.get("update") or {}).get("phase", ""))


async def follow_updates(api: KubeApi, namespace: str, seen: list[tuple[str, str]]) -> None:
    """Append the phases of both updates at each change, until both have ended."""
    phases: dict[str, str] = {}
    async for change in watch(api, RESOURCE.path(namespace), {}):
        phases |= {each["metadata"]["name"]: phase(each["status"]) for each in change.objects}
        pair = (phases["u-0"], phases["u-1"])
        if not seen or seen[-1] != pair:
            seen.append(pair)
        if pair == ("", ""):
            return


async def test_an_upgrade_restarts_nothing_unasked_and_updates_one_resource_at_a_time(
    api: KubeApi,
    fleet: InProcessFleet,
    make_release: Callable[..., Any],
    make_resource: Callable[[str], Any],
    update: Callable[[str], Awaitable[str]],
) -> None:
    resources = [make_resource(name) for name in ("u-0", "u-1")]
    operator = make_release(*OLD)
    await operator.start()
    for resource in resources:
        fleet.coordinator(resource.name)
        await resource.create(replicas=2)
    for resource in resources:
        await resource.settled("Running")
        await resource.until(lambda status: "plan" not in status)
    before = [await images(api, resource) for resource in resources]
    assert await update("u-0") == "u-0: is up to date\n"

    assert operator.stop() == 0
    operator = make_release(*NEW, "--resync-seconds", "1")
    await operator.start()
    for resource in resources:
        await resource.until(lambda status: condition(status, "UpdateAvailable")["status"] == "True")
    await operator.passed(await operator.passes() + 3 * len(resources))
    assert [await images(api, resource) for resource in resources] == before
    assert operator.lines("signal sent") == []

    seen: list[tuple[str, str]] = []
    following = asyncio.create_task(follow_updates(api, resources[0].namespace, seen))

    async def is_watched() -> bool:
        return bool(seen)

    await eventually(is_watched, what="the updates are watched")
    second = (await resources[1].status())["update"]["id"]
    assert await update("u-0") == "u-0: update requested\n"
    # What the command writes, without the time of its start: the first update has not ended.
    body = {"metadata": {"annotations": {ANNOTATION_UPDATE: second}}}
    await api.merge_patch(RESOURCE, resources[1].namespace, "u-1", body, manager="test")
    await asyncio.wait_for(following, 3 * LONG_SECONDS)
    assert ("Running", "Running") not in seen
    assert {"Running", "Waiting"} <= {phase for phases in seen for phase in phases}
    for resource in resources:
        status = await resource.until(lambda status: "plan" not in status)
        assert (status["ready"], status["updatedReplicas"]) == ("2/2", 2)
        assert status["release"]["runtimeImage"] == "registry.example/runtime:2"
        used = set().union(*(await images(api, resource)).values())
        assert used == {"registry.example/runtime:2", "registry.example/operator:2"}


async def test_one_replica_with_a_surge_engine_is_replaced_without_an_outage(
    fleet: InProcessFleet, make_release: Callable[..., Any], resource: Any
) -> None:
    await make_release(*OLD).start()
    fleet.coordinator(resource.name)
    await resource.create(replicas=1, rollout={"maxSurge": 1})
    first = await resource.settled("Running")
    await resource.patch(engine={"batching": {"maxRequests": 7}})
    served: set[int] = set()

    def replaced(status: dict[str, Any]) -> bool:
        names = [engine["name"] for engine in status["engines"]]
        return status["revision"] != first["revision"] and "plan" not in status and names == ["demo-engine-0"]

    done = asyncio.create_task(resource.until(replaced))
    while not done.done():
        engines = (await fleet.ask(resource.name)).engines
        served.add(sum(engine.serving and not engine.draining for engine in engines))
        await asyncio.sleep(0.05)
    status = await done
    assert served <= {1, 2}, "at no time without an engine that serves; both may serve too shortly to be seen"
    assert status["engines"][0]["canary"] == "Passed"
    assert not [name for name in await resource.children() if name.endswith("engine-1")]
    await resource.reported("EngineAdded", "EngineReplaced", "EngineRemoved")
