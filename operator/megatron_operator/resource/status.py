"""`MegatronInference`: the status."""

from __future__ import annotations

from pydantic import Field

from megatron_operator.resource.base import ApiModel, Time, list_by
from megatron_operator.resource.release import Release
from megatron_operator.resource.states import (
    DesiredState,
    KeyStage,
    LifecyclePhase,
    ResourceState,
    SignalKind,
    UpdatePhase,
)

HISTORY_LENGTH = 16
FAILED_REQUESTS = 16
VERIFIED_REVISIONS = 10


class Condition(ApiModel):
    type: str = Field(
        description="One of Ready, CoordinatorReady, EnginesReady, LifecycleSettled, Progressing, Degraded, "
        "UpdateAvailable, SingleServer, UnknownFields."
    )
    status: str = Field(description="True, False or Unknown.")
    reason: str = Field(description="Reason in CamelCase, for programs.")
    message: str = Field(description="Message of one sentence.")
    observed_generation: int = Field(
        description="Generation of the spec that the condition is about. That of Ready is the last one that was "
        "carried out, so that kubectl wait waits for a change."
    )
    last_transition_time: Time = Field(description="Time of the last change of the status.")


class LifecycleStatus(ApiModel):
    desired: DesiredState = Field(description="The desired state, as last seen.")
    observed: ResourceState = Field(description="The last observed state.")
    requested_at: Time | None = Field(default=None, description="Time when this desired state was first seen.")
    operation_id: str | None = Field(default=None, description="Id of the last operation; the same on every resend.")
    signal: SignalKind | None = Field(default=None, description="Signal of that operation.")
    engine: str | None = Field(default=None, description="The only engine that it is for; all if absent.")
    goal: DesiredState | None = Field(default=None, description="The desired state of the operation.")
    fence: int | None = Field(
        default=None, description="Fence of its signal: the term of the leader that sent it last, plus fenceOffset."
    )
    fence_offset: int | None = Field(
        default=None,
        description="Added to the leader's term if the coordinator has received fences of an earlier Lease.",
    )
    phase: LifecyclePhase | None = Field(default=None, description="Progress of the operation.")
    confirmed_ranks: int | None = Field(default=None, description="Ranks that have confirmed.")
    total_ranks: int | None = Field(default=None, description="Ranks that must confirm.")
    message: str | None = Field(default=None, description="The coordinator's error, if the operation failed.")
    weights: str | None = Field(default=None, description="UPDATE_WEIGHTS: revision of the weights.")
    source: str | None = Field(default=None, description="UPDATE_WEIGHTS: source of the weights.")
    epoch: int | None = Field(default=None, description="UPDATE_WEIGHTS: epoch of the weights.")
    adapters: str | None = Field(default=None, description="SET_ADAPTERS: digest of the list of adapters.")
    rejected: bool | None = Field(default=None, description="Whether it failed without an effect.")
    since: Time | None = Field(default=None, description="Time when it was started, confirmed or failed.")
    woken: bool | None = Field(
        default=None, description="Whether a request woke the suspended resource, which has not been idle since."
    )


class WeightsStatus(ApiModel):
    revision: str | None = Field(
        default=None, description="Revision of the weights that engines hold; absent with spec.weights.trainer."
    )
    model: str = Field(description="Hash of the model.")
    epoch: int | None = Field(default=None, description="Epoch of the last update in place; absent if there was none.")
    source: str | None = Field(
        default=None, description="With spec.weights.trainer: source of the weights that all engines serve."
    )
    digest: str | None = Field(
        default=None, description="With spec.weights.trainer: digest of these weights, the same on all engines."
    )
    different_digests: list[str] | None = Field(
        default=None,
        description="Digests of engines of one revision that differ although every engine has loaded the weights "
        "again.",
    )


class DownloadStatus(ApiModel):
    pod: str = Field(description="Pod that downloads.")
    bytes: int = Field(description="Bytes in the cache, also of earlier attempts.")
    total_bytes: int = Field(description="Bytes of the model.")
    bytes_per_second: int | None = Field(
        default=None, description="Rate of the last half minute; absent while unknown."
    )
    seconds_left: int | None = Field(default=None, description="Estimated time to the end at that rate.")


class LoadingStatus(ApiModel):
    pod: str = Field(description="Pod of the engine.")
    stage: str = Field(
        description="Download; Verify: the digest of the weights is computed; Load; Compile: kernels are compiled and "
        "warmed up; Capture: CUDA graphs are captured."
    )
    bytes: int | None = Field(default=None, description="Bytes of this stage that are done.")
    total_bytes: int | None = Field(default=None, description="Bytes of this stage.")
    seconds_left: int | None = Field(
        default=None, description="Estimated time to the end of this stage; absent while unknown."
    )


