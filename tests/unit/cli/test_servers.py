"""`megatron status`, and signals to a real server."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import echo_serve
import httpx
import psutil
import pytest
from click.testing import CliRunner, Result
from eventually import LONG_SECONDS

from megatron_runtime.cli import main
from megatron_runtime.cli.servers import running_servers


def megatron(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of the list of running servers."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
async def server(cache: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, echo_serve.PROGRAM, "serve", "--port", "0"),
        *("--kv-cache-memory", "16Mi", "--engines", "2"),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    while b"ready in" not in (line := await process.stdout.readline()):
        assert line, "it ended before it was ready"
    yield process
    if process.returncode is None:
        process.terminate()
    await process.communicate()


async def test_status_shows_servers_and_engines_until_they_end(server: asyncio.subprocess.Process) -> None:
    (shown,) = json.loads((await asyncio.to_thread(megatron, "status", "-o", "json")).stdout)
    assert (shown["pid"], shown["model"], shown["name"]) == (server.pid, "builtin:smollm2-135m", "smollm2-135m")
    assert shown["engines"] == [
        {"name": f"engine-{index}", "state": "RUNNING", "serving": True, "ranks": 1, "requests": 0}
        for index in range(2)
    ]
    header, line = (await asyncio.to_thread(megatron, "status")).stdout.splitlines()
    assert header.split() == ["ADDRESS", "MODEL", "PID", "AGE", "ENGINES"]
    assert line.startswith(f"{shown['url']}   smollm2-135m   {server.pid} ")
    assert line.endswith("engine-0 RUNNING, engine-1 RUNNING")
    children = psutil.Process(server.pid).children()
    assert len(children) == 4
    server.send_signal(signal.SIGKILL)
    await server.wait()
    _, alive = await asyncio.to_thread(psutil.wait_procs, children, timeout=LONG_SECONDS)
    assert alive == []
    assert running_servers() == []
    result = await asyncio.to_thread(megatron, "status")
    assert "no server runs: start one with 'megatron serve MODEL'" in result.stderr


async def test_a_server_that_cannot_be_listed_drains_at_a_sigterm_to_all_processes(cache: Path) -> None:
    """A service manager such as systemd sends the signal to every process of the group at once."""
    (cache / "megatron").touch()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, echo_serve.PROGRAM, "serve", "--port", "0"),
        *("--kv-cache-memory", "16Mi", "--drain-seconds", str(LONG_SECONDS)),
        env={**os.environ, "ECHO_STEP_SECONDS": "0.05"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    while (ready := re.search(rb"ready in .* at (http://\S+)/v1", line := await process.stdout.readline())) is None:
        assert line, "it ended before it was ready"
    assert running_servers() == []
    body = {"prompt": "Hello", "max_tokens": 40, "stream": True, "ignore_eos": True}
    tree = psutil.Process(process.pid)
    lines: list[str] = []
    async with (
        httpx.AsyncClient(timeout=LONG_SECONDS) as http,
        http.stream("POST", f"{ready[1].decode()}/v1/completions", json=body) as answer,
    ):
        async for text in answer.aiter_lines():
            if text and not lines:
                for member in [*tree.children(recursive=True), tree]:
                    member.send_signal(signal.SIGTERM)
            lines += [text] if text else []
    assert lines[-1] == "data: [DONE]"
    assert len(lines) > 40
    _, errors = await process.communicate()
    assert process.returncode == 0
    assert "'megatron status' does not show this server" in errors.decode()
    assert errors.decode().splitlines()[-1] == "megatron: stopping; press Ctrl-C again to stop immediately"
