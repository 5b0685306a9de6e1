"""One rank of an engine without a coordinator: rank 0 answers the given prompts, the other ranks follow it.

Options:
  model; tensor, pipeline, expert; prompts; rendezvous_seconds; step_timeout_seconds
  sampling       fields of SamplingParams, one dict per prompt
  failing        numbers of the prompts that fail: their answers have an `error`
  records_routing: answers have the experts of each token
  imports        blocks of prompts that another engine has exported; see exchange()
  suspend_after  number of steps after which the engine is suspended and resumed
  forever        repeat the prompts without end and send "step" each time
  kernels        use the GPU forward pass on the CPU; "graphs": pad decode steps as for CUDA graphs
  environment    variables by rank
  tcp            connect by TCP and gloo, as ranks of several hosts
  fail           (rank, name of a method of TorchExecutor, number of times): the method raises on that rank
  hang           (rank, one of HANGS, number of orders): the rank hangs in layer 1 after that many orders
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fake_cuda import FakeCuda

from megatron_runtime.backends.native.cpu.executor import CpuExecutor
from megatron_runtime.backends.native.cuda.executor import CudaExecutor
from megatron_runtime.backends.native.engine import EngineCore
from megatron_runtime.backends.native.executor import Executor
from megatron_runtime.backends.native.micro_batches import expert_of_pages
from megatron_runtime.backends.native.ranked.executor import RankedExecutor, end_with, follow, lead
from megatron_runtime.backends.native.torch_executor import TorchExecutor
from megatron_runtime.checkpoints.source import ModelSource, resolve
from megatron_runtime.distributed.errors import RankError
from megatron_runtime.distributed.groups import Groups
from megatron_runtime.distributed.local_group import LocalGroup
from megatron_runtime.distributed.shard import FOLDER_VARIABLE, ParallelSizes, rank_identity
from megatron_runtime.engine.engine_request import EngineRequest, RequestOutput
from megatron_runtime.engine.settings import EngineSettings
from megatron_runtime.process import logs
from megatron_runtime.requests.config import InferenceConfig
from megatron_runtime.requests.sampling_params import IGNORE_EOS, SamplingParams

KV_CACHE_MEMORY = 4 << 20
SLOW_SECONDS = 1.5
HANGS_NOW = "hangs from now on: "
"""Printed to standard error, followed by the time of the monotonic clock."""


def _compute(seconds: float) -> None:
    """Compute in a library that releases the interpreter lock."""
    began = time.thread_time()
    hashlib.pbkdf2_hmac("sha256", b"", b"", 100_000)
    rounds = int(100_000 * seconds / (time.thread_time() - began))
    hashlib.pbkdf2_hmac("sha256", b"", b"", max(1, min(rounds, 2**31 - 1)))


def _loop() -> None:
    while True:
        pass


def _hang_in_next_all_reduce() -> None:
    """The other ranks complete the collective; this one never returns from it."""
    all_reduce = LocalGroup.all_reduce

    def hang(self: LocalGroup, tensor: torch.Tensor) -> None:
        all_reduce(self, tensor)
        threading.Event().wait()

    LocalGroup.all_reduce = hang  # type: ignore[method-assign]


HANGS: dict[str, Callable[[], object]] = {
    "blocks": lambda: threading.Event().wait(),
    "blocks in a collective": _hang_in_next_all_reduce,
    "loops": _loop,
    "computes for ever": lambda: _compute(1e9),
    "computes": lambda: _compute(SLOW_SECONDS),
    "holds the interpreter": lambda: ctypes.PyDLL(None).sleep(10**6),
}


def _config() -> InferenceConfig:
    return InferenceConfig(block_size_tokens=16, enable_prefix_caching=True)


def answers(executor: Executor, options: dict[str, Any]) -> dict[str, Any]:
    """Return an engine's answers to the prompts, computed by `executor`."""
    return _answers(EngineCore(executor, _config()), options)


