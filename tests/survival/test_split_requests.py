"""Prefill and decode on different engines: engines are killed or frozen at each stage, and no answer changes.

Most tests use one pool of echo engines, one after the other.
"""

import asyncio
import itertools
import random
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import pytest_asyncio
from echo_executor import echo_answer
from eventually import LONG_SECONDS, eventually
from fleet import Fleet, Load, Process, until_adapter, until_serving, until_status
from machine import scaled
from soak import SOAK, repeated, size

from megatron_runtime.protocol.adapters import Adapter, AdapterList
from megatron_runtime.protocol.headers import Header
from megatron_runtime.protocol.messages import StatusReply
from megatron_runtime.requests.sampling_params import IGNORE_EOS

PREFILL, DECODE = ("p-0", "p-1"), ("d-0", "d-1")
STREAMS = 16
WITH_COST = ("--kv-cache-memory", "4Mi", "--echo-step-seconds", "0.02", "--echo-token-seconds", "0.0005")
"""Of echo engines whose prompts take longer than the transfer of their blocks, so they are split by their cost."""
OPTIONS = ("--block-size-tokens", "16", "--max-tokens", "128")
STAGES = ("prefill", "transfer", "import", "decode", "both")
FAULTS = ("kill", "freeze")
LOSSES = size(2, soak=50)
NATIVE_LOSSES = 13

pytestmark = [pytest.mark.timeout(400), pytest.mark.long]


class SplitPool:
    """A coordinator, engines of both roles, two of each by default, and streams with long prompts."""

    def __init__(self, fleet: Fleet, seed: int, *options: str) -> None:
        self.fleet = fleet
        self.random = random.Random(seed)
        self.options = options or ("--kv-cache-memory", "4Mi", "--echo-step-seconds", "0.02")
        self.salt = ""
        self.adapter: Adapter | None = None
        self.answers: dict[tuple[int, ...], list[int]] = {}
        """By prompt, of a model; an echo engine's are computed."""

    async def start(self, names: Sequence[str] = (*PREFILL, *DECODE)) -> None:
        fleet = self.fleet
        self.coordinator = await fleet.coordinator()
        for name in names:
            await self.engine(name)
        self.link = await fleet.admin()
        await self.until_ready()
        self.client = await fleet.client()
        self.load = Load([self.client])

    async def engine(self, name: str) -> None:
        role = "prefill" if name in PREFILL else "decode"
        await self.fleet.engine(name, *OPTIONS, *self.options, "--role", role)

    async def until_ready(self) -> None:
        await until_serving(self.link, self.fleet.engines)
        await until_status(
            self.link,
            lambda status: all(engine.digest for engine in status.engines),
            what="every engine has reported the digest of its weights",
        )

    async def replace(self, name: str, by: signal.Signals) -> None:
        """End an engine with a signal, and start it again when the coordinator knows that it has gone."""
        engine = self.fleet.engines.pop(name)
        engine.process.send_signal(by)
        await engine.ended()
        await until_serving(self.link, self.fleet.engines)
        await self.engine(name)
        await self.until_ready()

    async def restore(self) -> None:
        """Thaw engines, start those that were killed, and wait until all serve."""
        for engine in self.fleet.engines.values():
            engine.thaw()
        for name in {*PREFILL, *DECODE} - set(self.fleet.engines):
            await self.engine(name)
        await self.until_ready()

    async def until_split(self) -> None:
        """Answer streams until another prompt was split: an engine that is late with its heartbeats gets none."""
        requests, imports = await self.count("split_requests"), await self.count("kv_imports")
        while await self.count("kv_imports") == imports:
            self.add(streams=4)
            await self.check()
        assert await self.count("split_requests") > requests

    def add(self, streams: int = STREAMS) -> None:
        """Begin streams. Those before have ended."""
        self.load = Load([self.client])
        for _ in range(streams):
            prompt = self.random.choices(range(40_000), k=self.random.randint(400, 1500))
            length = self.random.randint(20, 60)
            params = {"temperature": 0.0, "cache_salt": self.salt, "termination_id": IGNORE_EOS}
            self.load.add(prompt, length, adapter=self.adapter.name if self.adapter is not None else "", **params)

    async def count(self, name: str) -> float:
        return (await self.coordinator.metrics())[f"megatron_coordinator_{name}_total"]

    async def until_busy(self, names: Sequence[str], *, what: str) -> None:
        """Wait until one of these engines has a request, or, on a slow machine, until that moment has passed: then
        tokens arrive.
        """

        def holds(status: StatusReply) -> bool:
            is_busy = any(engine.in_flight for engine in status.engines if engine.name in names)
            return is_busy or self.load.tokens > 0

        await until_status(self.link, holds, what=what)

    async def check(self) -> None:
        """Every stream has the undisturbed answer, and no engine keeps a block for a request that ended."""

        def answer(prompt: list[int], length: int) -> list[int]:
            return self.answers[tuple(prompt)] if self.answers else echo_answer(prompt, length, adapter=self.adapter)

        await self.load.check(answer=answer, seconds=scaled(300))
        for engine in self.fleet.engines.values():

            async def is_empty(engine: Process = engine) -> bool:
                return (await engine.metrics())["megatron_kv_cache_usage_perc"] == 0

            await eventually(is_empty, what="no request, export or import holds pages")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SplitPool]:
    fleet = Fleet(tmp_path_factory.mktemp("split"), warm_coordinators=not SOAK)
    try:
        pool = SplitPool(fleet, 0)
        await pool.start()
        yield pool
    finally:
        await fleet.close()


