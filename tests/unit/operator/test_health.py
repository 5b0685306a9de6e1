"""Argo CD's health script, run by Lua 5.1 as in Argo CD, and the rule of kstatus, over statuses of the planner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from in_memory_cluster import Cluster
from lupa.lua51 import LuaRuntime

SCRIPT = Path(__file__).parents[3] / "manifests/health/argocd.lua"


def argocd(cluster: Cluster, **changes: Any) -> str:
    lua = LuaRuntime(unpack_returned_tuples=True)
    obj = {"metadata": {"generation": cluster.generation}, "status": {**cluster.status, **changes}}
    lua.globals().obj = lua.table_from(obj, recursive=True)
    return str(lua.execute(SCRIPT.read_text())["status"])


def kstatus(cluster: Cluster) -> str:
    """Return the status by kstatus' rule for kinds that it does not know."""
    current = cluster.status["observedGeneration"] == cluster.generation
    return "Current" if current and cluster.condition("Ready")["status"] == "True" else "InProgress"


@pytest.mark.parametrize("state", ["Running", "Paused", "Suspended", "Stopped"])
def test_a_reached_state_is_healthy(make_cluster: Any, state: str) -> None:
    cluster: Cluster = make_cluster()
    cluster.settle()
    cluster.patch(desiredState=state)
    cluster.settle()
    assert (argocd(cluster), kstatus(cluster)) == ("Healthy", "Current")


def test_a_resource_without_replicas_is_healthy(make_cluster: Any) -> None:
    cluster: Cluster = make_cluster(replicas=0)
    cluster.settle()
    assert (argocd(cluster), kstatus(cluster)) == ("Healthy", "Current")


@pytest.mark.parametrize("goal", ["Running", "Paused", "Stopped"])
def test_a_state_that_is_not_reached_is_in_progress(make_cluster: Any, goal: str) -> None:
    cluster: Cluster = make_cluster()
    if goal != "Running":
        cluster.settle()
        cluster.patch(desiredState=goal)
    cluster.step()
    assert (argocd(cluster), kstatus(cluster)) == ("Progressing", "InProgress")


def test_a_spec_that_was_not_observed_is_in_progress(make_cluster: Any) -> None:
    cluster: Cluster = make_cluster()
    cluster.settle()
    assert argocd(cluster, observedGeneration=cluster.generation - 1) == "Progressing"


def test_an_error_is_degraded(make_cluster: Any) -> None:
    cluster: Cluster = make_cluster()
    cluster.broken_engines |= {"demo-engine-0"}
    for _ in range(12):
        cluster.step()
        cluster.tick()
    assert cluster.condition("Degraded")["status"] == "True"
    assert argocd(cluster) == "Degraded"
