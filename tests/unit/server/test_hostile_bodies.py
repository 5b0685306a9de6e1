"""Fuzzing of HTTP requests: no input causes a 5xx answer or a logged error.

Short in `make test`, long with MEGATRON_SOAK=1; hypothesis shrinks what it finds.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from typing import Any

import pytest
from eventually import LONG_SECONDS
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from soak import size

PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")
FIELDS = (
    *("model", "prompt", "messages", "tokens", "tools", "tool_choice", "stop", "stop_token_ids", "logit_bias", "n"),
    *("seed", "max_tokens", "min_tokens", "streaming_interval", "top_k", "temperature", "guided_json", "guided_choice"),
    *("guided_regex", "guided_grammar", "structured_outputs", "response_format", "chat_template_kwargs", "metadata"),
    *("user", "best_of", "echo", "logprobs", "top_logprobs", "cache_salt", "priority", "stream", "stream_options"),
    *("role", "content", "tool_calls", "tool_call_id", "function", "arguments", "name", "id", "type", "text", "schema"),
    *(
        "parameters",
        "json_schema",
        "json",
        "functions",
        "reasoning_effort",
        "prompt_token_ids",
        "max_completion_tokens",
    ),
    *("bad_words", "generation_token_ids", "prevent_retokenization", "return_token_ids", "return_raw_text", "add_BOS"),
)
WORDS = ("smollm2", "user", "assistant", "tool", "function", "json_schema", "json_object", "object", "text", "auto")

scalars = st.one_of(
    st.sampled_from(
        [
            *("null", "true", "false", "0", "1", "-1", "-0", "1e999", "-1e999", "1e-999", "NaN", "Infinity", "0.1"),
            *(str(1 << 31), str(1 << 63), str(1 << 64), str(-(1 << 63)), "9" * 400, "9" * 5000, "1" + "0" * 308),
            *('""', '"\\ud800"', '"\\udc00\\ud800"', '"\\u0000"', '"\x7f"', '"' + "x" * 3000 + '"', '"[[[["', '"{}"'),
            '"' + "[" * 300 + '"',
        ]
    ),
    st.sampled_from(WORDS).map(json.dumps),
    st.integers(-5, 50_000).map(str),
    st.text(max_size=12).map(json.dumps),
    st.floats().map(json.dumps),
)
names = st.one_of(st.sampled_from(FIELDS).map(json.dumps), st.text(max_size=5).map(json.dumps))


def objects(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """JSON objects, in which a name may be there twice."""
    members = st.tuples(names, inner).map(": ".join)
    return st.lists(members, max_size=5).map(lambda parts: "{" + ", ".join(parts) + "}")


values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        objects(inner),
        st.lists(inner, max_size=4).map(lambda parts: "[" + ",".join(parts) + "]"),
        st.tuples(inner, st.integers(1, 120)).map(lambda pair: "[" * pair[1] + pair[0] + "]" * pair[1]),
        inner.map(json.dumps),  # JSON in a string
    ),
    max_leaves=10,
)
BEGINNINGS = {
    "/v1/completions": ['"model": "smollm2"', '"prompt": "x"', '"temperature": 0', '"max_tokens": 2'],
    "/v1/chat/completions": ['"model": "smollm2"', '"messages": [{"role": "user", "content": "x"}]', '"max_tokens": 2'],
    "/tokenize": ['"prompt": "x"'],
    "/detokenize": ['"tokens": [5]'],
}


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, bytes]:
    """A path and a body: mostly a good request with members that may be anything, sometimes broken bytes."""
    path = draw(st.sampled_from(PATHS))
    members = [*BEGINNINGS.get(path, ()), *draw(st.lists(st.tuples(names, values).map(": ".join), max_size=3))]
    text = draw(st.one_of(st.just("{" + ", ".join(members) + "}"), values, objects(values)))
    body = text.encode(errors="surrogatepass")
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2]))):
        at = draw(st.integers(0, len(body)))
        body = body[:at] + draw(st.binary(max_size=3)) + body[at + draw(st.integers(0, 3)) :]
    return path, body


def from_thread(loop: asyncio.AbstractEventLoop, work: Callable[[], Any]) -> Any:
    return asyncio.run_coroutine_threadsafe(work(), loop).result(LONG_SECONDS)


fuzzing = settings(max_examples=size(25, soak=20_000), suppress_health_check=list(HealthCheck))


@pytest.mark.timeout(3600)
async def test_no_body_causes_a_server_error(running: Any, caplog: pytest.LogCaptureFixture) -> None:
    loop = asyncio.get_running_loop()
    caplog.set_level(logging.ERROR)

    @fuzzing
    @example(request=("/v1/completions", b'{"model": "smollm2", "prompt": "x", "guided_json": "%b"}' % (b"[" * 9000)))
    @example(request=("/v1/completions", b'{"model": "smollm2", "prompt": "x", "min_tokens": 1%b}' % (b"0" * 30)))
    @example(request=("/v1/completions", b"\xff\xfe{}"))
    @example(request=("/detokenize", b'{"tokens": [1%b]}' % (b"0" * 30)))
    @given(request=requests())
    def check(request: tuple[str, bytes]) -> None:
        path, body = request
        headers = {"Content-Type": "application/json"}
        reply = from_thread(loop, lambda: running.http.post(path, content=body, headers=headers))
        assert reply.status_code in (200, 400, 404, 413), (reply.status_code, reply.text)
        if reply.status_code != 200:
            assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
        assert caplog.records == []

    await asyncio.to_thread(check)


WHOLE = (
    b"POST /v1/completions?a=b HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Expect: 100-continue\r\nConnection: keep-alive\r\nContent-Length: 57\r\n\r\n"
    b'{"model": "smollm2", "prompt": "xx", "temperature": 0.0 }'
    b"GET /v1/models/x HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\n"
    b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nContent-Type: application/json\r\n\r\n"
    b'f\r\n{"prompt": "x"}\r\n0\r\n\r\n'
    b"HEAD /livez HTTP/1.0\r\n\r\n"
)
pieces = st.one_of(
    st.binary(max_size=4),
    st.sampled_from(
        [b"\r\n", b"\r\n\r\n", b"\0", b": ", b"HTTP/1.1", b"%00", b"Content-Length: 5\r\n", b"chunked", b"\n"]
    ),
)


@pytest.mark.timeout(3600)
async def test_no_bytes_cause_a_server_error(running: Any, caplog: pytest.LogCaptureFixture) -> None:
    loop = asyncio.get_running_loop()
    caplog.set_level(logging.ERROR)
    port = int(running.url.rsplit(":", 1)[1])

    async def exchange(data: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(data)
            writer.write_eof()
            return await reader.read()
        except ConnectionError:
            return b""
        finally:
            writer.close()

    @fuzzing
    @given(edits=st.lists(st.tuples(st.integers(0, len(WHOLE)), st.integers(0, 12), pieces), max_size=6))
    def check(edits: list[tuple[int, int, bytes]]) -> None:
        data = WHOLE
        for at, dropped, put in edits:
            data = data[:at] + put + data[at + dropped :]
        answer = from_thread(loop, lambda: exchange(data))
        statuses = [int(line.split()[1]) for line in answer.split(b"\r\n") if line.startswith(b"HTTP/1.")]
        assert all(status < 500 or status == 501 for status in statuses), answer
        assert caplog.records == []

    await asyncio.to_thread(check)
    assert (await running.http.get("/livez")).status_code == 200
