"""Container restarts. Computes the restart budget of each engine, and one Event for each incident of a component.

The operator replaces pods and never restarts their containers, so every restart that a kubelet counts is a crash.

An engine's budget limits its restarts. When it is exhausted, the operator removes the engine's pods. The containers of
all its pods restart together, so the highest restart count of a pod is the number of restarts. Each restart is forgiven
after windowSeconds / restarts. The budget is exhausted while more than `restarts` are not forgiven. Restarts are
forgiven only after the engine has served again, because a kubelet's backoff can take longer than the window. When a
budget begins, earlier restarts do not count. Restarts of pods of a revision other than the spec's do not count either,
so that a reverted change costs nothing.

A failed device exhausts the budget immediately, because a container that restarts keeps its devices. The new pods of
the engine avoid the node of the device for AVOID_SECONDS, counted from their creation.

An engine with an exhausted budget has no pods. If the cause was in the infrastructure, the operator starts the engine
again after a backoff. Otherwise the engine waits for other inputs or for `kubectl megatron restart`, which begin new
budgets (see `Engines.attempt`). desiredState Stopped also begins new budgets.

An incident starts with the first restart of a container of a component. Its Event is written after a few seconds, so
that the Event includes other ranks and engines that exited for the same cause. Later restarts within WINDOW_SECONDS
belong to the same incident.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from megatron_operator.decision.actions import EmitEvent
from megatron_operator.decision.diagnosis import diagnose, is_device_failure, is_rank_lost, termination
from megatron_operator.decision.world import PodView, World
from megatron_operator.resource.conditions import Reason
from megatron_operator.resource.lifecycle import RestartBudget
from megatron_operator.resource.names import COORDINATOR, ENGINE, SERVER, STANDBY
from megatron_operator.resource.states import DesiredState
from megatron_operator.resource.text import parse, seconds_since, stamp

FIRST_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS = 60, 1800
AVOID_SECONDS = 1800
MAX_AVOIDED = 3
"""Maximum number of nodes that an engine avoids. The most recent nodes are kept."""

INFRASTRUCTURE = frozenset(
    {
        Reason.IMAGE_PULL_FAILED,
        Reason.UNSCHEDULABLE,
        Reason.VOLUME_MISSING,
        Reason.DISK_FULL,
        Reason.ACCESS_DENIED,
        Reason.WEIGHTS_MISSING,
        Reason.RENDEZVOUS_FAILED,
        Reason.GPU_DRIVER,
        Reason.GPU_FAILED,
        Reason.GPU_COMMUNICATION,
    }
)
"""Causes that can end without a change of the resource, because nodes recover or a Secret or volume changes."""
NODE_LOST = frozenset(
    {"ContainerStatusUnknown", "Evicted", "NodeLost", "NodeShutdown", "Preempting", "Terminated", "Unknown"}
)
"""Reasons that kubelets and container runtimes give for pods and containers that ended with their node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineBudget:
    """The restart budget of an engine."""

    restarts: int = 0
    """Highest restart count of the containers in any pod of the engine."""
    forgiven_at: str | None = None
    """Time when all incidents are forgiven; None if there was none."""
    incidents: int = 0
    """Number of incidents since the engine last served."""
    retries: int = 0
    """Number of automatic restarts, until all incidents are forgiven."""
    exhausted: str | None = None
    """The diagnosis at the time when the budget was exhausted; None if it is not exhausted."""
    retry_at: str | None = None
    """Time when an exhausted engine is started again automatically; None if never."""
    avoided: tuple[str, ...] = ()
    """Nodes on which a device failed."""
    avoided_until: str | None = None

    def to_status(self) -> dict[str, Any]:
        fields = {
            "forgivenAt": self.forgiven_at,
            "incidents": self.incidents or None,
            "retries": self.retries or None,
            "diagnosis": self.exhausted,
            "retryAt": self.retry_at,
            "avoidedNodes": [*self.avoided] or None,
            "avoidedUntil": self.avoided_until,
        }
        return {"restarts": self.restarts, **{key: value for key, value in fields.items() if value is not None}}


def engine_budget(
    world: World, name: str, pods: tuple[PodView, ...], *, revision: str, attempt: str, served: bool
) -> EngineBudget:
    """Return the restart budget of engine `name`, from its entry in the status and its current pods.

    Args:
        revision: revision of the spec; "" if unknown. The restarts of pods with another revision are not counted.
        attempt: current attempt. Budgets that the status recorded in another attempt do not count.
        served: whether the engine serves, or served in the last pass.
    """
    if revision:
        pods = tuple(pod for pod in pods if pod.revision in ("", revision))
    restarts = max((pod.restarts for pod in pods), default=0)
    status, spec = world.resource.status, world.resource.spec
    entries = status.get("engines") or () if status.get("attempt") == attempt else ()
    before = next((entry for entry in entries if entry["name"] == name), None)
    if before is None or spec.desired_state is DesiredState.STOPPED:
        return EngineBudget(restarts=restarts)
    if before.get("diagnosis"):
        return _exhausted(world, before, restarts)
    budget = EngineBudget(
        restarts=restarts,
        forgiven_at=before.get("forgivenAt"),
        incidents=0 if served else before.get("incidents", 0),
        retries=before.get("retries", 0),
        **avoided_in(before, world.now),
    )
    incidents = restarts - int(before.get("restarts", 0))
    if incidents > 0:
        return _charged(world, name, pods, budget, incidents)
    return budget


