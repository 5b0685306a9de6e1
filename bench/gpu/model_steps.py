"""Steps of the GPU campaign that run in one process, with an engine but no coordinator.

The model has the shape of an 8B model and random weights.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity

from bench.gpu.report import ROOT, Campaign
from bench.gpu_kernels import Ceilings, ModelShape, decode_case, measure_ceilings, milliseconds, time_in_graph
from bench.random_model import LLAMA_8B, RandomCheckpoint
from megatron_kernels.paged_decode_triton import paged_decode
from megatron_kernels.registry import KernelConfig, select_kernels
from megatron_kernels.tuning import decode_tuning
from megatron_runtime.backends.native.cuda.executor import CudaExecutor
from megatron_runtime.backends.native.engine import EngineCore
from megatron_runtime.backends.text import ModelText
from megatron_runtime.checkpoints.source import IN_MEMORY, ModelInMemory
from megatron_runtime.engine.engine_request import EngineRequest
from megatron_runtime.models.config import ModelConfig, MoEConfig
from megatron_runtime.models.tensors import num_parameters
from megatron_runtime.protocol import strict_json as json
from megatron_runtime.requests.config import InferenceConfig, KVCacheManagementMode
from megatron_runtime.requests.sampling_params import IGNORE_EOS, SamplingParams

SMALL = replace(
    LLAMA_8B,
    vocab_size=512,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
)
QWEN3_30B = replace(
    LLAMA_8B,
    family="qwen3_moe",
    qk_norm=True,
    vocab_size=151936,
    hidden_size=2048,
    num_layers=24,
    num_kv_heads=4,
    rope_scaling=None,
    moe=MoEConfig(num_experts=128, experts_per_token=8, intermediate_size=768, normalize=True),
)
"""Qwen3 30B-A3B with half of its layers."""
PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "pyzmq",
    "pydantic",
    "fastapi",
    "uvicorn",
    "vllm",
)
MODULES = (
    "fastapi",
    "uvicorn",
    "zmq",
    "nacl",
    "pydantic",
    "llguidance",
    "obstore",
    "gguf",
    "msgpack",
    "uvloop",
    "httpx",
)
"""Modules that a server on this machine imports."""
CEILINGS = "ceilings.json"
_SHORT_PROMPT = 16
_WARM_UP_STEPS = 4
_PROFILED_STEPS = 5
_WORKING_SET = 120_000_000
"""Bytes of weights that a product reads in rotation. They do not fit into the L2 cache."""


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine on the device, the model that it serves, and the sizes of its steps."""

    core: EngineCore
    executor: CudaExecutor
    model: ModelInMemory
    config: ModelConfig

    @classmethod
    def start(cls, campaign: Campaign, config: ModelConfig, **inference: Any) -> Engine:
        sizes, device = campaign.sizes, torch.device(campaign.device)
        dtype = torch.float32 if campaign.dry else torch.bfloat16
        model = ModelInMemory(RandomCheckpoint(config, dtype, device), name="random weights")
        executor = CudaExecutor(
            model,
            ModelText(_no_tokenizer),
            dtype=str(dtype).removeprefix("torch."),
            kv_cache_memory=sizes.kv_cache_mib << 20,
            max_sequence_length=sizes.max_sequence_length,
            max_rows=sizes.max_rows,
            max_tokens=sizes.max_tokens,
            graph_rows=0 if campaign.dry else sizes.max_rows,
            device=device,
        )
        limits = InferenceConfig(
            max_requests=sizes.max_rows,
            max_tokens=sizes.max_tokens,
            max_sequence_length=sizes.max_sequence_length,
            enable_prefix_caching=False,
            **inference,
        )
        core = EngineCore(executor, limits)
        executor.load()
        return cls(core, executor, model, config)

    def add(self, count: int, prompt: int, new: int, *, first: int = 0, seed: int = 1, **params: Any) -> None:
        """Add `count` requests with random prompts of `prompt` tokens. Each request generates `new` tokens.

        first:  number of the first request.
        params: sampling parameters.
        """
        random, nothing = np.random.default_rng(seed), np.empty(0, dtype=np.int32)
        values = {"temperature": 0.0, "top_k": 1, **params}
        for number in range(first, first + count):
            tokens = random.integers(1, self.config.vocab_size, prompt).astype(np.int32)
            sampling = SamplingParams(num_tokens_to_generate=new, termination_id=IGNORE_EOS, **values)
            self.core.add_request(EngineRequest(number, tokens, nothing, sampling, seed=number))

    def run_prompts(self, count: int) -> None:
        """Run steps until `count` requests have their first tokens."""
        started: set[int] = set()
        while len(started) < count:
            started |= {output.request_id for output in self.core.step()}

    def drain(self) -> int:
        """Run all requests to their end. Return the number of steps."""
        steps = 0
        while self.core.has_work:
            self.core.step()
            steps += 1
        return steps

    def seconds_of_prompt(self, length: int, *, seed: int = 1) -> float:
        """Return the seconds until a single prompt of `length` tokens has its first token."""
        self.add(1, length, 1, seed=seed)
        self.synchronise()
        begun = time.perf_counter()
        self.drain()
        return time.perf_counter() - begun

    def step_ms(self, steps: int) -> float:
        """Return the median duration of `steps` steps in milliseconds."""
        times = []
        for _ in range(steps):
            begun = time.perf_counter()
            self.core.step()
            times.append(1e3 * (time.perf_counter() - begun))
        return statistics.median(times)

    def synchronise(self) -> None:
        if self.executor.device.type == "cuda":
            torch.cuda.synchronize()


