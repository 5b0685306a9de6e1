"""Error texts of GPU nodes: the engine's termination message and the status name the cause and the remedy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from megatron_operator.decision.diagnosis import diagnose, is_device_failure
from megatron_runtime.cli import containers
from megatron_runtime.cli.processes import free_ports
from megatron_runtime.process.gpu_failures import gpu_failure, nvidia_driver
from megatron_runtime.process.logs import write_termination_message

from .test_diagnosis import crashed

TEXTS = [
    ("The NVIDIA driver on your system is too old (found version 12020). Please update", "GpuDriver", "580 or newer"),
    ("CUDA driver version is insufficient for CUDA runtime version", "GpuDriver", "580 or newer"),
    ("CUDA error: system has unsupported display driver / cuda driver combination", "GpuDriver", "580 or newer"),
    ("Error 804: forward compatibility was attempted on non supported HW", "GpuDriver", "580 or newer"),
    ("Failed to initialize NVML: Driver/library version mismatch", "GpuDriver", "restart the node"),
    ("CUDA error: system not yet initialized", "GpuCommunication", "nvidia-fabricmanager"),
    ("CUDA error: uncorrectable ECC error encountered", "GpuFailed", "another device"),
    ("CUDA error: uncorrectable NVLink error detected during the execution", "GpuFailed", "another device"),
    (
        "Unable to determine the device handle for GPU 0000:3B:00.0: GPU is lost.  Reboot the system",
        "GpuFailed",
        "another device",
    ),
    ("CUDA error: CUDA-capable device(s) is/are busy or unavailable", "GpuFailed", "another device"),
    ("CUDA error: an illegal memory access was encountered", "GpuFailed", "CUDA_LAUNCH_BLOCKING"),
    ("CUDA error: unspecified launch failure", "GpuFailed", "CUDA_LAUNCH_BLOCKING"),
    ("CUDA error: device-side assert triggered", "GpuFailed", "CUDA_LAUNCH_BLOCKING"),
    ("CUDA error: no kernel image is available for execution on the device", "GpuKernelsMissing", "nodeSelector"),
    (
        "NVIDIA B200 with CUDA capability sm_100 is not compatible with the current PyTorch installation.",
        "GpuKernelsMissing",
        "nodeSelector",
    ),
    (
        "NCCL error in: ProcessGroupNCCL.cpp:3356, unhandled system error (run with NCCL_DEBUG=INFO for details)",
        "GpuCommunication",
        "NCCL_DEBUG=INFO",
    ),
    ("NCCL error: unhandled cuda error (run with NCCL_DEBUG=INFO for details)", "GpuCommunication", "NCCL_DEBUG=INFO"),
    ("ncclRemoteError: A call failed possibly due to a network error", "GpuCommunication", "NCCL_DEBUG=INFO"),
    (
        "[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=41, OpType=ALLREDUCE) ran for 600 s",
        "GpuCommunication",
        "other ranks for the first error",
    ),
    (
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.1 GiB",
        "GpuOutOfMemory",
        "kvCache",
    ),
    ("CUDA error: out of memory", "GpuOutOfMemory", "gpu_memory_utilization"),
    ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "GpuOutOfMemory", "kvCacheMemory"),
    ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes", "OutOfMemory", "limits.memory"),
    ("[Errno 12] Cannot allocate memory", "OutOfMemory", "limits.memory"),
    ("[Errno 28] No space left on device: '/dev/shm/psm_63f1a2'", "SharedMemoryFull", "limits.memory"),
    ("unable to write to file </torch_123_0>: No space left on device (28)", "SharedMemoryFull", "limits.memory"),
    (
        "NCCL WARN Error while creating shared memory segment /dev/shm/nccl-4jNNSk (size 9637888)",
        "SharedMemoryFull",
        "limits.memory",
    ),
    ("CUDA error: operation not permitted when stream is capturing", "EngineConfigRefused", "enforce_eager"),
    ("CUDA error: operation failed due to a previous error during capture", "EngineConfigRefused", "enforce_eager"),
    (
        "AnswerTokens is not a subclass of vllm.v1.worker.gpu.sample.logits_processor.LogitsProcessor",
        "EngineConfigRefused",
        "model runner",
    ),
    (
        "VLLM_USE_V2_MODEL_RUNNER=1 was set, but Model Runner V2 does not yet support suffix decoding",
        "EngineConfigRefused",
        "model runner",
    ),
    ("Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU", "NoGpu", "gpusPerPod"),
    ("libcuda.so.1: cannot open shared object file: No such file or directory", "NoGpu", "gpusPerPod"),
    ("no space left on device: '/cache/vllm/x'", "DiskFull", "cache volume"),
    ("CUDA error: invalid device ordinal", "NoGpu", "gpusPerPod"),
]


@pytest.mark.parametrize(("text", "reason", "words"), TEXTS, ids=[text[:48] for text, *_ in TEXTS])
def test_each_text_has_its_cause_and_its_remedy(text: str, reason: str, words: str, tmp_path: Path) -> None:
    log = tmp_path / "termination-log"
    log.touch()
    write_termination_message(RuntimeError(f"vLLM failed: RuntimeError: {text}"), log)
    told = json.loads(log.read_text())
    if reason != "DiskFull":
        assert (told["reason"], words in told["remedy"]) == (reason, True), told
    for message in (log.read_text(), f"Traceback (most recent call last):\nRuntimeError: {text}"):
        found = diagnose(crashed(message))
        assert found is not None
        assert (found[0].value, words in found[1].rpartition("; ")[2] or words in found[1]) == (reason, True), found


def test_a_failure_of_a_device_is_not_that_of_a_kernel() -> None:
    assert is_device_failure(crashed("CUDA error: uncorrectable ECC error encountered"))
    assert not is_device_failure(crashed("CUDA error: an illegal memory access was encountered"))
    assert gpu_failure("ValueError: max_model_len is too large") is None


DRIVERS = {
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (dvs-builder@U22-I3-AM02)  "
    "Sun Jul 27 07:17:31 UTC 2025\nGCC version:  gcc version 12.3.0\n": "580.65.06",
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n": "535.104.05",
    "no version\n": "",
}


@pytest.mark.parametrize(("text", "number"), DRIVERS.items(), ids=[number or "none" for number in DRIVERS.values()])
def test_the_message_of_a_driver_that_is_too_old_has_its_version(text: str, number: str, tmp_path: Path) -> None:
    version, log = tmp_path / "version", tmp_path / "termination-log"
    assert nvidia_driver(version) == ""
    version.write_text(text)
    assert nvidia_driver(version) == number
    for said, cause in (("The NVIDIA driver on your system is too old", "GpuDriver"), ("device lost", "RuntimeError")):
        log.touch()
        write_termination_message(RuntimeError(said), log, driver_version=version)
        told = json.loads(log.read_text())
        assert told["reason"] == cause
        assert ("NVIDIA driver of the node" in told["message"]) is bool(number and cause == "GpuDriver")
        assert number in told["message"] or cause != "GpuDriver"


def test_the_preflight_reports_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(containers, "nvidia_driver", lambda: "580.65.06")
    (port,) = free_ports(1)
    pods = ["--name", "127.0.78.{node}", "--nodes", "2", "--node", "1", "--listen", "127.0.78.1"]
    done = CliRunner().invoke(containers.preflight, [*pods, "--port", str(port), "--timeout-seconds", "1"])
    assert done.exit_code == 0, done.output
    assert done.output.splitlines()[-1] == "NVIDIA driver of this node: 580.65.06"
