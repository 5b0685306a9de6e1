"""Hostile input from one client while well-behaved streams run: no stream fails or stalls, no process exits.

All attacks run against one installation, one after the other. The longest wait is compared with that of an undisturbed
run on the same machine. The exact values are printed at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest
import pytest_asyncio
import zmq
from eventually import LONG_SECONDS
from libzmq_keys import set_keys
from machine import scaled
from soak import size

from megatron_runtime.protocol.headers import Role
from megatron_runtime.protocol.messages import Hello, Submit, pack, tokens_to_bytes
from megatron_runtime.protocol.request_meta import RequestMeta
from megatron_runtime.requests.sampling_params import IGNORE_EOS

from .stack import ENGINES, LIMITED_KEY, MODEL, STEP_SECONDS, WELL_BEHAVED_KEY, Attack, Stack

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.long]

MIB = 1 << 20
MEMORY_BOUNDS = {"coordinator": 256 * MIB, "server": 768 * MIB, **dict.fromkeys(ENGINES, 1024 * MIB)}
"""Peak resident memory of each process, with its helper processes."""
UNDISTURBED_SECONDS = 4.0
LONGEST_WAIT_MULTIPLE = 20
"""Multiple of the longest undisturbed wait so far, which is at least two steps: 0.8 s on an idle machine."""
PROCESSES = 4
"""Processes that a token passes. A loaded machine may delay each as long as the program that measures the waits."""
OTHER_SCHEMA_SECONDS = size(LONG_SECONDS, soak=scaled(5))
"""Time in which a schema of another key is answered. `make test` also runs on machines where others compute."""
ENGINES_TO_REACH = 4
"""Requests that reach each of the two engines."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    stack = Stack(tmp_path_factory.mktemp("hostile"))
    try:
        await stack.start()
        await asyncio.sleep(UNDISTURBED_SECONDS)
        stack.longest_undisturbed = max(2 * STEP_SECONDS, (await stack.streams.window()).longest_wait)
        yield stack
    finally:
        await stack.close()


async def _post(http: httpx.AsyncClient, path: str, body: bytes | dict[str, Any], **headers: str) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return await http.post(path, content=content, headers={"content-type": "application/json", **headers})


def _must_be_openai_error(response: httpx.Response, *statuses: int) -> None:
    assert response.status_code in statuses, f"HTTP {response.status_code}: {response.text[:500]}"
    error = response.json()["error"]
    assert error["message"]
    assert "Traceback" not in response.text


def _completion(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "Hello", "max_tokens": 4, **fields}


async def chained_grammar_rules(stack: Stack) -> None:
    rules = ["start: r0", *(f"r{number}: r{number + 1}" for number in range(2800)), 'r2800: "a"']
    async with stack.hostile_client() as http:
        for _ in range(size(2, soak=4)):
            response = await _post(http, "/v1/completions", _completion(guided_grammar="\n".join(rules)))
            _must_be_openai_error(response, 400)


async def chained_schema_definitions(stack: Stack) -> None:
    definitions: dict[str, Any] = {f"d{number}": {"$ref": f"#/$defs/d{number + 1}"} for number in range(1200)}
    definitions["d1200"] = {"type": "integer"}
    schema = {"$ref": "#/$defs/d0", "$defs": definitions}
    async with stack.hostile_client() as http:
        for _ in range(size(2, soak=4)):
            _must_be_openai_error(await _post(http, "/v1/completions", _completion(guided_json=schema)), 400)


async def slow_grammars(stack: Stack) -> None:
    """Valid grammars that take long to compile or to match. Each differs, so that no grammar is cached."""
    async with stack.hostile_client() as http:

        async def one(number: int) -> None:
            pattern = f"({number}|" + "|".join(f"[a-z]{{1,{bound}}}x{bound}" for bound in range(60, 160)) + ")*"
            response = await _post(http, "/v1/completions", _completion(guided_regex=pattern))
            assert response.status_code in (200, 400), response.text[:500]

        await asyncio.gather(*(one(number) for number in range(size(4, soak=12))))


