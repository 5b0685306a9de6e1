"""The server with a real coordinator and a real engine on real sockets, and hashes instead of a model."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from control_link import ControlLink
from echo_engine import EchoBackend
from echo_executor import echo_answer
from eventually import LONG_SECONDS, eventually
from random_checkpoint import OVERFLOW, write_overflowing_model

from megatron_runtime.backends.native.backend import NativeBackend
from megatron_runtime.backends.native.cpu.executor import CpuExecutor
from megatron_runtime.backends.native.engine import EngineCore
from megatron_runtime.checkpoints.source import resolve
from megatron_runtime.client.coordinator_client import CoordinatorClient
from megatron_runtime.coordinator.core.settings import CoordinatorSettings, RoutingPolicy, Timing
from megatron_runtime.coordinator.service import Coordinator
from megatron_runtime.engine.settings import EngineSettings
from megatron_runtime.engine.worker import EngineWorker
from megatron_runtime.protocol.adapters import Adapter, AdapterList
from megatron_runtime.protocol.headers import Header, Role

TIMING = Timing(heartbeat=0.1, recovery=0.5, recovery_settle=0.2)


@dataclass
class Stack:
    """A coordinator, an engine and a server.

    step_seconds: duration of a step of the echo engine.
    model:        directory and dtype of a model in place of it.
    """

    settings: CoordinatorSettings
    step_seconds: float
    model: tuple[Path, str] | None = None
    coordinator: Coordinator = field(init=False)
    worker: EngineWorker = field(init=False)
    engine: Any = field(init=False)
    client: CoordinatorClient = field(init=False)
    running: Any = None
    _operations: int = 0

    async def begin(self) -> None:
        self.start_coordinator()
        addresses = self.coordinator.transport.addresses
        engine_settings = EngineSettings(
            coordinator=addresses[Role.ENGINE],
            name="engine-0",
            max_requests=8,
            kv_cache_memory=1 << 20,
        )
        backend: NativeBackend = EchoBackend(engine_settings, step_seconds=self.step_seconds)
        if self.model is not None:
            directory, dtype = self.model
            executor = CpuExecutor(resolve(str(directory)), dtype=dtype, kv_cache_memory=1 << 20, threads=1)
            backend = NativeBackend(EngineCore(executor, engine_settings.inference_config))
        self.engine = backend.core
        self.worker = EngineWorker(engine_settings, backend)
        self._serving = asyncio.create_task(self.worker.run())
        self.client = CoordinatorClient(addresses[Role.CLIENT])
        await self.client.start(connect_timeout_seconds=LONG_SECONDS)
        self.admin = ControlLink(addresses[Role.ADMIN])
        await self.admin.start()
        await eventually(self.engine_serves, what="the engine serves")

    async def engine_serves(self) -> bool:
        status = await self.client.status()
        return [engine.serving for engine in status.engines] == [True]

    def start_coordinator(self) -> None:
        self.coordinator = Coordinator(self.settings)
        self.coordinator.start()

    async def control(self, kind: Header) -> None:
        self._operations += 1
        ack = await self.admin.control(
            kind, operation_id=f"op-{self._operations}", fence=1, timeout_seconds=LONG_SECONDS
        )
        assert ack.ok

    async def set_adapters(self, *adapters: Adapter) -> None:
        """Return when the server knows the list."""
        self._operations += 1
        wanted = AdapterList(adapters)
        await self.admin.control(Header.SET_ADAPTERS, operation_id=f"op-{self._operations}", fence=1, adapters=wanted)

        async def is_known() -> bool:
            return self.client.adapters.adapters == adapters

        await eventually(is_known, what="the server knows the adapters")

    async def nothing_is_left(self) -> None:
        """Every slot and page of the engine is free, and every request forgotten on the way."""

        async def is_free() -> bool:
            status = await self.client.status()
            return self.engine.context.usage == 0 and not self.engine.has_work and status.in_flight == 0

        await eventually(is_free, what="all slots and pages are free")
        self.engine.check_integrity()

    async def end(self) -> None:
        await self.nothing_is_left()
        self.admin.close()
        self.client.stop()
        self.worker.ended.set()
        await self._serving
        self.coordinator.stop()


StartStack = Callable[..., Awaitable[Stack]]


@pytest.fixture
async def start_stack(start: Any) -> AsyncIterator[StartStack]:
    stacks: list[Stack] = []

    async def start_one(
        *,
        step_seconds: float = 0.002,
        model: tuple[Path, str] | None = None,
        server: dict[str, Any] | None = None,
        **settings: Any,
    ) -> Stack:
        ports = {"listen": "127.0.0.1", "client_port": 0, "engine_port": 0, "admin_port": 0, "timing": TIMING}
        stack = Stack(CoordinatorSettings(**{**ports, **settings}), step_seconds, model)
        await stack.begin()
        stacks.append(stack)
        stack.running = await start(backend=stack.client, **(server or {}))
        return stack

    yield start_one
    for stack in stacks:
        await stack.end()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_disconnect_frees_slots_and_pages_at_once(start_stack: StartStack, stream: bool) -> None:
    """Also those of requests that wait for a slot: twelve choices, eight slots."""
    stack = await start_stack(step_seconds=0.01)
    asking = asyncio.create_task(stack.running.chat(n=12, max_tokens=2000, stream=stream))

    async def is_full() -> bool:
        return stack.engine.stats().num_running == 8

    await eventually(is_full, what="the engine is full")
    assert stack.engine.context.usage > 0
    asking.cancel()
    await stack.nothing_is_left()


async def test_requests_are_held_while_paused_and_answered_afterwards(start_stack: StartStack) -> None:
    stack = await start_stack(server={"keep_alive_seconds": 0.05})
    await stack.control(Header.PAUSE)
    comments, texts = 0, []
    body = {"model": "smollm2", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "stream": True}
    async with stack.running.http.stream("POST", "/v1/chat/completions", json=body) as reply:
        async for line in reply.aiter_lines():
            is_comment = line == ": keep-alive"
            comments += is_comment
            if is_comment and comments == 3:
                await stack.control(Header.UNPAUSE)
            if line.startswith("data: {"):
                texts.append(json.loads(line[6:])["choices"][0]["finish_reason"])
    assert comments >= 3
    assert texts[-1] == "length"


async def test_requests_are_rejected_while_paused_with_the_reject_policy(start_stack: StartStack) -> None:
    stack = await start_stack(pause_mode="Reject")
    await stack.control(Header.PAUSE)
    reply = await stack.running.chat()
    assert reply.status_code == 503
    assert int(reply.headers["retry-after"]) >= 1
    await stack.control(Header.UNPAUSE)
    assert (await stack.running.chat(max_tokens=1)).status_code == 200


async def test_a_full_queue_is_a_429(start_stack: StartStack) -> None:
    stack = await start_stack(max_queued=2)
    await stack.control(Header.PAUSE)
    waiting = [asyncio.create_task(stack.running.chat(max_tokens=1)) for _ in range(2)]

    async def is_full() -> bool:
        return (await stack.client.status()).queued == 2

    await eventually(is_full, what="two requests are queued")
    reply = await stack.running.chat()
    assert reply.status_code == 429
    assert int(reply.headers["retry-after"]) >= 1
    await stack.control(Header.UNPAUSE)
    assert [reply.status_code for reply in await asyncio.gather(*waiting)] == [200, 200]


async def test_a_coordinator_restart_delays_a_stream_and_loses_no_token(start_stack: StartStack) -> None:
    stack = await start_stack(step_seconds=0.01, server={"coordinator_wait_seconds": 30})
    undisturbed = (await stack.running.chat(max_tokens=100, seed=3)).json()["choices"][0]["message"]["content"]
    streaming = asyncio.create_task(stack.running.chat(max_tokens=100, seed=3, stream=True))

    async def runs() -> bool:
        return stack.engine.stats().num_running == 1

    await eventually(runs, what="the stream runs")
    ports = {role: int(address.rpartition(":")[2]) for role, address in stack.coordinator.transport.addresses.items()}
    stack.coordinator.stop()

    async def is_away() -> bool:
        return not stack.client.connected

    await eventually(is_away, what="the server knows that the coordinator is away")
    late = asyncio.create_task(stack.running.chat(max_tokens=3))
    stack.settings = CoordinatorSettings(
        listen="127.0.0.1",
        client_port=ports[Role.CLIENT],
        engine_port=ports[Role.ENGINE],
        admin_port=ports[Role.ADMIN],
        timing=TIMING,
    )
    stack.start_coordinator()
    text = (await streaming).text
    deltas = [
        json.loads(event[6:])["choices"][0]["delta"] for event in text.split("\n\n") if event.startswith("data: {")
    ]
    assert "".join(delta.get("content", "") for delta in deltas) == undisturbed
    assert (await late).status_code == 200


async def test_an_answer_has_the_epoch_of_its_weights(start_stack: StartStack) -> None:
    stack = await start_stack()
    assert (await stack.running.chat(max_tokens=3)).json()["system_fingerprint"] == "weights-0"
    ack = await stack.admin.control(Header.SET_GENERATION_EPOCH, operation_id="epoch", fence=1, epoch=7)
    assert ack.ok
    assert (await stack.running.chat(max_tokens=3)).json()["system_fingerprint"] == "weights-7"
    stream = await stack.running.chat(max_tokens=3, stream=True)
    chunks = [json.loads(event[6:]) for event in stream.text.split("\n\n")[:-2]]
    assert chunks[-1]["system_fingerprint"] == "weights-7"
    plain = await stack.running.post("/v1/completions", {"model": "smollm2", "prompt": "Hi", "max_tokens": 3})
    assert plain.json()["system_fingerprint"] == "weights-7"


async def test_each_adapter_is_a_model_of_its_own(start_stack: StartStack) -> None:
    stack = await start_stack()
    (before,) = (await stack.running.http.get("/v1/models")).json()["data"]
    await stack.set_adapters(Adapter("sql", "hf:org/sql"), Adapter("org/chat", "hf:org/chat"))
    base, *adapters = (await stack.running.http.get("/v1/models")).json()["data"]
    assert base == {**before, "tasks": ["generate"]}, "the server learns the tasks from the coordinator"
    assert "parent" not in base
    assert [(card["id"], card["parent"], card["object"]) for card in adapters] == [
        ("org/chat", "smollm2", "model"),
        ("sql", "smollm2", "model"),
    ]
    assert adapters[0]["max_model_len"] == base["max_model_len"]
    assert (await stack.running.http.get("/v1/models/org/chat")).json() == adapters[0]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_is_answered_by_the_adapter_that_it_names_as_its_model(
    start_stack: StartStack, stream: bool
) -> None:
    stack = await start_stack()
    sql, chat = Adapter("sql", "hf:org/sql"), Adapter("chat", "hf:org/chat")
    await stack.set_adapters(sql, chat)
    prompt = list(range(3, 20))
    for model, adapter in (("sql", sql), ("smollm2", None), ("chat", chat)):
        body = {"model": model, "prompt": prompt, "max_tokens": 6, "stream": stream}
        text = (await stack.running.post("/v1/completions", body)).text
        if stream:
            chunks = [json.loads(event[6:]) for event in text.split("\n\n")[:-2]]
        else:
            chunks = [json.loads(text)]
        assert {chunk["model"] for chunk in chunks} == {model}
        tokens = echo_answer(prompt, 6, vocab_size=50_000, adapter=adapter)
        answer = "".join(chunk["choices"][0]["text"] for chunk in chunks)
        assert answer == stack.running.tokenizer.decode(tokens)


@pytest.mark.parametrize("named", [{"model": "EMPTY"}, {"model": None}, {}], ids=["EMPTY", "null", "absent"])
async def test_a_request_without_a_model_name_means_the_only_model(start_stack: StartStack, named: dict) -> None:
    stack = await start_stack()
    reply = await stack.running.post("/v1/completions", {"prompt": "Hi", "max_tokens": 2, **named})
    assert (reply.status_code, reply.json()["model"]) == (200, "smollm2")


@pytest.mark.parametrize("path", ["completions", "chat/completions", "tokenize"])
async def test_an_adapter_that_is_not_loaded_is_a_404(start_stack: StartStack, path: str) -> None:
    stack = await start_stack()
    await stack.set_adapters(Adapter("sql", "hf:org/sql"))
    body = {"prompt": "Hi"} if path != "chat/completions" else {"messages": [{"role": "user", "content": "Hi"}]}
    reply = await stack.running.post(f"/v1/{path}", {"model": "chat", **body})
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert error["message"] == "The model 'chat' does not exist: this server offers 'smollm2', 'sql'."
    await stack.set_adapters()
    assert (await stack.running.post(f"/v1/{path}", {"model": "sql", **body})).status_code == 404


async def test_an_adapter_that_was_removed_since_the_server_looked_is_the_same_404(start_stack: StartStack) -> None:
    stack = await start_stack()
    await stack.set_adapters(Adapter("chat", "hf:org/chat"))
    stack.client.adapters = AdapterList((Adapter("sql", "hf:org/sql"),), generation=1)
    reply = await stack.running.post("/v1/completions", {"model": "sql", "prompt": "Hi", "max_tokens": 3})
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert "no adapter 'sql': they have chat" in error["message"]


async def test_the_base_model_hides_an_adapter_of_its_name(start_stack: StartStack) -> None:
    stack = await start_stack()
    await stack.set_adapters(Adapter("smollm2", "hf:org/sql"))
    assert [card["id"] for card in (await stack.running.http.get("/v1/models")).json()["data"]] == ["smollm2"]
    body = {"model": "smollm2", "prompt": [3, 4], "max_tokens": 3}
    text = (await stack.running.post("/v1/completions", body)).json()["choices"][0]["text"]
    assert text == stack.running.tokenizer.decode(echo_answer([3, 4], 3, vocab_size=50_000))


@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_a_profile_starts_and_stops_on_every_engine(start_stack: StartStack, prefix: str) -> None:
    stack = await start_stack(single_port=True)
    calls: list[bool] = []
    stack.engine.executor.profile = calls.append
    reply = await stack.running.http.post(f"{prefix}/start_profile")
    assert (reply.status_code, reply.json()) == (200, {"profiling": True, "ranks": 1})
    assert calls == [True]
    reply = await stack.running.http.post(f"{prefix}/stop_profile")
    assert (reply.status_code, reply.json()) == (200, {"profiling": False, "ranks": 1})
    assert calls == [True, False]


@pytest.mark.parametrize(
    ("single_port", "status", "message"),
    [(True, 500, "engine-0: START_CUDA_PROFILER failed: the echo executor has no CUDA"), (False, 403, "admin")],
)
async def test_a_profile_that_is_impossible_or_forbidden_names_the_reason(
    start_stack: StartStack, single_port: bool, status: int, message: str
) -> None:
    stack = await start_stack(single_port=single_port)
    reply = await stack.running.http.post("/v1/start_profile")
    assert reply.status_code == status
    assert message in reply.json()["error"]["message"]
    assert (await stack.running.chat(max_tokens=1)).status_code == 200


@pytest.mark.parametrize("shared", [False, True])
async def test_cached_tokens_reveal_nothing_about_another_key(
    start_stack: StartStack, tmp_path: Path, shared: bool
) -> None:
    (tmp_path / "keys").write_text("first\nsecond\n")
    server = {"api_keys_file": tmp_path / "keys", "share_prefix_cache": shared}
    stack = await start_stack(server=server, routing_policy=RoutingPolicy.LONGEST_PREFIX)

    async def cached(key: str) -> int:
        body = {"model": "smollm2", "prompt": list(range(3, 600)), "max_tokens": 2}
        reply = await stack.running.http.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})
        assert reply.status_code == 200
        return reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert await cached("first") == 0
    assert await cached("first") == 512, "a key finds its own prompts"
    assert await cached("second") == (512 if shared else 0)
    assert await cached("second") == 512


async def test_a_key_with_300_long_requests_does_not_block_another(start_stack: StartStack, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("greedy\nother\n")
    stack = await start_stack(step_seconds=0.01, server={"api_keys_file": tmp_path / "keys"})

    async def post(key: str, **body: Any) -> Any:
        headers = {"Authorization": f"Bearer {key}"}
        return await stack.running.http.post("/v1/completions", json={"model": "smollm2", **body}, headers=headers)

    prompts = [[number, 5] for number in range(3, 303)]
    greedy = asyncio.create_task(post("greedy", prompt=prompts, max_tokens=3000, ignore_eos=True))

    async def is_full() -> bool:
        status = await stack.client.status()
        return (status.in_flight, status.queued) == (8, 292)

    await eventually(is_full, what="all requests of the first key are there")
    replies = await asyncio.gather(*(post("other", prompt=[number], max_tokens=5) for number in range(3, 9)))
    assert [reply.status_code for reply in replies] == [200] * 6
    assert stack.coordinator.core.counters.completed == 6, "no request of the first key had to end before"
    assert not greedy.done()
    assert stack.coordinator.core.counters.moved >= 4
    greedy.cancel()
    await asyncio.gather(greedy, return_exceptions=True)


@pytest.mark.parametrize("dtype", ["float32", "int8", "int4"])
async def test_a_request_that_the_model_cannot_compute_fails_alone(
    start_stack: StartStack, tmp_path: Path, dtype: str
) -> None:
    """The engine lives, OpenAI's clients do not repeat it, and other requests of its steps get their answers."""
    stack = await start_stack(model=(write_overflowing_model(tmp_path / "model"), dtype))

    async def ask(prompt: list[int], **fields: Any) -> Any:
        body = {"prompt": prompt, "max_tokens": 6, "seed": 3, "ignore_eos": True, "return_token_ids": True, **fields}
        return await stack.running.post("/v1/completions", body)

    innocent = [[5, 6], [*range(20, 60)]]
    expected = [(await ask(prompt)).json()["choices"][0] for prompt in innocent]
    assert [len(choice["token_ids"]) for choice in expected] == [6, 6]
    for fields in ({"repetition_penalty": 1e-44}, {"temperature": 1, "top_p": 0.9, "repetition_penalty": 1e-44}):
        assert (await ask([5], **fields)).status_code == 400
    poison = [ask([9, OVERFLOW]), ask([OVERFLOW], logprobs=5, temperature=0), ask([8, OVERFLOW], echo=True, logprobs=1)]
    *failed, one, other = await asyncio.gather(*poison, *map(ask, innocent))
    assert [reply.json()["choices"][0] for reply in (one, other)] == expected
    for reply in failed:
        error = reply.json()["error"]
        assert (reply.status_code, reply.headers["x-should-retry"], error["code"]) == (500, "false", "not_finite")
        assert "not finite" in error["message"]
    streamed = await ask([OVERFLOW], stream=True)
    assert "not finite" in streamed.text
    assert (await stack.client.status()).engines[0].serving
    assert [(await ask(prompt)).json()["choices"][0] for prompt in innocent] == expected


