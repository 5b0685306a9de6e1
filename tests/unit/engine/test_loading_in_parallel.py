"""What a load imports and gives, on one thread and on several."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron_runtime.backends.native.cpu.executor import CpuExecutor
from megatron_runtime.backends.native.weight_store import WeightStore
from megatron_runtime.checkpoints.convert import convert
from megatron_runtime.checkpoints.source import resolve
from megatron_runtime.models.layers.cpu import PackedLinear, select_numbers
from megatron_runtime.tokenization import load_tokenizer

MODEL = "builtin:smollm2-135m"


def loaded(dtype: str) -> WeightStore:
    numbers = select_numbers(dtype)
    store = WeightStore(resolve(MODEL), torch.float32, numbers.linears)
    store.load()
    return store


def test_weights_are_the_same_on_every_number_of_threads() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        several = loaded("int4")
        torch.set_num_threads(1)
        one = loaded("int4")
    finally:
        torch.set_num_threads(before)
    assert several.digest == one.digest
    assert several.weights is not None
    assert one.weights is not None
    pairs = [
        (getattr(ours, name), getattr(theirs, name))
        for ours, theirs in zip(several.weights.layers, one.weights.layers, strict=True)
        for name in ("qkv_QD", "output_DH")
    ]
    pairs.append((several.weights.head_WD, one.weights.head_WD))
    for ours, theirs in pairs:
        assert isinstance(ours, PackedLinear)
        assert isinstance(theirs, PackedLinear)
        assert all(torch.equal(a.data, b.data) for a, b in zip(ours.matrices, theirs.matrices, strict=True))


def test_a_load_imports_nothing_that_it_does_not_need() -> None:
    program = (
        "import sys, megatron_runtime.backends.native.build, "
        "megatron_runtime.checkpoints.gguf, megatron_runtime.models.cpp_decoder; "
        "print(sorted({'jinja2', 'pydantic', 'zmq', 'tokenizers', 'rich', 'click'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_packed_model_gives_the_tokens_of_its_original(generate: Callable[..., Any], tmp_path: Path) -> None:
    """Quantized matrices keep their blocks, and `auto` the stored format."""
    convert(MODEL, tmp_path / "packed", to="packed", dtype="int4")
    prompts = [load_tokenizer(MODEL).encode(text) for text in ("The capital of France is", "1, 2, 3, 5, 8,")]
    answers = []
    for model, dtype in ((MODEL, "int4"), (str(tmp_path / "packed"), "auto")):
        executor = CpuExecutor(resolve(model), dtype=dtype, kv_cache_memory=64 << 20)
        executor.load()
        answers.append(generate(executor, prompts, 32, temperature=0.0))
    assert answers[0] == answers[1]
