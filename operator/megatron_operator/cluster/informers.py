"""Watches the operator's children and pods, with one watch and one store for each kind and namespace.

A store keeps projections that contain only the fields that decisions read. If a kind cannot be listed or watched, the
other kinds are not affected. The failed list or watch is retried, and `watches.denied` names the kind until the retry
succeeds.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any, Generic, TypeVar

from megatron_operator.cluster.api import KubeApi, Object
from megatron_operator.cluster.cache import Index, Key
from megatron_operator.cluster.kinds import CHILD_KINDS, CHILD_SELECTOR, METADATA_KINDS, POD, POD_SELECTOR, ObjectKind
from megatron_operator.cluster.projection import SeenChild, SeenResource, instance_of, project_child
from megatron_operator.cluster.watch_ages import RETRY_SECONDS, WatchAges
from megatron_operator.cluster.watching import watch
from megatron_operator.decision.reduce import reduce_pod
from megatron_operator.decision.world import PodView

logger = logging.getLogger(__name__)

LISTS_AT_ONCE = 1
"""Limit of concurrent lists, which bounds the memory of a start."""
T = TypeVar("T")
Entry = tuple[str, Key, T]
"""Name of an object, the resource that it belongs to, and its projection."""


class Store(Generic[T]):
    """The objects of one kind, grouped by the custom resource to which they belong.

    The store covers one namespace or all namespaces. The objects are reduced to the fields that decisions read.
    """

    def __init__(self) -> None:
        self._keys: dict[tuple[str, str], Key] = {}
        """The resource of each object, by namespace and name of the object. It is kept because the object's label may
        change.
        """
        self._objects: dict[Key, dict[str, T]] = {}

    def of(self, key: Key) -> list[T]:
        """Return all objects in the store that belong to the custom resource `key`."""
        return list(self._objects.get(key, {}).values())

    def __iter__(self) -> Iterator[Key]:
        return iter(self._objects)

    def put(self, name: str, key: Key, seen: T) -> None:
        self.remove(name, key)
        self._keys[key[0], name] = key
        self._objects.setdefault(key, {})[name] = seen

    def remove(self, name: str, key: Key) -> None:
        before = self._keys.pop((key[0], name), None)
        if before is not None:
            objects = self._objects[before]
            del objects[name]
            if not objects:
                del self._objects[before]

    def replace(self, entries: list[Entry[T]]) -> None:
        self._keys.clear()
        self._objects.clear()
        for entry in entries:
            self.put(*entry)


class _ByResource(Mapping[Key, list[Any]]):
    """The objects of several stores, as a map from the custom resource to the objects that belong to it."""

    def __init__(self) -> None:
        self._stores: dict[str | None, list[Store[Any]]] = {}

    def add(self, namespace: str | None, store: Store[Any]) -> None:
        self._stores.setdefault(namespace, []).append(store)

    def __getitem__(self, key: Key) -> list[Any]:
        stores = chain(self._stores.get(key[0], ()), self._stores.get(None, ()))
        return [seen for store in stores for seen in store.of(key)]

    def __iter__(self) -> Iterator[Key]:
        return iter({key for stores in self._stores.values() for store in stores for key in store})

    def __len__(self) -> int:
        return sum(1 for _ in self)


class Informers:
    """The watches of pods and of all kinds of children. run() starts the watches.

    namespaces: namespaces to watch; empty means all namespaces.
    wake:       called with the key of a custom resource when one of its objects has changed. Called with None when a
                kind can be watched again, or can no longer be watched.
    """

    def __init__(
        self,
        api: KubeApi,
        *,
        namespaces: tuple[str, ...],
        watch_seconds: float,
        wake: Callable[[Key | None], None],
    ) -> None:
        self._api = api
        self._namespaces = namespaces or (None,)
        self._watch_seconds = watch_seconds
        self._wake = wake
        self._lists = asyncio.Semaphore(LISTS_AT_ONCE)
        self._settled = {
            (kind.plural, namespace or ""): asyncio.Event()
            for kind in (*CHILD_KINDS, POD)
            for namespace in self._namespaces
        }
        self._children, self._pods = _ByResource(), _ByResource()
        self.watches = WatchAges(watch_seconds=watch_seconds)
        self.resources: dict[str, tuple[SeenResource, ...]] = {}
        """The resources by UID. kopf watches them."""
        self.index = Index(children=self._children, pods=self._pods, resources=self.resources)

    async def run(self) -> None:
        """Watch forever."""
        async with asyncio.TaskGroup() as group:
            for namespace in self._namespaces:
                for kind in CHILD_KINDS:
                    group.create_task(self._follow(kind, namespace, CHILD_SELECTOR, self._children, project_child))
                group.create_task(self._follow(POD, namespace, POD_SELECTOR, self._pods, _project_pod))

    async def listed(self) -> None:
        """Wait until every kind has been listed, or the API server has denied the listing."""
        await asyncio.gather(*(event.wait() for event in self._settled.values()))

    def denied(self, namespace: str) -> dict[str, str]:
        """Return the reasons why kinds cannot be watched in a namespace, by API resource."""
        return {plural: why for (plural, where), why in self.watches.denied.items() if where in ("", namespace)}

    async def _follow(
        self,
        kind: ObjectKind,
        namespace: str | None,
        selector: str,
        index: _ByResource,
        project: Callable[[Object, ObjectKind], SeenChild | PodView],
    ) -> None:
        store: Store[Any] = Store()
        index.add(namespace, store)
        name, path = (kind.plural, namespace or ""), kind.path(namespace)

        def entry(obj: Object) -> Entry[Any] | None:
            metadata = obj["metadata"]
            try:
                return metadata["name"], (metadata["namespace"], instance_of(obj)), project(obj, kind)
            except Exception:  # one object must not end the watch of the others
                logger.exception("object cannot be read", extra={"kind": kind.kind, "object": metadata.get("name")})
                return None

        changes = watch(
            self._api,
            path,
            {"labelSelector": selector},
            project=entry,
            metadata_only=kind in METADATA_KINDS,
            listing=self._lists,
            watch_seconds=self._watch_seconds,
            retry_seconds=RETRY_SECONDS,
        )
        self.watches.asked(path)
        denied = False
        async for change in changes:
            entries = [item for item in change.objects if item is not None]
            match change.kind:
                case "set":
                    keys = {*store, *(key for _, key, _ in entries)}
                    store.replace(entries)
                    self.watches.accepted(path)
                    self._settled[name].set()
                    for key in keys:
                        self._wake(key)
                case "open":
                    self.watches.accepted(path)
                case "error":
                    assert change.error is not None
                    if change.error.code:
                        self.watches.rejected(path, str(change.error))
                case _:
                    for item in entries:
                        (store.remove(*item[:2]) if change.kind == "delete" else store.put(*item))
                        self._wake(item[1])
            if denied is not (name in self.watches.denied):
                denied = not denied
                self._settled[name].set()
                self._wake(None)


def _project_pod(obj: Object, kind: ObjectKind) -> PodView:
    return reduce_pod(obj)