async def many_grammars_before_a_schema_of_another_key(stack: Stack) -> None:
    """Each takes as long to compile as a grammar may. The other key's schema is the next but one."""
    properties = {f"p{number}": {"type": "integer", "multipleOf": 9973 - 2 * number} for number in range(300)}
    async with stack.hostile_client() as http, stack.client(WELL_BEHAVED_KEY) as other:

        async def one(number: int) -> int:
            schema = {"type": "object", "properties": {"n": {"const": number}, **properties}}
            notation = (
                {"guided_json": schema} if number % 2 else {"guided_grammar": f"start: %json {json.dumps(schema)}"}
            )
            response = await _post(http, "/v1/completions", _completion(**notation))
            _must_be_openai_error(response, 400, 429)
            if response.status_code == 429:
                assert int(response.headers["retry-after"]) > 0
            return response.status_code

        tasks = [asyncio.create_task(one(number)) for number in range(size(6, soak=30))]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for number in range(ENGINES_TO_REACH):
            schema = {"type": "object", "properties": {"name": {"enum": [f"a{number}", "b"]}}, "required": ["name"]}
            async with asyncio.timeout(OTHER_SCHEMA_SECONDS):
                response = await _post(other, "/v1/completions", _completion(guided_json=schema, max_tokens=30))
            assert response.status_code == 200, response.text
        statuses = await asyncio.gather(*tasks)
        assert 400 in statuses, "some were compiled"


async def megabytes_for_tokenization(stack: Stack) -> None:
    """More bodies than the server may hold, whose values and answers take much more memory than their text."""
    tokens = [f"{number}" for number in range(10_000, 40_000)]
    bodies = [
        ("/v1/detokenize", b'{"tokens": [%b]}' % ",".join(tokens * 22).encode()),
        ("/v1/tokenize", json.dumps({"prompt": "word " * 800_000, "return_token_strs": True}).encode()),
        ("/v1/tokenize", json.dumps({"prompt": " \U0001f999" * 260_000}).encode()),
        ("/v1/detokenize", b'{"tokens": [%b]}' % ",".join(tokens[:4000]).encode()),
    ]
    async with stack.hostile_client() as http:
        for response in await asyncio.gather(*(_post(http, *bodies[number % 4]) for number in range(92))):
            if response.status_code != 200:
                _must_be_openai_error(response, 400, 413, 429, 503)


async def rejected_bodies_of_megabytes(stack: Stack) -> None:
    """Bodies that take longest to parse, and are then rejected."""
    lists = b",".join([b"[%b]" % b",".join([b"30001"] * 680)] * 1020)
    blocks = json.dumps([{"role": "user", "content": [{"type": "text", "text": "x" * 240}] * 15}] * 900).encode()
    bodies = [
        ("/v1/completions", b'{"prompt": [%b], "temperature": 9}' % lists),
        ("/v1/messages", b'{"messages": %b, "max_tokens": 1, "temperature": 9}' % blocks),
    ]
    async with stack.hostile_client() as http:
        for response in await asyncio.gather(
            *(_post(http, *bodies[number % 2]) for number in range(size(24, soak=64)))
        ):
            assert response.status_code in (400, 429, 503), response.text[:500]


async def longest_lists_allowed(stack: Stack) -> None:
    """Every list of the request at its documented maximum, with the maximum number of choices."""
    async with stack.hostile_client() as http:
        for stops in (64, 16):
            body = _completion(
                prompt=["a"] * 1024,
                max_tokens=1,
                stop=[f"{number:->1000}" for number in range(stops)],
                logit_bias={str(token): 1 for token in range(1, 1000)},
            )
            response = await _post(http, "/v1/completions", body)
            assert response.status_code in (200, 400, 429), response.text[:500]


async def megabytes_of_prompt(stack: Stack) -> None:
    words = json.dumps(_completion(prompt="word " * 700_000)).encode()
    one_word = json.dumps(_completion(prompt="w" * 3_500_000)).encode()
    async with stack.hostile_client() as http:
        for response in await asyncio.gather(
            *(_post(http, "/v1/completions", words if number % 2 else one_word) for number in range(12))
        ):
            _must_be_openai_error(response, 400, 413, 429, 503)


