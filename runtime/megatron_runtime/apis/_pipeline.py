"""Creates the engine of a MegatronLLM from a model and a tokenizer."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_runtime.backends.native.build import select_executor
from megatron_runtime.backends.native.text import ModelText
from megatron_runtime.checkpoints.in_memory import model_in_memory
from megatron_runtime.checkpoints.source import ModelSource, resolve
from megatron_runtime.engines.dynamic_engine import DynamicInferenceEngine
from megatron_runtime.model_inference_wrappers.gpt_inference_wrapper import GPTInferenceWrapper
from megatron_runtime.requests.config import InferenceConfig
from megatron_runtime.tokenization import ChatTemplate, Tokenizer, load_tokenizer

DEFAULT_MEMORY_SHARE = 0.25
"""Share of the free memory for the KV cache of an engine without a configuration."""


def default_config() -> InferenceConfig:
    """Return Megatron-Core's defaults, with a KV cache that fits this host."""
    wanted = InferenceConfig()
    available = _available_bytes() * DEFAULT_MEMORY_SHARE / (1 << 30)
    return InferenceConfig(buffer_size_gb=min(wanted.buffer_size_gb, available), enable_chunked_prefill=True)


def make_engine(
    model: Any,
    tokenizer: Any,
    config: InferenceConfig,
    *,
    dtype: str = "auto",
    threads: int | None = None,
    wrapper_class: type[GPTInferenceWrapper] | None = None,
) -> DynamicInferenceEngine:
    """Return the engine of a model; its weights are not loaded yet.

    model: a model reference, which has a tokenizer of its own, or a model in memory, which needs `tokenizer`.
    dtype, threads, wrapper_class: options of the executor; see MegatronLLM.

    Raises ModelSourceError, UnsupportedModelError for a model, TypeError for a tokenizer, that cannot be used.
    """
    source: ModelSource
    text: Tokenizer | Callable[[], Tokenizer]
    if isinstance(model, str):
        source, text = resolve(model), lambda: load_tokenizer(model)
    else:
        source, text = model_in_memory(model), _own_tokenizer(tokenizer)
    executor = select_executor(
        source,
        ModelText(text),
        config,
        dtype=dtype,
        kv_cache_memory=config.buffer_bytes,
        threads=threads,
        make_forward=None if wrapper_class is None else wrapper_class.forward_of,
    )
    return DynamicInferenceEngine(executor, config)


def _own_tokenizer(tokenizer: Any) -> Tokenizer:
    """Return `tokenizer`, or a fast tokenizer of transformers (or a `tokenizers.Tokenizer`) as a Tokenizer."""
    if isinstance(tokenizer, Tokenizer):
        return tokenizer
    if isinstance(tokenizer, str | Path):
        return load_tokenizer(str(tokenizer))
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if type(backend).__module__.partition(".")[0] != "tokenizers":
        raise TypeError(
            f"tokenizer is {type(tokenizer).__module__}.{type(tokenizer).__name__}: want a Tokenizer of "
            "megatron_runtime, a fast tokenizer of transformers, or a model reference"
        )
    eos = getattr(tokenizer, "eos_token_id", None)
    template = getattr(tokenizer, "chat_template", None)
    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    special = {name: text for name in names if (text := getattr(tokenizer, name, None)) is not None}
    return Tokenizer(
        backend,
        bos_id=getattr(tokenizer, "bos_token_id", None),
        eos_ids=() if eos is None else (eos,),
        chat_template=ChatTemplate(template, special=special) if isinstance(template, str) else None,
    )


def _available_bytes() -> int:
    pages = os.sysconf("SC_AVPHYS_PAGES") if "SC_AVPHYS_PAGES" in os.sysconf_names else os.sysconf("SC_PHYS_PAGES")
    return pages * os.sysconf("SC_PAGE_SIZE")
