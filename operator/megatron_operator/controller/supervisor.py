"""Runs one task per resource UID, from when the resource is first seen until the task ends."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from megatron_operator.cluster.cache import Key
from megatron_operator.controller.metrics import Reading
from megatron_operator.controller.task import ResourceTask

logger = logging.getLogger(__name__)


class TaskSupervisor:
    """make_task: creates a task; its argument is the event that wakes the task."""

    def __init__(self, make_task: Callable[[str, Key, asyncio.Event], ResourceTask]) -> None:
        self._make_task = make_task
        self._tasks: dict[str, tuple[ResourceTask, asyncio.Task[None]]] = {}
        self._by_key: dict[Key, str] = {}
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Future with the fatal exception of a task: the loss of leadership."""

    def __len__(self) -> int:
        return len(self._tasks)

    @property
    def oldest_pass_seconds(self) -> float:
        """Age of the longest running pass in seconds; 0 without one."""
        now = time.monotonic()
        return max((now - task.busy_since for task, _ in self._tasks.values() if task.busy_since), default=0.0)

    @property
    def behind_seconds(self) -> float:
        """How long the watch of any resource has lagged behind, in seconds; 0 if none lags."""
        return max((task.behind_seconds for task, _ in self._tasks.values()), default=0.0)

    def readings(self) -> list[Reading]:
        """Callable on any thread."""
        return [task.reading for task, _ in list(self._tasks.values())]

    def wake_resource(self, uid: str, key: Key) -> None:
        """Wake the task: its resource was created, changed or deleted. A task of a deleted resource ends itself."""
        if uid not in self._tasks:
            task = self._make_task(uid, key, asyncio.Event())
            runner = asyncio.create_task(task.run(), name=f"resource {key[0]}/{key[1]}")
            runner.add_done_callback(lambda done: self._ended(task, done))
            self._tasks[uid] = (task, runner)
            self._by_key[key] = uid
        self._tasks[uid][0].wake()

    def wake_instance(self, key: Key) -> None:
        """Wake the task after a change of an object with this resource's name."""
        uid = self._by_key.get(key)
        if uid is not None:
            self._tasks[uid][0].wake()

    async def stop(self) -> None:
        """Cancel all tasks. The next start continues from the persisted state."""
        runners = [runner for _, runner in self._tasks.values()]
        for runner in runners:
            runner.cancel()
        await asyncio.gather(*runners, return_exceptions=True)

    def _ended(self, task: ResourceTask, runner: asyncio.Task[None]) -> None:
        del self._tasks[task.uid]
        if self._by_key.get(task.key) == task.uid:
            del self._by_key[task.key]
        if runner.cancelled():
            return
        error = runner.exception()
        if error is not None and not self.failed.done():
            self.failed.set_exception(error)
        elif error is None:
            logger.info("resource gone", extra={"resource": "/".join(task.key)})
