"""The types of the status of `MegatronInference`."""

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
        "UpdateAvailable, SingleServer, UnknownFields, RoleMissing."
    )
    status: str = Field(description="True, False or Unknown.")
    reason: str = Field(description="Machine-readable reason in CamelCase.")
    message: str = Field(description="Explanation in one sentence.")
    observed_generation: int = Field(
        description="metadata.generation to which the condition refers. For Ready, it is the last generation that "
        "the operator has carried out, so that kubectl wait waits for a change to complete."
    )
    last_transition_time: Time = Field(description="Time of the last change of the status.")


class LifecycleStatus(ApiModel):
    desired: DesiredState = Field(description="Value of spec.desiredState that the operator last processed.")
    observed: ResourceState = Field(description="State that the operator last observed.")
    requested_at: Time | None = Field(default=None, description="Time when the operator first saw this desired state.")
    operation_id: str | None = Field(
        default=None, description="Id of the current or last operation. Every retry has the same id."
    )
    signal: SignalKind | None = Field(default=None, description="Signal of the operation.")
    engine: str | None = Field(
        default=None, description="Engine that receives the signal; absent if all engines receive it."
    )
    goal: DesiredState | None = Field(default=None, description="State that the operation leads to.")
    fence: int | None = Field(
        default=None,
        description="Number that orders the signals of successive leaders: the term of the leader that last sent "
        "the signal, plus fenceOffset. The coordinator rejects signals with a lower number.",
    )
    fence_offset: int | None = Field(
        default=None,
        description="Number that the operator adds to its term if the coordinator has received higher fences under "
        "an earlier Lease.",
    )
    phase: LifecyclePhase | None = Field(default=None, description="Progress of the operation.")
    confirmed_ranks: int | None = Field(default=None, description="Number of ranks that have confirmed the signal.")
    total_ranks: int | None = Field(default=None, description="Number of ranks that must confirm the signal.")
    message: str | None = Field(default=None, description="Error of the coordinator if the operation failed.")
    weights: str | None = Field(default=None, description="Revision of the weights that UPDATE_WEIGHTS sends.")
    source: str | None = Field(default=None, description="Source of the weights that UPDATE_WEIGHTS sends.")
    epoch: int | None = Field(default=None, description="Epoch of the weights that UPDATE_WEIGHTS sends.")
    adapters: str | None = Field(default=None, description="Digest of the list of adapters that SET_ADAPTERS sends.")
    rejected: bool | None = Field(default=None, description="Whether the operation failed without an effect.")
    since: Time | None = Field(
        default=None, description="Time of the last phase change: when the operation started, was confirmed or failed."
    )
    woken: bool | None = Field(
        default=None,
        description="Whether a request has woken the suspended resource, and the resource has not been idle since.",
    )


class WeightsStatus(ApiModel):
    revision: str | None = Field(
        default=None,
        description="Revision of the weights that the engines have loaded; absent with spec.weights.trainer.",
    )
    model: str = Field(description="Hash of the model.")
    epoch: int | None = Field(default=None, description="Epoch of the last weight update; absent if there was none.")
    source: str | None = Field(
        default=None,
        description="Source of the trainer's weights, which all engines serve; absent without spec.weights.trainer.",
    )
    digest: str | None = Field(
        default=None,
        description="Digest of the trainer's weights, which is the same on all engines; absent without "
        "spec.weights.trainer.",
    )
    different_digests: list[str] | None = Field(
        default=None,
        description="Weight digests of engines that serve the same revision, if they still differ after every "
        "engine has reloaded its weights. The files then differ between nodes.",
    )


class DownloadStatus(ApiModel):
    pod: str = Field(description="Pod that downloads the model.")
    bytes: int = Field(description="Number of bytes in the cache, including earlier interrupted downloads.")
    total_bytes: int = Field(description="Size of the model in bytes.")
    bytes_per_second: int | None = Field(
        default=None, description="Download rate over the last 30 s; absent while unknown."
    )
    seconds_left: int | None = Field(default=None, description="Estimated seconds until the download completes.")