@pytest_asyncio.fixture(loop_scope="module")
async def pool(shared: SplitPool, seed: int) -> SplitPool:
    """The pool of all tests, with its engines as after its start."""
    shared.random, shared.adapter = random.Random(seed), None
    await shared.restore()
    return shared


in_one_loop = pytest.mark.asyncio(loop_scope="module")


def speaking_model(directory: Path) -> str:
    from random_checkpoint import write_speaking_model  # it imports torch, which the other tests do not need

    return str(write_speaking_model(directory / "model"))


@in_one_loop
@repeated()
async def test_prompts_are_computed_by_one_engine_and_answered_by_another(pool: SplitPool) -> None:
    await pool.until_split()
    assert await pool.count("kv_imported_bytes") > 0


@in_one_loop
@repeated()
async def test_prompts_of_an_adapter_are_split(pool: SplitPool) -> None:
    pool.adapter = Adapter("sql", "hf:org/sql")
    adapters = AdapterList((pool.adapter,))
    await pool.link.control(Header.SET_ADAPTERS, operation_id="op", fence=1, adapters=adapters)
    await until_adapter(pool.link, pool.client, "sql", engines=len(pool.fleet.engines))
    await pool.until_split()


@repeated()
async def test_prompts_are_split_again_after_an_engine_has_returned(fleet: Fleet, seed: int) -> None:
    pool = SplitPool(fleet, seed, *WITH_COST)
    await pool.start((PREFILL[0], DECODE[0]))
    await pool.until_split()
    await pool.until_split()  # by the measured rates and bandwidth
    ends = [(PREFILL[0], signal.SIGKILL), (DECODE[0], signal.SIGKILL), (PREFILL[0], signal.SIGTERM)]
    for name, by in size(ends, soak=[*ends, (DECODE[0], signal.SIGTERM)]):
        await pool.replace(name, by)
        await pool.until_split()


async def lose_engines(pool: SplitPool, stage: str, fault: str) -> float:
    """Kill or freeze engines while requests are at a stage, and check the answers.

    Return the longest time in seconds that a stream waited for a token after the loss.
    """
    held = [pool.fleet.engines[name] for name in DECODE] if stage in ("transfer", "import", "both") else []
    for engine in held:
        engine.freeze()  # the stage of importing lasts until it runs again
    pool.add()
    if stage == "prefill":
        await pool.until_busy(PREFILL, what="a prompt is computed")
    elif stage == "decode":
        await pool.load.until(pool.random.randint(1, 200))
    else:
        await pool.until_busy(DECODE, what="a prompt is imported")
    victims = {"prefill": PREFILL[:1], "transfer": PREFILL[:1], "both": (PREFILL[0], DECODE[0])}.get(stage, DECODE[:1])
    began = time.monotonic()
    for name in victims:
        if fault == "kill":
            await pool.fleet.engines.pop(name).kill()
        else:
            pool.fleet.engines[name].freeze()
    for name, engine in pool.fleet.engines.items():
        if name not in victims:
            engine.thaw()
    if fault == "freeze":
        names = set(pool.fleet.engines) - set(victims)
        await until_status(
            pool.link,
            lambda status: {engine.name for engine in status.engines} == names,
            seconds=LONG_SECONDS,
            what="frozen engines are removed",
        )
        for name in victims:
            pool.fleet.engines[name].thaw()
    await pool.check()
    return max(record.longest_gap(since=began) for record in pool.load.records)


