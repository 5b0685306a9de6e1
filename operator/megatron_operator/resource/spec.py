"""`MegatronInference`: the spec and all its defaults.

A rule about several fields (`RULES`) has two forms: CEL for the API server, and Python for the offline commands
(`render`, `plan`). Tests verify that both forms give the same results.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, ClassVar

from pydantic import Field, ValidationError
from pydantic.alias_generators import to_camel

from megatron_operator.resource.base import ApiModel, SpecRule, section
from megatron_operator.resource.coordinator import CoordinatorSpec
from megatron_operator.resource.engine import CPU_CACHE_MEMORY, CPU_SEQUENCE_LENGTH, Backend, EngineSpec, Parallelism
from megatron_operator.resource.lifecycle import LifecycleSpec
from megatron_operator.resource.names import DECODE, PREFILL
from megatron_operator.resource.server import ServerSpec
from megatron_operator.resource.source import Dtype, ModelSpec, WeightsSpec
from megatron_operator.resource.states import DesiredState
from megatron_runtime.protocol import strict_json as json
from megatron_runtime.protocol.answer_formats import REASONING_PARSERS, TOOL_CALL_PARSERS

SHORT_NAME = "mi"

MAX_NAME_LENGTH = 40
NAME_PATTERN = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"
RESERVED_SUFFIX_PATTERN = (
    r"-(coordinator|standby|server|keys|config-[0-9a-f]+|rev-[0-9a-f]+|engine-[0-9]+|engines|prefill-[0-9]+)$"
)


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
        description="Age of the keys, in days, at which the operator rotates them automatically. Default: no "
        "automatic rotation.",
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
        description="Maximum number of additional engines during a rollout. These engines run the new revision, and "
        "are removed at the end. Raise it to keep the full capacity during rollouts, if there are free GPUs and "
        "memory.",
    )
    paused: bool = Field(
        default=False,
        description="Pause rollouts. The operator then replaces no engine and begins no update, and engines keep "
        "their revision when they restart.",
    )
    auto_update: bool = Field(
        default=False,
        description="Update the resource automatically when the operator is upgraded. Otherwise, the resource keeps "
        "its release until you run kubectl megatron update.",
    )

    @property
    def unavailable(self) -> int:
        """The effective value of maxUnavailable."""
        if self.max_unavailable is not None:
            return self.max_unavailable
        return 0 if self.max_surge else 1


MAX_RANKS = 256
"""Maximum number of ranks of one engine. The number is limited because rank 0 sends the plan of each step to every
other rank.
"""
_PARSERS: Mapping[str, tuple[str, ...]] = {
    "tool_call_parser": TOOL_CALL_PARSERS,
    "reasoning_parser": REASONING_PARSERS,
}
"""Values of fields of spec.server for native engines."""


def _parser_rule(field: str, names: tuple[str, ...]) -> SpecRule:
    """Return a rule for a field of spec.server: for native engines, its value must be one of `names`.

    vLLM servers check the field against the installed version of vLLM instead.
    """
    path = f"server.{to_camel(field)}"
    return SpecRule(
        f"self.engine.backend == 'VLLM' || !has(self.{path}) || self.{path} in [{', '.join(map(repr, names))}]",
        lambda spec: spec.engine.backend is Backend.VLLM or getattr(spec.server, field) in (None, *names),
        f"spec.{path}: must be one of {', '.join(names)}; names of vLLM parsers need spec.engine.backend VLLM",
        value=lambda spec: getattr(spec.server, field),
    )


_LOCATIONS = ("objectStore.url", "persistentVolumeClaim.path", "image.path")
"""Fields of spec.model.source in which {revision} is replaced."""


_HAS_REVISION = "(has(self.weights) && has(self.weights.revision))"


def _revision_rules(field: str) -> tuple[SpecRule, SpecRule]:
    source, placed = field.partition(".")[0], f"self.model.source.{field}.contains('{{revision}}')"
    absent = f"!has(self.model.source.{source})"

    def is_placed(spec: MegatronInferenceSpec) -> bool | None:
        """Return whether the value of `field` contains {revision}. Return None if the spec does not set `field`."""
        location = spec.model.source.location
        return None if location is None or location[0] != field else "{revision}" in location[1]

    return (
        SpecRule(
            f"{_HAS_REVISION} || {absent} || !{placed}",
            lambda spec: spec.weights_revision or is_placed(spec) is not True,
            f"spec.model.source.{field}: contains {{revision}}, so spec.weights.revision must be set",
        ),
        SpecRule(
            f"!{_HAS_REVISION} || {absent} || {placed}",
            lambda spec: not spec.weights_revision or is_placed(spec) is not False,
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
            f"!has(self.engine.roles) || self.engine.backend != 'VLLM' || ({_RANKS} == {_POD_DIVISOR} && "
            f"self.parallelism.pipeline == 1 && !{_IS_DATA_PARALLEL})",
            lambda spec: (
                spec.engine.roles is None
                or spec.engine.backend is not Backend.VLLM
                or (
                    spec.pods_per_engine == 1
                    and spec.parallelism.pipeline == 1
                    and not spec.parallelism.is_data_parallel
                )
            ),
            "spec.engine.roles: vLLM engines exchange KV only if an engine fits in one pod and spec.parallelism has "
            "no pipeline and no data; raise spec.engine.gpusPerPod (ranksPerPod) to the number of ranks and use "
            "tensor and expert only, or remove spec.engine.roles",
        ),
        SpecRule(
            f"!{_HAS_REVISION} || !has(self.model.source.huggingFace) || !has(self.model.source.huggingFace.revision)",
            lambda spec: (
                not spec.weights_revision
                or spec.model.source.hugging_face is None
                or spec.model.source.hugging_face.revision is None
            ),
            "spec.weights.revision: not allowed together with spec.model.source.huggingFace.revision; "
            "remove one of the two",
        ),
        *(rule for field in _LOCATIONS for rule in _revision_rules(field)),
        SpecRule(
            f"!{_HAS_REVISION} || !has(self.model.source.builtin)",
            lambda spec: not spec.weights_revision or spec.model.source.builtin is None,
            "spec.weights.revision: a builtin model has no other revisions; remove spec.weights",
        ),
        SpecRule(
            "!has(self.weights) || !has(self.weights.trainer) || self.engine.backend != 'VLLM' || "
            f"{_RANKS} == {_POD_DIVISOR}",
            lambda spec: not spec.has_trainer or spec.engine.backend is not Backend.VLLM or spec.pods_per_engine == 1,
            "spec.weights.trainer: vLLM engines over several pods receive no weights from a trainer; raise "
            "spec.engine.gpusPerPod (ranksPerPod) so that an engine fits in one pod, or set spec.engine.backend to "
            "Native",
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
        description="Desired state of the resource. Running serves requests. Paused stops generation and keeps all "
        "memory. Suspended stops generation and releases memory. Stopped finishes open requests and removes the "
        "engines.",
    )
    replicas: int = Field(
        default=1,
        ge=0,
        le=1024,
        description="Number of data-parallel engines, each with a copy of the weights. `kubectl scale` and "
        "autoscalers change it. With 0, the resource has no engine pods and requests wait. With spec.engine.roles, "
        "it is the number of decode engines.",
    )
    model: ModelSpec = Field(description="The model that the engines serve.")
    weights: WeightsSpec | None = Field(
        default=None, description="Revision of the weights, or the trainer that publishes them. Set exactly one field."
    )
    parallelism: Parallelism = section(
        Parallelism, "Parallel sizes of one engine. The product of the sizes is its number of ranks."
    )
    engine: EngineSpec = section(EngineSpec, "Settings of the engines.")
    coordinator: CoordinatorSpec = section(
        CoordinatorSpec, "Settings of the coordinator, which routes requests to engines."
    )
    server: ServerSpec = section(ServerSpec, "Settings of the servers, which offer the OpenAI-compatible HTTP API.")
    lifecycle: LifecycleSpec = section(LifecycleSpec, "Settings for pause, suspend, stop and restarts.")
    keys: KeysSpec = section(
        KeysSpec, "Settings for rotating the CURVE keys with which the components authenticate to each other."
    )
    rollout: RolloutSpec = section(RolloutSpec, "Settings for replacing engines after a change of the spec.")

    def engines_of(self, role: str) -> int:
        """Return the number of engines of a role."""
        if role == DECODE:
            return self.replicas
        return self.engine.roles.prefill.count(self.replicas) if self.engine.roles is not None else 0

    def count_field(self, role: str) -> str:
        """Return the spec field that sets the number of engines of a role."""
        roles = self.engine.roles
        is_ratio = roles is not None and roles.prefill.per_decode is not None
        return "spec.replicas" if role == DECODE or is_ratio else "spec.engine.roles.prefill.replicas"

    @property
    def num_engines(self) -> int:
        return self.engines_of(DECODE) + self.engines_of(PREFILL)

    @property
    def weights_revision(self) -> str:
        """Revision of the weights. The value is empty if it is not set."""
        return (self.weights.revision if self.weights is not None else None) or ""

    @property
    def has_trainer(self) -> bool:
        """Whether a trainer publishes the weights."""
        return self.weights is not None and self.weights.trainer is not None

    @property
    def max_sequence_length(self) -> int | None:
        """The effective model.maxSequenceLength, or None if the engines run on GPUs and choose the length."""
        return self.model.max_sequence_length or (None if self.engine.gpus_per_pod else CPU_SEQUENCE_LENGTH)

    @property
    def kv_cache_memory(self) -> str | None:
        """The effective engine.batching.kvCacheMemory.

        The value is None if the engines run on GPUs and measure the free memory.
        """
        return self.engine.batching.kv_cache_memory or (None if self.engine.gpus_per_pod else CPU_CACHE_MEMORY)

    @property
    def ranks_per_pod(self) -> int:
        """Number of ranks in each pod of an engine."""
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
        "-prefill-N, -config-HASH, -rev-HASH); choose another name",
        value=repr,
    ),
)
"""Rules about the name of a resource. A name that violates them leads to invalid names of its children."""
ADAPTER_NAME_RULE = SpecRule(
    "has(self.spec.model.name) || !has(self.spec.model.adapters) || "
    "self.spec.model.adapters.all(adapter, adapter.name != self.metadata.name)",
    lambda named: named[1].model.name or named[0] not in [adapter.name for adapter in named[1].model.adapters or ()],
    "spec.model.adapters: an adapter has the same name as the resource, which is also the name of the model; rename it",
    value=lambda named: repr(named[0]),
)
"""A rule about the pair of a resource's name and its spec."""


def parse_spec(spec: Mapping[str, Any]) -> MegatronInferenceSpec:
    """Return the typed spec of a resource from the API server or a file.

    Raises:
        pydantic.ValidationError: has the path of every invalid field.
    """
    return _parse_spec(json.dumps(spec))


@lru_cache(maxsize=1024)
def _parse_spec(text: str) -> MegatronInferenceSpec:
    """Return the spec that a JSON text describes. The result is cached, because specs rarely change.

    Strict JSON mode rejects what the API server's schema rejects, such as "yes" for a boolean.
    """
    return MegatronInferenceSpec.model_validate_json(text, strict=True)


def parse_stored_spec(spec: Mapping[str, Any]) -> tuple[MegatronInferenceSpec, tuple[str, ...]]:
    """Return the typed spec of a stored object, and the paths of its fields that this version does not know.

    The CRD of a later release may have allowed such fields. They are omitted from the typed spec at every depth.

    Raises:
        pydantic.ValidationError: a known field is invalid, as in parse_spec().
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