@dataclass
class Limited:
    """Two servers of one coordinator, and an API key with limits."""

    stack: Stack
    servers: list[Any]

    async def complete(self, server: int = 0, **fields: Any) -> Any:
        body = {"prompt": [3] * 10, "max_tokens": 100, **fields}
        return await self.servers[server].http.post("/v1/completions", json=body, headers=KEY)

    async def remaining(self, kind: str = "tokens", *, server: int = 1) -> int:
        models = await self.servers[server].http.get("/v1/models", headers=KEY)
        return int(models.headers[f"x-ratelimit-remaining-{kind}"])

    async def has_remaining(self, tokens: int) -> None:
        """Wait until so many tokens are left: the last charge may arrive after the answer that it is for."""

        async def is_so() -> bool:
            return await self.remaining() == tokens

        await eventually(is_so, what=f"{tokens} tokens are left")

    async def generated(self) -> int:
        """Return the generated tokens of the key, from the metrics of the first server."""
        text = (await self.servers[0].http.get("/metrics", headers=KEY)).text
        match = re.search(r'megatron_api_key_generation_tokens_total{api_key="team"} ([0-9.]+)', text)
        return 0 if match is None else int(float(match[1]))


KEY = {"Authorization": "Bearer secret"}


@pytest.fixture
async def start_limited(start_stack: StartStack, start: Any, tmp_path: Path) -> AsyncIterator[Any]:
    clients: list[CoordinatorClient] = []

    async def start_one(*, step_seconds: float = 0.002, reserve_tokens: int = 1024, **limits: int) -> Limited:
        file = tmp_path / "keys"
        file.write_text("keys:\n- " + json.dumps({"name": "team", "key": "secret", "metrics": True, **limits}))
        settings = {"api_keys_file": file, "reserve_tokens": reserve_tokens}
        stack = await start_stack(step_seconds=step_seconds, server=settings)
        clients.append(CoordinatorClient(stack.coordinator.transport.addresses[Role.CLIENT]))
        await clients[-1].start(connect_timeout_seconds=LONG_SECONDS)
        return Limited(stack, [stack.running, await start(backend=clients[-1], **settings)])

    yield start_one
    for client in clients:
        client.stop()


