"""The registry: a switch for each operation, clear errors, and lazy imports."""

from __future__ import annotations

import importlib
import subprocess
import sys
from dataclasses import fields
from types import ModuleType

import pytest
import torch

from megatron_kernels import paged_decode, paged_prefill
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
    flash = KernelConfig.from_environment({"MEGATRON_KERNELS": "flash-attention-3"})
    assert (flash.paged_decode, flash.swiglu) == (Backend.FLASH_ATTENTION_3, None)
    assert KernelConfig.from_environment({"MEGATRON_KERNELS": "auto"}) == KernelConfig()


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"MEGATRON_KERNELS": "cuda"}, "MEGATRON_KERNELS is no backend: choose among auto, torch, triton"),
        ({"MEGATRON_KERNEL_SWIGLU": "x"}, "MEGATRON_KERNEL_SWIGLU is no backend"),
        ({"MEGATRON_KERNEL_GELU": "torch"}, "MEGATRON_KERNEL_GELU names no operation"),
    ],
)
def test_an_invalid_environment_variable_is_rejected_by_name(environment, message):
    with pytest.raises(KernelError, match=message):
        KernelConfig.from_environment(environment)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (KernelConfig(sample=Backend.FLASH_ATTENTION_3), "sample=flash-attention-3: choose among torch, triton"),
        (KernelConfig(paged_decode=Backend.FLASH_ATTENTION_3), "the package flash_attn_interface is not installed"),
    ],
)
def test_an_unavailable_backend_is_rejected_by_name(config, message):
    with pytest.raises(KernelError, match=message):
        select_kernels(config, CPU)


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


@pytest.fixture
def adapter(monkeypatch):
    """Import a module of this package with a fake of the package that it adapts, and unload it afterwards."""

    def load(name: str, **stand_ins: dict[str, object]) -> ModuleType:
        for package, functions in stand_ins.items():
            module = ModuleType(package)
            vars(module).update(functions)
            monkeypatch.setitem(sys.modules, package.replace("__", "."), module)
        monkeypatch.setitem(sys.modules, f"megatron_kernels.{name}", ModuleType(name))
        del sys.modules[f"megatron_kernels.{name}"]
        return importlib.import_module(f"megatron_kernels.{name}")

    return load


def test_flash_attention_is_called_with_the_unchanged_pages(adapter, generator):
    seen = []

    def flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        *,
        cache_seqlens,
        page_table,
        softmax_scale,
        causal,
        cu_seqlens_q=None,
        window_size,
        **options,
    ):
        """Behave as FlashAttention-3 documents it, computed by the references."""
        seen.append((k_cache, v_cache, options))
        assert causal
        cache = torch.stack((k_cache, v_cache), dim=2).flatten(2)
        assert window_size[1] == (0 if window_size[0] >= 0 else -1)
        window = window_size[0] + 1 if window_size[0] >= 0 else None
        arguments = {"num_kv_heads": k_cache.shape[2], "scale": softmax_scale, "window": window}
        if cu_seqlens_q is None:
            return paged_decode.paged_decode(q[:, 0], cache, page_table, cache_seqlens, **arguments)[:, None]
        out = paged_prefill.paged_prefill(q, cache, page_table, cache_seqlens, cu_seqlens_q, **arguments)
        out[cu_seqlens_q[-1] :] = float("nan")
        return out

    flash_attention_3 = adapter(
        "flash_attention_3", flash_attn_interface={"flash_attn_with_kvcache": flash_attn_with_kvcache}
    )
    cache = torch.randn(4, 16, 2 * 2 * 64, generator=generator)
    q = torch.randn(5, 4, 64, generator=generator)
    table = torch.tensor([[2, 0], [3, 1]], dtype=torch.int32)
    lengths = torch.tensor([20, 3], dtype=torch.int32)
    starts = torch.tensor([0, 3, 4], dtype=torch.int32)
    decode_arguments = (q[:2], cache, table, lengths)
    prefill_arguments = (q, cache, table, lengths, starts)
    torch.testing.assert_close(
        flash_attention_3.paged_decode(*decode_arguments, num_kv_heads=2),
        paged_decode.paged_decode(*decode_arguments, num_kv_heads=2),
    )
    torch.testing.assert_close(
        flash_attention_3.paged_prefill(*prefill_arguments, num_kv_heads=2, window=2),
        paged_prefill.paged_prefill(*prefill_arguments, num_kv_heads=2, window=2),
    )
    storage = cache.untyped_storage().data_ptr()
    for keys, values, _ in seen:
        assert keys.untyped_storage().data_ptr() == values.untyped_storage().data_ptr() == storage
        assert keys.shape == values.shape == (4, 16, 2, 64)
    assert [options for _, _, options in seen] == [{}, {"max_seqlen_q": 5}]
