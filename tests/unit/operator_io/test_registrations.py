"""For how long engines have not been registered: after a planned restart of their coordinator, and after its loss."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from megatron_operator.controller.observe import Registrations
from megatron_operator.decision.coordinator_snapshot import CoordinatorSnapshot, EngineReport
from megatron_operator.decision.world import PodView
from megatron_operator.resource.names import COORDINATOR, ENGINE, STANDBY
from megatron_operator.resource.states import CoordinatorState, EngineState

ENGINES = tuple(f"demo-engine-{index}" for index in range(2))
REPORTS = tuple(EngineReport(name, EngineState.RUNNING, "r") for name in ENGINES)
FIRST, SECOND = (
    PodView(name=name, uid=name, component=name, revision="", ready=True) for name in (COORDINATOR, STANDBY)
)
PODS = tuple(
    PodView(name=f"{name}-0", uid=f"{name}-0", component=ENGINE, engine=name, revision="r", ready=True)
    for name in ENGINES
)
BEFORE = CoordinatorSnapshot(reachable=True, incarnation="1", state=CoordinatorState.RUNNING, engines=REPORTS)
RECOVERING = replace(BEFORE, incarnation="2", state=CoordinatorState.RECOVERING, engines=())
AFTER = replace(BEFORE, incarnation="2", engines=REPORTS[:1])


def test_an_engine_that_leaves_is_missing_from_then_on() -> None:
    found = Registrations()
    pods = (FIRST, *PODS)
    assert found.missing(BEFORE, pods, now=10.0) == {}
    left = replace(BEFORE, engines=REPORTS[:1])
    assert found.missing(left, pods, now=11.0) == {ENGINES[1]: 0.0}
    assert found.missing(left, pods, now=13.0) == {ENGINES[1]: 2.0}
    assert found.missing(BEFORE, pods, now=14.0) == {}
    assert found.missing(CoordinatorSnapshot(error="gone"), pods, now=15.0) == {}


def test_an_engine_that_does_not_register_after_the_loss_of_its_coordinator_is_missing_at_once() -> None:
    found = Registrations()
    pods = (FIRST, SECOND, *PODS)
    found.missing(BEFORE, pods, now=10.0)
    assert found.missing(RECOVERING, pods, now=14.0) == {}
    assert found.missing(AFTER, pods, now=16.0) == {ENGINES[1]: math.inf}
    replaced = (*pods[:-1], replace(pods[-1], uid="another"))
    assert found.missing(AFTER, replaced, now=17.0) == {ENGINES[1]: 0.0}


@pytest.mark.parametrize("way", ["deleted", "replaced", "restarted", "not ready", "first contact"])
def test_after_a_planned_restart_of_the_coordinator_the_time_begins_with_its_recovery(way: str) -> None:
    found = Registrations()
    if way != "first contact":
        found.missing(BEFORE, (FIRST, SECOND, *PODS), now=10.0)
    now = {
        "deleted": replace(FIRST, deleting=True),
        "replaced": replace(FIRST, uid="another"),
        "restarted": replace(FIRST, restarts=1),
        "not ready": replace(FIRST, ready=False),
        "first contact": FIRST,
    }[way]
    assert found.missing(RECOVERING, (now, SECOND, *PODS), now=14.0) == {}
    assert found.missing(AFTER, (now, SECOND, *PODS), now=16.0) == {ENGINES[1]: 0.0}
    assert found.missing(AFTER, (now, SECOND, *PODS), now=17.0) == {ENGINES[1]: 1.0}


def test_a_deleted_coordinator_that_answers_until_its_successor_is_ready_is_no_loss() -> None:
    found = Registrations()
    found.missing(BEFORE, (FIRST, *PODS), now=10.0)
    successor = replace(FIRST, uid="another")
    found.missing(BEFORE, (replace(FIRST, deleting=True), successor, *PODS), now=11.0)
    assert found.missing(AFTER, (successor, *PODS), now=14.0) == {ENGINES[1]: 0.0}


def test_the_other_coordinator_of_a_pair_may_be_replaced_before_the_loss() -> None:
    found = Registrations()
    found.missing(BEFORE, (FIRST, SECOND, *PODS), now=10.0)
    successor = replace(SECOND, uid="another")
    found.missing(BEFORE, (FIRST, successor, *PODS), now=11.0)
    assert found.missing(AFTER, (FIRST, successor, *PODS), now=14.0) == {ENGINES[1]: math.inf}