async def test_the_limits_of_a_key_hold_over_all_servers(start_limited: Any) -> None:
    limited = await start_limited(requestsPerMinute=14, tokensPerMinute=1000)
    replies = await asyncio.gather(*(limited.complete(number % 2) for number in range(12)))
    accepted = [reply for reply in replies if reply.status_code == 200]
    assert len(accepted) == 9, "each takes ten tokens and a hundred"
    for reply in replies:
        assert reply.headers["x-ratelimit-limit-tokens"] == "1000"
        if reply.status_code == 429:
            assert re.search(r"1000 tokens per minute, \d+ left, 110 needed", reply.json()["error"]["message"])
            assert 1 <= int(reply.headers["retry-after"]) <= 60
    for server in (0, 1):
        assert (await limited.remaining(server=server), await limited.remaining("requests", server=server)) == (10, 2)
    for server in (0, 1):
        tokenized = await limited.servers[server].http.post("/v1/tokenize", json={"prompt": "Hi"}, headers=KEY)
        assert (tokenized.status_code, tokenized.headers["x-ratelimit-remaining-requests"]) == (200, str(1 - server))
    last = await limited.complete(1)
    assert last.status_code == 429
    assert "14 requests per minute, 0 left, 1 needed" in last.json()["error"]["message"]


