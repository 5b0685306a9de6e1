"""Reads what one pass needs to know: builds a World from the cache, the keys Secret and the coordinator."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from http.client import HTTPConnection, HTTPException
from typing import Any, Generic, TypeVar

from megatron_operator.cluster.api import KubeApi, KubeApiError, Object
from megatron_operator.cluster.cache import ResourceCache
from megatron_operator.cluster.keys import KeyFormatError, admin_peer_keys, is_sealed, keys_view
from megatron_operator.cluster.kinds import (
    CHILD_KINDS,
    CHILD_SELECTOR,
    CLUSTER_KINDS,
    DEVICE_CLAIM_KINDS,
    EVENT,
    NODE,
    OPTIONAL_KINDS,
    POD,
    POD_SELECTOR,
    RESOURCE,
    SECRET,
    SERVICE,
    ObjectKind,
    kind_of,
)
from megatron_operator.cluster.projection import (
    SeenChild,
    SeenResource,
    project_child,
    project_resource,
)
from megatron_operator.cluster.watch_ages import FORBIDDEN
from megatron_operator.decision.coordinator_snapshot import CoordinatorSnapshot
from megatron_operator.decision.losses import NODE_SECONDS
from megatron_operator.decision.reduce import lost_since, reduce_pod
from megatron_operator.decision.world import (
    ANY_KEY,
    DOWNLOAD_SECONDS,
    EVENT_SECONDS,
    OPTIONAL_SECONDS,
    POD_EVENTS,
    UNCONFIGURED,
    ApplyRejection,
    ChildRef,
    Download,
    KeysView,
    Loading,
    PodView,
    ResourceSnapshot,
    World,
    has_optional_children,
)
from megatron_operator.link.address import Resolver
from megatron_operator.link.connection import CoordinatorLink
from megatron_operator.resource.names import COORDINATOR, ENGINE, LABEL_INSTANCE, PORT_HEALTH, STANDBY
from megatron_operator.resource.settings import Settings
from megatron_operator.resource.spec import parse_stored_spec
from megatron_operator.resource.states import CoordinatorState
from megatron_runtime.protocol import strict_json as json
from megatron_runtime.transport.security import KeyPair

logger = logging.getLogger(__name__)

K = TypeVar("K")
T = TypeVar("T")

MISSING_SECRET = ("FailedMount", UNCONFIGURED)
"""Reasons for which a pod waits if its Secret may be missing."""
_SELECTORS = {**dict.fromkeys(CHILD_KINDS, CHILD_SELECTOR), POD: POD_SELECTOR}
MAX_DOWNLOADS = 4
"""Maximum number of pods that are queried at the same time."""
_PROGRESS_SECONDS = 2.0
_PROGRESS_MOST_BYTES = 4096
_PROGRESS_LARGEST = 1 << 60
STAGES = ("Download", "Verify", "Load", "Compile", "Capture")
"""Stages of an engine's start, which the engine reports."""
_MOUNT_SUMMARY = "Unable to attach or mount volumes"
"""First words of an Event that names only volumes. Other Events of the pod name the cause."""


@dataclass(frozen=True, slots=True)
class ObserverSettings:
    settings: Settings
    admin: KeyPair | None
    """The operator's admin key pair; None without security, when sockets are unencrypted."""
    resolve: Resolver
    resync_seconds: float
    audits: asyncio.Semaphore
    """Limit of concurrent listings over all resources, to protect the API server."""
    denied: Callable[[], Mapping[str, str]] = dict
    """Returns the API resources that cannot be watched in the namespace, with the reasons."""
    manager: str = ""
    """Namespace and name of this operator's Lease."""


