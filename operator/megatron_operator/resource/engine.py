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
"""Defaults of engines on CPUs: maximum sequence length in tokens, and memory of the KV cache."""
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
        "must be divisible by it. Raise it if the model does not fit on one device.",
    )
    pipeline: int = Field(
        default=1,
        ge=1,
        le=128,
        description="Number of pipeline stages, each of which runs a share of the layers. It cannot exceed the "
        "number of layers. Raise it if the model does not fit on the devices of one node.",
    )
    expert: int = Field(
        default=1,
        ge=1,
        le=256,
        description="Number of ranks that divide the experts of each layer among them (expert parallelism). The "
        "model's number of experts must be divisible by it. Raise it for mixture-of-experts models that do not fit "
        "on one device.",
    )
    data: int | None = Field(
        default=None,
        ge=1,
        le=256,
        description="Number of copies of the dense layers in one engine. Set it only for vLLM engines with "
        "mixture-of-experts models; for other models, raise spec.replicas instead. Above 1, the engine has tensor x "
        "pipeline x data ranks, which must fit in one pod, and expert must be 1 or tensor x data.",
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
        description="Maximum number of requests that an engine processes at the same time. Default: 64; on GPUs, "
        "vLLM chooses its own limit. Raise it for throughput if the KV cache has space.",
    )
    max_tokens: int | None = Field(
        default=None,
        ge=1,
        le=16_777_216,
        description="Maximum number of prompt and decode tokens per step. It must be at least maxRequests. Default: "
        "2048; on GPUs, vLLM chooses its own limit. Raise it for throughput, or lower it for latency.",
    )
    block_size_tokens: int = Field(
        default=256,
        ge=1,
        le=65536,
        description="Number of tokens per block of the prefix cache. Only whole blocks are shared, so lower it to "
        "share shorter prefixes.",
    )
    kv_cache_memory: CacheMemory | None = Field(
        default=None,
        description="Memory for the KV cache of each rank, as a Kubernetes quantity. Default: 2Gi on CPUs; on GPUs, "
        "the memory that is free after the weights are loaded. Raise it if requests wait for KV blocks.",
        max_length=20,
    )
    prefix_caching: bool = Field(
        default=True,
        description="Reuse the KV blocks of earlier requests whose prompts begin with the same tokens. Disable it "
        "to compute every prompt completely, for example in benchmarks.",
    )
    chunked_prefill: bool = Field(
        default=True,
        description="Split long prompts over several steps, so that other requests can continue between these "
        "steps. If it is disabled, each prompt is computed in one step.",
    )
    max_prefill_tokens: int | None = Field(
        default=None,
        ge=1,
        le=16_777_216,
        description="Maximum number of prompt tokens in a step that also decodes. Lower it for shorter gaps between "
        "tokens, at the cost of a longer time to the first token. Default: maxTokens. Native engines only.",
    )


class SleepLevel(StrEnum):
    HOST_MEMORY = "HostMemory"
    DISCARD = "Discard"


class VllmSpec(ApiModel):
    image: str | None = Field(
        default=None,
        description="Image of vLLM engines, which must contain this project's runtime and vLLM. Default: the "
        "operator's vLLM image. The chart value podPolicy.imageRepositories must allow any other repository.",
        max_length=512,
    )
    args: VllmArgs = Field(
        default_factory=dict,
        description="Engine arguments of vLLM by name, such as enforce_eager: true. The operator rejects arguments "
        "that another field sets and arguments that open a port or a file. Unless its chart sets vllm.allowCode, it "
        "also rejects arguments that are unknown or can load code.",
    )
    allow_pickle_between_pods: bool = Field(
        default=False,
        description="Allow vLLM engines of several pods, whose ranks exchange Python pickles without "
        "authentication. Any process that can connect to such a pod can run code in it. NetworkPolicies limit these "
        "connections to the pods of the same engine, so set it only if the cluster enforces NetworkPolicies.",
    )
    allow_nixl_between_pods: bool | None = Field(
        default=None,
        description="Allow vLLM engines with roles to exchange KV by NIXL, which neither authenticates nor encrypts "
        "connections. Any process that can connect to such a pod can read and write its KV. NetworkPolicies limit "
        "these connections to the engines of the resource, so set it only if the cluster enforces NetworkPolicies. "
        "Default: false.",
    )
    sleep_level: SleepLevel | None = Field(
        default=None,
        description="What happens to the weights in GPU memory when the resource is suspended with level Offload. "
        "HostMemory moves them to host memory, which makes the resume faster. Discard drops them, and the resume "
        "reads their files again. Default: Discard, or HostMemory for speculative decoding with MTP, Eagle, Eagle3 "
        "or DraftModel, whose weights vLLM cannot reload.",
    )


