"""EngineWorker, registered with a real coordinator."""

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from control_link import ControlLink
from echo_executor import EchoExecutor, echo_answer, echo_weights
from eventually import LONG_SECONDS, eventually

from megatron_runtime.backends.native.backend import NativeBackend
from megatron_runtime.backends.native.engine import EngineCore
from megatron_runtime.coordinator.core.settings import CoordinatorSettings, Timing
from megatron_runtime.coordinator.service import Coordinator
from megatron_runtime.distributed.errors import RankLostError
from megatron_runtime.engine import open_requests
from megatron_runtime.engine import worker as worker_module
from megatron_runtime.engine.backend import CacheEvents, RankResults
from megatron_runtime.engine.settings import EngineSettings
from megatron_runtime.engine.worker import EngineWorker
from megatron_runtime.megatron_core.inference_client import InferenceClient
from megatron_runtime.process.logs import write_termination_message
from megatron_runtime.protocol import limits
from megatron_runtime.protocol.headers import Header, Role
from megatron_runtime.protocol.messages import Message, tokens_to_bytes
from megatron_runtime.requests.config import InferenceConfig, RoutingPolicy
from megatron_runtime.requests.hashing import block_digests
from megatron_runtime.requests.sampling_params import SamplingParams
from megatron_runtime.transport.control_calls import ControlRejectedError
from megatron_runtime.transport.peer_link import CoordinatorUnreachableError, PeerLink

from .echo_core import FailingRanks


class BrokenExecutor(EchoExecutor):
    def load(self) -> None:
        raise OSError("weights are truncated")


async def test_an_engine_whose_weights_cannot_be_loaded_ends_with_the_cause() -> None:
    coordinator = Coordinator(CoordinatorSettings(listen="127.0.0.1", client_port=0, single_port=True))
    coordinator.start()
    settings = EngineSettings(coordinator=coordinator.transport.addresses[Role.ENGINE], name="broken")
    worker = EngineWorker(settings, NativeBackend(EngineCore(BrokenExecutor(), InferenceConfig())))
    try:
        await asyncio.wait_for(worker.run(), LONG_SECONDS)
    finally:
        coordinator.stop()
    assert str(worker.failure) == "weights are truncated"


class Served:
    """A real coordinator and an echo engine, in this process."""

    def __init__(self, *, heartbeat: float = 0.05) -> None:
        self.coordinator = Coordinator(
            CoordinatorSettings(
                listen="127.0.0.1",
                client_port=0,
                single_port=True,
                routing_policy=RoutingPolicy.LONGEST_PREFIX,
                timing=Timing(heartbeat=heartbeat, recovery=0.0),
            )
        )
        self.coordinator.start()
        self.address = self.coordinator.transport.addresses[Role.ENGINE]
        self.client = InferenceClient(self.address, deserialize=False)
        self.begin("engine-0")

    def begin(self, name: str) -> None:
        """Start an engine in place of the last one."""
        self.executor = EchoExecutor(page_size=4, num_pages=40)
        config = InferenceConfig(
            enable_prefix_caching=True,
            prefix_caching_eviction_policy="lru",
            block_size_tokens=8,
            kv_cache_management_mode="recompute",
        )
        self.engine = EngineCore(self.executor, config)
        self.backend = NativeBackend(self.engine)
        self.worker = EngineWorker(EngineSettings(coordinator=self.address, name=name), self.backend)
        self.task = asyncio.ensure_future(self.worker.run())

    async def generate(self, prompt: list[int], length: int, **params: object) -> dict:
        sampling = SamplingParams(temperature=0.0, num_tokens_to_generate=length, **params)
        return await asyncio.wait_for(self.client.add_request(prompt, sampling), LONG_SECONDS)

    async def stop(self) -> None:
        self.client.stop()
        self.worker.ended.set()
        await self.task
        self.coordinator.stop()
        assert self.worker.failure is None
        self.engine.check_integrity()


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    served = Served()
    await asyncio.wait_for(served.worker.joined.wait(), LONG_SECONDS)
    await served.client.start()
    yield served
    await served.stop()


