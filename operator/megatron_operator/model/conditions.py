"""Conditions and reasons of the status, each with the line that the reference page prints."""

from __future__ import annotations

from enum import StrEnum
from typing import Self


class Documented(StrEnum):
    """A string enum whose members carry one line of documentation."""

    doc: str

    def __new__(cls, value: str, doc: str) -> Self:
        member = str.__new__(cls, value)
        member._value_ = value
        member.doc = doc
        return member


class ConditionType(Documented):
    READY = "Ready", "The front door answers and at least one engine serves; False while Paused, Suspended or Stopped."
    COORDINATOR_READY = "CoordinatorReady", "The coordinator answers the operator on its admin port."
    ENGINES_READY = "EnginesReady", "Every engine that spec.replicas asks for is registered at its coordinator."
    LIFECYCLE_SETTLED = "LifecycleSettled", "The observed state is spec.desiredState, confirmed by every rank."
    PROGRESSING = "Progressing", "The operator or a pod is on its way to what the spec asks for."
    DEGRADED = "Degraded", "Something is wrong that waiting alone may not cure; the message says what."


class Reason(Documented):
    """Reasons of conditions, plan steps and Events."""

    SERVING = "Serving", "Everything that the spec asks for serves."
    PAUSED = "Paused", "Paused on request, confirmed by every rank."
    SUSPENDED = "Suspended", "Suspended on request, confirmed by every rank; memory or pods are given back."
    STOPPED = "Stopped", "Stopped on request; there are no engine pods."
    PAUSING = "Pausing", "PAUSE is on its way; not every rank has confirmed."
    UNPAUSING = "Unpausing", "UNPAUSE is on its way; not every rank has confirmed."
    SUSPENDING = "Suspending", "SUSPEND is on its way; not every rank has confirmed."
    RESUMING = "Resuming", "RESUME is on its way; not every rank has confirmed."
    STOPPING = "Stopping", "STOP is on its way, or the engine pods are going away."
    DRAINING = "Draining", "Requests finish before an engine goes; it gets no new ones."
    RELEASING_PODS = "ReleasingPods", "Suspended; the engine pods are being given back."
    SETTLING = "Settling", "The coordinator or an engine is between two states; the operator waits for the outcome."
    SIGNAL_FAILED = "SignalFailed", "The coordinator answered a signal with an error; it is planned again."
    COORDINATOR_STARTING = "CoordinatorStarting", "The coordinator's pod is not ready yet."
    COORDINATOR_UNREACHABLE = "CoordinatorUnreachable", "The coordinator does not answer on its admin port."
    COORDINATOR_RECOVERING = "CoordinatorRecovering", "The coordinator came back and collects what the engines know."
    SERVER_STARTING = "ServerStarting", "No OpenAI front end is ready yet."
    ENGINES_STARTING = "EnginesStarting", "Engine pods start or load weights."
    ENGINE_LOST = "EngineLost", "An engine has a ready pod and is not registered at its coordinator."
    REFRESHING_WEIGHTS = (
        "RefreshingWeights",
        "Engines load other weights of one model in place, without a restart.",
    )
    SCALING_DOWN = "ScalingDown", "Surplus engines drain, highest index first, and are removed."
    ROLLING_OUT = "RollingOut", "Engines are replaced one after another by the spec's new revision."
    ROTATING_KEYS = "RotatingKeys", "The components take new CURVE keys, one step after another."
    CANARY_FAILED = "CanaryFailed", "A replaced engine answers wrongly; the rollout stops there until the spec changes."
    REPLACING_MODEL = "ReplacingModel", "The model itself changed: all engines and servers are replaced together."
    IMAGE_PULL_FAILED = "ImagePullFailed", "An image cannot be pulled."
    UNSCHEDULABLE = "Unschedulable", "No node can take a pod; the message is the scheduler's."
    CRASH_LOOPING = "CrashLooping", "A container keeps ending; the message has its exit code and last words."
    OUT_OF_MEMORY = "OutOfMemory", "A container was killed for exceeding its memory limit."
    GPU_OUT_OF_MEMORY = "GpuOutOfMemory", "An engine does not fit into the memory of its GPUs."
    NO_GPU = "NoGpu", "An engine sees fewer GPUs than it has ranks."
    WEIGHTS_MISSING = "WeightsMissing", "An engine cannot find or read its weights."
    ACCESS_DENIED = "AccessDenied", "The source of the weights refuses the token, or the lack of one."
    RENDEZVOUS_FAILED = "RendezvousFailed", "The ranks of an engine do not find each other."
    PORT_TAKEN = "PortTaken", "A port that a container needs is taken."
    DISK_FULL = "DiskFull", "A volume of a pod is full."
    ENGINE_CONFIG_REFUSED = "EngineConfigRefused", "An engine refuses what the spec asks of it, and says why."
    VOLUME_MISSING = "VolumeMissing", "A PersistentVolumeClaim that a pod needs is missing or not bound."
    QUOTA_EXCEEDED = "QuotaExceeded", "A ResourceQuota leaves no room for a pod; the message names it."
    CONTAINER_CONFIG_ERROR = "ContainerConfigError", "A container cannot be created, e.g. for a missing Secret."
    RESTART_BUDGET_EXHAUSTED = (
        "RestartBudgetExhausted",
        "An engine crashed too often; a change of the spec tries again.",
    )
    REQUEST_ENDS_ENGINES = (
        "RequestEndsEngines",
        "A request ended the engines that ran it and was answered with engine_failed; the Event names its id.",
    )
    INVALID_SPEC = "InvalidSpec", "The spec cannot be understood by this version of the operator."
    INVALID_POD_TEMPLATE = "InvalidPodTemplate", "A podTemplate cannot be merged, or the API server refuses the result."
    NOT_ALLOWED = (
        "NotAllowed",
        "The operator's pod policy does not allow a field of the spec; the message names it. What runs keeps serving.",
    )
    CHILD_REFUSED = "ChildRefused", "The API server refuses a child for another reason, such as a quota."
    CHILD_NOT_OWNED = "ChildNotOwned", "An object with the name of a child exists and belongs to somebody else."
    STALE_FENCE = "StaleFence", "The coordinator reports a fence that no leader can have sent; it is not followed."
    DELETING = "Deleting", "The resource is being deleted; nothing is done to it any more."
    AVAILABLE = "Available", "The part that the condition is about is in order."
    SETTLED = "Settled", "Nothing is left to do."
    ALL_WELL = "AllWell", "Nothing is wrong."
