"""`spec.lifecycle`: how a resource pauses, suspends, drains and handles crashes."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from megatron_operator.resource.base import ApiModel, section


class PauseMode(StrEnum):
    HOLD = "Hold"
    REJECT = "Reject"


class SuspendLevel(StrEnum):
    OFFLOAD = "Offload"
    RELEASE_PODS = "ReleasePods"


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