async def test_the_limits_of_an_engine_are_in_the_status_of_the_coordinator(served: Served) -> None:
    [engine] = served.coordinator.core.engines
    status = engine.describe(0.0)
    info = served.backend.info
    assert (status.max_requests, status.max_sequence_length) == (info.max_requests, info.max_sequence_length)
    assert (status.max_tokens, status.kv_cache_bytes) == (info.max_tokens, served.executor.kv_cache_bytes)


async def test_an_engine_that_stops_after_its_last_hello_is_not_expected_to_be_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    say_hello = PeerLink.say_hello

    def say_last_hello(link: PeerLink) -> None:
        say_hello(link)
        if link.hello(0).serving:
            link.heartbeat = None

    monkeypatch.setattr(PeerLink, "say_hello", say_last_hello)
    served = Served(heartbeat=LONG_SECONDS)
    await asyncio.wait_for(served.worker.joined.wait(), LONG_SECONDS)
    [engine] = served.coordinator.core.engines.serving()
    assert engine.busy_until == 0
    await served.client.start()
    await served.stop()


async def test_evicted_and_cleared_blocks_reach_the_coordinator(served: Served) -> None:
    """39 pages hold nine prompts of four pages at most: the older ones are evicted."""
    for number in range(14):
        reply = await served.generate(
            [number + 1] * 17,
            2,
        )
        assert reply["status"] == "COMPLETED"
    assert served.coordinator.core.counters.evicted_blocks > 0
    assert (await served.generate([14] * 18, 2))["num_cached_tokens"] == 16
    await served.client.set_generation_epoch(5)
    assert (await served.generate([14] * 18, 2))["num_cached_tokens"] == 0


async def test_stored_blocks_reach_the_coordinators_prefix_table(served: Served) -> None:
    """A conversation's answer is in no prompt before its next turn."""
    tokens = list(range(24))
    served.worker.on_cache_events(CacheEvents(stored=block_digests(tokens, 8)))
    core = served.coordinator.core
    [engine] = core.engines.serving()
    hashes = core.router.hashes_of(tokens_to_bytes(tokens), core.engines.block_sizes)

    async def is_known() -> bool:
        return core.router.blocks.match(engine, hashes[8])[0] == 3

    await eventually(is_known, what="the coordinator knows all three blocks")


