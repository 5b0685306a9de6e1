"""Registers the engine of a user's program with a coordinator and serves requests, on an event loop of the program."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from megatron_runtime.backends.native.backend import NativeBackend
from megatron_runtime.backends.native.engine import EngineCore
from megatron_runtime.backends.native.ranked.executor import Follower, RankedExecutor
from megatron_runtime.backends.text import ModelText
from megatron_runtime.coordinator.core.settings import CoordinatorSettings
from megatron_runtime.coordinator.spawn import CoordinatorProcess, spawn_coordinator
from megatron_runtime.engine.lifecycle import StateEvents
from megatron_runtime.engine.settings import EngineSettings
from megatron_runtime.engine.worker import EngineWorker
from megatron_runtime.in_process.calls import EngineFailedError, FollowedCalls
from megatron_runtime.process.threads import off_loop
from megatron_runtime.protocol.lifecycle import EngineState

REGISTRATION_SECONDS = 300.0
"""Maximum time in which the engine of a program tries to reach its coordinator."""


class ServedEngine:
    """One rank of an engine that is registered with a coordinator.

    It runs on the event loop on which start() was called.
    task:        finishes when the engine has stopped; raises EngineFailedError if it failed; None before start().
    coordinator: the process of the coordinator, if this rank launched it.
    """

    task: asyncio.Task[Any] | None = None
    coordinator: CoordinatorProcess | None = None
    events: StateEvents

    async def wait_until(self, state: EngineState, *, times: int | None = None) -> None:
        """Wait until the engine has reached `state` or, if `times` is given, has reached it `times` times.

        Raises EngineFailedError if the engine stops first.
        """
        if not self.events.has_reached(state, times=times):
            await self._unless_ended(self.events.wait(state, times=times))

    async def _unless_ended(self, wait: Coroutine[Any, Any, object]) -> None:
        """Await `wait`. Raises EngineFailedError if the engine stops first."""
        assert self.task is not None
        waiting = asyncio.create_task(wait)
        try:
            await asyncio.wait({waiting, self.task}, return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                await asyncio.shield(self.task)
                raise EngineFailedError("the engine has stopped")
        finally:
            waiting.cancel()


class EngineService(ServedEngine):
    """A ServedEngine for the first rank. It runs an EngineWorker for `core` until stop() or until the engine stops."""

    def __init__(self, core: EngineCore, text: ModelText | None, *, name: str) -> None:
        self.worker: EngineWorker | None = None
        self._core = core
        self._text = text
        self._name = name

    async def start(self, address: str, *, launch: CoordinatorSettings | None) -> str:
        """Register with the coordinator at `address` and serve. Return the coordinator's address.

        launch: settings of a coordinator to launch; None if a coordinator already runs at `address`.
        """
        try:
            if launch is not None:
                self.coordinator = await asyncio.to_thread(spawn_coordinator, launch)
                address = self.coordinator.address
            settings = EngineSettings(
                coordinator=address,
                name=self._name,
                max_requests=self._core.config.request_slots,
                registration_seconds=REGISTRATION_SECONDS,
            )
            executor = self._core.executor
            ranks = executor if isinstance(executor, RankedExecutor) else None
            worker = self.worker = EngineWorker(settings, NativeBackend(self._core, self._text, ranks=ranks))
            self.events = worker.lifecycle.events
            if ranks is not None:
                self.events.on_enter = ranks.share_state
            self.task = asyncio.create_task(self._serve(worker))
            await self._unless_ended(worker.joined.wait())
            if ranks is not None:
                ranks.share_state(self.events.state, has_joined=True)
        except BaseException:
            await self.stop()
            raise
        return address

    async def stop(self) -> None:
        """Stop the worker, then the coordinator if this rank launched it. Ignore their errors. Idempotent."""
        if self.worker is not None:
            self.worker.ended.set()
        if self.task is not None:
            with contextlib.suppress(EngineFailedError):  # callers that wait for the task get this error
                await self.task
        if self.coordinator is not None:
            await off_loop(self.coordinator.stop)

    async def _serve(self, worker: EngineWorker) -> None:
        """Run the worker until a verb or stop() stops the engine, or until the engine fails."""
        running = asyncio.create_task(worker.run())
        stopped = asyncio.create_task(worker.lifecycle.events.wait(EngineState.STOPPED))
        try:
            await asyncio.wait({running, stopped}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            worker.ended.set()
            stopped.cancel()
            await running
        if worker.failure is not None:
            raise EngineFailedError(f"engine {self._name} failed: {worker.failure}") from worker.failure


class FollowedService(ServedEngine):
    """The service of any rank other than the first.

    It executes the first rank's commands, and follows the states that the first rank reports. The constructor starts
    the thread that executes the commands.
    """

    def __init__(self, follower: Follower) -> None:
        self.events = StateEvents(EngineState.PAUSED)
        self._joined = asyncio.Event()
        self._ended = asyncio.Event()
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._early: list[Callable[[], object]] = []
        """Events that happened before start()."""
        self._follower = follower
        self.calls = FollowedCalls(follower.part, rank=follower.rank, wait=self._wait_at_exit)
        follower.channel.on_state = lambda state, has_joined: self._call(lambda: self._enter(state, has_joined))
        self._thread = threading.Thread(target=self._run, name="engine rank", daemon=True)
        self._thread.start()

    def _wait_at_exit(self) -> None:
        """Execute the first rank's commands until the first rank exits, or until an error ends this process."""
        if getattr(sys, "last_value", None) is None:
            self._thread.join()

    def _run(self) -> None:
        try:
            self._follower.run()
        finally:
            self._call(self._ended.set)

    def _call(self, action: Callable[[], object]) -> None:
        """Run `action` on the event loop on which start() was called."""
        with self._lock:
            if self._loop is None:
                self._early.append(action)
            elif not self._loop.is_closed():
                self._loop.call_soon_threadsafe(action)

    def _enter(self, state: str, has_joined: bool) -> None:
        if has_joined:
            self._joined.set()
        else:
            self.events.enter(EngineState(state))

    async def start(self, address: str, *, launch: CoordinatorSettings | None) -> str:
        """Wait until the first rank has registered the engine. Return the address of the coordinator."""
        with self._lock:
            self._loop, early = asyncio.get_running_loop(), self._early
        for action in early:
            action()
        self.task = asyncio.create_task(self._ended.wait())
        await self._unless_ended(self._joined.wait())
        return address

    async def stop(self) -> None:
        """Ask the first rank to stop the engine if the engine is running, and wait until the engine has stopped."""
        if self.task is not None:
            self._follower.channel.leave()
            await self.task
