"""Conditions and reasons of the status, each with its documentation for the reference page."""

from __future__ import annotations

from enum import StrEnum
from typing import Self


class Documented(StrEnum):
    """A string enum whose members have one line of documentation."""

    doc: str

    def __new__(cls, value: str, doc: str) -> Self:
        member = str.__new__(cls, value)
        member._value_ = value
        member.doc = doc
        return member


class ConditionType(Documented):
    READY = (
        "Ready",
        "An OpenAI server and at least one engine serve; or the resource is Paused, Suspended or Stopped as requested, "
        "with a server that is ready. Its reason is the reason of Degraded if the resource waits for nothing else.",
    )
    COORDINATOR_READY = "CoordinatorReady", "The coordinator answers the operator on its admin port."
    ENGINES_READY = "EnginesReady", "All spec.replicas engines are registered with the coordinator."
    LIFECYCLE_SETTLED = "LifecycleSettled", "The observed state is spec.desiredState, confirmed by every rank."
    PROGRESSING = (
        "Progressing",
        "The operator or a pod is making progress towards the spec. False: every child matches the spec and is "
        "rolled out. Unknown: changes wait, for a paused rollout or until the resource runs.",
    )
    DEGRADED = "Degraded", "An error that waiting alone may not resolve; the message names it."
    UPDATE_AVAILABLE = "UpdateAvailable", "The operator has another release than the resource."
    SINGLE_SERVER = (
        "SingleServer",
        "There is one OpenAI server: while it is lost, no request is answered.",
    )
    UNKNOWN_FIELDS = (
        "UnknownFields",
        "The spec has fields that this version of the operator does not know and ignores; the message names them.",
    )