async def slow_connections(stack: Stack) -> None:
    """Connections that send their headers or body a byte at a time. Other clients must still be served."""
    host, port = stack.url.removeprefix("http://").split(":")
    head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\n"
    begun_body = head + b"content-type: application/json\r\ncontent-length: 100000\r\n\r\n{"
    writers = []
    for number in range(200):
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(head if number % 2 else begun_body)
            writers.append(writer)
    for _ in range(20):
        for writer in writers:
            writer.write(b"x")
        await asyncio.sleep(0.1)
    async with stack.hostile_client() as http:
        assert (await _post(http, "/v1/completions", _completion())).status_code == 200
    for writer in writers:
        writer.close()


async def hundreds_of_long_requests(stack: Stack) -> None:
    """More requests of one API key than all engines can run at once. The client then closes its connections."""
    async with httpx.AsyncClient(
        base_url=stack.url,
        timeout=LONG_SECONDS,
        headers={"authorization": "Bearer hostile-key"},
        limits=httpx.Limits(max_connections=None),
    ) as http:
        requests = [
            asyncio.create_task(_post(http, "/v1/completions", _completion(max_tokens=3000, ignore_eos=True)))
            for _ in range(300)
        ]
        done, _ = await asyncio.wait(requests, timeout=size(2, soak=5))
        assert all(task.result().status_code in (200, 429) for task in done)
        for task in requests:
            task.cancel()
        await asyncio.gather(*requests, return_exceptions=True)


async def connections_that_never_read(stack: Stack) -> None:
    """Streams whose client does not read."""
    host, port = stack.url.removeprefix("http://").split(":")
    body = json.dumps(_completion(max_tokens=2000, stream=True, ignore_eos=True)).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {host}:{port}\r\nauthorization: Bearer hostile-key\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    ).encode()
    sockets = []
    for _ in range(50):
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((host, int(port)))
        connection.sendall(head + body)
        sockets.append(connection)
    await asyncio.sleep(3)
    for connection in sockets:
        connection.close()


async def aborted_requests_beyond_a_limit(stack: Stack) -> None:
    """A key with a limit of tokens sends more than the limit accepts, and aborts every request that is accepted."""
    async with stack.client(LIMITED_KEY) as http:

        async def abort_early() -> int:
            body = _completion(max_tokens=2000, stream=True, ignore_eos=True)
            async with http.stream("POST", "/v1/completions", json=body) as reply:
                async for _ in reply.aiter_lines():
                    break
                return reply.status_code

        statuses = set[int]()
        for _ in range(size(8, soak=30)):
            statuses.update(await asyncio.gather(*(abort_early() for _ in range(20))))
        assert statuses == {200, 429}


