"""One run of kopf, which watches the custom resources. Contains kopf's handlers and settings, and a shutdown with a
timeout.

The handler only stores the projection of a resource and wakes the task of this resource. There are no create, update or
delete handlers, daemons, timers or indexes, so kopf adds no finalizers or annotations and writes nothing. An index of
kopf would make every start wait for every object in turn, even in namespaces that cannot be read. Children are
therefore watched by `cluster.informers`, and the resources are listed before kopf starts.

kopf fails when a watched kind is deleted, and its shutdown may then hang. The cause is a watch that is renewing its
login at that moment. This watch treats its cancellation as the end of a pause and continues. This module therefore
stops kopf in an orderly way when a watched kind is gone. If a run of kopf does not stop in time, this module abandons
the run.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import kopf
from kubernetes.aio.client import Configuration

from megatron_operator.cluster.auth import kopf_session
from megatron_operator.cluster.kinds import RESOURCE
from megatron_operator.cluster.projection import SeenResource, project_resource
from megatron_operator.cluster.watch_ages import GRACE_SECONDS, WatchAges
from megatron_operator.controller.task import TaskSupervisor

END_SECONDS = 10.0
"""Timeout of the shutdown. kopf itself waits 5 s before it cancels its remaining tasks."""


def build_registry(
    *, login: Callable[[], kopf.AiohttpSession], show: Callable[[SeenResource, bool], None]
) -> kopf.OperatorRegistry:
    """Return kopf's registry with the operator's handlers.

    show: called with a resource that was listed, created, changed or deleted, and with whether it exists.
    """
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    async def authenticate(**_: Any) -> kopf.AiohttpSession:
        return login()

    @kopf.on.event(RESOURCE.group, RESOURCE.version, RESOURCE.plural, registry=registry)
    async def event(body: kopf.Body, type: str | None, **_: Any) -> None:
        show(project_resource(dict(body)), type != "DELETED")

    return registry


class _NoDifferences(kopf.DiffBaseStorage):
    """A storage that disables kopf's computation of differences between versions of an object.

    To compute the differences, kopf would copy each object twice per event.
    """

    def build(self, **_: Any) -> kopf.BodyEssence:
        return kopf.BodyEssence()

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        """Write nothing to the cluster."""


def kopf_settings(*, watch_seconds: float) -> kopf.OperatorSettings:
    """Return kopf's settings. Every relevant setting has an explicit value.

    watch_seconds: duration of a watch. The server sends a bookmark shortly before the watch ends, so the next watch
        continues without a listing. A dead watch is detected and replaced within the same time.
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
    # A timeout would kill a process whose kopf has ended and was restarted.
    settings.process.ultimate_exiting_timeout = None
    settings.persistence.diffbase_storage = _NoDifferences()
    return settings


class WatchesEndedError(Exception):
    """The watches have ended and can be restarted. The message has the cause."""


class KopfRun:
    """One run of kopf, which watches the operator's resources.

    show: called with a resource that was listed, created, changed or deleted, and with whether it exists.
    """

    def __init__(
        self,
        configuration: Configuration,
        supervisor: TaskSupervisor,
        *,
        namespaces: tuple[str, ...],
        watch_seconds: float,
        show: Callable[[SeenResource, bool], None],
        started: Callable[[], None],
    ) -> None:
        self.watches = WatchAges(watch_seconds=watch_seconds)
        self._configuration = configuration
        self._supervisor = supervisor
        self._namespaces = namespaces
        self._watch_seconds = watch_seconds
        self._show = show
        self._started = started
        self._stop = asyncio.Event()
        """Set when kopf should stop or is stopping."""

    def end(self) -> None:
        self._stop.set()

    async def run(self) -> None:
        """Run until end() is called, kopf receives a signal, or a watched kind is deleted.

        Raises:
            WatchesEndedError: kopf has failed or does not stop, or the API server no longer serves a watched kind.
        """
        operating = asyncio.create_task(self._operate(), name="kopf")
        stopped = asyncio.create_task(self._stop.wait())
        vanished = asyncio.create_task(self.watches.vanished.wait())
        try:
            await asyncio.wait({operating, stopped, vanished}, return_when=asyncio.FIRST_COMPLETED)
            self._stop.set()
            await asyncio.wait({operating}, timeout=END_SECONDS)
        finally:
            for task in (operating, stopped, vanished):
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
            login=lambda: kopf_session(self._configuration, watches=self.watches), show=self._show
        )

        @kopf.on.startup(registry=registry)
        async def start(**_: Any) -> None:
            self._started()

        @kopf.on.cleanup(registry=registry)
        async def cleanup(**_: Any) -> None:
            # kopf waits for every task that was created since kopf started. One of them is kopf's own task that
            # waits for the stop flag. It ends only when the flag is set.
            self._stop.set()
            await self._supervisor.stop()

        await kopf.operator(
            registry=registry,
            settings=kopf_settings(watch_seconds=self._watch_seconds),
            standalone=True,
            clusterwide=not self._namespaces,
            namespaces=self._namespaces,
            stop_flag=self._stop,
        )
