"""Cache of one resource's objects. It combines the objects in the watches with the responses to this process's writes.

Invariant: the cache is never older than the last write. The cache uses the response to a write until the watch shows
the written version or a newer version. An object that is known to be deleted stays hidden even if the watch missed its
deletion.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from megatron_operator.cluster.kinds import OPTIONAL_KINDS
from megatron_operator.cluster.projection import SeenChild, SeenResource
from megatron_operator.decision.world import ChildRef, ChildView, Contest, PodView
from megatron_operator.resource.names import COORDINATOR, SERVER, STANDBY

Key = tuple[str, str]
"""Namespace and name of a resource."""

_UNWATCHED = frozenset(kind.kind for kind in OPTIONAL_KINDS)
WATCH_LAG_SECONDS = 3.0
"""Time after which the result of a write is read again if the watch has not shown it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """The objects that the watches have shown. The mappings are live views of the stores of `Informers`."""

    children: Mapping[Key, Iterable[SeenChild]]
    pods: Mapping[Key, Iterable[PodView]]
    resources: Mapping[str, Iterable[SeenResource]]
    """The resources, by UID."""


FIGHT_APPLIES = 3
"""Number of applies of one manifest, each undone by another program, after which an object is contested."""
FIGHT_SECONDS = 60.0
"""Time between two applies to a contested object. The contest ends when the object has kept the manifest for twice this
time.
"""


@dataclass(slots=True)
class _Applied:
    uid: str
    owned_fields: str
    manifest: tuple[str, int]
    """Hash of the manifest, and the replicas of a StatefulSet."""
    at: float
    count: int = 1
    """Number of applies of this manifest to this object in short succession."""
    opponent: str = ""
    """The last known field manager that changed the object before one of these applies."""


@dataclass(slots=True)
class _Written:
    child: SeenChild
    at: float
    since: float
    """Time when the object was first missing in the watch. A direct read does not change this time."""