async def test_a_request_dispatched_to_a_stopping_engine_is_answered_by_another(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine's thread has ended before the coordinator knows: the request does not fail."""
    caplog.set_level("INFO")
    await served.backend.stop()
    answer = asyncio.ensure_future(served.generate([5], 6))

    async def has_arrived() -> bool:
        return "arrived after the engine stopped" in caplog.text or answer.done()

    await eventually(has_arrived, what="the request at the engine", look_seconds=0.01)
    other = EngineWorker(
        EngineSettings(coordinator=served.address, name="engine-1"),
        NativeBackend(EngineCore(EchoExecutor(page_size=4, num_pages=40), InferenceConfig())),
    )
    task = asyncio.ensure_future(other.run())
    await asyncio.wait_for(other.joined.wait(), LONG_SECONDS)
    served.worker.ended.set()
    assert (await answer)["generated_tokens"] == echo_answer([5], 6)
    other.ended.set()
    await task


async def test_weights_are_updated_in_every_engine_and_labelled(served: Served) -> None:
    prompt = [1, 2, 3]
    assert (await served.generate(prompt, 5))["generated_tokens"] == echo_answer(prompt, 5)
    ack = await served.client.update_weights("other", 4)
    assert ack.ok
    reply = await served.generate(prompt, 5)
    assert reply["generated_tokens"] == echo_answer(prompt, 5, weights=echo_weights("other"))
    assert (reply["policy_epoch"], reply["kv_cache_epoch"]) == ([[0, 4]], [[0, 4]])
    assert (served.worker.lifecycle.epoch, served.worker.lifecycle.source) == (4, "other")


async def test_what_is_dispatched_after_a_commit_is_computed_by_the_new_weights(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request arrives while the engine swaps the weights."""
    commit, may_swap = served.backend.commit_weights, asyncio.Event()

    async def slow_commit() -> RankResults:
        await may_swap.wait()
        return await commit()

    monkeypatch.setattr(served.backend, "commit_weights", slow_commit)
    await served.client.update_weights("other", 4)
    pending = asyncio.ensure_future(served.generate([1, 2, 3], 5))

    async def has_arrived() -> bool:
        return bool(served.worker._after_update)

    await eventually(has_arrived, what="the request has arrived")
    may_swap.set()
    reply = await pending
    assert reply["generated_tokens"] == echo_answer([1, 2, 3], 5, weights=echo_weights("other"))
    assert reply["policy_epoch"] == [[0, 4]]


async def test_a_request_in_flight_survives_update_suspend_and_resume(served: Served) -> None:
    await served.client.pause_engines()
    pending = asyncio.ensure_future(served.generate([1, 2, 3], 30))
    await served.client.update_weights("echo", 4)
    await served.client.suspend_engines()
    assert not served.executor.has_weights
    await served.client.resume_engines()
    await served.client.unpause_engines()
    assert (await pending)["generated_tokens"] == echo_answer([1, 2, 3], 30)


async def test_an_answer_has_timings_and_events(served: Served) -> None:
    reply = await served.generate([1, 2, 3], 5)
    assert min(reply["queue_seconds"], reply["prefill_seconds"], reply["decode_seconds"]) >= 0
    assert [event["type"] for event in reply["events"]] == ["ADD_ENGINE", "ADD_CONTEXT", "FINISH"]


async def test_an_invalid_request_is_rejected_with_class_and_field(served: Served) -> None:
    error = (await served.generate([1] * 5000, 5))["error"]
    assert (error["code"], error["type"], error["is_transient"]) == (400, "BlockOverflowError", False)
    assert "maximum context length is" in error["message"]
    sampling = SamplingParams(temperature=0.0, num_tokens_total=2)
    error = (await asyncio.wait_for(served.client.add_request([1, 2, 3], sampling), LONG_SECONDS))["error"]
    assert (error["code"], error["field"]) == (400, "num_tokens_total")


async def test_an_error_while_a_request_is_read_ends_only_this_request(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(data: object) -> None:
        raise RecursionError("too deep")

    with monkeypatch.context() as patch:
        patch.setattr(open_requests.SamplingParams, "deserialize", fail)
        error = (await served.generate([1, 2, 3], 5))["error"]
    assert (error["code"], error["type"]) == (500, "RecursionError")
    assert (await served.generate([1, 2, 3], 5))["status"] == "COMPLETED"


def test_the_termination_message_has_the_cause(tmp_path: Path) -> None:
    log = tmp_path / "termination-log"
    write_termination_message(OSError("device lost"), log)
    assert not log.exists()
    log.touch()
    write_termination_message(OSError("device lost"), log)
    assert json.loads(log.read_text()) == {
        "reason": "OSError",
        "rank": 0,
        "message": "device lost",
        "remedy": "",
    }


@pytest.mark.parametrize(("is_open", "why"), [(False, "Connect call failed"), (True, "accepts connections, but no")])
async def test_an_engine_reports_where_and_why_it_cannot_register_and_ends_at_the_limit(
    is_open: bool, why: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (worker_module.FIRST_REPORT_SECONDS, worker_module.REPORT_SECONDS) == (10, 30)
    monkeypatch.setattr(worker_module, "FIRST_REPORT_SECONDS", 0.05)
    monkeypatch.setattr(worker_module, "REPORT_SECONDS", 0.1)
    with socket.socket() as port:
        port.bind(("127.0.0.1", 0))
        if is_open:
            port.listen()
        address = f"tcp://127.0.0.1:{port.getsockname()[1]}"
        settings = EngineSettings(coordinator=address, name="lonely", registration_seconds=0.2)
        worker = EngineWorker(settings, NativeBackend(EngineCore(EchoExecutor(), InferenceConfig())))
        await asyncio.wait_for(worker.run(), LONG_SECONDS)
    reports = [record.getMessage() for record in caplog.records if "no coordinator answered" in record.getMessage()]
    assert len(reports) == 2, "at 0.05 s and at 0.15 s"
    for report in (*reports, str(worker.failure)):
        assert f"engine lonely: no coordinator answered at {address}" in report
        assert why in report
    assert isinstance(worker.failure, CoordinatorUnreachableError)


async def test_an_engine_that_a_later_process_has_replaced_logs_its_rejection_once(
    served: Served, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "HEARTBEAT_SECONDS", 0.02)
    rejected = asyncio.Semaphore(0)

    def counted(*arguments: Any, on_message: Callable[[Message], object], **options: Any) -> PeerLink:
        def count(message: Message) -> None:
            on_message(message)
            rejected.release()

        return PeerLink(*arguments, on_message=count, **options)

    backend = NativeBackend(EngineCore(EchoExecutor(), InferenceConfig()))
    with monkeypatch.context() as clock:
        clock.setattr(time, "time_ns", lambda: 0)
        earlier = EngineWorker(EngineSettings(coordinator=served.address, name="engine-0"), backend, link=counted)
    task = asyncio.ensure_future(earlier.run())
    for _ in range(3):
        await asyncio.wait_for(rejected.acquire(), LONG_SECONDS)
    earlier.ended.set()
    await task
    logged = [record.getMessage() for record in caplog.records if "a later process" in record.getMessage()]
    assert logged == ["the coordinator rejected a message: UNAVAILABLE a later process is registered as engine-0"]


@pytest.mark.parametrize("way", ["step", "rank ended", "rank silent", "control", "leaves"])
async def test_only_an_engine_that_fails_in_a_step_counts_as_crashed(served: Served, way: str) -> None:
    """Its DISCONNECT gives the reason. Its requests are replayed on another engine in any case."""
    served.executor.step_seconds = 0.02
    if way == "step":
        served.executor.fails_at = 5
    answer = asyncio.ensure_future(served.generate([1, 2], 50))

    async def in_flight() -> bool:
        return bool(served.coordinator.core.engines.in_flight())

    await eventually(in_flight, what="the engine has the request", look_seconds=0.01)
    if way == "rank ended":
        served.worker.on_failure(RankLostError(1, "its connection ended"))
    elif way == "rank silent":
        silent = RankLostError(1, "its interpreter has not answered for 4.0 s", by_silence=True)
        served.worker.on_failure(silent)
    elif way == "control":
        served.worker._controls.put_nowait(None)  # type: ignore[arg-type]
    elif way == "leaves":
        served.worker.ended.set()
    await asyncio.wait_for(served.task, LONG_SECONDS)
    if way == "step":
        assert str(served.worker.failure) == "step 5 fails: injected fault"
    served.begin("engine-1")
    assert (await answer)["generated_tokens"] == echo_answer([1, 2], 50)
    counters = served.coordinator.core.counters
    assert (counters.engines_lost, counters.engine_crashes) == (1, int(way in ("step", "rank ended")))


@pytest.mark.parametrize("failing", [Header.PAUSE, Header.SUSPEND, Header.RESUME])
async def test_a_verb_that_the_only_engine_fails_is_rolled_back_and_serving_continues(
    served: Served, failing: Header
) -> None:
    served.backend.ranks = ranks = FailingRanks(failing)
    link = ControlLink(served.address)
    await link.start()
    try:
        for kind in (Header.PAUSE, Header.SUSPEND, Header.RESUME, Header.UNPAUSE):
            if kind is failing:
                with pytest.raises(ControlRejectedError, match=f"rank 1: did not confirm {kind.name}"):
                    await link.control(kind, operation_id="first", fence=1, timeout_seconds=LONG_SECONDS)
                ranks.failing.clear()
                await served.coordinator.wait_for_engines(1)
                if kind is Header.PAUSE:
                    assert (await served.generate([5], 4))["generated_tokens"] == echo_answer([5], 4)
            await link.control(kind, operation_id=kind.name, fence=1, timeout_seconds=LONG_SECONDS)
        assert (await served.generate([7], 6))["generated_tokens"] == echo_answer([7], 6)
    finally:
        link.close()
