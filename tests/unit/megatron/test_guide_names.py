"""The guide for users of Megatron-Core lists every documented name, and says correctly which of them exist here."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from echo_executor import EchoExecutor
from megatron.core.inference import async_stream as their_stream
from megatron.core.inference import data_parallel_inference_coordinator as their_coordinator
from megatron.core.inference import inference_client as their_client
from megatron.core.inference import inference_request as theirs
from megatron.core.inference import sampling_params as their_params
from megatron.core.inference.engines.dynamic_engine import DynamicInferenceEngine as TheirEngine

from megatron_runtime.megatron_core import (
    config,
    data_parallel_inference_coordinator,
    headers,
    inference_request,
)
from megatron_runtime.megatron_core.apis import MegatronAsyncLLM, MegatronLLM, ServeConfig
from megatron_runtime.megatron_core.apis._llm_base import _CoordinatorRuntime, _EventLoopManager, _MegatronLLMBase
from megatron_runtime.megatron_core.async_stream import AsyncStream
from megatron_runtime.megatron_core.contexts import dynamic_context
from megatron_runtime.megatron_core.data_parallel_inference_coordinator import DataParallelInferenceCoordinator
from megatron_runtime.megatron_core.engines.dynamic_engine import DynamicInferenceEngine
from megatron_runtime.megatron_core.inference_client import InferenceClient
from megatron_runtime.megatron_core.model_inference_wrappers.gpt import gpt_inference_wrapper
from megatron_runtime.megatron_core.sampling_params import SamplingParams
from megatron_runtime.megatron_core.text_generation_controllers import text_generation_controller
from megatron_runtime.protocol.headers import Header

PAGE = Path(__file__).parents[3] / "docs" / "guides" / "coming-from-megatron-core.md"
VERDICTS = ("same", "differs", "added", "accepted", "not available")
_ABSENT = object()

OURS: dict[str, tuple[Any, ...]] = {
    "MegatronLLM and MegatronAsyncLLM": (MegatronLLM, MegatronAsyncLLM),
    "ServeConfig": (ServeConfig,),
    "_EventLoopManager": (_EventLoopManager,),
    "_CoordinatorRuntime": (_CoordinatorRuntime,),
    "_MegatronLLMBase": (_MegatronLLMBase,),
    "InferenceConfig": (config.InferenceConfig,),
    "Enumerations": (
        config,
        config.AsyncScheduleMode,
        config.CudaGraphSizingDistribution,
        config.KVCacheManagementMode,
        config.PrefixCachingEvictionPolicy,
        config.PrefixCachingCoordinatorPolicy,
    ),
    "SamplingParams": (SamplingParams,),
    "InferenceClient": (InferenceClient,),
    "AsyncStream": (AsyncStream,),
    "Module inference_request": (inference_request,),
    "Status": (inference_request.Status,),
    "DynamicInferenceEventType": (inference_request.DynamicInferenceEventType,),
    "DynamicInferenceEvent": (inference_request.DynamicInferenceEvent,),
    "InferenceRequest": (inference_request.InferenceRequest,),
    "DynamicInferenceRequest": (inference_request.DynamicInferenceRequest,),
    "DynamicInferenceRequestRecord": (inference_request.DynamicInferenceRequestRecord,),
    "VLMInferenceRequest": (inference_request.VLMInferenceRequest,),
    "FinishedRequestRecord": (inference_request.FinishedRequestRecord,),
    "DataParallelInferenceCoordinator": (
        DataParallelInferenceCoordinator,
        DataParallelInferenceCoordinator.CoordinatorState,
    ),
    "DynamicInferenceEngine": (DynamicInferenceEngine,),
    "Other classes": (
        headers,
        data_parallel_inference_coordinator,
        text_generation_controller,
        text_generation_controller.TextGenerationController,
        gpt_inference_wrapper,
        gpt_inference_wrapper.GPTInferenceWrapper,
        dynamic_context,
        dynamic_context.DynamicInferenceContext,
        Header,
    ),
}
"""What the names of a section belong to."""

DOCUMENTED = {
    "MegatronLLM and MegatronAsyncLLM": """
        model tokenizer inference_config use_coordinator coordinator_host coordinator_port inference_wrapper_cls
        is_primary_rank engine context controller generate(prompts,sampling_params,multi_modal_data)
        pause() unpause() suspend() resume() shutdown() wait_for_shutdown() serve(serve_config,blocking)
        submit(coro) run_sync(coro)""",
    "ServeConfig": "host port parsers verbose frontend_replicas sock",
    "_EventLoopManager": "start() loop submit(coro) run_sync(coro) run_async(coro) stop()",
    "_CoordinatorRuntime": """
        engine is_primary coordinator_host coordinator_port setup(loop) teardown() client coord_addr""",
    "_MegatronLLMBase": """
        _loop_manager _coord_runtime _assert_primary() _assert_coordinator() _normalize_prompts(prompts)
        _generate_impl(prompts,sp) _pause_impl() _unpause_impl() _suspend_impl() _resume_impl() _shutdown_impl()
        _wait_for_shutdown_impl()""",
    "InferenceConfig": """
        block_size_tokens buffer_size_gb paused_buffer_size_gb max_requests max_tokens max_sequence_length
        unified_memory_level kv_cache_management_mode num_cuda_graphs cuda_graph_mixed_prefill_count
        cuda_graph_max_tokens use_cuda_graphs_for_non_decode_steps static_kv_memory_pointers
        materialize_only_last_token_logits enable_chunked_prefill num_speculative_tokens enable_prefix_caching
        prefix_caching_eviction_policy prefix_caching_coordinator_policy prefix_caching_routing_alpha
        track_paused_request_events track_generated_token_events sampling_backend offset_sampling_seed_by_dp_rank
        async_sched_mode logprobs_mode ep_consensus_interval disable_ep_consensus use_synchronous_zmq_collectives
        logging_step_interval pg_collection metrics_writer use_flashinfer_fused_rope request_metadata_types""",
    "Enumerations": """
        PERSIST OFFLOAD RECOMPUTE REF_ZERO LRU PrefixCachingCoordinatorPolicy LOAD_BALANCED FIRST_PREFIX_BLOCK
        LONGEST_PREFIX""",
    "SamplingParams": """
        temperature top_k top_p return_log_probs skip_prompt_log_probs return_segments num_tokens_to_generate
        num_tokens_total termination_id top_n_logprobs add_BOS stop_words detokenize_stop_sequence
        return_prompt_tokens streaming streaming_interval do_kv_handoff return_prompt_top_n_logprobs serialize()""",
    "InferenceClient": """
        inference_coordinator_port context socket completion_futures next_request_id listener_task
        add_request(prompt,sampling_params) _recv_task() _connect_with_inference_coordinator() start(loop)
        _send_signal_to_engines(signal) pause_engines() unpause_engines() suspend_engines() resume_engines()
        stop_engines() stop() deserialize add_request_streaming(prompt,sampling_params) abort_request(request_id)
        set_generation_epoch(epoch) shutdown_coordinator() start_cuda_profiler() stop_cuda_profiler()
        add_request_with_kv_handoff add_request_with_kv_handoff_streaming release_handoff""",
    "AsyncStream": "request_id cancel loop put(item) finish(error) finished generator() aclose()",
    "Module inference_request": """
        serialize_tensor(tensor) deserialize_tensor(tensor_as_list) HASH_PRIME HASH_BASE _hash_powers
        compute_block_hashes_batched(prompt_tokens,block_size)""",
    "Status": """
        WAITING_IN_QUEUE ACTIVE_AND_GENERATING_TOKENS ACTIVE_BUT_NOT_GENERATING_TOKENS COMPLETED FAILED""",
    "DynamicInferenceEventType": """
        ADD_ENGINE ADD_CONTEXT GENERATED_TOKEN PAUSE EVICT FINISH FAIL ERROR_TRANSIENT ERROR_NONTRANSIENT""",
    "DynamicInferenceEvent": "timestamp payload __post_init__() __str__() serialize() deserialize(obj)",
    "InferenceRequest": """
        request_id prompt sampling_params inference_parameters prompt_tokens arrival_time status encoder_prompt
        generated_text segments generated_segments generated_sequence_lengths generated_tokens prompt_log_probs
        generated_log_probs prompt_top_n_logprobs generated_top_n_logprobs generated_length tpot __post_init__()
        serialize() deserialize(obj) _post_deserialize(obj)""",
    "DynamicInferenceRequest": """
        request_id prompt prompt_tokens remaining_prompt_tokens policy_staleness kv_cache_staleness latency
        routing_indices finished_chunk_token_count stop_word_ids block_size_tokens enable_prefix_caching
        precomputed_block_hashes __post_init__() _compute_block_hashes() remaining_prompt_length ttft events
        event_add_engine generated_tokens __str__() serialize() _post_deserialize(obj) tracked_metadata
        get_metadata_types() add_event(type,payload) add_event_add_engine() add_event_add_context()
        add_event_generated_token(token,blocks_total,blocks_hashed_total,blocks_hashed_active,blocks_ref_count)
        add_event_pause() add_event_evict() add_event_finish() add_event_fail() add_event_error_transient(error)
        add_event_error_nontransient(error) succeeded() failed() uid policy_epoch kv_cache_epoch num_cached_tokens""",
    "DynamicInferenceRequestRecord": """
        requests latency from_request(request) __getitem__(idx) request_id
        _update_staleness_tensor(tensor,total_tokens,increment) increment_staleness(policy_only)
        checkpoint(tokenizer) merge(tokenizer) serialize() deserialize(obj)""",
    "VLMInferenceRequest": "num_img_embeddings_per_tile imgs num_tiles decoder_seq_length",
    "FinishedRequestRecord": "policy_epoch kv_cache_epoch num_evictions",
    "DataParallelInferenceCoordinator": """
        pipe_connection data_parallel_size tokenizer inference_coordinator_port deterministic_mode block_size_tokens
        enable_prefix_caching prefix_caching_coordinator_policy schedule_output_path router_socket
        identities_of_data_parallel_ranks request_id_to_client_id request_id_to_client_request_id next_request_id
        CoordinatorState RUNNING PAUSED SUSPENDED STOPPING get_next_data_parallel_rank() _remove_engine(identity)
        _send_to_engine(identity,payload) compute_request_hashes(prompt) get_best_data_parallel_rank(request_hashes)
        _update_rank_hashes(rank_identity,request_hashes) start() detokenize(finished_request) stop()
        entrypoint(pipe_connection,ready_event,data_parallel_size,tokenizer,inference_coordinator_port,deterministic_mode,block_size_tokens,enable_prefix_caching,prefix_caching_coordinator_policy,schedule_output_path)""",
    "DynamicInferenceEngine": """
        controller context engine_loop_task
        start_listening_to_data_parallel_coordinator(inference_coordinator_port,launch_inference_coordinator,loop)""",
    "Other classes": """
        TextGenerationController DynamicInferenceContext GPTInferenceWrapper SUBMIT_REQUEST_WITH_KV RELEASE_KV
        RequestOverflowError TokenOverflowError MaxSequenceLengthOverflowError BlockOverflowError
        ActiveRequestCountOverflowError TensorStateDeallocatedError AsyncZMQCommunicator""",
}
"""Classes, methods with their parameters, attributes, members and constants of the documented interface."""

RELEASE = {
    "SamplingParams": their_params.SamplingParams,
    "InferenceClient": their_client.InferenceClient,
    "AsyncStream": their_stream.AsyncStream,
    "Status": theirs.Status,
    "DynamicInferenceEventType": theirs.DynamicInferenceEventType,
    "DynamicInferenceEvent": theirs.DynamicInferenceEvent,
    "InferenceRequest": theirs.InferenceRequest,
    "DynamicInferenceRequest": theirs.DynamicInferenceRequest,
    "DynamicInferenceRequestRecord": theirs.DynamicInferenceRequestRecord,
    "VLMInferenceRequest": theirs.VLMInferenceRequest,
    "DataParallelInferenceCoordinator": their_coordinator.DataParallelInferenceCoordinator,
    "DynamicInferenceEngine": TheirEngine,
}
"""Classes of release 0.19.2."""


def _rows() -> Iterator[tuple[str, list[str], str]]:
    """Yield (section, names, verdict) of the tables' rows. A name may have parameters: `name(one,two)`."""
    section = ""
    for line in PAGE.read_text().splitlines():
        if line.startswith("#"):
            section = line.lstrip("# ")
        elif line.startswith("| ") and section in OURS and not line.startswith("| name |"):
            first, second = line.strip("| ").split(" | ", 1)
            yield section, [name.replace(", ", ",") for name in re.findall(r"`([^`]+)`", first)], second