class Cached(Generic[K, T]):
    """Caches values that are read from the API server, by key.

    empty: the value of a key that was never read.
    """

    def __init__(self, empty: T) -> None:
        self._empty = empty
        self._read: dict[K, tuple[float, T]] = {}

    def get(self, key: K) -> T:
        return self._read[key][1] if key in self._read else self._empty

    def age(self, key: K) -> float:
        """Return the seconds since the value of a key was read. Returns infinity if it was never read."""
        return time.monotonic() - self._read[key][0] if key in self._read else math.inf

    def put(self, key: K, value: T) -> None:
        self._read[key] = (time.monotonic(), value)

    def keep(self, keys: Collection[K], *, wait: bool = False) -> None:
        """Forget all keys that are not in `keys`.

        wait: whether new keys get the empty value as if it had just been read. read() then first reads them when this
              value has become too old.
        """
        self._read = {key: entry for key, entry in self._read.items() if key in keys}
        for key in keys if wait else ():
            if key not in self._read:
                self.put(key, self._empty)

    async def read(self, key: K, read: Callable[[], Awaitable[T]], *, seconds: float) -> T:
        """Return the cached value of a key.

        If the value is at least `seconds` old, call `read` first and cache its result.
        """
        if self.age(key) >= seconds:
            self.put(key, await read())
        return self.get(key)


class Registrations:
    """A clock that measures for how long engines with pods have not been registered with their coordinator.

    The time starts when the coordinator has recovered.

    There is one exception. If a new coordinator answers while the pod of the old coordinator is still reported as
    ready, the node of this pod may be lost. The engines on the node are then lost, too. Live engines register during
    the recovery of the new coordinator. In this case, an engine that is not registered after the recovery counts as
    missing for an infinite time.
    """

    def __init__(self) -> None:
        self._since: dict[tuple[str, frozenset[str]], float] = {}
        """Time from which an engine counts as missing, by name of the engine and UIDs of its pods."""
        self._incarnation = ""
        self._processes: frozenset[tuple[str, int]] = frozenset()
        """UIDs and restart counts of the pods among which the current coordinator is. These pods were not being deleted
        when the coordinator was first reached, and still exist.
        """
        self._taken_over = False

    def missing(self, coordinator: CoordinatorSnapshot, pods: Sequence[PodView], *, now: float) -> Mapping[str, float]:
        """Return the seconds for which engines have not been registered, by engine name.

        Returns an empty mapping if the coordinator is unreachable or recovers.

        now: seconds on a monotonic clock, which all calls must share.
        """
        if not coordinator.reachable:
            self._since = {}
            return {}
        coordinators = {(pod.uid, pod.restarts): pod for pod in pods if pod.component in (COORDINATOR, STANDBY)}
        if coordinator.incarnation == self._incarnation:
            self._processes &= coordinators.keys()
        else:
            # A deleted coordinator may still answer when its successor is already ready.
            ready = {key for key, pod in coordinators.items() if pod.ready and not pod.deleting}
            self._taken_over = bool(self._processes) and self._processes <= ready
            self._incarnation = coordinator.incarnation
            self._processes = frozenset(key for key, pod in coordinators.items() if not pod.deleting)
        if coordinator.state is CoordinatorState.RECOVERING:
            self._since = {}
            return {}
        began, self._taken_over = (-math.inf if self._taken_over else now), False
        registered = {report.name for report in coordinator.engines}
        absent: dict[str, set[str]] = {}
        for pod in pods:
            if pod.engine and pod.engine not in registered:
                absent.setdefault(pod.engine, set()).add(pod.uid)
        engines = [(name, frozenset(uids)) for name, uids in absent.items()]
        self._since = {engine: self._since.get(engine, began) for engine in engines}
        return {name: now - since for (name, _), since in self._since.items()}


