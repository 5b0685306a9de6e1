"""Limits of API keys over several servers, of which one is killed, and after the death of the coordinator."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from eventually import LONG_SECONDS, eventually
from fleet import Fleet, free_ports, until_serving

pytestmark = pytest.mark.timeout(300)

LIMIT = 1000


async def test_servers_share_a_limit_that_a_killed_server_does_not_return(fleet: Fleet, tmp_path: Path) -> None:
    coordinator = await fleet.coordinator()
    keys_file, ports = tmp_path / "api-keys", free_ports(2)
    keys_file.write_text("keys:\n- " + json.dumps({"name": "team", "key": "secret", "tokensPerMinute": LIMIT}))
    servers = [
        fleet.start_command(
            *("server", "--coordinator", f"127.0.0.1:{fleet.client_port}", "--host", "127.0.0.1"),
            *("--port", str(port), "--health-port", "off", "--api-keys-file", str(keys_file)),
            *("--keys-dir", str(fleet.keys_dir), "--log-level", "error"),
            warm=True,
        )
        for port in ports
    ]
    await fleet.engine("engine-0", "--echo-step-seconds", "0.02", "--kv-cache-memory", "16Mi")
    await until_serving(await fleet.admin(), fleet.engines)
    header = {"authorization": "Bearer secret"}
    async with httpx.AsyncClient(timeout=LONG_SECONDS, headers=header, verify=False) as http:

        async def complete(port: int, tokens: int) -> httpx.Response:
            body = {"prompt": [3] * 10, "max_tokens": tokens}
            return await http.post(f"http://127.0.0.1:{port}/v1/completions", json=body)

        async def is_ready(port: int) -> bool:
            try:
                return (await http.get(f"http://127.0.0.1:{port}/readyz")).status_code == 200
            except httpx.TransportError:
                return False

        for port in ports:
            await eventually(lambda port=port: is_ready(port), what="the servers are ready")
        asking: dict[asyncio.Task[Any], int] = {
            asyncio.create_task(complete(port, 2000)): port for port in (*ports, *ports)
        }
        rejected = []
        for done in asyncio.as_completed(asking):
            rejected.append((await done).status_code)
            if len(rejected) == 3:
                break
        assert rejected == [429] * 3, "four times 2,000 tokens at once, of 1,000 for each minute"
        (running,) = [task for task in asking if not task.done()]
        killed = ports.index(asking[running])
        await servers[killed].kill()
        with pytest.raises(httpx.TransportError):
            await running
        alive = ports[1 - killed]
        assert (await complete(alive, 5)).status_code == 429, "what the lost server reserved stays counted"
        await coordinator.kill()
        await fleet.coordinator()
        reply = await complete(alive, 5)
        assert reply.status_code == 200, "a new coordinator has counted nothing"
        assert reply.headers["x-ratelimit-remaining-tokens"] == str(LIMIT - 10 - 5)
