"""One rank that runs a model with torch on the processor."""

from __future__ import annotations

import ctypes
import gc
import mmap
from dataclasses import dataclass

import numpy as np
import torch

from megatron_runtime.engines.executor import StepPlan, StepResult
from megatron_runtime.engines.step_layout import lay_out
from megatron_runtime.layers.cpu import default_threads, select_dtype
from megatron_runtime.loading.checkpoint import open_checkpoint
from megatron_runtime.loading.source import ModelSource
from megatron_runtime.models.llama import LlamaModel
from megatron_runtime.models.llama_config import LlamaConfig
from megatron_runtime.models.llama_weights import load_llama_weights
from megatron_runtime.sampling.sampler import log_probs, sample


@dataclass(frozen=True, slots=True)
class _Loaded:
    model: LlamaModel
    cache_LPXE: torch.Tensor


class TorchExecutor:
    """Implements Executor. Making one reads the model's headers; `load` reads the weights.

    dtype:           "auto" (bfloat16 where the processor computes in it, else float32), "float32" or "bfloat16".
    kv_cache_memory: bytes of the KV cache. The operating system provides them as they are first written.
    max_sequence_length: prompt + generated tokens; None means what the model was made for.
    page_size:       tokens of a KV page.
    threads:         threads of torch; None means one for each processor, within the limit of the container.

    Raises:
        ValueError: a value does not fit the model; the message names it and the remedy.
    """

    def __init__(
        self,
        source: ModelSource,
        *,
        dtype: str = "auto",
        kv_cache_memory: int,
        max_sequence_length: int | None = None,
        page_size: int = 16,
        threads: int | None = None,
    ) -> None:
        self._source = source
        self._dtype = select_dtype(dtype)
        config = open_checkpoint(source).config
        self._config = config
        self.vocab_size = config.vocab_size
        self.eos_ids = config.eos_token_ids
        self.page_size = page_size
        self.max_sequence_length = _longest_sequence(max_sequence_length, config)
        self.num_pages = _num_pages(kv_cache_memory, config.kv_elements_per_token * self._dtype.itemsize * page_size)
        self._threads = threads
        self._loaded: _Loaded | None = None

    def load(self) -> None:
        if self._loaded is not None:
            return
        torch.set_num_threads(self._threads if self._threads is not None else default_threads())
        with torch.inference_mode():
            model = LlamaModel(self._config, load_llama_weights(open_checkpoint(self._source), self._dtype))
            self._loaded = _Loaded(model, self._make_cache())

    def release(self) -> None:
        self._loaded = None
        gc.collect()
        _return_freed_memory()

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        if self._loaded is None:
            raise RuntimeError("execute() before load()")
        layout = lay_out(plan, page_size=self.page_size, dtype=self._dtype)
        logits_NV = self._loaded.model(
            layout.token_ids_T,
            layout.positions_T,
            attention=layout.attention,
            cache_LPXE=self._loaded.cache_LPXE,
            rows_N=layout.logit_rows_N,
        ).numpy()
        rows = layout.sampled_rows
        tokens = np.full(len(plan.query_lengths), -1, dtype=np.int32)
        tokens[rows] = sample(
            logits_NV,
            temperature=plan.temperature[rows],
            top_k=plan.top_k[rows],
            top_p=plan.top_p[rows],
            seeds=plan.seeds[rows],
            positions=plan.sample_positions[rows],
        )
        wanted = plan.wants_log_probs[rows]
        if not wanted.any():
            return StepResult(tokens)
        chosen = np.zeros(len(tokens), dtype=np.float32)
        chosen[rows[wanted]] = log_probs(logits_NV[wanted], tokens[rows[wanted]])
        return StepResult(tokens, chosen)

    def _make_cache(self) -> torch.Tensor:
        """Zeros: what a page holds before it is written is masked out of the attention, but must be finite."""
        config = self._config
        width = 2 * config.num_kv_heads * config.head_dim
        shape = (config.num_layers, self.num_pages, self.page_size, width)
        size = config.num_layers * self.num_pages * self.page_size * width * self._dtype.itemsize
        # A mapping of its own: it is zeroed page by page when first touched, and unmapped with the tensor.
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return torch.frombuffer(memory, dtype=self._dtype).view(shape)


def _longest_sequence(wanted: int | None, config: LlamaConfig) -> int:
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


def _return_freed_memory() -> None:
    """Ask the C library to give freed memory back to the operating system; only glibc has to be asked."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