class LoadingStatus(ApiModel):
    pod: str = Field(description="Pod that loads the model.")
    stage: str = Field(
        description="Current stage: Download, Verify (compute the digest of the weights), Load, Compile (compile "
        "and warm up kernels) or Capture (capture CUDA graphs)."
    )
    bytes: int | None = Field(default=None, description="Number of bytes that this stage has processed.")
    total_bytes: int | None = Field(default=None, description="Number of bytes that this stage must process.")
    seconds_left: int | None = Field(
        default=None, description="Estimated seconds until this stage completes; absent while unknown."
    )


class LimitsStatus(ApiModel):
    max_sequence_length: int | None = Field(
        default=None, description="Maximum number of tokens of a request, prompt plus answer."
    )
    kv_cache_bytes: int | None = Field(default=None, description="Size of the KV cache of each rank, in bytes.")
    max_requests: int | None = Field(
        default=None, description="Maximum number of requests that an engine processes at the same time."
    )
    max_tokens: int | None = Field(default=None, description="Maximum number of tokens per step.")


class AdapterStatusEntry(ApiModel):
    name: str = Field(description="Name of the adapter in /v1/models.")
    source: str = Field(description="Source from which the engines load the adapter.")
    engines: int = Field(default=0, description="Number of engines that have loaded the adapter.")
    reason: str | None = Field(
        default=None,
        description="Reason if not every engine has loaded the adapter: AdapterFailed or UnsupportedByBackend.",
    )
    error: str | None = Field(default=None, description="Last error, with the name of the engine.")
    failed_at: Time | None = Field(default=None, description="Time of the error. The operator retries 30 s later.")


class FormatsStatus(ApiModel):
    tool_calls: str = Field(
        description="Format of the model's tool calls: a value of spec.server.toolCallParser, or vllm:NAME for a "
        "parser of vLLM. none means that the servers offer no tools, or do not know the format and return calls "
        "as text."
    )
    reasoning: str = Field(
        description="Format of the model's reasoning: a value of spec.server.reasoningParser, or vllm:NAME for a "
        "parser of vLLM. none means that reasoning stays in the text."
    )


class KeysStatus(ApiModel):
    generation: int = Field(description="Generation of the CURVE keys. During a rotation it is the new generation.")
    stage: KeyStage = Field(description="Stage of the rotation.")
    since: Time | None = Field(default=None, description="Time when this generation of keys was created.")


class UpdateStatus(ApiModel):
    id: str = Field(description="Id of the operator's release, to which kubectl megatron update updates the resource.")
    phase: UpdatePhase = Field(description="Progress of the update.")


class StepStatus(ApiModel):
    step: str = Field(description="Step that the operator is performing.")
    waiting_on: str = Field(description="What the step is waiting for, in one sentence.")
    since: Time = Field(description="Time when the wait began.")


