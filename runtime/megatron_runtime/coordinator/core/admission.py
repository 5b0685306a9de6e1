"""Admission of new requests. An ordered list of checks decides whether a request is dispatched, waits or is
rejected.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import TypeAlias

from megatron_runtime.coordinator.core import rejections
from megatron_runtime.coordinator.core.context import Context
from megatron_runtime.coordinator.core.open_requests import Journal, Tenants, WaitingQueue
from megatron_runtime.coordinator.core.records import Entry
from megatron_runtime.coordinator.core.rejections import Rejection
from megatron_runtime.coordinator.core.verbs import Verbs


class Admitted(Enum):
    """How the coordinator handles a request that it accepts."""

    NOW = auto()
    """The request is dispatched immediately, if an engine has capacity."""
    LATER = auto()
    """The request waits in the queue."""


Verdict: TypeAlias = Rejection | Admitted
NOW, LATER = Admitted  # see _RUNNING of records.py


@dataclass(kw_only=True)
class AdmissionControl:
    """The component that decides whether a new request is dispatched immediately, waits, or is rejected.

    fail: ends a waiting request of another tenant with an error, to free capacity for the new request.
    """

    context: Context
    verbs: Verbs
    journal: Journal
    queue: WaitingQueue
    tenants: Tenants
    fail: Callable[[Entry, Rejection], None]

    def decide(self, entry: Entry) -> Verdict:
        """Run the checks of a new request in order, and return the first verdict. Return NOW if all checks pass."""
        for check in CHECKS:
            verdict = check.look(self, entry)
            if verdict is not None:
                return verdict
        return NOW

    # --- checks -------------------------------------------------------------------------------------------------

    def _is_stopped(self, _: Entry) -> Rejection | None:
        if self.context.engines.stopped:
            return rejections.unavailable("stopped")
        if self.context.settings.pause_mode == "Reject" and self.verbs.holds:
            return rejections.unavailable(self.verbs.state.value.lower())
        return None

    def _has_no_adapter(self, entry: Entry) -> Rejection | None:
        return rejections.adapter_changed(entry, self.verbs.adapters) if entry.meta.adapter else None

    def _engine_is_wrong(self, entry: Entry) -> Rejection | None:
        if not entry.meta.engine:
            return None
        return rejections.unpinnable(entry, self.context.engines.named(entry.meta.engine), self.verbs.may_dispatch)

    def _is_unsupported(self, entry: Entry) -> Rejection | None:
        engines = self.context.engines
        if not (entry.meta.needs or engines.has_pooling) or not self.verbs.may_dispatch:
            return None
        return rejections.unsupported(entry, engines.serving())

    def _queue_is_full(self, entry: Entry) -> Rejection | None:
        waiting = self.queue.length
        if waiting < self.context.settings.max_queued or self._drop_for(entry, by_bytes=False):
            return None
        return rejections.full(f"{waiting} requests wait for an engine already")

    def _journal_is_full(self, entry: Entry) -> Rejection | None:
        journal = self.journal
        while not journal.fits(entry):
            if not self._drop_for(entry, by_bytes=True):
                return rejections.full(f"open requests take {journal.bytes} bytes of {journal.limit_bytes}")
        return None

    def _must_wait(self, entry: Entry) -> Admitted | None:
        waits = not entry.meta.engine and (self.queue.length or not self.verbs.may_dispatch)
        return LATER if waits else None

    def _drop_for(self, entry: Entry, *, by_bytes: bool) -> bool:
        """Free capacity for `entry` by rejecting the last waiting request of the tenant that uses most capacity.

        Return whether a request was rejected. Nothing is rejected if the tenant would then use less capacity than the
        tenant of `entry`, or if all the tenant's waiting requests have generated tokens.

        by_bytes: compare tenants by the bytes of their open requests, not by the number of waiting requests.
        """
        heaviest = max(
            self.tenants, key=lambda tenant: tenant.open_bytes if by_bytes else tenant.num_waiting, default=None
        )
        last = heaviest.last_waiting() if heaviest is not None else None
        if heaviest is None or last is None:
            return False
        if by_bytes:
            is_fair = heaviest.open_bytes - last.admitted_bytes >= entry.tenant.open_bytes + entry.admitted_bytes
        else:
            is_fair = heaviest.num_waiting > entry.tenant.num_waiting + 1
        if is_fair:
            self.fail(last, rejections.full("the coordinator is full and other tenants have fewer requests"))
        return is_fair


@dataclass(frozen=True, slots=True)
class AdmissionCheck:
    """A check of new requests, which can prevent the immediate dispatch of a request.

    look: returns the verdict on a request, or None if the request passes the check.
    """

    name: str
    look: Callable[[AdmissionControl, Entry], Verdict | None]


CHECKS = (
    AdmissionCheck("the engines are stopped", AdmissionControl._is_stopped),
    AdmissionCheck("its adapter is not in the list", AdmissionControl._has_no_adapter),
    AdmissionCheck("its only engine may not answer it", AdmissionControl._engine_is_wrong),
    AdmissionCheck("no engine supports its parameters", AdmissionControl._is_unsupported),
    # These two may end the request of another tenant, so they come after all checks that concern only this request.
    AdmissionCheck("the queue is full", AdmissionControl._queue_is_full),
    AdmissionCheck("the journal is full", AdmissionControl._journal_is_full),
    AdmissionCheck("other requests wait, or no engine may be given one", AdmissionControl._must_wait),
)
"""The checks of a new request, in order."""