def avoided_in(entry: Mapping[str, Any], now: datetime) -> dict[str, Any]:
    """Return the EngineBudget fields with the nodes that an engine avoids, from the engine's entry in the status.

    Returns an empty dictionary if the engine avoids no node now.
    """
    until = parse(entry.get("avoidedUntil"))
    if until is None or until <= now:
        return {}
    return {"avoided": tuple(entry.get("avoidedNodes") or ()), "avoided_until": entry["avoidedUntil"]}


def _exhausted(world: World, before: Mapping[str, Any], restarts: int) -> EngineBudget:
    """Return the restart budget of an engine whose budget is exhausted according to the status.

    If the engine is due to start again, the returned budget lets it start. The next incident then exhausts the budget
    again.
    """
    retry_at, retries = parse(before.get("retryAt")), before.get("retries", 0)
    if retry_at is None or world.now < retry_at:
        return EngineBudget(
            restarts=restarts,
            forgiven_at=before.get("forgivenAt"),
            incidents=before.get("incidents", 0),
            retries=retries,
            exhausted=before["diagnosis"],
            retry_at=before.get("retryAt"),
            **avoided_in(before, world.now),
        )
    limit = world.resource.spec.lifecycle.restart_budget
    forgiven_at = stamp(world.now + timedelta(seconds=limit.window_seconds))
    return EngineBudget(
        restarts=restarts,
        forgiven_at=forgiven_at,
        incidents=max(1, limit.restarts),
        retries=retries + 1,
        **avoided_in(before, world.now),
    )


def _charged(world: World, name: str, pods: tuple[PodView, ...], budget: EngineBudget, incidents: int) -> EngineBudget:
    """Return `budget` after `incidents` further incidents of the engine `name`, whose current pods are `pods`."""
    limit, now = world.resource.spec.lifecycle.restart_budget, world.now
    forgiven_at = parse(budget.forgiven_at)
    fresh = forgiven_at is None or forgiven_at <= now
    begin = now if fresh or forgiven_at is None else forgiven_at
    forgiven_at = begin + incidents * _forgiving(limit)
    total = budget.incidents + incidents
    retries = 0 if fresh and not budget.incidents else budget.retries
    failed = next((pod for pod in pods if is_device_failure(pod)), None)
    tolerated = forgiven_at - now <= limit.restarts * _forgiving(limit) and total <= limit.restarts
    if tolerated and failed is None:
        return replace(budget, forgiven_at=stamp(forgiven_at), incidents=total, retries=retries)
    words, by_infrastructure = (termination(failed)[1], True) if failed is not None else _cause(pods)
    why = (
        f"more than {limit.restarts} restarts" if failed is None else "a GPU failed: the engine gets new pods elsewhere"
    )
    backoff = timedelta(seconds=min(FIRST_BACKOFF_SECONDS << min(retries, 8), MAX_BACKOFF_SECONDS))
    if failed is not None and failed.node:
        nodes = [*(node for node in budget.avoided if node != failed.node), failed.node]
        until = stamp(now + backoff + timedelta(seconds=AVOID_SECONDS))
        budget = replace(budget, avoided=tuple(nodes[-MAX_AVOIDED:]), avoided_until=until)
    return replace(
        budget,
        forgiven_at=stamp(forgiven_at),
        incidents=total,
        retries=retries,
        exhausted=f"{why}; {words or f'engine {name} exited'}",
        retry_at=stamp(now + backoff) if by_infrastructure else None,
    )


def _forgiving(limit: RestartBudget) -> timedelta:
    """Return the time after which the budget forgives one restart."""
    return timedelta(seconds=limit.window_seconds / max(1, limit.restarts))


def _cause(pods: tuple[PodView, ...]) -> tuple[str, bool]:
    """Return the diagnosis of the pods, and whether only the infrastructure is the cause.

    A rank that exited because another rank was lost does not show the cause. If all ranks exited for this reason, the
    pod of the lost rank is gone, for example together with its node. The infrastructure is then the cause.
    """
    lost = [pod for pod in pods if is_rank_lost(pod)]
    found = [(pod, diagnosis) for pod in pods if pod not in lost and (diagnosis := diagnose(pod)) is not None]
    others = [(pod, reason, text) for pod, (reason, text) in found if not _by_infrastructure(pod, reason)]
    if others:
        return others[0][2], False
    if found:
        return found[0][1][1], True
    consequence = next((text for pod in lost if (text := (diagnose(pod) or (None, ""))[1])), "")
    return consequence, bool(lost)


