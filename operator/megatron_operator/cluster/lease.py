"""Leader election by a Lease. Each acquisition increments the term, from which the fences of signals are computed.

Safety does not depend on synchronised clocks. A holder treats its lease as lost `renew_deadline` after the *start* of
the last renewal. A challenger treats the lease as free `duration` after it last *observed* a change. Both use their own
monotonic clock. Each acquisition raises the term by one with a compare-and-swap, and the term never decreases while the
Lease exists. A coordinator that has received a signal of a new leader therefore rejects all later signals of the old
leader. Nothing that a coordinator reports changes the term.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TypeVar

from megatron_operator.cluster.api import KubeApi, KubeApiError, Object
from megatron_operator.cluster.kinds import LEASE
from megatron_operator.cluster.projection import version_of
from megatron_operator.resource.names import (
    FIELD_MANAGER,
    NAMESPACES_ANNOTATION,
    SUCCESSOR_ANNOTATION,
    TERM_ANNOTATION,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_TERM = 1 << 32
"""Highest valid term of a Lease. Counting acquisitions never reaches this number."""


class LeadershipLostError(RuntimeError):
    """This process is no longer the leader and must exit, because another leader may already be writing."""


@dataclass(frozen=True, slots=True)
class LeaseSettings:
    namespace: str
    name: str
    identity: str
    """Identity of this process. If the Lease names the same identity, the same pod has restarted and its previous
    process has ended, so this process may take over immediately.
    """
    duration: float = 10.0
    """Seconds without a renewal after which the lease is free."""

    namespaces: tuple[str, ...] = ()
    """Namespaces that the holder serves; empty means all. Only readers of the Lease use this field."""

    former: str = ""
    """Name of the Lease that earlier releases used; empty if there is none. If this Lease exists, the operator holds it
    too, so that an operator of an earlier release does not lead at the same time. The operator leads without the former
    Lease if an operator with another Lease name holds it.
    """
    successor: str = ""
    """Name of the operator's main Lease, if these are the settings of the former Lease; otherwise empty."""

    @property
    def renew_interval(self) -> float:
        return self.duration / 5

    @property
    def renew_deadline(self) -> float:
        """Seconds from the start of a renewal until the holder treats its Lease as lost, unless it renews again.

        The value is `duration` minus a margin that exceeds the request timeout.
        """
        return self.duration * 2 / 3

    @property
    def request_timeout(self) -> float:
        return self.duration / 4