ROWS = list(_rows())


def _listed(section: str) -> set[str]:
    return {name for at, names, _ in ROWS if at == section for name in names}


@pytest.fixture(scope="module")
def owners() -> dict[str, tuple[Any, ...]]:
    """OURS, with an object of each class whose attributes are set in its constructor."""
    engine = DynamicInferenceEngine(EchoExecutor(), config.InferenceConfig(max_sequence_length=64))
    coordinator = DataParallelInferenceCoordinator(None, 0, None)
    coordinator.stop()
    made = {
        "_MegatronLLMBase": MegatronLLM(model=engine, tokenizer=None),
        "_CoordinatorRuntime": _CoordinatorRuntime(
            engine, is_primary=True, coordinator_host=None, coordinator_port=None
        ),
        "InferenceClient": InferenceClient("127.0.0.1:1"),
        "AsyncStream": AsyncStream(0, lambda: None),
        "DataParallelInferenceCoordinator": coordinator,
        "DynamicInferenceEngine": engine,
        "Other classes": engine.context,
    }
    return {section: (*found, made[section]) if section in made else found for section, found in OURS.items()}


def _owner(found: tuple[Any, ...], name: str) -> Any:
    """Return the one of `found` that has an attribute, a field or an argument `name`; None if none has."""
    for owner in found:
        fields = getattr(owner, "__dataclass_fields__", {})
        arguments = inspect.signature(owner).parameters if isinstance(owner, type) else {}
        if inspect.getattr_static(owner, name, _ABSENT) is not _ABSENT or name in fields or name in arguments:
            return owner
    return None


