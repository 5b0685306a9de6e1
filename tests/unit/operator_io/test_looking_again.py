"""When a resource's task reads the API server itself, because the watch may not tell."""

from __future__ import annotations

import asyncio
import copy
from types import SimpleNamespace
from typing import Any

import pytest
from in_memory_cluster import OWNER_UID, Cluster

from megatron_operator.cluster.api import KubeApiError
from megatron_operator.cluster.cache import WATCH_LAG_SECONDS, Index, ResourceCache
from megatron_operator.cluster.kinds import EVENT, ObjectKind
from megatron_operator.cluster.projection import project_resource
from megatron_operator.controller.observe import Observer, ObserverSettings
from megatron_operator.controller.task import ResourceTask
from megatron_operator.decision.world import ANY_KEY, EVENT_SECONDS, ChildRef
from megatron_operator.resource.settings import Settings

from .operator_task import DirectLink, InMemoryApi, Watch, new_operator

SPEC = {"model": {"source": {"builtin": "smollm2-135m"}}}


async def pause_of(task: ResourceTask) -> float:
    """The first that is no call for another pass right away."""
    while (pause := await task.run_once()) == 0.0:
        pass
    assert pause is not None
    return pause


async def test_a_write_that_the_watch_does_not_show_is_read_again_soon() -> None:
    api = InMemoryApi(Cluster(SPEC, security=False))
    watch = Watch(api)
    watch.show()
    task = new_operator(api, watch, DirectLink(api.cluster), term=1)

    assert await pause_of(task) == WATCH_LAG_SECONDS
    watch.show()
    assert await pause_of(task) > WATCH_LAG_SECONDS


class SlowLists:
    """Counts the resources whose objects are being listed."""

    def __init__(self) -> None:
        self.under_way: dict[str, int] = {}
        self.maximum = self.total = 0

    async def get(self, *_: Any) -> dict[str, Any]:
        return resource("a")

    async def list(self, kind: Any, namespace: str, *, selector: str) -> list[Any]:
        _, selector = selector.split(",")
        self.under_way[selector] = self.under_way.get(selector, 0) + 1
        self.total += 1
        self.maximum = max(self.maximum, len(self.under_way))
        await asyncio.sleep(0)
        self.under_way[selector] -= 1
        if not self.under_way[selector]:
            del self.under_way[selector]
        return []


def resource(name: str) -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": "prod", "uid": name, "resourceVersion": "7"}, "spec": {}}


async def test_concurrent_lists_are_limited() -> None:
    lists: Any = SlowLists()
    names = [f"r{number}" for number in range(6)]
    index = Index(children={}, pods={}, resources={name: [project_resource(resource(name))] for name in names})
    options = ObserverSettings(
        settings=Settings(runtime_image="runtime:1"),
        admin=None,
        resolve=lambda *_: "inproc://",
        resync_seconds=0.0,
        audits=asyncio.Semaphore(2),
    )
    link: Any = None
    observers = [
        Observer(lists, ResourceCache(uid=name, key=("prod", name), index=index), link, options=options)
        for name in names
    ]
    await asyncio.gather(*(observer.resource() for observer in observers))
    assert lists.maximum == 2
    assert lists.total % len(names) == 0
    assert lists.total > 0


async def test_only_the_keys_secret_of_the_resource_is_read() -> None:
    secret = {"name": "theirs", "key": "k"}
    source = {"huggingFace": {"repo": "org/name", "revision": "1", "tokenSecretRef": secret}}
    server = {"apiKeysSecretRef": secret, "tls": {"secretName": "theirs"}}
    cluster = Cluster({"model": {"source": source}, "server": server})
    cluster.settle()
    api = InMemoryApi(cluster)
    asked: list[tuple[str, str]] = []
    get = api.get

    async def noted(kind: Any, namespace: str | None, name: str) -> Any:
        asked.append((kind.kind, name))
        return await get(kind, namespace, name)

    async def listed(kind: Any, namespace: str, **_: Any) -> list[Any]:
        asked.append((kind.kind, "all"))
        return []

    api.get = noted  # type: ignore[method-assign]
    api.list = listed  # type: ignore[attr-defined]
    watch = Watch(api)
    watch.show()
    played: Any = api
    link: Any = DirectLink(cluster)
    options = ObserverSettings(
        settings=cluster.settings,
        admin=cluster.admin,
        resolve=lambda *_: "inproc://",
        resync_seconds=0.0,
        audits=asyncio.Semaphore(2),
    )
    cache = ResourceCache(uid=OWNER_UID, key=("default", cluster.name), index=watch.index)
    observer = Observer(played, cache, link, options=options)
    seen = await observer.resource()
    assert seen is not None
    world = await observer.world(seen, term=1, rejections={}, vetted={})
    assert world.keys is not None
    assert await observer.reread_keys(seen) is not None
    assert {name for kind, name in asked if kind == "Secret"} == {"demo-keys"}


