"""The engine of Megatron-Core in a process on the CPU: its own queues, coordinator loop, records and states.

Only the parts that need a GPU are replaced: events, memory statistics, the context's tensors, and the model. The next
token is always the last token plus 1. Socket and messages are Megatron's own.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import torch
from gpt_models import patch_for_cpu
from gpt_program import begin_single_rank
from megatron.core.inference.config import InferenceConfig
from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext
from megatron.core.inference.engines import dynamic_engine
from megatron.core.inference.text_generation_controllers.text_generation_controller import (
    DecodeOnly,
    DynamicBatchControllerStepResult,
    TextGenerationController,
)

STEP_SECONDS = 0.005
MAX_TOKENS = 512


class Event:
    """Replaces torch.cuda.Event."""

    def __init__(self, **_: Any) -> None:
        self.time = 0.0

    def record(self) -> None:
        self.time = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: Event) -> float:
        return 1000 * (end.time - self.time)


class Context(DynamicInferenceContext):  # type: ignore[misc]
    """Has a list of active requests instead of tensors on a GPU.

    report: called with "suspended", "resumed", "paused" and ("epoch", number).
    """

    def __init__(self, report: Callable[[Any], object]) -> None:
        self.report = report
        self.config = InferenceConfig(static_kv_memory_pointers=True)
        self.kv_cache_management_mode, self.static_kv_memory_pointers = self.config.kv_cache_management_mode, True
        self.block_size_tokens, self.enable_prefix_caching = 16, False
        self.max_sequence_length, self.max_tokens, self.max_requests = MAX_TOKENS, MAX_TOKENS, 64
        self.chunked_prefill_request_id = -1
        self.paused_request_count = self.num_prefill_requests = self.step_count = self.prefix_cache_lru_clock = 0
        self.kv_block_allocator = SimpleNamespace(total_count=1 << 20)
        self.active: list[int] = []

    @property
    def total_request_count(self) -> int:
        return len(self.active)

    active_token_count = num_decode_requests = total_request_count

    def reset(self) -> None:
        self.active.clear()

    def get_active_request_count(self) -> int:
        return len(self.active)

    def is_decode_only(self) -> bool:
        return True

    def check_availability(self, _request: Any) -> tuple[bool, bool, bool]:
        return True, True, True

    def add_request(self, request: Any, prefill_chunk_length: int | None = None) -> None:
        self.active.append(request.request_id)

    def deallocate_inference_state_buffers(self) -> None:
        self.report("suspended")

    def reinitialize_inference_state_buffers(self) -> None:
        self.report("resumed")


class Controller(TextGenerationController):  # type: ignore[misc]
    """Generates without a model."""

    num_mtp_depths = 0

    def __init__(self, context: Context) -> None:
        self.context = context
        self.engine: Any = None
        config = SimpleNamespace(
            cuda_graph_impl="none",
            inference_cuda_graph_scope=None,
            cuda_graph_modules=[],
            moe_enable_routing_replay=False,
        )
        self.inference_wrapped_model = SimpleNamespace(model=SimpleNamespace(config=config))
        self.tokenizer = SimpleNamespace(
            tokenize=lambda text: [int(word) for word in text.split()],
            detokenize=lambda tokens: " ".join(map(str, tokens)),
            bos=None,
            eod=-1,
        )

    def set_stop_word_finished_ids_callback(self, callback: Any) -> None:
        pass

    def dummy_forward(self) -> None:
        pass

    async def async_generate_output_tokens_dynamic_batch(self, **_: Any) -> DynamicBatchControllerStepResult:
        await asyncio.sleep(STEP_SECONDS)
        ids, sample, finished = list(self.context.active), [], []
        for number in ids:
            request = self.engine.get_request(number)
            held = [*request.prompt_tokens.tolist(), *request.generated_tokens]
            sample.append(held[-1] + 1)
            if len(request.generated_tokens) + 1 >= request.sampling_params.num_tokens_to_generate:
                finished.append(number)
                self.context.active.remove(number)
        output = {
            "active_request_ids": torch.tensor(ids),
            "finished_request_ids": torch.tensor(finished),
            "sample": torch.tensor(sample),
            "accepted_tokens": None,
            "log_probs": None,
            "cuda_graph_request_count": None,
        }
        return DynamicBatchControllerStepResult(output=output, decode_only=DecodeOnly(consumed=True, launched=None))


def be_engine(coordinator: str, rendezvous: int, report: Connection) -> None:
    """Serve the coordinator until STOP. Send the states that the engine enters, and each new epoch."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    patch_for_cpu()
    torch.set_num_threads(1)
    torch.cuda.Event = Event  # type: ignore[assignment, misc]
    torch.cuda.synchronize = lambda: None  # type: ignore[assignment]
    torch.cuda.memory_stats = lambda: dict.fromkeys(  # type: ignore[assignment]
        ("allocated_bytes.all.current", "reserved_bytes.all.current"), 0
    )
    begin_single_rank(rendezvous)
    asyncio.run(_serve(int(coordinator.rpartition(":")[2]), report.send))


class Engine(dynamic_engine.DynamicInferenceEngine):  # type: ignore[misc]
    """Reports the beginning of each pause and each epoch. Polling the state would miss short ones."""

    def __setattr__(self, name: str, value: Any) -> None:
        is_new = getattr(self, name, None) != value
        super().__setattr__(name, value)
        if name == "state" and is_new and value is dynamic_engine.EngineState.PAUSED:
            self.context.report("paused")
        elif name == "_generation_epoch" and is_new:
            self.context.report(("epoch", value))


async def _serve(port: int, report: Callable[[Any], object]) -> None:
    context = Context(report)
    controller = Controller(context)
    engine = controller.engine = Engine(controller, context)
    await engine.start_listening_to_data_parallel_coordinator(
        port, launch_inference_coordinator=False, hostname="127.0.0.1"
    )
    await engine.engine_loop_task
    report("stopped")