def exchange(executor: Executor, options: dict[str, Any]) -> dict[str, Any]:
    """Import blocks from another engine, answer the prompts, and export the blocks of the prompts.

    Reads and writes that fail are repeated.

    The results:
      answers  as of answers()
      computed number of prompt tokens that were computed for the answers
      layout   the executor's kv_layout
      exports  for each prompt, the digests of its blocks, and their bytes
      owners   expert rank of each import or else of each export
      errors   messages of reads and writes that failed
    """
    engine = EngineCore(executor, _config())
    transfers = engine.context.transfers
    owners: dict[int, int] = {}
    errors: list[str] = []

    def owner(table: np.ndarray) -> int:
        return int(expert_of_pages(table[0, :1], executor.expert_size)[0])

    def repeated(call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except RankError as error:
            errors.append(str(error))
            return call(*arguments)

    for number, (digests, data) in reversed(list(enumerate(options["imports"]))):  # to other pages than in the exporter
        assert transfers.reserve(number, digests) == 0
        table = transfers.reserved(number)
        owners[number] = owner(table)
        repeated(executor.write_blocks, table, range(len(digests)), data)
        transfers.complete(number)
    found = _answers(engine, options)
    computed = engine.stats().prompt_tokens
    exports = []
    for number, prompt in enumerate(options["prompts"]):
        tokens, none = np.array(prompt, np.int32), np.empty(0, np.int32)
        engine.add_request(EngineRequest(number, tokens, none, SamplingParams(), number, prefill_only=True))
        outputs: list[RequestOutput] = []
        while engine.has_work:
            outputs += engine.step()
        assert outputs[-1].exported is not None
        digests = outputs[-1].exported.digests
        table = transfers.exported(number)
        owners.setdefault(number, owner(table))
        exports.append((digests, repeated(executor.read_blocks, table, range(len(digests)))))
    return {
        "answers": found,
        "computed": computed,
        "layout": executor.kv_layout,
        "exports": exports,
        "owners": owners,
        "errors": errors,
    }


def _answers(engine: EngineCore, options: dict[str, Any]) -> dict[str, Any]:
    """Return the answers of `engine`.

    top, prompt_top: for each token the likeliest ones, as in EngineOutput.
    """
    found: dict[int, dict[str, list[Any]]] = {}
    for index, (prompt, sampling) in enumerate(zip(options["prompts"], options["sampling"], strict=True)):
        params = SamplingParams(num_tokens_to_generate=12, termination_id=IGNORE_EOS, **sampling)
        found[index] = {name: [] for name in ("tokens", "log_probs", "prompt_log_probs", "top", "prompt_top")}
        engine.add_request(EngineRequest(index, np.array(prompt, np.int32), np.empty(0, np.int32), params, index))
    steps = 0
    while engine.has_work:
        for output in engine.step():
            one = found[output.request_id]
            if output.error is not None:
                assert output.request_id in options.get("failing", ()), output.error
                one["error"] = [str(output.error)]
            one["tokens"] += output.new_tokens
            one["log_probs"] += output.new_log_probs or []
            one["prompt_log_probs"] += output.prompt_log_probs or []
            one["top"] += output.new_top_n_logprobs or []
            one["prompt_top"] += output.prompt_top_n_logprobs or []
            if output.routing is not None:
                one["routing"] = output.routing.tolist()
        steps += 1
        if steps == options.get("suspend_after"):
            engine.suspend()
            engine.resume()
    engine.check_integrity()
    return found


def be_rank(
    options: dict[str, Any], rank: int, world: int, port: int, folder: str, log: str, messages: Connection | None
) -> None:
    """Run one rank's process. folder: of the sockets of the ranks."""
    errors = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(errors, sys.stderr.fileno())
    end = Path(f"{log}.end")
    end.touch()
    # The path of the termination message is a default argument.
    logs.write_termination_message.__defaults__ = (end,)
    os.environ.update(options.get("environment", {}).get(rank, {}))
    place = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world}
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    if not options.get("tcp"):
        os.environ[FOLDER_VARIABLE] = folder
    sizes = ParallelSizes(tensor=options["tensor"], pipeline=options["pipeline"], expert=options["expert"])
    settings = EngineSettings(
        coordinator="tcp://127.0.0.1:1",
        name="engine-0",
        model=options["model"],
        dtype="float32",
        threads=1,
        kv_cache_memory=KV_CACHE_MEMORY,
        parallel=sizes,
        rendezvous_seconds=options.get("rendezvous_seconds", 60),
        step_timeout_seconds=options.get("step_timeout_seconds", 60),
    )
    identity = rank_identity(sizes)
    assert identity is not None
    _plant_failure(options, rank)

    def part(source: ModelSource, groups: Groups) -> TorchExecutor:
        make_executor: Callable[..., TorchExecutor] = CpuExecutor
        if options.get("kernels"):
            make_executor = executor_of_kernels(has_graphs=options["kernels"] == "graphs")
        return make_executor(
            source,
            dtype="float32",
            threads=1,
            kv_cache_memory=KV_CACHE_MEMORY,
            groups=groups,
            records_routing=options.get("records_routing", False),
        )

    try:
        if rank == 0:
            assert messages is not None
            _lead(lead(settings, identity, partial(resolve, settings.model), part), options, messages)
        else:
            follow(settings, identity, partial(resolve, settings.model), part)
    except RankError as error:
        end_with(error)


def _plant_failure(options: dict[str, Any], rank: int) -> None:
    if options.get("hang", [None])[0] == rank:
        _plant_hang(*options["hang"][1:])
    if options.get("fail", [None])[0] != rank:
        return
    _, name, times = options["fail"]
    method, left = getattr(TorchExecutor, name), [times]

    def failing(self: TorchExecutor, *arguments: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise ValueError(f"{name} fails: injected fault")
        return method(self, *arguments)

    setattr(TorchExecutor, name, failing)


def _plant_hang(how: str, after: int) -> None:
    begin_layer = Groups.begin_layer

    def begin_and_hang(self: Groups, number: int) -> None:
        begin_layer(self, number)
        if number == 1 and self.progress.done >= after:
            Groups.begin_layer = begin_layer  # type: ignore[method-assign]
            print(f"{HANGS_NOW}{time.monotonic()}", file=sys.stderr, flush=True)
            HANGS[how]()

    Groups.begin_layer = begin_and_hang  # type: ignore[method-assign]


def executor_of_kernels(*, has_graphs: bool) -> Callable[..., TorchExecutor]:
    """Return the GPU's executor on the CPU, with torch's references of the kernels."""
    config = _config()
    return partial(
        CudaExecutor,
        max_rows=config.request_slots,
        max_tokens=config.step_tokens,
        graph_rows=config.request_slots if has_graphs else 0,
        device=torch.device("cpu"),
        functions=FakeCuda(),
    )


def _lead(executor: RankedExecutor, options: dict[str, Any], messages: Connection) -> None:
    executor.watch(on_failure=lambda _error: None, on_leave=lambda: messages.send("leave"))
    try:
        _answer(executor, options, messages)
    except RankError as error:
        executor.end(error)
        raise
    executor.end(None)


def _answer(executor: RankedExecutor, options: dict[str, Any], messages: Connection) -> None:
    try:
        executor.load()
    except (RankError, ValueError) as error:
        messages.send(str(error))
        executor.load()
    while options.get("forever"):
        answers(executor, options)
        messages.send("step")
    messages.send((exchange if "imports" in options else answers)(executor, options))