class LimitsStatus(ApiModel):
    max_sequence_length: int | None = Field(default=None, description="Prompt and answer of a request, in tokens.")
    kv_cache_bytes: int | None = Field(default=None, description="KV cache of each rank.")
    max_requests: int | None = Field(default=None, description="Requests that an engine runs at once.")
    max_tokens: int | None = Field(default=None, description="Tokens of a step.")


class AdapterStatusEntry(ApiModel):
    name: str = Field(description="Name in /v1/models.")
    source: str = Field(description="Source, as the engines load it.")
    engines: int = Field(default=0, description="Engines that have loaded it.")
    reason: str | None = Field(
        default=None, description="Why it is not loaded by every engine: AdapterFailed or UnsupportedByBackend."
    )
    error: str | None = Field(default=None, description="The error, with the name of the engine.")
    failed_at: Time | None = Field(default=None, description="Time of the error; it is tried again 30 s later.")


class FormatsStatus(ApiModel):
    tool_calls: str = Field(
        description="Format of the model's tool calls, a value of spec.server.toolCallParser; vllm:NAME: "
        "read by a parser of vLLM. none: unknown, calls are "
        "returned as text; or tools are not offered."
    )
    reasoning: str = Field(
        description="Format of the model's reasoning, a value of spec.server.reasoningParser; vllm:NAME: "
        "read by a parser of vLLM. none: it is part of the "
        "text."
    )


class KeysStatus(ApiModel):
    generation: int = Field(description="Generation of the CURVE keys; during a rotation the new generation.")
    stage: KeyStage = Field(description="Stage of the rotation.")
    since: Time | None = Field(default=None, description="Time of creation of this generation.")


class UpdateStatus(ApiModel):
    id: str = Field(description="Id of the operator's release; kubectl megatron update requests it.")
    phase: UpdatePhase = Field(description="Progress of the update.")


class StepStatus(ApiModel):
    step: str = Field(description="The current step.")
    waiting_on: str = Field(description="What the step waits for, in one sentence.")
    since: Time = Field(description="Since when.")


class EngineStatusEntry(ApiModel):
    name: str = Field(description="Name of the engine and of its StatefulSet.")
    state: str = Field(
        description="State that the engine last reported, or Pending, Loading, Released, Failed, Unresponsive, Lost, "
        "Unknown."
    )
    revision: str = Field(default="", description="Revision of its pods.")
    epoch: int = Field(default=0, description="Generation epoch of its weights.")
    ranks: int = Field(default=0, description="Ranks registered.")
    digest: str | None = Field(default=None, description="Digest of its weights; equal weights have equal digests.")
    weights: str | None = Field(
        default=None, description="Revision of the weights that it serves; absent if unknown or of another source."
    )
    canary: str | None = Field(
        default=None, description="Canary after a rollout: Pending, Passed, Failed, or Skipped if none can be sent."
    )
    canary_message: str | None = Field(default=None, description="Error of its canary's answer.")
    restarts: int = Field(default=0, description="Restarts of the engine with its current pods.")
    forgiven_at: Time | None = Field(default=None, description="Time when the restart budget is complete again.")
    incidents: int | None = Field(default=None, description="Restarts since it last served; absent if none.")
    retries: int | None = Field(
        default=None, description="Number of times that it was started again after an exhausted restart budget."
    )
    diagnosis: str | None = Field(
        default=None, description="Cause of the last restart of an exhausted restart budget. It has no pods."
    )
    retry_at: Time | None = Field(
        default=None,
        description="Time when it is started again after a cause in the infrastructure; not by itself if absent.",
    )

    avoided_nodes: list[str] | None = Field(
        default=None, description="Nodes where a GPU of the engine failed, which its new pods do not use."
    )
    avoided_until: Time | None = Field(default=None, description="Until when.")


class ComponentRestarts(ApiModel):
    component: str = Field(description="coordinator, engine or server.")
    count: int = Field(default=0, description="Container restarts of its current pods.")
    since: Time | None = Field(default=None, description="First restart of the last incident.")
    base: int | None = Field(default=None, description="Restarts before that incident.")
    reported: bool | None = Field(default=None, description="Whether an Event has reported it.")