class EngineStatusEntry(ApiModel):
    name: str = Field(description="Name of the engine and of its StatefulSet.")
    state: str = Field(
        description="State that the engine last reported, or, if the engine does not report a state: Pending, "
        "Loading, Released, Failed, Unresponsive, Lost or Unknown."
    )
    role: str | None = Field(default=None, description="Role of the engine; absent without spec.engine.roles.")
    recomputes: str | None = Field(
        default=None,
        description="Cause why a decode engine cannot import the KV of any prefill engine and computes all prompts "
        "itself; absent otherwise.",
    )
    revision: str = Field(default="", description="Revision of the engine's pods.")
    epoch: int = Field(default=0, description="Epoch of the weights that the engine has loaded.")
    ranks: int = Field(default=0, description="Number of ranks that are registered with the coordinator.")
    digest: str | None = Field(
        default=None, description="Digest of the weights that the engine has loaded. Equal weights have equal digests."
    )
    weights: str | None = Field(
        default=None,
        description="Revision of the weights that the engine serves; absent if the revision is unknown or the "
        "weights come from a trainer.",
    )
    canary: str | None = Field(
        default=None,
        description="Result of the canary request after a rollout: Pending, Passed, Failed, or Skipped if no canary "
        "can be sent.",
    )
    canary_message: str | None = Field(default=None, description="Error in the answer to the canary request.")
    restarts: int = Field(default=0, description="Number of restarts of the engine's current pods.")
    forgiven_at: Time | None = Field(
        default=None, description="Time when the engine's restart budget is fully restored."
    )
    incidents: int | None = Field(
        default=None, description="Number of restarts since the engine last served; absent if there were no restarts."
    )
    retries: int | None = Field(
        default=None,
        description="Number of times that the operator has restarted the engine after its restart budget was "
        "exhausted.",
    )
    diagnosis: str | None = Field(
        default=None,
        description="Cause of the crash that exhausted the restart budget. While it is set, the engine has no pods.",
    )
    retry_at: Time | None = Field(
        default=None,
        description="Time of the next automatic restart, if the cause is in the infrastructure; absent if there is "
        "no automatic restart.",
    )

    avoided_nodes: list[str] | None = Field(
        default=None, description="Nodes on which a GPU of the engine failed. New pods of the engine avoid them."
    )
    avoided_until: Time | None = Field(default=None, description="Time until which new pods avoid these nodes.")


class RoleStatus(ApiModel):
    name: str = Field(description="Name of the role: prefill or decode.")
    desired: int = Field(description="Desired number of engines of the role.")
    ready: int = Field(description="Number of engines of the role that are registered with the coordinator.")
    updated: int = Field(
        description="Number of engines of this role that run the current revision and have passed their canary."
    )


class ComponentRestarts(ApiModel):
    component: str = Field(description="Name of the component: coordinator, engine or server.")
    count: int = Field(default=0, description="Number of container restarts of the component's current pods.")
    since: Time | None = Field(default=None, description="Time of the first restart of the last incident.")
    base: int | None = Field(default=None, description="Number of restarts before the last incident.")
    reported: bool | None = Field(default=None, description="Whether an Event has reported the last incident.")


class HistoryEntry(ApiModel):
    from_: str = Field(alias="from", description="State before the transition.")
    to: str = Field(description="State after the transition.")
    by: str = Field(description="User or program that requested the transition.")
    operation_id: str | None = Field(default=None, description="Operation that completed the transition.")
    at: Time = Field(description="Time when the transition was confirmed.")
    seconds: float = Field(description="Seconds from the request to the confirmation.")


class FailedRequestEntry(ApiModel):
    id: str = Field(description="Id of the request, as in the error of the OpenAI API and in the coordinator's log.")
    engines: list[str] = Field(description="Engines that the request crashed, in order.")
    time: Time = Field(description="Time when the coordinator answered the request with an error.")


