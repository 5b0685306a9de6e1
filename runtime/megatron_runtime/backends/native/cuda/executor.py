"""An executor that runs a model on a CUDA device.

The executor replays decode steps from CUDA graphs, and samples on the device.
"""

from __future__ import annotations

import gc
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Unpack

import numpy as np
import torch
import torch.nn.functional as F

from megatron_kernels.registry import KernelConfig, select_kernels
from megatron_kernels.sampling import NOT_FINITE
from megatron_runtime.backends.native.cuda.decoder import DeviceLinears, KernelDecoder, StagedLinears
from megatron_runtime.backends.native.cuda.device import CudaFunctions, DeviceFunctions, HostFunctions, Record
from megatron_runtime.backends.native.cuda.sampling import DeviceForwardStep, draw, rows_drawn_later
from megatron_runtime.backends.native.cuda.step_buffers import StagedStep, StepBuffers
from megatron_runtime.backends.native.executor import Int32, Int64, StepPlan
from megatron_runtime.backends.native.micro_batches import GPU, MicroBatch, StepLimits, warm_up_plans
from megatron_runtime.backends.native.torch_executor import (
    ForwardStep,
    LogitRows,
    TorchExecutor,
    TorchOptions,
    empty_routing,
)
from megatron_runtime.backends.text import ModelText
from megatron_runtime.checkpoints.source import ModelSource
from megatron_runtime.models.decoder import DecoderWeights
from megatron_runtime.process.progress import PROGRESS, Stage

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The output of a step on the device, by row.

    logits_BV: logits of the last token of each row, in the model's type.
    tokens_B, log_probs_B: int32 and float32, sampled from logits_BV; NOT_FINITE for a row with non-finite numbers.
    routing_GTJ: as in ForwardStep.
    x_TD:      hidden states of all tokens after the last layer; None for the output of a graph.
    """

    logits_BV: torch.Tensor
    tokens_B: torch.Tensor
    log_probs_B: torch.Tensor
    routing_GTJ: torch.Tensor | None
    x_TD: torch.Tensor | None = None


def graph_sizes(max_rows: int) -> tuple[int, ...]:
    """Return the numbers of rows for which graphs are captured.

    The numbers are 1, 2, 4, multiples of 8 up to 128, multiples of 16 up to 256, and then multiples of 32. The last
    number is `max_rows`. The result is empty if `max_rows` is 0.
    """
    if max_rows == 0:
        return ()
    sizes = [1, 2, 4, *range(8, 128, 8), *range(128, 256, 16), *range(256, max_rows + 1, 32)]
    return (*(size for size in sizes if size < max_rows), max_rows)


def graph_size(rows: int, sizes: Sequence[int]) -> int | None:
    """Return the number of rows to which a step of `rows` rows is padded; None if `rows` exceeds the largest graph."""
    index = bisect_left(sizes, rows)
    return sizes[index] if index < len(sizes) else None


class DecodeGraphs:
    """The CUDA graphs of decode steps. One launch from the host replays all kernels of a step, including sampling.

    run:    computes a step, given its number of rows, from buffers whose addresses do not change.
    sizes:  numbers of rows for which a step is captured, ascending.
    """

    def __init__(self, run: Callable[[int], StepOutput], sizes: Sequence[int], record: Record) -> None:
        self._captured: dict[int, tuple[Callable[[], None], StepOutput]] = {}
        # The smaller graphs fit into the memory of the largest graph, so the largest graph is captured first.
        for done, size in enumerate(reversed(sizes)):
            PROGRESS.report(Stage.CAPTURE, done, len(sizes))
            self._captured[size] = record(partial(run, size))

    @property
    def sizes(self) -> list[int]:
        """The numbers of rows of the captured steps, ascending."""
        return sorted(self._captured)

    def replay(self, size: int) -> StepOutput:
        """Compute a step of `size` rows from the buffers. The next replay overwrites the returned output."""
        replay, output = self._captured[size]
        replay()
        return output


class CudaExecutor(TorchExecutor):
    """A TorchExecutor on one CUDA device, with the operations of megatron_kernels.

    Every tensor rank samples from the same gathered logits, and the tokens of the first tensor rank are used. All
    expert ranks replay graphs of one size, so that the tensors that they exchange have equal sizes. The rank with the
    most rows determines this size.

    dtype:      "auto" (bfloat16), "bfloat16", "float16", "float32".
    max_rows, max_tokens: limits of a step.
    graph_rows: maximum number of rows of a decode step that is replayed from a CUDA graph; 0 uses no graphs.
    kernels:    None selects kernels by the environment (MEGATRON_KERNELS, MEGATRON_KERNEL_<OPERATION>).
    device:     None means the current CUDA device. Tests run the same steps on the CPU.
    functions:  graphs, streams and memory of the device; None uses CUDA for `device`.

    `buffers` are allocated with the weights. prepare() captures `graphs`, which are None after the weights or the KV
    cache are released. swap_weights() copies the staged weights over the weights in use, so the graphs stay valid.
    """

    def __init__(
        self,
        source: ModelSource,
        controller: ModelText | None = None,
        *,
        max_rows: int,
        max_tokens: int,
        graph_rows: int,
        dtype: str = "auto",
        kernels: KernelConfig | None = None,
        device: torch.device | None = None,
        functions: DeviceFunctions | None = None,
        **options: Unpack[TorchOptions],
    ) -> None:
        if dtype not in ("auto", *DTYPES):
            raise ValueError(f"dtype={dtype!r} is not supported on a GPU: use auto, {', '.join(DTYPES)}")
        type_ = DTYPES["bfloat16" if dtype == "auto" else dtype]
        device = device or torch.device("cuda")
        self.model: KernelDecoder | None = None
        self.buffers: StepBuffers | None = None
        self._max_rows, self._max_tokens = max_rows, max_tokens
        self._kernel_config = kernels or KernelConfig.from_environment()
        self._functions = functions or (CudaFunctions(device) if device.type == "cuda" else HostFunctions())
        self.graphs: DecodeGraphs | None = None
        self._is_warm = False
        self._exclusive = threading.Lock()
        """Held during captures, and while another thread stages or reads weights."""
        super().__init__(
            source,
            controller,
            device=device,
            dtype=type_,
            cache_dtype=type_,
            linears=partial(DeviceLinears, type_, device),
            staging=lambda weights: StagedLinears(type_, weights, self._functions.host_memory),
            **options,
        )
        # With pipeline stages, a step exchanges tensors with other processes between two launches.
        self._graph_sizes = graph_sizes(graph_rows) if self._sizes.pipeline == 1 else ()

    def load(self) -> None:
        super().load()
        if self._groups is None:
            try:
                self.prepare()
            except BaseException:
                self.unload()
                raise

    def prepare(self) -> None:
        """Capture all graphs. Compile the kernels first, unless all ranks have already compiled them together."""
        self._select_device()
        if self._groups is None and not self._is_warm:
            PROGRESS.report(Stage.COMPILE)
            own = StepLimits(tokens=self._max_tokens, rows=self._max_rows, length=self.max_sequence_length)
            limits = StepLimits(*map(min, GPU, own))
            for plan in warm_up_plans(self._sizes, limits, num_pages=self.num_pages, page_size=self.page_size):
                self.execute_part(plan)
            self._is_warm = True
        if self.graphs is None and self._graph_sizes:
            assert self.buffers is not None
            with self._exclusive, torch.inference_mode():
                self.buffers.clear()  # the cache may hold the keys and values of requests
                self.graphs = DecodeGraphs(self._run_decodes, self._graph_sizes, self._functions.recorder())

    def stage_weights(self, source: str) -> None:
        with self._exclusive, self._functions.aside():
            super().stage_weights(source)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        with self._exclusive, self._functions.aside():
            yield

    @torch.inference_mode()
    def swap_weights(self) -> None:
        if self._store.weights is None:
            super().swap_weights()
        else:
            self._store.swap(self._copy_into)
        self._trim_memory()

    def _copy_into(self, staged: DecoderWeights) -> DecoderWeights:
        """Copy staged weights into the model's tensors, and return the model's weights."""
        assert self.model is not None, "it has the weights in use"
        with self._functions.aside():
            for target, source in zip(self.model.weights.tensors(), staged.tensors(), strict=True):
                target.copy_(source, non_blocking=True)
        return self.model.weights

    def _select_device(self) -> None:
        if self.device.index is not None:
            torch.cuda.set_device(self.device)  # of this thread: kernels and graphs are launched on it

    def _use_model(self, weights: DecoderWeights | None) -> None:
        self.model = self.buffers = self.graphs = None
        if weights is None:
            return
        self.model = KernelDecoder(
            self.model_config,
            weights,
            select_kernels(self._kernel_config, self.device),
            device=self.device,
            max_length=self.max_sequence_length,
            shard=self._shard,
            collectives=self._groups,
        )
        self.buffers = StepBuffers(
            max_tokens=self._max_tokens,
            max_rows=self._max_rows,
            max_pages=-(-self.max_sequence_length // self.page_size),
            device=self.device,
        )

    def _forward(self, plan: StepPlan, batch: MicroBatch, cache_LPXE: torch.Tensor) -> ForwardStep | None:
        self._select_device()
        assert self.model is not None, "execute_part() checks that the weights are loaded"
        assert self.buffers is not None, "_use_model() allocates them with the model"
        model, groups, shard, tokens = self.model, self._groups, self._shard, batch.tokens_of_experts
        # Equal on every rank, because each rank has the whole plan.
        size = self._graph_size(plan, max(tokens)) if self.graphs is not None else None
        later = rows_drawn_later(batch.plan.sampling, batch.plan.needs_sample, reports_raw=self._reports_raw)
        staged = self.buffers.stage(batch.plan, later=later, decode_size=size)
        if groups is not None:
            groups.begin(tokens if size is None else (size,) * shard.sizes.expert)
        if size is not None:
            assert self.graphs is not None
            return _forward_step(model, batch.plan, staged, self.graphs.replay(size))
        if groups is None or shard.has_embedding:
            x_TD = model.embed(staged.step.token_ids_T)
        else:
            hidden = self.model_config.hidden_size
            x_TD = groups.receive_from_previous_stage(len(batch.plan.token_ids), hidden, dtype=self.dtype)
        routing_GTJ = self._new_routing(len(x_TD))
        x_TD = model.run_layers(x_TD, staged.step, cache_LPXE, routing_GTJ)
        if groups is None or shard.has_head:
            return _forward_step(model, batch.plan, staged, _sample(model, x_TD, staged, routing_GTJ))
        self._send_to_next_stage(x_TD, routing_GTJ)
        return None

    def _run_decodes(self, size: int) -> StepOutput:
        """Compute a step of `size` decodes from the buffers. Graphs capture this method."""
        assert self.model is not None
        assert self.buffers is not None
        if self._groups is not None:
            self._groups.begin((size,) * self._sizes.expert)
        step = self.buffers.step(size, tokens=size, decodes=size)
        routing_GTJ = empty_routing(self.model_config, size, self.device) if self.records_routing else None
        logits_BV = self.model.logits(self.model(step, self.cache_LPXE, routing_GTJ))
        return StepOutput(logits_BV, *draw(self.model.kernels.sample, logits_BV, step), routing_GTJ)

    def _graph_size(self, plan: StepPlan, rows: int) -> int | None:
        """Return the size of the graph to replay for `rows` rows of the plan.

        Returns None if the plan has prompts or no graph is large enough. In this case, the host launches each kernel.
        """
        batch = plan.sampling
        reports_prompts = bool(batch.prompt_targets) or bool(batch.returns_hidden.any())
        is_decodes = bool((plan.query_lengths == 1).all()) and not reports_prompts
        return graph_size(rows, self._graph_sizes) if is_decodes else None

    def release_kv(self, keep_pages: Int64 | None) -> None:
        self.graphs = None  # they were captured with the address of the KV cache
        super().release_kv(keep_pages)

    @property
    def captured_sizes(self) -> list[int]:
        """The numbers of rows of the decode steps that are captured as graphs, ascending."""
        return [] if self.graphs is None else self.graphs.sizes

    def _trim_memory(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def profile(self, active: bool) -> None:
        if self.device.type != "cuda":
            super().profile(active)
        torch.cuda.synchronize(self.device)  # earlier launches are not part of the range
        if active:
            torch.cuda.profiler.start()
        else:
            torch.cuda.profiler.stop()


def _sample(
    model: KernelDecoder, x_TD: torch.Tensor, staged: StagedStep, routing_GTJ: torch.Tensor | None
) -> StepOutput:
    starts = np.concatenate([[0], staged.ends[:-1]])
    start_B, end_B = torch.from_numpy(np.stack([starts, staged.ends])).to(x_TD.device)
    logits_BV = model.logits(x_TD.index_select(0, end_B - 1))
    # A hidden state that is not finite fails its row, whichever token it belongs to.
    is_bad_T = ~x_TD.isfinite().all(dim=1)
    bad_before_T = F.pad(is_bad_T.cumsum(0), (1, 0))
    is_bad_B = bad_before_T[end_B] > bad_before_T[start_B]
    tokens_B, log_probs_B = draw(model.kernels.sample, logits_BV, staged.step)
    return StepOutput(logits_BV, tokens_B.masked_fill(is_bad_B, NOT_FINITE), log_probs_B, routing_GTJ, x_TD)


def _forward_step(model: KernelDecoder, plan: StepPlan, staged: StagedStep, output: StepOutput) -> ForwardStep:
    at = np.flatnonzero(plan.needs_sample[staged.rows])
    targets = []
    for row, tokens in plan.sampling.prompt_targets.items():
        end = int(staged.ends[np.flatnonzero(staged.rows == row)[0]])
        first = end - int(plan.query_lengths[row])
        targets.append((row, slice(first, first + len(tokens))))
    ends, x_TD = staged.ends[at] - 1, output.x_TD

    @cache
    def read_tokens() -> Int32:
        return output.tokens_B.cpu().numpy()

    def not_finite() -> Int64:
        prompts = np.flatnonzero(plan.query_lengths[staged.rows] > 1)
        return staged.rows[prompts[read_tokens()[prompts] == NOT_FINITE]] if len(prompts) else prompts

    def hidden_of(which: Int64) -> torch.Tensor:
        assert x_TD is not None, "a step that returns hidden states is not replayed from a graph"
        return model.finish(x_TD.index_select(0, torch.from_numpy(ends[which]).to(x_TD.device)))

    return DeviceForwardStep(
        rows=LogitRows(order=staged.rows, sampled_rows=staged.rows[at], targets=targets),
        logits_BV=output.logits_BV,
        logits_of=model.logits,
        hidden_of=hidden_of,
        not_finite=not_finite,
        x_TD=x_TD,
        routing_GTJ=output.routing_GTJ,
        staged=staged,
        at=at,
        kernel=model.kernels.sample,
        tokens_B=output.tokens_B,
        log_probs_B=output.log_probs_B,
        read_tokens=read_tokens,
    )
