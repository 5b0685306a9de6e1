"""The operator's own task on the small cluster: real cache, observer, writer and actor, over requests that take time.

Every request suspends before it has an effect and again before its answer arrives, so that a run can be ended between
any two of its steps, with the effect done or not done.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Mapping
from typing import Any

from in_memory_cluster import OWNER_UID, Cluster

from megatron_operator.cluster.api import KubeApiError
from megatron_operator.cluster.cache import Index, ResourceCache
from megatron_operator.cluster.claims import Claims
from megatron_operator.cluster.kinds import CHILD_KINDS, EVENT, NODE, POD, RESOURCE, ObjectKind
from megatron_operator.cluster.projection import project_child, project_resource
from megatron_operator.cluster.writer import Recorder, Writer
from megatron_operator.controller.act import Actor
from megatron_operator.controller.metrics import Metrics
from megatron_operator.controller.observe import Observer, ObserverSettings
from megatron_operator.controller.task import Parts, ResourceTask, UpdateLimit
from megatron_operator.decision.actions import AskCanary, Signal
from megatron_operator.decision.coordinator_snapshot import CanaryReport, CoordinatorSnapshot
from megatron_operator.decision.decide import decide
from megatron_operator.decision.reduce import reduce_pod
from megatron_operator.decision.world import ChildRef

Object = dict[str, Any]


class KilledError(Exception):
    """The process ended here."""


class Points:
    """Counts suspensions, and ends the run at one of them."""

    def __init__(self, end_at: int | None = None) -> None:
        self.count = 0
        self._end_at = end_at

    def run(self, work: Coroutine[Any, Any, Any]) -> Awaitable[Any]:
        return _Driven(work, self)

    def reached(self) -> bool:
        self.count += 1
        return self.count == self._end_at


class _Driven:
    def __init__(self, work: Coroutine[Any, Any, Any], points: Points) -> None:
        self._work, self._points = work, points

    def __await__(self) -> Generator[Any, Any, Any]:
        while True:
            try:
                waits_for = self._work.send(None)
            except StopIteration as end:
                return end.value
            if self._points.reached():
                self._work.close()
                raise KilledError
            yield waits_for


class InMemoryApi:
    """The requests the operator makes, on a Cluster."""

    def __init__(self, cluster: Cluster, *, on_status: Callable[[Object], None] = lambda status: None) -> None:
        self.cluster = cluster
        self._on_status = on_status
        self.unreadable_nodes: set[str] = set()
        self._version = 100
        self._seen: tuple[int, int] = (0, 0)

    def resource(self) -> Object:
        cluster = self.cluster
        if self._seen[0] != cluster.generation:
            self._version += 1
            self._seen = (cluster.generation, self._version)
        metadata = {
            "name": cluster.name,
            "namespace": "default",
            "uid": OWNER_UID,
            "generation": cluster.generation,
            "resourceVersion": str(self._seen[1]),
        }
        body = {"apiVersion": RESOURCE.api_version, "kind": RESOURCE.kind, "metadata": metadata}
        return copy.deepcopy({**body, "spec": cluster.spec, "status": cluster.status})

    async def get(self, kind: ObjectKind, namespace: str | None, name: str) -> Object | None:
        await asyncio.sleep(0)
        if kind is RESOURCE:
            return self.resource()
        if kind is NODE:
            if name in self.unreadable_nodes:
                raise KubeApiError(403, "Forbidden", "nodes may not be read")
            return copy.deepcopy(self.cluster.nodes.get(name))
        found = self.cluster.objects.get(ChildRef(kind.kind, name, kind.api_version))
        return copy.deepcopy(found)

    async def list(self, kind: ObjectKind, namespace: str | None, *, fields: str) -> list[Object]:
        await asyncio.sleep(0)
        assert kind is POD, kind
        name = fields.removeprefix("metadata.name=")
        return copy.deepcopy([pod for pod in self.cluster.pods.values() if pod["metadata"]["name"] == name])

    async def create(self, kind: ObjectKind, body: Object, *, manager: str) -> Object:
        await asyncio.sleep(0)
        if kind is POD and body["metadata"]["name"] in self.cluster.pods:
            raise KubeApiError(409, "AlreadyExists", "the pod exists")
        if kind is POD:
            body = copy.deepcopy(self.cluster.create_pod(body))
        elif kind is not EVENT:
            raise AssertionError(f"nothing but Events and check pods is created here, and this is a {kind.kind}")
        await asyncio.sleep(0)
        return body

    async def apply(
        self,
        kind: ObjectKind,
        body: Object,
        *,
        manager: str,
        force: bool,
        subresource: str | None = None,
        dry_run: bool = False,
    ) -> Object:
        await asyncio.sleep(0)
        if kind is RESOURCE:
            return await self._apply_status(body)
        if dry_run:
            return body
        ref = ChildRef(kind.kind, body["metadata"]["name"], kind.api_version)
        known = self.cluster.objects.get(ref)
        uid = body["metadata"].get("uid")
        if uid is not None and (known is None or known["metadata"]["uid"] != uid):
            raise KubeApiError(409, "Conflict", "another object")
        version = body["metadata"].get("resourceVersion")
        if version is not None and known is not None and known["metadata"].get("resourceVersion") != version:
            raise KubeApiError(409, "Conflict", "the object has been modified")
        self.cluster.put(body)
        self._version += 1
        stored = self.cluster.objects[ref]
        stored["metadata"]["resourceVersion"] = str(self._version)
        await asyncio.sleep(0)
        return copy.deepcopy(stored)

    async def _apply_status(self, body: Object) -> Object:
        if body["metadata"]["resourceVersion"] != self.resource()["metadata"]["resourceVersion"]:
            raise KubeApiError(409, "Conflict", "the resource was modified")
        self._on_status(body["status"])
        self.cluster.status = copy.deepcopy(body["status"])
        self._version += 1
        self._seen = (self.cluster.generation, self._version)
        await asyncio.sleep(0)
        return self.resource()

    async def delete(
        self, kind: ObjectKind, namespace: str, name: str, *, uid: str, grace_seconds: int | None = None
    ) -> None:
        await asyncio.sleep(0)
        self.cluster.remove(kind.kind, name, uid, force=grace_seconds == 0)
        await asyncio.sleep(0)


class LaggingIndex(Mapping[Any, Iterable[Any]]):
    """What a watch has shown: the cluster as it was when `show` was last called."""

    def __init__(self) -> None:
        self._shown: tuple[Any, ...] = ()

    def show(self, seen: Iterable[Any]) -> None:
        self._shown = tuple(seen)

    def __getitem__(self, key: Any) -> Iterable[Any]:
        return self._shown

    def get(self, key: Any, default: Any = None) -> Iterable[Any]:
        return self._shown

    def __iter__(self) -> Any:
        return iter(())

    def __len__(self) -> int:
        return len(self._shown)


class Watch:
    """The three indexes of a resource."""

    def __init__(self, api: InMemoryApi) -> None:
        self._api = api
        self.index = Index(resources=LaggingIndex(), children=LaggingIndex(), pods=LaggingIndex())

    def show(self) -> None:
        cluster = self._api.cluster
        kinds = {kind.kind for kind in CHILD_KINDS}
        objects = copy.deepcopy([cluster.seen(obj) for ref, obj in cluster.objects.items() if ref.kind in kinds])
        self.index.resources.show([project_resource(self._api.resource())])  # type: ignore[attr-defined]
        self.index.children.show([project_child(obj) for obj in objects])  # type: ignore[attr-defined]
        self.index.pods.show([reduce_pod(pod) for pod in cluster.pods.values()])  # type: ignore[attr-defined]


class DirectLink:
    """A link without frames: what is said arrives at once, or the caller dies before it is said."""

    snapshot = CoordinatorSnapshot()
    """While it has no address."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.sent: list[str] = []

    def point_to(self, addresses: tuple[str, ...], keys: object) -> None:
        pass

    async def refresh(self, *, expected: bool = False) -> CoordinatorSnapshot:
        await asyncio.sleep(0)
        coordinator = self._cluster.coordinator
        found = coordinator.snapshot() if coordinator else CoordinatorSnapshot(error="rejected")
        await asyncio.sleep(0)
        return found

    def awaits(self, operation_id: str) -> bool:
        return False

    def signal(self, signal: Signal) -> bool:
        assert self._cluster.coordinator is not None
        persisted = self._cluster.status["lifecycle"]
        assert persisted["operationId"] == signal.operation_id, "a signal left before its intent was written"
        self._cluster.coordinator.receive(signal)
        return True

    def ask_canary(self, asked: AskCanary) -> bool:
        assert self._cluster.coordinator is not None
        self._cluster.coordinator.canaries[asked.engine] = CanaryReport(asked.revision, ok=True)
        return True

    def expect_change(self, expected: bool) -> None:
        pass

    async def close(self) -> None:
        pass


