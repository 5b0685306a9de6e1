"""Ranks of Megatron-Core: each builds its part of a GPTModel and runs its rank of an engine on it.

The ranks are forked from the tests' process, because the import of Megatron-Core takes six seconds.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from eventually import LONG_SECONDS
from gpt_models import VOCAB, fill, logits_and_routing, make_gpt, patch_for_cpu
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from rank_program import answers

from megatron_runtime.backends.native.build import select_executor
from megatron_runtime.backends.native.cpu.executor import CpuExecutor
from megatron_runtime.backends.native.executor import Executor
from megatron_runtime.backends.native.ranked.executor import follow, lead
from megatron_runtime.backends.text import ModelText
from megatron_runtime.checkpoints.in_memory import model_in_memory
from megatron_runtime.checkpoints.source import IN_MEMORY, ModelInMemory, ModelSource
from megatron_runtime.cli.processes import free_ports
from megatron_runtime.distributed.groups import Groups
from megatron_runtime.distributed.shard import ParallelSizes, RankIdentity
from megatron_runtime.engine.settings import EngineSettings
from megatron_runtime.requests.config import InferenceConfig
from megatron_runtime.tokenization import load_tokenizer

PROMPTS = [[5, 9, 200, 31, 7], [17], list(range(40, 80))]
SAMPLING = {"temperature": 0.0, "return_log_probs": True, "skip_prompt_log_probs": False, "top_n_logprobs": VOCAB}
OPTIONS: dict[str, Any] = {"prompts": PROMPTS, "sampling": [SAMPLING] * len(PROMPTS)}
KV_CACHE_MEMORY = 4 << 20
Send = Callable[[Any], None]


@dataclass(frozen=True)
class Job:
    """An engine of `sizes` ranks for a case of gpt_models.CASES, before and after the model has new weights."""

    case: str
    sizes: ParallelSizes = field(default_factory=ParallelSizes)


@dataclass
class Result:
    """Results of a job with the weights of seed 0, and then with the weights of seed 1.

    answers: the answers, with the log-probabilities of the whole vocabulary.
    logits, expected: logits [T, V] of our engine and of Megatron, for each prompt with its answer. Set for engines of
        one rank only.
    routing: the experts that Megatron records for each of these tokens. Set for engines of one rank only.
    """

    answers: list[dict[int, dict[str, list[Any]]]]
    logits: list[list[npt.NDArray[Any]]]
    expected: list[list[npt.NDArray[Any]]]
    routing: list[list[list[Any] | None]]


def distributions(answer: dict[str, list[Any]]) -> npt.NDArray[Any]:
    """Return the log-probabilities [T, V] of an answer: at each token of prompt and answer but the first."""
    lines = [*answer["prompt_top"], *answer["top"]]
    return np.array([[value for _, value in sorted(line)] for line in lines])


def run_ranks(job: Job) -> Result:
    """Run `job`, each rank in a process, and return the result of rank 0."""
    return in_processes(job.sizes.world, _be_rank, job)


def in_processes(world: int, work: Callable[..., None], *arguments: Any) -> Any:
    """Call work(rank, port, send, *arguments) in `world` processes, and return the value of the first send() call.

    port: a free port for the rendezvous. All processes must end without an error.
    """
    assert not dist.is_initialized(), "a process group does not survive a fork"
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    (port,) = free_ports(1)
    ranks = [fork.Process(target=_begin, args=(work, rank, port, sender.send, *arguments)) for rank in range(world)]
    for process in ranks:
        process.start()
    sender.close()
    try:
        while not receiver.poll():
            sentinels = [process.sentinel for process in ranks if process.is_alive()]
            assert wait([receiver, *sentinels], LONG_SECONDS), "no process sends a result"
            assert not any(process.exitcode for process in ranks), "a process failed"
        result = receiver.recv()
        for process in ranks:
            process.join(LONG_SECONDS)
        assert [process.exitcode for process in ranks] == [0] * world
    finally:
        for process in ranks:
            process.kill()
            process.join()
    return result


def _begin(work: Callable[..., None], rank: int, port: int, *arguments: Any) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    patch_for_cpu()
    torch.set_num_threads(1)
    work(rank, port, *arguments)


def begin_single_rank(port: int) -> None:
    """Initialise torch.distributed and Megatron's parallel state for one rank."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()