class Observer:
    """Reads one resource's objects from the API server, and the state of its coordinator from the link."""

    def __init__(self, api: KubeApi, cache: ResourceCache, link: CoordinatorLink, *, options: ObserverSettings) -> None:
        self._api = api
        self._cache = cache
        self._link = link
        self._options = options
        self._resync = options.resync_seconds * random.uniform(0.9, 1.1)
        self._registrations = Registrations()
        self._audits: Cached[str, None] = Cached(None)
        self._keys: Cached[str, Object | None] = Cached(None)
        self._optional: Cached[ObjectKind, None] = Cached(None)
        self._objects: Cached[ChildRef, frozenset[str] | None] = Cached(None)
        self._creations: Cached[str, str] = Cached("")
        self._nodes: Cached[str, None] = Cached(None)
        self._downloads: Cached[str, Download | None] = Cached(None)
        self._loading: Loading | None = None
        self._loading_due: float | None = None
        self._reading: asyncio.Task[None] | None = None
        self._pod_events: Cached[str, tuple[str, str]] = Cached(("", ""))
        self._audits.put("", None)

    async def resource(self) -> SeenResource | None:
        """Return the custom resource. First read the objects that the watch may have missed.

        Returns None if the resource is deleted.
        """
        resource = self._cache.resource()
        if resource is None:
            return None
        await self._audits.read("", self._audit, seconds=self._resync)
        for ref in self._cache.lagging():
            await self.reread_child(ref, namespace=resource.namespace)
        return self._cache.resource()

    async def reread_resource(self) -> None:
        """Read the custom resource again. Call this after a rejected write to the resource."""
        seen = self._cache.resource()
        if seen is None:
            return
        obj = await self._api.get(RESOURCE, seen.namespace, seen.name)
        if obj is None or obj["metadata"]["uid"] != seen.uid:
            self._cache.resource_gone()
        else:
            self._cache.wrote_resource(project_resource(obj))

    async def reread_child(self, ref: ChildRef, *, namespace: str) -> None:
        """Read a child again. Call this after a rejected write to the child."""
        if ref.kind in {kind.kind for kind in OPTIONAL_KINDS}:
            self._optional.keep(())
            return
        before = self._cache.child(ref)
        obj = await self._api.get(kind_of(ref.api_version, ref.kind), namespace, ref.name)
        self._cache.observed(ref, project_child(obj) if obj is not None else None, before=before)

    async def read_pod(self, name: str, *, namespace: str) -> PodView | None:
        """Return a pod, or None if it does not exist.

        The pod is read by a list request, so that the operator's role does not need `get` for pods.
        """
        found = await self._api.list(POD, namespace, fields=f"metadata.name={name}")
        return reduce_pod(found[0]) if found else None

    async def world(
        self,
        resource: SeenResource,
        *,
        term: int,
        rejections: Mapping[ChildRef, ApplyRejection],
        vetted: Mapping[ChildRef, str],
    ) -> World:
        """Return a snapshot of everything that a decision reads.

        term:       term of this leader.
        rejections: last rejection of each child.
        vetted:     hash of the manifest of each child that passed a dry run.

        Raises:
            pydantic.ValidationError: this version cannot parse the stored spec.
        """
        spec, unknown_fields = parse_stored_spec(resource.spec)
        unwatched = self._unwatched()
        secret: Object | None = None
        try:
            secret = await self._read_keys(resource) if self._options.admin is not None else None
        except KubeApiError as error:
            if error.code != FORBIDDEN:
                raise
            unwatched[SECRET.kind] = str(error)
        coordinator = await self._coordinator(resource, secret)
        await self._read_optional(resource, seconds=OPTIONAL_SECONDS if has_optional_children(spec) else self._resync)
        return World(
            resource=ResourceSnapshot(
                **{
                    each.name: getattr(resource, each.name)
                    for each in fields(ResourceSnapshot)
                    if each.name not in ("spec", "unknown_fields")
                },
                spec=spec,
                unknown_fields=unknown_fields,
            ),
            settings=self._options.settings,
            now=datetime.now(UTC),
            new_operation_id=secrets.token_hex(8),
            term=term,
            children=self._cache.views(),
            contests=self._cache.contests(),
            pods=await self._explained(self._cache.pods(), resource),
            coordinator=coordinator,
            keys=self._keys_view(secret),
            rejections=rejections,
            vetted=vetted,
            failed_creations=await self._failed_creations(resource),
            unregistered_seconds=self._registrations.missing(coordinator, self._cache.pods(), now=time.monotonic()),
            lost_nodes=await self._lost_nodes(spec.lifecycle.lost_node_seconds),
            download=await self._download(),
            unwatched=unwatched,
            manager=self._options.manager,
            loading=self._load(),
        )

    def _unwatched(self) -> dict[str, str]:
        denied = self._options.denied()
        return {kind.kind: denied[kind.plural] for kind in (*CHILD_KINDS, POD) if kind.plural in denied}

    async def reread_keys(self, resource: SeenResource) -> Object | None:
        """Read the keys Secret again, and return it. Returns None if this resource does not own it."""
        self._keys.keep(())
        return await self._read_keys(resource)

    def _keys_view(self, secret: Object | None) -> KeysView | None:
        if secret is None or self._options.admin is None:
            return None
        try:
            return keys_view(secret, self._options.admin)
        except KeyFormatError as error:
            logger.warning("keys cannot be read", extra={"error": str(error)})
            return None

    def remember_keys(self, obj: Object) -> None:
        """Record the keys Secret. Call this after the Secret was written."""
        self._keys.put("", obj)
        seen = project_child(obj, SECRET)
        self._cache.read_unwatched(seen.ref, seen)

    async def _coordinator(self, resource: SeenResource, secret: Object | None) -> CoordinatorSnapshot:
        keys = None
        if self._options.admin is not None:
            if secret is None:
                return self._disconnected("its keys do not exist yet")
            try:
                keys = admin_peer_keys(secret, self._options.admin)
            except KeyFormatError as error:
                return self._disconnected(str(error))
        service = self._cache.child(ChildRef(SERVICE.kind, f"{resource.name}-coordinator", SERVICE.api_version))
        if service is None or not service.may_be_of(resource.uid):
            return self._disconnected("its Service does not exist yet")
        standby = self._cache.child(ChildRef(SERVICE.kind, f"{resource.name}-standby", SERVICE.api_version))
        ips = [each.cluster_ip for each in (service, standby) if each is not None and each.may_be_of(resource.uid)]
        addresses = (self._options.resolve(resource.name, resource.namespace, ip) for ip in ips)
        self._link.point_to(tuple(dict.fromkeys(address for address in addresses if address is not None)), keys)
        coordinators = [pod for pod in self._cache.pods() if pod.component in (COORDINATOR, STANDBY)]
        ready = any(pod.ready and not pod.deleting for pod in coordinators)
        return await self._link.refresh(expected=ready)

    def _disconnected(self, error: str) -> CoordinatorSnapshot:
        self._link.point_to((), None)
        return replace(self._link.snapshot, error=error)

    async def _download(self) -> Download | None:
        """Return the progress of the model's download, as a pod reports it. Returns None if no pod reports progress.

        The pod is queried every few seconds, because pods have no permission to write to the API server.
        """
        pods = sorted(
            (pod for pod in self._cache.pods() if pod.fetching_at and not pod.deleting), key=lambda pod: pod.name
        )
        if not pods:
            self._downloads.keep(())
            return None
        last = self._downloads.get("")
        # One pod downloads, most likely the last one with progress. The others wait for the lock of the cache.
        pods.sort(key=lambda pod: last is None or pod.name != last.pod)

        async def read() -> Download | None:
            found = await asyncio.gather(*(asyncio.to_thread(read_progress, pod) for pod in pods[:MAX_DOWNLOADS]))
            return next((progress for progress in found if progress is not None), None)

        return await self._downloads.read("", read, seconds=DOWNLOAD_SECONDS)

    def _load(self) -> Loading | None:
        """Return the last known progress of the first engine that loads its weights.

        Returns None if no progress is known, or if an engine is ready.

        The progress is read outside the passes, so that a pod that does not answer delays no pass. The first read
        happens after some seconds, so that an engine that loads quickly is never read.
        """
        engines = [pod for pod in self._cache.pods() if pod.component == ENGINE and not pod.deleting]
        pods = sorted((pod for pod in engines if pod.loading_at), key=lambda pod: pod.name)
        if not pods or any(pod.ready for pod in engines):
            self._loading = self._loading_due = None
            return None
        now = time.monotonic()
        if self._loading_due is None:
            self._loading_due = now + DOWNLOAD_SECONDS
        elif now >= self._loading_due and (self._reading is None or self._reading.done()):
            self._loading_due = now + DOWNLOAD_SECONDS
            self._reading = asyncio.create_task(self._read_loading(pods[:MAX_DOWNLOADS]))
        return self._loading

    async def _read_loading(self, pods: Sequence[PodView]) -> None:
        found = await asyncio.gather(*(asyncio.to_thread(read_loading, pod) for pod in pods))
        self._loading = next((loading for loading in found if loading is not None), None)

    async def _failed_creations(self, resource: SeenResource) -> Mapping[str, str]:
        """Return, by name of the StatefulSet, the reasons why StatefulSets cannot create all their pods.

        Events are read at most every few seconds.
        """
        created = Counter(pod.engine for pod in self._cache.pods())
        incomplete = sorted(
            ref.name
            for ref, view in self._cache.views().items()
            if ref.kind == "StatefulSet" and view.owned and created[ref.name] < view.replicas
        )
        self._creations.keep(incomplete[:1], wait=True)
        for name in incomplete[:1]:
            await self._creations.read(name, partial(self._failed_creation, name, resource), seconds=EVENT_SECONDS)
        return {name: note for name in incomplete[:1] if (note := self._creations.get(name))}

    async def _failed_creation(self, name: str, resource: SeenResource) -> str:
        """Return the last Event that explains why the StatefulSet `name` cannot create a pod.

        Returns an empty string if there is no such Event.
        """
        selector = f"reason=FailedCreate,regarding.kind=StatefulSet,regarding.name={name}"
        latest = max(await self._events(resource, selector), key=_seen_at, default=None)
        return "" if latest is None else str(latest.get("note") or "")

    async def _events(self, resource: SeenResource, selector: str) -> list[Object]:
        """Return the Events that match `selector`. Returns an empty list if the operator may not list Events.

        Events are used only for explanations, so no decision needs them.
        """
        try:
            return await self._api.list(EVENT, resource.namespace, fields=selector)
        except KubeApiError as error:
            if error.code != FORBIDDEN:
                raise
            logger.warning("events cannot be read", extra={"namespace": resource.namespace, "error": error.message})
            return []

    async def _explained(self, pods: tuple[PodView, ...], resource: SeenResource) -> tuple[PodView, ...]:
        """Return `pods`, with reason and message from Events for pods whose status does not explain why they wait.

        Each pass reads Events for at most one pod of each component, the pod whose Events were read least recently.
        """
        waiting = {pod.uid: pod for pod in pods if pod.unexplained}
        self._pod_events.keep(waiting, wait=True)
        for component in sorted({pod.component for pod in waiting.values()}):
            pod = max(
                (pod for pod in waiting.values() if pod.component == component),
                key=lambda pod: (self._pod_events.age(pod.uid), pod.uid),
            )
            await self._pod_events.read(pod.uid, partial(self._pod_event, pod, resource), seconds=EVENT_SECONDS)
        events = {uid: event for uid in waiting if (event := self._pod_events.get(uid)) != ("", "")}
        return tuple(
            replace(pod, reason=events[pod.uid][0], message=events[pod.uid][1]) if pod.uid in events else pod
            for pod in pods
        )

    async def _pod_event(self, pod: PodView, resource: SeenResource) -> tuple[str, str]:
        """Return reason and message of the last Event that explains why the containers of `pod` are not created.

        If there is no such Event now, return the previous result for this pod.
        """
        fields = f"type=Warning,regarding.kind=Pod,regarding.name={pod.name}"
        events = [
            event
            for event in await self._events(resource, fields)
            if event.get("reason") in POD_EVENTS and (event.get("regarding") or {}).get("uid") == pod.uid
        ]
        causes = [event for event in events if not str(event.get("note") or "").startswith(_MOUNT_SUMMARY)]
        latest = max(causes or events, key=_seen_at, default=None)
        if latest is None:
            return self._pod_events.get(pod.uid)
        return str(latest["reason"]), str(latest.get("note") or "")

    async def _lost_nodes(self, limit: int) -> Mapping[str, datetime | None]:
        """Return the lost nodes of engine pods whose deletion has been overdue for `limit` seconds.

        See `World.lost_nodes`. A node counts as lost only if it was read in this pass. A node that is ready, or that
        the operator may not read, is read again after some seconds.
        """
        before = datetime.now(UTC) - timedelta(seconds=limit)
        pods = (pod for pod in self._cache.pods() if pod.component == ENGINE and pod.node)
        names = {pod.node for pod in pods if pod.ends_at is not None and pod.ends_at <= before}
        self._nodes.keep({name for name in names if self._nodes.age(name) < NODE_SECONDS})
        found: dict[str, datetime | None] = {}
        for name in sorted(name for name in names if self._nodes.age(name) >= NODE_SECONDS):
            try:
                node = await self._api.get(NODE, None, name)
            except KubeApiError as error:
                if error.code != FORBIDDEN:
                    raise
                logger.warning("node cannot be read", extra={"node": name, "error": error.message})
                self._nodes.put(name, None)
                continue
            since = None if node is None else lost_since(node)
            if node is None or since is not None:
                found[name] = since
            else:
                self._nodes.put(name, None)
        return found

    async def _read_keys(self, resource: SeenResource) -> Object | None:
        """Return the keys Secret, or None if the resource does not own such a Secret.

        Until the Secret exists and belongs to the resource, each pass reads it. Afterwards, it is read at every resync.
        If a pod cannot mount the Secret or the coordinator does not answer, the Secret may have been deleted, and is
        read every few seconds.
        """
        pods = self._cache.pods()
        unmounted = any(pod.unexplained or pod.reason in MISSING_SECRET for pod in pods if not pod.deleting)
        suspect = unmounted or not self._link.snapshot.reachable
        known = self._keys.get("")
        seconds = 0.0 if known is None else EVENT_SECONDS if suspect else self._resync
        return await self._keys.read("", partial(self._read_secret, resource), seconds=seconds)

    async def _read_secret(self, resource: SeenResource) -> Object | None:
        ref = ChildRef(SECRET.kind, f"{resource.name}-keys", SECRET.api_version)
        obj, admin = await self._api.get(SECRET, resource.namespace, ref.name), self._options.admin
        seen = None if obj is None else project_child(obj, SECRET)
        if obj is not None and seen is not None and seen.view.orphan and admin is not None and is_sealed(obj, admin):
            seen = replace(seen, owner_uid=resource.uid)
        self._cache.read_unwatched(ref, seen)
        return obj if seen is not None and seen.owner_uid == resource.uid else None

    async def objects(
        self, refs: Collection[ChildRef], *, namespace: str, seconds: float
    ) -> Mapping[ChildRef, frozenset[str] | None]:
        """Return, for each object, the names of its data entries (see `World.objects`).

        An object is read again if its last read is `seconds` old.
        """
        self._objects.keep(refs)
        reads = (self._objects.read(ref, partial(self._read_object, ref, namespace), seconds=seconds) for ref in refs)
        return dict(zip(refs, await asyncio.gather(*reads), strict=True))

    async def _read_object(self, ref: ChildRef, namespace: str) -> frozenset[str] | None:
        """Return the names of an object's data entries that are not empty. The contents never leave this function.

        Returns None if the object does not exist, and a set with only ANY_KEY if the operator may not read the object.
        """
        kind = kind_of(ref.api_version, ref.kind)
        try:
            obj = await self._api.get(kind, None if kind in CLUSTER_KINDS else namespace, ref.name)
        except KubeApiError as error:
            if error.code != FORBIDDEN:
                raise
            return frozenset({ANY_KEY})
        if obj is None and kind in DEVICE_CLAIM_KINDS and not await self._api.serves(kind.api_version):
            return frozenset({ANY_KEY})  # an older cluster may serve the kind in an earlier API version
        entries = {} if obj is None else {**(obj.get("data") or {}), **(obj.get("binaryData") or {})}
        return None if obj is None else frozenset(key for key, value in entries.items() if value)

    async def _read_optional(self, resource: SeenResource, *, seconds: float) -> None:
        """Read the children of kinds that a cluster may lack, such as HTTPRoutes.

        They are also read if the spec does not request them, because an earlier spec may have requested them. They are
        read at the start, after a rejected write, and when the last read is `seconds` old.
        """
        reads = (
            self._optional.read(kind, partial(self._read_optional_child, kind, resource), seconds=seconds)
            for kind in OPTIONAL_KINDS
        )
        await asyncio.gather(*reads)

    async def _read_optional_child(self, kind: ObjectKind, resource: SeenResource) -> None:
        """Read one optional child.

        A child that the resource does not own, or that the operator cannot read, counts as absent. When the operator
        then applies the child, the API server reports the error.
        """
        ref = ChildRef(kind.kind, resource.name, kind.api_version)
        try:
            obj = await self._api.get(kind, resource.namespace, ref.name)
        except KubeApiError as error:
            if error.code != FORBIDDEN:
                raise
            obj = None
        seen = None if obj is None else project_child(obj, kind)
        self._cache.read_unwatched(ref, seen if seen is not None and seen.owner_uid == resource.uid else None)

    async def _audit(self) -> None:
        """List all objects of this resource, and correct the cache. An interrupted watch may have missed deletions."""
        resource = self._cache.resource()
        if resource is None or self._options.denied():
            return
        self._keys.keep(())
        self._optional.keep(())
        instance = f"{LABEL_INSTANCE}={resource.name}"
        kinds = (*CHILD_KINDS, POD)
        async with self._options.audits:
            before = self._cache.uids()
            answers = await asyncio.gather(
                *(self._api.list(kind, resource.namespace, selector=f"{_SELECTORS[kind]},{instance}") for kind in kinds)
            )
        children: list[SeenChild] = []
        pods: list[PodView] = []
        for kind, items in zip(kinds, answers, strict=True):
            if kind is POD:
                pods += [reduce_pod(item) for item in items]
            else:
                children += [project_child(item, kind) for item in items]
        self._cache.audited(children, pods, before=before)
        await self.reread_resource()


