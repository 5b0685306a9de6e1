"""The engine's state machine: every transition of its table, with a real engine on its thread."""

import asyncio
import dataclasses
import itertools
import threading
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from echo_executor import EchoExecutor, echo_answer, echo_weights
from eventually import LONG_SECONDS, eventually
from prometheus_client import CollectorRegistry

from megatron_runtime.backends.native.backend import EngineStopped, NativeBackend
from megatron_runtime.backends.native.engine import EngineCore
from megatron_runtime.engine.backend import BackendInfo, CacheEvents, Capability, EngineBackend, RankResults
from megatron_runtime.engine.engine_request import EngineRequest, RequestOutput
from megatron_runtime.engine.lifecycle import Lifecycle
from megatron_runtime.engine.metrics import EngineMetrics
from megatron_runtime.protocol.headers import SIGNALS, Header
from megatron_runtime.protocol.lifecycle import ENGINE_LEGAL_FROM, TRANSITIONS, CoordinatorState, EngineState
from megatron_runtime.protocol.messages import Control, ControlAck, ControlCommit
from megatron_runtime.requests.config import InferenceConfig, KVCacheManagementMode
from megatron_runtime.requests.sampling_params import SamplingParams

from .echo_core import FailingRanks

PATH_TO = {
    EngineState.RUNNING: (Header.UNPAUSE,),
    EngineState.PAUSED: (),
    EngineState.SUSPENDED: (Header.SUSPEND,),
    EngineState.STOPPED: (Header.STOP,),
}
"""Signals that bring a new engine, which is PAUSED, to each settled state."""


