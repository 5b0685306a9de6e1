"""`megatron serve` with real processes and real sockets, and echo engines."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path
from typing import Any

import echo_serve
import httpx
import psutil
from eventually import LONG_SECONDS

MODEL = "smollm2-135m"
MESSAGES = [{"role": "user", "content": "Name three rivers 🏞️"}]


async def _gone(children: dict[str, psutil.Process]) -> None:
    _, alive = await asyncio.to_thread(psutil.wait_procs, list(children.values()), timeout=LONG_SECONDS)
    assert alive == []


async def test_it_answers_its_own_host_survives_a_killed_engine_and_leaves_no_process(served: Any) -> None:
    async with served.client() as client:
        fields = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 40}
        whole = await client.chat.completions.create(**fields)
        stream = await client.chat.completions.create(**fields, stream=True)
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
        assert "".join(pieces) == whole.choices[0].message.content
        assert whole.usage.completion_tokens == 40
    async with httpx.AsyncClient(base_url=served.url, timeout=LONG_SECONDS, verify=False, trust_env=False) as http:
        status = (await http.get("/v1/status")).json()
    (engine,), (adapter,) = status["engines"], status["adapters"]
    assert (engine["name"], engine["state"], engine["serving"], adapter["name"]) == ("engine-0", "RUNNING", True, "sql")
    await _check_hosts(served.url)
    children = served.children()
    assert set(children) == {"coordinator", "engine", "server"}

    children["engine"].kill()
    await served.until("engine-0 ended with signal SIGKILL; starting it again")
    async with served.client() as client:
        assert (await client.completions.create(model=MODEL, prompt="again", max_tokens=4)).choices
        fields = {"prompt": [3, 4, 5], "max_tokens": 6}
        base, sql = [await client.completions.create(model=model, **fields) for model in (MODEL, "sql")]
        assert sql.choices[0].text != base.choices[0].text, "the new engine has the adapter"
        assert [model.id async for model in client.models.list()] == [MODEL, "sql"]

    children = served.children()
    served.process.send_signal(signal.SIGINT)
    await served.until("stopping")
    assert await served.process.wait() == 0
    await _gone(children)


async def _check_hosts(url: str) -> None:
    """On loopback, the server rejects the host names and the pages of others."""
    async with httpx.AsyncClient(base_url=url, timeout=LONG_SECONDS, verify=False, trust_env=False) as http:
        assert (await http.get("/v1/models")).status_code == 200
        assert (await http.get("/metrics")).status_code == 200
        rebound = await http.get("/v1/models", headers={"Host": "evil.example"})
        assert (rebound.status_code, rebound.json()["error"]["code"]) == (403, "host_not_allowed")
        foreign = await http.get("/v1/models", headers={"Origin": "https://evil.example"})
        assert (foreign.status_code, foreign.json()["error"]["code"]) == (403, "origin_not_allowed")
        page = await http.get("/", headers={"Origin": url})
        assert page.status_code == 200


async def test_an_adapter_that_cannot_be_loaded_ends_it_with_the_cause() -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, echo_serve.PROGRAM, "serve", "--port", "0"),
        *("--kv-cache-memory", "16Mi", "--adapter", "sql=/no/such"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output = (await process.communicate())[0].decode()
    assert process.returncode == 1
    assert "engine-0: SET_ADAPTERS failed: adapter 'sql' from /no/such: the directory does not exist" in output
    assert "Traceback" not in output


async def test_a_port_in_use_is_reported_at_once(running: Any) -> None:
    port = running.url.rsplit(":", 1)[1]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "megatron_runtime.cli", "serve", "--port", port), stderr=asyncio.subprocess.PIPE
    )
    _, err = await process.communicate()
    assert process.returncode == 1
    assert (
        f"cannot listen on 127.0.0.1:{port} (Address already in use): choose another --host or --port" in err.decode()
    )


async def test_run_serves_a_model_answers_and_leaves_no_process(tmp_path: Path) -> None:
    file = tmp_path / "megatron.toml"
    file.write_text('backend = "vllm"\nkv-cache-memory = "16Mi"\ntemperature = 0\n')
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, echo_serve.PROGRAM, "run", "builtin:smollm2-135m"),
        *("--config", str(file), "--backend", "native"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b"Hello?\n")
    await process.stdin.drain()
    assert await process.stdout.readline()
    (server,) = psutil.Process(process.pid).children()
    children = {str(child.pid): child for child in [server, *server.children()]}
    assert len(children) == 4
    arguments = server.cmdline()
    assert arguments[arguments.index("--kv-cache-memory") + 1] == str(16 << 20)
    backend = arguments[arguments.index("--backend") + 1]
    assert backend == "native", "the command line has precedence over the file"
    process.stdin.close()
    assert await process.wait() == 0
    await _gone(children)


async def test_run_reports_why_the_server_does_not_start() -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, echo_serve.PROGRAM, "run", "/no/such/model"),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output = (await process.communicate())[0].decode()
    assert process.returncode == 1
    assert "/no/such/model" in output
    assert "the server ended with status 1" in output
    assert "Traceback" not in output
