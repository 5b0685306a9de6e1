"""The base class of executors that run a model with torch, on the CPU or on a GPU."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Required, TypedDict

import numpy as np
import numpy.typing as npt
import torch

from megatron_kernels.cpu.cores import default_threads
from megatron_runtime.backends.native.executor import Int32, Int64, NoCudaProfilerError, StepPlan, StepResult
from megatron_runtime.backends.native.memory import KVPool, require_memory, unset_cache_bytes
from megatron_runtime.backends.native.micro_batches import MicroBatch, Rows, cut, merge
from megatron_runtime.backends.native.weight_store import WeightStore
from megatron_runtime.backends.text import ModelText
from megatron_runtime.checkpoints.source import ModelInMemory, ModelSource
from megatron_runtime.distributed.groups import Groups
from megatron_runtime.distributed.shard import ParallelSizes, Shard
from megatron_runtime.models.config import ModelConfig
from megatron_runtime.models.decoder import DecoderWeights
from megatron_runtime.models.layers.linear import LinearFactory
from megatron_runtime.models.weights import require_divisible
from megatron_runtime.requests.config import LogprobsMode
from megatron_runtime.sampling.batch import Float32, SamplingBatch
from megatron_runtime.sampling.sampler import LogProbs, log_probs, sample_rows, sample_step

if TYPE_CHECKING:
    from megatron_runtime.distributed.weight_port import WeightPort

Parts = list[tuple[Rows, StepResult]]

LOGIT_ROWS = 64
"""Number of prompt tokens whose logits are computed at a time. They take 32 MiB with a vocabulary of 128k."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitRows:
    """The rows of a plan in a forward pass, and the tokens whose logits are needed.

    order:        int64 [n]; the plan's rows, in the order of their tokens in the forward pass.
    sampled_rows: int64 [n]; the plan's rows that need a token.
    targets:      pairs (row of the plan, indices in x_TD). The logits at these indices predict the prompt targets of
                  the row.
    """

    order: Int64
    sampled_rows: Int64
    targets: list[tuple[int, slice]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardStep:
    """The output of a forward pass, from which the host samples. This class implements StepLogits.

    rows:         the plan's rows and tokens to which the rows of logits_BV, x_TD and routing_GTJ belong.
    logits_BV:    logits of rows.sampled_rows, in the model's dtype.
    logits_of:    computes logits_NV from x_ND, hidden states after the last layer.
    hidden_of:    computes x_ND, the hidden states of some of sampled_rows after the last norm.
    not_finite:   returns the result of rows_not_finite().
    x_TD:         hidden states of prompt tokens after the last layer; None for a step without prompt targets.
    routing_GTJ:  int32; the J experts of each token in the model's G layers, by descending share. Padding can follow.
                  The values of a layer without experts are undefined. None if experts are not recorded.
    """

    rows: LogitRows
    logits_BV: torch.Tensor
    logits_of: Callable[[torch.Tensor], torch.Tensor]
    hidden_of: Callable[[Int64], torch.Tensor]
    not_finite: Callable[[], Int64]
    x_TD: torch.Tensor | None = None
    routing_GTJ: torch.Tensor | None = None

    @property
    def sampled_rows(self) -> Int64:
        return self.rows.sampled_rows

    def rows_not_finite(self) -> Int64:
        return self.not_finite()

    def sample(self, batch: SamplingBatch, *, reports_raw: bool) -> tuple[Int32, dict[int, LogProbs]]:
        return sample_rows(self.sampled_logits(), self.sampled_rows, batch, reports_raw=reports_raw)

    def sampled_logits(self) -> Float32:
        """Return the logits of sampled_rows, float32 [n, V]."""
        return _on_host(self.logits_BV)

    def prompt_log_probs(self, batch: SamplingBatch) -> Iterator[tuple[int, LogProbs]]:
        for row, first, logits_NV in self.prompt_logits():
            targets = batch.prompt_targets[row][first : first + len(logits_NV)]
            yield row, log_probs(_on_host(logits_NV), targets, top_n=max(0, int(batch.num_log_probs[row])))

    def prompt_logits(self) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Yield tuples (row of the plan, index of the first target, logits_NV), one for each block of prompt
        targets.
        """
        for row, where in self.rows.targets:
            assert self.x_TD is not None, "a step with prompts is not replayed from a graph"
            for start in range(where.start, where.stop, LOGIT_ROWS):
                part_ND = self.x_TD[start : min(start + LOGIT_ROWS, where.stop)]
                yield row, start - where.start, self.logits_of(part_ND)

    def hidden_states(self, which: Int64) -> Float32:
        return _on_host(self.hidden_of(which))

    def share_logits(self) -> None:
        """Send this rank's part of the logits to the rank that samples.

        Only ranks that do not sample call this method.
        """
        for _ in self.prompt_logits():  # the forward pass has gathered the logits of the sampled rows
            pass
        self.wait()

    def wait(self) -> None:
        """Wait until the device has computed the step."""


class TorchOptions(TypedDict, total=False):
    """Options that all subclasses of TorchExecutor have in common.

    kv_cache_memory: bytes of the KV cache; None means unset_cache_bytes(). On the CPU, the operating system allocates
                     each page at the first write.
    max_sequence_length: maximum number of tokens, prompt plus answer; None means the model's limit.
    page_size:       number of tokens of a KV page.
    threads:         number of threads. None means one per physical core, within the container's limit.
    groups:          process groups of a rank that holds a part of the model; None for the whole model.
    shard:           part of the model, for an executor that runs no step and has no groups; None for the whole model.
    logprobs_mode:   "raw_logprobs" are computed from the model's logits, "processed_logprobs" after temperature and
                     filters.
    records_routing: whether steps return the experts of each token.
    keys_dir, open_port: as in WeightStore.
    """

    kv_cache_memory: Required[int | None]
    max_sequence_length: int | None
    page_size: int
    threads: int | None
    groups: Groups | None
    shard: Shard | None
    logprobs_mode: LogprobsMode
    records_routing: bool
    keys_dir: Path | None
    open_port: Callable[[], WeightPort] | None


class TorchExecutor(ABC):
    """An Executor for one kind of device.

    The constructor reads only the headers of the model's files. load() reads the weights.

    If there are `groups`, this rank holds a part of the model, and all ranks must call execute_part() for each step.

    controller:      tokenizer and grammars of the model; None creates them from the files of `source`.
    dtype, cache_dtype: types of activations, and of keys and values.
    linears:         returns a new factory for the model's matrices.
    staging:         as in WeightStore.

    Raises:
        ValueError: an argument does not fit the model. The message names the argument and the remedy.
    """

    def __init__(
        self,
        source: ModelSource,
        controller: ModelText | None = None,
        *,
        device: torch.device,
        dtype: torch.dtype,
        cache_dtype: torch.dtype,
        linears: Callable[[], LinearFactory],
        staging: Callable[[DecoderWeights], LinearFactory] | None = None,
        kv_cache_memory: int | None,
        max_sequence_length: int | None = None,
        page_size: int = 16,
        threads: int | None = None,
        groups: Groups | None = None,
        shard: Shard | None = None,
        logprobs_mode: LogprobsMode = "raw_logprobs",
        records_routing: bool = False,
        keys_dir: Path | None = None,
        open_port: Callable[[], WeightPort] | None = None,
    ) -> None:
        self.controller = controller or ModelText.of_model(source)
        self.device, self.dtype, self.page_size = device, dtype, page_size
        self._groups = groups
        self._threads = threads
        self._reports_raw = logprobs_mode == "raw_logprobs"
        self._shard = shard = groups.shard if groups is not None else shard or Shard()
        self._sizes = shard.sizes
        self._store = WeightStore(
            source,
            dtype,
            linears,
            require_memory=partial(require_memory, device=device),
            shard=shard,
            staging=staging,
            keys_dir=keys_dir,
            open_port=open_port,
            reading=self._reading,
        )
        self.model_config = config = self._store.config
        if records_routing and config.moe is None:
            raise ValueError("moe_enable_routing_replay=True: this model has no experts to record: leave it out")
        self.records_routing = records_routing
        require_divisible(config, shard)
        self.vocab_size = self.controller.padded_vocab_size = config.vocab_size
        self.eos_ids = config.eos_token_ids
        limit = config.max_position_embeddings
        self.short_length = config.short_length
        self.max_sequence_length = limit if max_sequence_length is None else max_sequence_length
        if not 2 <= self.max_sequence_length <= limit:
            raise ValueError(f"max_sequence_length={max_sequence_length}: want 2 to {limit} tokens, the model's limit")
        width = 2 * len(shard.kv_heads(config.num_kv_heads)) * config.head_dim
        layers = len(shard.layers(config.num_layers))
        layer_bytes = width * cache_dtype.itemsize * page_size
        self.page_bytes = layers * layer_bytes
        # All ranks have the same number of pages: as many as fit on the rank with the most layers.
        max_layers = len(ParallelSizes(pipeline=shard.sizes.pipeline).shard(0).layers(config.num_layers))
        page_bytes = max_layers * layer_bytes
        if kv_cache_memory is None:
            kv_cache_memory = unset_cache_bytes(device, weights=self._store.num_bytes)
        self.num_pages = kv_cache_memory // page_bytes
        if self.num_pages < 2:
            raise ValueError(
                f"kv_cache_memory={kv_cache_memory} bytes: this model needs at least {2 * page_bytes} (two pages, one "
                "of them the dummy page): raise it"
            )
        self._make_pool = lambda: KVPool((layers, self.num_pages, page_size, width), dtype=cache_dtype, device=device)
        self._pool = self._make_pool()
        self._max_page_bytes = page_bytes
        numbers = f"{self.device.type} {dtype} {cache_dtype}".replace("torch.", "")
        self.kv_layout = f"{numbers} {layers}x{page_size}x{width}"
        self.expert_size = shard.sizes.expert
        self._kept_pages: Int64 | None = None
        self._loaded = (False, False)
        """Whether the last load() loaded weights, and whether it allocated the cache."""

    @property
    def kv_cache_bytes(self) -> int:
        return self.num_pages * self._max_page_bytes

    def use_pages(self, num_pages: int) -> None:
        """Use only `num_pages` pages, because another rank has no memory for more. Call this before load()."""
        self.num_pages = num_pages
        self._pool = self._make_pool()

    # --- the device ---------------------------------------------------------------------------------------------

    @abstractmethod
    def _use_model(self, weights: DecoderWeights | None) -> None:
        """Build the model from `weights`. Release the model if `weights` is None.

        Raises ValueError if the device cannot run the model.
        """

    @abstractmethod
    def _forward(self, plan: StepPlan, batch: MicroBatch, cache_LPXE: torch.Tensor) -> ForwardStep | None:
        """Compute this rank's part of one micro-batch of `plan`, and write the keys and values to the cache.

        Return None in all pipeline stages except the last.
        """

    def _reading(self) -> AbstractContextManager[None]:
        """Return a context manager, within which another thread may copy weights from the device."""
        return nullcontext()

    @abstractmethod
    def _trim_memory(self) -> None:
        """Return freed memory to the operating system or the device."""

    def profile(self, active: bool) -> None:
        raise NoCudaProfilerError("the CPU")

    # --- weights and memory -------------------------------------------------------------------------------------

    @property
    def weight_bytes(self) -> int:
        """Number of bytes of weights that a step reads; approximate before the weights are loaded."""
        return self._store.weights.bytes_per_step if self._store.weights is not None else self._store.num_bytes

    @property
    def has_weights(self) -> bool:
        return self._store.weights is not None

    @property
    def has_cache(self) -> bool:
        return self._pool.cache_LPXE is not None

    @property
    def cache_LPXE(self) -> torch.Tensor:
        """The KV cache. Raises RuntimeError while the weights or the cache are not loaded."""
        cache_LPXE = self._pool.cache_LPXE
        if cache_LPXE is None or not self.has_weights:
            raise RuntimeError("the model's weights and its KV cache are not loaded: load() or resume first")
        return cache_LPXE

    @property
    def digest(self) -> str:
        return self._store.digest or ""

    @property
    def copies(self) -> tuple[str, ...]:
        return self._store.copies

    @torch.inference_mode()
    def load(self) -> None:
        torch.set_num_threads(self._threads if self._threads is not None else default_threads())
        had_weights, had_cache, self._loaded = self.has_weights, self.has_cache, (False, False)
        if not had_weights:
            self._store.load()
            try:
                self._use_model(self._store.weights)
            except BaseException:
                self.release_weights()
                raise
        self._pool.allocate()
        self._loaded = (not had_weights, not had_cache)

    def unload(self) -> None:
        """Undo the last load(). Called if a later step of loading has failed, on this rank or on another rank."""
        (weights, cache), self._loaded = self._loaded, (False, False)
        if weights:
            self.release_weights()
        if cache:
            self.release_kv(self._kept_pages)

    def prepare(self) -> None:  # noqa: B027 - a CPU has nothing to prepare
        """Compile kernels and record graphs. Each rank calls this after all ranks have loaded."""

    def release_weights(self) -> None:
        self._use_model(None)
        self._store.release()
        self._trim_memory()

    def release_kv(self, keep_pages: Int64 | None) -> None:
        self._kept_pages = keep_pages
        self._pool.release(keep_pages)
        self._trim_memory()

    def read_blocks(self, table: Int32, blocks: range) -> bytes:
        return b"".join(self._pool.read(table[block]) for block in blocks)

    def write_blocks(self, table: Int32, blocks: range, data: bytes) -> None:
        size = table.shape[1] * self.page_bytes
        for index, block in enumerate(blocks):
            self._pool.write(table[block], data[index * size : (index + 1) * size])

    def use_keys(self, keys_dir: Path | None) -> None:
        """Use the CURVE keys in this directory for connections to trainers from now on."""
        self._store.keys_dir = keys_dir

    def use_memory(self, model: ModelInMemory) -> None:
        """Use `model` for the model reference IN_MEMORY from now on."""
        self._store.in_memory = model

    def holds(self, source: str) -> bool:
        return self._store.holds(source)

    def use_source(self, source: str) -> None:
        self._store.use_source(source)

    def stage_weights(self, source: str) -> None:
        self._store.stage(source)

    @torch.inference_mode()
    def swap_weights(self) -> None:
        self._store.swap()
        self._use_model(self._store.weights)
        self._trim_memory()

    def drop_staged(self) -> None:
        self._store.drop_staged()

    # --- a step -------------------------------------------------------------------------------------------------

    def execute(self, plan: StepPlan) -> StepResult:
        return merge(self.execute_part(plan), plan)

    @torch.inference_mode()
    def execute_part(self, plan: StepPlan) -> Parts:
        """Compute this rank's part of a step. All ranks of `groups` must run the step.

        Return the tokens that this rank sampled, with their row numbers in the plan. The first tensor rank of the last
        pipeline stage samples the rows of its expert rank. Other ranks sample no token.
        """
        groups, shard, cache_LPXE, parts = self._groups, self._shard, self.cache_LPXE, Parts()
        for batch in cut(
            plan, self._sizes, expert_rank=shard.expert_rank, dummy_page=self.num_pages - 1, page_size=self.page_size
        ):
            step = self._forward(plan, batch, cache_LPXE)
            if step is None:
                continue
            if groups is not None:
                groups.progress.reach("sampling")
            if shard.tensor_rank != 0:
                step.share_logits()
                continue
            result = StepResult(*sample_step(step, batch.plan.sampling, reports_raw=self._reports_raw))
            if step.routing_GTJ is not None:
                result = replace(result, routing=self._routing_of(batch.plan, step.routing_GTJ, step.rows.order))
            if groups is not None and not len(step.sampled_rows):
                step.wait()  # report a step as done only when its computation has completed
            if len(batch.rows):
                parts.append((batch.rows, result))
        if groups is not None:
            groups.flush()
        return parts

    # --- the experts of a step's tokens -------------------------------------------------------------------------

    def _new_routing(self, tokens: int) -> torch.Tensor | None:
        """Return a new routing_GTJ. Fill the layers of earlier pipeline stages with values from the previous stage.

        Returns None if experts are not recorded.
        """
        if not self.records_routing:
            return None
        routing_GTJ = empty_routing(self.model_config, tokens, self.device)
        earlier_GTJ = routing_GTJ[: self._shard.layers(self.model_config.num_layers).start]
        if self._groups is not None and len(earlier_GTJ):
            rows, width = len(earlier_GTJ) * tokens, routing_GTJ.shape[2]
            received = self._groups.receive_from_previous_stage(rows, width, dtype=routing_GTJ.dtype)
            earlier_GTJ.copy_(received.view_as(earlier_GTJ))
        return routing_GTJ

    def _send_to_next_stage(self, x_TD: torch.Tensor, routing_GTJ: torch.Tensor | None) -> None:
        assert self._groups is not None, "one rank is the last pipeline stage"
        self._groups.send_to_next_stage(x_TD)
        if routing_GTJ is not None:
            layers = self._shard.layers(self.model_config.num_layers)
            self._groups.send_to_next_stage(routing_GTJ[: layers.stop].flatten(0, 1))

    def _routing_of(self, plan: StepPlan, routing_GTJ: torch.Tensor, rows: Int64) -> npt.NDArray[Any]:
        """Return the experts of the plan's tokens, for StepResult.routing. rows: as in LogitRows.order."""
        config = self.model_config
        assert config.moe is not None
        mixtures = [layer for layer in range(config.num_layers) if config.is_mixture(layer)]
        count = len(plan.token_ids)
        found = routing_GTJ[mixtures, :count].transpose(0, 1).cpu().numpy()
        routing = np.empty(found.shape, dtype=np.min_scalar_type(config.moe.num_experts - 1))
        routing[plan.tokens_of(rows)] = found
        return routing


def empty_routing(config: ModelConfig, tokens: int, device: torch.device) -> torch.Tensor:
    """Return an uninitialised routing_GTJ for `tokens` tokens, as in ForwardStep."""
    assert config.moe is not None, "TorchExecutor has checked that the model has experts"
    return torch.empty(config.num_layers, tokens, config.moe.experts_per_token, dtype=torch.int32, device=device)


def rows_not_finite(x_TD: torch.Tensor, plan: StepPlan, order: Int64) -> Int64:
    """Return the rows of `plan` that have several tokens and a hidden state with NaN or infinity.

    x_TD:  hidden states after the last layer.
    order: rows of `plan` in the order of x_TD.
    """
    counts = plan.query_lengths[order]
    if counts.max() == 1:
        return np.empty(0, np.int64)
    is_finite_T = x_TD.sum(dim=1).isfinite()
    if not is_finite_T.all():  # otherwise the sum of finite numbers overflows
        is_finite_T = x_TD.isfinite().all(dim=1)
    return order[~np.logical_and.reduceat(is_finite_T.numpy(), counts.cumsum() - counts) & (counts > 1)]


def _on_host(logits_NV: torch.Tensor) -> Float32:
    host_NV: Float32 = logits_NV.float().cpu().numpy()
    return host_NV


class NoGpuError(ValueError):
    """Raised if an engine for GPUs finds no GPU.

    The engine does not fall back to the CPU, which would be many times slower.

    reason, remedy: texts for the termination message.
    """

    reason = "NoGpu"
    remedy = (
        "check that the node's driver and device plugin work and that the pod requests nvidia.com/gpu "
        "(spec.engine.gpusPerPod); use --device auto or cpu to run on the CPU"
    )


def _cuda_error() -> str:
    """Return the reason why torch cannot use CUDA."""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).partition("\n")[0]
    return f"it sees {torch.cuda.device_count()} devices"


def torch_device(name: str, *, local_rank: int) -> torch.device:
    """Return the device of a rank's tensors: the CPU, or the GPU with the index `local_rank`.

    name:       "cpu", "cuda" for a GPU, or "auto", which selects a GPU if there is one.
    local_rank: number of this rank among the ranks of its machine.

    Raises NoGpuError if the device does not exist. The message has the remedy.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device={name!r}: choose among auto, cpu, cuda")
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise NoGpuError(f"device='cuda': torch finds no CUDA device: {_cuda_error()}")
    if local_rank >= torch.cuda.device_count():
        raise NoGpuError(
            f"device={name!r}: rank {local_rank} of this machine has no GPU, there are {torch.cuda.device_count()}: "
            "start as many ranks on it as it has GPUs (gpusPerPod)"
        )
    return torch.device("cuda", local_rank)
