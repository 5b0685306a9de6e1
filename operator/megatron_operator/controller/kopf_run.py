"""One run of kopf, from its start to an end that is always reached.

kopf gives up when a kind that it watches vanishes under it, and may then wait for ever: watches that ask for a new
login in that moment take their cancellation for the end of a pause and go on. So whoever notices that a kind is gone
ends kopf in good order before it gives up by itself, and a kopf that does not come to its end is left alone.
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
from megatron_operator.controller.supervisor import Supervisor
from megatron_operator.controller.watches import build_registry, kopf_settings

logger = logging.getLogger(__name__)

END_SECONDS = 10.0
"""kopf itself waits for 5 s before it cancels what is left."""


class WatchesEndedError(Exception):
    """Watching cannot go on and may be started anew. The message says why."""


class KopfRun:
    """started: called once, before any event, with the live indexes."""

    def __init__(
        self,
        configuration: Configuration,
        supervisor: Supervisor,
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
        """That kopf is to end, or is ending."""

    def end(self) -> None:
        self._told.set()

    async def run(self) -> None:
        """Until it is told to end, or a signal tells kopf.

        Raises:
            WatchesEndedError: it ended by itself.
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
            raise WatchesEndedError(f"kopf has not come to its end for {END_SECONDS:g} s")
        error = operating.exception()
        if error is not None:
            raise WatchesEndedError(str(error) or repr(error)) from error
        if self.watches.vanished.is_set():
            raise WatchesEndedError("a kind that is watched is served no more")

    async def _operate(self) -> None:
        registry = build_registry(
            login=lambda: kopf_session(self._configuration, watches=self.watches),
            started=self._started,
            wake_resource=self._supervisor.wake_resource,
            wake_instance=self._supervisor.wake_instance,
        )

        @kopf.on.cleanup(registry=registry)
        async def cleanup(**_: Any) -> None:
            # kopf counts every task made since its start as one of its own and would wait for them; its own waiter
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
