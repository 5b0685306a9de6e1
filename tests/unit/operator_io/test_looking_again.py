"""When a resource's task reads the API server itself, because the watch may not tell."""

from __future__ import annotations

import asyncio
from typing import Any

from in_memory_cluster import OWNER_UID, Cluster

from megatron_operator.cluster.cache import WATCH_LAG_SECONDS, Index, ResourceCache
from megatron_operator.cluster.projection import project_resource
from megatron_operator.controller.observe import Observer, ObserverSettings
from megatron_operator.controller.task import ResourceTask
from megatron_operator.model.settings import Settings

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
        self.most = self.total = 0

    async def get(self, *_: Any) -> dict[str, Any]:
        return resource("a")

    async def list(self, kind: Any, namespace: str, *, selector: str) -> list[Any]:
        self.under_way[selector] = self.under_way.get(selector, 0) + 1
        self.total += 1
        self.most = max(self.most, len(self.under_way))
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
    assert lists.most == 2
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