class MegatronInferenceStatus(ApiModel):
    manager: str | None = Field(
        default=None,
        description="Namespace and name of the Lease of the operator that manages the resource. Other operators do "
        "not change the resource while this Lease is renewed.",
    )
    observed_generation: int | None = Field(
        default=None, description="metadata.generation that the operator last processed."
    )
    state: ResourceState | None = Field(
        default=None,
        description="State of the resource. It is Pending until the resource is ready, even if every rank has "
        "confirmed the desired state (lifecycle.observed).",
    )
    ready: str | None = Field(
        default=None,
        description="Number of engines that clients can reach through a server, and number of desired engines, such "
        "as 2/2.",
    )
    model: str | None = Field(default=None, description="Name of the model in /v1/models.")
    revision: str | None = Field(default=None, description="Revision of the engines that the current spec describes.")
    verified_revisions: list[str] | None = Field(
        default=None,
        description=f"Last {VERIFIED_REVISIONS} revisions that passed the check of a rollout or that an engine has "
        "served, latest last. A rollout to such a revision needs no check.",
    )
    endpoint: str | None = Field(default=None, description="Base URL of the OpenAI API in the cluster.")
    epoch: int | None = Field(
        default=None,
        description="Epoch of the weights in use, which increases with each weight update.",
    )
    replicas: int | None = Field(default=None, description="Number of existing engines, without prefill engines.")
    ready_replicas: int | None = Field(
        default=None,
        description="Number of engines that are registered with the coordinator and ready, without prefill engines. "
        "Engines of a paused or suspended resource count, too.",
    )
    updated_replicas: int | None = Field(
        default=None, description="Number of engines of the current revision that have passed their canary."
    )
    selector: str | None = Field(
        default=None, description="Label selector that matches one pod of each engine, for autoscalers."
    )
    conditions: list[Condition] | None = Field(
        default=None,
        description="Conditions of the resource. To wait for a change to complete, wait for Ready.",
        json_schema_extra=list_by("type"),
    )
    lifecycle: LifecycleStatus | None = Field(
        default=None, description="Current or last operation (pause, suspend, resume, stop or update) and its progress."
    )
    weights: WeightsStatus | None = Field(default=None, description="Weights that the engines serve.")
    download: DownloadStatus | None = Field(
        default=None,
        description="Progress of the download to spec.model.cache, updated every 10 s; absent if no download is in "
        "progress.",
    )
    formats: FormatsStatus | None = Field(
        default=None,
        description="Formats that the servers use to parse answers, as spec.server sets them or as auto has "
        "detected them.",
    )
    limits: LimitsStatus | None = Field(
        default=None,
        description="Limits that the engines report, including limits that the engines chose. If engines differ, "
        "each value is the lowest limit.",
    )
    loading: LoadingStatus | None = Field(
        default=None,
        description="Progress of the first engine that loads the model, updated every 10 s; absent if an engine is "
        "ready or the operator cannot connect to the pod.",
    )
    adapters: list[AdapterStatusEntry] | None = Field(
        default=None,
        description="State of each adapter of spec.model.adapters.",
        json_schema_extra=list_by("name"),
    )
    keys: KeysStatus | None = Field(
        default=None, description="Generation of the CURVE keys, and the progress of their rotation."
    )
    release: Release | None = Field(
        default=None,
        description="Release of the coordinator, servers and engines. An upgrade of the operator does not change it "
        "until the resource is updated.",
    )
    update: UpdateStatus | None = Field(
        default=None, description="Available update to the operator's release; absent if the resource is up to date."
    )
    plan: StepStatus | None = Field(
        default=None, description="What the operator is waiting for; absent if it waits for nothing."
    )
    attempt: str | None = Field(
        default=None,
        description="Digest of the engines' settings and of the last kubectl megatron restart. When it changes, "
        "every engine gets a full restart budget.",
    )
    engines: list[EngineStatusEntry] | None = Field(
        default=None,
        description="State of each engine.",
        json_schema_extra=list_by("name"),
    )
    roles: list[RoleStatus] | None = Field(
        default=None,
        description="Number of engines of each role; absent without spec.engine.roles.",
        json_schema_extra=list_by("name"),
    )
    restarts: list[ComponentRestarts] | None = Field(
        default=None,
        description="Number of container restarts by component. The operator combines restarts in short succession "
        "into an incident, and reports each incident in one Event.",
        json_schema_extra=list_by("component"),
    )
    history: list[HistoryEntry] | None = Field(default=None, description="Last state transitions, oldest first.")
    failed_requests: list[FailedRequestEntry] | None = Field(
        default=None,
        description=f"Last {FAILED_REQUESTS} requests that were answered with engine_failed because they crashed "
        "engines, oldest first.",
    )
