"""Table that maps termination messages and scheduler messages to the probable cause and the remedy."""

from __future__ import annotations

import re
from dataclasses import dataclass

from megatron_operator.resource.conditions import Reason
from megatron_runtime.process.gpu_failures import GPU_FAILURES


@dataclass(frozen=True, slots=True)
class Cause:
    reason: Reason
    pattern: str
    remedy: str

    def search(self, text: str) -> re.Match[str] | None:
        return re.search(self.pattern, text, re.IGNORECASE)


_REASONS = {reason.value: reason for reason in Reason}

VLLM_MESSAGE: tuple[Cause, ...] = (
    Cause(
        Reason.ENGINE_CONFIG_REFUSED,
        r"vLLM is not installed|vLLM [\w.+-]+ is not supported",
        "use the vLLM image of this release: correct spec.engine.vllm.image, or vllm.image of the operator's chart",
    ),
    Cause(
        Reason.ENGINE_CONFIG_REFUSED,
        r"quantization method|quantization .* is unknown",
        "correct spec.engine.vllm.args.quantization, or remove it if the model is already quantized",
    ),
    Cause(
        Reason.ENGINE_CONFIG_REFUSED,
        r"trust_remote_code|requires you to execute the configuration file",
        "set spec.engine.vllm.args.trust_remote_code, which the chart allows with vllm.allowCode, or use another model",
    ),
    Cause(
        Reason.ENGINE_CONFIG_REFUSED,
        r"must be divisible by tensor parallel size",
        "set spec.parallelism.tensor to a divisor of the model's attention heads",
    ),
    Cause(
        Reason.ENGINE_CONFIG_REFUSED,
        r"greater than the derived max_model_len",
        "lower spec.model.maxSequenceLength to the model's limit",
    ),
    Cause(
        Reason.ENGINE_CONFIG_REFUSED,
        r"larger than the available KV cache memory|No available memory for the cache blocks",
        "raise spec.engine.batching.kvCacheMemory, or lower spec.model.maxSequenceLength",
    ),
    Cause(
        Reason.GPU_OUT_OF_MEMORY,
        r"less than desired GPU memory utilization",
        "stop the other processes on the GPU, or lower spec.engine.vllm.args.gpu_memory_utilization",
    ),
    Cause(
        Reason.NO_GPU,
        r"Failed to infer device type|larger than the number of available GPUs",
        "set spec.engine.gpusPerPod to the number of GPUs that a pod needs, and check that the node's device plugin "
        "or DRA driver offers this many GPUs and that spec.engine.vllm.image supports the devices of "
        "spec.engine.accelerator",
    ),
    Cause(
        Reason.UNSUPPORTED_BY_BACKEND,
        r"Model architectures? .*(supported|failed to be inspected)|No model architectures are specified",
        "choose a model that this version of vLLM supports, or set spec.engine.backend to Native",
    ),
    Cause(
        Reason.ENGINE_CONFIG_REFUSED,
        r"vLLM argument |vLLM [\w.+-]+ rejects its arguments|validation errors? for \w+(Config|Args)",
        "correct spec.engine.vllm.args, or the field that the message names",
    ),
    Cause(
        Reason.OUT_OF_MEMORY,
        r"killed by SIGKILL, most often because its memory limit was exceeded",
        "raise resources.limits.memory in podTemplate, or lower batching.kvCacheMemory",
    ),
)
"""Messages of vLLM and of its backend. They come first, because they contain words of other patterns."""

TERMINATION_MESSAGE: tuple[Cause, ...] = (
    *VLLM_MESSAGE,
    *(Cause(_REASONS[failure.cause], failure.pattern.pattern, failure.remedy) for failure in GPU_FAILURES),
    Cause(
        Reason.ACCESS_DENIED,
        r"access to (s3|gs|az|https)://\S+ is denied \(40[13]",
        "set spec.model.source.objectStore.credentialsSecretRef, or give the ServiceAccount of the resource an "
        "identity that may read the objects",
    ),
    Cause(
        Reason.ACCESS_DENIED,
        r"\b(401|403)\b.*(client error|unauthorized|forbidden)|gated repo|GatedRepoError|invalid (user )?token",
        "set spec.model.source.huggingFace.tokenSecretRef to a token that may read the repository",
    ),
    Cause(
        Reason.RENDEZVOUS_FAILED,
        r"rendezvous|connect\(\) timed out|store.*(timed? ?out|timeout)|Connection closed by peer"
        r"|gloo.*(timed? ?out|connect)",
        "check that all pods of the engine are scheduled, and that NetworkPolicies allow their connections",
    ),
    Cause(
        Reason.PORT_TAKEN,
        r"address (is )?already in use|EADDRINUSE|cannot bind",
        "remove hostNetwork from podTemplate, or free the port on the node",
    ),
    Cause(
        Reason.DISK_FULL,
        r"no space left on device|ENOSPC|disk quota exceeded",
        "increase the cache volume in podTemplate, or the node's ephemeral storage",
    ),
    Cause(
        Reason.WEIGHTS_MISSING,
        r"no such (file|model|directory)|not a (directory|file)|does not exist|no weights"
        r"|weights? .*(missing|not found)|config\.json|repository not found|unknown builtin|\.safetensors|\.gguf",
        "correct spec.model.source or spec.weights.revision",
    ),
    Cause(
        Reason.ENGINE_CONFIG_REFUSED,
        r"not divisible|unsupported|is not supported|InvalidConfig|exceeds the model|usage: ",
        "correct the field of the spec that the message names",
    ),
    Cause(
        Reason.GPU_KERNELS_MISSING,
        r"GpuKernelsMissing",
        "set spec.engine.image or the chart's runtime.image to an image with triton and a C compiler",
    ),
)
"""Causes by pattern of the termination message. The first match applies, so specific patterns come first."""

