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
from eventually import LONG_SECONDS, eventually
from fleet import Fleet, Process, free_ports, until_serving

WELL_BEHAVED_KEY, HOSTILE_KEY, LIMITED_KEY = "well-behaved-key", "hostile-key", "limited-key"
TOKENS_PER_MINUTE = 2000
"""Limit of LIMITED_KEY."""
MODEL = "smollm2-135m"
ENGINES = ("engine-0", "engine-1")
STEP_SECONDS = 0.02
MAX_REQUESTS = 32
MAX_SEQUENCE_LENGTH = 4096


@dataclass(frozen=True)
class Window:
    """Measurements of eight well-behaved streams during a period, as `watched_streams.py` documents them."""

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
            *(sys.executable, str(script), url, WELL_BEHAVED_KEY, MODEL),
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
    """Restarts engines that exit, as a StatefulSet does; `exits` lists them."""

    def __init__(self, directory: Path) -> None:
        self.fleet = Fleet(directory)
        self._directory = directory
        self.exits: list[str] = []
        self.url = ""
        self.health_port = 0
        self.longest_undisturbed = 0.0
        """Longest wait of a well-behaved stream without an attack, in seconds."""
        self._supervisors: list[asyncio.Task[None]] = []

    async def start(self, *engine_arguments: str) -> None:
        self.coordinator = await self.fleet.coordinator()
        for name in ENGINES:
            self._supervisors.append(asyncio.create_task(self._keep_running(name, engine_arguments)))
        link = await self.fleet.admin()
        await until_serving(link, ENGINES)
        keys_file = self._directory / "api-keys"
        keys = [{"name": key, "key": key} for key in (WELL_BEHAVED_KEY, HOSTILE_KEY, LIMITED_KEY)]
        keys[-1]["tokensPerMinute"] = TOKENS_PER_MINUTE
        keys_file.write_text(f"keys: {json.dumps(keys)}\n")
        port, self.health_port = free_ports(2)
        self.url = f"http://127.0.0.1:{port}"
        self.server = self.fleet.start_command(
            *("server", "--coordinator", f"127.0.0.1:{self.fleet.client_port}", "--host", "127.0.0.1"),
            *("--port", str(port), "--api-keys-file", str(keys_file), "--keys-dir", str(self.fleet.keys_dir)),
            *("--max-sequence-length", str(MAX_SEQUENCE_LENGTH), "--log-level", "error"),
            *("--health-port", str(self.health_port)),
        )
        await eventually(self.is_ready, what="the server is ready")

    async def _keep_running(self, name: str, arguments: tuple[str, ...]) -> None:
        while True:
            engine = await self.fleet.engine(
                name,
                *("--max-requests", str(MAX_REQUESTS), "--kv-cache-memory", "16Mi"),
                *("--max-sequence-length", str(MAX_SEQUENCE_LENGTH), "--echo-step-seconds", str(STEP_SECONDS)),
                *arguments,
            )
            code = await engine.ended()
            self.exits.append(f"{name}: {code}")

    async def is_ready(self) -> bool:
        try:
            async with httpx.AsyncClient(timeout=LONG_SECONDS) as http:
                return (await http.get(f"{self.url}/readyz")).status_code == 200
        except httpx.TransportError:
            return False

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
        for supervisor in self._supervisors:
            supervisor.cancel()
        await asyncio.gather(*self._supervisors, return_exceptions=True)
        await self.fleet.close()


Attack = Callable[[Stack], Any]
