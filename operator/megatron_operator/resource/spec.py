"""`MegatronInference`: the spec and all its defaults.

A rule about several fields (`RULES`) has two forms: CEL for the API server, and Python for the offline commands
(`render`, `plan`). Tests check that both give the same results.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from functools import lru_cache
from typing import Annotated, Any, ClassVar

from pydantic import Field, ValidationError, WithJsonSchema
from pydantic.alias_generators import to_camel

from megatron_operator.resource.accelerator import DEFAULT_RESOURCE, MIG_PREFIX, AcceleratorSpec
from megatron_operator.resource.base import ApiModel, Matches, Name, PodTemplate, SpecRule, section
from megatron_operator.resource.server import ServerSpec
from megatron_operator.resource.source import Dtype, ModelSpec, WeightsSpec
from megatron_operator.resource.states import DesiredState
from megatron_runtime.protocol import strict_json as json
from megatron_runtime.protocol.answer_formats import REASONING_PARSERS, TOOL_CALL_PARSERS

SHORT_NAME = "mi"

MAX_NAME_LENGTH = 40
NAME_PATTERN = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"
RESERVED_SUFFIX_PATTERN = r"-(coordinator|standby|server|keys|config-[0-9a-f]+|rev-[0-9a-f]+|engine-[0-9]+|engines)$"
QUANTITY_PATTERN = r"^[1-9][0-9]*(\.[0-9]+)?(k|M|G|T|Ki|Mi|Gi|Ti)?$"

MAX_VLLM_ARGS = 64
VllmArgs = Annotated[
    dict[str, Any],
    Field(max_length=MAX_VLLM_ARGS),
    WithJsonSchema(
        {"type": "object", "maxProperties": MAX_VLLM_ARGS, "x-kubernetes-preserve-unknown-fields": True},
    ),
]
"""Engine arguments of vLLM by name. `render/vllm.py` checks them, because CEL cannot read untyped objects."""


class Backend(StrEnum):
    NATIVE = "Native"
    VLLM = "VLLM"


CPU_SEQUENCE_LENGTH = 4096
CPU_CACHE_MEMORY = "2Gi"
"""Defaults of engines on CPUs."""
CacheMemory = Annotated[
    str,
    Matches(
        QUANTITY_PATTERN,
        "a positive Kubernetes quantity of bytes, such as 2Gi or 512Mi",
    ),
]
Alpha = Annotated[
    str,
    Matches(
        r"^(0(\.[0-9]+)?|1(\.0+)?)$",
        "a decimal number from 0 to 1, such as 0.5",
    ),
]


class RoutingPolicy(StrEnum):
    LOAD_BALANCED = "LoadBalanced"
    ROUND_ROBIN = "RoundRobin"
    FIRST_PREFIX_BLOCK = "FirstPrefixBlock"
    LONGEST_PREFIX = "LongestPrefix"
    LEAST_COST = "LeastCost"


class PauseMode(StrEnum):
    HOLD = "Hold"
    REJECT = "Reject"


class SuspendLevel(StrEnum):
    OFFLOAD = "Offload"
    RELEASE_PODS = "ReleasePods"


class KvCacheMode(StrEnum):
    RECOMPUTE = "Recompute"
    PERSIST = "Persist"
    OFFLOAD = "Offload"


class PrefixEviction(StrEnum):
    LRU = "LRU"
    REF_ZERO = "RefZero"


class Parallelism(ApiModel):
    RULES: ClassVar = (
        SpecRule(
            "!has(self.data) || self.data == 1 || self.expert == 1 || self.expert == self.tensor * self.data",
            lambda sizes: not sizes.is_data_parallel or sizes.expert in (1, sizes.tensor * sizes.data),
            "spec.parallelism.expert: with spec.parallelism.data above 1, either no ranks or all ranks of a pipeline "
            "stage share the experts; set it to 1 or to tensor x data",
            value=lambda sizes: sizes.expert,
        ),
    )

    tensor: int = Field(
        default=1,
        ge=1,
        le=128,
        description="Number of ranks that split every layer (tensor parallelism). The number of attention heads "
        "must be a multiple of it. Raise it if the model does not fit on one device.",
    )
    pipeline: int = Field(
        default=1,
        ge=1,
        le=128,
        description="Number of pipeline stages, each with a share of the layers. It cannot exceed the number of "
        "layers.",
    )
    expert: int = Field(
        default=1,
        ge=1,
        le=256,
        description="Number of ranks that divide the experts of each layer among them (expert parallelism). The "
        "number of experts must be a multiple of it.",
    )
    data: int | None = Field(
        default=None,
        ge=1,
        le=256,
        description="Number of copies of the dense layers in one engine. vLLM engines with mixture-of-experts "
        "models only; for other models raise spec.replicas instead. Above 1, the engine has tensor x pipeline x "
        "data ranks, which must fit in one pod, and expert must be 1 or tensor x data.",
    )

    @property
    def is_data_parallel(self) -> bool:
        return (self.data or 1) > 1

    @property
    def ranks(self) -> int:
        """Ranks of one engine."""
        return self.tensor * self.pipeline * (self.data if self.data and self.data > 1 else self.expert)


class Batching(ApiModel):
    RULES: ClassVar = (
        SpecRule(
            "!has(self.maxTokens) || !has(self.maxRequests) || self.maxTokens >= self.maxRequests",
            lambda batching: (
                None in (batching.max_tokens, batching.max_requests) or batching.max_tokens >= batching.max_requests
            ),
            "spec.engine.batching.maxTokens: every running request takes one token of each step; set it to at least "
            "spec.engine.batching.maxRequests",
            value=lambda batching: f"{batching.max_tokens}, less than {batching.max_requests}",
        ),
        SpecRule(
            "!has(self.maxPrefillTokens) || self.chunkedPrefill",
            lambda batching: batching.max_prefill_tokens is None or batching.chunked_prefill,
            "spec.engine.batching.maxPrefillTokens: not allowed without spec.engine.batching.chunkedPrefill; enable "
            "it, or remove spec.engine.batching.maxPrefillTokens",
        ),
    )

    max_requests: int | None = Field(
        default=None,
        ge=1,
        le=65536,
        description="Maximum number of requests that an engine processes at the same time. Default: 64; on GPUs "
        "vLLM chooses. Raise it for throughput if the KV cache has space.",
    )
    max_tokens: int | None = Field(
        default=None,
        ge=1,
        le=16_777_216,
        description="Maximum number of tokens per step, prompt and decode, at least maxRequests. Default: 2048; on "
        "GPUs vLLM chooses. Raise it for throughput, lower it for latency.",
    )
    block_size_tokens: int = Field(
        default=256,
        ge=1,
        le=65536,
        description="Number of tokens per block of the prefix cache. Lower it to share shorter prefixes.",
    )
    kv_cache_memory: CacheMemory | None = Field(
        default=None,
        description="Memory for the KV cache of each rank, as a Kubernetes quantity. Default: 2Gi on CPUs; on GPUs, "
        "the memory that is free after the weights are loaded. Raise it if requests wait for KV blocks.",
        max_length=20,
    )
    prefix_caching: bool = Field(
        default=True, description="Reuse the KV blocks of earlier requests whose prompts begin with the same tokens."
    )
    chunked_prefill: bool = Field(
        default=True, description="Split long prompts over several steps, so that other requests continue meanwhile."
    )
    max_prefill_tokens: int | None = Field(
        default=None,
        ge=1,
        le=16_777_216,
        description="Maximum number of prompt tokens in a step that also decodes. Lower it for shorter gaps between "
        "tokens, at the cost of the time to the first token. Default: maxTokens. Native engines only.",
    )


class SleepLevel(StrEnum):
    HOST_MEMORY = "HostMemory"
    DISCARD = "Discard"


class VllmSpec(ApiModel):
    image: str | None = Field(
        default=None,
        description="Image of the engines: the runtime with vLLM. Default: the operator's vLLM image. Other "
        "repositories must be allowed by podPolicy.imageRepositories in the operator's chart.",
        max_length=512,
    )
    args: VllmArgs = Field(
        default_factory=dict,
        description="Engine arguments of vLLM by name, such as quantization: fp8. The operator rejects arguments "
        "that another field sets and arguments that open a port or a file. It rejects arguments that are unknown "
        "or can load code unless its chart sets vllm.allowCode.",
    )
    allow_pickle_between_pods: bool = Field(
        default=False,
        description="Accept that the pods of an engine exchange Python pickles without authentication, as vLLM does "
        "in engines of several pods. Any process that can connect to such a pod can run code in it; "
        "NetworkPolicies limit these connections to the pods of the same engine. Set it only if the cluster "
        "enforces NetworkPolicies.",
    )
    sleep_level: SleepLevel | None = Field(
        default=None,
        description="Effect of a suspend with level Offload on the weights in GPU memory. HostMemory moves them to "
        "host memory, for a faster resume; Discard drops them, and a resume reads their files again. Default: "
        "Discard, or HostMemory for speculative decoding with MTP, Eagle, Eagle3 or DraftModel, whose weights "
        "vLLM cannot reload.",
    )


class NativeSpec(ApiModel):
    kv_cache_mode: KvCacheMode = Field(
        default=KvCacheMode.RECOMPUTE,
        description="Effect of a suspend on the KV cache. Recompute drops it, and a resume computes it again; "
        "Persist keeps it in place; Offload moves it to host memory.",
    )
    prefix_eviction: PrefixEviction = Field(
        default=PrefixEviction.LRU,
        description="When unused blocks leave the prefix cache. LRU evicts them when their memory is needed; "
        "RefZero evicts them immediately.",
    )
    step_timeout_seconds: int = Field(
        default=60,
        ge=1,
        le=86400,
        description="Seconds without progress of any rank in a step after which an engine of several ranks exits "
        "and is restarted. Raise it if steps are slow.",
    )


class KvOffloadSpec(ApiModel):
    cpu_memory: CacheMemory = Field(
        description="Host memory for evicted KV blocks of all ranks of an engine together, as a Kubernetes quantity.",
        max_length=20,
    )


class SpeculativeMethod(StrEnum):
    NGRAM = "NGram"
    SUFFIX = "Suffix"
    MTP = "MTP"
    EAGLE = "Eagle"
    EAGLE3 = "Eagle3"
    DRAFT_MODEL = "DraftModel"


Quantization = Annotated[str, Matches(r"^[a-z0-9][a-z0-9_-]*$", "a quantization of vLLM, such as fp8 or awq")]
DraftModel = Annotated[
    str,
    Matches(
        r"^(hf:|s3://|gs://|az://|https://|/)[!-~]+$",
        "hf:ORG/NAME[@REVISION], the URL of an object store, or an absolute path",
    ),
]


class SpeculativeSpec(ApiModel):
    RULES: ClassVar = (
        SpecRule(
            "has(self.model) == (self.method in ['Eagle', 'Eagle3', 'DraftModel'])",
            lambda speculative: (
                (speculative.model is not None)
                == (
                    speculative.method
                    in (SpeculativeMethod.EAGLE, SpeculativeMethod.EAGLE3, SpeculativeMethod.DRAFT_MODEL)
                )
            ),
            "spec.engine.speculative.model: Eagle, Eagle3 and DraftModel need a draft model, and other methods "
            "have none; set or remove it",
        ),
    )

    method: SpeculativeMethod = Field(
        description="Source of the draft tokens. NGram and Suffix take them from the tokens of the request, MTP "
        "from layers of the model, and the other methods from a draft model."
    )
    tokens: int = Field(ge=1, le=64, description="Number of draft tokens per step.")
    model: DraftModel | None = Field(
        default=None,
        description="Draft model: hf:ORG/NAME[@REVISION], the URL of an object store, or a path in the engine's "
        "pod. Required by Eagle, Eagle3 and DraftModel.",
        max_length=256,
    )


TopologyKey = Annotated[
    str,
    Matches(
        r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$",
        "the key of a label of nodes, such as topology.kubernetes.io/zone",
    ),
]


class TopologySpec(ApiModel):
    pack_by: TopologyKey = Field(
        description="Node label by which the pods of one engine are placed together, such as the label of a rack or "
        "an NVLink domain. All nodes of an engine have the same value of the label. If no such group of nodes has "
        "enough capacity, the pods stay pending.",
        max_length=317,
    )


def _of_vllm_only(name: str) -> SpecRule:
    return SpecRule(
        f"self.backend == 'VLLM' || !has(self.{to_camel(name)})",
        lambda engine: engine.backend is Backend.VLLM or getattr(engine, name) is None,
        f"spec.engine.{to_camel(name)}: not allowed with spec.engine.backend Native; set spec.engine.backend to VLLM, "
        "or remove it",
    )


class EngineSpec(ApiModel):
    RULES: ClassVar = (
        SpecRule(
            "self.backend == 'VLLM' || !has(self.vllm)",
            lambda engine: engine.backend is Backend.VLLM or engine.vllm is None,
            "spec.engine.vllm: not allowed with spec.engine.backend Native; set spec.engine.backend to VLLM, or remove "
            "spec.engine.vllm",
        ),
        SpecRule(
            "self.backend == 'Native' || !has(self.image)",
            lambda engine: engine.backend is Backend.NATIVE or engine.image is None,
            "spec.engine.image: not allowed with spec.engine.backend VLLM; set spec.engine.vllm.image instead",
        ),
        SpecRule(
            "self.backend == 'Native' || !has(self.native)",
            lambda engine: engine.backend is Backend.NATIVE or engine.native is None,
            "spec.engine.native: not allowed with spec.engine.backend VLLM; set spec.engine.backend to Native, or "
            "remove spec.engine.native",
        ),
        SpecRule(
            "self.backend == 'Native' || !has(self.batching) || !has(self.batching.maxPrefillTokens)",
            lambda engine: engine.backend is Backend.NATIVE or engine.batching.max_prefill_tokens is None,
            "spec.engine.batching.maxPrefillTokens: not allowed with spec.engine.backend VLLM; set "
            "spec.engine.vllm.args.long_prefill_token_threshold instead",
        ),
        *map(_of_vllm_only, ("kv_offload", "quantization", "speculative")),
        SpecRule(
            "!has(self.accelerator) || self.gpusPerPod > 0",
            lambda engine: engine.accelerator is None or engine.gpus_per_pod > 0,
            "spec.engine.accelerator: spec.engine.gpusPerPod is 0, so engines run on CPUs; set it to the number of "
            "devices per pod, or remove spec.engine.accelerator",
        ),
        SpecRule(
            "!has(self.accelerator) || !has(self.accelerator.resource) || "
            f"!self.accelerator.resource.startsWith('{MIG_PREFIX}') || self.gpusPerPod == 1",
            lambda engine: engine.accelerator is None or not engine.accelerator.is_mig or engine.gpus_per_pod == 1,
            "spec.engine.gpusPerPod: must be 1 for a MIG profile, because CUDA shows one MIG device to a process; set "
            "it to 1, and raise spec.replicas for more throughput",
            value=lambda engine: engine.gpus_per_pod,
        ),
    )

    backend: Backend = Field(
        default=Backend.NATIVE,
        description="Engine implementation. Native is the engine of this project; VLLM runs vLLM with the same verbs.",
    )
    native: NativeSpec | None = Field(default=None, description="Settings of native engines.")
    vllm: VllmSpec | None = Field(default=None, description="Settings of vLLM engines.")
    kv_offload: KvOffloadSpec | None = Field(
        default=None,
        description="Keep evicted KV blocks in host memory, so that returning prompts need no prefill. vLLM engines "
        "only.",
    )
    quantization: Quantization | None = Field(
        default=None,
        description="Quantization method that vLLM applies to the weights, such as fp8. Leave it unset for models "
        "that are already quantized. vLLM engines only.",
        max_length=63,
    )
    speculative: SpeculativeSpec | None = Field(
        default=None,
        description="Speculative decoding: draft tokens that the model then verifies. It lowers latency if the load "
        "is light. vLLM engines only.",
    )
    image: str | None = Field(
        default=None,
        description="Image of native engines. Default: the operator's runtime image. Other repositories must be "
        "allowed by podPolicy.imageRepositories in the operator's chart.",
        max_length=512,
    )
    gpus_per_pod: int = Field(
        default=0,
        ge=0,
        le=64,
        description="Number of GPUs per pod, with one rank on each GPU. 0 runs the engines on CPUs.",
    )
    accelerator: AcceleratorSpec | None = Field(
        default=None, description=f"Device that gpusPerPod counts. Default: {DEFAULT_RESOURCE}."
    )
    ranks_per_pod: int = Field(default=1, ge=1, le=64, description="Number of ranks per pod for engines on CPUs.")
    batching: Batching = section(Batching, "Continuous batching and the KV cache.")
    startup_seconds: int = Field(
        default=1800,
        ge=10,
        le=86400,
        description="Seconds that a pod may take to load the model. After that the kubelet restarts it. Raise it "
        "for large models on slow storage.",
    )
    topology: TopologySpec | None = Field(default=None, description="Placement of the pods of one engine.")
    pod_template: PodTemplate | None = Field(
        default=None,
        description="Pod fields such as resources, tolerations, affinity and volumes that the operator merges into "
        "the rendered pod. The container is called engine. In labels, annotations and placement fields, "
        "$(ENGINE_INDEX) and $(ENGINE_NAME) are replaced by the index and name of the engine. The operator "
        "rejects fields that its pod policy does not allow.",
    )


class Routing(ApiModel):
    policy: RoutingPolicy | None = Field(
        default=None,
        description="Policy that chooses the engine of a request. Default: LeastCost, which suits most loads.",
    )
    alpha: Alpha = Field(
        default="0.5",
        description="Weight of the prefix match against free capacity, from 0 to 1, as a decimal string, for "
        "FirstPrefixBlock and LongestPrefix. Lower it if load is uneven.",
        max_length=20,
    )


class CoordinatorSpec(ApiModel):
    routing: Routing = section(Routing, "Routing of requests to engines.")
    replicas: int = Field(
        default=1,
        ge=1,
        le=2,
        description="Number of coordinators. 2 adds a standby on another node, which takes over within seconds if "
        "the active coordinator fails.",
    )
    priority_class_name: Name | None = Field(
        default=None,
        description="PriorityClass of the coordinator's pod. With a high priority, the scheduler preempts other "
        "pods for it on a full node. Names that begin with system- are not allowed.",
    )
    pod_template: PodTemplate | None = Field(
        default=None,
        description="Pod fields that the operator merges into the rendered pod. The container is called "
        "coordinator. The operator rejects fields that its pod policy does not allow.",
    )


class PauseSpec(ApiModel):
    mode: PauseMode = Field(
        default=PauseMode.HOLD,
        description="Handling of requests that arrive while paused or suspended. Hold queues them; Reject answers 503.",
    )
    max_queued: int = Field(
        default=10000,
        ge=1,
        le=10_000_000,
        description="Maximum number of requests that wait for an engine. The coordinator rejects further requests "
        "with 429.",
    )
    max_wait_seconds: int = Field(
        default=300,
        ge=1,
        le=86400,
        description="Seconds that a request waits for an engine. After that, the coordinator rejects it with 504.",
    )


class SuspendSpec(ApiModel):
    level: SuspendLevel = Field(
        default=SuspendLevel.OFFLOAD,
        description="What a suspend releases. Offload releases memory and keeps the pods, for a fast resume; "
        "ReleasePods also scales the engines to zero pods.",
    )
    escalate_after_seconds: int | None = Field(
        default=None,
        ge=0,
        le=31_536_000,
        description="Seconds after which a suspended resource with level Offload also releases its pods. Default: "
        "it keeps them.",
    )
    wake_on_request: bool = Field(
        default=False,
        description="Resume a suspended resource when a request arrives. It runs until it has been idle for "
        "idleSeconds or desiredState changes.",
    )
    idle_seconds: int = Field(
        default=600,
        ge=10,
        le=31_536_000,
        description="Seconds without a request after which a resource that a request has woken is suspended again.",
    )


class RestartBudget(ApiModel):
    restarts: int = Field(
        default=5,
        ge=0,
        le=1000,
        description="Number of restarts of one engine, with all its pods, that the operator tolerates in short "
        "succession.",
    )
    window_seconds: int = Field(
        default=600,
        ge=1,
        le=86400,
        description="Seconds after which the budget of an engine without further crashes is complete again. "
        "Restarts are forgiven one at a time, at equal intervals.",
    )


class LifecycleSpec(ApiModel):
    pause: PauseSpec = section(PauseSpec, "Handling of requests that arrive while paused or suspended.")
    suspend: SuspendSpec = section(SuspendSpec, "Behaviour of a suspended resource.")
    drain_seconds: int = Field(
        default=60,
        ge=0,
        le=86400,
        description="Seconds that open requests get to finish before an engine or server is removed. Raise it if "
        "answers are long.",
    )
    lost_node_seconds: int = Field(
        default=60,
        ge=0,
        le=86400,
        description="Seconds after which the operator force-deletes a terminating engine pod on a node that is not "
        "ready. The time counts from the end of the pod's grace period and from the moment the node became not "
        "ready. Pods on a ready node are never force-deleted.",
    )
    restart_budget: RestartBudget = section(RestartBudget, "Limit on the restarts of a crashing engine.")


class KeysSpec(ApiModel):
    generation: int = Field(
        default=1,
        ge=1,
        le=1_000_000_000,
        description="Generation of the CURVE keys. Raise it above status.keys.generation to rotate all keys without "
        "interrupting requests.",
    )
    rotate_after_days: int | None = Field(
        default=None,
        ge=1,
        le=36500,
        description="Age in days at which keys are rotated automatically. Default: keys are not rotated by age.",
    )


class RolloutSpec(ApiModel):
    RULES: ClassVar = (
        SpecRule(
            "!has(self.maxUnavailable) || self.maxUnavailable > 0 || self.maxSurge > 0",
            lambda rollout: rollout.max_unavailable != 0 or rollout.max_surge > 0,
            "spec.rollout.maxUnavailable: is 0 and spec.rollout.maxSurge is 0, so no engine can be replaced; raise one "
            "of them",
        ),
    )

    max_unavailable: int | None = Field(
        default=None,
        ge=0,
        le=1024,
        description="Maximum number of engines that are unavailable during a rollout. Default: 1, or 0 if maxSurge "
        "is set. Raise it for faster rollouts, at the cost of capacity.",
    )
    max_surge: int = Field(
        default=0,
        ge=0,
        le=1024,
        description="Maximum number of additional engines during a rollout. They have the new revision and are "
        "removed at the end. Each needs the GPUs and memory of an engine.",
    )
    paused: bool = Field(
        default=False,
        description="Pause rollouts: the operator replaces no engine and begins no update. Engines keep their "
        "revision when they restart.",
    )
    auto_update: bool = Field(
        default=False,
        description="Update the resource automatically when the operator is upgraded. Otherwise it keeps its "
        "release until you run kubectl megatron update.",
    )

    @property
    def unavailable(self) -> int:
        """Effective maxUnavailable."""
        if self.max_unavailable is not None:
            return self.max_unavailable
        return 0 if self.max_surge else 1


MAX_RANKS = 256
"""Limit of ranks of one engine: rank 0 sends the plan of each step to every other rank."""
_PARSERS: Mapping[str, tuple[str, ...]] = {
    "tool_call_parser": TOOL_CALL_PARSERS,
    "reasoning_parser": REASONING_PARSERS,
}
"""Values of fields of spec.server for native engines."""


def _parser_rule(field: str, names: tuple[str, ...]) -> SpecRule:
    """Return the rule that native engines have our formats. vLLM's server checks against the installed vLLM."""
    path = f"server.{to_camel(field)}"
    return SpecRule(
        f"self.engine.backend == 'VLLM' || !has(self.{path}) || self.{path} in [{', '.join(map(repr, names))}]",
        lambda spec: spec.engine.backend is Backend.VLLM or getattr(spec.server, field) in (None, *names),
        f"spec.{path}: must be one of {', '.join(names)}; names of vLLM parsers need spec.engine.backend VLLM",
        value=lambda spec: getattr(spec.server, field),
    )


