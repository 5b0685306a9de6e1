"""API keys: authorization, a tenant and a part of the prefix cache for each key. The permission to set priorities."""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path
from typing import Any

import pytest

from megatron_runtime.requests.quotas import Quotas
from megatron_runtime.server.auth import ApiKeyFileError, ApiKeys, read_keys


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


async def test_a_key_that_fills_a_server_does_not_block_another(start_with_keys: Any) -> None:
    running = await start_with_keys("first\nsecond\n", max_open_requests=4)
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
async def test_the_salt_of_the_prefix_cache_derives_from_the_key(start_with_keys: Any, shared: bool) -> None:
    running = await start_with_keys("first\nsecond\n", share_prefix_cache=shared)

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


async def test_sessions_are_of_one_key(start_with_keys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    running = await start_with_keys("first\nsecond\n")
    sessions: list[str] = []
    add_request = running.service.client.add_request

    def recorded(*arguments: Any, **options: Any) -> Any:
        sessions.append(options["session"])
        return add_request(*arguments, **options)

    monkeypatch.setattr(running.service.client, "add_request", recorded)

    async def session(key: str, header: str | None = None, **fields: Any) -> str:
        headers = {"Authorization": f"Bearer {key}"} | ({} if header is None else {"x-session-id": header})
        body = {"model": "smollm2", "prompt": "Hi", **fields}
        assert (await running.http.post("/v1/completions", json=body, headers=headers)).status_code == 200
        return sessions[-1]

    assert await session("first") == ""
    own = await session("first", prompt_cache_key="a")
    assert 0 < len(own) <= 64
    assert own == await session("first", "a") == await session("first", "b", prompt_cache_key="a")
    assert own != await session("first", prompt_cache_key="b")
    assert own != await session("second", prompt_cache_key="a")


async def test_api_keys_guard_all_but_probes(start_with_keys: Any) -> None:
    running = await start_with_keys("# of the team\nfirst\n\nsecond-ключ\n")
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


NAMED = """\
# keys of the team
keys:
- name: alice
  key: first-secret
  requestsPerMinute: 2
- name: bob
  key: second-secret
  tokensPerMinute: 30
  models: [smollm2]
- name: carol
  key: third-secret
  models: [sql]
- name: prometheus
  key: scraper-secret
  metrics: true
"""


def _bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def _complete(running: Any, key: str, **fields: Any) -> Any:
    body = {"model": "smollm2", "prompt": "Hi", "max_tokens": 4, "temperature": 0, **fields}
    return await running.http.post("/v1/completions", json=body, headers=_bearer(key))


async def test_a_key_has_a_limit_of_requests(start_with_keys: Any) -> None:
    running = await start_with_keys(NAMED)
    for left in (1, 0):
        reply = await _complete(running, "first-secret")
        assert reply.status_code == 200
        assert reply.headers["x-ratelimit-limit-requests"] == "2"
        assert reply.headers["x-ratelimit-remaining-requests"] == str(left)
        assert 0 < float(reply.headers["x-ratelimit-reset-requests"].removesuffix("s")) <= 60
        assert "x-ratelimit-limit-tokens" not in reply.headers
    reply = await _complete(running, "first-secret")
    assert (reply.status_code, reply.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert reply.json()["error"]["type"] == "rate_limit_error"
    assert "alice" in reply.json()["error"]["message"]
    assert 1 <= int(reply.headers["retry-after"]) <= 60
    assert reply.headers["x-ratelimit-remaining-requests"] == "0"
    other = await _complete(running, "second-secret")
    assert other.status_code == 200
    assert "x-ratelimit-limit-requests" not in other.headers
    models = await running.http.get("/v1/models", headers=_bearer("first-secret"))
    assert models.status_code == 200, "only POST requests count"
    metrics = (await running.http.get("/metrics", headers=_bearer("scraper-secret"))).text
    assert 'megatron_api_key_requests_total{api_key="alice"} 3.0' in metrics
    assert 'megatron_api_key_rejections_total{api_key="alice",reason="requests"} 1.0' in metrics
    assert "secret" not in metrics


@pytest.mark.parametrize("stream", [False, True])
async def test_prompts_and_answers_count_as_tokens(start_with_keys: Any, stream: bool) -> None:
    running = await start_with_keys(NAMED)
    prompt = list(range(100, 110))

    first = await _complete(running, "second-secret", prompt=prompt, stream=stream)
    assert first.headers["x-ratelimit-limit-tokens"] == "30"
    generated = 4  # the request's max_tokens
    metrics = (await running.http.get("/metrics", headers=_bearer("scraper-secret"))).text
    assert 'megatron_api_key_prompt_tokens_total{api_key="bob"} 10.0' in metrics
    assert f'megatron_api_key_generation_tokens_total{{api_key="bob"}} {generated}.0' in metrics

    models = await running.http.get("/v1/models", headers=_bearer("second-secret"))
    assert models.headers["x-ratelimit-remaining-tokens"] == str(30 - 10 - generated)
    second = await _complete(running, "second-secret", prompt=prompt, stream=stream)
    assert second.status_code == 200, "16 tokens are left, and an answer may exceed them"
    third = await _complete(running, "second-secret", prompt=prompt, stream=stream)
    assert (third.status_code, third.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert 1 <= int(third.headers["retry-after"]) <= 60
    never = await _complete(running, "second-secret", prompt=[100] * 31, stream=stream)
    assert never.status_code == 429
    assert "retry-after" not in never.headers
    assert never.headers["x-should-retry"] == "false", "no wait would help"
    assert len(running.backend.requests) == 2


async def test_a_reservation_is_cut_to_the_limit_and_what_is_not_generated_returns(start_with_keys: Any) -> None:
    running = await start_with_keys("keys:\n- {name: bob, key: secret, tokensPerMinute: 100}\n", reserve_tokens=30)
    running.backend.gate.clear()
    running.backend.free_tokens = 2

    async def complete(**fields: Any) -> Any:
        return await _complete(running, "secret", prompt=[100] * 10, **fields)

    async def left() -> int:
        models = await running.http.get("/v1/models", headers=_bearer("secret"))
        return int(models.headers["x-ratelimit-remaining-tokens"])

    first = asyncio.create_task(complete(max_tokens=20, n=2))
    await running.backend.until(open_requests=2)
    assert await left() == 100 - 10 - 2 * 20, "no choice reserves more than it may generate"
    assert (await complete(max_tokens=900, n=2)).status_code == 429, "10 and twice 30 do not fit"
    first.cancel()
    await running.backend.until(open_requests=0)
    assert await left() == 100 - 10 - 2 * 2
    running.backend.gate.set()
    running.backend.quotas = Quotas()
    large = await complete(max_tokens=30, n=4, stop=["llama"])
    assert large.status_code == 200, "10 and four times 30 have a minute alone"
    assert await left() == 100 - 10 - large.json()["usage"]["completion_tokens"] > 0
    assert (await complete(max_tokens=30, n=4)).status_code == 429


async def test_tokens_outside_of_generations_count_and_reject_a_request_before_its_body_is_read(
    start: Any, tmp_path: Path
) -> None:
    file = tmp_path / "keys"
    file.write_text(NAMED)
    running = await start(api_keys_file=file)
    bob = next(key for key in read_keys(file).values() if key.name == "bob")
    running.service.add_tokens(bob, 29)
    assert (await running.http.post("/v1/completions", headers=_bearer("second-secret"))).status_code == 415
    running.service.add_tokens(bob, 1_000_000)
    reply = await running.http.post("/v1/completions", headers=_bearer("second-secret"))
    assert (reply.status_code, reply.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert 1 <= int(reply.headers["retry-after"]) <= 60, "one charge costs no more than one minute"
    assert reply.headers["x-ratelimit-remaining-tokens"] == "0"
    metrics = (await running.http.get("/metrics", headers=_bearer("scraper-secret"))).text
    assert 'megatron_api_key_charged_tokens_total{api_key="bob"} 59.0' in metrics
    assert 'megatron_api_key_rejections_total{api_key="bob",reason="tokens"} 1.0' in metrics
    for key in read_keys(file).values():
        running.service.add_tokens(key, 5)  # a key without a limit is charged nothing
    assert (await _complete(running, "first-secret")).status_code == 200


async def test_a_coordinator_that_does_not_answer_delays_only_keys_with_limits(start: Any, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(NAMED)
    running = await start(api_keys_file=file, coordinator_wait_seconds=0.05)
    asked: list[Any] = []

    async def never(reserve: Any) -> None:
        asked.append(reserve)
        await asyncio.Event().wait()

    running.backend.reserve = never
    reply = await _complete(running, "second-secret")
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "coordinator_unreachable")
    assert int(reply.headers["retry-after"]) >= 1
    assert (asked[0].requests, asked[0].tokens, asked[0].tokens_per_minute) == (1, 0, 30)
    file.write_text("third\n")
    running.service.api_keys = ApiKeys(file)
    assert (await _complete(running, "third")).status_code == 200
    assert len(asked) == 1


async def test_a_key_may_use_its_models_only(start_with_keys: Any) -> None:
    running = await start_with_keys(NAMED)
    for model in ("smollm2", None, "EMPTY"):
        reply = await _complete(running, "third-secret", model=model)
        assert (reply.status_code, reply.json()["error"]["code"]) == (403, "model_not_allowed")
        assert "sql" in reply.json()["error"]["message"]
    assert (await running.http.get("/v1/models/smollm2", headers=_bearer("third-secret"))).status_code == 403
    for key, offered in (("third-secret", []), ("second-secret", ["smollm2"]), ("first-secret", ["smollm2"])):
        listed = (await running.http.get("/v1/models", headers=_bearer(key))).json()["data"]
        assert [card["id"] for card in listed] == offered
    assert not running.backend.requests


async def test_a_key_may_be_in_the_header_of_anthropics_clients(start_with_keys: Any) -> None:
    running = await start_with_keys(NAMED)
    assert (await running.http.get("/v1/models", headers={"x-api-key": "first-secret"})).status_code == 200
    assert (await running.http.get("/v1/models", headers={"x-api-key": "alice"})).status_code == 401


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("keys:\n- {name: a, key: secret, requestsPerMinute: 0}\n", "keys[0].requestsPerMinute"),
        ("keys:\n- {name: a, key: secret, requestsPerMinute: many}\n", "keys[0].requestsPerMinute"),
        ("keys:\n- {name: a b, key: secret}\n", "keys[0].name"),
        ("keys:\n- {key: secret}\n", "keys[0].name"),
        ("keys:\n- {name: a, key: secret, limit: 3}\n", "keys[0].limit"),
        ("keys:\n- {name: a, key: secret, models: []}\n", "keys[0].models"),
        ("keys:\n- {name: a, key: secret}\n- {name: a, key: secret2}\n", "keys[1].name"),
        ("keys:\n- {name: a, key: secret}\n- {name: b, key: secret}\n", "keys[1].key"),
        ("keys:\n- {name: a, key: secret\n", "line"),
        ("---\nkeys: {name: secret}\n", "keys"),
        ("keys: []\n", "holds no key"),
    ],
)
def test_errors_of_a_key_file_name_the_entry_and_no_key(tmp_path: Path, text: str, named: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(ApiKeyFileError) as raised:
        read_keys(file)
    assert named in str(raised.value)
    assert "secret" not in str(raised.value)


async def test_named_keys_replace_plain_ones_without_a_restart(
    start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("megatron_runtime.server.auth._CHECK_SECONDS", 0.0)
    file = tmp_path / "keys"
    file.write_text("first-secret\n")
    running = await start(api_keys_file=file)
    assert (await _complete(running, "first-secret")).status_code == 200
    tenant = running.backend.tenants[-1]
    file.write_text(NAMED)
    replies = [await _complete(running, "first-secret") for _ in range(3)]
    assert [reply.status_code for reply in replies] == [200, 200, 429]
    assert running.backend.tenants[-1] == tenant, "a key keeps its tenant when it gets a name"
    file.write_text(NAMED.replace("requestsPerMinute: 2", "requestsPerMinute: -2"))
    assert (await _complete(running, "second-secret")).status_code == 200
    assert "the previous API keys stay in use" in caplog.text
    assert "secret" not in caplog.text
    file.write_text(NAMED.replace("requestsPerMinute: 2", "requestsPerMinute: 9"))
    reply = await _complete(running, "first-secret")
    assert reply.status_code == 200
    assert reply.headers["x-ratelimit-limit-requests"] == "9"
