"""GGUF files of every family, written as llama.cpp's converter writes them, read back as transformers stores them."""

import math
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import pytest
import torch
from random_checkpoint import FAMILY_EXAMPLES, GGUF_METADATA, GGUF_PAIRED_ROWS, all_tensors
from torch import nn

from megatron_runtime.checkpoints.gguf import GGUFCheckpoint
from megatron_runtime.checkpoints.in_memory import model_in_memory
from megatron_runtime.checkpoints.model_files import ModelFileError
from megatron_runtime.checkpoints.source import ModelSourceError, resolve
from megatron_runtime.models.config import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    SlidingWindow,
    UnsupportedModelError,
    YarnScaling,
)
from megatron_runtime.models.families import FAMILIES, config_to_hf
from megatron_runtime.models.layers.paged_attention import inverse_frequencies
from megatron_runtime.models.weights import require_fitting

CONFIGS = {
    # The number of float32 that the file has; transformers wants a multiple of the heads, for Phi-3 their whole size.
    family: replace(config, rms_norm_eps=2**-20, hidden_size=48 if family == "phi3" else 24)
    for family, config in FAMILY_EXAMPLES.items()
    if FAMILIES[family].gguf_architecture is not None
}


def make(family: str, **traits: Any) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = config_to_hf(replace(CONFIGS[family], **traits))
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    return model


