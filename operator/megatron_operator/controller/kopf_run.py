"""One run of kopf, with a bounded shutdown.

kopf fails when a watched kind is deleted, and its shutdown may then hang: a watch that is renewing its login at that
moment treats its cancellation as the end of a pause and continues. So this module stops kopf in an orderly way as soon
as a watched kind is gone, and abandons a kopf that does not stop in time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import kopf
from kubernetes.aio.client import Configuration

from megatron_operator.cluster.auth import kopf_session
from megatron_operator.cluster.cache import Index
from megatron_operator.cluster.watch_ages import WatchAges
from megatron_operator.controller.supervisor import TaskSupervisor
from megatron_operator.controller.watches import build_registry, kopf_settings

logger = logging.getLogger(__name__)

END_SECONDS = 10.0
"""Timeout of the shutdown. kopf itself waits 5 s before it cancels its remaining tasks."""


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
