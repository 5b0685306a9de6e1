"""Prints which compilations of each kernel the load of an engine requests, and which its later steps request.

Run it as a program, without TRITON_INTERPRET. Engines with small models and all kernels of a GPU run on tensors in main
memory. A launch computes nothing: it only records what Triton would compile, the kernel and the specialisation of its
arguments for compute capability 9.0 (integers that are 1 or divisible by 16, alignment of pointers). It prints one JSON
object: name of the engine -> {loaded: number of compilations,
later: {kernel: [specialisation that was not loaded, …]}}.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import random_checkpoint
import torch
from fake_cuda import FakeCuda
from sm90_compiler import BACKEND
from small_engine import CPU, GEMMA, MIXTURE, SMALL
from soak import size
from triton.runtime.jit import JITFunction, create_function_from_signature

from bench.random_model import RandomCheckpoint
from megatron_kernels import paged_decode_triton, registry
from megatron_kernels.registry import Backend, KernelConfig
from megatron_runtime.backends.native.cuda.executor import CudaExecutor
from megatron_runtime.backends.native.engine import EngineCore
from megatron_runtime.backends.text import ModelText
from megatron_runtime.checkpoints.source import ModelInMemory
from megatron_runtime.engine.engine_request import EngineRequest
from megatron_runtime.models.config import ModelConfig, MoEConfig
from megatron_runtime.requests.config import InferenceConfig
from megatron_runtime.requests.sampling_params import IGNORE_EOS, SamplingParams

MULTIPROCESSORS = 132
REQUESTS = size(20, soak=60)
MANY_EXPERTS = MoEConfig(num_experts=20, experts_per_token=1, intermediate_size=32, normalize=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """A configuration of an engine; the limits are those of an InferenceConfig."""

    model: ModelConfig
    max_requests: int = 70
    max_tokens: int = 600
    max_sequence_length: int = 512
    graph_rows: int = 70
    logprobs_mode: str = "raw_logprobs"


ENGINES = {
    "dense": Engine(model=SMALL),
    "few rows, processed log-probabilities": Engine(
        model=SMALL, max_requests=3, graph_rows=3, max_tokens=301, logprobs_mode="processed_logprobs"
    ),
    "no graphs": Engine(model=SMALL, graph_rows=0),
    "windows": Engine(model=GEMMA),
    "norms of all heads": Engine(model=random_checkpoint.CONFIGS["olmo2"], max_sequence_length=256),
    "experts": Engine(model=MIXTURE),
    "experts, few rows": Engine(model=MIXTURE, max_requests=3, graph_rows=3),
    "many experts": Engine(
        model=replace(MIXTURE, moe=MANY_EXPERTS), max_tokens=1500, max_sequence_length=400, max_requests=9, graph_rows=9
    ),
}


class Variants:
    """The compilations that launches request."""

    def __init__(self) -> None:
        self._seen: set[tuple[str, str]] = set()
        self._binders: dict[str, Any] = {}

    def launch(self, function: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        """Replaces JITFunction.run."""
        del grid, warmup
        name = function.__name__
        if name not in self._binders:
            self._binders[name] = create_function_from_signature(function.signature, function.params, BACKEND)
        _bound, specialization, options = self._binders[name](*args, **kwargs)
        parameters = [parameter.name for parameter in function.params]
        self._seen.add((name, str([*zip(parameters, specialization, strict=True), options])))

    def new(self) -> set[tuple[str, str]]:
        """Return the compilations since the last call, and forget none of them."""
        seen, self._seen = self._seen, set()
        return seen


def load(engine: Engine) -> EngineCore:
    executor = CudaExecutor(
        ModelInMemory(RandomCheckpoint(engine.model, torch.bfloat16, CPU), name="random weights"),
        ModelText(_no_tokenizer),
        dtype="bfloat16",
        threads=1,
        kv_cache_memory=48 << 20,
        max_sequence_length=engine.max_sequence_length,
        max_rows=engine.max_requests,
        max_tokens=engine.max_tokens,
        graph_rows=engine.graph_rows,
        kernels=KernelConfig(**dict.fromkeys(KernelConfig.__dataclass_fields__, Backend.TRITON)),
        logprobs_mode=engine.logprobs_mode,
        device=CPU,
        functions=FakeCuda(),
    )
    executor.load()
    limits = InferenceConfig(
        max_requests=engine.max_requests,
        max_tokens=engine.max_tokens,
        max_sequence_length=engine.max_sequence_length,
        enable_chunked_prefill=True,
        logprobs_mode=engine.logprobs_mode,
    )
    return EngineCore(executor, limits)


def requests(engine: Engine) -> Iterator[EngineRequest]:
    """Yield requests with prompts of all lengths and all ways to choose a token."""
    random, nothing = np.random.default_rng(1), np.empty(0, dtype=np.int32)
    ways: list[dict[str, Any]] = [
        {"temperature": 0.0, "top_k": 1},
        {"top_p": 0.9},
        {"top_k": 20, "return_log_probs": True},
        {"return_log_probs": True, "skip_prompt_log_probs": True, "top_n_logprobs": 3},
        {"presence_penalty": 0.5},
        {"logit_bias": {3: 1.0}, "return_log_probs": True, "skip_prompt_log_probs": True},
    ]
    for number in range(REQUESTS):
        length = int(np.exp(random.uniform(0, np.log(engine.max_sequence_length - 12))))
        prompt = random.integers(1, engine.model.vocab_size, length).astype(np.int32)
        way = ways[int(random.integers(len(ways)))]
        sampling = SamplingParams(num_tokens_to_generate=int(random.integers(1, 12)), termination_id=IGNORE_EOS, **way)
        yield EngineRequest(number, prompt, nothing, sampling, seed=number)


def run(core: EngineCore, engine: Engine) -> None:
    """Run the requests, a few of which begin between two steps."""
    random = np.random.default_rng(2)
    waiting = list(requests(engine))
    while waiting or core.has_work:
        for _ in range(int(random.integers(8))):
            if waiting:
                core.add_request(waiting.pop())
        core.step()


def _no_tokenizer() -> Any:
    raise AssertionError("these engines use token ids only")


def main() -> None:
    variants = Variants()
    JITFunction.run = lambda function, *args, **kwargs: variants.launch(function, *args, **kwargs)  # type: ignore[method-assign]
    registry._check = lambda *_: None  # the kernels are not run
    paged_decode_triton._num_sms = lambda _device: MULTIPROCESSORS
    # What a kernel would write is read by the engine.
    torch.empty, torch.empty_like, torch.Tensor.new_empty = torch.zeros, torch.zeros_like, torch.Tensor.new_zeros
    report = {}
    for name, engine in ENGINES.items():
        core = load(engine)
        loaded = variants.new()
        run(core, engine)
        later: dict[str, list[str]] = {}
        for kernel, specialization in sorted(variants.new() - loaded):
            later.setdefault(kernel, []).append(specialization)
        report[name] = {"loaded": len(loaded), "later": later}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
