"""Weights are looked at before they are used, staged beside those in use, and swapped."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from megatron_runtime.backends.native.cpu.executor import CpuExecutor
from megatron_runtime.backends.native.engine import EngineCore
from megatron_runtime.backends.native.memory import MemoryShortError, require_memory
from megatron_runtime.backends.native.weight_store import WeightStore
from megatron_runtime.checkpoints.checkpoint import UnusableWeightsError
from megatron_runtime.checkpoints.source import resolve
from megatron_runtime.engine.engine_request import EngineRequest
from megatron_runtime.requests.config import InferenceConfig
from megatron_runtime.requests.sampling_params import IGNORE_EOS, SamplingParams

MakeTiny = Callable[..., tuple[Path, nn.Module]]
Edit = Callable[[dict[str, torch.Tensor]], None]


def edited(directory: Path, target: Path, edit: Edit) -> Path:
    """A copy of a model directory with other tensors."""
    target.mkdir()
    (target / "config.json").write_text((directory / "config.json").read_text())
    tensors = load_file(directory / "model.safetensors")
    edit(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / "model.safetensors")
    return target


def loaded(directory: Path) -> WeightStore:
    store = WeightStore(resolve(str(directory)), torch.float32)
    store.load()
    return store


def set_nan(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.1.mlp.down_proj.weight"][3, 4] = float("nan")


def cut_rows(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:40]


def other_type(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"].bfloat16()


def rename(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norms.weight"] = tensors.pop("model.norm.weight")


def leave_out(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.norm.weight"]


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (set_nan, ["model.layers.1.mlp.down_proj.weight", "not finite"]),
        (cut_rows, ["model.norm.weight", "(40,)", "(48,)"]),
        (other_type, ["model.norm.weight", "bfloat16", "float32"]),
        (rename, ["model.norms.weight"]),
        (leave_out, ["model.norm.weight"]),
    ],
)
def test_unsound_weights_are_not_staged(make_tiny: MakeTiny, tmp_path: Path, edit: Edit, words: list[str]) -> None:
    directory, _ = make_tiny()
    store = loaded(directory)
    in_use = store.weights
    with pytest.raises(ValueError, match=re.escape(words[0])) as rejected:
        store.stage(str(edited(directory, tmp_path / "new", edit)))
    for word in words:
        assert word in str(rejected.value)
    with pytest.raises(RuntimeError, match="without staged weights"):
        store.swap()
    assert store.weights is in_use


def test_unsound_weights_are_not_loaded(make_tiny: MakeTiny, tmp_path: Path) -> None:
    directory, _ = make_tiny()
    store = WeightStore(resolve(str(edited(directory, tmp_path / "new", set_nan))), torch.float32)
    with pytest.raises(UnusableWeightsError, match="not finite"):
        store.load()
    assert store.weights is None


def test_another_model_is_rejected_with_both_numbers(make_tiny: MakeTiny) -> None:
    store = loaded(make_tiny()[0])
    with pytest.raises(UnusableWeightsError, match="intermediate_size 80, this engine runs one with 96"):
        store.stage(str(make_tiny(intermediate_size=80)[0]))


def test_weights_that_changed_while_released_are_rejected(make_tiny: MakeTiny, tmp_path: Path) -> None:
    directory, _ = make_tiny()
    copy = edited(directory, tmp_path / "copy", lambda tensors: None)
    store = loaded(copy)
    digest = store.digest
    store.release()
    store.load()
    assert store.digest == digest
    store.release()
    tensors = load_file(copy / "model.safetensors")
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, copy / "model.safetensors")
    with pytest.raises(UnusableWeightsError, match="digest"):
        store.load()
    assert store.weights is None


def test_an_out_of_memory_error_names_both_amounts(make_tiny: MakeTiny) -> None:
    def short(needed: int, *, what: str) -> None:
        require_memory(needed, what=what, available=needed - 1)

    store = WeightStore(resolve(str(make_tiny()[0])), torch.float32, require_memory=short)
    with pytest.raises(MemoryShortError, match=r"loading the weights needs \d+ MiB, \d+ MiB are available"):
        store.load()


def test_the_amount_asked_for_is_that_of_the_weights(make_tiny: MakeTiny) -> None:
    for tied in (False, True):
        directory, model = make_tiny(tie_word_embeddings=tied)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        assert WeightStore(resolve(str(directory)), torch.float32).num_bytes == 4 * parameters


def greedy(executor: CpuExecutor, prompt: list[int], length: int, **config: object) -> list[int]:
    engine = EngineCore(executor, InferenceConfig(max_sequence_length=512, **config))
    params = SamplingParams(temperature=0, num_tokens_to_generate=length, termination_id=IGNORE_EOS)
    engine.add_request(EngineRequest(0, np.array(prompt, np.int32), np.array([], np.int32), params))
    return [token for _ in range(length) for output in engine.step() for token in output.new_tokens]


def test_an_update_in_flight_continues_on_the_new_weights(make_tiny: MakeTiny, tmp_path: Path) -> None:
    directory, _ = make_tiny()

    def scale(tensors: dict[str, torch.Tensor]) -> None:
        for name in tensors:
            if "self_attn" in name:
                tensors[name] *= -1.3

    new = edited(directory, tmp_path / "new", scale)
    prompt = list(range(3, 60))
    old, other, executor = (_executor(path) for path in (directory, new, directory))
    config = InferenceConfig(enable_prefix_caching=True, block_size_tokens=16, max_sequence_length=512)
    engine = EngineCore(executor, config)
    params = SamplingParams(temperature=0, num_tokens_to_generate=12, termination_id=IGNORE_EOS)
    engine.add_request(EngineRequest(0, np.array(prompt, np.int32), np.array([], np.int32), params))

    def steps(count: int) -> list[int]:
        return [token for _ in range(count) for output in engine.step() for token in output.new_tokens]

    begun = steps(5)
    executor.stage_weights(str(new))
    begun += steps(1)
    assert begun == greedy(old, prompt, 6)
    engine.swap_weights(2)
    rest = steps(6)
    assert rest == greedy(other, prompt + begun, 6)
    assert rest != greedy(old, prompt + begun, 6)


def _executor(directory: Path) -> CpuExecutor:
    executor = CpuExecutor(resolve(str(directory)), dtype="float32", kv_cache_memory=4 << 20, threads=1)
    executor.load()
    return executor


def test_config_of_an_update_is_compared_too(make_tiny: MakeTiny, tmp_path: Path) -> None:
    directory, _ = make_tiny()
    store = loaded(directory)
    other = edited(directory, tmp_path / "new", lambda tensors: None)
    config = json.loads((other / "config.json").read_text())
    config["rms_norm_eps"] = 0.5
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnusableWeightsError, match=r"rms_norm_eps 0\.5"):
        store.stage(str(other))
