"""Classifies the engine arguments of vLLM, for the operator and the engine. Imports no module of vLLM.

The names are the fields of vLLM's AsyncEngineArgs in the supported versions. A field of an object argument is named
`ARGUMENT.FIELD`. The operator checks the class of each argument before it changes a pod. The engine also checks names
and types against the installed version of vLLM.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from megatron_runtime.protocol import strict_json as json

_WORD = re.compile(r"[!-~]{1,256}")


class Effect(Enum):
    """The kinds of effects that an argument can have."""

    HARMLESS = "none of the others"
    CODE = "can load code"
    ACCESS = "opens a port or a file"
    FIELD = "conflicts with a field of the resource"
    ENGINE = "is set by the engine"


@dataclass(frozen=True, slots=True)
class Class:
    """The classification of one argument of vLLM.

    kind:   the effect that the argument can have.
    values: for a harmless argument, the values that load no code; empty means all values.
    field:  path of the custom resource's field that sets the argument; "" if there is no such field.
    """

    kind: Effect
    values: tuple[str, ...] = ()
    field: str = ""


def _members(names: str, kind: Effect, *, of: str = "") -> dict[str, Class]:
    return {f"{of}.{name}" if of else name: Class(kind) for name in names.split()}


_HARMLESS_MEMBERS = {
    "attention_config": """
        backend backend_per_kind disable_flashinfer_q_quantization flash_attn_max_num_splits_for_cuda_graph
        flash_attn_version flex_attn_block_m flex_attn_block_n flex_attn_kv_block_size flex_attn_q_block_size
        indexer_kv_dtype indexer_sparse_logits minimax_m3_msa_decode_backend mla_prefill_backend sparse_mla_force_mqa
        sparse_mla_prefill_workspace_factor tokenspeed_mla_min_split_kv tq_max_kv_splits_for_cuda_graph use_non_causal
        use_prefill_query_quantization use_trtllm_attention
        """,
    "aux_output_config": """
        enable_return_routed_experts max_bytes
        """,
    "compilation_config": """
        compile_cache_save_format compile_mm_encoder compile_ranges_endpoints compile_sizes cudagraph_capture_sizes
        cudagraph_copy_inputs cudagraph_decoder_replay cudagraph_mm_encoder cudagraph_mode cudagraph_num_of_warmups
        cudagraph_specialize_lora custom_ops decoder_replay_cudagraph_capture_sizes decoder_replay_trim_threshold
        encoder_cudagraph_max_frames_per_batch encoder_cudagraph_max_vision_items_per_batch
        encoder_cudagraph_token_budgets fast_moe_cold_start ir_enable_torch_wrap max_cudagraph_capture_size mode
        splitting_ops use_inductor_graph_partition
        """,
    "compilation_config.pass_config": """
        eliminate_noops enable_async_tp enable_qk_norm_rope_fusion enable_sp fi_allreduce_fusion_max_size_mb
        fuse_act_padding fuse_act_quant fuse_allreduce_rms fuse_attn_quant fuse_gemm_comms fuse_mla_dual_rms_norm
        fuse_norm_quant fuse_qk_norm_rope_kvcache fuse_rope_kvcache fuse_rope_kvcache_cat_mla
        rope_kvcache_fusion_max_token_num sp_min_token_num
        """,
    "compilation_config.dynamic_shapes_config": """
        assume_32_bit_indexing evaluate_guards type
        """,
    "engram_config": """
        cpu_offload dp_shared_memory embedding_across_dp use_thp
        """,
    "eplb_config": """
        communicator enable_migration_batching log_balancedness log_balancedness_interval num_redundant_experts policy
        step_interval use_async window_size
        """,
    "hf_overrides": """
        classifier_from_token is_matryoshka is_original_qwen3_reranker matryoshka_dimensions max_position_embeddings
        num_experts_per_tok rope_parameters rope_scaling rope_theta sliding_window
        """,
    "hf_overrides.text_config": """
        max_position_embeddings num_experts_per_tok rope_parameters rope_scaling rope_theta sliding_window
        """,
    "ir_op_priority": """
        fused_add_rms_norm gelu_and_mul_sparse rms_norm
        """,
    "kernel_config": """
        enable_cutedsl_warmup enable_flashinfer_autotune enable_jit_warmup enable_rocm_segmented_attn_autotune
        ir_op_priority linear_backend linear_backend_per_quant moe_backend sparse_indexer_topk_backend
        """,
    "kv_transfer_config": """
        enable_permute_local_kv kv_buffer_device kv_load_failure_policy kv_role
        """,
    "kv_transfer_config.kv_connector_extra_config": """
        block_size blocks_per_chunk cpu_bytes_to_use cpu_bytes_to_use_per_rank eviction_policy lazy_offload
        offload_prompt_only store_threshold
        """,
    "mamba_config": """
        backend enable_stochastic_rounding ssu_algorithm stochastic_rounding_philox_rounds
        """,
    "mm_processor_kwargs": """
        fps max_pixels min_pixels num_crops
        """,
    "model_loader_extra_config": """
        concurrency distributed enable_multithread_load memory_limit num_threads
        """,
    "pooler_config": """
        dimensions enable_flash_late_interaction logit_mean logit_sigma pooling_type returned_token_ids seq_pooling_type
        step_tag_id task tok_pooling_type use_activation
        """,
    "reasoning_config": """
        reasoning_end_str reasoning_parser reasoning_start_str
        """,
    "speculative_config": """
        attention_backend disable_eagle_block_drop disable_padded_drafter_batch draft_sample_method
        draft_tensor_parallel_size enforce_eager index_share_for_mtp_iteration kv_cache_dtype max_model_len model
        moe_backend num_speculative_tokens parallel_drafting prompt_lookup_max prompt_lookup_min quantization
        rejection_sample_method suffix_decoding_max_cached_requests suffix_decoding_max_spec_factor
        suffix_decoding_max_tree_depth suffix_decoding_min_token_prob use_heterogeneous_vocab
        use_local_argmax_reduction
        """,
}
CLASSES: Mapping[str, Class] = {
    **_members(
        """
        aggregate_engine_logging all2all_backend allow_deprecated_quantization async_scheduling attention_backend
        block_size calculate_kv_scales collect_detailed_traces config_format convert cp_kv_cache_interleave_size
        cpu_distributed_timeout_seconds cpu_offload_gb cpu_offload_params cudagraph_capture_sizes cudagraph_metrics
        custom_histogram_buckets dbo_decode_token_threshold dbo_prefill_token_threshold dcp_comm_backend
        dcp_kv_cache_interleave_size dcp_q_replicate decode_context_parallel_size disable_cascade_attn
        disable_chunked_mm_input disable_custom_all_reduce disable_hybrid_kv_cache_manager
        disable_nccl_for_dp_synchronization disable_sliding_window distributed_timeout_seconds dp_sync_interval
        enable_batch_sharded_sampling enable_bf16x3_router_gemm enable_cumem_allocator enable_dbo
        enable_ep_weight_filter enable_eplb enable_flashinfer_autotune enable_hc_sp enable_layerwise_nvtx_tracing
        enable_logging_iteration_details enable_lora enable_mamba_cache_stochastic_rounding
        enable_mamba_fine_grained_prefix_cache enable_mamba_shared_prefix_checkpoint enable_mfu_metrics
        enable_mixed_moe_lora_format enable_mm_processor_stats enable_moe_shared_loras enable_nccl_comm_suspend
        enable_return_routed_experts enable_shm_tensor_arena enable_tower_connector_lora enforce_eager
        expert_placement_strategy fail_on_environ_validation fully_sharded_loras gdn_prefill_backend
        gpu_memory_utilization ignore_patterns interleave_mm_strings jit_monitor_mode jit_monitor_verbose
        kda_decode_backend kda_prefill_backend kv_cache_dtype kv_cache_dtype_skip_layers kv_cache_metrics
        kv_cache_metrics_sample kv_offloading_size kv_sharing_fast_prefill language_model_only limit_mm_per_prompt
        linear_backend log_level logprobs_mode long_prefill_token_threshold long_prefill_token_threshold_adaptive
        lora_dtype lora_target_modules mamba_backend mamba_block_size mamba_cache_dtype mamba_cache_mode
        mamba_cache_philox_rounds mamba_ssm_cache_dtype mamba_ssu_algorithm max_cpu_loras max_cudagraph_capture_size
        max_long_partial_prefills max_lora_cls_labels max_lora_rank max_loras max_num_active_seqs
        max_num_partial_prefills max_num_scheduled_tokens max_parallel_loading_workers mm_device_do_normalize
        mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_save_margin mm_encoder_only
        mm_encoder_tp_mode mm_hasher_algorithm mm_ipc_gpu_memory_gb mm_processor_cache_gb mm_processor_cache_type
        mm_processor_device mm_shm_cache_max_object_size_mb mm_tensor_ipc moe_backend monokernel
        num_gpu_blocks_override numa_bind numa_bind_cpus numa_bind_nodes offload_backend offload_group_size
        offload_num_in_group offload_params offload_prefetch_step optimization_level override_attention_dtype
        per_request_spec_decode_metrics performance_mode prefill_schedule_interval prefix_cache_retention_interval
        prefix_caching_hash_algo prefix_match_unit pt_load_map_location quantization quantization_config
        reasoning_parser renderer_num_workers replayssm_buffer_len return_sampling_mask runner safetensors_load_strategy
        safetensors_prefetch_block_size safetensors_prefetch_num_threads scheduler_reserve_full_isl seed
        show_hidden_metrics_for_version shutdown_timeout skip_mm_profiling sleep_mode_backend
        sleep_mode_offload_cudagraph sleep_preserve_parameter_names sparse_indexer_topk_backend specialize_active_lora
        stream_interval swa_bounded_replay tokenizer_mode ubatch_size use_fp64_gumbel use_replayssm use_tqdm_on_load
        video_pruning_method video_pruning_rate watermark
        """,
        Effect.HARMLESS,
    ),
    **{
        name: classified
        for parent, names in _HARMLESS_MEMBERS.items()
        for name, classified in _members(names, Effect.HARMLESS, of=parent).items()
    },
    "kv_offloading_backend": Class(Effect.HARMLESS, values=("native",)),
    "kv_transfer_config.kv_connector": Class(
        Effect.HARMLESS, values=("OffloadingConnector", "SimpleCPUOffloadConnector")
    ),
    "kv_transfer_config.kv_connector_extra_config.spec_name": Class(Effect.HARMLESS, values=("CPUOffloadingSpec",)),
    "load_format": Class(
        Effect.HARMLESS, values=("auto", "dummy", "fastsafetensors", "mistral", "runai_streamer", "safetensors")
    ),
    "model_impl": Class(Effect.HARMLESS, values=("auto", "transformers", "vllm")),
    "speculative_config.method": Class(
        Effect.HARMLESS, values=("draft_model", "eagle", "eagle3", "mtp", "ngram", "ngram_gpu", "suffix")
    ),
    **_members(
        """
        additional_config code_revision compilation_config.backend compilation_config.inductor_compile_config
        compilation_config.inductor_passes diffusion_config ec_manager_config hf_overrides.architectures
        hf_overrides.auto_map hf_overrides.model_type io_processor_plugin
        kv_transfer_config.kv_connector_extra_config.spec_module_path kv_transfer_config.kv_connector_module_path
        log_config_file logging_config media_io_kwargs model_class_overrides reasoning_parser_plugin scheduler_cls
        speculative_config.code_revision trust_remote_code watchdog_config watermark_config worker_cls
        worker_extension_cls
        """,
        Effect.CODE,
    ),
    **_members(
        """
        allowed_local_media_path allowed_media_domains compilation_config.cache_dir compilation_config.debug_dump_path
        download_dir ec_transfer_config hf_config_path kv_transfer_config.engine_id
        kv_transfer_config.kv_connector_extra_config.disk_path
        kv_transfer_config.kv_connector_extra_config.secondary_tiers kv_transfer_config.kv_port
        mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path otlp_traces_endpoint profiler_config
        """,
        Effect.ACCESS,
    ),
    **_members(
        """
        disable_log_stats distributed_executor_backend elastic_ep_max_dp_size enable_elastic_ep
        enable_fault_tolerance enable_log_requests enable_mm_embeds enable_prompt_embeds enable_sleep_mode
        enable_trace_replay fault_tolerance_config generation_config kv_events_config logits_processors master_addr
        master_port max_logprobs max_num_queued_reqs max_num_queued_tokens nnodes node_rank override_generation_config
        pooler_config.enable_chunked_processing pooler_config.max_embed_len prefill_context_parallel_size
        ray_workers_use_nsight scheduling_policy served_model_name skip_tokenizer_init structured_outputs_config
        tokens_only
        """,
        Effect.ENGINE,
    ),
    **{
        name: Class(Effect.FIELD, field=field)
        for field, names in {
            "spec.engine.batching.chunkedPrefill": "enable_chunked_prefill",
            "spec.engine.batching.kvCacheMemory": "kv_cache_memory_bytes",
            "spec.engine.batching.maxRequests": "max_num_seqs",
            "spec.engine.batching.maxTokens": "max_num_batched_tokens",
            "spec.engine.batching.prefixCaching": "enable_prefix_caching",
            "spec.engine.gpusPerPod": "device_ids",
            "spec.engine.vllm.args.speculative_config": "spec_method spec_model spec_tokens",
            "spec.model.adapters": "default_mm_loras",
            "spec.model.dtype": "dtype",
            "spec.model.maxSequenceLength": "max_model_len",
            "spec.model.source": "model model_weights revision tokenizer tokenizer_revision",
            "spec.model.source.huggingFace.tokenSecretRef": "hf_token",
            "spec.parallelism.expert": "enable_expert_parallel",
            "spec.parallelism.pipeline": "pipeline_parallel_size",
            "spec.parallelism.tensor": "tensor_parallel_size",
            "spec.parallelism.data": "data_parallel_address data_parallel_backend data_parallel_external_lb "
            "data_parallel_hybrid_lb data_parallel_multi_port_external_lb data_parallel_rank data_parallel_rpc_port "
            "data_parallel_size data_parallel_size_local data_parallel_start_rank",
            "spec.weights": "weight_transfer_config",
        }.items()
        for name in names.split()
    },
}
"""The class of each argument, and of each member of an argument that is an object. An argument that is not listed
counts as CODE.
"""
WITHOUT_DRAFT_WEIGHTS = ("ngram", "ngram_gpu", "suffix")
"""Methods of speculative decoding without draft weights, which take the draft tokens from the tokens of the request."""
OBJECTS = frozenset(name.rpartition(".")[0] for name in CLASSES if "." in name)
"""Arguments and members that are objects and whose members have their own classes."""
_REQUIRED = {"speculative_config": "method"}
"""Required members of object arguments. Without them, vLLM chooses a value that depends on the model, or imports a
class.
"""
_DRAFT = re.compile(r"(hf:|s3://|gs://|az://|https://|/)[!-~]+")
"""Value that names a draft model. The engine resolves it like `spec.model.source`: "hf:ORG/NAME[@REVISION]", the URL of
an object store, or a path.
"""


def _leaves(arguments: Mapping[str, object], parent: str = "") -> Iterator[tuple[str, object, Class | None]]:
    """Yield the full name, value and class of each argument. An object argument yields its fields instead of itself.

    The class is None if the argument or field is unknown. A field is named `ARGUMENT.FIELD`.
    """
    required = _REQUIRED.get(parent)
    if required is not None and required not in arguments:
        yield f"{parent}.{required}", None, CLASSES[f"{parent}.{required}"]
    for key, value in sorted(arguments.items()):
        name = f"{parent}.{key}" if parent else key
        if "." in key:
            yield name, value, None
        elif name in OBJECTS and isinstance(value, Mapping):
            yield from _leaves(value, name)
        elif name in OBJECTS:
            yield name, value, Class(Effect.HARMLESS)
        else:
            yield name, value, CLASSES.get(name)


def _loads_code(value: object, classified: Class | None) -> bool:
    if classified is None or classified.kind is Effect.CODE:
        return True
    return bool(classified.values) and value not in classified.values


def code_arguments(arguments: Mapping[str, object]) -> Mapping[str, object]:
    """Return the vLLM arguments that can load code, with their values.

    A field of an object argument is named `ARGUMENT.FIELD`.
    """
    return {name: value for name, value, classified in _leaves(arguments) if _loads_code(value, classified)}


def problem_of(arguments: Mapping[str, object], *, allow_code: bool) -> str | None:
    """Return the reason to reject the first invalid argument, with its name and the remedy.

    Returns None if all arguments are allowed.

    allow_code: whether arguments that can load code are allowed.
    """
    for name, value, classified in _leaves(arguments):
        if _loads_code(value, classified):
            problem = None if allow_code else _code_problem(name, value, classified)
        else:
            assert classified is not None
            problem = _problem(name, value, classified)
        if problem is not None:
            return problem
    return _draft_problem(arguments)


def names_draft_model(arguments: Mapping[str, object]) -> bool:
    """Return whether speculative_config.model names a model.

    Returns False if speculative_config has a field that can load code. Such a field can change the meaning of `model`.
    """
    speculation = arguments.get("speculative_config")
    if not isinstance(speculation, Mapping) or "model" not in speculation:
        return False
    return not any(name.startswith("speculative_config.") for name in code_arguments(arguments))


def _draft_problem(arguments: Mapping[str, object]) -> str | None:
    speculation = arguments.get("speculative_config")
    if not isinstance(speculation, Mapping) or not names_draft_model(arguments):
        return None
    if _DRAFT.fullmatch(str(speculation["model"])):
        return None
    return (
        f"speculative_config.model is {json.dumps(speculation['model'])[:60]}: give hf:ORG/NAME[@REVISION], the URL "
        "of an object store, or an absolute path"
    )


def _code_problem(name: str, value: object, classified: Class | None) -> str:
    allow = "have the administrator allow it (vllm.allowCode)"
    if classified is None:
        return f"{name} is not known to this release, so it counts as loading code: correct the name, or {allow}"
    if classified.values:
        choices = ", ".join(classified.values)
        return f"{name} is {json.dumps(value)[:60]}, which can load code: set it to one of {choices}, or {allow}"
    return f"{name} can load code: leave it out, or {allow}"


def _problem(name: str, value: object, classified: Class) -> str | None:
    if classified.kind is Effect.FIELD:
        return f"{name} conflicts with {classified.field}: set that field instead"
    if classified.kind is not Effect.HARMLESS:
        return f"{name} {classified.kind.value}: leave it out"
    if name in OBJECTS:
        return f"{name} is {json.dumps(value)[:60]}: give an object"
    if not all(_WORD.fullmatch(text) and ".." not in text for text in _texts(value)):
        return f"{name} is {json.dumps(value)[:60]}: use words of at most 256 visible ASCII characters without .."
    return None


def _texts(value: object) -> Iterator[str]:
    """Yield all strings in a value, including the keys of maps."""
    if isinstance(value, str):
        yield value
    entries: Sequence[object] = ()
    if isinstance(value, Mapping):
        entries = [*value.keys(), *value.values()]
    elif isinstance(value, list):
        entries = value
    for entry in entries:
        yield from _texts(entry)