def as_in_file(family: str, model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in the layout of the file, by transformers names; the experts of a layer are one tensor."""
    config, stacks = CONFIGS[family], dict[str, list[torch.Tensor]]()
    held = all_tensors(model_in_memory(model).checkpoint).items()
    for name, tensor in held:
        if ".experts." in name:
            before, _, after = name.partition(".experts.")
            stacks.setdefault(f"{before}.experts.{after.partition('.')[2]}", []).append(tensor)
        elif name.endswith("norm.weight"):
            yield name, tensor + config.norm_weight_offset
        elif family in GGUF_PAIRED_ROWS and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config.num_heads if "q_proj" in name else config.num_kv_heads
            paired = tensor.view(heads, 2, -1, tensor.shape[1]).transpose(1, 2)
            yield name, paired.reshape(tensor.shape)
        else:
            yield name, tensor
    for name, experts in stacks.items():
        if family == "mixtral":
            name = name.removeprefix("model.").replace("block_sparse_moe", "feed_forward")
        yield name, torch.stack(experts)


def write(
    family: str,
    model: nn.Module,
    path: Path,
    *,
    factors: dict[str, torch.Tensor] | None = None,
    tensors_per_file: int = 0,
    keys: dict[str, float | bool] | None = None,
    **more: Any,
) -> None:
    config, architecture = CONFIGS[family], FAMILIES[family].gguf_architecture
    assert architecture is not None
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, config.num_layers)
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=tensors_per_file)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = model.config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if config.moe is not None:
        writer.add_expert_count(config.moe.num_experts)
        writer.add_expert_used_count(config.moe.experts_per_token)
        writer.add_expert_feed_forward_length(config.moe.intermediate_size)
    for key, value in {**GGUF_METADATA.get(family, {}), **more}.items():
        getattr(writer, key)(value)
    for key, value in (keys or {}).items():
        (writer.add_bool if isinstance(value, bool) else writer.add_float32)(key, value)
    for name, tensor in as_in_file(family, model):
        own = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert own is not None, name
        writer.add_tensor(own, tensor.contiguous().numpy())
    for name, tensor in (factors or {}).items():
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("family", CONFIGS)
def test_a_file_reads_back_as_the_model_of_transformers(family: str, tmp_path: Path) -> None:
    model = make(family)
    expected = model_in_memory(model).checkpoint
    write(family, model, tmp_path / "m.gguf")
    found = GGUFCheckpoint(tmp_path / "m.gguf")
    require_fitting(found)
    ends = {"eos_token_ids": expected.config.eos_token_ids, "bos_token_id": expected.config.bos_token_id}
    assert replace(found.config, **ends) == expected.config
    assert found.kinds == expected.kinds
    for name, tensor in all_tensors(expected).items():
        torch.testing.assert_close(found.read(name), tensor, rtol=0, atol=3e-7)
        if tensor.dim() == 2:
            part = (slice(2, len(tensor)), slice(1, 9))
            assert torch.equal(found.read(name, part), found.read(name)[part]), name


def test_rope_scaling_of_llama_3_is_derived_from_its_factors(tmp_path: Path) -> None:
    model = make("llama")
    model.config.rope_parameters["rope_theta"] = 500000.0
    # What Llama 3.2 asks for, for pairs of one head.
    scaling = Llama3Scaling(
        factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
    )
    plain, scaled = (inverse_frequencies(head_dim=8, theta=500000.0, scaling=one) for one in (None, scaling))
    write("llama", model, tmp_path / "m.gguf", factors={"rope_freqs.weight": plain / scaled})
    assert GGUFCheckpoint(tmp_path / "m.gguf").config.rope_scaling == scaling
    other = {"rope_freqs.weight": torch.tensor([1.0, 3.0, 2.0, 1.0])}
    write("llama", model, tmp_path / "other.gguf", factors=other)
    with pytest.raises(UnsupportedModelError, match=r"rope_freqs\.weight.*Llama 3"):
        GGUFCheckpoint(tmp_path / "other.gguf")


def test_linear_rope_scaling_is_read_and_other_kinds_are_rejected(tmp_path: Path) -> None:
    model = make("gemma3_text")
    linear = {"add_rope_scaling_type": gguf.RopeScalingType.LINEAR, "add_rope_scaling_factor": 8.0}
    write("gemma3_text", model, tmp_path / "linear.gguf", **linear)
    assert GGUFCheckpoint(tmp_path / "linear.gguf").config.rope_scaling == LinearScaling(factor=8.0)
    for name, keys in {"old": {"qwen2.rope.scale_linear": 8.0}, "bare": {"qwen2.rope.scaling.factor": 8.0}}.items():
        write("qwen2", make("qwen2"), tmp_path / f"{name}.gguf", keys=keys)
        assert GGUFCheckpoint(tmp_path / f"{name}.gguf").config.rope_scaling == LinearScaling(factor=8.0)
    other = SimpleNamespace(value="dynamic")
    write("gemma3_text", model, tmp_path / "other.gguf", add_rope_scaling_type=other)
    with pytest.raises(UnsupportedModelError, match=r"'dynamic'.*'linear'"):
        GGUFCheckpoint(tmp_path / "other.gguf")


LONG_ROPE = LongRopeScaling(
    short_factor=(1.0, 1.25, 1.5, 2.0),
    long_factor=(1.0, 2.0, 4.0, 8.0),
    original_max_position_embeddings=32,
    attention_factor=math.sqrt(1 + math.log(256 / 32) / math.log(32)),
)
LONG_ROPE_TENSORS = {
    "rope_factors_long.weight": torch.tensor(LONG_ROPE.long_factor),
    "rope_factors_short.weight": torch.tensor(LONG_ROPE.short_factor),
}


def test_a_file_with_longrope_reads_as_the_model_of_transformers(tmp_path: Path) -> None:
    """As llama.cpp's converter writes Phi-3: the tensors, and the original length without the kind of scaling."""
    model = make("phi3", rope_scaling=LONG_ROPE)
    write("phi3", model, tmp_path / "m.gguf", factors=LONG_ROPE_TENSORS, add_rope_scaling_orig_ctx_len=32)
    found, expected = GGUFCheckpoint(tmp_path / "m.gguf"), model_in_memory(model).checkpoint
    require_fitting(found)
    assert found.config.rope_scaling == expected.config.rope_scaling == LONG_ROPE
    assert found.config.short_length == 32
    assert found.kinds == expected.kinds


def test_the_attention_factor_of_longrope_is_read_if_the_file_has_it(tmp_path: Path) -> None:
    more = {"add_rope_scaling_orig_ctx_len": 32, "add_rope_scaling_attn_factors": 1.25}
    write("phi3", make("phi3"), tmp_path / "m.gguf", factors=LONG_ROPE_TENSORS, **more)
    assert GGUFCheckpoint(tmp_path / "m.gguf").config.rope_scaling == replace(LONG_ROPE, attention_factor=1.25)


def test_an_incomplete_longrope_is_rejected_by_name(tmp_path: Path) -> None:
    model, length = make("phi3"), {"add_rope_scaling_orig_ctx_len": 32}
    write("phi3", model, tmp_path / "no-length.gguf", factors=LONG_ROPE_TENSORS)
    with pytest.raises(UnsupportedModelError, match=r"no field 'rope\.scaling\.original_context_length'.*convert"):
        GGUFCheckpoint(tmp_path / "no-length.gguf")
    (name, short), _ = sorted(LONG_ROPE_TENSORS.items(), reverse=True)
    write("phi3", model, tmp_path / "half.gguf", factors={name: short}, **length)
    with pytest.raises(UnsupportedModelError, match=r"no tensor 'rope_factors_long\.weight': convert"):
        GGUFCheckpoint(tmp_path / "half.gguf")
    write("phi3", model, tmp_path / "none.gguf", add_rope_scaling_type=gguf.RopeScalingType.LONGROPE, **length)
    with pytest.raises(UnsupportedModelError, match=r"no tensor 'rope_factors_short\.weight': convert"):
        GGUFCheckpoint(tmp_path / "none.gguf")
    write("phi3", model, tmp_path / "short.gguf", factors={**LONG_ROPE_TENSORS, name: short[:3]}, **length)
    with pytest.raises(UnsupportedModelError, match=r"rope_factors_short\.weight.*want one value for each of 4 pairs"):
        GGUFCheckpoint(tmp_path / "short.gguf")


def test_windows_are_read_and_zero_is_none(tmp_path: Path) -> None:
    model = make("phi3")
    for window in (0, 7):
        write("phi3", model, tmp_path / f"{window}.gguf", add_sliding_window=window)
    assert GGUFCheckpoint(tmp_path / "0.gguf").config.sliding is None
    assert GGUFCheckpoint(tmp_path / "7.gguf").config.sliding == SlidingWindow(window=7, is_local=(True, True, True))


def test_an_olmo_3_may_have_a_period_of_layers_and_the_whole_factor_of_yarn(tmp_path: Path) -> None:
    """Its converter writes the whole attention factor of YaRN, or none."""
    model = make("olmo3")
    more = {
        "add_sliding_window_pattern": 3,
        "add_rope_scaling_type": gguf.RopeScalingType.YARN,
        "add_rope_scaling_factor": 8.0,
        "add_rope_scaling_orig_ctx_len": 32,
    }
    for name, factor in (("own", {"add_rope_scaling_attn_factors": 1.25}), ("computed", {})):
        write("olmo3", model, tmp_path / f"{name}.gguf", **more, **factor)
    own, computed = (GGUFCheckpoint(tmp_path / f"{name}.gguf").config for name in ("own", "computed"))
    assert own.sliding == SlidingWindow(window=5, is_local=(True, True, False), rope_theta=10_000.0)
    yarn = YarnScaling(factor=8.0, original_max_position_embeddings=32, attention_factor=1.25)
    assert own.rope_scaling == yarn
    assert computed.rope_scaling == replace(yarn, attention_factor=0.1 * math.log(8.0) + 1.0)


def test_yarn_is_read_with_the_magnitude_that_llama_cpp_computes(tmp_path: Path) -> None:
    yarn = {
        "add_rope_scaling_type": gguf.RopeScalingType.YARN,
        "add_rope_scaling_factor": 4.0,
        "add_rope_scaling_orig_ctx_len": 128,
    }
    write("qwen2", make("qwen2"), tmp_path / "yarn.gguf", **yarn)
    config = GGUFCheckpoint(tmp_path / "yarn.gguf").config
    assert config.rope_scaling == YarnScaling(
        factor=4.0, original_max_position_embeddings=128, attention_factor=0.1 * math.log(4.0) + 1.0
    )
    assert config.max_position_embeddings == 512


def test_a_model_that_attends_to_later_tokens_is_rejected(tmp_path: Path) -> None:
    write("qwen2", make("qwen2"), tmp_path / "m.gguf", keys={"qwen2.attention.causal": False})
    with pytest.raises(UnsupportedModelError, match=r"attention\.causal False"):
        GGUFCheckpoint(tmp_path / "m.gguf")


def test_a_token_id_of_minus_one_means_no_token(tmp_path: Path) -> None:
    write("qwen2", make("qwen2"), tmp_path / "m.gguf", add_bos_token_id=0xFFFFFFFF, add_eos_token_id=0xFFFFFFFF)
    config = GGUFCheckpoint(tmp_path / "m.gguf").config
    assert (config.bos_token_id, config.eos_token_ids) == (None, ())


@pytest.fixture(scope="module")
def in_parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in several files, and in one file in another directory."""
    directory, model = tmp_path_factory.mktemp("gguf"), make("qwen2")
    (directory / "parts").mkdir()
    (directory / "whole").mkdir()
    write("qwen2", model, directory / "parts/m.gguf", tensors_per_file=9)
    write("qwen2", model, directory / "whole/m.gguf")
    return directory


def test_a_model_in_several_files_is_read_from_any_of_them_or_their_directory(in_parts: Path) -> None:
    files = sorted((in_parts / "parts").iterdir())
    assert len(files) > 2
    expected = GGUFCheckpoint(in_parts / "whole/m.gguf")
    for reference in (in_parts / "parts", files[0], files[-1]):
        source = resolve(str(reference))
        assert source.path == files[0]
        found = GGUFCheckpoint(source.path)
        assert found.config == expected.config
        assert found.kinds == expected.kinds
        for name in expected.kinds:
            assert torch.equal(found.read(name), expected.read(name)), name


def test_a_missing_part_is_named(in_parts: Path, tmp_path: Path) -> None:
    files = sorted((in_parts / "parts").iterdir())
    for file in files[:-1]:
        shutil.copy(file, tmp_path)
    with pytest.raises(ModelFileError, match=rf"{files[-1].name} is missing: the model has {len(files)} files"):
        GGUFCheckpoint(tmp_path / files[0].name)


def test_a_renamed_part_is_no_model(in_parts: Path, tmp_path: Path) -> None:
    first = sorted((in_parts / "parts").iterdir())[0]
    shutil.copy(first, tmp_path / "model.gguf")
    with pytest.raises(ModelFileError, match=r"one of \d files.*NAME-00001-of-00002\.gguf"):
        GGUFCheckpoint(tmp_path / "model.gguf")


def test_two_models_in_a_directory_are_not_guessed(in_parts: Path, tmp_path: Path) -> None:
    for file in (*(in_parts / "parts").iterdir(), in_parts / "whole/m.gguf"):
        shutil.copy(file, tmp_path)
    with pytest.raises(ModelSourceError, match=r"\.gguf files of 2 models"):
        resolve(str(tmp_path))


def test_a_name_that_counts_no_files_is_that_of_one_file(in_parts: Path, tmp_path: Path) -> None:
    shutil.copy(in_parts / "whole/m.gguf", tmp_path / "m-00001-of-00000.gguf")
    assert resolve(str(tmp_path)).path == tmp_path / "m-00001-of-00000.gguf"
    assert GGUFCheckpoint(tmp_path / "m-00001-of-00000.gguf").kinds
