"""InferenceConfig: every documented field with its default, and nothing else."""

import warnings
from enum import Enum

import pytest

from megatron_runtime.requests.config import (
    AsyncScheduleMode,
    InferenceConfig,
    InvalidConfigError,
    KVCacheManagementMode,
    PrefixCachingEvictionPolicy,
    RoutingPolicy,
)

DOCUMENTED_DEFAULTS = {
    "block_size_tokens": 256,
    "buffer_size_gb": 20,
    "paused_buffer_size_gb": None,
    "max_requests": None,
    "max_tokens": None,
    "max_sequence_length": 2560,
    "unified_memory_level": 0,
    "kv_cache_management_mode": KVCacheManagementMode.PERSIST,
    "num_cuda_graphs": None,
    "cuda_graph_mixed_prefill_count": 16,
    "cuda_graph_max_tokens": 512,
    "use_cuda_graphs_for_non_decode_steps": True,
    "static_kv_memory_pointers": False,
    "materialize_only_last_token_logits": True,
    "enable_chunked_prefill": False,
    "num_speculative_tokens": 0,
    "enable_prefix_caching": False,
    "prefix_caching_eviction_policy": PrefixCachingEvictionPolicy.REF_ZERO,
    "prefix_caching_coordinator_policy": RoutingPolicy.LOAD_BALANCED,
    "prefix_caching_routing_alpha": 0.5,
    "track_paused_request_events": False,
    "track_generated_token_events": False,
    "sampling_backend": "torch",
    "offset_sampling_seed_by_dp_rank": True,
    "async_sched_mode": AsyncScheduleMode.LEGACY,
    "logprobs_mode": "raw_logprobs",
    "ep_consensus_interval": 20,
    "disable_ep_consensus": False,
    "use_synchronous_zmq_collectives": False,
    "logging_step_interval": 0,
}


def test_the_documented_defaults() -> None:
    config = InferenceConfig()
    assert {name: getattr(config, name) for name in DOCUMENTED_DEFAULTS} == DOCUMENTED_DEFAULTS
    assert (config.step_tokens, config.request_slots) == (16_384, 64)
    assert config.buffer_bytes == 20 << 30


def test_unknown_fields_are_rejected() -> None:
    with pytest.raises(TypeError, match="max_request"):
        InferenceConfig(max_request=3)  # type: ignore[call-arg]
    with pytest.raises(AttributeError, match="max_request"):
        InferenceConfig().max_request = 3  # type: ignore[attr-defined]


def test_fields_are_assignable_and_an_engine_gets_a_copy() -> None:
    config = InferenceConfig()
    config.max_sequence_length = 96
    copied = config.for_engine()
    config.max_sequence_length = 64
    assert (copied.max_sequence_length, config.max_sequence_length) == (96, 64)
    with pytest.raises(InvalidConfigError, match=r"InferenceConfig\.max_tokens=0: want an integer >= 1"):
        config.max_tokens = 0
    config.max_tokens, config.max_requests = 8, 9
    with pytest.raises(InvalidConfigError, match="lower max_requests"):
        config.for_engine()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("pg_collection", object()),
        ("mamba_inference_state_config", object()),
        ("mamba_memory_ratio", 0.5),
        ("prefix_caching_mamba_gb", 1.0),
        ("metrics_writer", object()),
        ("use_flashinfer_fused_rope", True),
        ("request_metadata_types", [("temperature", "float32")]),
        ("cuda_graph_sizing_distribution", "linear"),
        ("cuda_graph_all_prefills", True),
        ("verbose", True),
    ],
)
def test_fields_of_megatrons_own_engine_are_accepted_with_one_warning(field: str, value: object) -> None:
    with pytest.warns(UserWarning, match=rf"no effect here: InferenceConfig.{field}") as warned:
        config = InferenceConfig(**{field: value})  # type: ignore[arg-type]
    assert len(warned) == 1
    with pytest.warns(UserWarning, match=field) as warned:
        setattr(config, field, value)
    assert len(warned) == 1


