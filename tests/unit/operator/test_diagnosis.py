"""What kubelets, schedulers and dying engines say becomes a reason of its own, with what to do about it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from megatron_operator.decision.diagnosis import diagnose, references
from megatron_operator.decision.reduce import reduce_pod
from megatron_operator.decision.world import PodView
from megatron_operator.resource.spec import parse_spec


def crashed(message: str, exit_code: int = 1, **fields: Any) -> PodView:
    return PodView(
        "demo-engine-0-1",
        "u",
        "engine",
        engine="demo-engine-0",
        index=1,
        phase="Running",
        restarts=3,
        reason="CrashLoopBackOff",
        exit_code=exit_code,
        last_message=message,
        **fields,
    )


def waiting(reason: str, message: str) -> PodView:
    return PodView("demo-engine-0-0", "u", "engine", engine="demo-engine-0", reason=reason, message=message)


CASES: list[tuple[PodView, str, str]] = [
    (waiting("ImagePullBackOff", "manifest unknown"), "ImagePullFailed", "check the image's name"),
    (waiting("CreateContainerConfigError", 'secret "x" not found'), "ContainerConfigError", 'secret "x" not found'),
    (waiting("Unschedulable", "0/3 nodes: 3 Insufficient nvidia.com/gpu"), "Unschedulable", "free GPUs"),
    (waiting("Unschedulable", "0/3 nodes: 3 node(s) had untolerated taint"), "Unschedulable", "toleration"),
    (
        waiting("Unschedulable", 'persistentvolumeclaim "models" not found'),
        "VolumeMissing",
        "create persistentvolumeclaim models",
    ),
    (crashed("", 137, exit_reason="OOMKilled"), "OutOfMemory", "raise the limit"),
    (crashed("torch.OutOfMemoryError: CUDA out of memory. Tried"), "GpuOutOfMemory", "kvCacheMemory"),
    (crashed("RuntimeError: Found no NVIDIA driver on your system"), "NoGpu", "gpusPerPod"),
    (
        crashed('{"reason": "NoGpu", "rank": 0, "message": "torch finds no CUDA device: old driver", "remedy": "x"}'),
        "NoGpu",
        "old driver; x",
    ),
    (
        crashed('{"reason": "GpuKernelsMissing", "message": "device cuda:0 needs a C compiler", "remedy": ""}'),
        "GpuKernelsMissing",
        "triton and a C compiler",
    ),
    (crashed("error: --model /model/x: no such directory"), "WeightsMissing", "spec.model.source"),
    (crashed("401 Client Error: Unauthorized for url"), "AccessDenied", "tokenSecretRef"),
    (crashed("RuntimeError: Gloo connectFullMesh failed: timed out"), "RendezvousFailed", "allow their connections"),
    (crashed("OSError: [Errno 98] Address already in use"), "PortTaken", "hostNetwork"),
    (crashed("OSError: [Errno 28] No space left on device"), "DiskFull", "increase the cache volume"),
    (crashed("32 heads are not divisible by 3 tensor ranks"), "EngineConfigRefused", "correct the field"),
    (crashed("Segmentation fault", 139), "CrashLooping", "segmentation fault"),
]


@pytest.mark.parametrize(("pod", "reason", "words"), CASES, ids=[f"{n}-{case[1]}" for n, case in enumerate(CASES)])
def test_each_pod_failure_has_its_reason_and_its_remedy(pod: PodView, reason: str, words: str) -> None:
    found = diagnose(pod)
    assert found is not None
    assert found[0].value == reason
    assert words in found[1]


SPEC = parse_spec(
    {
        "model": {
            "source": {
                "huggingFace": {"repo": "org/model", "tokenSecretRef": {"name": "hub", "key": "token"}},
            }
        },
        "server": {"apiKeysSecretRef": {"name": "clients", "key": "list"}, "tls": {"secretName": "certificate"}},
    }
)


@pytest.mark.parametrize(
    ("component", "reason", "message", "remedy"),
    [
        (
            "server",
            "FailedMount",
            'MountVolume.SetUp failed for volume "api-keys" : secret "clients" not found',
            "create secret clients in the namespace of the resource, or correct spec.server.apiKeysSecretRef",
        ),
        (
            "server",
            "FailedMount",
            'MountVolume.SetUp failed for volume "api-keys" : references non-existent secret key: list',
            "add key list to its Secret, or correct spec.server.apiKeysSecretRef",
        ),
        (
            "server",
            "FailedMount",
            'MountVolume.SetUp failed for volume "tls" : secret "certificate" not found',
            "or correct spec.server.tls.secretName",
        ),
        (
            "engine",
            "CreateContainerConfigError",
            'secret "hub" not found',
            "or correct spec.model.source.huggingFace.tokenSecretRef",
        ),
        (
            "engine",
            "CreateContainerConfigError",
            "couldn't find key token in Secret default/hub",
            "add key token to secret hub, or correct spec.model.source.huggingFace.tokenSecretRef",
        ),
        (
            "coordinator",
            "FailedMount",
            'MountVolume.SetUp failed for volume "extra" : configmap "settings" not found',
            "create configmap settings in the namespace of the resource, or correct spec.coordinator.podTemplate",
        ),
        (
            "standby",
            "FailedMount",
            'MountVolume.SetUp failed for volume "extra" : configmap "settings" not found',
            "or correct spec.coordinator.podTemplate",
        ),
        (
            "check",
            "FailedMount",
            'MountVolume.SetUp failed for volume "extra" : configmap "settings" not found',
            "or correct spec.engine.podTemplate",
        ),
    ],
)
def test_a_missing_secret_or_configmap_is_named_with_the_field_that_refers_to_it(
    component: str, reason: str, message: str, remedy: str
) -> None:
    pod = PodView("demo-0", "u", component, reason=reason, message=message)
    found = diagnose(pod, references(SPEC.model_dump(mode="json")))
    assert found is not None
    assert found[0].value == "ContainerConfigError"
    assert message in found[1]
    assert found[1].endswith(remedy)


def test_a_volume_that_cannot_be_attached_has_the_kubelets_words() -> None:
    said = 'AttachVolume.Attach failed for volume "pvc-1" : volume is attached to node other'
    found = diagnose(waiting("FailedAttachVolume", said))
    assert found is not None
    assert found[0].value == "VolumeFailed"
    assert said in found[1]


def test_the_schedulers_repetition_is_removed() -> None:
    said = '0/1 nodes are available: persistentvolumeclaim "models" not found. not found'
    found = diagnose(waiting("Unschedulable", said))
    assert found is not None
    assert '"models" not found; create' in found[1]
    assert found[1].count("not found") == 1


def test_a_crash_names_its_rank_exit_code_and_termination_message() -> None:
    found = diagnose(crashed("loading\nValueError: bad header", 3))
    assert found is not None
    for words in ("demo-engine-0-1", "node rank 1 of demo-engine-0", "exit code 3", "3 restarts", "bad header"):
        assert words in found[1]


CONFIG, MEMORY = "EngineConfigRefused", "GpuOutOfMemory"
VLLM_CASES: list[tuple[str, str, str]] = [
    ("backend vllm: vLLM is not installed: use an image that has it, or --backend native", CONFIG, "vllm.image"),
    ("vLLM 0.31.2 is not supported: install vLLM >=0.32,<0.33, or use the native backend", CONFIG, "vllm.image"),
    ("vLLM argument max_model_len conflicts with spec.model.maxSequenceLength: set that", CONFIG, "vllm.args"),
    ("vLLM 0.32.0 rejects its arguments: unexpected keyword argument 'x'", CONFIG, "spec.engine.vllm.args"),
    ("1 validation error for CacheConfig\nblock_size\n  Input should be", CONFIG, "spec.engine.vllm.args"),
    ("Unknown quantization method: odd. Must be one of ['awq'].", CONFIG, "vllm.args.quantization"),
    (
        "Failed to load the model config. If the model is a custom model not yet available in the HuggingFace "
        "transformers library, consider setting `trust_remote_code=True` in LLM",
        CONFIG,
        "vllm.allowCode",
    ),
    (
        "User-specified max_model_len (4096) is greater than the derived max_model_len (max_position_embeddings=2048.0 "
        "or model_max_length=None in model's config.json).",
        CONFIG,
        "lower spec.model.maxSequenceLength",
    ),
    (
        "To serve at least one request with the model's max seq len (4096), (0.18 GiB KV cache is needed, which is "
        "larger than the available KV cache memory (0.06 GiB). Based on",
        CONFIG,
        "raise spec.engine.batching.kvCacheMemory",
    ),
    (
        "No available memory for the cache blocks. Try increasing `gpu_memory_utilization`",
        CONFIG,
        "raise spec.engine.batching.kvCacheMemory",
    ),
    (
        "Free memory on device cuda:0 (3.2/79.1 GiB) on startup is less than desired GPU memory utilization "
        "(0.9, 71.2 GiB).",
        MEMORY,
        "other processes",
    ),
    ("CUDA out of memory. Tried to allocate 2.00 GiB", MEMORY, "kvCacheMemory"),
    ("Failed to infer device type, please set the environment variable", "NoGpu", "gpusPerPod"),
    (
        "Total number of attention heads (9) must be divisible by tensor parallel size (2).",
        CONFIG,
        "spec.parallelism.tensor",
    ),
    (
        "Model architectures ['OddForCausalLM'] are not supported for now. Supported architectures: dict_keys(['A'])",
        "UnsupportedByBackend",
        "Native",
    ),
    (
        "vLLM failed: its engine process was killed by SIGKILL, most often because its memory limit was exceeded",
        "OutOfMemory",
        "raise resources.limits.memory",
    ),
]


@pytest.mark.parametrize(("text", "reason", "words"), VLLM_CASES, ids=[case[0][:40] for case in VLLM_CASES])
def test_each_failure_of_a_vllm_engine_has_its_reason_and_its_remedy(text: str, reason: str, words: str) -> None:
    told = {"reason": "ValueError", "rank": 0, "message": text, "remedy": ""}
    for message in (json.dumps(told), f"Traceback (most recent call last):\nValueError: {text}"):
        found = diagnose(crashed(message))
        assert found is not None
        assert (found[0].value, words in found[1].rpartition("; ")[2]) == (reason, True), found


def test_a_long_message_is_quoted_from_its_cause_on() -> None:
    names = [f"Model{number}ForCausalLM" for number in range(300)]
    text = (
        f"loading {'.' * 500} Model architectures ['Odd'] are not supported for now. Supported architectures: {names}"
    )
    found = diagnose(crashed(json.dumps({"reason": "ValueError", "message": text, "rank": 0})))
    assert found is not None
    assert ": …Model architectures ['Odd'] are not supported for now. Supported" in found[1]
    assert "…; choose a model" in found[1]


@pytest.mark.parametrize("is_over", [{"ready": True}, {"deleting": True}])
def test_a_pod_that_recovered_or_is_deleted_has_no_diagnosis(is_over: dict[str, bool]) -> None:
    assert diagnose(replace(crashed("Segmentation fault", 139), **is_over)) is None


def test_a_json_termination_message_is_parsed() -> None:
    told = {"reason": "RankLost", "rank": 5, "message": "rank 5 left\nthe step", "remedy": "look at its own pod"}
    found = diagnose(crashed(json.dumps(told), 1))
    assert found is not None
    assert found[1].endswith("exit code 1 (3 restarts): rank 5 left the step; look at its own pod")
    assert "node rank 1 of demo-engine-0, rank 5" in found[1]


def _preflight(**state: Any) -> dict[str, Any]:
    ended = {"exitCode": 1, "reason": "Error", "finishedAt": "1", "message": PAIR}
    entry = {"name": "preflight", "restartCount": 1, "lastState": {"terminated": ended}, "state": state}
    labels = {
        "app.kubernetes.io/component": "engine",
        "inference.megatron.dev/engine": "demo-engine-0",
        "apps.kubernetes.io/pod-index": "2",
    }
    status = {"phase": "Pending", "initContainerStatuses": [entry], "containerStatuses": []}
    return {"metadata": {"name": "demo-engine-0-2", "labels": labels}, "status": status}


PAIR = json.dumps(
    {"reason": "RendezvousFailed", "rank": 2, "message": "a-2 cannot reach a-0 on port 29500", "remedy": "see policies"}
)


def test_a_preflight_that_failed_names_the_pair_at_once_and_is_forgotten_once_it_passed() -> None:
    found = diagnose(reduce_pod(_preflight(running={})))
    assert found is not None
    assert found[0].value == "RendezvousFailed"
    assert "container preflight ended with exit code 1 (1 restarts): a-2 cannot reach a-0 on port 29500" in found[1]
    assert diagnose(reduce_pod(_preflight(terminated={"exitCode": 0, "finishedAt": "2"}))) is None


@pytest.mark.parametrize(
    "message", ["[" * 4096, '{"a":' * 800, "[]", "7", '{"message": {}, "rank": [1]}', '{"reason": 1}', "null"]
)
def test_a_termination_message_of_any_form_is_quoted(message: str) -> None:
    assert diagnose(crashed(message)) is not None