_LOCATIONS = ("objectStore.url", "persistentVolumeClaim.path", "image.path")
"""Fields of spec.model.source in which {revision} is replaced."""


def _revision_rules(field: str) -> tuple[SpecRule, SpecRule]:
    source, placed = field.partition(".")[0], f"self.model.source.{field}.contains('{{revision}}')"
    absent = f"!has(self.model.source.{source})"

    def is_placed(spec: MegatronInferenceSpec) -> bool | None:
        """Return whether the field contains {revision}; None without the field."""
        location = spec.model.source.location
        return None if location is None or location[0] != field else "{revision}" in location[1]

    return (
        SpecRule(
            f"has(self.weights) || {absent} || !{placed}",
            lambda spec: spec.weights is not None or is_placed(spec) is not True,
            f"spec.model.source.{field}: contains {{revision}}, so spec.weights.revision must be set",
        ),
        SpecRule(
            f"!has(self.weights) || {absent} || {placed}",
            lambda spec: spec.weights is None or is_placed(spec) is not False,
            f"spec.model.source.{field}: has no {{revision}} placeholder for spec.weights.revision; add it there, or "
            "remove spec.weights",
        ),
    )


_POD_DIVISOR = "(self.engine.gpusPerPod > 0 ? self.engine.gpusPerPod : self.engine.ranksPerPod)"
_IS_DATA_PARALLEL = "(has(self.parallelism.data) && self.parallelism.data > 1)"
_RANKS = (
    "(self.parallelism.tensor * self.parallelism.pipeline * "
    f"({_IS_DATA_PARALLEL} ? self.parallelism.data : self.parallelism.expert))"
)
_NOT_VLLM_DTYPES = (Dtype.INT8, Dtype.INT4)