def _no_tokenizer() -> Any:
    raise RuntimeError("prompts are token ids here")


def _shape(campaign: Campaign) -> ModelConfig:
    return SMALL if campaign.dry else LLAMA_8B


def _ceilings(campaign: Campaign) -> Ceilings:
    """Return the rates of the device that the step `facts` has measured. Measure the rates if this step has not run."""
    path = campaign.folder / CEILINGS
    if path.exists():
        return Ceilings(**json.loads(path.read_text()))
    sizes, dtype = campaign.sizes, torch.float32 if campaign.dry else torch.bfloat16
    return measure_ceilings(torch.device(campaign.device), dtype, elements=sizes.copy_elements, side=sizes.product_side)


# --- steps ----------------------------------------------------------------------------------------------------------


def facts(campaign: Campaign) -> None:
    """Record package versions, missing packages, and the name and the measured rates of the device."""
    versions = {}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    campaign.emit("versions", python=sys.version.split()[0], cpus=os.cpu_count(), **versions)
    for name in MODULES:
        try:
            importlib.import_module(name)
        except ImportError as error:
            campaign.emit("missing", package=name, reason=str(error))
    campaign.emit("device", text=campaign.describe_gpu(), cuda=torch.version.cuda)
    ceilings, device = _ceilings(campaign), torch.device(campaign.device)
    rates = {"bytes_per_second": ceilings.bytes_per_second, "flops_per_second": ceilings.flops_per_second}
    (campaign.folder / CEILINGS).write_text(json.dumps(rates))
    # A decode step reads and hardly writes, and the rate of a copy differs from the rate of a read.
    source = torch.randn(campaign.sizes.copy_elements, device=device)
    read_ms = statistics.median(milliseconds(source.sum, device) for _ in range(10))
    campaign.emit(
        "rates",
        copy_terabytes_per_s=round(ceilings.bytes_per_second / 1e12, 3),
        read_terabytes_per_s=round(source.nbytes / read_ms / 1e9, 3),
        teraflops=round(ceilings.flops_per_second / 1e12, 3),
    )


def engine(campaign: Campaign) -> None:
    """Measure the engine: its first request, its decode steps at each batch size, a long prompt, and short prompts."""
    sizes, ceilings, begun = campaign.sizes, _ceilings(campaign), time.monotonic()
    engine = Engine.start(campaign, _shape(campaign))
    graphs = engine.executor.captured_sizes
    campaign.emit("load", seconds=round(time.monotonic() - begun, 1), graphs=len(graphs), used_mib=campaign.used_mib())
    with campaign.part("first request"):
        first, second = (_seconds_of_request(engine) for _ in range(2))
        campaign.emit(
            "first request", ms=[round(1e3 * first, 1), round(1e3 * second, 1)], ratio=round(first / second, 2)
        )
    # A token reads one row of the embedding.
    weights = num_parameters(engine.config) - engine.config.vocab_size * engine.config.hidden_size
    for batch in sizes.batches:
        with campaign.part(f"decode b{batch}"):
            _decode_cell(campaign, engine, batch, weights, ceilings)
    with campaign.part(f"prefill {sizes.prefill_tokens}"):
        _prefill_cell(campaign, engine, weights, ceilings)
    for length in sizes.short_prompts:
        with campaign.part(f"first token {length}"):
            engine.seconds_of_prompt(length)  # warm-up
            times = [round(1e3 * engine.seconds_of_prompt(length, seed=turn), 2) for turn in range(sizes.turns)]
            campaign.emit(f"first token {length}", ms=statistics.median(times), all=times)


