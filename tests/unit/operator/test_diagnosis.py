"""What kubelets, schedulers and dying engines say becomes a reason of its own, with what to do about it."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_operator.plan.diagnosis import diagnose
from megatron_operator.plan.world import PodView


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
    (waiting("Unschedulable", 'persistentvolumeclaim "models" not found'), "VolumeMissing", "create the claim"),
    (crashed("", 137, exit_reason="OOMKilled"), "OutOfMemory", "raise the limit"),
    (crashed("torch.OutOfMemoryError: CUDA out of memory. Tried"), "GpuOutOfMemory", "kvCacheMemory"),
    (crashed("RuntimeError: Found no NVIDIA driver on your system"), "NoGpu", "gpusPerPod"),
    (crashed("error: --model /model/x: no such directory"), "WeightsMissing", "spec.model.source"),
    (crashed("401 Client Error: Unauthorized for url"), "AccessDenied", "tokenSecretRef"),
    (crashed("RuntimeError: Gloo connectFullMesh failed: timed out"), "RendezvousFailed", "reach each other"),
    (crashed("OSError: [Errno 98] Address already in use"), "PortTaken", "hostNetwork"),
    (crashed("OSError: [Errno 28] No space left on device"), "DiskFull", "room"),
    (crashed("32 heads are not divisible by 3 tensor ranks"), "EngineConfigRefused", "correct the field"),
    (crashed("Segmentation fault", 139), "CrashLooping", "segmentation fault"),
]


@pytest.mark.parametrize(("pod", "reason", "words"), CASES, ids=[f"{n}-{case[1]}" for n, case in enumerate(CASES)])
def test_each_trouble_has_its_reason_and_its_remedy(pod: PodView, reason: str, words: str) -> None:
    found = diagnose(pod)
    assert found is not None
    assert found[0].value == reason
    assert words in found[1]


def test_a_crash_names_its_rank_exit_code_and_last_words() -> None:
    found = diagnose(crashed("loading\nValueError: bad header", 3))
    assert found is not None
    for words in ("demo-engine-0-1", "node rank 1 of demo-engine-0", "exit code 3", "3 restarts", "bad header"):
        assert words in found[1]
