"""`InferenceConfig`, the configuration of an engine, and its enumerations. This module does not import torch."""

from __future__ import annotations

import copy
import sys
import warnings
from dataclasses import dataclass, fields
from enum import Enum, StrEnum
from typing import Any, Literal, Self, get_args

from megatron_runtime.requests.rules import ABOVE_ZERO, Predicate, Rule, field_rules, int_in, number_in, optional

DEFAULT_MAX_REQUESTS = 64
DEFAULT_MAX_TOKENS = 16_384


class _Option(StrEnum):
    """An enumeration whose constructor also accepts the name of a member, in upper or lower case.

    The constructor also accepts a member of another enumeration, such as Megatron-Core's, and uses its name.
    """

    @classmethod
    def _missing_(cls, value: object) -> Self | None:
        name = value.name if isinstance(value, Enum) else value
        return cls.__members__.get(name.upper()) if isinstance(name, str) else None


class KVCacheManagementMode(_Option):
    """Values of `InferenceConfig.kv_cache_management_mode`: what the signal SUSPEND does with the KV cache."""

    PERSIST = "persist"
    """The KV cache stays in device memory."""
    OFFLOAD = "offload"
    """The KV cache is copied to host memory, and copied back at RESUME."""
    RECOMPUTE = "recompute"
    """The KV cache is dropped. The KV of requests in flight is computed again after RESUME."""


class PrefixCachingEvictionPolicy(_Option):
    """Values of `InferenceConfig.prefix_caching_eviction_policy`.

    The policy determines what happens to a block of the prefix cache when the last request that uses the block ends.
    """

    REF_ZERO = "ref_zero"
    """The block is freed immediately."""
    LRU = "lru"
    """The block stays cached until its memory is needed. The least recently used leaf is evicted first."""


class RoutingPolicy(_Option):
    """Values of `InferenceConfig.prefix_caching_coordinator_policy`.

    The policy determines how the coordinator chooses the engine of a request.
    """

    LOAD_BALANCED = "LoadBalanced"
    """The engine with the fewest requests in flight. A tie goes to the lowest index."""
    ROUND_ROBIN = "RoundRobin"
    FIRST_PREFIX_BLOCK = "FirstPrefixBlock"
    """An engine that has received a prompt with the same first block. The match is weighed against free capacity."""
    LONGEST_PREFIX = "LongestPrefix"
    """The engine that has received the longest common prefix. The match is weighed against free capacity."""
    LEAST_COST = "LeastCost"
    """The engine with the least work, measured by prompt tokens to compute and tokens in the KV cache. (Not in
    Megatron-Core.)
    """


PrefixCachingCoordinatorPolicy = RoutingPolicy


class AsyncScheduleMode(_Option):
    """Values of `InferenceConfig.async_sched_mode`: whether an engine plans a step while the previous step runs."""

    LEGACY = "legacy"
    """A step is planned when the previous step has ended."""
    ASYNC = "async"
    """A step is planned while the previous step runs. The native engine rejects this mode."""


class CudaGraphSizingDistribution(_Option):
    """Values of `InferenceConfig.cuda_graph_sizing_distribution`, which has no effect in this runtime.

    In Megatron-Core, the option determines the sizes of the CUDA graphs.
    """

    EXPONENTIAL = "exponential"
    LINEAR = "linear"


SamplingBackend = Literal["torch", "flashinfer"]
LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]


class InvalidConfigError(ValueError):
    """A field of InferenceConfig is out of range or not supported by this engine. `field` is the name of the field."""

    def __init__(self, field: str, value: object, remedy: str) -> None:
        super().__init__(f"InferenceConfig.{field}={value!r}: {remedy}")
        self.field = field


