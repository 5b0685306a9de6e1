"""Runs trainer_program.py as a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from pathlib import Path
from typing import Any

import trainer_program
from eventually import LONG_SECONDS
from warm_python import WarmProcess

from megatron_runtime.cli.processes import free_ports


class TrainerProcess:
    """A trainer, started again after it was killed. Its port stays the same unless it moves.

    coordinator: "HOST:PORT" of the admin port. model: directory of the weights of epoch 0.
    """

    def __init__(self, coordinator: str, keys: Path, model: str) -> None:
        self._arguments = (coordinator, str(keys), model)
        self._process: WarmProcess | None = None
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter
        self.move()

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def move(self) -> None:
        """Use another address from the next start on."""
        (self._port,) = free_ports(1)

    async def start(self) -> int:
        """Return the epoch of the engines."""
        program = trainer_program.__file__
        environment = {**os.environ, "PYTHONPATH": str(Path(program).parent)}
        ours, its = socket.socketpair()
        with its:
            self._process = WarmProcess(
                *(program, *self._arguments, str(self._port), "SOCKET"), environment=environment, passed=its.fileno()
            )
        self._reader, self._writer = await asyncio.open_connection(sock=ours)
        return int((await self.answer())["epoch"])

    def order(self, epoch: int) -> None:
        self._writer.write(json.dumps({"epoch": epoch}).encode() + b"\n")

    async def answer(self) -> dict[str, Any]:
        """Return the answer to an order; {} if the process has ended."""
        try:
            line = await asyncio.wait_for(self._reader.readline(), LONG_SECONDS)
        except ConnectionError:  # it was killed before it read the order
            return {}
        return dict(json.loads(line)) if line else {}

    async def publish(self, epoch: int) -> dict[str, Any]:
        self.order(epoch)
        return await self.answer()

    async def kill(self) -> None:
        if self._process is not None and self.running:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
            self._writer.close()
