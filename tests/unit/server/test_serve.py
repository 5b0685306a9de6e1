"""`megatron serve` as a user runs it: real processes, real sockets; the echo executor in place of weights."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import openai
import psutil
import pytest

MODEL = "smollm2-135m"
MESSAGES = [{"role": "user", "content": "Name three rivers 🏞️"}]


@dataclass(slots=True)
class Served:
    """One `megatron serve`, its output line by line."""

    process: asyncio.subprocess.Process
    lines: list[str] = field(default_factory=list)
    url: str = ""

    async def until(self, pattern: str) -> re.Match[str]:
        """Read on until a line matches."""
        assert self.process.stdout is not None
        while line := (await self.process.stdout.readline()).decode():
            self.lines.append(line.rstrip())
            if match := re.search(pattern, line):
                return match
        raise AssertionError(f"{pattern!r} was never said:\n" + "\n".join(self.lines))

    def children(self) -> dict[str, psutil.Process]:
        children = psutil.Process(self.process.pid).children()
        return {child.cmdline()[3]: child for child in children}

    def client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="any", max_retries=0)


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "megatron_runtime.cli", "serve", "--executor", "echo", "--port", "0"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    served = Served(process)
    ready = await served.until(r"ready in [\d.]+ s: \S+ at (http://127\.0\.0\.1:\d+)/v1")
    served.url = ready[1]
    yield served
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    await process.communicate()


async def _gone(children: dict[str, psutil.Process]) -> None:
    _, alive = await asyncio.to_thread(psutil.wait_procs, list(children.values()), timeout=30)
    assert alive == []


async def test_it_answers_survives_an_engine_and_ends_without_leaving_anything(served: Served) -> None:
    async with served.client() as client:
        fields = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 40}
        whole = await client.chat.completions.create(**fields)
        stream = await client.chat.completions.create(**fields, stream=True)
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
        assert "".join(pieces) == whole.choices[0].message.content
        assert whole.usage.completion_tokens == 40
    children = served.children()
    assert set(children) == {"coordinator", "engine", "server"}

    children["engine"].kill()
    await served.until("engine-0 ended with signal SIGKILL; starting it again")
    async with served.client() as client:
        assert (await client.completions.create(model=MODEL, prompt="again", max_tokens=4)).choices

    children = served.children()
    served.process.send_signal(signal.SIGINT)
    await served.until("stopping")
    assert await served.process.wait() == 0
    await _gone(children)


async def test_nothing_survives_when_it_is_killed(served: Served) -> None:
    children = served.children()
    assert len(children) == 3
    served.process.kill()
    await served.process.wait()
    await _gone(children)


async def test_a_taken_port_is_told_at_once(running: Any) -> None:
    port = running.url.rsplit(":", 1)[1]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "megatron_runtime.cli", "serve", "--port", port), stderr=asyncio.subprocess.PIPE
    )
    _, err = await process.communicate()
    assert process.returncode == 1
    assert (
        f"cannot listen on 127.0.0.1:{port} (Address already in use): choose another --host or --port" in err.decode()
    )
