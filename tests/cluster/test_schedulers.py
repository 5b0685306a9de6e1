"""Where real schedulers place the pods of engines: kube-scheduler with the coscheduling plugin, and without it.

The nodes are objects that a task reports as ready. Their slots are an extended resource, of which each pod of an engine
takes one. Engines have two pods, which are placed and never started.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from eventually import eventually
from go_modules import built_program, module_directory
from soak import SOAK

from localcluster import LocalCluster
from megatron_operator.cluster.kinds import POD, ObjectKind
from megatron_operator.resource.names import ENGINE, LABEL_COMPONENT, LABEL_ENGINE

from .conftest import condition, wait_until_served
from .real_scheduler import RACK, Nodes, running_scheduler

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not SOAK, reason="builds a scheduler for minutes; `make soak` runs it"),
]

SCHEDULER_PLUGINS = "sigs.k8s.io/scheduler-plugins@v0.33.5"
COSCHEDULER = "scheduler-plugins-scheduler"
POD_GROUP = ObjectKind("PodGroup", "scheduling.x-k8s.io", "v1alpha1", "podgroups")
POD_GROUP_CRD = f"config/crd/bases/{POD_GROUP.group}_{POD_GROUP.plural}.yaml"
SLOT = "example.com/slot"
PERMIT_SECONDS = 5
"""Time for which the coscheduling plugin holds the first pods of a group for the others."""
UNCHANGED_SECONDS = 3.0 * PERMIT_SECONDS
"""The scheduler has tried again by then."""


@pytest.fixture
async def nodes(api: Any, namespace: str) -> AsyncIterator[Nodes]:
    made = Nodes(api, namespace, resource=SLOT)
    heartbeats = asyncio.create_task(made.keep_ready())
    yield made
    heartbeats.cancel()
    await made.delete()


@pytest.fixture
def coscheduling(control_plane: LocalCluster, tmp_path: Path) -> Iterator[None]:
    """kube-scheduler with the coscheduling plugin, for pods that name it."""
    program = built_program(SCHEDULER_PLUGINS, "./cmd/scheduler")
    control_plane.run_kubectl("apply", "--server-side", "-f", str(module_directory(SCHEDULER_PLUGINS) / POD_GROUP_CRD))
    wait_until_served(control_plane, POD_GROUP)
    plugin = {"name": "Coscheduling"}
    profile = {
        "schedulerName": COSCHEDULER,
        "plugins": {
            "multiPoint": {"enabled": [plugin]},
            "queueSort": {"enabled": [plugin], "disabled": [{"name": "*"}]},
        },
        "pluginConfig": [{**plugin, "args": {"permitWaitingTimeSeconds": PERMIT_SECONDS}}],
    }
    with running_scheduler(control_plane, tmp_path, program=program, profile=profile):
        yield
    control_plane.run_kubectl("delete", "crd", f"{POD_GROUP.plural}.{POD_GROUP.group}")


@pytest.fixture
def scheduler(control_plane: LocalCluster, tmp_path: Path) -> Iterator[None]:
    """kube-scheduler as a cluster has it."""
    with running_scheduler(control_plane, tmp_path):
        yield


def engines_of_two(**engine: Any) -> dict[str, Any]:
    """Return a spec whose engines have two pods, each of which takes a slot."""
    template = engine.pop("podTemplate", {})
    containers = [{"name": "engine", "resources": {"limits": {SLOT: "1"}}}]
    pod_template = {**template, "spec": {**template.get("spec", {}), "containers": containers}}
    return {"parallelism": {"pipeline": 2}, "engine": {"ranksPerPod": 1, "podTemplate": pod_template, **engine}}


async def placed(api: Any, namespace: str) -> dict[str, list[str]]:
    """Return the nodes of the scheduled pods of each engine with a pod."""
    found: dict[str, list[str]] = {}
    for pod in await api.list(POD, namespace, selector=f"{LABEL_COMPONENT}={ENGINE}"):
        of_engine = found.setdefault(pod["metadata"]["labels"][LABEL_ENGINE], [])
        of_engine += [pod["spec"]["nodeName"]] if "nodeName" in pod["spec"] else []
    return found


async def becomes_and_stays(api: Any, namespace: str, holds: Callable[[list[int]], bool], what: str) -> dict[str, Any]:
    """Wait until `holds` is true of the sorted numbers of scheduled pods of each engine, and stays true."""

    async def reached() -> bool:
        return holds(sorted(map(len, (await placed(api, namespace)).values())))

    await eventually(reached, what=what)
    end = asyncio.get_running_loop().time() + UNCHANGED_SECONDS
    while asyncio.get_running_loop().time() < end:
        assert await reached(), f"not any more: {what}; {await placed(api, namespace)}"
        await asyncio.sleep(0.5)
    return await placed(api, namespace)


async def unschedulable(resource: Any) -> str:
    """Return the message of the condition Degraded once its reason is Unschedulable."""
    status = await resource.until(lambda status: condition(status, "Degraded").get("reason") == "Unschedulable")
    return str(condition(status, "Degraded")["message"])


async def test_an_engine_waits_until_all_its_pods_have_room(
    resource: Any, operator: Any, node: Any, api: Any, nodes: Nodes, coscheduling: None
) -> None:
    node.start_engines = False
    for index in range(2):
        group = {"apiVersion": POD_GROUP.api_version, "kind": POD_GROUP.kind, "spec": {"minMember": 2}}
        metadata = {"name": f"demo-engine-{index}", "namespace": resource.namespace}
        await api.create(POD_GROUP, {**group, "metadata": metadata}, manager="test")
    template = {
        "metadata": {"labels": {"scheduling.x-k8s.io/pod-group": "$(ENGINE_NAME)"}},
        "spec": {"schedulerName": COSCHEDULER},
    }
    await nodes.set(1, place="one")
    await resource.create(replicas=2, **engines_of_two(podTemplate=template))
    print(f"\n1 slot: {await unschedulable(resource)}")
    found = await becomes_and_stays(
        api, resource.namespace, lambda counts: counts == [0, 0], "no pod is scheduled in the room of one"
    )
    print(f"1 slot: {found}")
    await nodes.set(3, place="one")
    found = await becomes_and_stays(
        api, resource.namespace, lambda counts: counts == [0, 2], "one engine is scheduled in the room of three pods"
    )
    print(f"3 slots: {found}")
    await nodes.set(1, place="two")
    found = await becomes_and_stays(
        api, resource.namespace, lambda counts: counts == [2, 2], "both engines are scheduled in the room of four pods"
    )
    print(f"4 slots on two nodes: {found}")


async def test_the_pods_of_an_engine_share_a_rack_or_wait(
    resource: Any, operator: Any, node: Any, api: Any, nodes: Nodes, scheduler: None
) -> None:
    node.start_engines = False
    for rack in ("a", "b"):
        await nodes.set(1, rack=rack, place="one")
    await resource.create(replicas=1, **engines_of_two(topology={"packBy": RACK}))
    message = await unschedulable(resource)
    assert "spec.engine.topology.packBy" in message
    assert "didn't match pod affinity rules" in message
    found = await becomes_and_stays(
        api, resource.namespace, lambda counts: counts == [1], "the second pod waits while its rack has no room"
    )
    print(f"\n1 slot in each rack: {found}; {message}")
    for rack in ("a", "b"):
        await nodes.set(1, rack=rack, place="two")
    found = await becomes_and_stays(
        api, resource.namespace, lambda counts: counts == [2], "both pods are scheduled when a node joins the rack"
    )
    print(f"2 slots in each rack: {found}")
    racks = {name.split("-")[-2] for name in found["demo-engine-0"]}
    assert len(racks) == 1
    assert len(set(found["demo-engine-0"])) == 2
