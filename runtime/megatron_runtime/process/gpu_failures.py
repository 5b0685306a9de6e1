"""Known error texts of GPUs, their drivers and NCCL, with causes and remedies. Imports no torch.

The driver, CUDA, NCCL, PyTorch and vLLM write the texts, so they are the same in all containers. An engine writes cause
and remedy into its termination message. The operator uses the same table for the status of the custom resource,
including engines whose containers exited without a termination message.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

DRIVER_VERSION = Path("/proc/driver/nvidia/version")
"""File of the NVIDIA kernel module, which every container of the node can read."""

DRIVER = "GpuDriver"
FAILED = "GpuFailed"
COMMUNICATION = "GpuCommunication"
SHARED_MEMORY = "SharedMemoryFull"
MEMORY = "GpuOutOfMemory"
HOST_MEMORY = "OutOfMemory"
NONE = "NoGpu"
KERNELS = "GpuKernelsMissing"
CONFIGURATION = "EngineConfigRefused"
"""Causes of failures. Conditions of a resource use them as reasons."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFailure:
    """A known failure of a GPU, with the log text that identifies it, its cause and its remedy.

    is_of_device: whether the device or its node is faulty. If so, the engine must start on another device.
    """

    cause: str
    pattern: re.Pattern[str]
    remedy: str
    is_of_device: bool = False


def _failure(cause: str, pattern: str, remedy: str, *, is_of_device: bool = False) -> GpuFailure:
    return GpuFailure(cause=cause, pattern=re.compile(pattern, re.IGNORECASE), remedy=remedy, is_of_device=is_of_device)


_REPLACE = "the operator re-creates the engine on another device; drain the node, and reset or replace the GPU"