def _by_infrastructure(pod: PodView, reason: Reason) -> bool:
    return reason in INFRASTRUCTURE or pod.reason in NODE_LOST or pod.exit_reason in NODE_LOST


PODS = {COORDINATOR: (COORDINATOR, STANDBY), ENGINE: (ENGINE,), SERVER: (SERVER,)}
"""Values of the component label of each component's pods. A standby counts as a coordinator."""
REPORT_SECONDS = 5.0
"""Time from the first restart of an incident to its Event."""
WINDOW_SECONDS = 600.0
"""Length of an incident."""
TOGETHER = timedelta(seconds=60)
"""Maximum time between the ends of two containers that belong to one incident."""
NAMED = 8
EVENT_REASONS = {COORDINATOR: "CoordinatorCrashed", ENGINE: "EngineCrashed", SERVER: "ServerCrashed"}


@dataclass(frozen=True, slots=True)
class Restarts:
    """The container restarts of one component, and the current incident, which is a period that begins with a restart.

    count: restarts of the component's current pods.
    since: start of the incident; None if there is no incident.
    base:  restarts before the incident.
    """

    component: str
    count: int = 0
    since: str | None = None
    base: int = 0
    reported: bool = False

    def to_status(self) -> dict[str, Any]:
        incident = {"since": self.since, "base": self.base, "reported": self.reported}
        return {"component": self.component, "count": self.count, **(incident if self.since is not None else {})}

    def report_in(self, now: datetime) -> float | None:
        """Return the seconds until the incident is reported. Returns None if there is no incident to report."""
        if self.since is None or self.reported:
            return None
        return REPORT_SECONDS - seconds_since(self.since, now)


def count_restarts(before: Iterable[Mapping[str, Any]], pods: tuple[PodView, ...], now: datetime) -> list[Restarts]:
    """Return the restarts of each component, from `status.restarts` and the current pods."""
    known = {entry["component"]: entry for entry in before}
    return [
        _next(component, known.get(component), sum(pod.restarts for pod in pods if pod.component in of), now)
        for component, of in PODS.items()
    ]


def _next(component: str, before: Mapping[str, Any] | None, count: int, now: datetime) -> Restarts:
    if before is None:
        return Restarts(component, count)
    counted, since, base = int(before["count"]), before.get("since"), int(before.get("base", 0))
    reported = bool(before.get("reported", False))
    if count < counted:
        # New pods count from zero.
        base = max(0, base - (counted - count))
    over = since is not None and reported and seconds_since(since, now) > WINDOW_SECONDS
    if count > counted and (since is None or over):
        return Restarts(component, count, stamp(now), counted)
    found = Restarts(component, count, since, base, reported)
    left = found.report_in(now)
    return Restarts(component, count, since, base, reported=True) if left is not None and left <= 0 else found


def crash_events(
    before: Iterable[Mapping[str, Any]], after: Iterable[Mapping[str, Any]], pods: tuple[PodView, ...]
) -> list[EmitEvent]:
    """Return an Event for each incident that is reported in `after` and was not yet reported in `before`.

    before, after: `status.restarts` before and after this pass.
    """
    reported = {entry["component"] for entry in before if entry.get("reported") and entry.get("since")}
    started = {entry["component"]: entry.get("since") for entry in before}
    events = []
    for entry in after:
        component = entry["component"]
        repeated = component in reported and started.get(component) == entry.get("since")
        ended = _ended_together([pod for pod in pods if pod.component in PODS[component] and pod.restarts])
        if not entry.get("reported") or repeated or not ended:
            continue
        names = sorted({pod.engine or pod.name for pod in ended})
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        count = entry["count"] - entry["base"]
        times = "once" if count == 1 else f"{count} times"
        _, cause = termination(ended[0])
        message = f"containers of {', '.join(names[:NAMED])}{more} crashed and were restarted {times}; {cause}"
        events.append(EmitEvent("Warning", EVENT_REASONS[component], message))
    return events


def _ended_together(pods: list[PodView]) -> list[PodView]:
    """Return the pods of the last incident in the order in which they ended.

    The times are from the clocks of nodes. They are only compared with each other, not with the operator's clock.
    """
    last = max((pod.ended_at for pod in pods if pod.ended_at is not None), default=None)
    if last is None:
        return sorted(pods, key=lambda pod: pod.name)
    near = [pod for pod in pods if pod.ended_at is not None and last - pod.ended_at <= TOGETHER]
    return sorted(near, key=lambda pod: (pod.ended_at or last, pod.name))
