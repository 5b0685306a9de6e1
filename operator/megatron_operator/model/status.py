"""`MegatronInference` v1alpha1: the status, as the CRD describes it."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from megatron_operator.model.base import ApiModel
from megatron_operator.model.states import DesiredState, KeyStage, LifecyclePhase, ResourceState, SignalKind

HISTORY_LENGTH = 16
FAILED_REQUESTS = 16
TIME: dict[str, Any] = {"format": "date-time"}


class Condition(ApiModel):
    type: str = Field(
        description="One of Ready, CoordinatorReady, EnginesReady, LifecycleSettled, Progressing, Degraded."
    )
    status: str = Field(description="True, False or Unknown.")
    reason: str = Field(description="CamelCase word that programs may compare.")
    message: str = Field(description="One sentence for people.")
    observed_generation: int = Field(description="Generation of the spec that this speaks about.")
    last_transition_time: str = Field(description="When the status last changed.", json_schema_extra=TIME)


class Lifecycle(ApiModel):
    desired: DesiredState = Field(description="The state asked for, as last seen.")
    observed: ResourceState = Field(description="The state last observed.")
    requested_at: str | None = Field(
        default=None, description="When this desired state was first seen.", json_schema_extra=TIME
    )
    operation_id: str | None = Field(default=None, description="Id of the last operation; the same on every resend.")
    signal: SignalKind | None = Field(default=None, description="Signal of that operation.")
    engine: str | None = Field(default=None, description="The one engine it is for; all when absent.")
    goal: DesiredState | None = Field(default=None, description="The desired state it serves.")
    fence: int | None = Field(
        default=None, description="Fence of its signal: the term of the leader that sent it last, and fenceOffset."
    )
    fence_offset: int | None = Field(
        default=None,
        description="Added to the leader's term: this resource's coordinator has seen fences of an earlier Lease.",
    )
    phase: LifecyclePhase | None = Field(default=None, description="How far it has come.")
    confirmed_ranks: int | None = Field(default=None, description="Ranks that confirmed.")
    total_ranks: int | None = Field(default=None, description="Ranks that were asked.")
    message: str | None = Field(default=None, description="The coordinator's error, if it failed.")
    weights: str | None = Field(default=None, description="UPDATE_WEIGHTS: revision of the weights.")
    source: str | None = Field(default=None, description="UPDATE_WEIGHTS: where engines find them.")
    epoch: int | None = Field(default=None, description="UPDATE_WEIGHTS: the epoch they become.")
    refused: bool | None = Field(default=None, description="It failed without having done anything.")
    since: str | None = Field(
        default=None, description="When it was started, confirmed or failed.", json_schema_extra=TIME
    )
    woken_generation: int | None = Field(
        default=None, description="Generation at which a request woke the suspended resource."
    )


class WeightsStatus(ApiModel):
    revision: str = Field(description="Revision of the weights that engines hold.")
    model: str = Field(description="Hash of the model they are weights of.")


class KeysStatus(ApiModel):
    generation: int = Field(description="Generation of the CURVE keys; during a rotation the new one.")
    stage: KeyStage = Field(description="How far its rotation has come.")
    since: str | None = Field(default=None, description="When this generation was made.", json_schema_extra=TIME)


class Plan(ApiModel):
    step: str = Field(description="What is being done.")
    waiting_on: str = Field(description="What it is waiting for, in one sentence.")
    since: str = Field(description="Since when.", json_schema_extra=TIME)


class RestartWindow(ApiModel):
    since: str = Field(description="When the window began.", json_schema_extra=TIME)
    base: int = Field(description="Restarts counted before it.")


class EngineStatus(ApiModel):
    name: str = Field(description="Name of the engine and of its StatefulSet.")
    state: str = Field(description="What the engine last reported, or Pending, Loading, Released, Failed.")
    revision: str = Field(default="", description="Revision of its pods.")
    epoch: int = Field(default=0, description="Generation epoch of its weights.")
    ranks: int = Field(default=0, description="Ranks registered.")
    digest: str | None = Field(default=None, description="Of its weights, as it reports; equal weights, equal digest.")
    canary: str | None = Field(
        default=None,
        description="After a rollout replaced it: Pending, Passed, Failed, or Skipped where none can be sent.",
    )
    canary_message: str | None = Field(default=None, description="What was wrong with its canary's answer.")
    restarts: int = Field(default=0, description="Container restarts of its present pods.")
    window: RestartWindow | None = Field(default=None, description="The restart budget's current window.")
    diagnosis: str | None = Field(default=None, description="Why it was given up on.")


class Transition(ApiModel):
    from_: str = Field(alias="from", description="State before.")
    to: str = Field(description="State after.")
    by: str = Field(description="Who or what asked for it.")
    operation_id: str | None = Field(default=None, description="Operation that completed it.")
    at: str = Field(description="When it was confirmed.", json_schema_extra=TIME)
    seconds: float = Field(description="Time from the request to the confirmation.")


class FailedRequest(ApiModel):
    id: str = Field(description="Its id, as the error of the OpenAI API and the logs of the coordinator name it.")
    engines: list[str] = Field(description="Engines that it ended, the first first.")
    time: str = Field(description="When the coordinator failed it.", json_schema_extra=TIME)


class MegatronInferenceStatus(ApiModel):
    observed_generation: int | None = Field(default=None, description="Generation of the spec last acted upon.")
    state: ResourceState | None = Field(default=None, description="The state of the whole resource.")
    ready: str | None = Field(default=None, description="Serving engines / wanted engines, such as 2/2.")
    model: str | None = Field(default=None, description="Name in /v1/models.")
    revision: str | None = Field(default=None, description="Revision of the engines that the spec renders to.")
    endpoint: str | None = Field(default=None, description="Base URL of the OpenAI API inside the cluster.")
    epoch: int | None = Field(default=None, description="Generation epoch of the weights.")
    replicas: int | None = Field(default=None, description="Engines that exist.")
    ready_replicas: int | None = Field(default=None, description="Engines registered and serving or ready to.")
    updated_replicas: int | None = Field(
        default=None, description="Engines at the current revision that have shown that it works."
    )
    selector: str | None = Field(default=None, description="Selects one pod of each engine, for autoscalers.")
    conditions: list[Condition] | None = Field(
        default=None,
        description="See docs/reference.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )
    lifecycle: Lifecycle | None = Field(default=None, description="The verb under way, or the last one.")
    weights: WeightsStatus | None = Field(default=None, description="What spec.weights has become of.")
    keys: KeysStatus | None = Field(default=None, description="The keys that its components know each other by.")
    plan: Plan | None = Field(default=None, description="What the operator waits for; absent when nothing.")
    engines: list[EngineStatus] | None = Field(
        default=None,
        description="The engines.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )
    history: list[Transition] | None = Field(default=None, description="The last transitions, oldest first.")
    failed_requests: list[FailedRequest] | None = Field(
        default=None,
        description="The last requests that were answered with engine_failed because they end engines, oldest first; "
        f"at most {FAILED_REQUESTS}.",
    )
