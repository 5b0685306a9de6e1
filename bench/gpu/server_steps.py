"""Steps of the GPU campaign that start a coordinator, a server and engines on one GPU, and send verbs under load."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import httpx

from bench.gpu.report import ROOT, Campaign
from megatron_runtime.checkpoints.convert import convert
from megatron_runtime.cli.bench.serve import run as measure_server
from megatron_runtime.cli.processes import free_ports
from megatron_runtime.protocol import strict_json as json
from megatron_runtime.protocol.headers import Header
from megatron_runtime.tokenization.loader import write_gguf_tokenizer

sys.path.append(str(ROOT / "tests" / "support"))

from control_link import ControlLink

EXPECTED = Path(__file__).with_name("expected.json")
"""Greedy answers to PROMPTS by SmolLM2 135M in float32 on a CPU."""
COMPARED_CHARACTERS = 200
PROMPTS = (
    "The capital of France is",
    "Water boils at",
    "1, 2, 3, 4,",
    "Once upon a time",
    "The three primary colors are",
    "To bake bread you need",
    "In 1969, humans first",
    "The opposite of hot is",
)
MODEL_NAME = "m"
MAX_SEQUENCE_LENGTH = 2048
START_SECONDS = 120.0
CASE_SECONDS = 90.0
_POLL_SECONDS = 0.05


class Process(Protocol):
    """The methods of subprocess.Popen that Fleet uses."""

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def kill(self) -> None: ...


def start_process(command: Sequence[str], environment: Mapping[str, str], log: Path) -> Process:
    """Start `python command…`. Unit tests replace this function with a faster function."""
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, *command], env=dict(environment), stdout=output, stderr=subprocess.STDOUT, cwd=ROOT
        )


@dataclass(kw_only=True)
class Fleet:
    """A coordinator, a server and engines on this machine.

    dtype:   number format of the engines.
    backend: options that select and configure the backend.
    """

    campaign: Campaign
    dtype: str
    backend: tuple[str, ...] = ()
    children: dict[str, Process] = field(default_factory=dict)
    ports: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        names = ("client", "engine", "admin", "http")
        self.ports = dict(zip(names, free_ports(len(names)), strict=True))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.ports['http']}"

    def start(self, name: str, *arguments: str) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "HF_HUB_OFFLINE": "1"}
        log = self.campaign.folder / f"{name}.process.log"
        self.children[name] = start_process(["-P", "-m", "megatron_runtime.cli", *arguments], environment, log)

    def start_coordinator(self) -> None:
        ports = [f"--{name}-port={self.ports[name]}" for name in ("client", "engine", "admin")]
        self.start("coordinator", "coordinator", "--listen", "127.0.0.1", *ports, "--health-port", "off")

    def start_server(self) -> None:
        coordinator, http = f"--coordinator=127.0.0.1:{self.ports['client']}", f"--port={self.ports['http']}"
        limits = ("--max-sequence-length", str(MAX_SEQUENCE_LENGTH), "--health-port", "off")
        names = ("--model", self.campaign.model, "--model-name", MODEL_NAME, "--host", "127.0.0.1")
        self.start("server", "server", coordinator, *names, http, *limits)

    def start_engine(self, name: str) -> None:
        coordinator = f"--coordinator=127.0.0.1:{self.ports['engine']}"
        self.start(name, "engine", coordinator, "--name", name, *self._engine_options(), "--health-port", "off")

    def start_all(self) -> None:
        """Start all components with `megatron serve`, as one process."""
        port = str(self.ports["http"])
        self.start("serve", "serve", "--port", port, "--model-name", MODEL_NAME, *self._engine_options())

    def _engine_options(self) -> list[str]:
        sizes = self.campaign.sizes
        memory = f"{sizes.server_kv_cache_mib}Mi"
        options = ["--model", self.campaign.model, "--dtype", self.dtype, "--device", self.campaign.device]
        options += ["--kv-cache-memory", memory, "--max-sequence-length", str(MAX_SEQUENCE_LENGTH)]
        return [*options, "--threads", str(sizes.threads), *self.backend]

    def ended(self) -> str | None:
        """Return the name of a process that has ended unexpectedly, or None if all processes run."""
        return next((name for name, child in self.children.items() if child.poll() is not None), None)

    def kill(self, name: str) -> Process:
        """Kill a process and return it."""
        process = self.children.pop(name)
        process.kill()
        return process

    def stop(self) -> None:
        for name in list(self.children):
            self.kill(name).wait()


class Streams:
    """Concurrent streams with greedy sampling over HTTP.

    texts:  text that each stream has received.
    times:  arrival times of the events of all streams, in seconds.
    failed: error messages of the streams that failed.
    """

    def __init__(self, url: str, count: int, tokens: int) -> None:
        self.texts = [""] * count
        self.times: list[float] = []
        self.failed: list[str] = []
        self._open = count
        self._progress = asyncio.Event()
        self._tasks = [asyncio.create_task(self._run(url, index, tokens)) for index in range(count)]

    async def _run(self, url: str, index: int, tokens: int) -> None:
        body = {
            "model": MODEL_NAME,
            "prompt": PROMPTS[index % len(PROMPTS)],
            "max_tokens": tokens,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
        }
        try:
            async with (
                httpx.AsyncClient(timeout=120) as client,
                client.stream("POST", f"{url}/v1/completions", json=body) as answer,
            ):
                if answer.status_code != 200:
                    self.failed.append(f"{answer.status_code} {(await answer.aread())[:200]!r}")
                    return
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        self._read(index, json.loads(line.removeprefix("data: ")))
        except httpx.HTTPError as error:
            self.failed.append(f"{type(error).__name__}: {error}"[:200])
        finally:
            self._open -= 1
            self._progress.set()

    def _read(self, index: int, event: dict[str, Any]) -> None:
        self.times.append(time.perf_counter())
        if "error" in event:
            self.failed.append(str(event["error"])[:200])
        for choice in event.get("choices", ()):
            self.texts[index] += choice.get("text") or ""
        self._progress.set()

    @property
    def events(self) -> int:
        return len(self.times)

    @property
    def longest_gap_ms(self) -> float:
        """Longest time in milliseconds during which no stream received an event."""
        return round(1e3 * max((later - earlier for earlier, later in pairwise(self.times)), default=0.0), 1)

    async def reach(self, events: int) -> None:
        """Wait until the streams have `events` events in total, or have ended."""
        while self.events < events and self._open:
            self._progress.clear()
            await self._progress.wait()

    async def finish(self) -> list[str]:
        """Wait until all streams end, and return their texts."""
        await asyncio.gather(*self._tasks)
        return self.texts


# --- the server -----------------------------------------------------------------------------------------------------


def server(campaign: Campaign) -> None:
    """Measure streams of a server, every verb under load, a second engine, and the loss of an engine."""
    asyncio.run(_server(Fleet(campaign=campaign, dtype="float32")))


def vllm(campaign: Campaign) -> None:
    """Run the step `server` with vLLM engines in float32, without CUDA graphs."""
    if (campaign := _for_vllm(campaign)) is not None:
        backend = ("--backend", "vllm", "--vllm-arguments", '{"enforce_eager": true}')
        asyncio.run(_server(Fleet(campaign=campaign, dtype="float32", backend=backend)))


def vllm_serve(campaign: Campaign) -> None:
    """Run `megatron bench serve` on `megatron serve` in bfloat16, with a vLLM engine and its default settings."""
    if (campaign := _for_vllm(campaign)) is not None:
        _bench_serve(Fleet(campaign=campaign, dtype="bfloat16", backend=("--backend", "vllm")))


def _for_vllm(campaign: Campaign) -> Campaign | None:
    """Return the campaign with its model in a format that vLLM reads. Return None if vLLM is not installed."""
    if find_spec("vllm") is None:
        campaign.emit("vLLM is not installed")
        return None
    folder = campaign.folder / "vllm-model"
    if not folder.exists():
        convert(campaign.model, folder, dtype="float32", write_gguf_tokenizer=write_gguf_tokenizer)
    return replace(campaign, model=str(folder))


async def _server(fleet: Fleet) -> None:
    campaign = fleet.campaign
    admin = ControlLink(fleet.ports["admin"])
    try:
        begun = time.monotonic()
        fleet.start_coordinator()
        fleet.start_server()
        fleet.start_engine("engine-0")
        await admin.start(connect_timeout_seconds=START_SECONDS)
        await _serving(fleet, admin, 1)
        campaign.emit("engine-0 serves", seconds=round(time.monotonic() - begun, 1), used_mib=campaign.used_mib())
        await _answering(fleet)
        run = ServerRun(campaign, fleet, admin)
        await run.first_answers()
        await run.case("pause and unpause", run.pause)
        await run.case("suspend and resume", run.suspend)
        await run.case("update of the weights", run.update)
        fleet.start_engine("engine-1")
        await _serving(fleet, admin, 2)
        campaign.emit("two engines", used_mib=campaign.used_mib(), processes=campaign.memory_of_processes())
        await Streams(fleet.url, campaign.sizes.streams, 16).finish()  # warm-up
        await run.case("kill -9 of an engine", run.kill)
        fleet.start_engine("engine-0")
        await _serving(fleet, admin, 2)
        await run.case("drain of an engine", run.drain)
        with campaign.part("structured output and log-probabilities"):
            await run.other_requests()
        with campaign.part("stop"):
            await run.stop()
    finally:
        admin.close()
        fleet.stop()


async def _serving(fleet: Fleet, admin: ControlLink, engines: int) -> None:
    """Wait until `engines` engines serve requests.

    Raises RuntimeError if a process exits, and TimeoutError after START_SECONDS.
    """
    async with asyncio.timeout(START_SECONDS):
        while sum(engine.serving for engine in (await admin.status()).engines) != engines:
            if (ended := fleet.ended()) is not None:
                raise RuntimeError(f"{ended} has exited: read its log in {fleet.campaign.folder}")
            await asyncio.sleep(_POLL_SECONDS)


async def _answering(fleet: Fleet) -> None:
    """Wait until the server accepts requests."""
    async with asyncio.timeout(START_SECONDS), httpx.AsyncClient() as client:
        while True:
            with contextlib.suppress(httpx.TransportError):
                if (await client.get(f"{fleet.url}/v1/models")).status_code == 200:
                    return
            if (ended := fleet.ended()) is not None:
                raise RuntimeError(f"{ended} has exited: read its log in {fleet.campaign.folder}")
            await asyncio.sleep(_POLL_SECONDS)


@dataclass
class ServerRun:
    """The test cases of a running server.

    A case acts on the server while streams run. It compares their answers with `expected`, the answers of streams that
    ran without such an action.
    """

    campaign: Campaign
    fleet: Fleet
    admin: ControlLink
    expected: list[str] = field(default_factory=list)
    verbs: int = 0

    async def first_answers(self) -> None:
        """Measure the first request, and then streams while nothing else uses the server.

        The test cases compare the answers of later streams with the answers of these streams.
        """
        campaign, url, begun = self.campaign, self.fleet.url, time.perf_counter()
        first = Streams(url, 1, 8)
        await first.reach(1)
        seconds = round(time.perf_counter() - begun, 2)
        await first.finish()
        campaign.emit("first request", seconds=seconds, failed=first.failed)
        count, tokens = campaign.sizes.streams, campaign.sizes.stream_tokens
        self.expected = await Streams(url, count, tokens).finish()
        begun = time.perf_counter()
        streams = Streams(url, count, tokens)
        texts = await streams.finish()
        campaign.emit(
            f"{count} streams",
            tokens_per_s=round(count * tokens / (time.perf_counter() - begun), 1),
            equal=texts == self.expected,
            failed=streams.failed,
            longest_gap_ms=streams.longest_gap_ms,
        )
        answers = json.loads(EXPECTED.read_text())
        texts = [text[:COMPARED_CHARACTERS] for text in self.expected]
        equal = [answer.startswith(text) for answer, text in zip(answers, texts, strict=False)]
        campaign.emit("equal to float32 answers of a CPU", equal=equal)

    async def case(self, name: str, act: Callable[[Streams], Awaitable[dict[str, Any]]]) -> None:
        """Run streams, and call `act` when a quarter of their tokens has arrived.

        Record the results of `act`, and whether the answers equal the answers of streams that ran without `act`.
        """
        with self.campaign.part(name):
            count, tokens = self.campaign.sizes.streams, self.campaign.sizes.stream_tokens
            async with asyncio.timeout(CASE_SECONDS):
                streams = Streams(self.fleet.url, count, tokens)
                await streams.reach(count * tokens // 4)
                figures = await act(streams)
                texts = await streams.finish()
            equal = [text == expected for text, expected in zip(texts, self.expected, strict=True)]
            gap = streams.longest_gap_ms
            self.campaign.emit(name, equal=equal, failed=streams.failed, longest_gap_ms=gap, **figures)

    async def verb(self, kind: Header, **fields: Any) -> float:
        """Send a verb. Return the seconds until all ranks have confirmed it."""
        self.verbs += 1
        begun = time.perf_counter()
        operation = f"campaign-{self.verbs}"
        await self.admin.control(kind, operation_id=operation, fence=1, timeout_seconds=CASE_SECONDS, **fields)
        return round(time.perf_counter() - begun, 3)

    async def pause(self, streams: Streams) -> dict[str, Any]:
        pause = await self.verb(Header.PAUSE)
        before = streams.events
        await asyncio.sleep(1.0)
        events = streams.events - before
        return {"pause_s": pause, "events_while_paused": events, "unpause_s": await self.verb(Header.UNPAUSE)}

    async def suspend(self, _streams: Streams) -> dict[str, Any]:
        used = {"before": self.campaign.used_mib()}
        await self.verb(Header.PAUSE)
        seconds = {"suspend_s": await self.verb(Header.SUSPEND)}
        used["suspended"] = self.campaign.used_mib()
        seconds["resume_s"] = await self.verb(Header.RESUME)
        await self.verb(Header.UNPAUSE)
        used["resumed"] = self.campaign.used_mib()
        return {**seconds, "mib": used}

    async def update(self, _streams: Streams) -> dict[str, Any]:
        return {"update_s": await self.verb(Header.UPDATE_WEIGHTS, source=self.campaign.model, epoch=5)}

    async def kill(self, _streams: Streams) -> dict[str, Any]:
        begun = time.perf_counter()
        status = await asyncio.to_thread(self.fleet.kill("engine-0").wait)
        seconds = round(time.perf_counter() - begun, 2)
        processes = self.campaign.memory_of_processes()
        return {"exit": status, "exit_s": seconds, "mib": self.campaign.used_mib(), "processes": processes}

    async def drain(self, _streams: Streams) -> dict[str, Any]:
        return {"drain_s": await self.verb(Header.DRAIN, engine="engine-0")}

    async def other_requests(self) -> None:
        """Send a request with structured output, and a request with log-probabilities."""
        chat = {
            "model": MODEL_NAME,
            "messages": [{"role": "user", "content": "Give me a JSON object."}],
            "max_tokens": 40,
            "response_format": {"type": "json_object"},
            "temperature": 0,
        }
        completion = {"model": MODEL_NAME, "prompt": "Hello", "max_tokens": 4, "logprobs": 2}
        async with httpx.AsyncClient(base_url=self.fleet.url, timeout=60) as client:
            answer = await client.post("/v1/chat/completions", json=chat)
            failed = answer.status_code != 200
            self.campaign.emit("structured output", failed=failed, text=answer.text[:200])
            answer = await client.post("/v1/completions", json=completion)
            self.campaign.emit("log-probabilities", failed=answer.status_code != 200, text=answer.text[:200])

    async def stop(self) -> None:
        """Stop the engines with the verb STOP."""
        await self.verb(Header.PAUSE)
        seconds = await self.verb(Header.STOP)
        engine = self.fleet.children["engine-1"]
        status = await asyncio.to_thread(engine.wait, CASE_SECONDS)
        self.campaign.emit("stop", seconds=seconds, exit=status, used_mib=self.campaign.used_mib())


def bench_serve(campaign: Campaign) -> None:
    """Run `megatron bench serve` on `megatron serve`, in bfloat16."""
    _bench_serve(Fleet(campaign=campaign, dtype="bfloat16"))


def _bench_serve(fleet: Fleet) -> None:
    campaign, sizes = fleet.campaign, fleet.campaign.sizes
    try:
        fleet.start_all()
        asyncio.run(_answering(fleet))
        for clients in sizes.clients:
            figures = measure_server(
                url=fleet.url,
                model=MODEL_NAME,
                api_key=None,
                concurrency=(clients,),
                requests=clients * sizes.requests_per_client,
                prompt_words=64,
                new_tokens=sizes.answer_tokens,
            )
            rounded = {figure.key: round(figure.value, 3) for figure in figures}
            campaign.emit(f"bench serve {clients}", **rounded)
    finally:
        fleet.stop()
