"""What clients of other servers, browsers and load balancers send besides fields: origins, probes, names, gzip."""

from __future__ import annotations

import gzip
import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_runtime.server.errors import ApiError
from megatron_runtime.server.guards import Gunzip, Origins, origin_of

PAGE = "http://localhost:3000"
BODY: dict[str, Any] = {"model": "smollm2", "prompt": "Hi", "temperature": 0, "max_tokens": 1}
CHAT = [{"role": "user", "content": "Hi"}]
PREFLIGHT = {
    "Origin": PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang",
}
LONG = "word " * 9000
FORMAT = {"type": "json_schema", "name": "x", "schema": {"multipleOf": 1e9}}


@pytest.mark.parametrize("hosts", [(), ("127.0.0.1", "localhost")])
async def test_pages_of_an_allowed_origin_alone_can_use_the_server(start: Any, hosts: tuple[str, ...]) -> None:
    running = await start(allowed_origins=(PAGE, "https://chat.example"), allowed_hosts=hosts)
    allowed = await running.http.options("/v1/chat/completions", headers=PREFLIGHT)
    assert allowed.status_code == 204
    assert allowed.headers["access-control-allow-origin"] == PAGE
    assert "POST" in allowed.headers["access-control-allow-methods"]
    assert allowed.headers["access-control-allow-headers"] == "authorization,content-type,x-stainless-lang"
    assert allowed.headers["vary"] == "Origin"
    private = {**PREFLIGHT, "Access-Control-Request-Private-Network": "true"}
    reply = await running.http.options("/v1/models", headers=private)
    assert reply.headers["access-control-allow-private-network"] == "true"
    for path, body, status in (("/v1/completions", BODY, 200), ("/v1/completions", {}, 400), ("/v1/none", {}, 404)):
        reply = await running.http.post(path, json=body, headers={"Origin": PAGE})
        assert (reply.status_code, reply.headers["access-control-allow-origin"]) == (status, PAGE)
    for origin in ("http://localhost:3001", "https://localhost:3000", "null", "http://localhost:3000.evil.example"):
        reply = await running.http.options("/v1/chat/completions", headers={**PREFLIGHT, "Origin": origin})
        assert reply.status_code in (403, 405)
        assert "access-control-allow-origin" not in reply.headers
        reply = await running.http.post("/v1/completions", json=BODY, headers={"Origin": origin})
        assert "access-control-allow-origin" not in reply.headers
        assert (reply.status_code == 403) is bool(hosts)


async def test_no_origin_is_allowed_by_default(running: Any) -> None:
    reply = await running.http.options("/v1/chat/completions", headers=PREFLIGHT)
    assert reply.status_code == 405
    assert not [name for name in reply.headers if name.startswith("access-control")]


async def test_all_origins_are_allowed_on_request(start: Any) -> None:
    running = await start(allowed_origins=("*",))
    reply = await running.http.options("/v1/models", headers={**PREFLIGHT, "Origin": "null"})
    assert (reply.status_code, reply.headers["access-control-allow-origin"]) == (204, "null")


def test_a_preflight_names_no_header_that_is_not_one() -> None:
    request = {"origin": PAGE, "access-control-request-method": "POST"}
    for wanted in ("x\r\ny: z", "a" * 3000, "é"):
        answer = Origins([PAGE]).preflight({**request, "access-control-request-headers": wanted})  # type: ignore[arg-type]
        assert answer is not None
        assert wanted not in answer["Access-Control-Allow-Headers"]


@pytest.mark.parametrize("text", ["localhost:3000", "http://", "http://a/path", "a", "", "http://user@a"])
def test_an_origin_of_the_command_line_is_checked(text: str) -> None:
    with pytest.raises(ValueError, match="is not an origin: write scheme"):
        origin_of(text)
    assert origin_of("HTTP://Localhost:3000/") == "http://localhost:3000"


PROBES = (
    *("/", "/v1", "/v1/", "/health", "/health/", "/healthz", "/livez", "/readyz", "/ping", "/version"),
    *("/v1/models", "/v1/models/", "/models", "//v1//models", "/v1/models/smollm2", "/v1/models/smollm2/"),
)


async def test_probes_of_clients_and_load_balancers_are_answered(running: Any, subtests: pytest.Subtests) -> None:
    for path, method in product(PROBES, ("GET", "HEAD")):
        with subtests.test(path=path, method=method):
            reply = await running.http.request(method, path)
            assert reply.status_code == 200
            assert bool(reply.content) is (method == "GET")


async def test_slashes_too_many_change_nothing(running: Any) -> None:
    for path in ("/v1/completions/", "/v1//completions", "/completions/"):
        reply = await running.post(path, BODY)
        assert reply.status_code == 200, path
    assert (await running.http.post("/ping")).status_code == 200