def _seconds_of_request(engine: Engine) -> float:
    """Return the seconds from a short request's arrival to its end."""
    engine.add(1, _SHORT_PROMPT, 8)
    engine.synchronise()
    begun = time.perf_counter()
    engine.drain()
    return time.perf_counter() - begun


def _decode_cell(campaign: Campaign, engine: Engine, batch: int, weights: int, ceilings: Ceilings) -> None:
    sizes, core, config = campaign.sizes, engine.core, engine.config
    engine.add(batch, sizes.prompt_tokens, _WARM_UP_STEPS)
    engine.drain()
    rates, step_times = [], []
    for turn in range(sizes.turns):
        engine.add(batch, sizes.prompt_tokens, sizes.new_tokens, seed=turn)
        engine.run_prompts(batch)
        engine.synchronise()
        begun, before = time.perf_counter(), core.stats().generation_tokens
        steps = engine.drain()
        seconds = time.perf_counter() - begun
        rates.append((core.stats().generation_tokens - before) / seconds)
        step_times.append(1e3 * seconds / steps)
    cached = batch * (sizes.prompt_tokens + sizes.new_tokens / 2) * config.kv_elements_per_token
    bound_ms = 1e3 * (weights + cached) * engine.executor.dtype.itemsize / ceilings.bytes_per_second
    step_ms = statistics.median(step_times)
    campaign.emit(
        f"decode b{batch}",
        tokens_per_s=round(statistics.median(rates), 1),
        all=[round(rate, 1) for rate in rates],
        step_ms=round(step_ms, 3),
        bound_ms=round(bound_ms, 3),
        percent=round(100 * bound_ms / step_ms, 1),
    )


def _prefill_cell(campaign: Campaign, engine: Engine, weights: int, ceilings: Ceilings) -> None:
    tokens, config = campaign.sizes.prefill_tokens, engine.config
    engine.seconds_of_prompt(tokens)  # warm-up
    seconds = statistics.median(engine.seconds_of_prompt(tokens, seed=turn) for turn in range(campaign.sizes.turns))
    head = config.vocab_size * config.hidden_size
    attention = 2 * config.num_layers * config.num_heads * config.head_dim * tokens * (tokens + 1)
    bound = (2 * (weights - head) * tokens + attention) / ceilings.flops_per_second
    campaign.emit(
        f"prefill {tokens}",
        ms=round(1e3 * seconds, 1),
        bound_ms=round(1e3 * bound, 1),
        percent=round(100 * bound / seconds, 1),
    )


def race(campaign: Campaign) -> None:
    """Test that another thread can stage weights while the engine runs steps and captures its CUDA graphs again.

    The engine then uses the staged weights.
    """
    engine = Engine.start(campaign, _shape(campaign), kv_cache_management_mode=KVCacheManagementMode.RECOMPUTE)
    core, executor = engine.core, engine.executor
    errors: list[str] = []
    done = threading.Event()

    def stage() -> None:
        try:
            for number in range(campaign.sizes.stagings):
                begun = time.perf_counter()  # this thread must not wait for the device during a capture
                executor.stage_weights(IN_MEMORY)
                campaign.emit(f"staging {number + 1}", seconds=round(time.perf_counter() - begun, 1))
        except Exception as error:
            errors.append(f"staging: {type(error).__name__}: {error}")
        finally:
            done.set()

    executor.use_memory(engine.model)
    used = {"loaded": campaign.used_mib()}
    thread = threading.Thread(target=stage)
    thread.start()
    captures = steps = 0
    engine.add(campaign.sizes.max_rows, _SHORT_PROMPT, campaign.sizes.new_tokens)
    try:
        while not done.is_set() or not captures:
            core.suspend({"kv_cache"})  # drops the graphs
            core.resume()
            captures += 1
            while core.has_work and steps < captures * campaign.sizes.steps:
                core.step()
                steps += 1
            used["staging"] = campaign.used_mib()
        thread.join()
        sizes = executor.captured_sizes
        update = _seconds(engine, lambda: core.swap_weights(5))
        if executor.captured_sizes != sizes:
            errors.append("the update of the weights dropped the graphs")
        used["updated"] = campaign.used_mib()
        core.reset()
        engine.add(1, _SHORT_PROMPT, 4)
        engine.drain()
        campaign.emit("update", seconds=update, graphs=len(sizes), mib=used)
    except Exception as error:
        errors.append(f"step: {type(error).__name__}: {error}")
    thread.join()
    campaign.emit("staging during captures", failed=errors, captures=captures, steps=steps)


