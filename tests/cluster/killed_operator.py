"""`megatron-operator` whose task for each resource `p-N` is killed at its Nth point and replaced by a new task.

A point is right before and right after each request to the API server, each query to the coordinator and each signal;
between two points nothing has an effect. A killed task sends nothing more. Its replacement has no memory and a higher
term. `$POINTS_FILE` receives the number of points of each resource.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_operator import cli
from megatron_operator.cluster.api import KubeApi
from megatron_operator.cluster.writer import Writer
from megatron_operator.controller import main as controller
from megatron_operator.controller.task import ResourceTask
from megatron_operator.link.connection import CoordinatorLink

logger = logging.getLogger(__name__)


class KilledError(BaseException):
    """Ends a task at a point. It derives from BaseException so that no handler of the task catches it."""


class Life:
    """Counts the points of one resource's tasks, and ends the first task at one of them."""

    def __init__(self, name: str) -> None:
        number = name.rpartition("-")[2]
        self.end_at = int(number) if number.isdigit() else 0
        self.count = 0

    def task(self) -> LifeState:
        return LifeState(self)


class LifeState:
    """Whether one task was killed; shared by its API connection and its link."""

    def __init__(self, life: Life) -> None:
        self._life = life
        self.dead = False

    def point(self, what: str) -> None:
        if self.dead:
            raise KilledError
        self._life.count += 1
        if self._life.count == self._life.end_at:
            self.dead = True
            logger.info("killed", extra={"point": self._life.count, "at": what})
            raise KilledError


class KillableApi(KubeApi):
    """The connection of `api`, used by one task."""

    def __init__(self, api: KubeApi, life_state: LifeState) -> None:
        self.__dict__.update(api.__dict__)
        self._life_state = life_state

    async def request(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        self._life_state.point(f"before {method} {path}")
        answer = await super().request(method, path, **options)
        self._life_state.point(f"after {method} {path}")
        return answer


class KillableLink(CoordinatorLink):
    def __init__(self, life_state: LifeState, **options: Any) -> None:
        super().__init__(**options)
        self._life_state = life_state

    async def refresh(self, *, expected: bool = False) -> Any:
        self._life_state.point("before STATUS")
        answer = await super().refresh(expected=expected)
        self._life_state.point("after STATUS")
        return answer

    def signal(self, signal: Any) -> bool:
        self._life_state.point(f"before {signal.kind}")
        sent = super().signal(signal)
        self._life_state.point(f"after {signal.kind}")
        return sent

    def ask_canary(self, asked: Any) -> bool:
        self._life_state.point("before a canary")
        sent = super().ask_canary(asked)
        self._life_state.point("after a canary")
        return sent

    async def close(self) -> None:
        if self._life_state.dead and self._link is not None:
            # A killed process sends no DISCONNECT.
            self._link.registered = False
        await super().close()


class KillableTask:
    """A task that is replaced by another when it is killed. The supervisor sees one task."""

    def __init__(self, make: Callable[[], ResourceTask], elector: Any) -> None:
        self._make, self._elector = make, elector
        self._task = make()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)

    async def run(self) -> None:
        while True:
            try:
                return await self._task.run()
            except KilledError:
                async with self._elector._swap:
                    await self._elector._write(term=self._elector.term + 1)
                self._task = self._make()


class KillableProcess(controller.OperatorProcess):
    _lives: dict[str, Life]

    async def run(self) -> int:
        self._lives = {}
        try:
            return await super().run()
        finally:
            self._write_counts()

    def _write_counts(self) -> None:
        counts = {name: life.count for name, life in self._lives.items()}
        Path(os.environ["POINTS_FILE"]).write_text(json.dumps(counts))

    def _make_task(self, uid: str, key: Any, woken: asyncio.Event, api: Any, _: Any, elector: Any, *rest: Any) -> Any:
        life = self._lives[key[1]] = Life(key[1])
        make_task = super()._make_task

        def make() -> ResourceTask:
            life_state = life.task()
            killable = KillableApi(api, life_state)
            gate = Writer(killable, guard=elector.require_leadership, count=self._metrics.count_write)
            controller.CoordinatorLink = lambda *args, **options: KillableLink(life_state, *args, **options)  # type: ignore
            try:
                return make_task(uid, key, woken, killable, gate, elector, *rest)
            finally:
                controller.CoordinatorLink = CoordinatorLink  # type: ignore[misc]

        return KillableTask(make, elector)


if __name__ == "__main__":
    controller.OperatorProcess = KillableProcess  # type: ignore[misc]
    cli.main()
