"""Fault injection of the echo engine: each configured fault occurs, and the platform recovers from it."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from control_link import ControlLink
from eventually import LONG_SECONDS
from machine import scaled

from megatron_runtime.backends.echo.echo_executor import echo_answer
from megatron_runtime.backends.echo.faults import (
    CrashOnToken,
    DropHeartbeats,
    FailStep,
    FailVerb,
    IgnoreAborts,
    InvalidFaultError,
    SlowStep,
    StallVerb,
    parse_faults,
)
from megatron_runtime.backends.registry import build_backend, link_for
from megatron_runtime.coordinator.core.settings import CoordinatorSettings, Timing
from megatron_runtime.coordinator.service import Coordinator
from megatron_runtime.distributed.errors import RankLostError
from megatron_runtime.engine.settings import EngineSettings
from megatron_runtime.engine.worker import EngineWorker
from megatron_runtime.megatron_core.inference_client import InferenceClient
from megatron_runtime.protocol.headers import Header, Role
from megatron_runtime.requests.sampling_params import SamplingParams
from megatron_runtime.transport.control_calls import ControlRejectedError

TIMING = Timing(heartbeat=0.05, suspect=0.5, dead=1.0, client_dead=5.0, recovery=0.0)


class Stage:
    """A coordinator and echo engines in this process, real sockets between them."""

    def __init__(self) -> None:
        self.coordinator = Coordinator(
            CoordinatorSettings(listen="127.0.0.1", client_port=0, engine_port=0, admin_port=0, timing=TIMING)
        )
        self.coordinator.start()
        self.runs: list[asyncio.Task[None]] = []
        self.workers: dict[str, EngineWorker] = {}

    def engine(self, name: str, *, faults: tuple[str, ...] = (), ranks: int = 1) -> EngineWorker:
        settings = EngineSettings(
            coordinator=self.coordinator.transport.addresses[Role.ENGINE],
            name=name,
            backend="echo",
            echo_faults=faults,
            echo_ranks=ranks,
            kv_cache_memory=1 << 20,
        )
        worker = self.workers[name] = EngineWorker(settings, build_backend(settings), link=link_for(settings))
        self.runs.append(asyncio.create_task(worker.run()))
        return worker

    async def link(self) -> ControlLink:
        self.admin = ControlLink(self.coordinator.transport.addresses[Role.ADMIN])
        await self.admin.start()
        return self.admin

    async def control(self, kind: Header, operation_id: str, *, timeout_seconds: float = 20.0):
        return await self.admin.control(kind, operation_id=operation_id, fence=1, timeout_seconds=timeout_seconds)

    async def close(self) -> None:
        for worker in self.workers.values():
            worker.ended.set()
        await asyncio.gather(*self.runs)
        self.admin.close()
        self.coordinator.stop()


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    stage = Stage()
    await stage.link()
    yield stage
    await stage.close()


@pytest.fixture
async def client(stage: Stage) -> AsyncIterator[InferenceClient]:
    client = InferenceClient(stage.coordinator.transport.addresses[Role.CLIENT], deserialize=False)
    await client.start()
    yield client
    client.stop()


@pytest.fixture
def params() -> Callable[[int], SamplingParams]:
    return lambda tokens: SamplingParams(num_tokens_to_generate=tokens)


def test_faults_are_parsed_and_an_invalid_fault_is_rejected() -> None:
    faults = parse_faults(["fail-verb:verb=PAUSE,rank=1", "stall-verb:verb=STOP,seconds=2", "drop-heartbeats:after=3"])
    assert [(fault.verb, fault.rank, fault.times) for fault in faults.of(FailVerb)] == [("PAUSE", 1, 1)]
    assert [fault.seconds for fault in faults.of(StallVerb)] == [2.0]
    assert [fault.after for fault in faults.of(DropHeartbeats)] == [3]
    for spec, names in (
        ("burn", "name"),
        ("fail-step", "at"),
        ("fail-step:at=0", "at"),
        ("fail-verb:verb=DANCE", "verb"),
        ("slow-step:seconds=1,often=2", "often"),
        ("slow-step:seconds", "key=value"),
        ("crash-on-token:token=1,signal=SIGTERM", "signal"),
    ):
        with pytest.raises(InvalidFaultError, match=names) as caught:
            parse_faults([spec])
        assert spec in str(caught.value)


def test_the_documented_faults_exist() -> None:
    page = Path(__file__).parents[2] / "docs" / "development" / "fault-injection.md"
    specs = [line.split("`")[1] for line in page.read_text().splitlines() if re.match(r"\| `[a-z]+-", line)]
    kinds = {FailStep, SlowStep, FailVerb, StallVerb, DropHeartbeats, IgnoreAborts, CrashOnToken}
    assert {type(fault) for fault in parse_faults(specs).all} == kinds


@pytest.mark.parametrize(
    "options", [{"echo_faults": ("ignore-aborts",)}, {"echo_ranks": 2}, {"echo_step_seconds": 0.1}], ids=str
)
def test_a_real_executor_rejects_fault_options(options) -> None:
    with pytest.raises(ValueError, match="--backend echo"):
        build_backend(EngineSettings(coordinator="tcp://127.0.0.1:1", name="e", backend="native", **options))


def test_a_fault_of_a_missing_rank_is_rejected() -> None:
    faults = ("fail-verb:verb=PAUSE,rank=2",)
    with pytest.raises(ValueError, match="rank 2 of 2"):
        build_backend(
            EngineSettings(coordinator="tcp://h:1", name="e", backend="echo", echo_ranks=2, echo_faults=faults)
        )


async def test_every_rank_acknowledges_every_verb_once(stage) -> None:
    workers = [stage.engine("three", ranks=3), stage.engine("two", ranks=2)]
    await stage.coordinator.wait_for_engines(2)
    for kind in (Header.PAUSE, Header.SUSPEND, Header.RESUME, Header.UNPAUSE):
        ack = await stage.control(kind, kind.name)
        assert (ack.ranks, ack.total_ranks) == (5, 5)
    for worker in workers:
        ranks = worker._backend.ranks
        joined = 1  # an engine that joins unpauses by itself
        expected = {Header.PAUSE: 1, Header.SUSPEND: 1, Header.RESUME: 1, Header.UNPAUSE: 1 + joined}
        assert ranks.acted == [expected] * ranks.count


@pytest.mark.parametrize("way", ["step", "rank ended", "rank silent", "control", "leaves"])
async def test_only_an_engine_that_fails_in_a_step_counts_as_crashed(stage, client, params, way) -> None:
    """Its DISCONNECT gives the reason. Its requests are replayed on another engine in any case."""
    worker = stage.engine("ends", faults=("slow-step:seconds=0.02", *(("fail-step:at=5",) if way == "step" else ())))
    await stage.coordinator.wait_for_engines(1)
    future = client.add_request([1, 2], params(50))
    async with asyncio.timeout(LONG_SECONDS):
        while not stage.coordinator.core.engines.in_flight():  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.01)
    if way == "rank ended":
        worker.on_failure(RankLostError(1, "its connection ended"))
    elif way == "rank silent":
        silent = RankLostError(1, "its interpreter has not answered for 4.0 s", by_silence=True)
        worker.on_failure(silent)
    elif way == "control":
        worker._controls.put_nowait(None)
        worker._obey = None
    elif way == "leaves":
        worker.ended.set()
    await asyncio.gather(*stage.runs)
    stage.engine("stays")
    assert (await future)["generated_tokens"] == echo_answer([1, 2], 50)
    counters = stage.coordinator.core.counters
    assert (counters.engines_lost, counters.engine_crashes) == (1, int(way in ("step", "rank ended")))


async def test_an_engine_with_a_failed_rank_is_evicted_and_rejoins(stage, client, params) -> None:
    stage.engine("whole", ranks=2)
    stage.engine("broken", ranks=2, faults=("fail-verb:verb=PAUSE,rank=1",))
    await stage.coordinator.wait_for_engines(2)
    ack = await stage.control(Header.PAUSE, "p")
    assert (ack.evicted, ack.ranks, ack.total_ranks) == (["broken"], 2, 4)
    assert "rank 1: PAUSE" in ack.engines["broken"].error
    await stage.coordinator.wait_for_engines(2)
    ack = await stage.control(Header.UNPAUSE, "u")
    assert (ack.evicted, ack.ranks) == ([], 4)
    answers = await asyncio.gather(*(client.add_request([n], params(5)) for n in range(1, 9)))
    assert [answer["generated_tokens"] for answer in answers] == [echo_answer([n], 5) for n in range(1, 9)]


@pytest.mark.parametrize("verb", ["PAUSE", "SUSPEND", "RESUME"])
async def test_a_verb_that_the_only_engine_fails_is_rolled_back_and_serving_continues(
    stage, client, params, verb
) -> None:
    stage.engine("only", faults=(f"fail-verb:verb={verb}",))
    await stage.coordinator.wait_for_engines(1)
    path = [Header.PAUSE, Header.SUSPEND, Header.RESUME, Header.UNPAUSE]
    for kind in path:
        if kind.name == verb:
            with pytest.raises(ControlRejectedError, match=f"{verb} fails: injected fault"):
                await stage.control(kind, f"first {kind.name}")
            await stage.coordinator.wait_for_engines(1)
            if verb == "PAUSE":
                assert (await client.add_request([5], params(4)))["generated_tokens"] == echo_answer([5], 4)
        assert (await stage.control(kind, kind.name)).ranks == 1
    assert (await client.add_request([7], params(6)))["generated_tokens"] == echo_answer([7], 6)


async def test_a_stalled_rank_evicts_its_own_engine_only(stage, client, params) -> None:
    stage.engine("whole")
    stage.engine("stalled", ranks=2, faults=("stall-verb:verb=PAUSE,rank=1,seconds=2",))
    await stage.coordinator.wait_for_engines(2)
    ack = await stage.control(Header.PAUSE, "p", timeout_seconds=0.5)
    assert ack.evicted == ["stalled"]
    await stage.control(Header.UNPAUSE, "u", timeout_seconds=5)
    assert (await client.add_request([7], params(6)))["generated_tokens"] == echo_answer([7], 6)


async def test_a_failed_step_stops_the_engine_and_another_completes_its_requests(stage, client, params) -> None:
    failing = stage.engine("failing", faults=("fail-step:at=20",))
    await stage.coordinator.wait_for_engines(1)
    streams = [client.add_request_streaming([n], params(40)) for n in range(1, 9)]
    await asyncio.wait_for(failing.ended.wait(), scaled(20))
    assert str(failing.failure) == "step 20 fails: injected fault"
    stage.engine("healthy")
    for number, stream in enumerate(streams, start=1):
        final = [item async for item in stream][-1]["final"]
        assert final["generated_tokens"] == echo_answer([number], 40)


async def test_an_engine_without_heartbeats_is_dropped_and_can_rejoin(stage) -> None:
    stage.engine("mute", faults=("drop-heartbeats:after=3,count=60",))
    await stage.coordinator.wait_for_engines(1)
    coordinator = stage.coordinator
    async with asyncio.timeout(scaled(20)):
        while coordinator.core.counters.engines_lost == 0:  # noqa: ASYNC110 - a counter has no event
            await asyncio.sleep(0.02)
    assert len(coordinator.core.engines) == 0
    await asyncio.wait_for(coordinator.wait_for_engines(1), scaled(20))


async def test_an_engine_that_ignores_aborts_affects_no_other_request(stage, client, params) -> None:
    worker = stage.engine("deaf", faults=("ignore-aborts", "slow-step:seconds=0.002"))
    await stage.coordinator.wait_for_engines(1)
    stream = client.add_request_streaming([3], params(200))
    await anext(stream)
    client.abort_request(stream.request_id)
    assert (await client.add_request([4], params(300)))["generated_tokens"] == echo_answer([4], 300)
    async with asyncio.timeout(scaled(20)):
        while worker._outputs.open:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    assert stage.coordinator.core.counters.stale > 0