@dataclass(slots=True, kw_only=True)
class InferenceConfig:
    """Limits and options of one engine, with Megatron-Core's names and defaults.

    The constructor raises TypeError for an unknown name. Fields can be assigned until an engine is constructed, because
    the engine uses a copy.

    Memory and limits:
    block_size_tokens:     number of tokens in a block of the prefix cache and of block hashes.
    buffer_size_gb:        size of the KV cache, in GiB.
    paused_buffer_size_gb: size of the part of the KV cache that paused requests can keep, in GiB; None: the engine
                           chooses.
    max_requests:          maximum number of requests that run concurrently; None means DEFAULT_MAX_REQUESTS.
    max_tokens:            maximum tokens per step, prefill and decode together; None means DEFAULT_MAX_TOKENS.
    max_sequence_length:   maximum prompt plus generated tokens of a request; None means the limit of the model.
    max_waiting:           maximum number of requests that wait for a slot. Further requests are rejected. (Not in
                           Megatron-Core.)
    unified_memory_level:  1: the KV cache is in managed memory, which can overflow to the host; 0: it is not.

    Suspend:
    kv_cache_management_mode:  see KVCacheManagementMode.
    static_kv_memory_pointers: whether RESUME allocates the KV cache at the same addresses, so that CUDA graphs stay
                               valid.

    CUDA graphs:
    num_cuda_graphs:       number of CUDA graphs captured for decode steps; None: the engine chooses; 0: no graphs.
    cuda_graph_mixed_prefill_count: number of prefill requests in the largest captured mixed step.
    cuda_graph_max_tokens: number of tokens in the largest captured step.
    use_cuda_graphs_for_non_decode_steps: whether to capture mixed steps too. The setting has no effect in this runtime,
                                          which logs this fact once.

    Scheduling:
    enable_chunked_prefill: whether to split prompts over several steps. If not, a prompt must fit into max_tokens.
    max_prefill_tokens:    maximum prompt tokens in a step that also decodes, with chunked prefill; None: limited by
                           max_tokens only. (Not in Megatron-Core.)
    materialize_only_last_token_logits: whether to compute the logits of prompt tokens only for requests that want the
                                        log-probabilities of their prompt.
    num_speculative_tokens: number of tokens that speculative decoding proposes before each decode step.
    async_sched_mode:      see AsyncScheduleMode.

    Prefix cache:
    enable_prefix_caching: whether requests with equal prefixes share the KV of the prefix.
    prefix_caching_eviction_policy: see PrefixCachingEvictionPolicy.
    prefix_caching_coordinator_policy: see RoutingPolicy.
    prefix_caching_routing_alpha: weight of a cached prefix relative to free capacity, from 0 to 1.

    Sampling:
    sampling_backend:      implementation of sampling. "flashinfer" needs the library flashinfer and a GPU.
    offset_sampling_seed_by_dp_rank: whether data-parallel ranks use different seeds for requests without a seed.
    logprobs_mode:         whether log-probabilities are computed from unmodified logits, or after temperature and
                           filters.

    Records and logs:
    track_paused_request_events:   whether to record a PAUSE event for each step in which a request is paused.
    track_generated_token_events:  whether to record a GENERATED_TOKEN event for each token.
    moe_enable_routing_replay:     whether to record the experts of each token in `routing_indices` of an answer. (In
                                   Megatron-Core, this is a field of TransformerConfig, from which an engine with a
                                   GPTModel reads it.)
    logging_step_interval: number of steps between log lines about the load; 0: no such log lines.

    Many ranks:
    ep_consensus_interval: number of steps between consensus rounds of expert-parallel ranks under load.
    disable_ep_consensus:  whether to omit consensus rounds. Allowed only with one expert-parallel rank.
    use_synchronous_zmq_collectives: whether ranks block in consensus rounds.

    Without effect here (accepted with a warning, because programs for Megatron-Core set them):
    pg_collection, mamba_inference_state_config, mamba_memory_ratio, prefix_caching_mamba_gb, metrics_writer,
    use_flashinfer_fused_rope, request_metadata_types, cuda_graph_sizing_distribution, cuda_graph_all_prefills, verbose.

    image_preprocessing_config: must be None, because models in this runtime accept only text.
    """

    block_size_tokens: int = 256
    buffer_size_gb: float = 20.0
    paused_buffer_size_gb: float | None = None
    max_requests: int | None = None
    max_tokens: int | None = None
    max_sequence_length: int | None = 2560
    max_waiting: int = 4096
    unified_memory_level: int = 0
    kv_cache_management_mode: KVCacheManagementMode = KVCacheManagementMode.PERSIST
    static_kv_memory_pointers: bool = False
    num_cuda_graphs: int | None = None
    cuda_graph_mixed_prefill_count: int = 16
    cuda_graph_max_tokens: int = 512
    use_cuda_graphs_for_non_decode_steps: bool = True
    enable_chunked_prefill: bool = False
    max_prefill_tokens: int | None = None
    materialize_only_last_token_logits: bool = True
    num_speculative_tokens: int = 0
    async_sched_mode: AsyncScheduleMode = AsyncScheduleMode.LEGACY
    enable_prefix_caching: bool = False
    prefix_caching_eviction_policy: PrefixCachingEvictionPolicy = PrefixCachingEvictionPolicy.REF_ZERO
    prefix_caching_coordinator_policy: RoutingPolicy = RoutingPolicy.LOAD_BALANCED
    prefix_caching_routing_alpha: float = 0.5
    sampling_backend: SamplingBackend = "torch"
    offset_sampling_seed_by_dp_rank: bool = True
    logprobs_mode: LogprobsMode = "raw_logprobs"
    track_paused_request_events: bool = False
    track_generated_token_events: bool = False
    moe_enable_routing_replay: bool = False
    logging_step_interval: int = 0
    ep_consensus_interval: int = 20
    disable_ep_consensus: bool = False
    use_synchronous_zmq_collectives: bool = False
    pg_collection: Any = None
    mamba_inference_state_config: Any = None
    mamba_memory_ratio: Any = None
    prefix_caching_mamba_gb: Any = None
    metrics_writer: Any = None
    use_flashinfer_fused_rope: Any = None
    request_metadata_types: Any = None
    cuda_graph_sizing_distribution: Any = None
    cuda_graph_all_prefills: Any = None
    verbose: Any = None
    image_preprocessing_config: None = None

    def __post_init__(self) -> None:
        self._check_limits()
        _warn_of_ignored(*(name for name in IGNORED_FIELDS if getattr(self, name)))

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a field. Raises InvalidConfigError for a value out of range, and AttributeError for an unknown name."""
        if name in _OPTIONS:
            try:
                value = _OPTIONS[name](value)
            except ValueError:
                allowed = ", ".join(repr(member.value) for member in _OPTIONS[name])
                raise InvalidConfigError(name, value, f"want one of {allowed}") from None
        elif name in _RULES:
            if not _RULES[name].is_valid(value):
                raise InvalidConfigError(name, value, f"want {_RULES[name].allowed}")
        elif name in IGNORED_FIELDS and value and hasattr(self, name):
            # __post_init__ warns about the fields of the constructor
            _warn_of_ignored(name)
        object.__setattr__(self, name, value)

    def for_engine(self) -> Self:
        """Return a copy for an engine, which later assignments to this object do not change.

        Raises InvalidConfigError if fields contradict each other.
        """
        config = copy.copy(self)
        config._check_limits()
        return config

    def _check_limits(self) -> None:
        if self.step_tokens < self.request_slots:
            raise InvalidConfigError(
                "max_tokens",
                self.step_tokens,
                f"less than max_requests={self.request_slots}, and every running request needs one token per step: "
                "raise max_tokens or lower max_requests",
            )
        if self.max_prefill_tokens is not None and not self.enable_chunked_prefill:
            raise InvalidConfigError(
                "max_prefill_tokens",
                self.max_prefill_tokens,
                "a prompt that is not split has to fit one step: enable chunked prefill or leave it at None",
            )

    @property
    def request_slots(self) -> int:
        """The value of max_requests or, if it is None, the smaller of DEFAULT_MAX_REQUESTS and max_tokens."""
        if self.max_requests is not None:
            return self.max_requests
        return min(DEFAULT_MAX_REQUESTS, self.max_tokens or DEFAULT_MAX_REQUESTS)

    @property
    def step_tokens(self) -> int:
        """The value of max_tokens or, if it is None, the greater of DEFAULT_MAX_TOKENS and max_requests."""
        return self.max_tokens if self.max_tokens is not None else max(DEFAULT_MAX_TOKENS, self.max_requests or 0)

    @property
    def buffer_bytes(self) -> int:
        return int(self.buffer_size_gb * (1 << 30))

    def require_default(self, *names: str, because: str) -> None:
        """Raise InvalidConfigError, with the reason `because`, if a field in `names` differs from its default."""
        defaults = {field.name: field.default for field in fields(self)}
        for name in names:
            if getattr(self, name) != defaults[name]:
                raise InvalidConfigError(name, getattr(self, name), f"{because}: leave it at {defaults[name]!r}")


def _one_of(kind: Any) -> tuple[Predicate, str]:
    allowed = get_args(kind)
    return lambda value: value in allowed, f"one of {', '.join(map(repr, allowed))}"


IGNORED_FIELDS = tuple(item.name for item in fields(InferenceConfig) if item.type == "Any")
"""Names of the fields that have no effect in this runtime and accept any value."""


def _warn_of_ignored(*names: str) -> None:
    if names:
        shown = ", ".join(f"InferenceConfig.{name}" for name in names)
        warnings.warn(f"no effect here: {shown}: Megatron-Core's own engine uses it, leave it out", stacklevel=4)


_OPTIONS: dict[str, type[_Option]] = {
    item.name: type(item.default) for item in fields(InferenceConfig) if isinstance(item.default, _Option)
}
_RULES = field_rules(
    InferenceConfig,
    {
        "block_size_tokens max_waiting ep_consensus_interval": Rule(int_in(1), "an integer >= 1"),
        "cuda_graph_mixed_prefill_count cuda_graph_max_tokens": Rule(int_in(1), "an integer >= 1"),
        "max_requests max_tokens max_prefill_tokens": Rule(optional(int_in(1)), "an integer >= 1, or None"),
        "max_sequence_length": Rule(optional(int_in(2)), "an integer >= 2, or None"),
        "num_speculative_tokens logging_step_interval": Rule(int_in(0), "an integer >= 0"),
        "num_cuda_graphs": Rule(optional(int_in(0)), "an integer >= 0, or None"),
        "unified_memory_level": Rule(int_in(0, 1), "0 or 1"),
        "buffer_size_gb": Rule(number_in(ABOVE_ZERO, sys.float_info.max), "a number > 0"),
        "paused_buffer_size_gb": Rule(optional(number_in(0, sys.float_info.max)), "a number >= 0, or None"),
        "prefix_caching_routing_alpha": Rule(number_in(0, 1), "a number from 0 to 1"),
        "sampling_backend": Rule(*_one_of(SamplingBackend)),
        "logprobs_mode": Rule(*_one_of(LogprobsMode)),
        "image_preprocessing_config": Rule(lambda value: value is None, "None: models accept text only"),
    },
)
