"""Conditions and reasons of the status. Each has a line of documentation for the reference page."""

from __future__ import annotations

from enum import StrEnum
from typing import Self


class Documented(StrEnum):
    """A string enum whose members have one line of documentation each."""

    doc: str

    def __new__(cls, value: str, doc: str) -> Self:
        member = str.__new__(cls, value)
        member._value_ = value
        member.doc = doc
        return member


class ConditionType(Documented):
    READY = (
        "Ready",
        "True if an OpenAI server and at least one engine serve, or if the resource is Paused, Suspended or Stopped "
        "as requested and a server is ready. If only an error that Degraded reports prevents this, Ready has the "
        "reason of Degraded.",
    )
    COORDINATOR_READY = "CoordinatorReady", "True if the coordinator answers the operator on its admin port."
    ENGINES_READY = "EnginesReady", "True if all engines of the spec are registered with the coordinator."
    LIFECYCLE_SETTLED = (
        "LifecycleSettled",
        "True if the resource is in the state spec.desiredState and every rank has confirmed this.",
    )
    PROGRESSING = (
        "Progressing",
        "True while the operator or a pod is making progress towards the spec. False if all objects of the resource "
        "match the spec and are rolled out. Unknown if changes wait until the rollout continues or the resource "
        "runs.",
    )
    DEGRADED = (
        "Degraded",
        "True if the resource has an error that may need your action. The message describes the error.",
    )
    UPDATE_AVAILABLE = "UpdateAvailable", "True if the resource can be updated to the operator's release."
    SINGLE_SERVER = (
        "SingleServer",
        "True if the resource has only one OpenAI server. If this server fails, requests fail until it is replaced.",
    )
    UNKNOWN_FIELDS = (
        "UnknownFields",
        "True if the spec has fields that this version of the operator does not know. The operator ignores these "
        "fields, and the message names them.",
    )
    ROLE_MISSING = (
        "RoleMissing",
        "True if no engine of a role of spec.engine.roles serves. Engines of the other role then do its work, so "
        "that requests are still answered.",
    )


