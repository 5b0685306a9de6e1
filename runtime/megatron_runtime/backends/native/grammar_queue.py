"""Requests that wait for their grammar, while steps and other requests continue."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_runtime.sampling.structured_output import GrammarState

Begin = Callable[[], "GrammarState | None"]
Done = Callable[["asyncio.Task[GrammarState | None]"], None]


class GrammarQueue:
    """Begins grammars off the event loop: one new grammar at a time, in order of arrival.

    A grammar that was compiled before overtakes those that wait. All methods run on the event loop.
    """

    def __init__(self) -> None:
        # One thread for the new grammar and one for a known one.
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="grammar")
        self._compiling = asyncio.Lock()
        self._tasks: dict[int, asyncio.Task[GrammarState | None]] = {}

    def add(
        self, request_id: int, begin: Begin, *, is_known: bool, deadline_seconds: float | None, on_done: Done
    ) -> None:
        """Call `begin` on a thread when it is the request's turn, then `on_done` with the task that has its result.

        is_known:         `begin` compiles nothing.
        deadline_seconds: from now; after it the task fails with TimeoutError. None means no limit.
        on_done:          not called for a request that was dropped.
        """
        task = asyncio.ensure_future(self._run(begin, is_known=is_known, deadline_seconds=deadline_seconds))
        self._tasks[request_id] = task

        def done(task: asyncio.Task[GrammarState | None]) -> None:
            if self._tasks.get(request_id) is task:
                del self._tasks[request_id]
            if not task.cancelled():
                on_done(task)

        task.add_done_callback(done)

    def drop(self, request_id: int) -> None:
        """Forget a request that was aborted; it need not be here."""
        task = self._tasks.get(request_id)
        if task is not None:
            task.cancel()

    def close(self) -> None:
        for task in list(self._tasks.values()):
            task.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _run(self, begin: Begin, *, is_known: bool, deadline_seconds: float | None) -> GrammarState | None:
        async with asyncio.timeout(deadline_seconds):
            loop = asyncio.get_running_loop()
            if is_known:
                return await loop.run_in_executor(self._threads, begin)
            await self._compiling.acquire()
            try:
                compiling = loop.run_in_executor(self._threads, begin)
            except BaseException:
                self._compiling.release()
                raise
            # Shielded: a task that was cancelled does not let the next one begin before its grammar is compiled.
            compiling.add_done_callback(self._compiled)
            return await asyncio.shield(compiling)

    def _compiled(self, compiling: asyncio.Future[GrammarState | None]) -> None:
        self._compiling.release()
        if not compiling.cancelled():
            compiling.exception()  # read here: nothing else reads it if the request was dropped
