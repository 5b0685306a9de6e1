"""Table of what a user can do about each reason. `explain` and the troubleshooting guide use this table."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from megatron_operator.resource.conditions import Reason


class Symptom(StrEnum):
    """A section of the troubleshooting guide."""

    POD_DOES_NOT_START = "A pod does not start"
    CONTAINER_ENDS = "A container exits or restarts"
    COORDINATOR = "The coordinator does not answer"
    SPEC_REJECTED = "The spec or one of its objects is rejected"
    CHANGE_STOPPED = "A change or a verb does not complete"
    REQUEST_FAILED = "A request failed"
    IN_PROGRESS = "A change is in progress"
    SETTLED = "Nothing is wrong"


@dataclass(frozen=True, slots=True)
class Remedy:
    """The remedy for a reason of a condition.

    symptom: section of the troubleshooting guide.
    action:  instructions for the user, in complete sentences.
    """

    symptom: Symptom
    action: str


_WAIT = "Wait. status.plan.waitingOn names what the operator is waiting for."
_NONE = "Nothing to do."

_ACTIONS: dict[Symptom, dict[Reason, str]] = {
    Symptom.POD_DOES_NOT_START: {
        Reason.IMAGE_PULL_FAILED: "Correct the image: spec.engine.image, spec.engine.vllm.image, or runtime.image "
        "or vllm.image of the chart. If the registry needs a login, add imagePullSecrets in podTemplate. Check that "
        "the nodes can reach the registry.",
        Reason.UNSCHEDULABLE: "Read the scheduler's message, which names the resource, taint or selector. Change "
        "podTemplate, or add nodes.",
        Reason.VOLUME_MISSING: "In the namespace of the resource, create the PersistentVolumeClaim that the spec "
        "names. Check that the claim is bound and that the node can reach its volume.",
        Reason.VOLUME_FAILED: "Read the kubelet's message, which names the volume. Check the storage class, and its "
        "driver on the node. Check that no pod on another node has attached the volume.",
        Reason.QUOTA_EXCEEDED: "Raise the ResourceQuota, lower spec.replicas, or lower the requests in podTemplate.",
        Reason.LIMIT_REQUIRED: "In the podTemplate of the component, set the requests and limits that the message "
        "names. Or create a LimitRange in the namespace, with `default` and `defaultRequest`. A larger "
        "ResourceQuota does not help.",
        Reason.LIMIT_RANGE_VIOLATED: "In the podTemplate of the component, set requests and limits that the "
        "LimitRange allows, or change the LimitRange.",
        Reason.CONTAINER_CONFIG_ERROR: "Create the Secret or ConfigMap that the message names, with the key that the "
        "spec names.",
    },
    Symptom.CONTAINER_ENDS: {
        Reason.CRASH_LOOPING: "Read the termination message in the status, which has the rank, the exit code and "
        "the last output. `kubectl logs POD --previous` shows the whole log.",
        Reason.OUT_OF_MEMORY: "Raise resources.limits.memory in the podTemplate of the component that the message "
        "names. For an engine on CPUs, you can also lower spec.engine.batching.kvCacheMemory.",
        Reason.ROLLOUT_STUCK: "Inspect the new pods with `kubectl describe pod` and `kubectl logs`. Correct or "
        "revert the spec. Earlier pods continue to serve.",
        Reason.GPU_OUT_OF_MEMORY: "Lower spec.engine.batching.kvCacheMemory or spec.model.maxSequenceLength, choose a "
        "smaller dtype, or raise spec.parallelism.tensor.",
        Reason.NO_GPU: "Set spec.engine.gpusPerPod to the number of GPUs that a pod needs, and check that the "
        "node's device plugin or DRA driver offers this many GPUs.",
        Reason.GPU_KERNELS_MISSING: "Use a runtime image with triton, a C compiler and Python's headers. Set it in "
        "spec.engine.image, or in runtime.image of the chart.",
        Reason.GPU_DRIVER: "Update the NVIDIA driver of the node to 580 or newer, which images for CUDA 13 require. "
        "Restart the node after the update.",
        Reason.GPU_FAILED: "Drain the node, and reset or replace the GPU. The operator re-creates the engine on "
        "another device. If the message names a kernel, such as an illegal memory access, report it.",
        Reason.GPU_COMMUNICATION: "Start nvidia-fabricmanager on nodes with NVSwitch. Set NCCL_DEBUG=INFO in "
        "podTemplate, and read the log of the rank that failed first.",
        Reason.SHARED_MEMORY_FULL: "Raise resources.limits.memory of the engine in podTemplate, because /dev/shm "
        "counts towards this limit.",
        Reason.WEIGHTS_MISSING: "Correct spec.model.source or spec.weights.revision. If the source is a volume, "
        "check that the volume contains the path.",
        Reason.WEIGHTS_UNAVAILABLE: "Start the trainer, at any address, and publish the same weights under the "
        "same epoch, or other weights under a higher epoch. Check that spec.weights.trainer selects the trainer's "
        "pods (from) and has its port.",
        Reason.ACCESS_DENIED: "Set spec.model.source.huggingFace.tokenSecretRef to a token that may read the "
        "repository.",
        Reason.RENDEZVOUS_FAILED: "Check that all pods of the engine are scheduled, and that NetworkPolicies allow "
        "them to connect to each other. The preflight names two pods that cannot connect.",
        Reason.PORT_TAKEN: "Remove hostNetwork from podTemplate, or free the port on the node.",
        Reason.DISK_FULL: "Enlarge the cache volume in podTemplate, give the node more ephemeral storage, or serve "
        "the model from a PersistentVolumeClaim.",
        Reason.ENGINE_CONFIG_REFUSED: "Correct the field that the message names.",
        Reason.RESTART_BUDGET_EXHAUSTED: "Remove the cause that status.engines shows as diagnosis. Then change the "
        "model, the weights or the engines in the spec, or run `kubectl megatron restart NAME`: both start the "
        "engine again. spec.lifecycle.restartBudget sets how many restarts are tolerated.",
        Reason.ENGINE_UNRESPONSIVE: "Check the load and the memory of the engine's node, and read the engine's log. "
        "The coordinator removes the engine after 10 s. The kubelet restarts the engine when its liveness probe "
        "fails.",
        Reason.ENGINE_LOST: "Read the log of the engine's pod, and check the NetworkPolicies between engine and "
        "coordinator. The kubelet restarts the engine when its liveness probe fails.",
    },
    Symptom.COORDINATOR: {
        Reason.COORDINATOR_UNREACHABLE: "Check that NetworkPolicies allow the operator to connect to port 5557 of "
        "the coordinator's pod. If the Secret NAME-keys was restored from a backup, delete the coordinator's pod, "
        "so that it starts with the restored keys.",
        Reason.COORDINATOR_STARTING: "Wait. After more than a minute, inspect the coordinator's pod with `kubectl "
        "describe pod`.",
        Reason.COORDINATOR_RECOVERING: "Wait. The coordinator continues when it has collected the state of its "
        "engines.",
        Reason.OPERATOR_ISOLATED: "Check the network of the operator's pod and its node, and the NetworkPolicies "
        "between the operator's namespace and the resources. If a coordinator has really failed, delete its pod.",
        Reason.STALE_FENCE: "Delete the coordinator's pod. If the fence returns, an engine has reported it, so "
        "delete the engine pods, too. Check who has access to the keys of the resource, and which image the "
        "coordinator runs.",
    },
    Symptom.SPEC_REJECTED: {
        Reason.INVALID_SPEC: "Correct the field that the message names, or upgrade the operator to a version that "
        "accepts the field's value. The operator does not change running components.",
        Reason.FIELDS_IGNORED: "Upgrade the operator to a release that knows the fields, or remove them. If you "
        "have rolled back the operator, you need to do nothing, because the operator applies all other fields.",
        Reason.WATCH_DENIED: "Restore the operator's Role and RoleBinding in the namespace, for example with `helm "
        "upgrade`. The message has the API server's answer. The operator continues seconds after you restore the "
        "permission.",
        Reason.CHILD_CONTESTED: "Find the program by the field manager in the message, and configure it so that it "
        "does not change the object. Until then, the operator applies the object once per minute.",
        Reason.INVALID_POD_TEMPLATE: "Correct the podTemplate as the message says. Running pods continue to serve, "
        "and you can still pause, suspend and stop the resource.",
        Reason.NOT_ALLOWED: "Remove the field, or have an administrator set the chart value that the message names.",
        Reason.UNSUPPORTED_BY_BACKEND: "Correct or remove the field that the message names, or set "
        "spec.engine.backend to the other backend.",
        Reason.CHILD_REFUSED: "Read the API server's message, which names a quota, an admission webhook or a "
        "missing permission of the operator. The operator retries automatically.",
        Reason.GATEWAY_API_MISSING: "Install the CRDs of the Gateway API (`gateway.networking.k8s.io/v1`), or "
        "remove spec.server.httpRoute. The operator retries every 15 s.",
        Reason.INFERENCE_EXTENSION_MISSING: "Install the CRDs of the Gateway API Inference Extension "
        "(`inference.networking.k8s.io/v1`), or remove spec.server.inferencePool. The operator retries every 15 s.",
        Reason.CHILD_NOT_OWNED: "Delete the object that the message names, or give the resource another name. The "
        "operator never changes an object that it does not own. If the object is a Secret with keys from a backup "
        "of another cluster, run the command in the message to adopt it.",
    },
    Symptom.CHANGE_STOPPED: {
        Reason.DEADLINE_EXCEEDED: "Read status.plan.waitingOn, which names the pod or object. Check this object, "
        "its node and its controller. The operator continues automatically when the wait ends.",
        Reason.WRONG_WEIGHTS: "Wait until every engine has reloaded the weights. If status.weights.differentDigests "
        "remains, the files differ between nodes or were changed in place. Make the files equal, and use another "
        "spec.weights.revision. With spec.weights.trainer, publish the weights again, because the operator does not "
        "update them.",
        Reason.SIGNAL_FAILED: "Read the coordinator's message in status.lifecycle.message. The operator retries the "
        "signal after 5 s. You can set another desiredState at any time.",
        Reason.CANARY_FAILED: "Apply the previous spec, or correct the change. The other engines still run the "
        "previous revision.",
        Reason.ADAPTER_FAILED: "Correct the source of the adapter that the message names, or remove the adapter. "
        "The base model and the adapters that are already loaded continue to serve. The operator retries every 30 "
        "s.",
    },
    Symptom.REQUEST_FAILED: {
        Reason.REQUEST_ENDS_ENGINES: "Find the request by its id in the logs of server and coordinator; the "
        "client's error message has the same id. To report the problem, keep the request and the engine's last log. "
        "If a client repeats the request, revoke its API key.",
    },
    Symptom.IN_PROGRESS: {
        Reason.PAUSING: _WAIT,
        Reason.UNPAUSING: _WAIT,
        Reason.SUSPENDING: _WAIT,
        Reason.RESUMING: _WAIT,
        Reason.STOPPING: _WAIT,
        Reason.DRAINING: "Wait for at most spec.lifecycle.drainSeconds.",
        Reason.RELEASING_PODS: _WAIT,
        Reason.SETTLING: _WAIT,
        Reason.SERVER_STARTING: "Wait. After more than a minute, inspect the servers' pods with `kubectl describe "
        "pod`.",
        Reason.ENGINES_STARTING: "Wait for at most spec.engine.startupSeconds. `kubectl megatron explain NAME` "
        "shows each pod that is not ready.",
        Reason.REFRESHING_WEIGHTS: "Wait for the slowest engine to load. The update fails after "
        "spec.engine.startupSeconds.",
        Reason.SETTING_ADAPTERS: "Wait for the slowest engine to load the adapters. The signal fails after "
        "spec.engine.startupSeconds.",
        Reason.SCALING_DOWN: _WAIT,
        Reason.ROLLING_OUT: "Wait. A pod checks the new revision before the operator drains engines. "
        "status.updatedReplicas is the number of engines that have the new revision and answer correctly.",
        Reason.ROTATING_KEYS: "Wait. All components continue to serve. After more than 15 minutes, check the "
        "kubelet on the node of the pod that status.plan.waitingOn names.",
        Reason.REPLACING_MODEL: _WAIT,
        Reason.DELETING: _NONE,
    },
    Symptom.SETTLED: {
        Reason.ONE_SERVER: "Set spec.server.replicas to 2 or more, unless this is a trial.",
        Reason.NO_PREFILL_ENGINE: "If spec.engine.roles.prefill.replicas is 0, raise it. Otherwise wait. The "
        "message says what the prefill engines wait for.",
        Reason.NO_DECODE_ENGINE: "If spec.replicas is 0, raise it. Otherwise wait. The message says what the decode "
        "engines wait for.",
        Reason.SERVING: _NONE,
        Reason.PAUSED: "Set spec.desiredState to Running to continue.",
        Reason.SUSPENDED: "Set spec.desiredState to Running to continue. If spec.replicas is 0, raise it.",
        Reason.STOPPED: "Set spec.desiredState to Running to start the engines.",
        Reason.AVAILABLE: _NONE,
        Reason.SETTLED: _NONE,
        Reason.ROLLOUT_PAUSED: "Set spec.rollout.paused to false to continue the rollout.",
        Reason.UPDATE_AVAILABLE: "Run `kubectl megatron update NAME`, or set spec.rollout.autoUpdate to true.",
        Reason.SECURITY_UPDATE_AVAILABLE: "Run `kubectl megatron update NAME` soon, or set spec.rollout.autoUpdate to "
        "true.",
        Reason.UP_TO_DATE: _NONE,
        Reason.ALL_WELL: _NONE,
    },
}
"""Actions by section of the guide and by reason. A test checks that every reason has an entry."""

REMEDIES: dict[Reason, Remedy] = {
    reason: Remedy(symptom, action) for symptom, actions in _ACTIONS.items() for reason, action in actions.items()
}
