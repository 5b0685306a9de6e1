"""Names that the profile `restricted` of the pod policy allows: variables, labels and annotations, each with a reason.

`pod_policy.py` applies them. A chart value adds further names.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Group:
    """Names of one kind that the profile `restricted` allows, and why."""

    reason: str
    names: tuple[str, ...]
    """A name that ends in `*` is a prefix."""
    value: str | None = None
    """Pattern of the values; a variable then has its value in the spec. None: any value."""


def _group(reason: str, names: str, *, prefix: str = "", value: str | None = None) -> Group:
    return Group(reason, tuple(prefix + name for name in names.split()), value)


ENVIRONMENT: dict[str, Group] = {
    "Locale": _group("formats of texts", "LANG LANGUAGE LC_*", value=r"[A-Za-z0-9_.@:-]*"),
    "Time zone": _group("times in logs", "TZ", value=r"[A-Za-z][A-Za-z0-9_+-]*(/[A-Za-z0-9_+-]+)*"),
    "Proxies": Group(
        "HTTPS stays end to end through a proxy, so it sees no token",
        tuple(name for each in ("HTTP", "HTTPS", "ALL", "NO") for name in (f"{each}_PROXY", f"{each.lower()}_proxy")),
    ),
    "This project": _group(
        "logging, number of threads and choice of built-in kernels",
        """
        LOG_LEVEL LOG_FORMAT THREADS CPU_ISA KERNELS KERNEL_ADD_RMS_NORM KERNEL_SWIGLU KERNEL_PAGED_DECODE
        KERNEL_PAGED_PREFILL KERNEL_QK_NORM_ROPE_APPEND KERNEL_SAMPLE KERNEL_MOE_ROUTING KERNEL_MOE_EXPERTS
        """,
        prefix="MEGATRON_",
    ),
    "Threads and allocator": _group(
        "number and placement of threads on the CPUs of the container, instruction sets, arenas of malloc",
        """
        OMP_NUM_THREADS OMP_WAIT_POLICY OMP_PROC_BIND OMP_PLACES OMP_DYNAMIC OMP_SCHEDULE OMP_STACKSIZE
        OMP_MAX_ACTIVE_LEVELS OMP_THREAD_LIMIT OMP_DISPLAY_ENV GOMP_CPU_AFFINITY GOMP_SPINCOUNT KMP_AFFINITY
        KMP_BLOCKTIME KMP_SETTINGS MKL_NUM_THREADS MKL_DYNAMIC MKL_CBWR MKL_ENABLE_INSTRUCTIONS OPENBLAS_NUM_THREADS
        NUMEXPR_NUM_THREADS RAYON_NUM_THREADS TOKENIZERS_PARALLELISM ONEDNN_MAX_CPU_ISA ONEDNN_VERBOSE
        ATEN_CPU_CAPABILITY MALLOC_ARENA_MAX MALLOC_TRIM_THRESHOLD_ MALLOC_MMAP_THRESHOLD_
        """,
    ),
    "Hugging Face": _group(
        "offline mode, timeouts and log level of downloads",
        """
        HF_HUB_OFFLINE TRANSFORMERS_OFFLINE HF_DATASETS_OFFLINE HF_HUB_DOWNLOAD_TIMEOUT HF_HUB_ETAG_TIMEOUT
        HF_HUB_DISABLE_TELEMETRY HF_HUB_DISABLE_PROGRESS_BARS HF_HUB_VERBOSITY HF_HUB_DISABLE_XET
        HF_XET_HIGH_PERFORMANCE TRANSFORMERS_VERBOSITY DO_NOT_TRACK
        """,
    ),
    "OpenTelemetry": _group(
        "where traces go, and how many; not the variables that name entry points or files",
        """
        SERVICE_NAME RESOURCE_ATTRIBUTES SDK_DISABLED TRACES_EXPORTER TRACES_SAMPLER TRACES_SAMPLER_ARG LOG_LEVEL
        EXPORTER_OTLP_ENDPOINT EXPORTER_OTLP_TRACES_ENDPOINT EXPORTER_OTLP_PROTOCOL EXPORTER_OTLP_TRACES_PROTOCOL
        EXPORTER_OTLP_HEADERS EXPORTER_OTLP_TRACES_HEADERS EXPORTER_OTLP_TIMEOUT EXPORTER_OTLP_TRACES_TIMEOUT
        EXPORTER_OTLP_COMPRESSION EXPORTER_OTLP_TRACES_COMPRESSION BSP_SCHEDULE_DELAY BSP_EXPORT_TIMEOUT
        BSP_MAX_QUEUE_SIZE BSP_MAX_EXPORT_BATCH_SIZE ATTRIBUTE_COUNT_LIMIT ATTRIBUTE_VALUE_LENGTH_LIMIT
        SPAN_ATTRIBUTE_COUNT_LIMIT SPAN_EVENT_COUNT_LIMIT
        """,
        prefix="OTEL_",
    ),
    "NVIDIA": _group(
        "constraints on the driver and its version, TF32",
        "NVIDIA_DISABLE_REQUIRE NVIDIA_REQUIRE_CUDA NVIDIA_REQUIRE_DRIVER NVIDIA_TF32_OVERRIDE",
    ),
    "NVIDIA driver libraries": _group(
        "the parts of the driver that computing needs; graphics and display would add devices",
        "NVIDIA_DRIVER_CAPABILITIES",
        value=r"(compute|utility|video|compat32)(,(compute|utility|video|compat32))*",
    ),
    "CUDA": _group(
        "queues, lazy loading of the program's own kernels, size of the cache, determinism",
        """
        CUDA_DEVICE_ORDER CUDA_DEVICE_MAX_CONNECTIONS CUDA_LAUNCH_BLOCKING CUDA_MODULE_LOADING CUDA_MODULE_DATA_LOADING
        CUDA_CACHE_DISABLE CUDA_CACHE_MAXSIZE CUDA_SCALE_LAUNCH_QUEUES CUBLAS_WORKSPACE_CONFIG CUBLASLT_WORKSPACE_SIZE
        CUDNN_CONV_WSCAP_DBG
        """,
    ),
    "PyTorch": _group(
        "allocator, watchdog of collectives, log level; not the variables that name modules or files",
        """
        PYTORCH_ALLOC_CONF PYTORCH_CUDA_ALLOC_CONF PYTORCH_NO_CUDA_MEMORY_CACHING TORCH_ALLOW_TF32_CUBLAS_OVERRIDE
        TORCH_CPP_LOG_LEVEL TORCH_SHOW_CPP_STACKTRACES TORCH_DISTRIBUTED_DEBUG TORCH_NCCL_ASYNC_ERROR_HANDLING
        TORCH_NCCL_AVOID_RECORD_STREAMS TORCH_NCCL_BLOCKING_WAIT TORCH_NCCL_CUDA_EVENT_CACHE TORCH_NCCL_DESYNC_DEBUG
        TORCH_NCCL_ENABLE_MONITORING TORCH_NCCL_ENABLE_TIMING TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC TORCH_NCCL_HIGH_PRIORITY
        TORCH_NCCL_TRACE_BUFFER_SIZE TORCH_NCCL_USE_COMM_NONBLOCKING
        """,
    ),
    "NCCL": _group(
        "transports, interfaces and tuning within the pod's network; not plugins, files and addresses",
        """
        DEBUG DEBUG_SUBSYS DEBUG_TIMESTAMP_FORMAT DEBUG_TIMESTAMP_LEVELS SOCKET_IFNAME SOCKET_FAMILY SOCKET_NTHREADS
        SOCKET_RETRY_CNT SOCKET_RETRY_SLEEP_MSEC NSOCKS_PERTHREAD OOB_NET_ENABLE OOB_NET_IFNAME IB_HCA IB_DISABLE
        IB_TIMEOUT IB_RETRY_CNT IB_GID_INDEX IB_ADDR_FAMILY IB_ADDR_RANGE IB_ROCE_VERSION_NUM IB_SL IB_TC IB_FIFO_TC
        IB_RETURN_ASYNC_EVENTS IB_AR_THRESHOLD IB_QPS_PER_CONNECTION IB_SPLIT_DATA_ON_QPS IB_CUDA_SUPPORT
        IB_PCI_RELAXED_ORDERING IB_ADAPTIVE_ROUTING IB_ECE_ENABLE IB_MERGE_NICS IB_PKEY IB_USE_INLINE MEM_SYNC_DOMAIN
        CUMEM_ENABLE CUMEM_HOST_ENABLE CROSS_NIC NET NET_GDR_LEVEL NET_GDR_READ NET_GDR_C2C NET_SHARED_BUFFERS
        NET_SHARED_COMMS P2P_DISABLE P2P_LEVEL P2P_DIRECT_DISABLE P2P_NET_CHUNKSIZE P2P_LL_THRESHOLD P2P_PXN_LEVEL
        P2P_USE_CUDA_MEMCPY PXN_DISABLE NVB_DISABLE NVLS_ENABLE MNNVL_ENABLE SHM_DISABLE SHM_USE_CUDA_MEMCPY BUFFSIZE
        NTHREADS LAUNCH_MODE ALGO PROTO MAX_NCHANNELS MIN_NCHANNELS MAX_CTAS MIN_CTAS CHECKS_DISABLE CHECK_POINTERS
        IGNORE_CPU_AFFINITY COLLNET_ENABLE COLLNET_NODE_THRESHOLD GRAPH_MIXING_SUPPORT GRAPH_REGISTER LOCAL_REGISTER
        DMABUF_ENABLE SET_STACK_SIZE SET_THREAD_NAME SINGLE_RING_THRESHOLD ALLOC_P2P_NET_LL_BUFFERS COMM_BLOCKING
        CGA_CLUSTER_SIZE WORK_FIFO_DEPTH RUNTIME_CONNECT NVLSTREE_MAX_CHUNKSIZE HOSTID RAS_ENABLE
        """,
        prefix="NCCL_",
    ),
    "Gloo, UCX and libfabric": _group(
        "transports and interfaces within the pod's network",
        """
        GLOO_SOCKET_IFNAME TP_SOCKET_IFNAME UCX_TLS UCX_NET_DEVICES UCX_IB_GID_INDEX UCX_IB_TRAFFIC_CLASS UCX_IB_SL
        UCX_MAX_RNDV_RAILS UCX_RNDV_SCHEME UCX_RNDV_THRESH UCX_SOCKADDR_TLS_PRIORITY UCX_LOG_LEVEL FI_PROVIDER
        FI_LOG_LEVEL FI_EFA_USE_DEVICE_RDMA FI_EFA_FORK_SAFE FI_EFA_SET_CUDA_SYNC_MEMOPS RDMAV_FORK_SAFE IBV_FORK_SAFE
        RDMAV_HUGEPAGES_SAFE MLX5_SINGLE_THREADED MLX5_SCATTER_TO_CQE
        """,
    ),
    "vLLM": _group(
        "choice of built-in kernels, limits, timeouts and log level; not plugins, files, servers and serialization",
        """
        ATTENTION_BACKEND FLASH_ATTN_VERSION USE_FLASHINFER_SAMPLER MLA_DISABLE USE_V1 USE_TRITON_AWQ
        USE_TRITON_FLASH_ATTN DISABLED_KERNELS USE_DEEP_GEMM USE_DEEP_GEMM_E8M0 MOE_USE_DEEP_GEMM SKIP_DEEP_GEMM_WARMUP
        DEEP_GEMM_WARMUP USE_FLASHINFER_MOE_FP16 USE_FLASHINFER_MOE_FP8 USE_FLASHINFER_MOE_FP4
        USE_FLASHINFER_MOE_MXFP4_BF16 FLASHINFER_MOE_BACKEND USE_FLASHINFER_MOE_MXFP4_MXFP8 USE_TRTLLM_ATTENTION
        USE_TRTLLM_FP4_GEMM USE_CUDNN_PREFILL USE_NVFP4_CT_EMULATIONS MARLIN_USE_ATOMIC_ADD MXFP4_USE_MARLIN
        TEST_FORCE_FP8_MARLIN ALLREDUCE_USE_SYMM_MEM ALL2ALL_BACKEND SKIP_P2P_CHECK PP_LAYER_PARTITION KV_CACHE_LAYOUT
        FUSED_MOE_CHUNK_SIZE ENABLE_FUSED_MOE_ACTIVATION_CHUNKING MOE_DP_CHUNK_SIZE MAX_TOKENS_PER_EXPERT_FP4_MOE
        USE_FUSED_MOE_GROUPED_TOPK ENABLE_CUDAGRAPH_GC CPU_KVCACHE_SPACE CPU_OMP_THREADS_BIND CPU_NUM_OF_RESERVED_CPU
        CPU_MOE_PREPACK CPU_SGL_KERNEL WORKER_MULTIPROC_METHOD ENABLE_V1_MULTIPROCESSING V1_OUTPUT_PROC_CHUNK_SIZE
        MSGPACK_ZERO_COPY_THRESHOLD MQ_MAX_CHUNK_BYTES_MB XGRAMMAR_CACHE_MB MM_INPUT_CACHE_GIB
        EXECUTE_MODEL_TIMEOUT_SECONDS ENGINE_ITERATION_TIMEOUT_S ENGINE_READY_TIMEOUT_S RPC_TIMEOUT
        RINGBUFFER_WARNING_INTERVAL SLEEP_WHEN_IDLE ALLOW_LONG_MAX_MODEL_LEN
        ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE COMPUTE_NANS_IN_LOGITS LOGITS_PROCESSOR_THREADS
        DISABLE_COMPILE_CACHE USE_STANDALONE_COMPILE CONFIGURE_LOGGING LOGGING_LEVEL LOGGING_PREFIX LOG_STATS_INTERVAL
        LOG_BATCHSIZE_INTERVAL NO_USAGE_STATS DO_NOT_TRACK ROCM_USE_AITER ROCM_USE_AITER_LINEAR ROCM_USE_AITER_MOE
        ROCM_USE_AITER_MLA ROCM_USE_AITER_MHA ROCM_USE_AITER_RMSNORM ROCM_USE_SKINNY_GEMM ROCM_FP8_PADDING
        ROCM_MOE_PADDING ROCM_CUSTOM_PAGED_ATTN ROCM_QUICK_REDUCE_QUANTIZATION ROCM_QUICK_REDUCE_CAST_BF16_TO_FP16
        """,
        prefix="VLLM_",
    ),
}
"""Variables that load no code, name no program, library, plugin or file, select no device, and redirect no token."""
SECRETS = _group(
    "take a value of a Secret and no other one; their readers validate it and never repeat it",
    """
    HF_TOKEN AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY AWS_SESSION_TOKEN GOOGLE_SERVICE_ACCOUNT_KEY
    AZURE_STORAGE_ACCOUNT_NAME AZURE_STORAGE_ACCOUNT_KEY AZURE_STORAGE_SAS_TOKEN AZURE_STORAGE_CLIENT_ID
    AZURE_STORAGE_CLIENT_SECRET AZURE_STORAGE_TENANT_ID
    """,
).names
PROTECTED = _group(
    "the operator depends on them, in both profiles: roots of caches, ranks, and the engine's command line",
    """
    HOME XDG_CACHE_HOME HF_HOME HF_HUB_CACHE HUGGINGFACE_HUB_CACHE MEGATRON_MODEL_CACHE TRITON_CACHE_DIR
    TORCHINDUCTOR_CACHE_DIR VLLM_CACHE_ROOT FLASHINFER_WORKSPACE_BASE MASTER_ADDR MASTER_PORT WORLD_SIZE NNODES
    NODE_RANK NPROC_PER_NODE RANK LOCAL_RANK LOCAL_WORLD_SIZE TENSOR_PARALLEL_SIZE PIPELINE_PARALLEL_SIZE
    EXPERT_PARALLEL_SIZE VLLM_HOST_IP MEGATRON_RESOURCE MEGATRON_PARENT_PID MEGATRON_ENGINE_BACKEND
    MEGATRON_VLLM_ARGUMENTS
    """,
).names
ANNOTATIONS: dict[str, Group] = {
    "Monitoring": _group("port and path at which Prometheus reads this object", "prometheus.io/*"),
    "No mesh": _group(
        "keeps the proxy of a service mesh out of the pod; any other value adds a container",
        "sidecar.istio.io/inject linkerd.io/inject kuma.io/sidecar-injection",
        value="false|disabled",
    ),
    "Checksums": _group("restart the pods when a chart changes a ConfigMap; no component reads them", "checksum/*"),
    "Clients": _group("only kubectl reads them", "kubectl.kubernetes.io/*"),
    "Schedulers": _group(
        "queue and group of the pod, as schedulerName and tolerations place it",
        """
        scheduling.k8s.io/group-name scheduling.x-k8s.io/pod-group kueue.x-k8s.io/* kai.scheduler/queue
        scheduling.volcano.sh/queue-name volcano.sh/queue-name yunikorn.apache.org/queue yunikorn.apache.org/app-id
        cluster-autoscaler.kubernetes.io/safe-to-evict karpenter.sh/do-not-disrupt
        """,
    ),
}
"""Annotations of pods, Services and Ingresses that configure no other component."""
LABELS: dict[str, Group] = {name: ANNOTATIONS[name] for name in ("No mesh", "Schedulers")}
"""Labels of pods. A Service could select by any other key, and `app.kubernetes.io/…` stays as rendered."""
