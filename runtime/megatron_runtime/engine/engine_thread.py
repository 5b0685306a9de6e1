"""The one thread that runs an engine. Commands apply between steps; one wake-up of the event loop per step."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from megatron_runtime.backends.native.dynamic_engine import DynamicInferenceEngine
from megatron_runtime.backends.native.kv.prefix_cache import BlockEvents
from megatron_runtime.engine.engine_request import RequestOutput

logger = logging.getLogger(__name__)

T = TypeVar("T")
Outputs = list[RequestOutput]


class EngineStopped(RuntimeError):
    """The command came after the last step of the engine."""

    def __init__(self) -> None:
        super().__init__("the engine has stopped and takes no command any more")


class EngineThread:
    """Owns `engine` from start() on: nobody else may touch it, except through call().

    on_step:    receives what one step produced, on the loop, in order.
    on_blocks:  receives what changed in the prefix cache, on the loop.
    on_failure: receives the exception that ended the thread, on the loop.

    A result of call() reaches the loop after the outputs of every step that ran before the command.
    """

    def __init__(
        self,
        engine: DynamicInferenceEngine,
        *,
        on_step: Callable[[Outputs], None],
        on_failure: Callable[[BaseException], None],
        on_blocks: Callable[[BlockEvents], None] = lambda _events: None,
    ) -> None:
        self.steps = 0
        self.last_step: float | None = None
        """When the last step ended, of time.monotonic()."""
        self._engine = engine
        self._on_step = on_step
        self._on_blocks = on_blocks
        self._on_failure = on_failure
        self._commands: deque[tuple[Callable[[DynamicInferenceEngine], Any], asyncio.Future[Any]]] = deque()
        self._wake = threading.Condition()
        self._running = False
        self._ended = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """End after the step under way; all that the thread delivered has been received on return. Idempotent."""
        with self._wake:
            self._ended = True
            self._wake.notify()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)
        await asyncio.sleep(0)  # lets the loop run what the thread left in its queue, even if it ended long ago

    def call(self, command: Callable[[DynamicInferenceEngine], T]) -> asyncio.Future[T]:
        """Run `command` on the engine thread before its next step. EngineStopped if the thread has ended."""
        assert self._loop is not None, "start() first"
        future: asyncio.Future[T] = self._loop.create_future()
        with self._wake:
            if self._ended:
                future.set_exception(EngineStopped())
            else:
                self._commands.append((command, future))
                self._wake.notify()
        return future

    async def pause(self) -> None:
        """Clear the running flag; returns when the step under way has ended and its outputs were delivered."""
        await self.call(lambda _engine: self._set_running(False))

    async def unpause(self) -> None:
        await self.call(lambda _engine: self._set_running(True))

    def _set_running(self, running: bool) -> None:
        self._running = running

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                self._run_commands()
                if self._running and self._engine.has_work:
                    outputs = self._engine.step()
                    self.steps += 1
                    self.last_step = time.monotonic()
                    self._deliver(self._on_step, outputs)
                blocks = self._engine.take_block_events()
                if blocks:
                    self._deliver(self._on_blocks, blocks)
        except Exception as error:
            logger.exception("the engine failed")
            self._deliver(self._on_failure, error)
        self._refuse_commands()

    def _refuse_commands(self) -> None:
        """Answer those who still wait for a command that will never run."""
        with self._wake:
            self._ended = True
            while self._commands:
                _, future = self._commands.popleft()
                self._deliver(_fail, future, EngineStopped())

    def _wait_for_work(self) -> bool:
        """Block until there is a command or a step to run. False ends the thread."""
        with self._wake:
            self._wake.wait_for(
                lambda: self._ended or self._commands or (self._running and self._engine.has_work),
            )
            return not self._ended

    def _run_commands(self) -> None:
        while self._commands:
            command, future = self._commands.popleft()
            try:
                result = command(self._engine)
            except Exception as error:
                self._deliver(_fail, future, error)
            else:
                self._deliver(_resolve, future, result)

    def _deliver(self, callback: Callable[..., None], *arguments: Any) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(callback, *arguments)


def _resolve(future: asyncio.Future[Any], result: Any) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
