"""The registry: a switch for each operation, clear errors, and lazy imports."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields

import pytest
import torch

from megatron_kernels.registry import Backend, KernelConfig, KernelError, Kernels, KernelsMissingError, select_kernels

CPU = torch.device("cpu")
OPERATIONS = [field.name for field in fields(KernelConfig)]


def test_on_a_cpu_every_operation_uses_torch():
    kernels = select_kernels(KernelConfig(), CPU)
    assert set(kernels.backends.values()) == {Backend.TORCH}
    assert {field.name for field in fields(Kernels)} == {*OPERATIONS, "backends"}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_each_operation_has_its_own_switch(operation):
    kernels = select_kernels(KernelConfig(**{operation: Backend.TRITON}), CPU)
    assert kernels.backends == {name: Backend.TRITON if name == operation else Backend.TORCH for name in OPERATIONS}
    assert getattr(kernels, operation).__module__.endswith("_triton")


def test_a_chosen_kernel_works():
    kernels = select_kernels(KernelConfig(swiglu=Backend.TRITON), CPU)
    torch.testing.assert_close(kernels.swiglu(torch.tensor([[0.0, 5.0]])), torch.tensor([[0.0]]))


def test_the_environment_sets_all_or_one():
    config = KernelConfig.from_environment({"MEGATRON_KERNELS": "torch", "MEGATRON_KERNEL_SWIGLU": "triton"})
    assert config.swiglu is Backend.TRITON
    assert config.sample is Backend.TORCH
    assert KernelConfig.from_environment({"MEGATRON_KERNELS": "auto"}) == KernelConfig()


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"MEGATRON_KERNELS": "cuda"}, "MEGATRON_KERNELS is no backend: choose among auto, torch, triton$"),
        ({"MEGATRON_KERNEL_SWIGLU": "x"}, "MEGATRON_KERNEL_SWIGLU is no backend"),
        ({"MEGATRON_KERNEL_GELU": "torch"}, "MEGATRON_KERNEL_GELU names no operation"),
    ],
)
def test_an_invalid_environment_variable_is_rejected_by_name(environment, message):
    with pytest.raises(KernelError, match=message):
        KernelConfig.from_environment(environment)


def test_a_backend_that_is_not_installed_is_rejected_by_name(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(KernelError, match="sample=triton: the package triton is not installed: install it"):
        select_kernels(KernelConfig(sample=Backend.TRITON), CPU)


def _no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)


def _no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)


def _no_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr("sysconfig.get_path", lambda name: "/nowhere")


@pytest.mark.parametrize(
    ("remove", "missing"),
    [(_no_triton, "the package triton"), (_no_compiler, "a C compiler"), (_no_headers, "/nowhere/Python.h")],
)
def test_a_gpu_never_falls_back_to_the_references_by_itself(monkeypatch, remove, missing):
    remove(monkeypatch)
    device = torch.device("cuda", 0)
    with pytest.raises(KernelsMissingError, match=missing) as caught:
        select_kernels(KernelConfig(), device)
    assert caught.value.reason == "GpuKernelsMissing"
    assert "MEGATRON_KERNELS=torch" in caught.value.remedy
    chosen = select_kernels(KernelConfig(**dict.fromkeys(OPERATIONS, Backend.TORCH)), device)
    assert set(chosen.backends.values()) == {Backend.TORCH}, "a user may choose the references"
    assert set(select_kernels(KernelConfig(), CPU).backends.values()) == {Backend.TORCH}


def test_references_need_neither_triton_nor_a_gpu():
    program = "import sys, torch\n"
    program += "from megatron_kernels.registry import *\n"
    program += "select_kernels(KernelConfig.from_environment({}), torch.device('cpu'))\n"
    program += "assert 'triton' not in sys.modules and not torch.cuda.is_initialized()\n"
    program += "try: select_kernels(KernelConfig(sample=Backend.TRITON), torch.device('cpu'))\n"
    program += "except KernelError as error: print(error)\n"
    environment = {"PATH": "/usr/bin:/bin"}
    run = subprocess.run([sys.executable, "-c", program], env=environment, check=True, capture_output=True, text=True)
    assert run.stdout == "sample=triton: runs on a CUDA device, not on cpu: use torch\n"
