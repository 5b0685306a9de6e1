"""The limit of concurrent updates of the resources of one operator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from megatron_operator.cluster.projection import SeenResource
from megatron_operator.resource.states import UpdatePhase


class UpdateLimit:
    """Counts the resources that are being updated. A resource holds its place as long as its status says Running.

    The caller asks may_begin(), decides, and calls decided() without an await in between, so that two resources cannot
    take one place.

    limit: number of places. resources: all resources as the watch has shown them, by UID. They are counted until their
        tasks have decided for the first time: a new leader continues the updates that have begun.
    """

    def __init__(self, limit: int, resources: Callable[[], Mapping[str, Iterable[SeenResource]]]) -> None:
        self._limit = limit
        self._resources = resources
        self._phases: dict[str, str] = {}
        self._waiting: dict[str, Callable[[], None]] = {}

    def may_begin(self, uid: str) -> bool:
        """Return whether a place is free for this resource, or taken by it."""
        shown = {
            other: _phase(seen.status)
            for other, versions in self._resources().items()
            for seen in versions
            if other not in self._phases
        }
        running = [other for other, phase in {**shown, **self._phases}.items() if phase == UpdatePhase.RUNNING]
        return uid in running or len(running) < self._limit

    def decided(self, uid: str, status: Mapping[str, object], *, wake: Callable[[], None]) -> None:
        """Record the decided status of a resource. wake: called when a place becomes free, if the resource waits."""
        phase = _phase(status)
        if phase == UpdatePhase.WAITING:
            self._waiting[uid] = wake
        else:
            self._waiting.pop(uid, None)
        self._changed(uid, phase)

    def ended(self, uid: str) -> None:
        """Record that a resource is deleted, or that its task ended."""
        self._waiting.pop(uid, None)
        self._changed(uid, "")
        self._phases.pop(uid, None)

    def _changed(self, uid: str, phase: str) -> None:
        before, self._phases[uid] = self._phases.get(uid, ""), phase
        if before == UpdatePhase.RUNNING and phase != before:
            for wake in self._waiting.values():
                wake()


def _phase(status: Mapping[str, object]) -> str:
    update = status.get("update")
    return str(update.get("phase", "")) if isinstance(update, Mapping) else ""