class MegatronInferenceSpec(ApiModel):
    RULES: ClassVar = (
        # The message cannot contain the values: the estimated cost of string() exceeds the budget.
        SpecRule(
            f"{_RANKS} % {_POD_DIVISOR} == 0",
            lambda spec: spec.parallelism.ranks % spec.ranks_per_pod == 0,
            "spec.parallelism: tensor x pipeline x expert (with data above 1: x data) must be divisible by "
            "spec.engine.gpusPerPod, or by spec.engine.ranksPerPod when gpusPerPod is 0; make one a multiple of the "
            "other",
            value=lambda spec: f"{spec.parallelism.ranks} ranks, {spec.ranks_per_pod} per pod",
        ),
        SpecRule(
            f"{_RANKS} <= {MAX_RANKS}",
            lambda spec: spec.parallelism.ranks <= MAX_RANKS,
            f"spec.parallelism: tensor x pipeline x expert (with data above 1: x data) must be at most {MAX_RANKS}, "
            "the maximum number of ranks of one engine; lower one of them, and raise spec.replicas for more throughput",
            value=lambda spec: spec.parallelism.ranks,
        ),
        SpecRule(
            f"!{_IS_DATA_PARALLEL} || (self.engine.backend == 'VLLM' && {_RANKS} == {_POD_DIVISOR})",
            lambda spec: (
                not spec.parallelism.is_data_parallel
                or (spec.engine.backend is Backend.VLLM and spec.pods_per_engine == 1)
            ),
            "spec.parallelism.data: above 1 requires spec.engine.backend VLLM and an engine that fits in one pod; set "
            "spec.engine.gpusPerPod (ranksPerPod) to tensor x pipeline x data, or remove it and raise spec.replicas",
            value=lambda spec: spec.parallelism.data,
        ),
        SpecRule(
            "!has(self.weights) || !has(self.model.source.huggingFace) || !has(self.model.source.huggingFace.revision)",
            lambda spec: (
                not (spec.weights and spec.model.source.hugging_face and spec.model.source.hugging_face.revision)
            ),
            "spec.weights.revision: not allowed together with spec.model.source.huggingFace.revision; "
            "remove one of the two",
        ),
        *(rule for field in _LOCATIONS for rule in _revision_rules(field)),
        SpecRule(
            "!has(self.weights) || !has(self.model.source.builtin)",
            lambda spec: spec.weights is None or spec.model.source.builtin is None,
            "spec.weights.revision: a builtin model has no other revisions; remove spec.weights",
        ),
        *(_parser_rule(field, names) for field, names in _PARSERS.items()),
        SpecRule(
            "self.engine.backend != 'VLLM' || !(self.model.dtype in "
            f"[{', '.join(repr(dtype.value) for dtype in _NOT_VLLM_DTYPES)}])",
            lambda spec: spec.engine.backend is not Backend.VLLM or spec.model.dtype not in _NOT_VLLM_DTYPES,
            "spec.model.dtype: vLLM quantizes with its argument quantization; use Auto, BFloat16, Float16 or Float32 "
            "and set spec.engine.vllm.args.quantization, or set spec.engine.backend to Native",
            value=lambda spec: spec.model.dtype.value,
        ),
        SpecRule(
            f"self.engine.backend != 'VLLM' || {_RANKS} == {_POD_DIVISOR} || "
            "(has(self.engine.vllm) && self.engine.vllm.allowPickleBetweenPods)",
            lambda spec: (
                spec.engine.backend is not Backend.VLLM
                or spec.pods_per_engine == 1
                or (spec.engine.vllm is not None and spec.engine.vllm.allow_pickle_between_pods)
            ),
            "spec.engine.vllm.allowPickleBetweenPods: vLLM engines over several pods exchange Python pickles without "
            "authentication, so a process that can connect to one of their pods can run code there; set it to true if "
            "the cluster enforces NetworkPolicies, or raise spec.engine.gpusPerPod (ranksPerPod) so that an engine "
            "fits in one pod",
        ),
    )

    desired_state: DesiredState = Field(
        default=DesiredState.RUNNING,
        description="State that the operator brings the resource to. Running serves requests. Paused stops "
        "generation and keeps all memory. Suspended also releases memory. Stopped finishes open requests and "
        "removes the engines.",
    )
    replicas: int = Field(
        default=1,
        ge=0,
        le=1024,
        description="Number of data-parallel engines, each with a copy of the weights. `kubectl scale` and "
        "autoscalers change it. 0 removes all engine pods.",
    )
    model: ModelSpec = Field(description="The model.")
    weights: WeightsSpec | None = Field(default=None, description="The revision of the weights.")
    parallelism: Parallelism = section(
        Parallelism, "Parallelism of one engine. The product of the sizes is its number of ranks."
    )
    engine: EngineSpec = section(EngineSpec, "State of each engine.")
    coordinator: CoordinatorSpec = section(CoordinatorSpec, "The coordinator.")
    server: ServerSpec = section(ServerSpec, "The OpenAI servers.")
    lifecycle: LifecycleSpec = section(LifecycleSpec, "Behaviour of pause, suspend and stop.")
    keys: KeysSpec = section(KeysSpec, "Rotation of the keys that the components authenticate with.")
    rollout: RolloutSpec = section(RolloutSpec, "How engines are updated.")

    @property
    def max_sequence_length(self) -> int | None:
        """Effective model.maxSequenceLength; None if the engines, which are on GPUs, choose it."""
        return self.model.max_sequence_length or (None if self.engine.gpus_per_pod else CPU_SEQUENCE_LENGTH)

    @property
    def kv_cache_memory(self) -> str | None:
        """Effective engine.batching.kvCacheMemory; None if the engines, which are on GPUs, measure it."""
        return self.engine.batching.kv_cache_memory or (None if self.engine.gpus_per_pod else CPU_CACHE_MEMORY)

    @property
    def ranks_per_pod(self) -> int:
        """Ranks in each pod of an engine."""
        return self.engine.gpus_per_pod or self.engine.ranks_per_pod

    @property
    def pods_per_engine(self) -> int:
        return self.parallelism.ranks // self.ranks_per_pod