def _be_rank(rank: int, port: int, send: Send, job: Job) -> None:
    if job.sizes.world == 1:
        begin_single_rank(port)
        send(_one_rank(make_gpt(job.case)))
    else:
        _several_ranks(job, rank, port, send)


def _make_part(job: Job) -> GPTModel:
    sizes = job.sizes
    parallel_state.initialize_model_parallel(sizes.tensor, sizes.pipeline, expert_model_parallel_size=sizes.expert)
    return make_gpt(job.case, sizes=sizes)


def _executor(source: ModelSource, groups: Groups | None = None) -> CpuExecutor:
    text = ModelText(lambda: load_tokenizer("builtin:smollm2-135m"))
    config = InferenceConfig(buffer_size_gb=KV_CACHE_MEMORY / (1 << 30))
    executor = select_executor(
        source,
        text,
        config,
        device="cpu",
        dtype="float32",
        threads=1,
        kv_cache_memory=config.buffer_bytes,
        groups=groups,
    )
    assert isinstance(executor, CpuExecutor)
    return executor


def _logits_of_engine(executor: CpuExecutor, prompt: list[int]) -> npt.NDArray[Any]:
    """Return the logits [T, V] that the engine's sampler gets for a prompt and its answer but the last token."""
    steps: list[npt.NDArray[Any]] = []
    forward = executor._forward

    def record(*arguments: Any) -> Any:
        step = forward(*arguments)
        assert step is not None, "one rank is the last pipeline stage"
        steps.extend(part.numpy().copy() for _, _, part in step.prompt_logits())
        steps.append(step.sampled_logits().copy())
        return step

    executor._forward = record  # type: ignore[method-assign]
    answers(executor, {"prompts": [prompt], "sampling": [SAMPLING]})
    executor._forward = forward  # type: ignore[method-assign]
    return np.concatenate(steps)


def _one_rank(model: GPTModel) -> Result:
    executor = _executor(model_in_memory(model))
    executor.load()
    result = Result([], [], [], [])
    for seed in range(2):
        if seed:
            fill(model, seed)
            _swap(executor)
        found = answers(executor, OPTIONS)
        with torch.inference_mode():
            of_megatron = [
                logits_and_routing(model, [*prompt, *found[at]["tokens"][:-1]]) for at, prompt in enumerate(PROMPTS)
            ]
        result.answers.append(found)
        result.logits.append([_logits_of_engine(executor, prompt) for prompt in PROMPTS])
        result.expected.append([logits.numpy() for logits, _ in of_megatron])
        result.routing.append([None if experts is None else experts.tolist() for _, experts in of_megatron])
    return result


def _several_ranks(job: Job, rank: int, port: int, send: Send) -> None:
    """Run one rank of an engine, which initialises torch.distributed. Megatron's groups then use the same ranks."""
    sizes, models = job.sizes, []
    identity = RankIdentity(
        rank=rank, world=sizes.world, local_rank=rank, local_world=sizes.world, address="127.0.0.1", port=port
    )
    settings = EngineSettings(
        coordinator="tcp://127.0.0.1:1", name="engine-0", dtype="float32", threads=1, parallel=sizes
    )

    def make_executor(_source: ModelSource, groups: Groups) -> CpuExecutor:
        models.append(_make_part(job))
        if rank != 0:
            threading.Thread(target=_train, args=models).start()
        return _executor(model_in_memory(models[0]), groups)

    def no_files() -> ModelSource:
        return ModelInMemory(None, "a model that is made later")

    if rank != 0:
        follow(settings, identity, no_files, make_executor)
        return
    executor = lead(settings, identity, no_files, make_executor)
    executor.load()
    before = answers(executor, OPTIONS)
    _train(models[0])
    _swap(executor)
    send(Result([before, answers(executor, OPTIONS)], [], [], []))
    executor.end(None)


def _train(model: GPTModel) -> None:
    """Change the weights when every rank has its first answers, and return when all ranks have changed theirs."""
    dist.barrier()
    fill(model, seed=1)
    dist.barrier()


def _swap(executor: Executor) -> None:
    executor.stage_weights(IN_MEMORY)
    executor.swap_weights()