def _seen_at(event: Object) -> str:
    series = event.get("series") or {}
    times = (series.get("lastObservedTime"), event.get("deprecatedLastTimestamp"), event.get("eventTime"))
    return max(str(time or "") for time in times)


def read_progress(pod: PodView, *, port: int = PORT_HEALTH) -> Download | None:
    """Return the progress that the init container `fetch` of a pod reports.

    Returns None if the progress cannot be read, or if this pod waits for the download of another pod.
    """
    values = _progress_of(pod.fetching_at, port)
    numbers = [_count(values.get(name)) for name in ("bytes", "totalBytes", "bytesPerSecond")]
    known = [number for number in numbers if number is not None]
    return Download(pod.name, *known) if len(known) == len(numbers) else None


def read_loading(pod: PodView, *, port: int = PORT_HEALTH) -> Loading | None:
    """Return the loading stage that the engine of a pod reports, and the progress of this stage.

    Returns None if the stage cannot be read.
    """
    values = _progress_of(pod.loading_at, port)
    if values.get("stage") not in STAGES:
        return None
    return Loading(
        pod.name, values["stage"], *(_count(values.get(name)) for name in ("bytes", "totalBytes", "secondsLeft"))
    )


def _progress_of(address: str, port: int) -> dict[str, Any]:
    """Return the content of the page /progress of a pod. Returns an empty object if the page cannot be read.

    An operator outside the cluster cannot reach pods. No decision depends on the page.
    """
    connection = HTTPConnection(address, port, timeout=_PROGRESS_SECONDS)
    try:
        connection.request("GET", "/progress")
        values = json.loads(connection.getresponse().read(_PROGRESS_MOST_BYTES))
    except (OSError, HTTPException, ValueError, RecursionError):
        return {}
    finally:
        connection.close()
    return values if isinstance(values, dict) else {}


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and type(value) is int and 0 <= value <= _PROGRESS_LARGEST else None
