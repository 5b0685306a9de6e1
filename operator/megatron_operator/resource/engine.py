"""`spec.engine` and `spec.parallelism`, which define one data-parallel engine, its ranks, its backend and its
limits.
"""

from __future__ import annotations

import math
from enum import StrEnum
from fractions import Fraction
from typing import Annotated, Any, ClassVar

from pydantic import Field, WithJsonSchema
from pydantic.alias_generators import to_camel

from megatron_operator.resource.accelerator import DEFAULT_RESOURCE, MIG_PREFIX, AcceleratorSpec
from megatron_operator.resource.base import ApiModel, Matches, PodTemplate, SpecRule, section
from megatron_operator.resource.names import DECODE, PREFILL

QUANTITY_PATTERN = r"^[1-9][0-9]*(\.[0-9]+)?(k|M|G|T|Ki|Mi|Gi|Ti)?$"
MAX_VLLM_ARGS = 64
MAX_ENGINES = 1024
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
        """Number of ranks of one engine."""
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
        description="Timeout of a step, in seconds. An engine with several ranks is restarted if none of its ranks "
        "makes progress for this long. Raise it if steps are slow.",
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


class RoleBatching(ApiModel):
    max_requests: int | None = Field(
        default=None, ge=1, le=65536, description="Instead of spec.engine.batching.maxRequests."
    )
    max_tokens: int | None = Field(
        default=None, ge=1, le=16_777_216, description="Instead of spec.engine.batching.maxTokens."
    )
    max_prefill_tokens: int | None = Field(
        default=None,
        ge=1,
        le=16_777_216,
        description="Instead of spec.engine.batching.maxPrefillTokens. Default of decode engines: 256.",
    )
    kv_cache_memory: CacheMemory | None = Field(
        default=None, max_length=20, description="Instead of spec.engine.batching.kvCacheMemory."
    )


class RoleSpec(ApiModel):
    batching: RoleBatching | None = Field(
        default=None, description="Limits of the engines of this role that differ from spec.engine.batching."
    )
    pod_template: PodTemplate | None = Field(
        default=None,
        description="Pod fields of the engines of this role, instead of spec.engine.podTemplate and with the same "
        "rules.",
    )


class PrefillRole(RoleSpec):
    RULES: ClassVar = (
        SpecRule(
            "!has(self.replicas) || !has(self.perDecode)",
            lambda role: role.replicas is None or role.per_decode is None,
            "spec.engine.roles.prefill.perDecode: not allowed together with spec.engine.roles.prefill.replicas; remove "
            "one of the two",
        ),
    )

    replicas: int | None = Field(
        default=None,
        ge=0,
        le=1024,
        description="Number of prefill engines; spec.replicas is the number of decode engines. Default: 1, or the "
        "product of perDecode and spec.replicas.",
    )
    per_decode: float | None = Field(
        default=None,
        ge=0.01,
        le=64,
        description="Number of prefill engines for each decode engine, such as 0.5. The product with spec.replicas is "
        "rounded up, and is at most 1024.",
    )

    def count(self, decode: int) -> int:
        """Return the number of prefill engines for this number of decode engines."""
        if self.per_decode is None:
            return 1 if self.replicas is None else self.replicas
        return min(MAX_ENGINES, math.ceil(Fraction(str(self.per_decode)) * decode))


class RolesSpec(ApiModel):
    prefill: PrefillRole = Field(description="Engines that compute long prompts for decode engines.")
    decode: RoleSpec | None = Field(
        default=None, description="Engines that import the KV of prompts and generate. spec.replicas counts them."
    )


def _role_rules(role: str) -> tuple[SpecRule, SpecRule]:
    """Return the rules of `Batching` for the engines of a role.

    The role's values override the values of all engines.
    """
    own, common, field = f"self.roles.{role}.batching", "self.batching", f"spec.engine.roles.{role}.batching"
    absent = f"!has(self.roles) || !has(self.roles.{role}) || !has({own})"

    def effective(name: str) -> str:
        return f"(has({own}.{name}) ? {own}.{name} : {common}.{name})"

    def is_known(name: str) -> str:
        return f"(has({own}.{name}) || (has({common}) && has({common}.{name})))"

    def has_tokens(engine: EngineSpec) -> bool:
        batching = engine.of_role(role).batching
        tokens, requests = batching.max_tokens, batching.max_requests
        return tokens is None or requests is None or tokens >= requests

    def has_chunks(engine: EngineSpec) -> bool:
        batching = engine.of_role(role).batching
        return batching.max_prefill_tokens is None or batching.chunked_prefill

    return (
        SpecRule(
            f"{absent} || !({is_known('maxTokens')} && {is_known('maxRequests')}) || "
            f"{effective('maxTokens')} >= {effective('maxRequests')}",
            has_tokens,
            f"{field}: maxTokens must be at least maxRequests, including the values of spec.engine.batching; raise "
            "maxTokens, or lower maxRequests",
        ),
        SpecRule(
            f"{absent} || !has({own}.maxPrefillTokens) || !has({common}) || {common}.chunkedPrefill",
            has_chunks,
            f"{field}.maxPrefillTokens: not allowed without spec.engine.batching.chunkedPrefill; enable it, or remove "
            f"{field}.maxPrefillTokens",
        ),
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
        SpecRule(
            "self.backend == 'Native' || !has(self.roles)",
            lambda engine: engine.backend is Backend.NATIVE or engine.roles is None,
            "spec.engine.roles: not allowed with spec.engine.backend VLLM, whose engines exchange no KV; set "
            "spec.engine.backend to Native, or remove spec.engine.roles",
        ),
        SpecRule(
            "!has(self.roles) || !has(self.batching) || self.batching.prefixCaching",
            lambda engine: engine.roles is None or engine.batching.prefix_caching,
            "spec.engine.batching.prefixCaching: is false, and engines with roles import KV into the prefix cache; set "
            "it to true, or remove spec.engine.roles",
        ),
        *(rule for role in (PREFILL, DECODE) for rule in _role_rules(role)),
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
    roles: RolesSpec | None = Field(
        default=None,
        description="Compute long prompts on other engines than those that generate. Native engines of one rank only. "
        "Default: every engine does both.",
    )
    pod_template: PodTemplate | None = Field(
        default=None,
        description="Pod fields such as resources, tolerations, affinity and volumes that the operator merges into "
        "the rendered pod. The container is called engine. In labels, annotations, claims of volumes and placement "
        "fields, $(ENGINE_INDEX) and $(ENGINE_NAME) are replaced by the index and name of the engine. The operator "
        "rejects fields that its pod policy does not allow.",
    )

    def of_role(self, role: str) -> EngineSpec:
        """Return the settings of the engines of a role, including the role's overrides."""
        own = getattr(self.roles, role) if self.roles is not None else None
        if own is None:
            return self
        changed: dict[str, Any] = {}
        if own.batching is not None:
            changed["batching"] = self.batching.model_copy(
                update=own.batching.model_dump(exclude_none=True, by_alias=False)
            )
        if own.pod_template is not None:
            changed["pod_template"] = own.pod_template
        return self.model_copy(update=changed)