async def test_a_key_may_be_in_the_header_of_azure(start: Any, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("k-one\n")
    running = await start(api_keys_file=tmp_path / "keys")
    for headers, status in (
        ({"api-key": "k-one"}, 200),
        ({"x-api-key": "k-one"}, 200),
        ({"api-key": "k-two"}, 401),
        ({"authorization": "Bearer k-two", "api-key": "k-one"}, 401),
    ):
        assert (await running.http.post("/v1/completions", json=BODY, headers=headers)).status_code == status


async def test_a_model_has_several_names(start: Any) -> None:
    running = await start(model_aliases=("gpt-4o", "org/name", "smollm2"))
    listed = (await running.http.get("/v1/models")).json()["data"]
    assert [card["id"] for card in listed] == ["smollm2", "gpt-4o", "org/name"]
    for name in ("smollm2", "gpt-4o", "org/name", None):
        reply = await running.post("/v1/completions", {**BODY, "model": name})
        assert (reply.status_code, reply.json()["model"]) == (200, "smollm2")
    for path in ("org%2Fname", "org/name"):
        assert (await running.http.get(f"/v1/models/{path}")).json()["id"] == "org/name"
    unknown = await running.post("/v1/completions", {**BODY, "model": "gpt-4"})
    assert unknown.status_code == 404
    assert "'smollm2', 'gpt-4o', 'org/name'" in unknown.json()["error"]["message"]


async def test_errors_have_the_words_that_clients_match(running: Any) -> None:
    for path, body in (
        ("completions", {"prompt": LONG}),
        ("completions", {"prompt": [100] * 9000}),
        ("chat/completions", {"messages": [{"role": "user", "content": LONG}]}),
        ("responses", {"input": LONG}),
    ):
        reply = await running.post(f"/v1/{path}", body)
        error = reply.json()["error"]
        assert (reply.status_code, error["code"]) == (400, "context_length_exceeded")
        assert "This model's maximum context length is 8192 tokens" in error["message"]
    messages = [{"role": "user", "content": LONG}]
    error = (await running.post("/v1/messages", {"messages": messages, "max_tokens": 1})).json()["error"]
    assert error["message"].startswith("prompt is too long: ")
    assert error["message"].endswith(" tokens > 8192 maximum")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("responses", {"input": LONG}, "input"),
        (
            "responses",
            {"input": "Hi", "text": {"format": {"type": "json_schema", "name": "x", "schema": {"multipleOf": 1e9}}}},
            "text.format",
        ),
        ("embeddings", {"input": LONG}, "input"),
        ("embeddings", {"input": ["Hi", LONG]}, "input[1]"),
    ],
)
async def test_an_error_names_a_field_of_its_route(running: Any, path: str, body: dict[str, Any], param: str) -> None:
    error = (await running.post(f"/v1/{path}", body)).json()["error"]
    assert error["param"] == param


async def test_an_error_of_messages_names_its_field(running: Any) -> None:
    format_ = {"type": "json_schema", "schema": {"multipleOf": 1e9}}
    body = {"messages": CHAT, "max_tokens": 1, "output_config": {"format": format_}}
    message = (await running.post("/v1/messages", body)).json()["error"]["message"]
    assert "output_config.format" in message
    assert "response_format" not in message


async def test_a_byte_order_mark_before_the_body_is_ignored(running: Any) -> None:
    plain = await running.post("/v1/completions", BODY)
    for body in (BODY, {**BODY, "other": "x" * (1 << 17)}):  # the child process parses the second body
        content = json.dumps(body).encode("utf-8-sig")
        reply = await running.http.post(
            "/v1/completions", content=content, headers={"content-type": "application/json"}
        )
        assert reply.status_code == 200, reply.text
        assert reply.json()["choices"] == plain.json()["choices"]


# --- gzip -----------------------------------------------------------------------------------------------------------

GZIP = {"content-type": "application/json", "content-encoding": "gzip"}


async def test_a_gzip_body_is_read(running: Any) -> None:
    plain = await running.post("/v1/completions", BODY)
    for encoding in ("gzip", "x-gzip", "GZIP"):
        reply = await running.http.post(
            "/v1/completions",
            content=gzip.compress(json.dumps(BODY).encode()),
            headers={**GZIP, "content-encoding": encoding},
        )
        assert reply.status_code == 200, reply.text
        assert reply.json()["choices"] == plain.json()["choices"]


async def test_a_gzip_body_has_the_limits_of_its_content(start: Any) -> None:
    running = await start(max_body_bytes=1 << 20)
    bomb = gzip.compress(b'{"prompt": "' + b" " * (64 << 20))
    assert len(bomb) < 1 << 17
    deep = gzip.compress(b'{"a": ' + b"[" * 100 + b"]" * 100 + b"}")
    wrong = gzip.compress(b'{"prompt": "Hi"}')
    for content, status, code in (
        (bomb, 413, "body_too_large"),
        (deep, 400, "body_too_complex"),
        (wrong[:-9], 400, "invalid_gzip"),
        (wrong + b"more", 400, "invalid_gzip"),
        (b"no gzip", 400, "invalid_gzip"),
        (gzip.compress(b"{"), 400, "invalid_json"),
    ):
        reply = await running.http.post("/v1/completions", content=content, headers=GZIP)
        assert (reply.status_code, reply.json()["error"]["code"]) == (status, code)
    for encoding in ("br", "deflate", "gzip, gzip"):
        reply = await running.http.post(
            "/v1/completions", content=wrong, headers={**GZIP, "content-encoding": encoding}
        )
        assert (reply.status_code, reply.json()["error"]["code"]) == (415, "unsupported_content_encoding")
    assert not running.service.bodies.held


@given(content=st.binary(max_size=1000), repeated=st.integers(1, 500), size=st.integers(1, 100))
def test_gzip_is_decompressed_in_bounded_pieces(content: bytes, repeated: int, size: int) -> None:
    whole = content * repeated
    packed = gzip.compress(whole)
    gunzip = Gunzip()
    pieces = [piece for at in range(0, len(packed), size) for piece in gunzip.feed(packed[at : at + size])]
    gunzip.finish()
    assert b"".join(pieces) == whole
    assert all(len(piece) <= 64 * 1024 for piece in pieces)
    cut = Gunzip()
    for _ in cut.feed(packed[:-1]):
        pass
    with pytest.raises(ApiError, match="ends within"):
        cut.finish()