NAME_RULES = (
    SpecRule(
        f"size(self.metadata.name) <= {MAX_NAME_LENGTH}",
        lambda name: len(name) <= MAX_NAME_LENGTH,
        f"metadata.name: use at most {MAX_NAME_LENGTH} characters, so that the names of its children fit",
        expression="'metadata.name: ' + self.metadata.name + "
        f"' is too long; use at most {MAX_NAME_LENGTH} characters, so that the names of its children fit'",
        value=repr,
    ),
    SpecRule(
        f"self.metadata.name.matches('{NAME_PATTERN}')",
        lambda name: re.fullmatch(NAME_PATTERN, name),
        "metadata.name: is not a DNS-1035 label; start with a letter and use only lower case letters, digits and '-'",
        value=repr,
    ),
    SpecRule(
        f"!self.metadata.name.matches('{RESERVED_SUFFIX_PATTERN}')",
        lambda name: not re.search(RESERVED_SUFFIX_PATTERN, name),
        "metadata.name: ends in a suffix that children use (-coordinator, -server, -keys, -engines, -engine-N, "
        "-config-HASH, -rev-HASH); choose another name",
        value=repr,
    ),
)
"""Rules about the name of a resource, which would lead to invalid names of its children."""
ADAPTER_NAME_RULE = SpecRule(
    "has(self.spec.model.name) || !has(self.spec.model.adapters) || "
    "self.spec.model.adapters.all(adapter, adapter.name != self.metadata.name)",
    lambda named: named[1].model.name or named[0] not in [adapter.name for adapter in named[1].model.adapters or ()],
    "spec.model.adapters: an adapter has the same name as the resource, which is also the name of the model; rename it",
    value=lambda named: repr(named[0]),
)
"""A rule about the name of a resource and its spec, as a pair."""