class Leader:
    """An elector that leads."""

    def __init__(self, term: int) -> None:
        self.term = term

    def require_leadership(self) -> None:
        pass


def new_operator(
    api: InMemoryApi,
    watch: Watch,
    link: Any,
    *,
    term: int,
    woken: asyncio.Event | None = None,
    resync_seconds: float = 1e9,
    address: str = "tcp://127.0.0.1:9",
    leader: Any = None,
    claims: Any = None,
) -> ResourceTask:
    """A process that has just become the leader: nothing is remembered.

    leader: one that several resources share.
    """
    key = ("default", api.cluster.name)
    played: Any = api
    cache = ResourceCache(uid=OWNER_UID, key=key, index=watch.index)
    leader = leader or Leader(term)
    writer = Writer(played, guard=leader.require_leadership, count=lambda verb, kind: None)
    observing = ObserverSettings(
        settings=api.cluster.settings,
        admin=None,
        resolve=lambda *_: address,
        resync_seconds=1e9,
        audits=asyncio.Semaphore(2),
        manager=claims.own if claims else "",
    )
    observer = Observer(played, cache, link, options=observing)
    actor = Actor(
        cache=cache,
        writer=writer,
        observer=observer,
        recorder=Recorder(played, instance="test"),
        link=link,
        elector=leader,
        settings=api.cluster.settings,
        admin=None,
        count_signal=lambda kind: None,
    )
    parts = Parts(
        cache=cache,
        observer=observer,
        writer=writer,
        actor=actor,
        link=link,
        elector=leader,
        metrics=Metrics(),
        claims=claims or Claims(played, own=""),
        updates=UpdateLimit(1, dict),
        decide=decide,
        isolated=lambda: False,
        resync_seconds=resync_seconds,
        coalesce_seconds=0.0,
    )
    return ResourceTask(uid=OWNER_UID, key=key, woken=woken or asyncio.Event(), parts=parts)
