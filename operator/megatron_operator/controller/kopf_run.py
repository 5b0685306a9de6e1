"""One run of kopf: its handlers, its settings, and a bounded shutdown.

The handlers watch, keep projections in indexes and wake tasks, nothing else. There are no create, update or delete
handlers, daemons or timers, so kopf adds no finalizers and annotations and writes nothing. kopf runs an object's event
handlers after its indexes hold that object's new version, and the first handler after all kinds are listed. So a woken
task always sees the change that woke it.

kopf fails when a watched kind is deleted, and its shutdown may then hang: a watch that is renewing its login at that
moment treats its cancellation as the end of a pause and continues. So this module stops kopf in an orderly way as soon
as a watched kind is gone, and abandons a kopf that does not stop in time.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import kopf
from kubernetes.aio.client import Configuration

from megatron_operator.cluster.auth import kopf_session
from megatron_operator.cluster.cache import Index, Key
from megatron_operator.cluster.kinds import CHILD_KINDS, CHILD_SELECTOR, POD, POD_SELECTOR, RESOURCE, ObjectKind
from megatron_operator.cluster.projection import (
    SeenChild,
    SeenResource,
    instance_of,
    project_child,
    project_resource,
)
from megatron_operator.cluster.watch_ages import GRACE_SECONDS, WatchAges
from megatron_operator.controller.task import TaskSupervisor
from megatron_operator.decision.reduce import reduce_pod
from megatron_operator.decision.world import PodView
from megatron_operator.resource.names import APP_NAME, FIELD_MANAGER, LABEL_MANAGED_BY, LABEL_NAME

END_SECONDS = 10.0
"""Timeout of the shutdown. kopf itself waits 5 s before it cancels its remaining tasks."""


def build_registry(
    *,
    login: Callable[[], kopf.AiohttpSession],
    started: Callable[[Index], None],
    wake_resource: Callable[[str, Key], None],
    wake_instance: Callable[[Key], None],
) -> kopf.OperatorRegistry:
    """Return the registry with all handlers.

    started: called once, before any event, with the live indexes.
    wake_resource: called when the resource with this UID was created, changed or deleted.
    wake_instance: called when an object of the resource with this namespace and name was.
    """
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    async def authenticate(**_: Any) -> kopf.AiohttpSession:
        return login()

    @kopf.on.startup(registry=registry)
    async def start(**indexes: Any) -> None:
        started(Index(resources=indexes["resources"], children=indexes["children"], pods=indexes["pods"]))

    _watch_resources(registry, wake_resource)
    _watch_children(registry, wake_instance)
    return registry


def _watch_resources(registry: kopf.OperatorRegistry, wake: Callable[[str, Key], None]) -> None:
    where = (RESOURCE.group, RESOURCE.version, RESOURCE.plural)

    @kopf.index(*where, registry=registry, id="resources")
    async def index(body: kopf.Body, **_: Any) -> dict[str, SeenResource]:
        seen = project_resource(dict(body))
        return {seen.uid: seen}

    @kopf.on.event(*where, registry=registry, id="wake-resource")
    async def event(uid: str, namespace: str | None, name: str, **_: Any) -> None:
        wake(uid, (namespace or "", name))


def _watch_children(registry: kopf.OperatorRegistry, wake: Callable[[Key], None]) -> None:
    async def event(body: kopf.Body, namespace: str | None, **_: Any) -> None:
        wake((namespace or "", instance_of(dict(body))))

    def index_of(kind: ObjectKind) -> Callable[..., Any]:
        async def index(body: kopf.Body, namespace: str | None, **_: Any) -> dict[Key, SeenChild]:
            obj = dict(body)
            return {(namespace or "", instance_of(obj)): project_child(obj, kind)}

        return index

    async def index_pod(body: kopf.Body, namespace: str | None, **_: Any) -> dict[Key, PodView]:
        obj = dict(body)
        return {(namespace or "", instance_of(obj)): reduce_pod(obj)}

    labels = {LABEL_MANAGED_BY: FIELD_MANAGER}
    for kind in CHILD_KINDS:
        where = (kind.group, kind.version, kind.plural)
        kopf.index(*where, registry=registry, id="children", labels=labels)(index_of(kind))
        kopf.on.event(*where, registry=registry, id=f"wake-{kind.plural}", labels=labels)(event)
    where = (POD.group, POD.version, POD.plural)
    labels = {LABEL_NAME: APP_NAME}
    kopf.index(*where, registry=registry, id="pods", labels=labels)(index_pod)
    kopf.on.event(*where, registry=registry, id="wake-pods", labels=labels)(event)


class _NoDifferences(kopf.DiffBaseStorage):
    """Disables the computation of differences, for which kopf copies each object twice per event."""

    def build(self, **_: Any) -> kopf.BodyEssence:
        return kopf.BodyEssence()

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        """Stores no progress in the cluster."""


def kopf_settings(*, watch_seconds: float) -> kopf.OperatorSettings:
    """Set the relevant settings of kopf explicitly.

    watch_seconds: duration of a watch. The server sends a bookmark shortly before its end, so the next watch continues
        without a listing. A dead watch is detected and replaced in the same time.
    """
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.posting.loggers = False
    settings.peering.standalone = True
    settings.scanning.disabled = True
    settings.networking.request_timeout = 30
    settings.networking.connect_timeout = 10
    settings.networking.error_backoffs = (0.2, 0.5, 1, 2, 3, 5)
    settings.watching.connect_timeout = 10
    settings.watching.server_timeout = math.ceil(watch_seconds)
    settings.watching.client_timeout = math.ceil(watch_seconds) + GRACE_SECONDS
    settings.watching.reconnect_backoff = 0.1
    settings.execution.default_backoff = 5
    settings.queueing.error_delays = (0.5, 1, 2, 5, 10)
    # It would kill a process whose kopf has ended and was restarted.
    settings.process.ultimate_exiting_timeout = None
    settings.persistence.diffbase_storage = _NoDifferences()
    for kind in CHILD_KINDS:
        settings.watching.label_selectors[kind.group, kind.version, kind.plural] = CHILD_SELECTOR
    settings.watching.label_selectors[POD.group, POD.version, POD.plural] = POD_SELECTOR
    return settings


class WatchesEndedError(Exception):
    """The watches have ended and may be restarted. The message has the cause."""


class KopfRun:
    """started: called once, before any event, with the live indexes."""

    def __init__(
        self,
        configuration: Configuration,
        supervisor: TaskSupervisor,
        *,
        namespaces: tuple[str, ...],
        watch_seconds: float,
        started: Callable[[Index], None],
    ) -> None:
        self.watches = WatchAges(watch_seconds=watch_seconds)
        self._configuration = configuration
        self._supervisor = supervisor
        self._namespaces = namespaces
        self._watch_seconds = watch_seconds
        self._started = started
        self._told = asyncio.Event()
        """Set when kopf should stop or is stopping."""

    def end(self) -> None:
        self._told.set()

    async def run(self) -> None:
        """Run until end() is called, kopf gets a signal or a watched kind vanishes.

        Raises:
            WatchesEndedError: kopf has failed or does not stop, or the API server no longer serves a watched kind.
        """
        operating = asyncio.create_task(self._operate(), name="kopf")
        told = asyncio.create_task(self._told.wait())
        vanished = asyncio.create_task(self.watches.vanished.wait())
        try:
            await asyncio.wait({operating, told, vanished}, return_when=asyncio.FIRST_COMPLETED)
            self._told.set()
            await asyncio.wait({operating}, timeout=END_SECONDS)
        finally:
            for task in (operating, told, vanished):
                task.cancel()
        if not operating.done():
            raise WatchesEndedError(f"kopf has not stopped within {END_SECONDS:g} s")
        error = operating.exception()
        if error is not None:
            raise WatchesEndedError(str(error) or repr(error)) from error
        if self.watches.vanished.is_set():
            raise WatchesEndedError("the API server no longer serves a watched kind")

    async def _operate(self) -> None:
        registry = build_registry(
            login=lambda: kopf_session(self._configuration, watches=self.watches),
            started=self._started,
            wake_resource=self._supervisor.wake_resource,
            wake_instance=self._supervisor.wake_instance,
        )

        @kopf.on.cleanup(registry=registry)
        async def cleanup(**_: Any) -> None:
            # kopf treats every task created since its start as its own and would wait for it; its own waiter
            # for the stop flag is among them.
            self._told.set()
            await self._supervisor.stop()

        await kopf.operator(
            registry=registry,
            settings=kopf_settings(watch_seconds=self._watch_seconds),
            standalone=True,
            clusterwide=not self._namespaces,
            namespaces=self._namespaces,
            stop_flag=self._told,
        )
