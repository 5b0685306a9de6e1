"""A changed template replaces the engines one by one, by ControllerRevisions, with real engine processes."""

from __future__ import annotations

from typing import Any

import pytest

from .conftest import condition

pytestmark = pytest.mark.cluster


def revisions(children: dict[str, Any]) -> set[str]:
    return {name for name in children if name.startswith("ControllerRevision demo-rev-")}


async def test_rollout_replaces_one_engine_after_another(resource: Any, operator: Any, node: Any) -> None:
    await resource.create(replicas=2)
    first = await resource.settled("Running")
    (before,) = revisions(await resource.children())
    assert before.endswith(first["revision"])

    await resource.patch(engine={"batching": {"maxRequests": 7}})
    status = await resource.until(
        lambda status: (
            status["revision"] != first["revision"] and status["updatedReplicas"] == 2 and "plan" not in status
        )
    )
    assert status["ready"] == "2/2"
    assert {engine["revision"] for engine in status["engines"]} == {status["revision"]}
    assert all(engine["canary"] == "Passed" for engine in status["engines"])
    drained = [line["signal"] for line in operator.lines("signal sent")]
    assert drained == ["DRAIN", "DRAIN"]
    events = await resource.reported("EngineReplaced", "EngineReplaced")
    replaced = [event["note"] for event in events if event["reason"] == "EngineReplaced"]
    assert [note.split()[0] for note in replaced] == ["demo-engine-1", "demo-engine-0"]
    (after,) = revisions(await resource.children())
    assert after.endswith(status["revision"])


async def test_a_model_that_does_not_exist_costs_no_engine_and_its_correction_rolls_out(
    resource: Any, make_operator: Any, node: Any, kubectl: Any
) -> None:
    operator = make_operator("--resync-seconds", "1")
    await operator.start()
    await resource.create(replicas=2)
    first = await resource.settled("Running")
    engines = {name for name in node.containers if node.containers[name].engine}

    await resource.patch(model={"source": {"builtin": "ecco"}})
    blocked = await resource.until(lambda status: condition(status, "Degraded")["reason"] == "WeightsMissing")
    degraded = condition(blocked, "Degraded")
    assert "model 'builtin:ecco' is not built in" in degraded["message"]
    assert blocked["plan"]["waitingOn"].startswith("a change of the spec; the check of revision ")
    await operator.passed(await operator.passes() + 3)
    status = await resource.status()
    assert (status["ready"], condition(status, "Ready")["status"]) == ("2/2", "True")
    assert {name for name in node.containers if node.containers[name].engine} == engines
    assert operator.lines("signal sent") == []

    assert operator.stop() == 0
    await operator.start()
    await operator.passed(3)
    pods = kubectl("get", "pods", "-l", "app.kubernetes.io/component=check", "-o", "name").stdout.split()
    assert pods == [f"pod/demo-check-{blocked['revision']}"]

    await resource.patch(model={"source": {"builtin": "echo"}}, engine={"batching": {"maxRequests": 7}})
    status = await resource.until(
        lambda status: status["revision"] not in (first["revision"], blocked["revision"]) and "plan" not in status
    )
    assert (status["ready"], status["updatedReplicas"]) == ("2/2", 2)
    assert condition(status, "Degraded")["status"] == "False"
    assert kubectl("get", "pods", "-l", "app.kubernetes.io/component=check", "-o", "name").stdout == ""