@pytest.mark.parametrize("section", DOCUMENTED)
def test_every_documented_name_is_on_the_page(section: str) -> None:
    assert set(DOCUMENTED[section].split()) - _listed(section) == set()


@pytest.mark.parametrize("section", RELEASE)
def test_the_public_names_of_the_release_are_on_the_page(section: str) -> None:
    kind = RELEASE[section]
    names = {name for name in vars(kind) if not name.startswith("_")}
    if not issubclass(kind, Enum):
        names |= set(inspect.signature(kind).parameters)
    sections = {section, "InferenceRequest"} if issubclass(kind, theirs.InferenceRequest) else {section}
    assert names - {name.partition("(")[0] for at in sections for name in _listed(at)} == set()


@pytest.mark.parametrize(("section", "names", "verdict"), ROWS, ids=lambda value: str(value)[:40])
def test_the_page_says_which_names_exist(
    owners: dict[str, tuple[Any, ...]], section: str, names: list[str], verdict: str
) -> None:
    assert verdict.startswith(VERDICTS)
    for entry in names:
        name, _, parameters = entry.rstrip(")").partition("(")
        owner = _owner(owners[section], name)
        assert (owner is not None) is not verdict.startswith("not available"), f"{section}: {name}"
        if parameters:
            has = set(inspect.signature(getattr(owner, name)).parameters)
            assert set(parameters.split(",")) <= has, f"{section}: {entry}"