@in_one_loop
@pytest.mark.timeout(size(400, soak=3600))
@pytest.mark.parametrize("stage", STAGES)
@repeated(soak=4)
async def test_engines_are_lost_at_a_stage(pool: SplitPool, stage: str, report: Callable[[str], None]) -> None:
    waits = []
    for _, fault in zip(range(LOSSES), itertools.cycle(FAULTS), strict=False):
        waits.append(await lose_engines(pool, stage, fault))
        await pool.restore()
    report(f"{stage}: {LOSSES} losses, {STREAMS} equal streams at each; longest wait {max(waits):.2f} s")


@pytest.mark.skipif(not SOAK, reason="native engines compute prompts for minutes: run by make soak")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("stage", STAGES)
@repeated(soak=2)
async def test_native_engines_are_lost_at_a_stage(
    fleet: Fleet, tmp_path: Path, seed: int, stage: str, report: Callable[[str], None]
) -> None:
    """Each loss disturbs requests that were answered before, under another salt, so no block of theirs is reused."""
    model = speaking_model(tmp_path)
    pool = SplitPool(fleet, seed, *MODEL_OPTIONS, "--model", model)
    await pool.start()
    waits = []
    for number, fault in zip(range(NATIVE_LOSSES), itertools.cycle(FAULTS), strict=False):
        pool.random, pool.salt = random.Random(f"{seed} {number}"), f"undisturbed {number}"
        pool.add()
        await pool.load.finish(seconds=scaled(300))
        for record in pool.load.records:
            assert record.final is not None
            pool.answers[tuple(record.prompt)] = record.final["generated_tokens"]
        pool.random, pool.salt = random.Random(f"{seed} {number}"), f"disturbed {number}"
        waits.append(await lose_engines(pool, stage, fault))
        await pool.restore()
    report(f"{stage}: {NATIVE_LOSSES} losses, {STREAMS} equal streams at each; longest wait {max(waits):.2f} s")


@in_one_loop
@repeated()
async def test_the_coordinator_is_lost_while_blocks_travel(pool: SplitPool) -> None:
    """The next coordinator knows no transfer, engines drop theirs, and the client submits its requests again."""
    held = [pool.fleet.engines[name] for name in DECODE]
    for engine in held:
        engine.freeze()
    pool.add()
    await pool.until_busy(DECODE, what="a prompt is imported")
    await pool.coordinator.kill()
    pool.coordinator = await pool.fleet.coordinator()
    for engine in held:
        engine.thaw()
    await pool.check()


