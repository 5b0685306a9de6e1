"""Runs trainer_program.py as a process of its own."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import trainer_program
from eventually import LONG_SECONDS

from megatron_runtime.cli.processes import free_ports


class TrainerProcess:
    """A trainer, started again after it was killed. Its port stays the same unless it moves.

    coordinator: "HOST:PORT" of the admin port. model: directory of the weights of epoch 0.
    """

    def __init__(self, coordinator: str, keys: Path, model: str) -> None:
        self._arguments = (coordinator, str(keys), model)
        self._process: asyncio.subprocess.Process | None = None
        self.move()

    def move(self) -> None:
        """Use another address from the next start on."""
        (self._port,) = free_ports(1)

    async def start(self) -> int:
        """Return the epoch of the engines."""
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, trainer_program.__file__, *self._arguments, str(self._port)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        return int((await self.answer())["epoch"])

    def order(self, epoch: int) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"epoch": epoch}).encode() + b"\n")

    async def answer(self) -> dict[str, Any]:
        """Return the answer to an order; {} if the process has ended."""
        assert self._process is not None
        assert self._process.stdout is not None
        line = await asyncio.wait_for(self._process.stdout.readline(), LONG_SECONDS)
        return dict(json.loads(line)) if line else {}

    async def publish(self, epoch: int) -> dict[str, Any]:
        self.order(epoch)
        return await self.answer()

    async def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()
