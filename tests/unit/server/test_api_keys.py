"""API keys: authorization, a tenant and a part of the prefix cache for each key. The permission to set priorities."""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path
from typing import Any

import pytest


async def test_a_priority_needs_to_be_allowed(start: Any) -> None:
    running = await start()
    assert (await running.chat(priority=0)).status_code == 200
    for priority in (1, -1):
        for reply in (
            await running.chat(priority=priority),
            await running.post("/v1/completions", {"model": "smollm2", "prompt": "Hi", "priority": priority}),
        ):
            error = reply.json()["error"]
            assert (reply.status_code, error["param"]) == (400, "priority")
            assert str(priority) in error["message"]
            assert "--allow-priority" in error["message"]
    allowed = await start(allow_priority=True)
    assert (await allowed.chat(priority=-7)).status_code == 200
    assert allowed.backend.requests[-1][1].priority == -7


async def test_each_key_is_a_tenant_of_an_opaque_id(start: Any, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("first-secret\nsecond-secret\n")
    running, other = await start(api_keys_file=file), await start(api_keys_file=file)
    for server in (running, other):
        for key in ("first-secret", "second-secret", "first-secret"):
            for stream in (False, True):
                body = {"model": "smollm2", "prompt": "Hi", "stream": stream}
                reply = await server.http.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})
                assert reply.status_code == 200
    first, second = running.backend.tenants[0], running.backend.tenants[2]
    assert first != second
    assert running.backend.tenants == [first, first, second, second, first, first]
    assert other.backend.tenants == running.backend.tenants, "all servers name the tenant of a key alike"
    for tenant in (first, second):
        assert re.fullmatch("[0-9a-f]{32}", tenant)
    opened = await start()
    await opened.http.post(
        "/v1/completions", json={"model": "smollm2", "prompt": "Hi"}, headers={"Authorization": "Bearer first-secret"}
    )
    assert opened.backend.tenants == [""], "without keys a request cannot choose its tenant"


async def test_a_key_that_fills_a_server_does_not_block_another(start: Any, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("first\nsecond\n")
    running = await start(api_keys_file=file, max_open_requests=4)
    running.backend.gate.clear()

    async def complete(key: str) -> int:
        body = {"model": "smollm2", "prompt": "Hi"}
        reply = await running.http.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})
        return reply.status_code

    waiting = [asyncio.create_task(complete("first")) for _ in range(4)]
    await running.backend.until(open_requests=4)
    assert await complete("first") == 429
    waiting += [asyncio.create_task(complete("second")) for _ in range(2)]
    await running.backend.until(open_requests=6)
    assert await complete("second") == 429, "it has its share"
    running.backend.gate.set()
    assert await asyncio.gather(*waiting) == [200] * 6
    assert not running.service.in_flight_by_tenant
    assert not running.service.metrics.open_requests


@pytest.mark.parametrize("shared", [False, True])
async def test_the_salt_of_the_prefix_cache_derives_from_the_key(start: Any, tmp_path: Path, shared: bool) -> None:
    file = tmp_path / "keys"
    file.write_text("first\nsecond\n")
    running = await start(api_keys_file=file, share_prefix_cache=shared)

    async def salt(key: str, **fields: Any) -> str | None:
        body = {"model": "smollm2", "prompt": "Hi", **fields}
        reply = await running.http.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})
        assert reply.status_code == 200
        return running.backend.requests[-1][1].cache_salt

    assert await salt("first") == await salt("first")
    assert await salt("first", cache_salt="a") != await salt("first", cache_salt="b")
    assert (await salt("first") == await salt("second")) is shared
    assert (await salt("first", cache_salt="a") == await salt("second", cache_salt="a")) is shared
    if shared:
        assert (await salt("first"), await salt("first", cache_salt="a")) == (None, "a")
    else:
        own = await salt("first")
        assert own is not None
        assert await salt("second", cache_salt=own) != own, "a salt that is known opens nothing"
    assert await salt("first", cache_salt="x" * 256) is not None


async def test_api_keys_guard_all_but_probes(start: Any, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# of the team\nfirst\n\nsecond-ключ\n")
    running = await start(api_keys_file=file)
    assert (await running.http.get("/readyz")).status_code == 200
    comment = {"Authorization": "Bearer # of the team"}
    for header in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic first"}, comment):
        reply = await running.http.get("/v1/models", headers=header)
        assert (reply.status_code, reply.json()["error"]["code"]) == (401, "invalid_api_key")
        assert reply.headers["www-authenticate"] == "Bearer"
        assert (await running.http.get("/v1/models/smollm2", headers=header)).status_code == 401
        assert (await running.http.post("/v1/completions", headers=header, content=b"{")).status_code == 401
    reply = await running.http.get("/v1/models", headers={"Authorization": "Bearer first"})
    assert reply.status_code == 200
    second = "Bearer second-ключ".encode()
    assert (await running.http.get("/v1/models", headers={b"Authorization": second})).status_code == 200
    for path in ("/tokenize", "/detokenize", "/completions", "/start_profile", "/v1/stop_profile"):
        assert (await running.http.post(path, content=b"{}")).status_code == 401


async def test_changed_keys_apply_without_a_restart(start: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("megatron_runtime.server.auth._CHECK_SECONDS", 0.0)
    file = tmp_path / "keys"
    file.write_text("old\n")
    running = await start(api_keys_file=file)

    async def status(key: str) -> int:
        return (await running.http.get("/v1/models", headers={"Authorization": f"Bearer {key}"})).status_code

    assert await status("old") == 200
    new = tmp_path / "new"
    new.write_text("fresh\n")
    os.replace(new, file)
    assert (await status("old"), await status("fresh")) == (401, 200)
    file.write_text("\n")
    assert (await status("fresh"), await status("other")) == (200, 401)
    file.unlink()
    assert (await status("fresh"), await status("other")) == (200, 401)