class EventsApi(InMemoryApi):
    """Lists Events, and counts the lists."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self.events: list[dict[str, Any]] = []
        self.asked: list[str] = []

    async def list(self, kind: ObjectKind, namespace: str, *, fields: str) -> list[dict[str, Any]]:
        await asyncio.sleep(0)
        assert kind is EVENT
        self.asked.append(fields)
        wanted = dict(part.split("=") for part in fields.split(","))
        return [event for event in self.events if event["regarding"]["name"] == wanted["regarding.name"]]


def event(pod: dict[str, Any], note: str, *, at: str, reason: str = "FailedMount", uid: str = "") -> dict[str, Any]:
    name = pod["metadata"]["name"]
    regarding = {"kind": "Pod", "name": name, "uid": uid or pod["metadata"]["uid"]}
    return {"reason": reason, "note": note, "deprecatedLastTimestamp": at, "regarding": regarding}


async def test_events_of_a_waiting_pod_are_read_at_intervals_and_written_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Cluster({**SPEC, "server": {"apiKeysSecretRef": {"name": "clients", "key": "list"}}}, security=False)
    # The kubelet has not seen it yet.
    cluster.objects[ChildRef("Secret", "clients")] = {"metadata": {"name": "clients"}, "data": {"list": "eA=="}}
    api = EventsApi(cluster)
    watch = Watch(api)
    clock = [1000.0]
    monkeypatch.setattr("megatron_operator.controller.observe.time", SimpleNamespace(monotonic=lambda: clock[0]))
    task = new_operator(api, watch, DirectLink(cluster), term=1)
    for _ in range(8):
        watch.show()
        await task.run_once()
        cluster.tick()
    api.asked.clear()
    name, pod = next((name, pod) for name, pod in cluster.pods.items() if "-server-" in name)
    pod["status"] = {"phase": "Pending"}
    missing = 'MountVolume.SetUp failed for volume "api-keys" : secret "clients" not found'
    api.events = [
        event(pod, "secret of an earlier pod", at="2026-01-01T00:00:09Z", uid="earlier"),
        event(pod, missing, at="2026-01-01T00:00:05Z"),
        event(pod, "Unable to attach or mount volumes: unmounted volumes=[api-keys]", at="2026-01-01T00:00:08Z"),
        event(pod, "Back-off pulling image", reason="BackOff", at="2026-01-01T00:00:09Z"),
    ]
    watch.show()
    assert await pause_of(task) <= EVENT_SECONDS
    assert api.asked == [], "a pod that has just been created needs no explanation"
    clock[0] += EVENT_SECONDS
    await pause_of(task)
    assert api.asked == [f"type=Warning,regarding.kind=Pod,regarding.name={name}"]
    degraded = cluster.condition("Degraded")
    assert degraded["reason"] == "ContainerConfigError"
    assert f"pod {name}: FailedMount: {missing}" in degraded["message"]
    assert "or correct spec.server.apiKeysSecretRef" in degraded["message"]

    written = copy.deepcopy(cluster.status)
    for _ in range(3):
        clock[0] += EVENT_SECONDS
        await pause_of(task)
    assert len(api.asked) == 4
    assert cluster.status == written

    pod["status"] = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
    watch.show()
    await pause_of(task)
    assert len(api.asked) == 4
    assert cluster.condition("Degraded")["status"] == "False"


async def test_events_of_a_statefulset_that_lacks_one_of_its_pods_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster({**SPEC, "parallelism": {"tensor": 2}}, security=False)
    cluster.settle()
    api = EventsApi(cluster)
    watch = Watch(api)
    clock = [1000.0]
    monkeypatch.setattr("megatron_operator.controller.observe.time", SimpleNamespace(monotonic=lambda: clock[0]))
    task = new_operator(api, watch, DirectLink(cluster), term=1)
    watch.show()
    await pause_of(task)
    assert api.asked == []
    del cluster.pods["demo-engine-0-1"]
    watch.show()
    await pause_of(task)
    said = "create Pod demo-engine-0-1 failed: exceeded quota: compute"
    api.events = [{"reason": "FailedCreate", "note": said, "regarding": {"name": "demo-engine-0"}}]
    clock[0] += EVENT_SECONDS
    await pause_of(task)
    assert api.asked == ["reason=FailedCreate,regarding.kind=StatefulSet,regarding.name=demo-engine-0"]
    assert cluster.condition("Degraded")["reason"] == "QuotaExceeded"


# --- Objects that pods need -------------------------------------------------------------------------------------------


OPTIONS: Any = ObserverSettings(
    settings=Settings(runtime_image="r"),
    admin=None,
    resolve=lambda *_: None,  # type: ignore[arg-type, return-value]
    resync_seconds=1,
    audits=asyncio.Semaphore(1),
)


class NamedObjects:
    """Answers reads of objects by name, and counts them. served: the API versions of the cluster, besides v1."""

    def __init__(self, answers: dict[str, Any], *, served: tuple[str, ...] = ()) -> None:
        self.answers, self.served = answers, served
        self.reads: list[tuple[str, str | None, str]] = []

    async def get(self, kind: ObjectKind, namespace: str | None, name: str) -> Any:
        self.reads.append((kind.kind, namespace, name))
        answer = self.answers.get(name)
        if isinstance(answer, KubeApiError):
            raise answer
        return answer

    async def serves(self, api_version: str) -> bool:
        return api_version in self.served


@pytest.mark.parametrize(("served", "known"), [((), frozenset({ANY_KEY})), (("resource.k8s.io/v1",), None)])
async def test_claims_for_devices_are_missing_only_if_the_cluster_has_their_api(served: Any, known: Any) -> None:
    refs = {ChildRef(kind, "gpu", "resource.k8s.io/v1"): known for kind in ("ResourceClaim", "ResourceClaimTemplate")}
    observer = Observer(NamedObjects({}, served=served), None, None, options=OPTIONS)  # type: ignore[arg-type]
    assert await observer.objects(refs, namespace="ns", seconds=60) == refs


async def test_only_the_names_of_entries_are_kept_of_objects_that_pods_need() -> None:
    api = NamedObjects(
        {
            "keys": {"data": {"a": "eA==", "empty": ""}},
            "config": {"data": {"b": "x"}, "binaryData": {"c": "eA=="}},
            "claim": {"spec": {}},
            "denied": KubeApiError(403, "Forbidden", "secrets may not be read"),
        }
    )
    refs = {
        ChildRef("Secret", "keys"): frozenset({"a"}),
        ChildRef("ConfigMap", "config"): frozenset({"b", "c"}),
        ChildRef("PersistentVolumeClaim", "claim"): frozenset(),
        ChildRef("PriorityClass", "high", "scheduling.k8s.io/v1"): None,
        ChildRef("Secret", "denied"): frozenset({ANY_KEY}),
        ChildRef("Secret", "absent"): None,
    }
    observer = Observer(api, None, None, options=OPTIONS)  # type: ignore[arg-type]
    assert await observer.objects(refs, namespace="ns", seconds=60) == refs
    assert ("PriorityClass", None, "high") in api.reads
    assert ("Secret", "ns", "keys") in api.reads
    assert await observer.objects(refs, namespace="ns", seconds=60) == refs
    assert len(api.reads) == len(refs), "read again before it is due"
    await observer.objects(refs, namespace="ns", seconds=0)
    assert len(api.reads) == 2 * len(refs)


async def test_a_change_is_checked_in_the_pass_that_sees_it() -> None:
    api = InMemoryApi(Cluster(SPEC, security=False))
    watch = Watch(api)
    task = new_operator(api, watch, DirectLink(api.cluster), term=1)
    for _ in range(8):
        watch.show()
        await task.run_once()
        api.cluster.tick()
    server, secret = ChildRef("Deployment", "demo-server", "apps/v1"), ChildRef("Secret", "keys")
    before = copy.deepcopy(api.cluster.objects[server]["spec"])
    for key, named in (("wrong", True), ("right", False)):
        api.cluster.objects[secret] = {"metadata": {"name": "keys"}, "data": {"right": "eA=="}}
        api.cluster.patch(server={"apiKeysSecretRef": {"name": "keys", "key": key}})
        watch.show()
        await task.run_once()
        degraded = api.cluster.condition("Degraded")
        assert ("Secret keys has no key wrong" in degraded["message"]) is named
        assert (api.cluster.objects[server]["spec"] == before) is named
        del api.cluster.objects[secret]