class HistoryEntry(ApiModel):
    from_: str = Field(alias="from", description="State before.")
    to: str = Field(description="State after.")
    by: str = Field(description="Author of the request.")
    operation_id: str | None = Field(default=None, description="Operation that completed the transition.")
    at: Time = Field(description="Time when it was confirmed.")
    seconds: float = Field(description="Time from the request to the confirmation.")


class FailedRequestEntry(ApiModel):
    id: str = Field(description="Id of the request in the error of the OpenAI API and in the coordinator's log.")
    engines: list[str] = Field(description="Engines that it crashed, in order.")
    time: Time = Field(description="Time when the coordinator failed it.")


class MegatronInferenceStatus(ApiModel):
    manager: str | None = Field(
        default=None,
        description="Namespace and name of the Lease of the operator that manages the resource. Other operators leave "
        "the resource alone while it is renewed.",
    )
    observed_generation: int | None = Field(default=None, description="Last processed generation of the spec.")
    state: ResourceState | None = Field(
        default=None,
        description="State of the resource. Pending: it is not ready, also if every rank has confirmed the desired "
        "state (lifecycle.observed).",
    )
    ready: str | None = Field(
        default=None,
        description="Engines that serve and that clients reach through a server / desired engines, such as 2/2.",
    )
    model: str | None = Field(default=None, description="Name in /v1/models.")
    revision: str | None = Field(default=None, description="Revision of the engines of the current spec.")
    verified_revisions: list[str] | None = Field(
        default=None,
        description="The last revisions whose check passed or of which an engine served, the latest last; at most "
        f"{VERIFIED_REVISIONS}. A rollout to one of them needs no check.",
    )
    endpoint: str | None = Field(
        default=None, description="Base URL of the OpenAI API inside the cluster, as the Service has it."
    )
    epoch: int | None = Field(default=None, description="Generation epoch of the weights.")
    replicas: int | None = Field(default=None, description="Engines that exist.")
    ready_replicas: int | None = Field(default=None, description="Engines that are registered and serve or can serve.")
    updated_replicas: int | None = Field(
        default=None, description="Engines of the current revision that are verified to work."
    )
    selector: str | None = Field(default=None, description="Selects one pod of each engine, for autoscalers.")
    conditions: list[Condition] | None = Field(
        default=None,
        description="See docs/reference.",
        json_schema_extra=list_by("type"),
    )
    lifecycle: LifecycleStatus | None = Field(default=None, description="The current or last operation.")
    weights: WeightsStatus | None = Field(default=None, description="State of the weights of spec.weights.")
    download: DownloadStatus | None = Field(
        default=None, description="The download to spec.model.cache, every 10 s; absent if none is in progress."
    )
    formats: FormatsStatus | None = Field(
        default=None, description="Formats of answers that the servers read, as auto has recognised them or as set."
    )
    limits: LimitsStatus | None = Field(
        default=None,
        description="Limits that the engines report, those that they chose themselves included; of each the lowest.",
    )
    loading: LoadingStatus | None = Field(
        default=None,
        description="Progress of the first engine that loads, every 10 s; absent as soon as an engine is ready, or if "
        "the operator cannot connect to the pod.",
    )
    adapters: list[AdapterStatusEntry] | None = Field(
        default=None,
        description="The adapters of spec.model.adapters.",
        json_schema_extra=list_by("name"),
    )
    keys: KeysStatus | None = Field(default=None, description="State of the CURVE keys.")
    release: Release | None = Field(
        default=None,
        description="Release that coordinator, servers and engines are of. An upgrade of the operator does not change "
        "it before the resource is updated.",
    )
    update: UpdateStatus | None = Field(
        default=None, description="Update to the release of the operator; absent if the resource is up to date."
    )
    plan: StepStatus | None = Field(default=None, description="What the operator waits for; absent if nothing.")
    attempt: str | None = Field(
        default=None,
        description="Digest of the inputs of the engines and the last kubectl megatron restart. A new one resets the "
        "restart budgets.",
    )
    engines: list[EngineStatusEntry] | None = Field(
        default=None,
        description="The engines.",
        json_schema_extra=list_by("name"),
    )
    restarts: list[ComponentRestarts] | None = Field(
        default=None,
        description="Container restarts, by component; one Event reports each incident.",
        json_schema_extra=list_by("component"),
    )
    history: list[HistoryEntry] | None = Field(default=None, description="The last transitions, oldest first.")
    failed_requests: list[FailedRequestEntry] | None = Field(
        default=None,
        description="The last requests that were answered with engine_failed because they crash engines, oldest first; "
        f"at most {FAILED_REQUESTS}.",
    )
