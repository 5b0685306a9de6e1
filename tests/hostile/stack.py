"""An installation on loopback: a coordinator with keys, two echo engines and an OpenAI server with API keys."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
from eventually import LONG_SECONDS
from fleet import Fleet, Process, until_serving
from soak import size

WELL_BEHAVED_KEY, HOSTILE_KEY, LIMITED_KEY = "well-behaved-key", "hostile-key", "limited-key"
TOKENS_PER_MINUTE = 2000
"""Limit of LIMITED_KEY."""
MODEL = "smollm2-135m"
ENGINES = ("engine-0", "engine-1")
STREAMS = size(4, soak=8)
"""Well-behaved streams."""
STEP_SECONDS = 0.02
MAX_REQUESTS = 32
MAX_SEQUENCE_LENGTH = 4096


@dataclass(frozen=True)
class Window:
    """Measurements of the well-behaved streams during a period, as `watched_streams.py` documents them."""

    longest_wait: float
    longest_delay: float
    tokens: int
    answers: int
    failures: list[str]


class Streams:
    """The program watched_streams.py."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, url: str) -> Streams:
        script = Path(__file__).with_name("watched_streams.py")
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, str(script), url, WELL_BEHAVED_KEY, MODEL, str(STREAMS)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        streams = cls(process)
        await streams._next()
        return streams

    async def window(self) -> Window:
        """Return the current window and begin the next."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        return await self._next()

    async def _next(self) -> Window:
        assert self._process.stdout is not None
        line = await asyncio.wait_for(self._process.stdout.readline(), LONG_SECONDS)
        return Window(**json.loads(line))

    async def close(self) -> None:
        self._process.kill()
        await self._process.wait()


class Stack:
    """The processes of an installation."""

    def __init__(self, directory: Path) -> None:
        self.fleet = Fleet(directory)
        self._directory = directory
        self.streams: Streams | None = None
        """The well-behaved streams, from start() to close()."""
        self.url = ""
        self.health_port = 0
        self.longest_undisturbed = 0.0
        """Longest wait of a well-behaved stream without an attack, in seconds."""

    async def start(self, *engine_arguments: str) -> None:
        self.coordinator = await self.fleet.coordinator()
        for name in ENGINES:
            await self.fleet.keep_running(
                name,
                *("--max-requests", str(MAX_REQUESTS), "--kv-cache-memory", "16Mi"),
                *("--max-sequence-length", str(MAX_SEQUENCE_LENGTH), "--echo-step-seconds", str(STEP_SECONDS)),
                *engine_arguments,
            )
        link = await self.fleet.admin()
        await until_serving(link, ENGINES)
        keys_file = self._directory / "api-keys"
        keys = [{"name": key, "key": key} for key in (WELL_BEHAVED_KEY, HOSTILE_KEY, LIMITED_KEY)]
        keys[-1]["tokensPerMinute"] = TOKENS_PER_MINUTE
        keys_file.write_text(f"keys: {json.dumps(keys)}\n")
        options = ("--api-keys-file", str(keys_file), "--max-sequence-length", str(MAX_SEQUENCE_LENGTH))
        self.server, self.url = await self.fleet.server(*options, warm=False)
        self.health_port = self.server.health_port
        self.streams = await Streams.start(self.url)

    def hostile_client(self) -> httpx.AsyncClient:
        return self.client(HOSTILE_KEY)

    def client(self, key: str) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, timeout=LONG_SECONDS, headers={"authorization": f"Bearer {key}"})

    @property
    def processes(self) -> dict[str, Process]:
        """The processes that must keep running."""
        return {"coordinator": self.coordinator, "server": self.server, **self.fleet.engines}

    def reset_peaks(self) -> None:
        """Begin a new measurement of peak memory."""
        for process in self.processes.values():
            Path(f"/proc/{process.pid}/clear_refs").write_text("5")

    def peak_memory(self) -> dict[str, int]:
        """Return the peak resident bytes of each process since reset_peaks(), plus its children's current bytes."""
        sizes = {}
        for name, process in self.processes.items():
            status = Path(f"/proc/{process.pid}/status").read_text()
            peak = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
            sizes[name] = int(peak.split()[1]) << 10
            for child in psutil.Process(process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    sizes[name] += int(child.memory_info().rss)
        return sizes

    async def close(self) -> None:
        if self.streams is not None:
            await self.streams.close()
        await self.fleet.close()


Attack = Callable[[Stack], Any]
