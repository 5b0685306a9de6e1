"""Prefill and decode on different engines: engines are killed or frozen at each stage, and no answer changes."""

import itertools
import random
import time
from collections.abc import Callable

import pytest
from eventually import LONG_SECONDS, eventually
from fleet import Fleet, Load, Process, until_serving, until_status
from machine import scaled
from soak import repeated, size

from megatron_runtime.protocol.messages import StatusReply

PREFILL, DECODE = ("p-0", "p-1"), ("d-0", "d-1")
STREAMS = 16
OPTIONS = ("--block-size-tokens", "16", "--max-tokens", "128", "--kv-cache-memory", "4Mi")
STAGES = ("prefill", "transfer", "import", "decode", "both")
CASES = list(itertools.product(STAGES, ("kill", "freeze")))

pytestmark = pytest.mark.timeout(400)


class SplitPool:
    """A coordinator, two engines of each role, and streams with long prompts."""

    def __init__(self, fleet: Fleet, seed: int) -> None:
        self.fleet = fleet
        self.random = random.Random(seed)

    async def start(self) -> None:
        fleet = self.fleet
        self.coordinator = await fleet.coordinator()
        for role, names in (("prefill", PREFILL), ("decode", DECODE)):
            for name in names:
                await fleet.engine(name, *OPTIONS, "--echo-step-seconds", "0.02", "--role", role)
        self.link = await fleet.admin()
        await until_serving(self.link, fleet.engines)
        await until_status(
            self.link,
            lambda status: all(engine.digest for engine in status.engines),
            what="every engine has reported the digest of its weights",
        )
        self.load = Load([await fleet.client()])

    def add(self, streams: int = STREAMS) -> None:
        for _ in range(streams):
            prompt = self.random.choices(range(50_000), k=self.random.randint(400, 1500))
            self.load.add(prompt, self.random.randint(20, 60))

    async def count(self, name: str) -> float:
        return (await self.coordinator.metrics())[f"megatron_coordinator_{name}_total"]

    async def until_engines(self, condition: Callable[[dict[str, int]], bool], *, what: str) -> None:
        """Wait for a condition of the requests in flight at each engine."""

        def holds(status: StatusReply) -> bool:
            return condition({engine.name: engine.in_flight for engine in status.engines})

        await until_status(self.link, holds, what=what)

    async def check(self) -> None:
        """Every stream has the undisturbed answer, and no engine keeps a block for a request that ended."""
        await self.load.check(seconds=scaled(180))
        for engine in self.fleet.engines.values():

            async def is_empty(engine: Process = engine) -> bool:
                return (await engine.metrics())["megatron_kv_cache_usage_perc"] == 0

            await eventually(is_empty, what="no request, export or import holds pages")


@pytest.fixture
async def pool(fleet: Fleet, seed: int) -> SplitPool:
    pool = SplitPool(fleet, seed)
    await pool.start()
    return pool


@repeated()
async def test_prompts_are_computed_by_one_engine_and_answered_by_another(pool: SplitPool) -> None:
    pool.add()
    await pool.check()
    assert await pool.count("split_requests") > 0
    assert await pool.count("kv_imports") > 0
    assert await pool.count("kv_imported_bytes") > 0


@pytest.mark.parametrize(("stage", "fault"), CASES, ids=[f"{stage}-{fault}" for stage, fault in CASES])
@repeated(soak=size(1, soak=200))
async def test_an_engine_is_lost_at_a_stage(
    pool: SplitPool, stage: str, fault: str, report: Callable[[str], None]
) -> None:
    held = [pool.fleet.engines[name] for name in DECODE] if stage in ("transfer", "import", "both") else []
    for engine in held:
        engine.freeze()  # the stage of importing lasts until it runs again
    pool.add()
    if stage == "prefill":
        await pool.until_engines(lambda flying: any(flying.get(name) for name in PREFILL), what="a prompt is computed")
    elif stage == "decode":
        await pool.load.until(pool.random.randint(1, 200))
    else:
        await pool.until_engines(lambda flying: any(flying.get(name) for name in DECODE), what="a prompt is imported")
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
    gaps = sorted(record.longest_gap(since=began) for record in pool.load.records)
    report(f"{stage}, {fault}: {len(gaps)} streams equal; longest wait {gaps[-1]:.2f} s")