SCHEDULING: tuple[Cause, ...] = (
    Cause(
        Reason.VOLUME_MISSING,
        r"persistentvolumeclaim .*not found|unbound immediate PersistentVolumeClaims|volume node affinity",
        "create the claim that spec.model.source.persistentVolumeClaim names, and check that it is bound",
    ),
    Cause(
        Reason.UNSCHEDULABLE,
        r"didn't match pod affinity rules",
        "if spec.engine.topology.packBy is set, all pods of the engine must run on nodes with the same value of "
        "this label: label the nodes, free capacity in one domain, or delete the engine's pods so that the "
        "scheduler chooses another domain; if it is not set, correct podAffinity in podTemplate",
    ),
    Cause(
        Reason.UNSCHEDULABLE,
        r"insufficient [\w.-]+/[\w.-]+",
        "free GPUs or other devices of the resource that the message names, add nodes whose device plugin offers "
        "it, correct spec.engine.accelerator.resource, or lower spec.replicas or spec.parallelism",
    ),
    Cause(
        Reason.UNSCHEDULABLE,
        r"device class \S+ does not exist",
        "install the DRA driver that creates the DeviceClass, or correct the name of the DeviceClass in the "
        "ResourceClaim or ResourceClaimTemplate",
    ),
    Cause(
        Reason.UNSCHEDULABLE,
        r"cannot allocate all claims|resourceclaim (in use|not available)|cannot fit resource",
        "free devices that the ResourceClaims of spec.engine.accelerator.claims select, add nodes with such "
        "devices, correct the claims, or lower spec.replicas",
    ),
    Cause(
        Reason.UNSCHEDULABLE,
        r"resource ?claim",
        "in the namespace of the resource, create the ResourceClaim or ResourceClaimTemplate that "
        "spec.engine.accelerator.claims or podTemplate names",
    ),
    Cause(Reason.UNSCHEDULABLE, r"insufficient (cpu|memory)", "lower the requests in podTemplate, or add nodes"),
    Cause(Reason.UNSCHEDULABLE, r"taint", "add a toleration in podTemplate, or remove the taint"),
    Cause(
        Reason.UNSCHEDULABLE,
        r"node affinity|node selector|didn't match",
        "correct nodeSelector or affinity in podTemplate",
    ),
)

CREATION: tuple[Cause, ...] = (
    Cause(
        Reason.QUOTA_EXCEEDED,
        r"exceeded quota",
        "raise the ResourceQuota that the message names, lower spec.replicas, or lower the requests and limits in "
        "{pod_template}",
    ),
    Cause(
        Reason.LIMIT_REQUIRED,
        r"failed quota: .*must specify|No (limit|request) is specified",
        "in {pod_template}, set the requests and limits that the message names, or create a LimitRange in the "
        "namespace whose default and defaultRequest set them for every container; a larger ResourceQuota does not "
        "help",
    ),
    Cause(
        Reason.LIMIT_RANGE_VIOLATED,
        r"(maximum|minimum) .* usage per (Container|Pod)|max limit to request ratio per",
        "change the requests or limits of {pod_template} so that they are within the LimitRange of the namespace, or "
        "change the LimitRange",
    ),
    Cause(
        Reason.INVALID_POD_TEMPLATE,
        r"unable to validate against any security context constraint",
        "if the message names runAsUser or fsGroup, set the chart value openshift to true; otherwise remove the "
        "setting that the message names from {pod_template}, or bind a constraint that allows this setting to the "
        "ServiceAccount of the resource",
    ),
    Cause(
        Reason.INVALID_POD_TEMPLATE,
        r"violates PodSecurity|denied the request|is forbidden|is invalid",
        "correct {pod_template}",
    ),
)
"""Causes for which the API server rejects a pod. `{pod_template}` is the spec field with its podTemplate."""

MALFORMED_OBJECT = "failed to create typed patch object"
"""Text that the API server returns with status 500 for a server-side apply of an object with a wrong type or an unknown
field.
"""
FAILED_WEBHOOK = "failed calling webhook"
"""Text that the API server returns with status 500 if an admission webhook is down."""

EXIT_CODES: dict[int, str] = {
    126: "the command cannot be executed",
    127: "the image has no such command",
    134: "it aborted",
    135: "it crashed with a bus error, most often because /dev/shm was full",
    137: "it was killed, most often for its memory",
    139: "it crashed with a segmentation fault",
    143: "it was terminated",
}


def find_cause(text: str, causes: tuple[Cause, ...] = TERMINATION_MESSAGE) -> Cause | None:
    return next((cause for cause in causes if cause.search(text)), None)
