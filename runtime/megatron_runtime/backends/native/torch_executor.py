"""One rank that runs a model with torch, on the device it is given."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from megatron_runtime.backends.native.device import Device, PartRunner, Processor
from megatron_runtime.backends.native.executor import Int64, StepPlan, StepResult
from megatron_runtime.backends.native.text_generation_controller import TextGenerationController
from megatron_runtime.backends.native.weight_store import WeightStore
from megatron_runtime.checkpoints.source import ModelSource
from megatron_runtime.distributed.shard import ParallelSizes, Shard
from megatron_runtime.models.config import ModelConfig
from megatron_runtime.models.layers.cpu import default_threads
from megatron_runtime.models.weights import require_divisible

if TYPE_CHECKING:
    from megatron_runtime.backends.native.stage_runner import Parts
    from megatron_runtime.distributed.groups import Groups
    from megatron_runtime.tokenization import Tokenizer


class TorchExecutor:
    """Implements Executor. Making one reads the model's headers; `load` reads the weights.

    controller:      samples; it has the model while the weights are loaded. None makes one with the source's tokenizer.
    dtype:           "auto" (bfloat16 where the device computes in it, else float32), "float32", "bfloat16", ….
    kv_cache_memory: bytes of the KV cache. On a processor, the operating system provides them as they are written.
    max_sequence_length: prompt + generated tokens; None means what the model was made for.
    page_size:       tokens of a KV page.
    threads:         threads of torch; None means one for each processor, within the limit of the container.
    device:          where the model runs, and how; None is the processor.
    groups:          of a rank that holds a part of the model: how it speaks to the others. It runs execute_part().

    Raises:
        ValueError: a value does not fit the model; the message names it and the remedy.
    """

    def __init__(
        self,
        source: ModelSource,
        controller: TextGenerationController | None = None,
        *,
        dtype: str = "auto",
        kv_cache_memory: int,
        max_sequence_length: int | None = None,
        page_size: int = 16,
        threads: int | None = None,
        device: Device | None = None,
        groups: Groups | None = None,
    ) -> None:
        self.controller = controller or TextGenerationController(None, lambda: _load_tokenizer(source))
        self._device = device = device or Processor()
        self._dtype = device.select_dtype(dtype)
        self._groups = groups
        shard = groups.shard if groups is not None else Shard()
        self._store = WeightStore(source, self._dtype, device, shard=shard)
        config = self._store.config
        require_divisible(config, shard)
        self.vocab_size = config.vocab_size
        self.controller.padded_vocab_size = config.vocab_size
        self.eos_ids = config.eos_token_ids
        self.page_size = page_size
        self.max_sequence_length = _longest_sequence(max_sequence_length, config)
        width = 2 * len(shard.kv_heads(config.num_kv_heads)) * config.head_dim
        cache_dtype = device.cache_dtype(self._dtype)
        # All ranks have the same pages, as many as fit on a rank with the most layers.
        most_layers = len(ParallelSizes(pipeline=shard.pipeline_size).shard(0).layers(config.num_layers))
        self.num_pages = _num_pages(kv_cache_memory, most_layers * width * cache_dtype.itemsize * page_size)
        self._threads = threads
        self._pool = device.kv_pool(
            layers=len(shard.layers(config.num_layers)),
            pages=self.num_pages,
            page_size=page_size,
            width=width,
            dtype=cache_dtype,
        )
        self._stage: PartRunner | None = None

    @property
    def weight_bytes(self) -> int:
        """Read by a step; about, before the weights are loaded."""
        return self._store.weights.bytes_per_step if self._store.weights is not None else self._store.num_bytes

    @property
    def has_weights(self) -> bool:
        return self._store.weights is not None

    @property
    def has_cache(self) -> bool:
        return self._pool.cache_LPXE is not None

    @property
    def digest(self) -> str:
        return self._store.digest or ""

    def load(self) -> None:
        torch.set_num_threads(self._threads if self._threads is not None else default_threads())
        if not self.has_weights:
            self._store.load()
            self._use_weights()
        self._pool.allocate()

    def release_weights(self) -> None:
        self.controller.inference_wrapped_model = self._stage = None
        self._store.release()
        self._device.return_freed_memory()

    def release_kv(self, keep_pages: Int64 | None) -> None:
        self._pool.release(keep_pages)
        self._device.return_freed_memory()

    def use_source(self, source: str) -> None:
        self._store.use_source(source)

    def stage_weights(self, source: str) -> None:
        self._store.stage(source)

    def swap_weights(self) -> None:
        self._store.swap()
        self._use_weights()
        self._device.return_freed_memory()

    def drop_staged(self) -> None:
        self._store.drop_staged()

    def profile(self, active: bool) -> None:
        self._device.profile(active)

    def execute(self, plan: StepPlan) -> StepResult:
        cache_LPXE = self._pool.cache_LPXE
        if cache_LPXE is None or not self.has_weights:
            raise RuntimeError("execute() before load()")
        return self.controller.generate_step(plan, cache_LPXE)

    def execute_part(self, plan: StepPlan) -> Parts:
        """This rank's share of a step that all ranks of `groups` run: see PartRunner."""
        cache_LPXE = self._pool.cache_LPXE
        if cache_LPXE is None or self._stage is None:
            raise RuntimeError("execute_part() before load(), or without groups")
        return self._stage.run(plan, cache_LPXE)

    @torch.inference_mode()
    def _use_weights(self) -> None:
        config, weights = self._store.config, self._store.weights
        assert weights is not None, "load() or swap() first"
        if self._groups is None:
            self.controller.inference_wrapped_model = self._device.runner(
                config, weights, page_size=self.page_size, dtype=self._dtype, max_length=self.max_sequence_length
            )
            return
        self._stage = self._device.stage_runner(
            config,
            weights,
            groups=self._groups,
            controller=self.controller,
            page_size=self.page_size,
            dummy_page=self.num_pages - 1,
            dtype=self._dtype,
            max_length=self.max_sequence_length,
        )


def _load_tokenizer(source: ModelSource) -> Tokenizer:
    from megatron_runtime.tokenization import load_tokenizer

    return load_tokenizer(str(source.location), renders_chat=False)


def _longest_sequence(wanted: int | None, config: ModelConfig) -> int:
    limit = config.max_position_embeddings
    if wanted is None:
        return limit
    if not 2 <= wanted <= limit:
        raise ValueError(
            f"max_sequence_length={wanted}: the model was made for 2 to {limit} tokens: choose among these"
        )
    return wanted


def _num_pages(kv_cache_memory: int, page_bytes: int) -> int:
    """The pages that fit, the dummy page among them."""
    pages = kv_cache_memory // page_bytes
    if pages < 2:
        raise ValueError(
            f"kv_cache_memory={kv_cache_memory} bytes: this model needs at least {2 * page_bytes} (two pages): raise it"
        )
    return pages
