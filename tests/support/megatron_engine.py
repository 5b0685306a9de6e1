"""The engine of Megatron-Core 0.16.1 in a process on the CPU: its own queues, coordinator loop, records and states.

Replaced are what needs a GPU (events, memory statistics, the context's tensors, the model: each token is the one before
plus one) and, between the engine and its socket, the messages of that release: `Documented` converts them.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import msgpack
import torch
from gpt_models import patch_for_cpu
from gpt_program import begin_single_rank
from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext
from megatron.core.inference.engines import dynamic_engine
from megatron.core.inference.text_generation_controllers.text_generation_controller import TextGenerationController

STEP_SECONDS = 0.005
SUBMIT_REQUEST = 20


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

    report: called with "suspended" and "resumed".
    """

    def __init__(self, report: Callable[[Any], object]) -> None:
        self._report = report
        self.unified_memory_level, self.persist_cuda_graphs = 0, True
        self.max_sequence_length, self.max_tokens, self.max_requests = 512, 512, 64
        self.materialize_only_last_token_logits = True
        self.chunked_prefill_request_id = -1
        self.paused_request_count = self.padded_active_token_count = 0
        self.metrics_writer = None
        self.block_allocator = SimpleNamespace(
            active_count=0, paused_count=0, get_active_used=lambda: 0, get_paused_used=lambda: 0
        )
        self.active: list[int] = []

    @property
    def total_request_count(self) -> int:
        return len(self.active)

    active_token_count = total_request_count

    def reset(self) -> None:
        self.active.clear()

    def get_active_request_count(self) -> int:
        return len(self.active)

    def is_decode_only(self) -> bool:
        return True

    def using_cuda_graph_this_step(self) -> bool:
        return False

    def check_availability(self, _request: Any) -> tuple[bool, bool, bool]:
        return True, True, True

    def add_request(self, request: Any) -> None:
        self.active.append(request.request_id)

    def deallocate_all_tensors(self) -> None:
        self._report("suspended")

    def allocate_all_tensors(self, *, is_init: bool) -> None:
        self._report("resumed")


class Controller(TextGenerationController):  # type: ignore[misc]
    """Generates without a model."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.engine: Any = None
        self.tokenizer = SimpleNamespace(
            tokenize=lambda text: [int(word) for word in text.split()],
            detokenize=lambda tokens: " ".join(map(str, tokens)),
            bos=None,
            eod=-1,
        )

    def set_stop_word_finished_ids_callback(self, callback: Any) -> None:
        pass

    async def async_generate_output_tokens_dynamic_batch(self) -> dict[str, Any]:
        await asyncio.sleep(STEP_SECONDS)
        ids, sample, finished = list(self.context.active), [], []
        for number in ids:
            request = self.engine.get_request(number)
            held = [*request.prompt_tokens.tolist(), *request.generated_tokens]
            sample.append(held[-1] + 1)
            if len(request.generated_tokens) + 1 >= request.sampling_params.num_tokens_to_generate:
                finished.append(number)
                self.context.active.remove(number)
        return {
            "active_request_ids": torch.tensor(ids),
            "finished_request_ids": torch.tensor(finished),
            "sample": torch.tensor(sample),
            "log_probs": None,
            "cuda_graph_request_count": None,
        }


class Documented:
    """Converts the documented messages to those of release 0.16.1, which acknowledges PAUSE and STOP.

    report: called with each message that the release does not have, which is dropped, and with "paused" and "stopped".
    """

    def __init__(self, socket: Any, numbers: Any, report: Callable[[Any], object]) -> None:
        self._socket = socket
        self._numbers = numbers
        self._known = {header.value for header in numbers}
        self._acknowledgements: deque[bytes] = deque()
        self._report = report

    def recv(self, flags: int) -> bytes:
        """Return the next message. Raises zmq.Again."""
        if self._acknowledgements:
            message = self._acknowledgements.popleft()
            self._report("paused" if msgpack.unpackb(message)[0] == self._numbers.PAUSE_ACK.value else "stopped")
            return message
        while True:
            items = msgpack.unpackb(self._socket.recv(flags))
            if items[0] in self._known:
                return bytes(msgpack.packb(items[:4] if items[0] == SUBMIT_REQUEST else items))
            self._report(items)

    def send(self, message: bytes) -> None:
        """Send an answer. The coordinator of that release returns an acknowledgement when it has that of every engine,
        of which there is one here.
        """
        if msgpack.unpackb(message)[0] in (self._numbers.PAUSE_ACK.value, self._numbers.STOP_ACK.value):
            self._acknowledgements.append(message)
        else:
            self._socket.send(message)


def be_engine(coordinator: str, rendezvous: int, numbers: Any, report: Connection) -> None:
    """Serve the coordinator until STOP. Send what the context and `Documented` report."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    patch_for_cpu()
    torch.set_num_threads(1)
    torch.cuda.Event = Event  # type: ignore[assignment, misc]
    torch.cuda.synchronize = lambda: None  # type: ignore[assignment]
    torch.cuda.memory_stats = lambda: dict.fromkeys(  # type: ignore[assignment]
        ("allocated_bytes.all.current", "reserved_bytes.all.current"), 0
    )
    module: Any = dynamic_engine
    module.range_push = module.range_pop = lambda *_: None
    module.Headers = numbers
    module.socket.gethostname = lambda: "127.0.0.1"
    begin_single_rank(rendezvous)
    asyncio.run(_serve(int(coordinator.rpartition(":")[2]), numbers, report.send))


async def _serve(port: int, numbers: Any, report: Callable[[Any], object]) -> None:
    context = Context(report)
    controller = Controller(context)
    engine = controller.engine = dynamic_engine.DynamicInferenceEngine(
        controller, context, enable_cuda_graph=False, random_seed=0, enable_chunked_prefill=False
    )
    await engine.start_listening_to_data_parallel_coordinator(port, launch_inference_coordinator=False)
    engine.socket_for_receiving_requests = Documented(engine.socket_for_receiving_requests, numbers, report)
    await engine.engine_loop_task
