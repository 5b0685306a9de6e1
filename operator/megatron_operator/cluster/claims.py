"""Decides which operator manages a resource. The status of a resource names the Lease of its operator.

An operator does not change a resource while another operator renews the Lease that the resource names, or may still
renew it. The operator takes over the resource after it has observed, by its own monotonic clock, that the Lease is not
renewed. If two operators claim a new resource at the same time, both write its status with the same resource version as
a precondition. One of the writes fails. The operator whose write failed then reads the claim of the other operator.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from megatron_operator.cluster.api import KubeApi, KubeApiError
from megatron_operator.cluster.kinds import LEASE

logger = logging.getLogger(__name__)

ABANDONED_DURATIONS = 3
"""A Lease is abandoned if it was not renewed for its duration times this factor. The holder's own standby leads after
one duration.
"""
READ_SECONDS = 3.0
"""Interval at which the Lease of another operator is read. The read serves all resources of that operator."""
DEFAULT_DURATION = 10.0


@dataclass(slots=True)
class _Lease:
    """What this process has observed about one Lease."""

    mark: object
    """A value that changes with each renewal of the Lease."""
    since: float
    """Time when this operator first observed the mark."""
    read: float
    duration: float = DEFAULT_DURATION
    error: str = ""
    """Why the Lease cannot be read."""
    holder: str = ""


class Claims:
    """What this operator has observed about the Leases that resources name in `status.manager`.

    own: namespace and name of this operator's Lease, as in `status.manager`.
    """

    def __init__(self, api: KubeApi, *, own: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.own = own
        self._api = api
        self._clock = clock
        self._leases: dict[str, _Lease] = {}
        self._reading = asyncio.Lock()

    async def other(self, manager: str) -> str:
        """Return why another operator manages, or may manage, a resource, as text for messages.

        Returns "" if this operator may manage the resource.

        manager: the Lease that the status of the resource names.

        Raises:
            KubeApiError: the Lease cannot be read now.
        """
        if manager in ("", self.own):
            return ""
        async with self._reading:
            lease = await self._read(manager)
        if lease is None:
            return ""
        if lease.error:
            return (
                f"Lease {manager} of its manager cannot be read ({lease.error}); let this operator get it, or remove "
                "status.manager from the resource"
            )
        if self._clock() - lease.since > ABANDONED_DURATIONS * lease.duration:
            return ""
        return f"it is managed by {lease.holder or 'an operator'} with Lease {manager}"

    async def _read(self, manager: str) -> _Lease | None:
        """Read the Lease `manager`, and return what this process knows about it. Returns None if it does not exist."""
        now, known = self._clock(), self._leases.get(manager)
        if known is not None and now - known.read < READ_SECONDS:
            return known
        namespace, _, name = manager.partition("/")
        try:
            lease = await self._api.get(LEASE, namespace, name)
        except KubeApiError as error:
            if not error.permanent:
                raise
            self._leases[manager] = _Lease(None, now, now, error=error.message or str(error))
            return self._leases[manager]
        if lease is None:
            self._leases.pop(manager, None)
            return None
        spec = lease.get("spec") or {}
        mark = (spec.get("holderIdentity"), spec.get("renewTime"), lease["metadata"]["resourceVersion"])
        since = known.since if known is not None and known.mark == mark else now
        duration = float(spec.get("leaseDurationSeconds") or DEFAULT_DURATION)
        self._leases[manager] = _Lease(mark, since, now, duration=duration, holder=str(mark[0] or ""))
        return self._leases[manager]
