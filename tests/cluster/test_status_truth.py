"""The status says what the coordinator knows: a frozen engine at once, a planned departure never as a loss."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from megatron_operator.cluster.kinds import POD

pytestmark = pytest.mark.cluster


def engines(status: dict[str, Any]) -> list[str]:
    return [entry["state"] for entry in status.get("engines") or ()]


async def test_a_frozen_engine_is_named_and_a_deleted_pod_is_no_loss(
    resource: Any, operator: Any, node: Any, api: Any, namespace: str
) -> None:
    await resource.create(replicas=2)
    await resource.settled("Running")

    node.signal_engine("demo-engine-1", signal.SIGSTOP)
    status = await resource.until(lambda status: engines(status) == ["RUNNING", "Unresponsive"])
    node.signal_engine("demo-engine-1", signal.SIGCONT)
    degraded = next(entry for entry in status["conditions"] if entry["type"] == "Degraded")
    assert (degraded["status"], degraded["reason"]) == ("True", "EngineUnresponsive")
    assert (status["state"], status["ready"]) == ("Running", "1/2")
    await resource.until(lambda status: engines(status) == ["RUNNING", "RUNNING"] and status["ready"] == "2/2")

    for name in ("demo-engine-0-0", "demo-engine-1-0"):
        pod = await api.get(POD, namespace, name)
        await api.delete(POD, namespace, name, uid=pod["metadata"]["uid"])
        await resource.until(lambda status: status["ready"] == "1/2")
        await resource.until(lambda status: status["ready"] == "2/2" and "plan" not in status)
    warnings = {event["reason"] for event in await resource.events() if event["type"] == "Warning"}
    assert warnings == {"EngineUnresponsive"}