def profile(campaign: Campaign) -> None:
    """Record the durations of a decode step: each phase on the host, the graph without the host, and each kernel."""
    engine = Engine.start(campaign, _shape(campaign))
    for batch in campaign.sizes.batches:
        with campaign.part(f"host b{batch}"):
            engine.add(batch, campaign.sizes.prompt_tokens, campaign.sizes.new_tokens)
            engine.run_prompts(batch)
            _host_cell(campaign, engine, batch)
            _device_cell(campaign, engine, batch)
        engine.core.reset()


def _host_cell(campaign: Campaign, engine: Engine, batch: int) -> None:
    with (
        _timed(engine.core, "schedule") as schedule,
        _timed(engine.executor.buffers, "stage") as stage,
        _timed(engine.executor, "execute") as execute,
        _timed(engine.core, "collect") as collect,
    ):
        whole = engine.step_ms(_WARM_UP_STEPS)
    parts = {"schedule": schedule, "stage": stage, "execute": execute, "collect": collect}
    times = {f"{name}_us": round(statistics.median(microseconds)) for name, microseconds in parts.items()}
    campaign.emit(f"host b{batch}", whole_us=round(1e3 * whole), **times)


@contextmanager
def _timed(target: Any, name: str) -> Iterator[list[float]]:
    """Return a context manager that times each call of a method of `target`, and yields the list of microseconds."""
    method: Callable[..., Any] = getattr(target, name)
    times: list[float] = []

    def timed(*arguments: Any, **options: Any) -> Any:
        begun = time.perf_counter()
        result = method(*arguments, **options)
        times.append(1e6 * (time.perf_counter() - begun))
        return result

    setattr(target, name, timed)
    try:
        yield times
    finally:
        delattr(target, name)


