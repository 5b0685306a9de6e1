"""A changed template replaces the engines one by one, by ControllerRevisions, with real engine processes."""

from __future__ import annotations

from typing import Any

import pytest

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
        lambda status: status["revision"] != first["revision"] and status.get("updatedReplicas") == 2
    )
    assert status["ready"] == "2/2"
    assert {engine["revision"] for engine in status["engines"]} == {status["revision"]}
    assert all(engine["canary"] == "Passed" for engine in status["engines"])
    drained = [line["signal"] for line in operator.lines("signal sent")]
    assert drained == ["DRAIN", "DRAIN"]
    replaced = [event["note"] for event in await resource.events() if event["reason"] == "EngineReplaced"]
    assert [note.split()[0] for note in replaced] == ["demo-engine-1", "demo-engine-0"]
    await resource.until(lambda status: "plan" not in status)
    (after,) = revisions(await resource.children())
    assert after.endswith(status["revision"])