def parse_spec(spec: Mapping[str, Any]) -> MegatronInferenceSpec:
    """Return the typed spec of a resource from the API server or a file.

    Raises:
        pydantic.ValidationError: with the path of every invalid field.
    """
    return _parse_spec(json.dumps(spec))


@lru_cache(maxsize=1024)
def _parse_spec(text: str) -> MegatronInferenceSpec:
    """Parse a spec. Cached, because consecutive passes over a resource mostly parse the same spec.

    Strict JSON mode rejects what the API server's schema rejects, such as "yes" for a boolean.
    """
    return MegatronInferenceSpec.model_validate_json(text, strict=True)


def parse_stored_spec(spec: Mapping[str, Any]) -> tuple[MegatronInferenceSpec, tuple[str, ...]]:
    """Return the typed spec of a stored object, and the paths of its fields that this version does not know.

    The CRD of a later release may have set them. They are left out, at every depth.

    Raises:
        pydantic.ValidationError: as in parse_spec, for known fields.
    """
    return _parse_stored_spec(json.dumps(spec))


@lru_cache(maxsize=1024)
def _parse_stored_spec(text: str) -> tuple[MegatronInferenceSpec, tuple[str, ...]]:
    known = json.loads(text)
    paths: list[str] = []
    while True:
        try:
            return _parse_spec(json.dumps(known)), tuple(sorted(paths, key=lambda path: (path.count("."), path)))
        except ValidationError as error:
            unknown = [entry["loc"] for entry in error.errors() if entry["type"] == "extra_forbidden"]
            if not unknown:
                raise
        for *parents, field in unknown:
            owner = known
            for parent in parents:
                owner = owner[parent]
            del owner[field]
            paths.append(".".join(map(str, ("spec", *parents, field))))