def _device_cell(campaign: Campaign, engine: Engine, batch: int) -> None:
    executor, device = engine.executor, engine.executor.device
    sizes = [size for size in executor.captured_sizes if size >= batch]
    if sizes and executor.graphs is not None:
        graphs = executor.graphs
        replay_ms = statistics.median(milliseconds(lambda: graphs.replay(sizes[0]), device) for _ in range(20))
        campaign.emit(f"graph b{batch}", us=round(1e3 * replay_ms))
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with torch.profiler.profile(activities=activities) as recorded:
        for _ in range(_PROFILED_STEPS):
            engine.core.step()
        engine.synchronise()
    column = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    rows = sorted(recorded.key_averages(), key=lambda row: getattr(row, column), reverse=True)[:24]
    kernels = [
        (row.key[:90], row.count // _PROFILED_STEPS, round(getattr(row, column) / _PROFILED_STEPS, 1)) for row in rows
    ]
    campaign.emit(f"kernels b{batch}", us_of_a_step=kernels, sum_us=round(sum(us for _, _, us in kernels)))
    recorded.export_chrome_trace(str(campaign.folder / f"trace-b{batch}.json"))


def products(campaign: Campaign) -> None:
    """Measure the matrix products of a layer and of the LM head, which read nearly all bytes that a step reads."""
    config, device, ceilings = _shape(campaign), torch.device(campaign.device), _ceilings(campaign)
    dtype = torch.float32 if campaign.dry else torch.bfloat16
    shape = ModelShape(
        hidden=config.hidden_size,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        feed_forward=config.intermediate_size,
        vocabulary=config.vocab_size,
    )
    for name, (n, k) in shape.products().items():
        count = 1 if campaign.dry else min(8, 1 + _WORKING_SET // (n * k * dtype.itemsize))
        weights = [torch.randn(n, k, device=device).to(dtype) for _ in range(count)]
        for rows in campaign.sizes.batches:
            with campaign.part(f"product {name} {rows} rows"):
                x = torch.randn(rows, k, device=device).to(dtype)
                us = time_in_graph(lambda w, x=x: F.linear(x, w), weights, device)
                bound_us = 1e6 * (n * k + rows * (n + k)) * dtype.itemsize / ceilings.bytes_per_second
                campaign.emit(
                    f"product {name} {rows} rows",
                    us=round(us, 1),
                    bound_us=round(bound_us, 1),
                    percent=round(100 * bound_us / us, 1),
                )


def attention(campaign: Campaign) -> None:
    """Measure decode attention for several values of SPLIT_TOKENS of megatron_kernels.tuning."""
    config, device, sizes = _shape(campaign), torch.device(campaign.device), campaign.sizes
    dtype = torch.float32 if campaign.dry else torch.bfloat16
    shape = ModelShape(heads=config.num_heads, kv_heads=config.num_kv_heads, head_dim=config.head_dim)
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device).to(dtype)

    for batch in sizes.batches:
        for context in sizes.contexts:
            with campaign.part(f"attention b{batch} of {context}"):
                case = decode_case(shape, batch, context, random)
                inputs, times = case.make(), dict[str, float]()
                for split_tokens in sizes.split_tokens:
                    tuning = decode_tuning(
                        batch=batch,
                        num_kv_heads=config.num_kv_heads,
                        head_dim=config.head_dim,
                        max_tokens=sizes.max_sequence_length,
                        num_sms=num_sms,
                        split_tokens=split_tokens,
                    )
                    call = partial(paged_decode, num_kv_heads=config.num_kv_heads, tuning=tuning)
                    times[split_tokens] = round(time_in_graph(lambda x, call=call: call(*x), [inputs], device), 1)
                minimum = min(times, key=lambda split_tokens: times[split_tokens])
                campaign.emit(
                    f"attention b{batch} of {context}", fastest=minimum, us={str(k): v for k, v in times.items()}
                )


def sampling(campaign: Campaign) -> None:
    """Measure the sampling kernel by shape of the logits, and measure steps with log-probabilities and penalties."""
    device, vocabulary = torch.device(campaign.device), _shape(campaign).vocab_size
    kernels = select_kernels(KernelConfig(), device)
    methods = {
        "greedy": (0.0, 0, 0.0),
        "top_k 50": (1.0, 50, 0.0),
        "top_p 0.95": (1.0, 0, 0.95),
        "no filter": (1.0, 0, 0.0),
    }
    for rows in campaign.sizes.batches:
        for kind in ("flat", "steep"):
            logits = _logits(rows, vocabulary, kind, device)
            for name, (temperature, top_k, top_p) in methods.items():
                with campaign.part(f"sample {kind} {name} {rows} rows"):
                    columns = {
                        "temperature_N": torch.full((rows,), temperature, device=device),
                        "top_k_N": torch.full((rows,), top_k, device=device, dtype=torch.int32),
                        "top_p_N": torch.full((rows,), top_p, device=device),
                        "min_p_N": torch.zeros(rows, device=device),
                        "seeds_N": torch.arange(rows, device=device),
                        "positions_N": torch.zeros(rows, dtype=torch.int64, device=device),
                    }
                    call = kernels.sample
                    us = time_in_graph(lambda x, call=call, columns=columns: call(x, **columns), [logits], device)
                    campaign.emit(f"sample {kind} {name} {rows} rows", us=round(us, 1))
    engine = Engine.start(campaign, _shape(campaign))
    nucleus = {"temperature": 1.0, "top_k": 0, "top_p": 0.95}
    requests: dict[str, dict[str, Any]] = {
        "greedy": {},
        "log-probabilities": {"return_log_probs": True},
        "top 5 log-probabilities": {"return_log_probs": True, "top_n_logprobs": 5},
        "presence penalty": {"presence_penalty": 0.5},
        "top-p": nucleus,
        "presence penalty and top-p": {"presence_penalty": 0.5, **nucleus},
    }
    for batch in campaign.sizes.batches:
        for name, params in requests.items():
            with campaign.part(f"step with {name} b{batch}"):
                engine.add(batch, _SHORT_PROMPT, 4 * campaign.sizes.steps + 16, **params)
                engine.run_prompts(batch)
                engine.step_ms(_WARM_UP_STEPS)
                ms = engine.step_ms(campaign.sizes.steps)
                engine.core.reset()
                campaign.emit(f"step with {name} b{batch}", ms=round(ms, 2))


def _logits(rows: int, vocabulary: int, kind: str, device: torch.device) -> torch.Tensor:
    """Return "flat" logits, which are normally distributed, or "steep" logits with 30 likely tokens per row."""
    generator = torch.Generator(device).manual_seed(rows)
    flat = torch.randn(rows, vocabulary, device=device, generator=generator)
    if kind == "flat":
        return (2.5 * flat).to(torch.bfloat16)
    places = torch.randint(0, vocabulary, (rows, 30), device=device, generator=generator)
    likely = torch.linspace(12, 4, 30, device=device).expand(rows, 30)
    return (2.0 * flat - 8.0).scatter_(1, places, likely).to(torch.bfloat16)


def memory(campaign: Campaign) -> None:
    """Measure how much memory suspend() releases, and how long suspend() and resume() take, by mode of the KV cache."""
    batch = campaign.sizes.batches[-1]
    for mode in KVCacheManagementMode:
        with campaign.part(f"suspend {mode.value}"):
            before = campaign.used_mib()
            engine = Engine.start(campaign, _shape(campaign), kv_cache_management_mode=mode)
            engine.add(batch, campaign.sizes.prompt_tokens, campaign.sizes.new_tokens)
            engine.run_prompts(batch)
            loaded = campaign.used_mib()
            suspend = _seconds(engine, engine.core.suspend)
            suspended = campaign.used_mib()
            campaign.emit(
                f"suspend {mode.value}",
                suspend_seconds=suspend,
                resume_seconds=_seconds(engine, engine.core.resume),
                step_seconds=[_seconds(engine, engine.core.step) for _ in range(2)],
                mib={"before": before, "loaded": loaded, "suspended": suspended, "resumed": campaign.used_mib()},
            )
            engine.executor.release_kv(None)
            engine.executor.release_weights()


def _seconds(engine: Engine, call: Callable[[], object]) -> float:
    begun = time.perf_counter()
    call()
    engine.synchronise()
    return round(time.perf_counter() - begun, 3)


def moe(campaign: Campaign) -> None:
    """Measure decode steps of a mixture of experts."""
    experts = MoEConfig(num_experts=6, experts_per_token=2, intermediate_size=32, normalize=True)
    small = replace(SMALL, family="qwen3_moe", qk_norm=True, moe=experts)
    engine = Engine.start(campaign, small if campaign.dry else QWEN3_30B)
    for batch in campaign.sizes.batches:
        with campaign.part(f"moe decode b{batch}"):
            engine.add(batch, _SHORT_PROMPT, 4 * campaign.sizes.steps + 16)
            engine.run_prompts(batch)
            engine.step_ms(_WARM_UP_STEPS)
            campaign.emit(f"moe decode b{batch}", step_ms=round(engine.step_ms(campaign.sizes.steps), 3))
            engine.core.reset()


def tests(campaign: Campaign) -> None:
    """Run tests/gpu with an empty Triton cache. A dry campaign only collects the tests."""
    options = ["--collect-only"] if campaign.dry else ["-n", "6", f"--junitxml={campaign.folder}/tests-gpu.xml"]
    command = [
        sys.executable,
        "-P",
        "-m",
        "pytest",
        str(ROOT / "tests" / "gpu"),
        "-q",
        "-p",
        "no:cacheprovider",
        *options,
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=campaign.box, check=False
    )
    print(done.stdout[-3000:], done.stderr[-3000:])
    lines = done.stdout.strip().splitlines()[-1:]
    campaign.emit("tests/gpu", status=done.returncode, failed=done.returncode != 0, summary=lines)
