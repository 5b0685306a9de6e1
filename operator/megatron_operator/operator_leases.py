"""Determines from Leases which operators manage a namespace. All functions are pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from megatron_operator.resource.names import NAMESPACES_ANNOTATION, TERM_ANNOTATION

EXPIRED_DURATIONS = 2
"""A Lease has no working holder if it was not renewed for its duration times this factor."""


@dataclass(frozen=True, slots=True)
class OperatorLease:
    """The Lease of one operator.

    holder:     identity of the leader; empty if the Lease was released.
    renewed:    time of the last renewal, or of the release.
    namespaces: namespaces that the operator serves; empty means all namespaces.
    """

    name: str
    holder: str
    renewed: datetime | None
    duration: timedelta
    namespaces: frozenset[str]

    def serves(self, namespace: str) -> bool:
        return not self.namespaces or namespace in self.namespaces

    def held(self, now: datetime) -> bool:
        return (
            bool(self.holder) and self.renewed is not None and now - self.renewed <= EXPIRED_DURATIONS * self.duration
        )


def operator_leases(items: Sequence[Mapping[str, Any]]) -> list[OperatorLease]:
    """Return the Leases that belong to operators, sorted by name.

    items: all Leases of a cluster.
    """
    leases = []
    for item in items:
        metadata, spec = item["metadata"], item.get("spec") or {}
        annotations = metadata.get("annotations") or {}
        if TERM_ANNOTATION not in annotations:
            continue
        renewed = spec.get("renewTime")
        leases.append(
            OperatorLease(
                name=f"{metadata['namespace']}/{metadata['name']}",
                holder=str(spec.get("holderIdentity") or ""),
                renewed=datetime.fromisoformat(str(renewed).replace("Z", "+00:00")) if renewed else None,
                duration=timedelta(seconds=int(spec.get("leaseDurationSeconds") or 10)),
                namespaces=frozenset(filter(None, annotations.get(NAMESPACES_ANNOTATION, "").split(","))),
            )
        )
    return sorted(leases, key=lambda lease: lease.name)


def operator_problem(leases: Sequence[OperatorLease] | None, namespace: str, now: datetime) -> str | None:
    """Return the problem if no operator runs for a namespace, or if several operators do.

    Returns None if exactly one operator runs.

    leases: Leases of all operators in the cluster; None if the user may not list them.
    now: current time of the API server.
    """
    if leases is None:
        return "it is unknown whether an operator runs: you may not list leases.coordination.k8s.io"
    ours = [lease for lease in leases if lease.serves(namespace)]
    held = [*{lease.holder: lease for lease in ours if lease.held(now)}.values()]  # one may hold a former Lease, too
    if len(held) > 1:
        names = "; ".join(f"Lease {lease.name} is held by {lease.holder}" for lease in held)
        return f"{len(held)} operators serve namespace {namespace}, stop all but one: {names}"
    if held:
        return None
    last = max(ours, key=lambda lease: lease.renewed.timestamp() if lease.renewed else 0.0, default=None)
    if last is None:
        return f"no operator runs for namespace {namespace}: there is no Lease of one; install the operator"
    since = last.renewed.isoformat(timespec="seconds").replace("+00:00", "Z") if last.renewed else "an unknown time"
    how = f"{last.holder} does not renew it" if last.holder else "its holder released it"
    return f"no operator runs for namespace {namespace} since {since}: Lease {last.name} is not held, {how}"