def test_several_fields_without_meaning_share_one_warning_and_unset_ones_give_none() -> None:
    with pytest.warns(UserWarning, match=r"pg_collection, .*\.metrics_writer") as warned:
        InferenceConfig(pg_collection=object(), metrics_writer=object())
    assert len(warned) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        InferenceConfig(pg_collection=None, use_flashinfer_fused_rope=False).for_engine()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("block_size_tokens", 0),
        ("buffer_size_gb", 0),
        ("buffer_size_gb", float("nan")),
        ("paused_buffer_size_gb", -1),
        ("max_requests", 0),
        ("max_tokens", True),
        ("max_sequence_length", 1),
        ("unified_memory_level", 2),
        ("kv_cache_management_mode", "keep"),
        ("prefix_caching_eviction_policy", "fifo"),
        ("prefix_caching_coordinator_policy", "random"),
        ("prefix_caching_routing_alpha", 1.5),
        ("sampling_backend", "numpy"),
        ("logprobs_mode", "cooked"),
        ("async_sched_mode", "EAGER"),
        ("enable_prefix_caching", 1),
        ("num_speculative_tokens", -1),
    ],
)
def test_a_value_out_of_range_is_rejected_with_field_value_and_remedy(field: str, value: object) -> None:
    with pytest.raises(InvalidConfigError, match="want") as rejected:
        InferenceConfig(**{field: value})  # type: ignore[arg-type]
    assert rejected.value.field == field
    assert f"InferenceConfig.{field}={value!r}" in str(rejected.value)


class PrefixCachingCoordinatorPolicy(str, Enum):  # noqa: UP042 - its values compare as in Megatron-Core
    """As Megatron-Core defines it."""

    LONGEST_PREFIX = "longest_prefix"
    ROUND_ROBIN = "round_robin"


@pytest.mark.parametrize(
    ("given", "policy"),
    [
        ("longest_prefix", RoutingPolicy.LONGEST_PREFIX),
        ("FIRST_PREFIX_BLOCK", RoutingPolicy.FIRST_PREFIX_BLOCK),
        (PrefixCachingCoordinatorPolicy.ROUND_ROBIN, RoutingPolicy.ROUND_ROBIN),
        (PrefixCachingCoordinatorPolicy.LONGEST_PREFIX, RoutingPolicy.LONGEST_PREFIX),
        ("LoadBalanced", RoutingPolicy.LOAD_BALANCED),
    ],
)
def test_enumerations_accept_values_names_and_members_of_megatron(given: object, policy: RoutingPolicy) -> None:
    config = InferenceConfig(prefix_caching_coordinator_policy=given)  # type: ignore[arg-type]
    assert config.prefix_caching_coordinator_policy is policy


def test_enumerations_accept_values() -> None:
    config = InferenceConfig(prefix_caching_eviction_policy="lru", kv_cache_management_mode="offload")  # type: ignore[arg-type]
    assert config.prefix_caching_eviction_policy is PrefixCachingEvictionPolicy.LRU
    assert config.kv_cache_management_mode is KVCacheManagementMode.OFFLOAD


def test_max_tokens_is_at_least_max_requests() -> None:
    assert InferenceConfig(max_tokens=8).request_slots == 8
    assert InferenceConfig(max_requests=20_000).step_tokens == 20_000
    with pytest.raises(InvalidConfigError, match="lower max_requests"):
        InferenceConfig(max_tokens=8, max_requests=9)


def test_unsupported_fields_are_rejected_by_name() -> None:
    InferenceConfig().require_default("num_speculative_tokens", because="this engine proposes no tokens")
    config = InferenceConfig(num_speculative_tokens=3)
    with pytest.raises(InvalidConfigError, match=r"num_speculative_tokens=3: this engine proposes no.*leave it at 0"):
        config.require_default("max_tokens", "num_speculative_tokens", because="this engine proposes no tokens")