class Rig:
    """An echo engine on its thread, and its output."""

    def __init__(self) -> None:
        self.executor = EchoExecutor()
        self.executor.load()
        self.engine = EngineCore(self.executor, InferenceConfig())
        self.tokens: list[int] = []
        self.failures: list[BaseException] = []
        self.backend = NativeBackend(self.engine)
        self.lifecycle = Lifecycle(self.backend)

    def on_outputs(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            self.tokens += output.new_tokens

    def on_cache_events(self, events: CacheEvents) -> None:
        pass

    def on_failure(self, cause: BaseException) -> None:
        self.failures.append(cause)

    def on_leave(self) -> None:
        raise AssertionError("no rank was asked to end")

    async def signal(self, kind: Header, operation_id: str | None = None) -> bool:
        ack = await self.lifecycle.handle(Control(kind=kind, operation_id=operation_id))
        if ack.ok:
            await self.lifecycle.commit(ControlCommit(operation_id=ack.operation_id, signal=kind))
        return ack.ok

    async def reach(self, state: EngineState) -> None:
        for kind in PATH_TO[state]:
            assert await self.signal(kind)
        assert self.lifecycle.state is state

    async def submit(self, length: int) -> None:
        params = SamplingParams(temperature=0.0, num_tokens_to_generate=length)
        request = EngineRequest(1, np.array([1, 2, 3], np.int32), np.zeros(0, np.int32), params)
        await self.backend.call(lambda engine: engine.add_request(request))


async def start_rig() -> Rig:
    rig = Rig()
    await rig.backend.start(rig)
    return rig


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = await start_rig()
    yield rig
    await rig.backend.stop()
    assert not rig.failures
    rig.engine.check_integrity()


@pytest.mark.parametrize("state", PATH_TO)
@pytest.mark.parametrize("kind", sorted(SIGNALS))
async def test_every_signal_in_every_state(rig: Rig, state: EngineState, kind: Header) -> None:
    await rig.reach(state)
    ack = await rig.lifecycle.handle(Control(kind=kind, operation_id="op"))
    assert ack.ok is (state in ENGINE_LEGAL_FROM[kind])
    if not ack.ok:
        assert state.value in (ack.error or "")
        assert rig.lifecycle.state is state
        return
    if kind is Header.PAUSE and state is not EngineState.RUNNING:
        assert rig.lifecycle.state is state
        return
    assert rig.lifecycle.state is TRANSITIONS[kind].passing
    await rig.lifecycle.commit(ControlCommit(operation_id="op", signal=kind))
    assert rig.lifecycle.state is TRANSITIONS[kind].lands_in


async def test_a_repeated_operation_acts_once_and_gets_the_same_answer(rig: Rig) -> None:
    await rig.reach(EngineState.RUNNING)
    first = await rig.lifecycle.handle(Control(kind=Header.PAUSE, operation_id="op"))
    again = await rig.lifecycle.handle(Control(kind=Header.PAUSE, operation_id="op"))
    assert again == first
    assert rig.lifecycle.acted[Header.PAUSE] == 1


async def test_nothing_is_generated_between_acknowledged_pause_and_unpause(rig: Rig) -> None:
    await rig.submit(4000)
    await rig.reach(EngineState.RUNNING)
    assert await rig.signal(Header.PAUSE)
    frozen = len(rig.tokens)
    await rig.backend.call(lambda engine: None)
    assert len(rig.tokens) == frozen < 4000
    assert rig.engine.has_work


async def test_suspend_and_resume_keep_the_answer_exact(rig: Rig) -> None:
    await rig.submit(400)
    await rig.reach(EngineState.RUNNING)
    for kind in (Header.PAUSE, Header.SUSPEND):
        assert await rig.signal(kind)
    with pytest.raises(RuntimeError, match="load"):
        await rig.backend.call(lambda engine: engine.step())
    for kind in (Header.RESUME, Header.UNPAUSE):
        assert await rig.signal(kind)
    while await rig.backend.call(lambda engine: engine.has_work):
        pass
    assert rig.tokens == echo_answer([1, 2, 3], 400)


async def test_a_failed_signal_is_answered_and_keeps_the_state(rig: Rig) -> None:
    def fail() -> None:
        raise OSError("device lost")

    rig.executor.release_weights = fail  # type: ignore[method-assign]
    ack = await rig.lifecycle.handle(Control(kind=Header.SUSPEND, operation_id="op"))
    assert not ack.ok
    assert "device lost" in (ack.error or "")
    assert rig.lifecycle.state is EngineState.PAUSED


@pytest.mark.parametrize("kind", [Header.PAUSE, Header.SUSPEND, Header.RESUME, Header.UPDATE_WEIGHTS])
async def test_work_that_another_rank_does_not_confirm_is_undone(rig: Rig, kind: Header) -> None:
    before = {Header.PAUSE: EngineState.RUNNING, Header.RESUME: EngineState.SUSPENDED}.get(kind, EngineState.PAUSED)
    object.__setattr__(rig.engine.config, "kv_cache_management_mode", KVCacheManagementMode.RECOMPUTE)
    await rig.submit(400)
    await rig.reach(before)
    has_weights = rig.executor.has_weights
    alone, rig.backend.ranks = rig.backend.ranks, FailingRanks(kind)
    ack = await rig.lifecycle.handle(Control(kind=kind, operation_id="op", source="other", epoch=3))
    assert ack.error == f"{kind.name} failed: rank 1: did not confirm {kind.name}; rank 3: it hangs"
    assert rig.lifecycle.state is before
    assert rig.executor.has_weights is has_weights is (kind is not Header.RESUME)
    assert (rig.executor._cache is not None) is has_weights
    assert rig.executor._staged is None
    rig.backend.ranks = alone
    path = {EngineState.RUNNING: (), EngineState.PAUSED: (Header.UNPAUSE,)}
    for signal in path.get(before, (Header.RESUME, Header.UNPAUSE)):
        assert await rig.signal(signal)
    while await rig.backend.call(lambda engine: engine.has_work):
        pass
    assert rig.tokens == echo_answer([1, 2, 3], 400)


@pytest.mark.parametrize(
    ("kind", "state", "needs"),
    [
        (Header.SUSPEND, EngineState.PAUSED, Capability.SUSPEND),
        (Header.UPDATE_WEIGHTS, EngineState.RUNNING, Capability.UPDATE_WEIGHTS),
        (Header.START_CUDA_PROFILER, EngineState.PAUSED, Capability.PROFILER),
    ],
)
async def test_a_signal_that_the_backend_lacks_is_rejected_with_the_remedy(
    rig: Rig, kind: Header, state: EngineState, needs: Capability
) -> None:
    rig.backend.info = dataclasses.replace(rig.backend.info, capabilities=frozenset(Capability) - {needs})
    await rig.reach(state)
    ack = await rig.lifecycle.handle(Control(kind=kind, operation_id="op", source="other", epoch=1))
    assert not ack.ok
    for word in (kind.name, needs.value, "'native'", "--backend"):
        assert word in (ack.error or "")
    assert rig.lifecycle.state is state
    assert kind not in rig.lifecycle.acted


@pytest.mark.parametrize("state", [EngineState.RUNNING, EngineState.PAUSED, EngineState.SUSPENDED])
@pytest.mark.parametrize("target", [CoordinatorState.RUNNING, CoordinatorState.PAUSED, CoordinatorState.SUSPENDED])
async def test_a_joining_engine_reaches_the_coordinators_state(
    rig: Rig, state: EngineState, target: CoordinatorState
) -> None:
    await rig.reach(state)
    await rig.lifecycle.converge(target)
    assert rig.lifecycle.state.value == target.value


async def test_a_lost_commit_leaves_the_state_that_the_work_reached(rig: Rig) -> None:
    await rig.reach(EngineState.RUNNING)
    await rig.lifecycle.handle(Control(kind=Header.PAUSE, operation_id="op"))
    assert rig.lifecycle.state is EngineState.PAUSING
    assert rig.lifecycle.settled_state is EngineState.PAUSED
    await rig.lifecycle.converge(CoordinatorState.RUNNING)
    assert rig.lifecycle.state is EngineState.RUNNING


async def test_a_failing_step_ends_the_thread_and_is_reported() -> None:
    rig = await start_rig()

    def fail(plan: object) -> None:
        raise ZeroDivisionError("broken kernel")

    rig.executor.execute = fail  # type: ignore[method-assign,assignment]
    await rig.submit(4)
    await rig.backend.unpause()
    await rig.backend.stop()
    assert [str(failure) for failure in rig.failures] == ["broken kernel"]
    with pytest.raises(EngineStopped):
        await rig.backend.call(lambda engine: None)


async def test_a_queued_command_fails_with_the_engine() -> None:
    rig = await start_rig()
    failing, queued = threading.Event(), threading.Event()

    def fail(plan: object) -> None:
        failing.set()
        queued.wait(timeout=LONG_SECONDS)
        raise ZeroDivisionError("broken kernel")

    rig.executor.execute = fail  # type: ignore[method-assign,assignment]
    await rig.submit(4)
    await rig.backend.unpause()
    await asyncio.to_thread(failing.wait, 10)
    waiting = rig.backend.call(lambda engine: None)
    queued.set()
    with pytest.raises(EngineStopped):
        await waiting
    await rig.backend.stop()


def update(operation_id: str = "update", *, source: str = "other", epoch: int = 3) -> Control:
    return Control(kind=Header.UPDATE_WEIGHTS, operation_id=operation_id, source=source, epoch=epoch)


def committed(control: Control) -> ControlCommit:
    assert control.operation_id is not None
    return ControlCommit(operation_id=control.operation_id, signal=control.kind, epoch=control.epoch)


@pytest.mark.parametrize("state", PATH_TO)
async def test_weights_are_updated_running_and_paused_only(rig: Rig, state: EngineState) -> None:
    await rig.reach(state)
    ack = await rig.lifecycle.handle(update())
    assert ack.ok is (state in (EngineState.RUNNING, EngineState.PAUSED))
    assert rig.lifecycle.state is state
    assert (state.value in (ack.error or "")) is not ack.ok


async def test_staged_weights_are_used_from_the_commit_on(rig: Rig) -> None:
    await rig.submit(2000)
    await rig.reach(EngineState.RUNNING)
    assert (await rig.lifecycle.handle(update())).ok
    assert (rig.lifecycle.epoch, rig.lifecycle.source) == (0, None)
    await rig.lifecycle.commit(committed(update()))
    assert (rig.lifecycle.epoch, rig.lifecycle.source) == (3, "other")
    assert await rig.backend.call(lambda engine: engine.epoch) == 3
    while await rig.backend.call(lambda engine: engine.has_work):
        pass
    old = echo_answer([1, 2, 3], len(rig.tokens))
    before = next(index for index, token in enumerate(rig.tokens) if token != old[index])
    rest = echo_answer([1, 2, 3, *old[:before]], len(old) - before, weights=echo_weights("other"))
    assert rig.tokens == old[:before] + rest


async def test_weights_of_an_operation_that_failed_are_dropped_at_the_next_message(rig: Rig) -> None:
    await rig.reach(EngineState.RUNNING)
    assert (await rig.lifecycle.handle(update())).ok
    assert await rig.signal(Header.PAUSE, "pause")
    await rig.lifecycle.commit(committed(update()))
    with pytest.raises(RuntimeError, match="without staged weights"):
        rig.executor.swap_weights()
    assert rig.lifecycle.epoch == 0


async def test_a_commit_that_comes_twice_or_late_changes_nothing(rig: Rig) -> None:
    await rig.reach(EngineState.RUNNING)
    assert (await rig.lifecycle.handle(update())).ok
    for _ in range(2):
        await rig.lifecycle.commit(committed(update()))
    newer = Control(kind=Header.SET_GENERATION_EPOCH, operation_id="newer", epoch=9)
    await rig.lifecycle.handle(newer)
    for control in (newer, update(), newer):
        await rig.lifecycle.commit(committed(control))
    assert (rig.lifecycle.epoch, rig.lifecycle.source) == (9, "other")


async def test_a_repeated_update_is_not_staged_again_and_is_still_committed(rig: Rig) -> None:
    await rig.reach(EngineState.PAUSED)
    first = await rig.lifecycle.handle(update())
    assert await rig.lifecycle.handle(update()) == first
    await rig.lifecycle.commit(committed(update()))
    assert rig.lifecycle.epoch == 3


async def test_weights_that_cannot_be_staged_change_nothing(rig: Rig) -> None:
    def fail(source: str) -> None:
        raise ValueError(f"tensor 'a' of {source} has shape (2,), the model in use has (3,)")

    rig.executor.stage_weights = fail  # type: ignore[method-assign]
    await rig.reach(EngineState.RUNNING)
    ack = await rig.lifecycle.handle(update())
    assert not ack.ok
    assert "(2,)" in (ack.error or "")
    assert "(3,)" in (ack.error or "")
    assert rig.lifecycle.state is EngineState.RUNNING
    assert rig.lifecycle.epoch == 0


@pytest.mark.parametrize("loaded", [True, False])
async def test_a_joining_engine_uses_the_coordinators_weights_and_epoch(rig: Rig, loaded: bool) -> None:
    if not loaded:
        rig.executor.release_weights()
    await rig.lifecycle.adopt("other", 9)
    assert (rig.lifecycle.epoch, rig.lifecycle.source) == (9, "other")
    await rig.backend.call(lambda engine: engine.executor.load())
    await rig.submit(20)
    await rig.backend.unpause()
    while await rig.backend.call(lambda engine: engine.has_work):
        pass
    assert rig.tokens == echo_answer([1, 2, 3], 20, weights=echo_weights("other"))


@pytest.mark.parametrize("state", PATH_TO)
async def test_a_profiler_is_started_and_stopped_in_every_state(rig: Rig, state: EngineState) -> None:
    await rig.reach(state)
    asked: list[bool] = []
    rig.executor.profile = asked.append  # type: ignore[method-assign]
    for kind in (Header.START_CUDA_PROFILER, Header.STOP_CUDA_PROFILER):
        assert await rig.signal(kind, kind.name)
        assert await rig.signal(kind, kind.name)
        assert rig.lifecycle.state is state
    assert asked == [True, False]


async def test_an_engine_without_a_gpu_rejects_profiling_and_keeps_serving(rig: Rig) -> None:
    await rig.submit(400)
    await rig.reach(EngineState.RUNNING)
    ack = await rig.lifecycle.handle(Control(kind=Header.START_CUDA_PROFILER, operation_id="op"))
    assert not ack.ok
    assert "echo executor has no CUDA profiler" in (ack.error or "")
    assert rig.lifecycle.state is EngineState.RUNNING
    while await rig.backend.call(lambda engine: engine.has_work):
        pass
    assert rig.tokens == echo_answer([1, 2, 3], 400)


@pytest.mark.parametrize("tags", [("weights",), ("kv_cache",), ("weights", "kv_cache"), None])
async def test_suspend_releases_the_given_tags(rig: Rig, tags: tuple[str, ...] | None) -> None:
    engine = rig.engine
    object.__setattr__(engine.config, "kv_cache_management_mode", KVCacheManagementMode.RECOMPUTE)
    ack = await rig.lifecycle.handle(Control(kind=Header.SUSPEND, operation_id="op", tags=tags))
    assert ack.ok
    wanted = tags or ("weights", "kv_cache")
    assert rig.executor.has_weights is ("weights" not in wanted)
    assert (rig.executor._cache is None) is ("kv_cache" in wanted)


async def test_an_unknown_tag_is_rejected_by_name(rig: Rig) -> None:
    ack = await rig.lifecycle.handle(Control(kind=Header.SUSPEND, operation_id="op", tags=("graphs",)))
    assert not ack.ok
    assert "graphs" in (ack.error or "")
    assert "kv_cache" in (ack.error or "")
    assert rig.lifecycle.state is EngineState.PAUSED


async def test_metrics_have_steps_sleep_state_and_signal_durations(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = itertools.count()
    monkeypatch.setattr("megatron_runtime.engine.lifecycle.time", SimpleNamespace(monotonic=lambda: float(next(reads))))
    registry = CollectorRegistry()
    registry.register(EngineMetrics(rig.lifecycle, rig.backend))
    value = registry.get_sample_value
    assert value("megatron_seconds_since_last_step") is None  # no step yet
    await rig.submit(9)
    await rig.reach(EngineState.RUNNING)

    async def answered() -> bool:
        return len(rig.tokens) == 9

    await eventually(answered, what="nine tokens")
    # One step for the prompt of three tokens, eight for the rest of the answer.
    for prefix in ("megatron_", "vllm:"):
        assert value(prefix + "iteration_tokens_total_bucket", {"le": "1.0"}) == 8
        assert value(prefix + "iteration_tokens_total_count") == 9
        assert value(prefix + "iteration_tokens_total_sum") == 3 + 8
        assert value(prefix + "engine_sleep_state", {"sleep_state": "awake"}) == 1
    since = value("megatron_seconds_since_last_step")
    assert since is not None
    assert await rig.signal(Header.PAUSE)
    assert await rig.signal(Header.SUSPEND)
    assert value("vllm:engine_sleep_state", {"sleep_state": "awake"}) == 0
    assert value("vllm:engine_sleep_state", {"sleep_state": "discard_all"}) == 1
    assert value("megatron_engine_signal_seconds_total", {"signal": "SUSPEND"}) == 1.0, "from one read to the next"
    assert value("megatron_engine_signal_seconds_total", {"signal": "RESUME"}) == 0


class ReplacedWeights:
    """A backend whose new weights take the place of those in use. calls: of its methods, with the source in use."""

    def __init__(self) -> None:
        self.info = BackendInfo(
            name="replacing",
            vocab_size=9,
            eos_ids=(),
            max_sequence_length=9,
            max_requests=9,
            capabilities=frozenset({Capability.UPDATE_WEIGHTS}),
            loads_under_pause=True,
        )
        self.calls: list[str] = []
        self.fails = False

    async def stage_weights(self, source: str, epoch: int) -> RankResults:
        self.calls.append(f"stage {source}")
        return RankResults(1)

    async def load_staged_weights(self) -> RankResults:
        self.calls.append("load")
        return RankResults(1, {0: "the file is torn"} if self.fails else {})

    async def commit_weights(self) -> RankResults:
        self.calls.append("commit")
        return RankResults(1)

    async def discard_weights(self) -> None:
        self.calls.append("discard")

    async def adopt_weights(self, source: str, epoch: int) -> None:
        self.calls.append(f"adopt {source}")

    async def set_epoch(self, epoch: int) -> None:
        self.calls.append(f"epoch {epoch}")

    async def confirm(self, signal: Header) -> RankResults:
        return RankResults(1)


async def staged(lifecycle: Lifecycle, *, load: bool) -> ControlAck:
    update = Control(kind=Header.UPDATE_WEIGHTS, operation_id="u", source="new", epoch=3)
    ack = await lifecycle.handle(update)
    assert (ack.ok, ack.must_load) == (True, True)
    return await lifecycle.handle(update.model_copy(update={"load": True})) if load else ack


async def test_the_second_step_of_an_update_loads_and_the_commit_or_the_discard_ends_it() -> None:
    backend = ReplacedWeights()
    lifecycle = Lifecycle(cast(EngineBackend, backend))
    ack = await staged(lifecycle, load=True)
    assert (ack.ok, ack.must_load) == (True, None)
    again = Control(kind=Header.UPDATE_WEIGHTS, operation_id="u", source="new", epoch=3, load=True)
    assert await lifecycle.handle(again) is ack
    await lifecycle.commit(ControlCommit(operation_id="u", signal=Header.UPDATE_WEIGHTS, epoch=3))
    assert backend.calls == ["stage new", "load", "commit"]
    assert (lifecycle.source, lifecycle.epoch) == ("new", 3)

    backend.calls.clear()
    lifecycle = Lifecycle(cast(EngineBackend, backend))
    await staged(lifecycle, load=True)
    await lifecycle.commit(ControlCommit(operation_id="u", signal=Header.UPDATE_WEIGHTS, discard=True))
    assert (backend.calls[-1], lifecycle.source, lifecycle.epoch) == ("discard", None, 0)


async def test_a_second_step_without_the_first_is_rejected_and_one_that_fails_ends_the_engine() -> None:
    backend = ReplacedWeights()
    lifecycle = Lifecycle(cast(EngineBackend, backend))
    ack = await lifecycle.handle(Control(kind=Header.UPDATE_WEIGHTS, operation_id="a", source="a", epoch=1, load=True))
    assert (ack.ok, ack.error, backend.calls) == (False, "UPDATE_WEIGHTS a: its weights are not staged", [])
    backend.fails = True
    ack = await staged(lifecycle, load=True)
    assert (ack.ok, ack.error) == (False, "UPDATE_WEIGHTS: loading new failed: the file is torn")
    assert lifecycle.unknown_weights == ack.error


@pytest.mark.parametrize(
    ("source", "calls"),
    [("new", ["commit", "epoch 3"]), (None, ["discard", "epoch 3"]), ("other", ["discard", "adopt other", "epoch 3"])],
)
async def test_hello_ack_ends_an_update_whose_commit_was_lost(source: str | None, calls: list[str]) -> None:
    backend = ReplacedWeights()
    lifecycle = Lifecycle(cast(EngineBackend, backend))
    await staged(lifecycle, load=True)
    await lifecycle.adopt(source, 3)
    assert backend.calls == ["stage new", "load", *calls]