async def test_concurrent_requests_cannot_pass_more_than_a_reservation_each(start_limited: Any) -> None:
    limited = await start_limited(tokensPerMinute=100)
    fields = [{"max_tokens": 200}, {"max_tokens": 200, "stream": True}] * 2
    replies = await asyncio.gather(*(limited.complete(number // 2, **each) for number, each in enumerate(fields)))
    assert sorted(reply.status_code for reply in replies) == [200, 429, 429, 429], "one has the whole minute"
    rejected = await limited.complete()
    assert rejected.status_code == 429
    assert "100 tokens per minute, 0 left, 1 needed" in rejected.json()["error"]["message"]
    assert 60 < int(rejected.headers["retry-after"]) <= 180, "what exceeds the limit counts in the minutes after"


async def test_tokens_beyond_a_reservation_are_charged_while_they_are_generated(start_limited: Any) -> None:
    limited = await start_limited(tokensPerMinute=200, reserve_tokens=20, step_seconds=0.005)
    asking = asyncio.create_task(limited.complete(max_tokens=100, n=2))

    async def are_charged() -> bool:
        return await limited.remaining() < 200 - 10 - 40

    await eventually(are_charged, what="more than the reservation is charged")
    assert not asking.done()
    assert (await asking).status_code == 200
    await limited.has_remaining(0)
    assert (await limited.complete(1, max_tokens=1)).status_code == 429


@pytest.mark.parametrize("stage", ["queued", "answer", "stream"])
async def test_an_aborted_request_is_charged_what_was_generated(start_limited: Any, stage: str) -> None:
    limited = await start_limited(tokensPerMinute=10_000, reserve_tokens=50, step_seconds=0.005)
    if stage == "queued":
        await limited.stack.control(Header.PAUSE)
    # The client asks for few events, and reads none.
    body = {"prompt": [3] * 10, "max_tokens": 2000, "streaming_interval": 1 << 30, "stream": stage == "stream"}
    content = json.dumps(body).encode()
    url = httpx.URL(limited.servers[0].url)
    _, writer = await asyncio.open_connection(url.host, url.port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer secret\r\nContent-Length: {len(content)}"
    writer.write(head.encode() + b"\r\nContent-Type: application/json\r\n\r\n" + content)

    async def has_begun() -> bool:
        if stage == "queued":
            return (await limited.stack.client.status()).queued == 1
        return await limited.remaining() < 10_000 - 10 - 50 - 50  # 50 more than it has reserved

    await eventually(has_begun, what="the request is where it is aborted")
    writer.close()
    await limited.stack.nothing_is_left()
    if stage == "queued":
        await limited.stack.control(Header.UNPAUSE)
    generated = await limited.generated()
    assert generated == 0 if stage == "queued" else 100 < generated < 2000
    await limited.has_remaining(10_000 - 10 - generated)


async def test_a_request_waits_for_a_coordinator_that_counts(start_limited: Any) -> None:
    """A restarted coordinator has counted nothing. What a request had reserved does not return there."""
    limited = await start_limited(tokensPerMinute=1000, step_seconds=0.01)
    asking = asyncio.create_task(limited.complete(max_tokens=60))

    async def runs() -> bool:
        return limited.stack.engine.stats().num_running == 1

    await eventually(runs, what="the request runs")
    stack = limited.stack
    ports = {
        f"{role.name.lower()}_port": int(address.rpartition(":")[2])
        for role, address in stack.coordinator.transport.addresses.items()
    }
    stack.coordinator.stop()
    late = asyncio.create_task(limited.complete(max_tokens=30))
    stack.settings = CoordinatorSettings(listen="127.0.0.1", timing=TIMING, **ports)
    stack.start_coordinator()
    assert (await asking).status_code == 200
    assert (await late).status_code == 200
    assert await limited.remaining() == 1000 - 10 - 30
