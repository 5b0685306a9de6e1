"""Selects the implementation of each operation, in torch or in Triton.

Each operation has its own switch, so that a benchmark or a debugging session can isolate an operation. The default is
Triton on a CUDA device and torch on a CPU. An implementation is imported when it is selected.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch

from megatron_kernels.operations import (
    AddRmsNorm,
    MoeExperts,
    MoeRouting,
    PagedDecode,
    PagedPrefill,
    QkNormRopeAppend,
    Sample,
    SwiGlu,
)


class Backend(StrEnum):
    TORCH = "torch"
    TRITON = "triton"


_MODULES = {"sample": "sampling"}
"""Names of the modules of operations if they differ from the names of the functions."""


class KernelError(ValueError):
    """Raised if an operation cannot run with the implementation that its switch selects.

    The message names the switch, the value and the remedy.
    """


class KernelsMissingError(KernelError):
    """Raised if no fast kernels can run on a CUDA device. An engine reports this error in its termination message.

    reason: machine-readable cause.
    remedy: what the user can do.
    """

    reason = "GpuKernelsMissing"
    remedy = (
        "use a runtime image with triton, a C compiler and the headers of Python, or set MEGATRON_KERNELS=torch "
        "to run the slow reference implementations"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelConfig:
    """The selected implementation of each operation, "torch" or "triton". None means the default for the device."""

    add_rms_norm: Backend | None = None
    swiglu: Backend | None = None
    qk_norm_rope_append: Backend | None = None
    paged_decode: Backend | None = None
    paged_prefill: Backend | None = None
    sample: Backend | None = None
    moe_routing: Backend | None = None
    moe_experts: Backend | None = None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> KernelConfig:
        """Return the configuration that environment variables define.

        MEGATRON_KERNELS applies to all operations. MEGATRON_KERNEL_<OPERATION> has precedence for one operation.

        Raises:
            KernelError: a value is not a backend, or a variable does not name an operation.
        """
        operations = [field.name for field in fields(cls)]
        known = {_variable(name) for name in operations}
        unknown = sorted(name for name in environment if name.startswith("MEGATRON_KERNEL_") and name not in known)
        if unknown:
            raise KernelError(f"{unknown[0]} names no operation: choose among {', '.join(sorted(known))}")
        general = _backend("MEGATRON_KERNELS", environment.get("MEGATRON_KERNELS"))
        return cls(
            **{name: _backend(_variable(name), environment.get(_variable(name))) or general for name in operations}
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """The selected operations. backends: name of the implementation of each operation, for logs and reports."""

    add_rms_norm: AddRmsNorm
    swiglu: SwiGlu
    qk_norm_rope_append: QkNormRopeAppend
    paged_decode: PagedDecode
    paged_prefill: PagedPrefill
    sample: Sample
    moe_routing: MoeRouting
    moe_experts: MoeExperts
    backends: Mapping[str, Backend]


def select_kernels(config: KernelConfig, device: torch.device) -> Kernels:
    """Return the operations for tensors on `device`.

    Raises:
        KernelError: a backend is not installed, or does not run on the device.
        KernelsMissingError: Triton, the default on a CUDA device, cannot run. The torch references are many times
                             slower, and are used only if a switch names them.
    """
    chosen: dict[str, Backend] = {}
    functions: dict[str, Any] = {}
    for field in fields(config):
        name = field.name
        backend = getattr(config, name)
        if backend is None:
            backend = _default(device)
            missing = missing_for_triton() if backend is Backend.TRITON else None
            if missing is not None:
                raise KernelsMissingError(f"the Triton kernels of device {device} need {missing}")
        _check(name, backend, device)
        module = importlib.import_module(f"megatron_kernels.{_module(name, backend)}")
        chosen[name], functions[name] = backend, getattr(module, name)
    return Kernels(**functions, backends=chosen)


def missing_for_triton() -> str | None:
    """Return what this machine lacks to compile Triton kernels and their launchers.

    Return None if nothing is missing.
    """
    if importlib.util.find_spec("triton") is None:
        return "the package triton, which is not installed"
    if not any(shutil.which(name) for name in (os.environ.get("CC") or "gcc", "clang")):
        return "a C compiler, and there is neither gcc nor clang"
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return f"the header {sysconfig.get_path('include')}/Python.h, which does not exist"
    return None


def _default(device: torch.device) -> Backend:
    return Backend.TRITON if device.type == "cuda" else Backend.TORCH


def _check(name: str, backend: Backend, device: torch.device) -> None:
    if backend is Backend.TORCH:
        return
    if importlib.util.find_spec("triton") is None:
        raise KernelError(f"{name}={backend}: the package triton is not installed: install it, or use torch")
    if device.type != "cuda" and not importlib.import_module("triton").knobs.runtime.interpret:
        raise KernelError(f"{name}={backend}: runs on a CUDA device, not on {device.type}: use torch")


def _module(name: str, backend: Backend) -> str:
    own = _MODULES.get(name, name)
    return own if backend is Backend.TORCH else f"{own}_triton"


def _variable(name: str) -> str:
    return f"MEGATRON_KERNEL_{name.upper()}"


def _backend(variable: str, value: str | None) -> Backend | None:
    if not value or value == "auto":
        return None
    if value not in set(Backend):
        raise KernelError(f"{variable} is no backend: choose among auto, {', '.join(Backend)}")
    return Backend(value)