class NativeSpec(ApiModel):
    kv_cache_mode: KvCacheMode = Field(
        default=KvCacheMode.RECOMPUTE,
        description="What happens to the KV cache when the resource is suspended. Recompute drops it and computes "
        "it again on a resume. Persist keeps it in place, which releases less memory. Offload moves it to host "
        "memory.",
    )
    prefix_eviction: PrefixEviction = Field(
        default=PrefixEviction.LRU,
        description="Time at which unused blocks leave the prefix cache. LRU evicts the least recently used blocks "
        "when their memory is needed. RefZero evicts a block as soon as no request uses it.",
    )
    step_timeout_seconds: int = Field(
        default=60,
        ge=1,
        le=86400,
        description="Timeout of a step, in seconds. An engine of several ranks restarts if none of its ranks makes "
        "progress for this time. Raise it if steps take longer.",
    )


class KvOffloadSpec(ApiModel):
    cpu_memory: CacheMemory = Field(
        description="Host memory for evicted KV blocks, for all ranks of an engine together, as a Kubernetes quantity.",
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
        description="Source of the draft tokens. NGram and Suffix take them from the request's own tokens, MTP "
        "takes them from special layers of the model, and the other methods take them from a draft model."
    )
    tokens: int = Field(
        ge=1, le=64, description="Number of draft tokens per step. Lower it if the model rejects most drafts."
    )
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
        description="Key of a node label, such as the label for a rack or an NVLink domain. All pods of one engine "
        "run on nodes that have the same value of this label. If no such group of nodes has enough capacity, the "
        "pods stay pending.",
        max_length=317,
    )


class RoleBatching(ApiModel):
    max_requests: int | None = Field(
        default=None,
        ge=1,
        le=65536,
        description="Maximum number of requests that an engine of this role processes at the same time. Default: "
        "spec.engine.batching.maxRequests.",
    )
    max_tokens: int | None = Field(
        default=None,
        ge=1,
        le=16_777_216,
        description="Maximum number of tokens per step of an engine of this role. Default: "
        "spec.engine.batching.maxTokens.",
    )
    max_prefill_tokens: int | None = Field(
        default=None,
        ge=1,
        le=16_777_216,
        description="Maximum number of prompt tokens in a step that also decodes, for engines of this role. "
        "Default: spec.engine.batching.maxPrefillTokens; if that is not set, 256 for decode engines.",
    )
    kv_cache_memory: CacheMemory | None = Field(
        default=None,
        max_length=20,
        description="Memory for the KV cache of each engine of this role. Default: spec.engine.batching.kvCacheMemory.",
    )


class RoleSpec(ApiModel):
    batching: RoleBatching | None = Field(
        default=None, description="Limits that differ from spec.engine.batching for the engines of this role."
    )
    pod_template: PodTemplate | None = Field(
        default=None,
        description="Pod fields for the engines of this role, which replace spec.engine.podTemplate. The same rules "
        "apply.",
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
        description="Number of prefill engines. Default: 1, or perDecode times spec.replicas. spec.replicas sets "
        "the number of decode engines.",
    )
    per_decode: float | None = Field(
        default=None,
        ge=0.01,
        le=64,
        description="Number of prefill engines per decode engine, such as 0.5. The operator multiplies it by "
        "spec.replicas and rounds up, to at most 1024 engines. Set it instead of replicas if an autoscaler changes "
        "spec.replicas.",
    )

    def count(self, decode: int) -> int:
        """Return the number of prefill engines for this number of decode engines."""
        if self.per_decode is None:
            return 1 if self.replicas is None else self.replicas
        return min(MAX_ENGINES, math.ceil(Fraction(str(self.per_decode)) * decode))


