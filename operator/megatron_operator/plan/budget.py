"""The restart budget: limit of container restarts of one engine, after which the operator removes its pods.

Restarts are counted from the pods' status. A window starts with the first restart after the previous window. Earlier
restarts do not count, nor do pods of another revision than the spec's, so that a reverted change is not charged. An
engine with an exhausted budget has no pods until the spec changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_operator.plan.clock import seconds_since, stamp
from megatron_operator.plan.diagnosis import first_diagnosis
from megatron_operator.plan.references import references
from megatron_operator.plan.world import PodView, World


@dataclass(frozen=True, slots=True)
class Budget:
    """Restarts of an engine in the current window."""

    restarts: int = 0
    since: str | None = None
    base: int = 0
    exhausted: str | None = None
    """The diagnosis when the budget was exhausted."""

    def to_status(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"restarts": self.restarts}
        if self.since is not None:
            fields["window"] = {"since": self.since, "base": self.base}
        if self.exhausted is not None:
            fields["diagnosis"] = self.exhausted
        return fields


def _previous(world: World, name: str) -> Mapping[str, Any]:
    status = world.resource.status
    if status.get("observedGeneration") != world.resource.generation:
        return {}
    return next((entry for entry in status.get("engines") or () if entry["name"] == name), {})


def engine_budget(world: World, name: str, pods: tuple[PodView, ...], *, revision: str) -> Budget:
    """Return the budget of engine `name`, from its entry in the status and its current pods. A new spec resets it.

    revision: of the spec; every pod counts while it is unknown ("").
    """
    if revision:
        pods = tuple(pod for pod in pods if pod.revision in ("", revision))
    limit = world.resource.spec.lifecycle.restart_budget
    before = _previous(world, name)
    restarts = sum(pod.restarts for pod in pods)
    if before.get("diagnosis"):
        return Budget(restarts=restarts, exhausted=before["diagnosis"])
    window = before.get("window") or {}
    since, base = window.get("since"), int(window.get("base", 0))
    counted = int(before.get("restarts", 0)) if before else restarts
    if restarts < counted:
        # New pods count from zero; an open window stays open.
        base = max(0, base - counted)
    elif restarts > counted and seconds_since(since, world.now) > limit.window_seconds:
        since, base = stamp(world.now), counted
    if since is not None and restarts - base > limit.restarts:
        found = first_diagnosis(pods, references(world.resource.spec))
        words = found[1] if found else f"engine {name} restarted {restarts - base} times"
        return Budget(restarts=restarts, exhausted=f"more than {limit.restarts} restarts in a window; {words}")
    return Budget(restarts=restarts, since=since, base=base)
