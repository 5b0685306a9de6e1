"""Engines that are lost, and engines that no coordinator knows. Pure."""

from __future__ import annotations

from megatron_operator.model.conditions import ConditionType, Reason
from megatron_operator.model.states import DesiredState
from megatron_operator.plan.engine_view import EngineView
from megatron_operator.plan.scene import LOST, REPORTED_STATES, UNKNOWN, UNRESPONSIVE, Scene
from megatron_operator.plan.world import LOST_SECONDS, UNKNOWN_SECONDS


def is_lost(scene: Scene, engine: EngineView) -> bool:
    """Return whether an engine has left its coordinator although no pod of it is being replaced."""
    world = scene.world
    if not world.membership_known or engine.report is not None or scene.desired is DesiredState.STOPPED:
        return False
    if not engine.whole:
        return False
    # After the loss of a coordinator, engines that did not register while the next one recovered are lost too.
    state = scene.engine_status(engine.name).get("state")
    known = state in (UNRESPONSIVE, LOST) or (state == UNKNOWN and reports_lost_coordinator(scene))
    return known or world.unregistered_seconds.get(engine.name, 0.0) >= LOST_SECONDS


def lost_in(scene: Scene) -> float | None:
    """Return the seconds until the next engine that is not registered is lost; None if none is about to be."""
    waits = [LOST_SECONDS - seconds for seconds in scene.world.unregistered_seconds.values()]
    return min((left for left in waits if left > 0), default=None)


def reports_lost_coordinator(scene: Scene) -> bool:
    """Return whether the status reports the loss of the coordinator."""
    wanted = (ConditionType.DEGRADED.value, "True", Reason.COORDINATOR_UNREACHABLE.value)
    found = scene.status.get("conditions") or ()
    return any((entry["type"], entry["status"], entry["reason"]) == wanted for entry in found)


def is_unknown(scene: Scene, engine: EngineView) -> bool:
    """Return whether an engine has served, its pods still run, and no coordinator has known it for a while."""
    if scene.world.membership_known or engine.serving or scene.serves(engine) or not engine.whole:
        return False
    return scene.engine_status(engine.name).get("state") in (*REPORTED_STATES, UNKNOWN)


def unknown_in(scene: Scene) -> float | None:
    """Return the seconds until engines no longer count as before the loss of the coordinator; None if none does."""
    if scene.world.membership_known or not any(scene.serves(engine) for engine in scene.engines):
        return None
    return UNKNOWN_SECONDS - scene.world.coordinator.unknown_seconds