class RolesSpec(ApiModel):
    prefill: PrefillRole = Field(
        description="Settings of prefill engines, which compute long prompts for decode engines."
    )
    decode: RoleSpec | None = Field(
        default=None,
        description="Settings of decode engines, which import the KV of prompts and generate. spec.replicas sets "
        "their number.",
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
            "self.backend == 'Native' || !has(self.roles) || "
            "(has(self.vllm) && has(self.vllm.allowNixlBetweenPods) && self.vllm.allowNixlBetweenPods)",
            lambda engine: (
                engine.backend is Backend.NATIVE
                or engine.roles is None
                or (engine.vllm is not None and engine.vllm.allow_nixl_between_pods is True)
            ),
            "spec.engine.vllm.allowNixlBetweenPods: vLLM engines with spec.engine.roles exchange KV by NIXL without "
            "authentication; set it to true if the cluster enforces NetworkPolicies, or remove spec.engine.roles",
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
        description="Implementation of the engines. Native is this project's engine. VLLM runs vLLM, which can be "
        "paused, suspended and updated in the same way.",
    )
    native: NativeSpec | None = Field(default=None, description="Settings that only native engines have.")
    vllm: VllmSpec | None = Field(default=None, description="Settings that only vLLM engines have.")
    kv_offload: KvOffloadSpec | None = Field(
        default=None,
        description="Keep KV blocks in host memory when they are evicted from the GPU. Set it if clients send the "
        "same long prompts again after other requests have evicted them. vLLM engines only.",
    )
    quantization: Quantization | None = Field(
        default=None,
        description="Quantization method that vLLM applies to the weights, such as fp8. Do not set it for models "
        "that are already quantized. Default: no quantization. vLLM engines only.",
        max_length=63,
    )
    speculative: SpeculativeSpec | None = Field(
        default=None,
        description="Settings for speculative decoding, in which the model verifies several draft tokens in one "
        "step. Set it to lower latency under light load. vLLM engines only.",
    )
    image: str | None = Field(
        default=None,
        description="Image of native engines. Default: the operator's runtime image. The chart value "
        "podPolicy.imageRepositories must allow any other repository.",
        max_length=512,
    )
    gpus_per_pod: int = Field(
        default=0,
        ge=0,
        le=64,
        description="Number of GPUs per pod. One rank runs on each GPU. With 0, the engines run on CPUs.",
    )
    accelerator: AcceleratorSpec | None = Field(
        default=None,
        description="Device that gpusPerPod counts. Set it for MIG profiles, accelerators of other vendors or "
        f"ResourceClaims. Default: {DEFAULT_RESOURCE}.",
    )
    ranks_per_pod: int = Field(
        default=1,
        ge=1,
        le=64,
        description="Number of ranks in each pod, for engines on CPUs. On GPUs, gpusPerPod sets this number.",
    )
    batching: Batching = section(Batching, "Limits of the batches and of the KV cache.")
    startup_seconds: int = Field(
        default=1800,
        ge=10,
        le=86400,
        description="Maximum number of seconds that a pod may take to load the model. After that, the kubelet "
        "restarts it. Raise it for large models on slow storage.",
    )
    topology: TopologySpec | None = Field(default=None, description="Settings for placing the pods of one engine.")
    roles: RolesSpec | None = Field(
        default=None,
        description="Separate engines for computing long prompts (prefill) and for generating (decode). Set it if "
        "long prompts make the gaps between tokens uneven. vLLM engines need one pod and vllm.allowNixlBetweenPods. "
        "Default: every engine does both.",
    )
    pod_template: PodTemplate | None = Field(
        default=None,
        description="Pod fields that the operator merges into each engine's pods, such as resources, tolerations, "
        "affinity and volumes. The container is called engine. In labels, annotations, volume claims and placement "
        "fields, the operator replaces $(ENGINE_INDEX) and $(ENGINE_NAME) by the index and name of the engine. It "
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
