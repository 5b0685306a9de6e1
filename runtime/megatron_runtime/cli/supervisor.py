"""Child processes of `megatron serve`: started together, watched, restarted within a budget, ended in order."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from megatron_runtime.process.parent import PARENT_VARIABLE

RESTARTS = 3
RESTART_WINDOW_SECONDS = 60.0
_LINES_KEPT = 20


class ChildFailedError(Exception):
    """A child ended and is not started again; the message says which, how, and its last words."""


@dataclass(slots=True)
class Child:
    """One supervised process.

    arguments: what follows `megatron` on its command line.
    pass_fds:  descriptors that it inherits.
    """

    name: str
    arguments: Sequence[str]
    pass_fds: Sequence[int] = ()
    environment: dict[str, str] = field(default_factory=dict)
    process: asyncio.subprocess.Process | None = None
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=_LINES_KEPT))
    restarts: deque[float] = field(default_factory=deque)


class Supervisor:
    """Runs children until stop().

    say:  prints one line for the user; gets a child's name (or None) and the line.
    Children get their own session, so that Ctrl-C reaches only the supervisor, which ends them in order.
    """

    def __init__(self, *, say: Callable[[str | None, str], None]) -> None:
        self._say = say
        self._children: list[Child] = []
        self._watchers: list[asyncio.Task[None]] = []
        self._stopping = False
        self.are_ready = False
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def start(self, child: Child) -> None:
        """Start a child and watch it; `failed` gets ChildFailedError when it is lost for good."""
        self._children.append(child)
        await self._spawn(child)
        self._watchers.append(asyncio.create_task(self._watch(child)))

    async def stop(self, *, grace_seconds: float) -> None:
        """End the children, the last started first, each with SIGTERM and, after the grace time, SIGKILL."""
        self._stopping = True
        for child in reversed(self._children):
            await self._end(child, grace_seconds=grace_seconds)
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)

    def signal_all(self, number: signal.Signals) -> None:
        for child in self._children:
            if child.process is not None and child.process.returncode is None:
                child.process.send_signal(number)

    async def _spawn(self, child: Child) -> None:
        child.process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "megatron_runtime.cli",
            *child.arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, **child.environment, PARENT_VARIABLE: str(os.getpid()), "PYTHONUNBUFFERED": "1"},
            pass_fds=child.pass_fds,
            start_new_session=True,
        )

    async def _watch(self, child: Child) -> None:
        while True:
            await self._relay_output(child)
            assert child.process is not None
            code = await child.process.wait()
            if self._stopping:
                return
            ended = f"{child.name} ended with {_exit_words(code)}"
            if not self.are_ready or not self._may_restart(child):
                last_words = "".join(f"\n  {line}" for line in child.last_lines)
                if not self.failed.done():
                    self.failed.set_exception(ChildFailedError(f"{ended}{last_words}"))
                return
            self._say(None, f"{ended}; starting it again")
            await self._spawn(child)

    async def _relay_output(self, child: Child) -> None:
        assert child.process is not None
        assert child.process.stdout is not None
        while True:
            try:
                line = await child.process.stdout.readline()
            except ValueError:  # a line beyond the stream's limit; the reader has dropped it
                continue
            if not line:
                return
            text = line.decode(errors="replace").rstrip()
            child.last_lines.append(text)
            self._say(child.name, text)

    def _may_restart(self, child: Child) -> bool:
        now = time.monotonic()
        while child.restarts and now - child.restarts[0] > RESTART_WINDOW_SECONDS:
            child.restarts.popleft()
        child.restarts.append(now)
        return len(child.restarts) <= RESTARTS

    async def _end(self, child: Child, *, grace_seconds: float) -> None:
        process = child.process
        if process is None or process.returncode is not None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(grace_seconds):
                await process.wait()
        except TimeoutError:
            self._say(None, f"{child.name} did not end within {grace_seconds:g} s: killing it")
            process.kill()
            await process.wait()


def _exit_words(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"status {code}"
