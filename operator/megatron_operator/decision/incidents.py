"""Unplanned container restarts: one Event for each incident of a component, with its cause and its counts.

The operator replaces pods and never restarts their containers, so every restart that a kubelet counts is a crash. An
incident starts with the first restart. It is reported after a few seconds, when the other ranks and engines that the
same cause has ended are counted too. Later restarts within the window belong to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from megatron_operator.decision.diagnosis import termination
from megatron_operator.decision.world import EmitEvent, PodView
from megatron_operator.resource.names import COORDINATOR, ENGINE, SERVER, STANDBY
from megatron_operator.resource.text import seconds_since, stamp

COMPONENTS = (COORDINATOR, ENGINE, SERVER)
PODS = {COORDINATOR: (COORDINATOR, STANDBY), ENGINE: (ENGINE,), SERVER: (SERVER,)}
"""The values of a pod's component label. A standby counts as a coordinator."""
REPORT_SECONDS = 5.0
"""Time from the first restart to the Event."""
WINDOW_SECONDS = 600.0
"""Length of an incident."""
TOGETHER = timedelta(seconds=60)
"""Containers that ended within this time of each other belong to one incident."""
NAMED = 8
EVENT_REASONS = {COORDINATOR: "CoordinatorCrashed", ENGINE: "EngineCrashed", SERVER: "ServerCrashed"}


@dataclass(frozen=True, slots=True)
class Restarts:
    """The container restarts of one component.

    count: of its current pods. since: start of the incident; None without one. base: restarts before the incident.
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
        """Return the seconds until the incident is reported; None if there is nothing to report."""
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
    """Return the Events of the incidents that are reported now."""
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
        message = f"containers of {', '.join(names[:NAMED])}{more} ended and were restarted, {times} in all; {cause}"
        events.append(EmitEvent("Warning", EVENT_REASONS[component], message))
    return events


def _ended_together(pods: list[PodView]) -> list[PodView]:
    """Return the pods of the last incident, the first to end first. The clocks of nodes are only compared with each
    other."""
    last = max((pod.ended_at for pod in pods if pod.ended_at is not None), default=None)
    if last is None:
        return sorted(pods, key=lambda pod: pod.name)
    near = [pod for pod in pods if pod.ended_at is not None and last - pod.ended_at <= TOGETHER]
    return sorted(near, key=lambda pod: (pod.ended_at or last, pod.name))