async def _probe(stack: Stack) -> None:
    """Read /livez and /readyz as kubelets do, each on a new connection. Raises for another answer than 200."""
    for path in ("livez", "readyz"):
        reader, writer = await asyncio.open_connection("127.0.0.1", stack.health_port)
        writer.write(f"GET /{path} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
        async with asyncio.timeout(LONG_SECONDS):
            answer = await reader.read()
        writer.close()
        assert answer.startswith(b"HTTP/1.1 200 "), f"{path}: {answer[:100]!r}"


async def connections_to_the_health_port(stack: Stack) -> None:
    """Connections without a request, five times as many as the server keeps, before each probe."""
    with contextlib.ExitStack() as connections:
        for _ in range(size(3, soak=10)):
            for number in range(1280):
                source = (f"127.0.0.{2 + number % 100}", 0)
                address = ("127.0.0.1", stack.health_port)
                connections.enter_context(socket.create_connection(address, source_address=source))
                await asyncio.sleep(0)
            await _probe(stack)
            connections.close()


async def hundreds_of_scrapes(stack: Stack) -> None:
    """Metrics for 300 connections at once, again and again."""

    async def scrape() -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", stack.health_port)
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n")
        try:
            return (await reader.read())[9:12]
        except ConnectionResetError:
            return b""
        finally:
            writer.close()

    async with asyncio.timeout(LONG_SECONDS):
        until = asyncio.get_running_loop().time() + size(1, soak=3)
        while asyncio.get_running_loop().time() < until:
            statuses = await asyncio.gather(*(scrape() for _ in range(300)))
            assert set(statuses) <= {b"200", b"503", b""}
            assert b"200" in statuses
            await _probe(stack)


async def client_of_the_coordinator_that_never_reads(stack: Stack) -> None:
    """300 streams of 3,000 tokens on one connection whose client reads nothing, not even the answer to its HELLO."""
    context = zmq.Context()
    attacker = context.socket(zmq.DEALER)
    attacker.setsockopt(zmq.LINGER, 0)
    attacker.setsockopt(zmq.RCVHWM, 1)
    attacker.setsockopt(zmq.RCVBUF, 4096)
    set_keys(attacker, stack.fleet.keys(Role.CLIENT))
    try:
        attacker.connect(f"tcp://127.0.0.1:{stack.fleet.client_port}")
        attacker.send_multipart(Hello(role=Role.CLIENT, name="never-reads", incarnation=1).to_frames())
        params = pack({"num_tokens_to_generate": 3000, "streaming": True, "termination_id": IGNORE_EOS, "seed": 1})
        for number in range(300):
            meta = RequestMeta(streaming=True, seed=1, tenant="never-reads")
            submit = Submit(number.to_bytes(16, "big"), meta, tokens_to_bytes([1, 2, 3]), b"", params)
            attacker.send_multipart(submit.to_frames())
        # Long enough for more tokens than the buffers of both ends take.
        await asyncio.sleep(size(6, soak=60))
        async with stack.client(WELL_BEHAVED_KEY) as http:
            assert (await _post(http, "/v1/completions", _completion())).status_code == 200
    finally:
        context.destroy(linger=0)


ATTACKS: tuple[Attack, ...] = (
    chained_grammar_rules,
    chained_schema_definitions,
    slow_grammars,
    many_grammars_before_a_schema_of_another_key,
    megabytes_for_tokenization,
    rejected_bodies_of_megabytes,
    longest_lists_allowed,
    megabytes_of_prompt,
    slow_connections,
    hundreds_of_long_requests,
    connections_that_never_read,
    client_of_the_coordinator_that_never_reads,
    aborted_requests_beyond_a_limit,
    connections_to_the_health_port,
    hundreds_of_scrapes,
)


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
async def test_streams_of_others_go_on(
    stack: Stack, attack: Callable[[Stack], Awaitable[None]], report: Callable[[str], None]
) -> None:
    before = {name: process.pid for name, process in stack.processes.items()}
    exits = list(stack.fleet.exits)
    stack.reset_peaks()
    await stack.streams.window()  # what is left of the attack before
    await asyncio.sleep(UNDISTURBED_SECONDS / 4)
    undisturbed = await stack.streams.window()
    stack.longest_undisturbed = max(stack.longest_undisturbed, undisturbed.longest_wait)
    for _ in range(size(1, soak=5)):
        await attack(stack)
    disturbed = await stack.streams.window()
    largest = stack.peak_memory()
    sizes = ", ".join(f"{name} {memory // MIB} MiB" for name, memory in largest.items())
    waits = f"longest wait {disturbed.longest_wait:.2f} s, undisturbed {undisturbed.longest_wait:.2f} s"
    report(f"{waits}; {sizes}")
    assert disturbed.failures == []
    assert stack.fleet.exits == exits, "an engine exited"
    assert {name: process.pid for name, process in stack.processes.items()} == before
    assert all(process.running for process in stack.processes.values())
    allowed = LONGEST_WAIT_MULTIPLE * stack.longest_undisturbed + PROCESSES * disturbed.longest_delay
    assert disturbed.longest_wait < allowed, "a well-behaved stream stalled"
    for name, memory in largest.items():
        assert memory < MEMORY_BOUNDS[name], f"{name} uses {memory // MIB} MiB"