class ResourceCache:
    """Cache of the custom resource, its children and its pods. Only the task of the resource uses this cache."""

    def __init__(self, *, uid: str, key: Key, index: Index, clock: Callable[[], float] = time.monotonic) -> None:
        self._uid = uid
        self._key = key
        self._index = index
        self._clock = clock
        self._resource: SeenResource | None = None
        self._resource_since = 0.0
        self._resource_gone = False
        self._written: dict[ChildRef, _Written] = {}
        self._unwatched: dict[ChildRef, SeenChild] = {}
        self._applied: dict[ChildRef, _Applied] = {}
        self._rolled_out: dict[ChildRef, tuple[str, str, str]] = {}
        """UID, hash and owned fields of each child whose rollout was complete."""
        self._created: dict[str, PodView] = {}
        self._deleted: set[str] = set()
        self._gone: set[str] = set()

    # --- reading ---

    def resource(self) -> SeenResource | None:
        """Return the newest known version of the custom resource, or None if it is deleted."""
        seen = next(iter(self._index.resources.get(self._uid, ())), None)
        if self._resource_gone or seen is None:
            return None
        if self._resource is not None and self._resource.version > seen.version:
            return self._resource
        self._resource = None
        return seen

    def child(self, ref: ChildRef) -> SeenChild | None:
        """Return the newest known version of a child, whether or not the resource owns it.

        Returns None if there is no such child.
        """
        return self._merged().get(ref)

    def views(self) -> dict[ChildRef, ChildView]:
        return {
            ref: replace(
                seen.view,
                owned=seen.may_be_of(self._uid),
                deleting=seen.view.deleting or seen.uid in self._deleted,
                verified=self._is_verified(ref, seen),
                rolled_out=self._is_rolled_out(seen),
            )
            for ref, seen in self._merged().items()
        }

    def _is_rolled_out(self, seen: SeenChild) -> bool:
        """Return whether the rollout of a workload is complete.

        If another program adds an annotation, the workload's generation changes too, but no rollout begins.
        """
        view = seen.view
        kept = (seen.uid, view.hash, view.owned_fields)
        if view.rolled_out:
            self._rolled_out[seen.ref] = kept
        return view.rolled_out or (view.unobserved and self._rolled_out.get(seen.ref) == kept)

    def _is_verified(self, ref: ChildRef, seen: SeenChild) -> bool:
        applied = self._applied.get(ref)
        return applied is not None and (applied.uid, applied.owned_fields) == (seen.uid, seen.view.owned_fields)

    def contests(self) -> dict[ChildRef, Contest]:
        """Return the contested children. Another program reverts each apply of the operator to such a child."""
        now = self._clock()
        return {
            ref: Contest(
                uid=applied.uid,
                hash=applied.manifest[0],
                replicas=applied.manifest[1],
                opponent=applied.opponent,
                retry_in=applied.at + FIGHT_SECONDS - now,
            )
            for ref, applied in self._applied.items()
            if applied.count >= FIGHT_APPLIES and now < applied.at + 2 * FIGHT_SECONDS
        }

    def pods(self) -> tuple[PodView, ...]:
        """Return the pods of the resource's children, and the pods without a controller that these children may
        adopt.
        """
        pods = [
            replace(seen, deleting=True) if seen.uid in self._deleted else seen
            for seen in self._known_pods().values()
            if seen.uid not in self._gone and self._is_ours(seen)
        ]
        return tuple(sorted(pods, key=lambda pod: pod.name))

    def _is_ours(self, pod: PodView) -> bool:
        """Return whether a pod has no controller, or is controlled by the resource or one of its workloads."""
        kind, name = pod.controller
        component = {f"{self._key[1]}-{component}": component for component in (COORDINATOR, STANDBY, SERVER)}
        match kind:
            case "Deployment":
                return component.get(name) == pod.component
            case "StatefulSet":
                return name == pod.engine
            case _:
                return not kind or pod.owner == self._uid

    def _known_pods(self) -> dict[str, PodView]:
        """Return the pods in the watch, plus pods that this process created and that are not in the watch yet."""
        shown = {seen.uid: seen for seen in self._index.pods.get(self._key, ())}
        self._created = {uid: seen for uid, seen in self._created.items() if uid not in shown}
        return {**self._created, **shown}

    @property
    def behind_seconds(self) -> float:
        """Longest time in seconds for which the watch has not shown a known version of an object; 0 if it shows all."""
        self._merged()
        self.resource()
        since = [written.since for written in self._written.values()]
        if self._resource is not None:
            since.append(self._resource_since)
        return self._clock() - min(since) if since else 0.0

    def lagging(self) -> list[ChildRef]:
        """Return the children that must be read again, because the watch still does not show earlier writes to them."""
        self._merged()
        limit = self._clock() - WATCH_LAG_SECONDS
        return [ref for ref, written in self._written.items() if written.at < limit]

    def _merged(self) -> dict[ChildRef, SeenChild]:
        merged = {seen.ref: seen for seen in self._index.children.get(self._key, ()) if seen.uid not in self._gone}
        merged.update(self._unwatched)
        for ref, written in list(self._written.items()):
            seen = merged.get(ref)
            if seen is not None and seen.version >= written.child.version:
                del self._written[ref]
            else:
                merged[ref] = written.child
        return merged

    # --- what this process did or found out ---

    def wrote_resource(self, resource: SeenResource) -> None:
        if self._resource is None:
            self._resource_since = self._clock()
        self._resource = resource

    def resource_gone(self) -> None:
        self._resource_gone = True

    def applied(self, child: SeenChild) -> None:
        """Record the response to an apply, which is the current version of the child.

        `ChildView.verified` is true for the child until the operator no longer owns exactly the same fields.
        """
        before, last, now = self.child(child.ref), self._applied.get(child.ref), self._clock()
        manifest = (child.view.hash, child.view.replicas if child.ref.kind == "StatefulSet" else 0)
        again = last is not None and (last.uid, last.manifest) == (child.uid, manifest)
        fought = last if again and last is not None and now < last.at + 2 * FIGHT_SECONDS else None
        if child.ref.kind in _UNWATCHED:
            self._unwatched[child.ref] = child
        else:
            self._remember(child)
        self._applied[child.ref] = _Applied(
            uid=child.uid,
            owned_fields=child.view.owned_fields,
            manifest=manifest,
            at=now,
            count=1 if fought is None else fought.count + 1,
            opponent=(before.changed_by if before is not None else "")
            or (fought.opponent if fought is not None else ""),
        )

    def observed(self, ref: ChildRef, child: SeenChild | None, *, before: SeenChild | None) -> None:
        """Record a direct read of a child.

        child:  the child, or None if it does not exist.
        before: the version that was known before the read; None if no version was known.
        """
        if child is not None:
            self._remember(child)
        elif before is not None:
            self.gone(before.uid)

    def read_unwatched(self, ref: ChildRef, child: SeenChild | None) -> None:
        """Record the current version of a child whose kind is not watched (the keys Secret, OPTIONAL_KINDS).

        child: None if the child does not exist.
        """
        if child is None:
            self._unwatched.pop(ref, None)
        else:
            self._unwatched[ref] = child

    def created(self, pod: PodView) -> None:
        """Record the response to the creation of a pod."""
        self._created[pod.uid] = pod

    def deleted(self, uid: str) -> None:
        """Record an accepted deletion. The object counts as terminating until the watch shows that it is deleted."""
        unwatched = {ref for ref, child in self._unwatched.items() if child.uid == uid}
        for ref in unwatched:
            del self._unwatched[ref]
        if not unwatched:
            self._deleted.add(uid)

    def gone(self, uid: str) -> None:
        """Record that the object with this UID does not exist."""
        self._gone.add(uid)
        for ref, written in list(self._written.items()):
            if written.child.uid == uid:
                del self._written[ref]

    def uids(self) -> frozenset[str]:
        """Return the UIDs of all known objects.

        Call this before a full listing, and pass the result to audited() as `before`.
        """
        return frozenset(seen.uid for seen in self._merged().values()) | self._pod_uids()

    def audited(self, children: Iterable[SeenChild], pods: Iterable[PodView], *, before: frozenset[str]) -> None:
        """Record a full listing, which corrects what the watches missed while they were disconnected.

        before: the UIDs from uids(), called before the listing. If an object was known before the listing and is not
                known now, it was deleted during the listing. If an object was not known before the listing, its absence
                from the listing does not prove its deletion, because it may have been created during the listing.
        """
        known = self._merged()
        listed = {child.ref: child for child in children if child.ref in known or child.uid not in before}
        for ref, seen in known.items():
            missed = ref not in listed and ref not in self._unwatched
            if missed and seen.uid in before and not self._is_fresh(ref):
                self.gone(seen.uid)
        for ref, child in listed.items():
            if ref not in known or known[ref].version < child.version:
                self._remember(child)
        living = {pod.uid for pod in pods}
        self._gone |= (self._pod_uids() & before) - living
        self._created = {uid: seen for uid, seen in self._created.items() if uid not in self._gone}
        self._forget(living | {child.uid for child in listed.values()})

    def _pod_uids(self) -> frozenset[str]:
        return frozenset(self._known_pods())

    def _remember(self, child: SeenChild) -> None:
        now, before = self._clock(), self._written.get(child.ref)
        self._written[child.ref] = _Written(child, now, before.since if before is not None else now)

    def _is_fresh(self, ref: ChildRef) -> bool:
        written = self._written.get(ref)
        return written is not None and self._clock() - written.at < WATCH_LAG_SECONDS

    def _forget(self, living: set[str]) -> None:
        """Forget the UIDs of deleted objects that the watch no longer shows.

        living: UIDs of the objects in the full listing. If the deletion of such an object was accepted, its
                UID is kept.
        """
        indexed = self._pod_uids() | {seen.uid for seen in self._index.children.get(self._key, ())}
        self._gone &= indexed
        self._deleted &= indexed | living
