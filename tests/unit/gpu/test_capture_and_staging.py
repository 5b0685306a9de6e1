"""Graphs are captured at load, stay when weights are updated, and no thread stages weights during a capture."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from fake_cuda import FakeCuda
from small_engine import CPU, GEMMA, MIXTURE, SMALL, answers, engine_on

from bench.random_model import RandomCheckpoint
from megatron_runtime.backends.native import build
from megatron_runtime.backends.native.cpu.executor import CpuExecutor
from megatron_runtime.backends.native.cuda import device as cuda_device
from megatron_runtime.backends.native.cuda.executor import CudaExecutor
from megatron_runtime.backends.native.memory import KVPool, MemoryShortError, require_memory
from megatron_runtime.backends.text import ModelText
from megatron_runtime.checkpoints.checkpoint import UnusableWeightsError
from megatron_runtime.checkpoints.source import IN_MEMORY, ModelInMemory
from megatron_runtime.models.tensors import Part
from megatron_runtime.requests.config import InferenceConfig, KVCacheManagementMode

PERSIST = KVCacheManagementMode.PERSIST
SIZES = [1, 2, 4]


@dataclass(frozen=True, slots=True)
class OtherCheckpoint(RandomCheckpoint):
    """Other weights of the same model. on_read: called before each read."""

    on_read: Any = None

    def read(self, name: str, part: Part = ()) -> torch.Tensor:
        if self.on_read is not None:
            self.on_read()
        return RandomCheckpoint.read(self, name, part).flip(0)


def other_weights(config: Any = SMALL, on_read: Any = None) -> ModelInMemory:
    return ModelInMemory(OtherCheckpoint(config, torch.float32, CPU, on_read), name="other weights")


def executors(functions: FakeCuda) -> partial[CudaExecutor]:
    return partial(CudaExecutor, max_rows=4, max_tokens=48, graph_rows=4, device=CPU, functions=functions)


@pytest.mark.parametrize("mode", list(KVCacheManagementMode))
def test_all_sizes_are_captured_at_load_and_give_the_cpus_answers(mode: KVCacheManagementMode) -> None:
    expected = answers(engine_on(CpuExecutor, mode))
    functions = FakeCuda()
    engine = engine_on(executors(functions), mode)
    assert engine.executor.captured_sizes == SIZES
    assert answers(engine) == expected
    assert functions.recorded == len(SIZES)  # none in a step
    assert answers(engine, suspend_after=6) == expected
    assert functions.recorded == 2 * len(SIZES)  # the memory has other addresses


@pytest.mark.parametrize("config", [SMALL, MIXTURE, GEMMA], ids=lambda config: config.family)
def test_graphs_stay_when_weights_are_updated(config: Any) -> None:
    updated = engine_on(CpuExecutor, PERSIST, config)
    functions = FakeCuda()
    engine = engine_on(executors(functions), PERSIST, config)
    before = answers(engine)
    for core in (updated, engine):
        core.executor.use_memory(other_weights(config))
        core.executor.stage_weights(IN_MEMORY)
        core.swap_weights(2)
    assert functions.recorded == len(SIZES)
    assert answers(engine) == answers(updated) != before


def test_staging_waits_until_all_sizes_are_captured() -> None:
    functions = FakeCuda(overlap_seconds=0.2)
    loaded = executors(functions)
    threads = []

    def stage_during_captures(executor: CudaExecutor) -> None:
        functions.recording.wait()
        executor.stage_weights(IN_MEMORY)

    class Staging(CudaExecutor):
        def prepare(self) -> None:
            thread = threading.Thread(target=stage_during_captures, args=(self,))
            threads.append(thread)
            thread.start()
            super().prepare()

    engine = engine_on(partial(Staging, **loaded.keywords), PERSIST)
    for thread in threads:
        thread.join()
    assert engine.executor.captured_sizes == SIZES
    engine.swap_weights(2)


def test_captures_wait_until_weights_are_staged() -> None:
    functions = FakeCuda()
    engine = engine_on(executors(functions), PERSIST)
    executor = engine.executor
    executor.release_kv(None)
    functions.recording.clear()
    reading = threading.Event()

    def on_read() -> None:
        reading.set()
        functions.recording.wait(0.05)  # a capture that does not wait begins here

    executor.use_memory(other_weights(on_read=on_read))
    thread = threading.Thread(target=executor.stage_weights, args=(IN_MEMORY,))
    thread.start()
    reading.wait()
    executor.load()
    thread.join()
    assert executor.captured_sizes == SIZES


def test_a_capture_that_fails_leaves_nothing_loaded() -> None:
    functions = FakeCuda()
    engine = engine_on(executors(functions), PERSIST)
    executor = engine.executor
    engine.suspend()
    with functions.aside(), pytest.raises(RuntimeError, match="during capture"):
        engine.resume()
    assert not executor.has_weights
    assert executor.has_cache  # it was there before
    engine.resume()
    assert executor.captured_sizes == SIZES


DAMAGED = "model.layers.1.self_attn.k_proj.weight"


@dataclass(frozen=True, slots=True)
class EditedCheckpoint(RandomCheckpoint):
    """value: of one number of the tensor DAMAGED."""

    value: float = 0.0

    def read(self, name: str, part: Part = ()) -> torch.Tensor:
        tensor = RandomCheckpoint.read(self, name, part)
        if name == DAMAGED:
            tensor = tensor.clone()
            tensor[0, 0] = self.value
        return tensor


def edited_weights(value: float) -> ModelInMemory:
    return ModelInMemory(EditedCheckpoint(SMALL, torch.float32, CPU, value), name="edited weights")


def test_weights_that_are_not_finite_are_not_staged() -> None:
    engine = engine_on(executors(FakeCuda()), PERSIST)
    engine.executor.use_memory(edited_weights(float("nan")))
    with pytest.raises(UnusableWeightsError, match=DAMAGED):
        engine.executor.stage_weights(IN_MEMORY)
    assert answers(engine)


@pytest.mark.parametrize(
    ("value", "dtype", "message"),
    [
        (float("nan"), "float32", f"{DAMAGED}.* not finite"),
        (float("inf"), "float16", f"{DAMAGED}.* not finite"),
        (1e6, "float16", "the weights have values beyond the range of float16: use another dtype"),
        (1e6, "float32", None),
    ],
)
def test_weights_are_checked_where_they_were_copied_to(value: float, dtype: str, message: str | None) -> None:
    executor = executors(FakeCuda())(
        edited_weights(value), ModelText(_no_tokenizer), dtype=dtype, kv_cache_memory=1 << 20, max_sequence_length=96
    )
    if message is None:
        executor.load()
        assert executor.captured_sizes == SIZES
        return
    with pytest.raises(UnusableWeightsError, match=message):
        executor.load()
    assert not executor.has_weights


def _no_tokenizer() -> Any:
    raise AssertionError("these tests use token ids only")


def test_the_locked_memory_of_staged_weights_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: dict[int, int] = {}

    class Runtime:
        def cudaHostRegister(self, address: int, size: int, _flags: int) -> int:
            registered[address] = size
            return 0

        def cudaHostUnregister(self, address: int) -> None:
            del registered[address]

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(torch.cuda, "check_error", lambda result: None)
    functions = FakeCuda()
    functions.host_memory = cuda_device.CudaFunctions(CPU).host_memory  # type: ignore[method-assign]
    engine = engine_on(executors(functions), PERSIST)
    for end in (engine.executor.drop_staged, partial(engine.swap_weights, 2)):
        engine.executor.stage_weights(IN_MEMORY)
        size = sum(linear.num_bytes for linear in engine.executor.model.weights.matrices())
        assert list(registered.values()) == [size]
        end()
        assert not registered


def test_an_error_of_short_memory_on_a_gpu_names_the_gpus_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 20, 8 << 20))
    with pytest.raises(MemoryShortError, match=r"2 MiB, 1 MiB are free on cuda:1: .*divide the model over more GPUs"):
        require_memory(2 << 20, what="loading the weights", device=device)
    with pytest.raises(MemoryShortError, match=r"the KV cache .* free on cuda:1: lower kv_cache_memory"):
        KVPool((1, 2, 16, 1 << 14), dtype=torch.float32, device=device).allocate()


def test_the_lack_of_graphs_for_prompts_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(build, "CudaExecutor", lambda *_, **options: options["graph_rows"])
    without = ({"use_cuda_graphs_for_non_decode_steps": False}, {"num_cuda_graphs": 0})
    for logs, fields in ((1, {}), *((0, fields) for fields in without)):
        caplog.clear()
        config = InferenceConfig(max_requests=8, **fields)
        with caplog.at_level(logging.INFO):
            rows = build.select_executor(object(), None, config, device="cuda", kv_cache_memory=None)
        assert rows == (0 if "num_cuda_graphs" in fields else 8)
        assert len(caplog.messages) == logs
