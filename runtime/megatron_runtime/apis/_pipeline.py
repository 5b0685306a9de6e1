"""From a model and a tokenizer to an engine."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_runtime.backends.native.dynamic_engine import DynamicInferenceEngine
from megatron_runtime.checkpoints.source import ModelSource, resolve
from megatron_runtime.requests.config import InferenceConfig
from megatron_runtime.tokenization import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from megatron_runtime.model_inference_wrappers.gpt_inference_wrapper import GPTInferenceWrapper

DEFAULT_MEMORY_SHARE = 0.25
"""Of the memory that is free, for the KV cache of an engine whose configuration nobody gave."""


def default_config() -> InferenceConfig:
    """Megatron-Core's defaults, with a KV cache that this machine has room for."""
    wanted = InferenceConfig()
    room = _available_bytes() * DEFAULT_MEMORY_SHARE / (1 << 30)
    return InferenceConfig(buffer_size_gb=min(wanted.buffer_size_gb, room), enable_chunked_prefill=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorOptions:
    """What the executor of a program's engine is told; see TorchExecutor."""

    dtype: str = "auto"
    threads: int | None = None
    wrapper_class: type[GPTInferenceWrapper] | None = None


def engine_of_reference(model: str, config: InferenceConfig, options: ExecutorOptions) -> DynamicInferenceEngine:
    """The engine of a model reference, weights not loaded yet. Raises ModelSourceError, UnsupportedModelError."""
    return _engine(resolve(model), lambda: load_tokenizer(model), config, options)


def engine_of_model(
    model: Any, tokenizer: Any, config: InferenceConfig, options: ExecutorOptions
) -> DynamicInferenceEngine:
    """The engine of a model that the program holds, weights not copied yet.

    Raises UnsupportedModelError for a model, TypeError for a tokenizer, that cannot be taken over.
    """
    from megatron_runtime.checkpoints.in_memory import model_in_memory

    return _engine(model_in_memory(model), take_over_tokenizer(tokenizer), config, options)


def _engine(
    source: ModelSource,
    tokenizer: Tokenizer | Callable[[], Tokenizer],
    config: InferenceConfig,
    options: ExecutorOptions,
) -> DynamicInferenceEngine:
    # Read when torch loads its OpenMP runtime: threads that spin between operators take the processor from all else.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from megatron_runtime.backends.native.select import select_executor
    from megatron_runtime.backends.native.text import ModelText

    wrapper_class = options.wrapper_class
    executor = select_executor(
        source,
        ModelText(tokenizer),
        config,
        dtype=options.dtype,
        kv_cache_memory=config.buffer_bytes,
        threads=options.threads,
        make_forward=None if wrapper_class is None else wrapper_class.forward_of,
    )
    return DynamicInferenceEngine(executor, config)


def take_over_tokenizer(tokenizer: Any) -> Tokenizer:
    """`tokenizer` itself, or a fast tokenizer of transformers (or a `tokenizers.Tokenizer`) as ours."""
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
    return _from_backend(backend, tokenizer)


def _from_backend(backend: Any, tokenizer: Any) -> Tokenizer:
    from megatron_runtime.tokenization.chat_template import chat_template_of_model

    eos = getattr(tokenizer, "eos_token_id", None)
    template = getattr(tokenizer, "chat_template", None)
    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    special = {name: text for name in names if (text := getattr(tokenizer, name, None)) is not None}
    return Tokenizer(
        backend,
        bos_id=getattr(tokenizer, "bos_token_id", None),
        eos_ids=() if eos is None else (eos,),
        chat_template=chat_template_of_model(template, special=special) if isinstance(template, str) else None,
    )


def _available_bytes() -> int:
    pages = os.sysconf("SC_AVPHYS_PAGES") if "SC_AVPHYS_PAGES" in os.sysconf_names else os.sysconf("SC_PHYS_PAGES")
    return pages * os.sysconf("SC_PAGE_SIZE")
