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
        description="What happens to requests that arrive while the resource is paused or suspended. Hold queues "
        "them. Reject answers them with 503.",
    )
    max_queued: int = Field(
        default=10000,
        ge=1,
        le=10_000_000,
        description="Maximum number of requests that wait for an engine. The coordinator rejects further requests "
        "with 429. Raise it if clients should wait through longer pauses or bursts.",
    )
    max_wait_seconds: int = Field(
        default=300,
        ge=1,
        le=86400,
        description="Maximum number of seconds that a request waits for an engine. After that, the coordinator "
        "rejects the request with 504. Raise it if pauses or cold starts take longer.",
    )


class SuspendSpec(ApiModel):
    level: SuspendLevel = Field(
        default=SuspendLevel.OFFLOAD,
        description="What a suspend releases. Offload releases memory and keeps the pods, so that the resume is "
        "fast. ReleasePods also removes the engine pods, so that other workloads can use their nodes.",
    )
    escalate_after_seconds: int | None = Field(
        default=None,
        ge=0,
        le=31_536_000,
        description="Seconds after which a resource that is suspended with level Offload also releases its engine "
        "pods. Default: it keeps them.",
    )
    wake_on_request: bool = Field(
        default=False,
        description="Resume a suspended resource when a request arrives. The resource then runs until it has been "
        "idle for idleSeconds or desiredState changes.",
    )
    idle_seconds: int = Field(
        default=600,
        ge=10,
        le=31_536_000,
        description="Seconds without a request after which a resource is suspended again, if a request had woken it "
        "(wakeOnRequest).",
    )


class RestartBudget(ApiModel):
    restarts: int = Field(
        default=5,
        ge=0,
        le=1000,
        description="Number of restarts of one engine in short succession after which the operator removes its pods "
        "and stops restarting it. Raise it to tolerate more crashes.",
    )
    window_seconds: int = Field(
        default=600,
        ge=1,
        le=86400,
        description="Seconds without further crashes after which an engine has its whole restart budget again. The "
        "budget recovers one restart at a time, at equal intervals.",
    )


class LifecycleSpec(ApiModel):
    pause: PauseSpec = section(
        PauseSpec, "Settings for requests that arrive while the resource is paused or suspended."
    )
    suspend: SuspendSpec = section(SuspendSpec, "Settings for a suspended resource.")
    drain_seconds: int = Field(
        default=60,
        ge=0,
        le=86400,
        description="Seconds that open requests get to finish before an engine or server is removed. Raise it if "
        "answers take longer.",
    )
    lost_node_seconds: int = Field(
        default=60,
        ge=0,
        le=86400,
        description="Seconds that the operator waits before it force-deletes a terminating engine pod on a node "
        "that is not ready. The wait begins when the node has become not ready and the pod's grace period has "
        "ended. The operator never force-deletes pods on a ready node.",
    )
    restart_budget: RestartBudget = section(RestartBudget, "Limit on the automatic restarts of an engine that crashes.")