MODEL_OPTIONS = ("--backend", "native", "--dtype", "float32", "--threads", "1", "--kv-cache-memory", "64Mi")
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 8}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.9, "seed": 7, "top_p": 0.9},
    "several answers": {"temperature": 0.8, "seed": 3, "n": 3},
    "log-probabilities": {"temperature": 0.0, "logprobs": True, "top_logprobs": 3},
    "a grammar": {
        "temperature": 0.0,
        "max_tokens": 48,
        "response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}},
    },
    "tools": {"temperature": 0.0, "max_tokens": 64, "tools": [WEATHER], "tool_choice": "required"},
    "stop and penalties": {"temperature": 0.0, "stop": ["zzz"], "presence_penalty": 0.5, "logit_bias": {"100": 2.0}},
}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", size([1], soak=[1, 2]))
async def test_answers_of_a_model_are_equal_with_and_without_split(fleet: Fleet, tmp_path: Path, ranks: int) -> None:
    model = speaking_model(tmp_path)
    coordinator = await fleet.coordinator()
    options = ("--model", model, *MODEL_OPTIONS, "--block-size-tokens", "16", "--max-tokens", "128")
    options += ("--tensor-parallel", str(ranks))
    await fleet.engine("d-0", *options, "--role", "decode", warm=ranks == 1)
    link = await fleet.admin()
    await until_serving(link, fleet.engines)
    _, url = await fleet.server("--model", model, "--model-name", "m")

    async def answers(salt: str) -> dict[str, Any]:
        """Answer each request with a long prompt, all at the same time."""
        async with httpx.AsyncClient(trust_env=False, timeout=LONG_SECONDS) as http:

            async def answer(number: int, body: dict[str, Any]) -> list[Any]:
                text = f"Question {number}: " + "What is the weather in a town by the sea in the north? " * 30
                body = {"model": "m", "max_tokens": 16, "messages": [{"role": "user", "content": text}], **body}
                reply = await http.post(f"{url}/v1/chat/completions", json={**body, "cache_salt": salt})
                assert reply.status_code == 200, reply.text
                choices = reply.json()["choices"]
                return sorted(choices, key=lambda choice: choice["index"])

            found = await asyncio.gather(*(answer(number, body) for number, body in enumerate(REQUESTS.values())))
        return dict(zip(REQUESTS, found, strict=True))

    together = await answers("one engine")
    await fleet.engine("p-0", *options, "--role", "prefill", warm=ranks == 1)
    await until_status(
        link,
        lambda status: len(status.engines) == 2 and all(engine.serving and engine.digest for engine in status.engines),
        what="both engines serve",
    )
    number = 0
    while not (await coordinator.metrics())["megatron_coordinator_kv_imports_total"]:
        number += 1  # an engine that is late with its heartbeats gets no prompt
        apart = await answers(f"two engines, {number}")
        for name in REQUESTS:
            assert without_numbers(apart[name]) == without_numbers(together[name]), name
            assert numbers_of(apart[name]) == pytest.approx(numbers_of(together[name]), abs=1e-3), name


@pytest.mark.skipif(not SOAK, reason="seven processes that load a model: run by make soak")
@pytest.mark.timeout(900)
async def test_a_rank_is_lost_while_blocks_travel(fleet: Fleet, tmp_path: Path) -> None:
    """The decode engine that loses a rank exits. The other one has another layout, and computes the prompts."""
    model = speaking_model(tmp_path)
    pool = SplitPool(fleet, 1, *MODEL_OPTIONS, "--model", model)
    for name, role in ((PREFILL[0], "prefill"), (DECODE[0], "decode")):
        ranked = ("--role", role, "--tensor-parallel", "2")
        await fleet.engine(name, *OPTIONS, *pool.options, *ranked, warm=False)
    await pool.start([DECODE[1]])
    while not await pool.count("kv_imports"):  # an engine that is late with its heartbeats gets no prompt
        pool.add()
        await pool.load.finish(seconds=scaled(300))
        for record in pool.load.records:
            assert record.final is not None
            pool.answers[tuple(record.prompt)] = record.final["generated_tokens"]
    status = await pool.link.status()
    recomputes = {engine.name: engine.recomputes for engine in status.engines}
    assert recomputes[DECODE[1]] == f"another KV layout than engine {PREFILL[0]}"
    pool.random, pool.salt = random.Random(1), "again"  # the same prompts, without the blocks of the first run
    engine = fleet.engines.pop(DECODE[0])
    ranks = {child.environ()["RANK"]: child for child in psutil.Process(engine.pid).children() if child.cmdline()}
    ranks["1"].suspend()
    pool.add()
    assert await engine.ended() == 1
    await pool.check()


def without_numbers(value: Any) -> Any:
    """Return an answer without log-probabilities and random ids."""
    if isinstance(value, dict):
        return {key: without_numbers(item) for key, item in value.items() if key not in ("logprob", "id")}
    return [without_numbers(item) for item in value] if isinstance(value, list) else value


def numbers_of(value: Any) -> list[float]:
    """Return the log-probabilities of an answer, in their order."""
    if isinstance(value, dict):
        own = [value["logprob"]] if "logprob" in value else []
        return own + [number for key, item in value.items() if key != "logprob" for number in numbers_of(item)]
    return [number for item in value for number in numbers_of(item)] if isinstance(value, list) else []
