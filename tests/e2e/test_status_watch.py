"""The check of a status against the processes: each false claim is found, and a true status has none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron_operator.resource.names import COORDINATOR, ENGINE, SERVER

from .status_watch import Pod, Probe, false_claims

ENGINE_0 = Pod(ENGINE, "demo-engine-0", "b", leaving=False, probe=Probe.READY)
ENGINE_1 = replace(ENGINE_0, engine="demo-engine-1")
COORDINATOR_POD = Pod(COORDINATOR, "", "", leaving=False, probe=Probe.READY)
SERVER_POD = Pod(SERVER, "", "", leaving=False, probe=Probe.READY)


def status(
    *,
    state: str = "Running",
    ready: int = 2,
    updated: int = 2,
    engines: tuple[str, str] = ("RUNNING", "RUNNING"),
    **conditions: str,
) -> dict[str, Any]:
    held = {"Ready": "True", "EnginesReady": "True", "CoordinatorReady": "True", "Degraded": "False", **conditions}
    return {
        "state": state,
        "ready": f"{ready}/2",
        "readyReplicas": ready,
        "updatedReplicas": updated,
        "revision": "b",
        "engines": [{"name": f"demo-engine-{index}", "state": engine} for index, engine in enumerate(engines)],
        "conditions": [{"type": kind, "status": value, "reason": "Any"} for kind, value in held.items()],
    }


def pods(*engines: Pod, coordinator: Probe = Probe.READY, server: Probe = Probe.READY) -> list[Pod]:
    return [*engines, replace(COORDINATOR_POD, probe=coordinator), replace(SERVER_POD, probe=server)]


def silent(pod: Pod) -> Pod:
    return replace(pod, probe=Probe.SILENT)


ONE_LOST = status(ready=1, engines=("RUNNING", "Unresponsive"), EnginesReady="False", Degraded="True")


@pytest.mark.parametrize(
    ("claimed", "found"),
    [
        (status(), pods(ENGINE_0, ENGINE_1)),
        (ONE_LOST, pods(ENGINE_0, silent(ENGINE_1))),
        # No coordinator: the engines are not ready, and the status keeps them.
        (
            status(state="Unknown", Ready="False", EnginesReady="Unknown", CoordinatorReady="False"),
            pods(
                replace(ENGINE_0, probe=Probe.NOT_READY),
                replace(ENGINE_1, probe=Probe.NOT_READY),
                coordinator=Probe.CLOSED,
            ),
        ),
        # An engine that is replaced still answers.
        (
            status(ready=1, updated=1, EnginesReady="False"),
            pods(ENGINE_0, replace(ENGINE_1, revision="a", leaving=True)),
        ),
    ],
)
def test_a_true_status_has_no_false_claim(claimed: dict[str, Any], found: list[Pod]) -> None:
    assert false_claims(claimed, found) == set()


@pytest.mark.parametrize(
    ("claim", "claimed", "found"),
    [
        ("state Running, and no engine answers", status(), pods(silent(ENGINE_0), silent(ENGINE_1))),
        ("Ready, and no engine answers", status(), pods(silent(ENGINE_0), silent(ENGINE_1))),
        ("Ready, and no server answers", status(), pods(ENGINE_0, ENGINE_1, server=Probe.CLOSED)),
        ("readyReplicas counts an engine that does not answer", status(), pods(ENGINE_0, silent(ENGINE_1))),
        ("readyReplicas omits an engine that is ready", status(ready=1), pods(ENGINE_0, ENGINE_1)),
        (
            "updatedReplicas counts an engine of another revision",
            status(),
            pods(ENGINE_0, replace(ENGINE_1, revision="a")),
        ),
        ("EnginesReady, and an engine does not answer", status(), pods(ENGINE_0)),
        ("CoordinatorReady, and no coordinator answers", status(), pods(ENGINE_0, ENGINE_1, coordinator=Probe.CLOSED)),
        (
            "CoordinatorReady is False, and the coordinator answers",
            status(CoordinatorReady="False"),
            pods(ENGINE_0, ENGINE_1),
        ),
        ("nothing is wrong, and an engine is silent", status(), pods(ENGINE_0, silent(ENGINE_1))),
        ("an engine that does not answer has the state that it reported", status(), pods(ENGINE_0)),
        ("a loss of an engine that is ready", ONE_LOST, pods(ENGINE_0, ENGINE_1)),
    ],
)
def test_a_false_claim_is_found(claim: str, claimed: dict[str, Any], found: list[Pod]) -> None:
    assert claim in false_claims(claimed, found)


def test_tokens_contradict_a_paused_resource() -> None:
    paused = status(state="Paused", engines=("PAUSED", "PAUSED"))
    assert false_claims(paused, pods(ENGINE_0, ENGINE_1)) == set()
    assert false_claims(paused, pods(ENGINE_0, ENGINE_1), generates=True) == {"state Paused, and tokens are generated"}