class Reason(Documented):
    """A reason of a condition, a step or an Event."""

    SERVING = "Serving", "All components of the spec serve."
    PAUSED = "Paused", "The resource is paused as requested, and every rank has confirmed this."
    SUSPENDED = (
        "Suspended",
        "The resource is suspended as requested, and every rank has confirmed this. Memory or pods are released.",
    )
    STOPPED = "Stopped", "The resource is stopped as requested. There are no engine pods."
    PAUSING = "Pausing", "Engines are pausing. Not every rank has confirmed this yet."
    UNPAUSING = "Unpausing", "Engines are continuing after a pause. Not every rank has confirmed this yet."
    SUSPENDING = "Suspending", "Engines are releasing their memory. Not every rank has confirmed this yet."
    RESUMING = (
        "Resuming",
        "Engines are reallocating their memory after a suspend. Not every rank has confirmed this yet.",
    )
    STOPPING = "Stopping", "Engines are finishing their requests before a stop, or their pods are terminating."
    DRAINING = "Draining", "An engine finishes its requests before it is removed; it receives no new requests."
    RELEASING_PODS = "ReleasingPods", "The resource is suspended, and its engine pods are being deleted."
    SETTLING = "Settling", "The coordinator or an engine is changing its state; the operator waits for the result."
    SIGNAL_FAILED = (
        "SignalFailed",
        "The coordinator answered a signal, such as a pause, with an error. The operator retries the signal.",
    )
    COORDINATOR_STARTING = "CoordinatorStarting", "The coordinator's pod is not ready yet."
    COORDINATOR_UNREACHABLE = "CoordinatorUnreachable", "The coordinator does not answer on its admin port."
    COORDINATOR_RECOVERING = (
        "CoordinatorRecovering",
        "The coordinator has restarted and is collecting the state of its engines.",
    )
    SERVER_STARTING = "ServerStarting", "No OpenAI server is ready yet."
    ENGINES_STARTING = "EnginesStarting", "Engine pods are starting or loading weights."
    ENGINE_UNRESPONSIVE = (
        "EngineUnresponsive",
        "An engine sends no heartbeats. The coordinator sends its requests to other engines.",
    )
    ENGINE_LOST = (
        "EngineLost",
        "The pods of an engine are running, but the engine is not registered with the coordinator.",
    )
    REFRESHING_WEIGHTS = (
        "RefreshingWeights",
        "Engines are loading other weights of the same model without a restart.",
    )
    WRONG_WEIGHTS = (
        "WrongWeights",
        "Engines serve other weights than spec.weights requires, or their weight files differ.",
    )
    SETTING_ADAPTERS = "SettingAdapters", "Engines are loading or unloading LoRA adapters without a restart."
    ADAPTER_FAILED = (
        "AdapterFailed",
        "An engine cannot load an adapter of spec.model.adapters; the base model and the other adapters are available.",
    )
    SCALING_DOWN = "ScalingDown", "The operator drains and removes surplus engines, beginning with the highest index."
    ROLLING_OUT = (
        "RollingOut",
        "The operator is replacing engines, coordinators or servers, because the spec has a new revision.",
    )
    ROLLOUT_STUCK = (
        "RolloutStuck",
        "New pods of a coordinator or of servers did not become ready before the Deployment's progress deadline.",
    )
    ROLLOUT_PAUSED = (
        "RolloutPaused",
        "The rollout is paused by spec.rollout.paused. Engines keep their earlier revision.",
    )
    UPDATE_AVAILABLE = "UpdateAvailable", "The resource has an earlier release than the operator, and can be updated."
    SECURITY_UPDATE_AVAILABLE = (
        "SecurityUpdateAvailable",
        "An update is available, and the release of the resource is older than the oldest secure version.",
    )
    UP_TO_DATE = "UpToDate", "The resource has the release of the operator."
    ROTATING_KEYS = "RotatingKeys", "The components are switching to new CURVE keys in several stages."
    CANARY_FAILED = (
        "CanaryFailed",
        "A replaced engine gave a wrong answer to the canary request. The rollout stops until the spec changes.",
    )
    REPLACING_MODEL = "ReplacingModel", "The model has changed; the operator replaces all engines and servers together."
    IMAGE_PULL_FAILED = "ImagePullFailed", "An image cannot be pulled."
    UNSCHEDULABLE = "Unschedulable", "No node can run a pod. The message quotes the scheduler."
    CRASH_LOOPING = (
        "CrashLooping",
        "A container crashes repeatedly; the message has its exit code and termination message.",
    )
    OUT_OF_MEMORY = "OutOfMemory", "A container was killed because it exceeded its memory limit."
    GPU_OUT_OF_MEMORY = "GpuOutOfMemory", "An engine does not fit into the memory of its GPUs."
    NO_GPU = "NoGpu", "An engine sees fewer GPUs than it has ranks."
    GPU_KERNELS_MISSING = (
        "GpuKernelsMissing",
        "The image of an engine has no kernels for its GPUs, or lacks triton or a C compiler to compile them.",
    )
    GPU_DRIVER = "GpuDriver", "The NVIDIA driver of a node is too old for the image, or was updated while it ran."
    GPU_FAILED = "GpuFailed", "A GPU of an engine failed, or a kernel failed on it."
    GPU_COMMUNICATION = "GpuCommunication", "The ranks of an engine cannot exchange data between their GPUs."
    SHARED_MEMORY_FULL = "SharedMemoryFull", "The shared memory of an engine's pod, /dev/shm, is full."
    WEIGHTS_MISSING = "WeightsMissing", "An engine cannot find or read its weights."
    WEIGHTS_UNAVAILABLE = (
        "WeightsUnavailable",
        "An engine waits for the weights that a trainer published last, and serves nothing until it has them.",
    )
    ACCESS_DENIED = "AccessDenied", "The source of the weights rejects the token, or needs one."
    RENDEZVOUS_FAILED = "RendezvousFailed", "The ranks of an engine cannot reach each other at the start."
    PORT_TAKEN = "PortTaken", "A port of a container is in use."
    DISK_FULL = "DiskFull", "A volume of a pod is full."
    ENGINE_CONFIG_REFUSED = (
        "EngineConfigRefused",
        "An engine does not support a setting of the spec. The message has the cause.",
    )
    VOLUME_MISSING = "VolumeMissing", "A PersistentVolumeClaim that a pod needs is missing or not bound."
    VOLUME_FAILED = "VolumeFailed", "A volume of a pod cannot be attached or mounted. The message quotes the kubelet."
    QUOTA_EXCEEDED = "QuotaExceeded", "A pod would exceed a ResourceQuota; the message names the quota."
    LIMIT_REQUIRED = (
        "LimitRequired",
        "A ResourceQuota or LimitRange requires a resource request or limit that a container does not set.",
    )
    LIMIT_RANGE_VIOLATED = (
        "LimitRangeViolated",
        "The requests or limits of a pod are outside a LimitRange of the namespace.",
    )
    CONTAINER_CONFIG_ERROR = (
        "ContainerConfigError",
        "A Secret, ConfigMap or other object that a pod refers to is missing or lacks a key. Running pods continue "
        "to serve.",
    )
    RESTART_BUDGET_EXHAUSTED = (
        "RestartBudgetExhausted",
        "An engine crashed too often, so the operator has removed its pods. If the cause is in the infrastructure, "
        "the operator starts the engine again after a backoff. Otherwise it waits for a change of the spec or a "
        "restart command.",
    )
    REQUEST_ENDS_ENGINES = (
        "RequestEndsEngines",
        "A request crashed the engines that ran it, and the client got the error engine_failed. The Event has the "
        "id of the request.",
    )
    FIELDS_IGNORED = (
        "FieldsIgnored",
        "The spec has fields that only a later release knows. The operator applies all other fields.",
    )
    INVALID_SPEC = "InvalidSpec", "This version of the operator does not accept the value of a field."
    INVALID_POD_TEMPLATE = "InvalidPodTemplate", "A podTemplate cannot be merged, or the API server rejects the result."
    NOT_ALLOWED = (
        "NotAllowed",
        "The operator's pod policy does not allow a field of the spec; the message names the field. Running pods "
        "continue to serve.",
    )
    UNSUPPORTED_BY_BACKEND = (
        "UnsupportedByBackend",
        "The backend of the engines does not support a field of the spec; the message names the field. Running pods "
        "continue to serve.",
    )
    CHILD_REFUSED = (
        "ChildRefused",
        "The API server rejects an object of the resource for another reason, such as a quota.",
    )
    GATEWAY_API_MISSING = (
        "GatewayApiMissing",
        "spec.server.httpRoute is set, but the cluster has no HTTPRoute kind. Everything else continues.",
    )
    INFERENCE_EXTENSION_MISSING = (
        "InferenceExtensionMissing",
        "spec.server.inferencePool is set, but the cluster has no InferencePool kind. Everything except the "
        "HTTPRoute to the pool continues.",
    )
    CHILD_NOT_OWNED = (
        "ChildNotOwned",
        "The operator cannot create an object, because an object with the same name exists and has another owner.",
    )
    CHILD_CONTESTED = (
        "ChildContested",
        "Another program reverts the operator's changes to an object of the resource. The message names the field "
        "manager of the program.",
    )
    WATCH_DENIED = (
        "WatchDenied",
        "The operator has no permission to read a kind of object in the namespace. The message names the kind. The "
        "operator does not change objects that depend on this kind.",
    )
    OPERATOR_ISOLATED = (
        "OperatorIsolated",
        "The operator lost the connection to many coordinators at the same time. It assumes that its own network "
        "has failed, and does not replace them.",
    )
    DEADLINE_EXCEEDED = (
        "DeadlineExceeded",
        "A step takes longer than its deadline. status.plan names what the operator is waiting for.",
    )
    ONE_SERVER = "OneServer", "The resource has only one server."
    NO_PREFILL_ENGINE = "NoPrefillEngine", "No prefill engine serves. Decode engines compute all prompts."
    NO_DECODE_ENGINE = "NoDecodeEngine", "No decode engine serves. Prefill engines generate the answers."
    STALE_FENCE = (
        "StaleFence",
        "The coordinator reports a fence, the number that orders the signals of successive leaders, that no leader "
        "can have sent. The operator ignores this fence.",
    )
    DELETING = "Deleting", "The resource is being deleted, so the operator does not change it."
    AVAILABLE = "Available", "The component that the condition describes works."
    SETTLED = "Settled", "The resource matches its spec."
    ALL_WELL = "AllWell", "The resource has no error."


Finding = tuple[Reason, str]
"""A reason, and the message with its cause."""
