"""A resource from apply to Running and through every verb, with a real coordinator and real engine processes."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.cluster

CHILDREN = {
    "Deployment demo-coordinator",
    "Deployment demo-server",
    "StatefulSet demo-engine-0",
    "Service demo",
    "Service demo-coordinator",
    "Service demo-engine-0",
    "Secret demo-keys",
    "ServiceAccount demo",
    "PodDisruptionBudget demo-engines",
    "PodDisruptionBudget demo-server",
    "NetworkPolicy demo-coordinator",
    "NetworkPolicy demo-engine-0",
    "NetworkPolicy demo-engines",
    "NetworkPolicy demo-server",
}
ROUND = ("Running", "Paused", "Suspended", "Running", "Stopped", "Running")


async def test_apply_then_every_verb(resource: Any, operator: Any, node: Any) -> None:
    created = await resource.create()
    await resource.settled("Running")

    children = await resource.children()
    hashed = {name for name in children if name.startswith(("ConfigMap demo-config-", "ControllerRevision demo-rev-"))}
    assert len(hashed) == 2
    assert set(children) - hashed == CHILDREN
    for child in children.values():
        (owner,) = child["metadata"]["ownerReferences"]
        assert (owner["uid"], owner["controller"]) == (created["metadata"]["uid"], True)
        assert "finalizers" not in child["metadata"]

    for state in ROUND[1:]:
        await resource.patch(desiredState=state)
        status = await resource.settled(state)
        assert status["ready"] == ("1/1" if state != "Stopped" else "0/1")
        stored = (await resource.children())["StatefulSet demo-engine-0"]
        assert stored["spec"]["replicas"] == (0 if state == "Stopped" else 1)

    history = (await resource.status())["history"]
    assert [entry["to"] for entry in history] == list(ROUND)
    assert {entry["by"] for entry in history} == {"test"}
    await resource.reported("Pausing", "Paused", "Suspended", "Unpausing", "Running", "Stopping", "Stopped")
    sent = [line["signal"] for line in operator.lines("signal sent")]
    assert sent == ["PAUSE", "SUSPEND", "RESUME", "UNPAUSE", "DRAIN", "PAUSE", "STOP"]
    found = await resource.get()
    assert "finalizers" not in found["metadata"]
    assert "annotations" not in found["metadata"]


async def test_scale_up_down_and_to_zero(resource: Any, operator: Any, node: Any, kubectl: Any) -> None:
    await resource.create(replicas=2)
    status = await resource.settled("Running")
    assert (status["ready"], status["replicas"]) == ("2/2", 2)
    assert [engine["name"] for engine in status["engines"]] == ["demo-engine-0", "demo-engine-1"]

    before = (await resource.children())["StatefulSet demo-engine-0"]
    await resource.patch(model={"adapters": [{"name": "sql", "source": {"huggingFace": {"repo": "org/sql"}}}]})
    await resource.until(lambda status: [each["engines"] for each in status.get("adapters", ())] == [2])
    after = (await resource.children())["StatefulSet demo-engine-0"]
    assert after["metadata"]["generation"] == before["metadata"]["generation"], "an adapter restarts no engine"

    scaled = kubectl("scale", "mi/demo", "--replicas=1")
    assert scaled.returncode == 0, scaled.stderr
    await resource.until(lambda status: status.get("ready") == "1/1" and len(status["engines"]) == 1)
    assert "StatefulSet demo-engine-1" not in await resource.children()
    drained = operator.lines("signal sent")
    assert [line["signal"] for line in drained] == ["SET_ADAPTERS", "DRAIN"]
    await resource.until(lambda status: [each["engines"] for each in status["adapters"]] == [1])

    await resource.patch(replicas=0)
    await resource.released()
    children = await resource.children()
    assert all(child["spec"]["replicas"] == 0 for name, child in children.items() if name.startswith("StatefulSet"))
    assert "Deployment demo-coordinator" in children


async def test_operator_of_all_namespaces_with_the_cluster_role_alone(
    resource: Any, make_operator: Any, cluster_wide: None, node: Any
) -> None:
    operator = make_operator(everywhere=True)
    await operator.start()
    await resource.create()
    await resource.settled("Running")
    await resource.patch(desiredState="Paused")
    await resource.settled("Paused")
    said = [line.lower() for line in operator.log.read_text().splitlines()]
    # The namespaces of earlier tests may still be terminating, and their operators published no Lease.
    of_earlier_tests = ("being terminated", "of its manager cannot be read")
    assert not [line for line in said if "forbidden" in line and not any(words in line for words in of_earlier_tests)]
    assert operator.stop() == 0
