"""`DynamicInferenceContext`, and the overflow errors of requests. The module path is the same as in Megatron-Core."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from megatron_runtime.backends.native.engine import EngineCore
from megatron_runtime.backends.native.kv.prefix_cache import PrefixCache
from megatron_runtime.requests.config import IGNORED_FIELDS, InferenceConfig
from megatron_runtime.requests.errors import (
    ActiveRequestCountOverflowError,
    BlockOverflowError,
    ContextOverflowError,
    MaxSequenceLengthOverflowError,
    RequestOverflowError,
    TensorStateDeallocatedError,
    TokenOverflowError,
)

__all__ = [
    "ActiveRequestCountOverflowError",
    "BlockOverflowError",
    "ContextOverflowError",
    "DynamicInferenceContext",
    "MaxSequenceLengthOverflowError",
    "RequestOverflowError",
    "TensorStateDeallocatedError",
    "TokenOverflowError",
]


class DynamicInferenceContext:
    """The limits of an engine and, once an engine has been constructed with this object, the engine's state.

    An attribute that this class does not define is read from the engine's native context.

    model_config:     TransformerConfig of the model. The engine ignores it and uses the configuration in the model.
    inference_config: InferenceConfig of this project or of Megatron-Core.
    """

    async_sched_step_count = async_sched_compaction_step_count = 0
    """Number of steps that were planned while another step ran. Always 0, because the engine plans a step after the
    previous step has ended."""

    def __init__(self, model_config: Any, inference_config: Any) -> None:
        self.model_config = model_config
        self.config: InferenceConfig = config_of(inference_config)
        self._core: EngineCore | None = None
        self._steps_before = self._prefill_before = 0

    def bind(self, core: EngineCore) -> None:
        """Make the attributes of this context report the state of the engine `core` from now on."""
        self._core, self.config = core, core.config

    def restart_counters(self) -> None:
        """Set the counters of steps and prompt tokens to 0. Called when the engine is reset."""
        stats = self._bound("a reset").stats()
        self._steps_before, self._prefill_before = stats.steps, stats.prompt_tokens

    def _bound(self, name: str) -> EngineCore:
        if self._core is None:
            raise AttributeError(f"{name}: the context has it once an engine is constructed with it")
        return self._core

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._bound(name).context, name)

    @property
    def max_requests(self) -> int:
        """Maximum number of requests that run at the same time."""
        return self.config.request_slots

    @property
    def max_tokens(self) -> int:
        """Maximum number of tokens per step, prompt tokens and generated tokens together."""
        return self.config.step_tokens

    @property
    def max_sequence_length(self) -> int | None:
        """Maximum number of prompt plus generated tokens per request.

        None, which is possible only before the engine is constructed, means the model's limit.
        """
        return self.config.max_sequence_length if self._core is None else self._core.context.max_sequence_length

    @property
    def block_size_tokens(self) -> int:
        """Number of tokens in a block of the prefix cache."""
        return self.config.block_size_tokens

    @property
    def step_count(self) -> int:
        """Number of steps since the engine was constructed or last reset."""
        return 0 if self._core is None else self._core.stats().steps - self._steps_before

    @property
    def lifetime_prefill_token_count(self) -> int:
        """Number of prompt tokens that were computed since the engine was constructed or last reset."""
        return 0 if self._core is None else self._core.stats().prompt_tokens - self._prefill_before

    @property
    def kv_block_allocator(self) -> KVBlockAllocator:
        return KVBlockAllocator(self._bound("kv_block_allocator").context.prefix_cache)

    def get_active_request_count(self) -> int:
        """Return the number of running requests."""
        return 0 if self._core is None else self._core.stats().num_running


class KVBlockAllocator:
    """A view of an engine's KV pages with the interface of Megatron-Core's allocator, which calls a page a block.

    A paused request holds no pages. When the request continues, its KV is computed again.
    """

    paused_count = 0

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache

    @property
    def total_count(self) -> int:
        """Total number of pages, including the dummy page, which no request can use."""
        return self._cache.num_usable + 1

    @property
    def dummy_block_idx(self) -> int:
        return self._cache.dummy

    @property
    def active_count(self) -> int:
        """Number of pages that requests can use."""
        return self._cache.num_usable

    @property
    def total_avail(self) -> int:
        """Number of pages that hold neither the KV of a request nor a cached prefix."""
        return self._cache.num_free

    def get_total_used(self) -> int:
        """Return the number of pages that hold KV, including cached prefixes that no request uses."""
        return self.active_count - self.total_avail

    def get_active_used(self) -> int:
        """Return the number of pages that requests use."""
        return self._cache.num_held

    def get_active_avail(self) -> int:
        """Return the number of pages that no request uses."""
        return self.active_count - self.get_active_used()

    def get_paused_used(self) -> int:
        return 0

    def get_paused_avail(self) -> int:
        return 0


def config_of(source: Any) -> InferenceConfig:
    """Return this project's InferenceConfig for `source`, an InferenceConfig of Megatron-Core or of this project."""
    if isinstance(source, InferenceConfig):
        return source
    names = (field.name for field in fields(InferenceConfig) if field.name not in IGNORED_FIELDS)
    return InferenceConfig(**{name: getattr(source, name) for name in names if hasattr(source, name)})
