"""What the executor promises before and around its steps."""

from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from small_engine import CPU, GEMMA
from torch import nn

from bench.random_model import RandomCheckpoint
from megatron_runtime.backends.native.cpu.executor import CpuExecutor
from megatron_runtime.backends.text import ModelText
from megatron_runtime.checkpoints.source import ModelInMemory, ModelSourceError, resolve
from megatron_runtime.models.config import UnsupportedModelError
from megatron_runtime.models.decoder import DecoderModel

MakeTiny = Callable[..., tuple[Path, nn.Module]]
PAGE_BYTES = 16 * 3 * 2 * 2 * 8 * 4


def test_sizes_are_known_before_load(make_tiny: MakeTiny) -> None:
    directory, _ = make_tiny()
    executor = CpuExecutor(resolve(str(directory)), dtype="float32", kv_cache_memory=10 * PAGE_BYTES + 5)
    assert (executor.num_pages, executor.page_size) == (10, 16)
    assert (executor.vocab_size, executor.eos_ids, executor.max_sequence_length) == (320, (2,), 512)


def test_bfloat16_pages_take_half_the_memory(make_tiny: MakeTiny) -> None:
    directory, _ = make_tiny()
    assert CpuExecutor(resolve(str(directory)), dtype="bfloat16", kv_cache_memory=10 * PAGE_BYTES).num_pages == 20


def test_too_little_memory_names_how_much_is_needed(make_tiny: MakeTiny) -> None:
    directory, _ = make_tiny()
    with pytest.raises(ValueError, match=f"kv_cache_memory={PAGE_BYTES} .* at least {2 * PAGE_BYTES}"):
        CpuExecutor(resolve(str(directory)), dtype="float32", kv_cache_memory=PAGE_BYTES)


@pytest.mark.parametrize("length", [1, 513])
def test_a_length_the_model_was_not_made_for_is_rejected(make_tiny: MakeTiny, length: int) -> None:
    directory, _ = make_tiny()
    with pytest.raises(ValueError, match=f"max_sequence_length={length}.* 512 "):
        CpuExecutor(resolve(str(directory)), kv_cache_memory=1 << 20, max_sequence_length=length)


def test_an_unknown_dtype_is_rejected_by_name(make_tiny: MakeTiny) -> None:
    directory, _ = make_tiny()
    with pytest.raises(ValueError, match=r"dtype='int3'.*float32"):
        CpuExecutor(resolve(str(directory)), dtype="int3", kv_cache_memory=1 << 20)


def test_a_model_that_is_not_there_or_not_a_llama_is_rejected(make_tiny: MakeTiny, tmp_path: Path) -> None:
    with pytest.raises(ModelSourceError, match="does not exist"):
        resolve(str(tmp_path / "nothing"))
    directory, _ = make_tiny()
    config = directory / "config.json"
    config.write_text(config.read_text().replace("LlamaForCausalLM", "MambaForCausalLM"))
    with pytest.raises(UnsupportedModelError, match="MambaForCausalLM"):
        CpuExecutor(resolve(str(directory)), kv_cache_memory=1 << 20)


def test_load_and_release_may_be_repeated(make_tiny: MakeTiny) -> None:
    directory, _ = make_tiny()
    executor = CpuExecutor(resolve(str(directory)), dtype="float32", kv_cache_memory=1 << 20)
    executor.release_weights()
    executor.release_kv(None)
    executor.load()
    executor.load()
    executor.release_weights()
    executor.release_kv(None)
    executor.release_weights()
    executor.release_kv(None)


def test_a_model_that_the_operators_cannot_run_is_rejected_at_every_load() -> None:
    source = ModelInMemory(RandomCheckpoint(GEMMA, torch.float32, CPU), name="random weights")

    def reject(model: DecoderModel) -> NoReturn:
        raise ValueError("no sliding window")

    text = ModelText(lambda: pytest.fail("no text"))
    executor = CpuExecutor(source, text, kv_cache_memory=1 << 20, make_forward=reject)
    for _ in range(2):
        with pytest.raises(ValueError, match="no sliding window"):
            executor.load()
        assert not executor.has_weights
