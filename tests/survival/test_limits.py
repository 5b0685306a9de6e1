"""Limits of API keys over several servers, of which one is killed, and after the death of the coordinator."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from eventually import LONG_SECONDS
from fleet import Fleet, until_serving

pytestmark = pytest.mark.timeout(300)

LIMIT = 1000


async def test_servers_share_a_limit_that_a_killed_server_does_not_return(fleet: Fleet, tmp_path: Path) -> None:
    coordinator = await fleet.coordinator()
    keys_file = tmp_path / "api-keys"
    keys_file.write_text("keys:\n- " + json.dumps({"name": "team", "key": "secret", "tokensPerMinute": LIMIT}))
    await fleet.engine("engine-0", "--echo-step-seconds", "0.02", "--kv-cache-memory", "16Mi")
    await until_serving(await fleet.admin(), fleet.engines)
    started = await asyncio.gather(*(fleet.server("--api-keys-file", str(keys_file)) for _ in range(2)))
    servers = {url: process for process, url in started}
    header = {"authorization": "Bearer secret"}
    async with httpx.AsyncClient(timeout=LONG_SECONDS, headers=header, verify=False) as http:

        async def complete(url: str, tokens: int) -> httpx.Response:
            return await http.post(f"{url}/v1/completions", json={"prompt": [3] * 10, "max_tokens": tokens})

        asking: dict[asyncio.Task[Any], str] = {
            asyncio.create_task(complete(url, 2000)): url for url in (*servers, *servers)
        }
        rejected = []
        for done in asyncio.as_completed(asking):
            rejected.append((await done).status_code)
            if len(rejected) == 3:
                break
        assert rejected == [429] * 3, "four times 2,000 tokens at once, of 1,000 for each minute"
        (running,) = [task for task in asking if not task.done()]
        await servers.pop(asking[running]).kill()
        with pytest.raises(httpx.TransportError):
            await running
        (alive,) = servers
        assert (await complete(alive, 5)).status_code == 429, "what the lost server reserved stays counted"
        await coordinator.kill()
        await fleet.coordinator()
        reply = await complete(alive, 5)
        assert reply.status_code == 200, "a new coordinator has counted nothing"
        assert reply.headers["x-ratelimit-remaining-tokens"] == str(LIMIT - 10 - 5)