class Elector:
    """A participant in the leader election, which acquires, renews and releases one Lease."""

    def __init__(self, api: KubeApi, settings: LeaseSettings, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._api = api
        self._settings = settings
        self._clock = clock
        self._lease: Object | None = None
        self._trusted_until = float("-inf")
        self._seen: tuple[object, float] | None = None
        self._swap = asyncio.Lock()
        self._former: Elector | None = None
        if settings.former not in ("", settings.name):
            former = replace(settings, name=settings.former, former="", successor=settings.name)
            self._former = Elector(api, former, clock=clock)
        self.term = 0
        self.waits_for: tuple[str, str] | None = None
        """The Lease for which this process waits, and the identity of the holder; None while this process leads."""

    @property
    def leading(self) -> bool:
        return self.seconds_left > 0

    @property
    def seconds_left(self) -> float:
        """Remaining validity of the last renewal, in seconds; negative if it has expired."""
        left = self._trusted_until - self._clock()
        return left if self._former is None or not self._former.term else min(left, self._former.seconds_left)

    def require_leadership(self) -> None:
        """Raise an error if this process does not lead. Call this method before every write and signal.

        Raises:
            LeadershipLostError: the last renewal has expired.
        """
        if not self.leading:
            raise LeadershipLostError(
                f"lease {self._settings.name}: not renewed for {self._settings.renew_deadline:g} s"
            )

    def write_seconds(self) -> float:
        """Return the timeout of a write, in seconds. When it has passed, another process may lead.

        Raises:
            LeadershipLostError: the last renewal has expired.
        """
        self.require_leadership()
        return self.seconds_left + self._settings.duration - self._settings.renew_deadline

    async def acquire(self) -> int:
        """Wait until this process leads. Return the leader term."""
        while True:
            try:
                if await self._holds_former() and await self._try_acquire():
                    self.waits_for = None
                    logger.info("leading", extra={"term": self.term, "identity": self._settings.identity})
                    return self.term
            except (KubeApiError, LeadershipLostError) as error:
                logger.warning("lease not acquired", extra={"error": str(error)})
            await asyncio.sleep(self._settings.renew_interval)

    async def hold(self) -> None:
        """Renew the lease until renewals have failed for `renew_deadline`. Then raise LeadershipLostError."""
        while True:
            await asyncio.sleep(self._settings.renew_interval)
            try:
                await self._renew()
                if self._former is not None and self._former.term:
                    await self._former._renew()
            except KubeApiError as error:
                logger.warning("lease not renewed", extra={"error": str(error), "seconds_left": self.seconds_left})
            self.require_leadership()

    async def release(self) -> None:
        """Try to release the lease, so that a successor need not wait for it to expire. Failures are ignored."""
        if not self.leading or self._lease is None:
            return
        if self._former is not None:
            await self._former.release()
        self._trusted_until = float("-inf")
        body = self._body(self._lease, holder="", term=self.term, renewed=_now(), acquired=_now())
        try:
            await self._in_time(self._api.replace(LEASE, body, manager=FIELD_MANAGER))
        except KubeApiError as error:
            logger.warning("lease not released; it expires by itself", extra={"error": str(error)})

    async def _in_time(self, request: Awaitable[T]) -> T:
        """Return the response to a request. Raises KubeApiError if the request takes longer than `request_timeout`."""
        try:
            async with asyncio.timeout(self._settings.request_timeout):
                return await request
        except TimeoutError:
            raise KubeApiError(0, "Timeout", f"lease {self._settings.name}: no answer in time") from None

    async def _holds_former(self) -> bool:
        """Acquire or renew the former Lease, which earlier releases used.

        Return whether this process may lead. It may lead if it holds the former Lease, or if this Lease does not exist.
        It may also lead if an operator with another Lease name holds the former Lease.
        """
        former = self._former
        if former is None:
            return True
        if former.leading:
            await former._renew()
            return True
        lease = await former._get()
        if lease is None:
            return True
        successor = (lease["metadata"].get("annotations") or {}).get(SUCCESSOR_ANNOTATION)
        if not former._is_free(lease) and successor not in (None, self._settings.name):
            return True
        acquired = await former._try_acquire()
        self.waits_for = former.waits_for
        return acquired

    async def _try_acquire(self) -> bool:
        lease = await self._get()
        before = self._former.term if self._former is not None else 0
        if lease is None:
            self._lease = None
            await self._write(term=before + 1)
            return True
        if not self._is_free(lease):
            return False
        self._lease = lease
        try:
            await self._write(term=max(_term(lease), before) + 1)
        except KubeApiError as error:
            if error.conflict:
                return False
            raise
        return True

    def _is_free(self, lease: Object) -> bool:
        spec = lease.get("spec") or {}
        holder = spec.get("holderIdentity") or ""
        if holder in ("", self._settings.identity):
            return True
        self.waits_for = f"{self._settings.namespace}/{self._settings.name}", holder
        mark = (holder, spec.get("renewTime"), lease["metadata"]["resourceVersion"])
        now = self._clock()
        if self._seen is None or self._seen[0] != mark:
            self._seen = (mark, now)
        duration = max(float(spec.get("leaseDurationSeconds") or 0), self._settings.duration)
        return now - self._seen[1] > duration

    async def _renew(self) -> None:
        async with self._swap:
            try:
                await self._write(term=self.term)
            except KubeApiError as error:
                if not (error.conflict or error.not_found):
                    raise
                await self._reread()

    async def _reread(self) -> None:
        """Read the Lease after a failed update, and raise LeadershipLostError unless this process still holds it.

        The API server may have executed the update although this process received an error, because the response may
        have been lost.
        """
        lease = await self._get()
        holder = ((lease or {}).get("spec") or {}).get("holderIdentity")
        if lease is None or holder != self._settings.identity or _term(lease) != self.term:
            self._trusted_until = float("-inf")
            raise LeadershipLostError(f"lease {self._settings.name}: now held by {holder or 'no process'}")
        if self._lease is not None and version_of(lease) < version_of(self._lease):
            # A watch at a future version shows nothing, and known objects would count as newer than the existing ones.
            self._trusted_until = float("-inf")
            raise LeadershipLostError(
                f"lease {self._settings.name}: its version decreased, so etcd was restored: reading everything again"
            )
        self._lease = lease

    async def _get(self) -> Object | None:
        return await self._in_time(self._api.get(LEASE, self._settings.namespace, self._settings.name))

    async def _write(self, *, term: int) -> None:
        """Make this process the holder of the Lease, if no other process has changed the Lease since it was read.

        The renewal is valid from the time when the request was sent.
        """
        began = self._clock()
        renewing = self._lease is not None and term == self.term
        acquired = self._lease["spec"].get("acquireTime") if renewing and self._lease else _now()
        body = self._body(self._lease, holder=self._settings.identity, term=term, renewed=_now(), acquired=acquired)
        write = self._api.replace if self._lease is not None else self._api.create
        self._lease = await self._in_time(write(LEASE, body, manager=FIELD_MANAGER))
        self.term = term
        self._trusted_until = began + self._settings.renew_deadline

    def _body(self, lease: Object | None, *, holder: str, term: int, renewed: str, acquired: object) -> Object:
        old = (lease or {}).get("spec") or {}
        changed = bool(holder) and old.get("holderIdentity") != holder
        metadata: Object = {"namespace": self._settings.namespace, "name": self._settings.name}
        if lease is not None:
            metadata["resourceVersion"] = lease["metadata"]["resourceVersion"]
            metadata["labels"] = lease["metadata"].get("labels") or {}
        kept = (lease or {}).get("metadata", {}).get("annotations") or {}
        served = {NAMESPACES_ANNOTATION: ",".join(self._settings.namespaces)} if self._settings.namespaces else {}
        others = {key: value for key, value in kept.items() if key != NAMESPACES_ANNOTATION}
        successor = {SUCCESSOR_ANNOTATION: self._settings.successor} if self._settings.successor else {}
        metadata["annotations"] = {**others, TERM_ANNOTATION: str(term), **served, **successor}
        spec = {
            "holderIdentity": holder,
            "leaseDurationSeconds": max(1, round(self._settings.duration)),
            "acquireTime": acquired,
            "renewTime": renewed,
            "leaseTransitions": int(old.get("leaseTransitions") or 0) + changed,
        }
        return {"apiVersion": LEASE.api_version, "kind": LEASE.kind, "metadata": metadata, "spec": spec}


def _term(lease: Object) -> int:
    annotations = lease["metadata"].get("annotations") or {}
    stored = annotations.get(TERM_ANNOTATION) or (lease.get("spec") or {}).get("leaseTransitions") or 0
    try:
        term = int(stored)
    except ValueError:
        term = -1
    if 0 <= term <= MAX_TERM:
        return term
    logger.warning("the term of the lease is invalid; counting restarts", extra={"term": str(stored)[:80]})
    return 0


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