class Reason(Documented):
    """Reasons of conditions, steps and Events."""

    SERVING = "Serving", "All components of the spec serve."
    PAUSED = "Paused", "Paused on request, confirmed by every rank."
    SUSPENDED = "Suspended", "Suspended on request, confirmed by every rank; memory or pods are released."
    STOPPED = "Stopped", "Stopped on request; there are no engine pods."
    PAUSING = "Pausing", "PAUSE is in progress; not every rank has confirmed."
    UNPAUSING = "Unpausing", "UNPAUSE is in progress; not every rank has confirmed."
    SUSPENDING = "Suspending", "SUSPEND is in progress; not every rank has confirmed."
    RESUMING = "Resuming", "RESUME is in progress; not every rank has confirmed."
    STOPPING = "Stopping", "STOP is in progress, or the engine pods are terminating."
    DRAINING = "Draining", "An engine finishes its requests before it is removed; it gets no new ones."
    RELEASING_PODS = "ReleasingPods", "Suspended; the engine pods are being deleted."
    SETTLING = "Settling", "The coordinator or an engine is changing its state; the operator waits for the result."
    SIGNAL_FAILED = "SignalFailed", "The coordinator answered a signal with an error; it is planned again."
    COORDINATOR_STARTING = "CoordinatorStarting", "The coordinator's pod is not ready yet."
    COORDINATOR_UNREACHABLE = "CoordinatorUnreachable", "The coordinator does not answer on its admin port."
    COORDINATOR_RECOVERING = "CoordinatorRecovering", "The coordinator restarted and collects the state of its engines."
    SERVER_STARTING = "ServerStarting", "No OpenAI server is ready yet."
    ENGINES_STARTING = "EnginesStarting", "Engine pods start or load weights."
    ENGINE_UNRESPONSIVE = "EngineUnresponsive", "An engine sends no heartbeats; its requests go to other engines."
    ENGINE_LOST = "EngineLost", "The pods of an engine run and it is not registered with the coordinator."
    REFRESHING_WEIGHTS = (
        "RefreshingWeights",
        "Engines load other weights of one model in place, without a restart.",
    )
    WRONG_WEIGHTS = (
        "WrongWeights",
        "Engines serve other weights than those of spec.weights, or different files of them.",
    )
    SETTING_ADAPTERS = "SettingAdapters", "Engines load and unload LoRA adapters without a restart."
    ADAPTER_FAILED = (
        "AdapterFailed",
        "An engine cannot load an adapter of spec.model.adapters; the others serve.",
    )
    SCALING_DOWN = "ScalingDown", "Surplus engines drain, highest index first, and are removed."
    ROLLING_OUT = (
        "RollingOut",
        "Engines are replaced one after another with the spec's new revision, or pods of a coordinator or of servers.",
    )
    ROLLOUT_STUCK = (
        "RolloutStuck",
        "New pods of a coordinator or of servers have not become ready before the Deployment's progress deadline.",
    )
    ROLLOUT_PAUSED = "RolloutPaused", "spec.rollout.paused holds a rollout: engines keep their earlier revision."
    UPDATE_AVAILABLE = "UpdateAvailable", "The resource can be updated to the release of the operator."
    SECURITY_UPDATE_AVAILABLE = (
        "SecurityUpdateAvailable",
        "As UpdateAvailable, and the release of the resource is older than the oldest secure version.",
    )
    UP_TO_DATE = "UpToDate", "The resource has the release of the operator."
    ROTATING_KEYS = "RotatingKeys", "The components switch to new CURVE keys in several stages."
    CANARY_FAILED = "CanaryFailed", "A replaced engine gives a wrong answer; the rollout stops until the spec changes."
    REPLACING_MODEL = "ReplacingModel", "The model itself changed: all engines and servers are replaced together."
    IMAGE_PULL_FAILED = "ImagePullFailed", "An image cannot be pulled."
    UNSCHEDULABLE = "Unschedulable", "No node can run a pod; the message is the scheduler's."
    CRASH_LOOPING = "CrashLooping", "A container crashes repeatedly; the message has exit code and termination message."
    OUT_OF_MEMORY = "OutOfMemory", "A container was killed for exceeding its memory limit."
    GPU_OUT_OF_MEMORY = "GpuOutOfMemory", "An engine does not fit into the memory of its GPUs."
    NO_GPU = "NoGpu", "An engine sees fewer GPUs than it has ranks."
    GPU_KERNELS_MISSING = (
        "GpuKernelsMissing",
        "The image of an engine has no kernels for its GPUs, or lacks triton or a C compiler to compile them.",
    )
    GPU_DRIVER = "GpuDriver", "The NVIDIA driver of a node is too old for the image, or was updated while it ran."
    GPU_FAILED = "GpuFailed", "A GPU of an engine failed, or a kernel on it."
    GPU_COMMUNICATION = "GpuCommunication", "The ranks of an engine cannot exchange data between their GPUs."
    SHARED_MEMORY_FULL = "SharedMemoryFull", "The shared memory of an engine's pod, /dev/shm, is full."
    WEIGHTS_MISSING = "WeightsMissing", "An engine cannot find or read its weights."
    WEIGHTS_UNAVAILABLE = (
        "WeightsUnavailable",
        "An engine waits for the weights that a trainer published last, and serves nothing until it has them.",
    )
    ACCESS_DENIED = "AccessDenied", "The source of the weights rejects the token, or needs one."
    RENDEZVOUS_FAILED = "RendezvousFailed", "The ranks of an engine do not find each other."
    PORT_TAKEN = "PortTaken", "A port of a container is in use."
    DISK_FULL = "DiskFull", "A volume of a pod is full."
    ENGINE_CONFIG_REFUSED = "EngineConfigRefused", "An engine does not support the spec; the message has the cause."
    VOLUME_MISSING = "VolumeMissing", "A PersistentVolumeClaim that a pod needs is missing or not bound."
    VOLUME_FAILED = "VolumeFailed", "A volume of a pod cannot be attached or mounted; the message is the kubelet's."
    QUOTA_EXCEEDED = "QuotaExceeded", "A ResourceQuota has too little left for a pod; the message names it."
    LIMIT_REQUIRED = (
        "LimitRequired",
        "A ResourceQuota or LimitRange demands a request or limit that a container does not have.",
    )
    LIMIT_RANGE_VIOLATED = (
        "LimitRangeViolated",
        "The requests or limits of a pod are outside a LimitRange of the namespace.",
    )
    CONTAINER_CONFIG_ERROR = (
        "ContainerConfigError",
        "A Secret, ConfigMap or other object that a pod names is missing or lacks a key. Running pods serve on.",
    )
    RESTART_BUDGET_EXHAUSTED = (
        "RestartBudgetExhausted",
        "An engine crashed too often and has no pods. It is started again after a backoff if the cause is in the "
        "infrastructure, otherwise after a change of the spec or a restart command.",
    )
    REQUEST_ENDS_ENGINES = (
        "RequestEndsEngines",
        "A request crashed the engines that ran it and was answered with engine_failed; the Event names its id.",
    )
    FIELDS_IGNORED = "FieldsIgnored", "A later release knows the fields; everything else in the spec is carried out."
    INVALID_SPEC = "InvalidSpec", "This version of the operator does not accept the value of a field."
    INVALID_POD_TEMPLATE = "InvalidPodTemplate", "A podTemplate cannot be merged, or the API server rejects the result."
    NOT_ALLOWED = (
        "NotAllowed",
        "The operator's pod policy does not allow a field of the spec, which the message names. Running pods serve on.",
    )
    UNSUPPORTED_BY_BACKEND = (
        "UnsupportedByBackend",
        "The backend of the engines cannot run the spec; the message names the field. Running pods serve on.",
    )
    CHILD_REFUSED = "ChildRefused", "The API server rejects a child for another reason, such as a quota."
    GATEWAY_API_MISSING = (
        "GatewayApiMissing",
        "spec.server.httpRoute is set and the cluster has no HTTPRoute kind. Everything else goes on.",
    )
    INFERENCE_EXTENSION_MISSING = (
        "InferenceExtensionMissing",
        "spec.server.inferencePool is set and the cluster has no InferencePool kind. Everything but an HTTPRoute to "
        "the pool goes on.",
    )
    CHILD_NOT_OWNED = "ChildNotOwned", "An object with the name of a child exists and has another owner."
    CHILD_CONTESTED = (
        "ChildContested",
        "Another program changes a child as often as the operator applies it; the message names its field manager.",
    )
    WATCH_DENIED = (
        "WatchDenied",
        "The operator may not read a kind of objects in the namespace, which the message names; what needs it is kept.",
    )
    OPERATOR_ISOLATED = (
        "OperatorIsolated",
        "The operator has lost many coordinators at once and suspects its own network; it replaces none of them.",
    )
    DEADLINE_EXCEEDED = (
        "DeadlineExceeded",
        "The operator has waited for the same thing for too long; status.plan names it.",
    )
    ONE_SERVER = "OneServer", "The servers have one replica."
    STALE_FENCE = "StaleFence", "The coordinator reports a fence that no leader can have sent; the operator ignores it."
    DELETING = "Deleting", "The resource is being deleted; the operator changes nothing."
    AVAILABLE = "Available", "The component of the condition works."
    SETTLED = "Settled", "The spec is reached."
    ALL_WELL = "AllWell", "Nothing is wrong."


Finding = tuple[Reason, str]
"""A reason, and the message with its cause."""
