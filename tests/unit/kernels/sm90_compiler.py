"""Compiles every kernel for compute capability 9.0 (H100, H200) with Triton's own compiler, which needs no GPU.

Run it as a program, without TRITON_INTERPRET. It calls the kernels' public functions on tensors in main memory and
replaces every launch by a compilation of the same kernel. It prints one JSON object: kernel name -> list of
{shared: bytes of shared memory, registers: per thread, local: bytes of local memory per thread (spills)}.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

TARGET = GPUTarget("cuda", 90, 32)
BACKEND = make_backend(TARGET)
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


class Compilations:
    def __init__(self) -> None:
        self.usage: dict[str, list[dict[str, int]]] = {}
        self._seen: set[str] = set()

    def launch(self, function: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        """Replaces JITFunction.run."""
        del grid, warmup
        bind = create_function_from_signature(function.signature, function.params, BACKEND)
        bound, specialization, options = bind(*args, **{**kwargs, "debug": False})
        options, signature, constants, attributes = function._pack_args(BACKEND, kwargs, bound, specialization, options)
        source = ASTSource(function, signature, constants, attributes)
        if source.hash() in self._seen:
            return
        self._seen.add(source.hash())
        compiled = triton.compile(source, target=TARGET, options=options.__dict__)
        resources = _resources(compiled.asm["cubin"])
        self.usage.setdefault(function.__name__, []).append({"shared": compiled.metadata.shared, **resources})


def _resources(cubin: bytes) -> dict[str, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([CUOBJDUMP, "-res-usage", file.name], check=True, capture_output=True, text=True).stdout
    registers, local = re.findall(r"REG:(\d+)", text), re.findall(r"STACK:(\d+)", text)
    return {"registers": max(map(int, registers)), "local": max(map(int, local))}


def call_every_kernel() -> None:
    """Compile for the shapes of an 8B Llama in bfloat16 (32 heads on 8 key-value heads of 128, 4096 hidden, 128256
    tokens), the experts of Qwen3 30B and the heads of Gemma 3 1B."""
    from megatron_kernels import (
        add_rms_norm_triton,
        moe_experts_triton,
        moe_routing_triton,
        paged_decode_triton,
        paged_prefill_triton,
        qk_norm_rope_append_triton,
        sampling_triton,
        swiglu_triton,
    )
    from megatron_kernels.tuning import decode_tuning

    bf16, int32 = torch.bfloat16, torch.int32
    norm = torch.zeros(128, dtype=bf16)
    expert_gate_up, expert_down = torch.zeros(2, 2 * 768, 4096, dtype=bf16), torch.zeros(2, 4096, 768, dtype=bf16)
    # 1, an odd number and a multiple of 16: by default Triton specialises a kernel for each of them.
    for count in (1, 3, 16):
        hidden = torch.zeros(count, 4096, dtype=bf16)
        add_rms_norm_triton.add_rms_norm(hidden, hidden.clone(), hidden[0], epsilon=1e-5)
        add_rms_norm_triton.add_rms_norm(None, hidden, hidden[0], epsilon=1e-5)
        for activation in ("silu", "gelu_tanh"):
            swiglu_triton.swiglu(torch.zeros(count, 2 * 14336, dtype=bf16), activation=activation)

        qkv = torch.zeros(count, 48 * 128, dtype=bf16)
        q = qkv.unflatten(1, (48, 128))[:, :32]
        cache = torch.zeros(2, 16, 2 * 8 * 128, dtype=bf16)
        table, lengths = torch.zeros(count, 2 * count + 1, dtype=int32), torch.ones(count, dtype=int32)
        for batch, window in ((1, None), (1, 1024), (256, None)):
            tuning = decode_tuning(batch=batch, num_kv_heads=8, head_dim=128, max_tokens=8192, num_sms=132)
            paged_decode_triton.paged_decode(q, cache, table, lengths, num_kv_heads=8, window=window, tuning=tuning)
        starts = torch.arange(count + 1, dtype=int32)
        for window in (None, 1024):
            paged_prefill_triton.paged_prefill(q, cache, table, lengths, starts, num_kv_heads=8, window=window)
        wide = {"num_kv_heads": 1, "window": 512}
        wide_cache, wide_q = torch.zeros(2, 16, 2 * 256, dtype=bf16), torch.zeros(count, 4, 256, dtype=bf16)
        tuning = decode_tuning(batch=1, num_kv_heads=1, head_dim=256, max_tokens=8192, num_sms=132)
        paged_decode_triton.paged_decode(wide_q, wide_cache, table, lengths, tuning=tuning, **wide)
        paged_prefill_triton.paged_prefill(wide_q, wide_cache, table, lengths, starts, **wide)
        angles, slots = torch.zeros(count, 64), torch.zeros(count, dtype=torch.int64)
        joint = {"q_norm_C": norm.repeat(32), "k_norm_C": norm.repeat(8), "mean_squares_T2": torch.zeros(count, 2)}
        for norms in ({}, {"q_norm_C": norm, "k_norm_C": norm}, joint):
            qk_norm_rope_append_triton.qk_norm_rope_append(
                qkv, angles, angles, cache, slots, num_heads=32, num_kv_heads=8, **norms
            )

        floats, integers = torch.zeros(count), torch.zeros(count, dtype=torch.int64)
        columns = {
            "temperature_N": floats,
            "top_k_N": lengths,
            "top_p_N": floats,
            "min_p_N": floats,
            "seeds_N": integers,
            "positions_N": integers,
        }
        sampling_triton.sample(torch.zeros(count, 128256, dtype=bf16), **columns)
        changed = torch.zeros(count, 128256)
        sampling_triton.sample(changed, **columns)
        sampling_triton.sample(changed, **columns, processed_NV=changed)
        many = torch.zeros(80 + count, 128, dtype=bf16)
        moe_routing_triton.moe_routing(many, top_k=8, alignment=16)
        moe_routing_triton.moe_routing(many[: 17 * count], top_k=8, alignment=16)
        for alignment in (16, 64):
            routing = moe_routing_triton.moe_routing(torch.zeros(count, 128, dtype=bf16), top_k=8, alignment=alignment)
            moe_experts_triton.moe_experts(
                hidden, expert_gate_up, expert_down, routing, first=count, alignment=alignment
            )


if __name__ == "__main__":
    compilations = Compilations()
    JITFunction.run = lambda function, *args, **kwargs: compilations.launch(function, *args, **kwargs)  # type: ignore[method-assign]
    call_every_kernel()
    print(json.dumps(compilations.usage))
