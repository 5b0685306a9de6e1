"""Health checks over statuses of the planner: the script of Argo CD, run by Lua 5.1 as in Argo CD, the expressions of
Flux, run by a CEL engine, and the rule of kstatus."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import celpy
import pytest
import yaml
from in_memory_cluster import Cluster
from lupa.lua51 import LuaRuntime

HEALTH = Path(__file__).parents[3] / "manifests/health"
SCRIPT = HEALTH / "argocd.lua"
CEL = celpy.Environment()
(EXPRESSIONS,) = yaml.safe_load((HEALTH / "flux.yaml").read_text())


def argocd(cluster: Cluster, **changes: Any) -> str:
    lua = LuaRuntime(unpack_returned_tuples=True)
    obj = {"metadata": {"generation": cluster.generation}, "status": {**cluster.status, **changes}}
    lua.globals().obj = lua.table_from(obj, recursive=True)
    return str(lua.execute(SCRIPT.read_text())["status"])


def flux(cluster: Cluster, **changes: Any) -> str:
    """Return the status by the expressions, in Flux' order; InProgress if none is true."""
    return evaluate({"metadata": {"generation": cluster.generation}, "status": {**cluster.status, **changes}})


def evaluate(resource: dict[str, Any]) -> str:
    variables = {name: celpy.json_to_cel(value) for name, value in resource.items()}
    for name, result in (("inProgress", "InProgress"), ("failed", "Failed"), ("current", "Current")):
        if CEL.program(CEL.compile(EXPRESSIONS[name])).evaluate(variables):
            return result
    return "InProgress"


def kstatus(cluster: Cluster) -> str:
    """Return the status by kstatus' rule for kinds that it does not know."""
    current = cluster.status["observedGeneration"] == cluster.generation
    return "Current" if current and cluster.condition("Ready")["status"] == "True" else "InProgress"


@pytest.mark.parametrize("state", ["Running", "Paused", "Suspended", "Stopped"])
def test_a_reached_state_is_healthy(make_cluster: Any, state: str) -> None:
    cluster: Cluster = make_cluster()
    cluster.settle()
    cluster.change(desiredState=state)
    assert (argocd(cluster), flux(cluster), kstatus(cluster)) == ("Healthy", "Current", "Current")


def test_a_resource_without_replicas_is_healthy(make_cluster: Any) -> None:
    cluster: Cluster = make_cluster(replicas=0)
    cluster.settle()
    assert (argocd(cluster), flux(cluster), kstatus(cluster)) == ("Healthy", "Current", "Current")


@pytest.mark.parametrize("goal", ["Running", "Paused", "Stopped"])
def test_a_state_that_is_not_reached_is_in_progress(make_cluster: Any, goal: str) -> None:
    cluster: Cluster = make_cluster()
    if goal != "Running":
        cluster.settle()
        cluster.patch(desiredState=goal)
    cluster.step()
    assert (argocd(cluster), flux(cluster), kstatus(cluster)) == ("Progressing", "InProgress", "InProgress")


def test_a_spec_that_was_not_observed_is_in_progress(make_cluster: Any) -> None:
    cluster: Cluster = make_cluster()
    cluster.settle()
    assert argocd(cluster, observedGeneration=cluster.generation - 1) == "Progressing"
    assert flux(cluster, observedGeneration=cluster.generation - 1) == "InProgress"


def test_a_resource_that_no_operator_has_seen_is_in_progress() -> None:
    assert evaluate({"metadata": {"generation": 1}, "status": {}}) == "InProgress"


def test_an_error_is_degraded(make_cluster: Any) -> None:
    cluster: Cluster = make_cluster()
    cluster.broken_engines |= {"demo-engine-0"}
    cluster.play(12)
    assert cluster.condition("Degraded")["status"] == "True"
    assert (argocd(cluster), flux(cluster)) == ("Degraded", "Failed")