GPU_FAILURES: tuple[GpuFailure, ...] = (
    _failure(
        SHARED_MEMORY,
        r"insufficient shared memory|/dev/shm.{0,200}(no space left|ENOSPC)|(no space left|ENOSPC).{0,200}"
        r"(/dev/shm|/psm_|shared memory)|shared memory segment.{0,100}(/dev/shm|failed|nccl-)"
        r"|unable to (allocate|write to|open) (shared memory|file </torch_)|\bbus error\b",
        "raise resources.limits.memory of the engine in podTemplate: the volume shm at /dev/shm is a part of it; if "
        "podTemplate sets a sizeLimit for shm, raise that",
    ),
    _failure(
        DRIVER,
        r"NVIDIA driver on your system is too old|driver version is insufficient for CUDA runtime"
        r"|forward compatibility was attempted on non supported HW|unsupported .*driver / cuda driver"
        r"|CUDA_ERROR_(SYSTEM_DRIVER_MISMATCH|COMPAT_NOT_SUPPORTED_ON_DEVICE)|cudaErrorInsufficientDriver",
        "update the NVIDIA driver of the node to 580 or newer, which images for CUDA 13 need, or choose nodes that "
        "have it by nodeSelector in podTemplate",
    ),
    _failure(
        DRIVER,
        r"driver/library version mismatch|RM has detected an NVML/RM version mismatch",
        "restart the node, or reload its NVIDIA kernel modules: the driver was updated while it ran",
    ),
    _failure(
        COMMUNICATION,
        r"system not yet initialized|CUDA_ERROR_SYSTEM_NOT_READY|cudaErrorSystemNotReady|fabric ?manager",
        "start nvidia-fabricmanager on the node, in the version of its driver: GPUs behind NVSwitch need it",
        is_of_device=True,
    ),
    _failure(
        FAILED,
        r"uncorrectable (ECC|NVLink) error|CUDA_ERROR_(ECC_UNCORRECTABLE|NVLINK_UNCORRECTABLE)"
        r"|cudaErrorECCUncorrectable|row remapping|Xid.{0,40}\b(48|63|64|74|79|94|95|119|120)\b",
        _REPLACE,
        is_of_device=True,
    ),
    _failure(
        FAILED,
        r"GPU is lost|fallen off the bus|GPU requires reset|Unable to determine the device handle"
        r"|device\(s\) is/are busy or unavailable|CUDA_ERROR_DEVICE_UNAVAILABLE|nvmlErrorGpuIsLost"
        r"|hardware stack error|CUDA_ERROR_HARDWARE_STACK_ERROR",
        _REPLACE,
        is_of_device=True,
    ),
    _failure(
        KERNELS,
        r"no kernel image is available for execution|CUDA_ERROR_NO_BINARY_FOR_GPU"
        r"|is not compatible with the current PyTorch installation",
        "choose nodes with a GPU that the image supports by nodeSelector in podTemplate, or an image that was built "
        "for this GPU",
    ),
    _failure(
        CONFIGURATION,
        r"when stream is capturing|previous error during capture|cudaErrorStreamCapture"
        r"|error.{0,80}CUDA ?graph|CUDA ?graph.{0,80}(error|failed)",
        "report the message and the name of the model; for a vLLM engine, also set "
        "spec.engine.vllm.args.enforce_eager to true, which turns CUDA graphs off",
    ),
    _failure(
        CONFIGURATION,
        r"not a subclass of vllm\.v1\.\S*LogitsProcessor|logits processors? .{0,60}not supported when speculative"
        r"|Model Runner V[12] (does not|doesn't|requires)|VLLM_USE_V2_MODEL_RUNNER"
        r"|not (yet )?support(ed)? (by|in|with) (the )?(V2 model runner|Model Runner V2)",
        "remove VLLM_USE_V2_MODEL_RUNNER from podTemplate so that vLLM chooses its model runner, remove the argument "
        "of spec.engine.vllm.args that the message names, and use the vLLM image of this release",
    ),
    _failure(
        COMMUNICATION,
        r"Watchdog caught collective operation timeout|NCCL.{0,80}(timed? ?out|timeout)|collective operation timeout",
        "read the logs of the other ranks for the first error; if there is none, check the links between the GPUs and "
        "pods of the engine, and that NetworkPolicies allow their connections",
    ),
    _failure(
        MEMORY,
        r"CUDA out of memory|OutOfMemoryError|CUDA error: out of memory|CUDA_ERROR_OUT_OF_MEMORY"
        r"|cudaErrorMemoryAllocation|CU(BLAS|DNN)_STATUS_ALLOC_FAILED|NCCL.{0,80}out of memory",
        "lower batching.kvCacheMemory or maxSequenceLength, choose a smaller dtype, raise parallelism.tensor, or lower "
        "gpu_memory_utilization of vLLM",
    ),
    _failure(
        COMMUNICATION,
        r"NCCL error|nccl(Unhandled\w*|System|Remote|Internal|Invalid\w*)Error|unhandled (system|cuda) error"
        r"|NCCL.{0,60}failed",
        "set NCCL_DEBUG=INFO in podTemplate and read the line before the error; check that all ranks run the same "
        "image, that the pods reach each other, and that NCCL_SOCKET_IFNAME names an interface of the pod",
    ),
    _failure(
        FAILED,
        r"illegal memory access|CUDA_ERROR_ILLEGAL_ADDRESS|misaligned address|illegal instruction was encountered"
        r"|unspecified launch failure|CUDA_ERROR_LAUNCH_FAILED|device-side assert|launch timed out and was terminated",
        "set CUDA_LAUNCH_BLOCKING=1 in podTemplate to find the kernel, and report it with the message; if it occurs on "
        "one node only, check its GPUs (`nvidia-smi -q`, Xid lines of the kernel log)",
    ),
    _failure(
        HOST_MEMORY,
        r"DefaultCPUAllocator: can't allocate memory|std::bad_alloc|Cannot allocate memory|\bMemoryError\b"
        r"|cudaHostAlloc|failed to (allocate|pin|register) (pinned|host) memory",
        "raise resources.limits.memory of the engine in podTemplate, or lower batching.kvCacheMemory on a CPU",
    ),
    _failure(
        NONE,
        r"no CUDA(-capable)? (device|GPU)|CUDA.{0,40}not available|found no NVIDIA|invalid device ordinal"
        r"|libcuda\.so\.1: cannot open|CUDA unknown error|CUDA driver initialization failed|NVML Shared Library",
        "set spec.engine.gpusPerPod to the number of GPUs that a pod needs, and check that the node's device plugin "
        "or DRA driver offers this many GPUs",
    ),
)
"""The known failures. The first match applies, so specific patterns come first."""


def gpu_failure(text: str) -> GpuFailure | None:
    """Return the known failure whose text occurs in the error text `text`, or None if there is none."""
    return next((failure for failure in GPU_FAILURES if failure.pattern.search(text)), None)


def nvidia_driver(version: Path = DRIVER_VERSION) -> str:
    """Return the version of the node's NVIDIA driver, such as 580.65.06.

    The result is empty if the node has no driver.
    """
    try:
        match = re.search(r"\b\d{3,}(\.\d+)+\b", version.read_text())
    except OSError:
        return ""
    return match[0] if match else ""
