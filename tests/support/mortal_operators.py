"""`megatron-operator`, of which the task of each resource `p-N` dies at its Nth point and is succeeded by another.

A point is right before and right after each request to the API server, each question to the coordinator and each
signal: between two of them nothing has an effect. Whoever is dead asks and says nothing any more, whatever it was in
the middle of. A successor knows nothing and has a higher term. `$POINTS_FILE` tells how many points each life had.
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
    """The task ended here; nothing may catch it."""


class Life:
    """Counts the points of one resource's tasks, and ends the first task at one of them."""

    def __init__(self, name: str) -> None:
        number = name.rpartition("-")[2]
        self.end_at = int(number) if number.isdigit() else 0
        self.count = 0

    def task(self) -> Mortality:
        return Mortality(self)


class Mortality:
    """What the parts of one task share: whether it lives."""

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


class MortalApi(KubeApi):
    """The connection of `api`, used by one task."""

    def __init__(self, api: KubeApi, mortality: Mortality) -> None:
        self.__dict__.update(api.__dict__)
        self._mortality = mortality

    async def request(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        self._mortality.point(f"before {method} {path}")
        answer = await super().request(method, path, **options)
        self._mortality.point(f"after {method} {path}")
        return answer


class MortalLink(CoordinatorLink):
    def __init__(self, mortality: Mortality, **options: Any) -> None:
        super().__init__(**options)
        self._mortality = mortality

    async def refresh(self, *, expected: bool = False) -> Any:
        self._mortality.point("before STATUS")
        answer = await super().refresh(expected=expected)
        self._mortality.point("after STATUS")
        return answer

    def signal(self, signal: Any) -> bool:
        self._mortality.point(f"before {signal.kind}")
        sent = super().signal(signal)
        self._mortality.point(f"after {signal.kind}")
        return sent

    def ask_canary(self, asked: Any) -> bool:
        self._mortality.point("before a canary")
        sent = super().ask_canary(asked)
        self._mortality.point("after a canary")
        return sent

    async def close(self) -> None:
        if self._mortality.dead and self._link is not None:
            # A process that dies sends no DISCONNECT.
            self._link.registered = False
        await super().close()


class MortalTask:
    """A task, and after its death another: for the supervisor they are one."""

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


class MortalProcess(controller.OperatorProcess):
    _lives: dict[str, Life]

    async def run(self) -> int:
        self._lives = {}
        try:
            return await super().run()
        finally:
            self._tell()

    def _tell(self) -> None:
        counts = {name: life.count for name, life in self._lives.items()}
        Path(os.environ["POINTS_FILE"]).write_text(json.dumps(counts))

    def _make_task(self, uid: str, key: Any, woken: asyncio.Event, api: Any, _: Any, elector: Any, *rest: Any) -> Any:
        life = self._lives[key[1]] = Life(key[1])
        make_immortal = super()._make_task

        def make() -> ResourceTask:
            mortality = life.task()
            mortal = MortalApi(api, mortality)
            gate = Writer(mortal, guard=elector.check, count=self._metrics.count_write)
            controller.CoordinatorLink = lambda *args, **options: MortalLink(mortality, *args, **options)  # type: ignore
            try:
                return make_immortal(uid, key, woken, mortal, gate, elector, *rest)
            finally:
                controller.CoordinatorLink = CoordinatorLink  # type: ignore[misc]

        return MortalTask(make, elector)


if __name__ == "__main__":
    controller.OperatorProcess = MortalProcess  # type: ignore[misc]
    cli.main()
