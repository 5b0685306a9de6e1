"""Directories of safetensors: several files, parts, types; errors are raised before any tensor is read."""

import json
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from random_checkpoint import all_tensors
from safetensors.torch import load_file, save_file

from megatron_runtime.checkpoints.model_files import ModelFileError
from megatron_runtime.checkpoints.safetensors import INDEX_FILE, SafetensorsCheckpoint, read_config
from megatron_runtime.models.config import UnsupportedModelError
from megatron_runtime.models.weights import load_weights

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    directory = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    Qwen2ForCausalLM(config).save_pretrained(directory, max_shard_size="20KB")
    return directory


def copy(model: Path, target: Path, edit: Callable[[Tensors], None]) -> Path:
    """Write the model as one file, with other tensors."""
    (target / "config.json").write_text((model / "config.json").read_text())
    held: Tensors = {}
    for file in model.glob("*.safetensors"):
        held |= load_file(file)
    edit(held)
    save_file({name: tensor.contiguous() for name, tensor in held.items()}, target / "model.safetensors")
    return target


def test_a_model_of_several_files_is_read_whole_and_in_parts(model: Path) -> None:
    assert (model / INDEX_FILE).is_file()
    files = sorted(model.glob("*.safetensors"))
    assert len(files) > 2
    checkpoint = SafetensorsCheckpoint(model)
    expected: Tensors = {}
    for file in files:
        expected |= load_file(file)
    assert set(checkpoint.kinds) == set(expected)
    for name, tensor in all_tensors(checkpoint).items():
        assert torch.equal(tensor, expected[name])
        part = (slice(3, 17), slice(2, 9))[: tensor.dim()]
        assert torch.equal(checkpoint.read(name, part), expected[name][part])


def test_a_file_that_the_index_does_not_name_is_ignored(model: Path, tmp_path: Path) -> None:
    for file in model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "consolidated.safetensors").write_bytes(b"nothing of this kind")
    assert SafetensorsCheckpoint(tmp_path).kinds == SafetensorsCheckpoint(model).kinds


def test_a_missing_file_is_named(model: Path, tmp_path: Path) -> None:
    for file in model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    gone = sorted(tmp_path.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(ModelFileError, match=rf"1 are missing, the first is {gone.name}"):
        SafetensorsCheckpoint(tmp_path)


def test_a_truncated_file_is_rejected_with_both_sizes(model: Path, tmp_path: Path) -> None:
    path = copy(model, tmp_path, lambda held: None) / "model.safetensors"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[: size - 100])
    with pytest.raises(ModelFileError, match=rf"ends at byte {size}, the file has {size - 100}"):
        SafetensorsCheckpoint(tmp_path)
    path.write_bytes(path.read_bytes()[:5])
    with pytest.raises(ModelFileError, match="it has 5 bytes"):
        SafetensorsCheckpoint(tmp_path)


def test_an_inconsistent_header_is_rejected(model: Path, tmp_path: Path) -> None:
    path = copy(model, tmp_path, lambda held: None) / "model.safetensors"
    header = json.dumps({"model.norm.weight": {"dtype": "F32", "shape": [32], "data_offsets": [0, 64]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(64))
    with pytest.raises(ModelFileError, match=r"has 64 bytes, its shape \(32,\) in F32 asks for 128"):
        SafetensorsCheckpoint(tmp_path)
    path.write_bytes(struct.pack("<Q", 4) + b"nope")
    with pytest.raises(ModelFileError, match=r"the header of .* is not valid JSON"):
        SafetensorsCheckpoint(tmp_path)


def test_a_tensor_in_two_files_is_rejected(model: Path, tmp_path: Path) -> None:
    copy(model, tmp_path, lambda held: None)
    (tmp_path / "model.safetensors").rename(tmp_path / "one.safetensors")
    save_file({"model.norm.weight": torch.ones(32)}, tmp_path / "more.safetensors")
    with pytest.raises(ModelFileError, match=r"'model\.norm\.weight' is in .*more\.safetensors and in .*one"):
        SafetensorsCheckpoint(tmp_path)


def test_a_type_that_is_not_floating_point_is_rejected(model: Path, tmp_path: Path) -> None:
    def quantise(held: Tensors) -> None:
        held["model.norm.weight"] = held["model.norm.weight"].to(torch.int8)

    with pytest.raises(
        UnsupportedModelError, match=r"model\.norm\.weight.* torch\.int8: supported are F64, F32, F16, BF16"
    ):
        SafetensorsCheckpoint(copy(model, tmp_path, quantise))


def drop(held: Tensors) -> None:
    for name in [name for name in held if "layers.1" in name]:
        del held[name]


def add(held: Tensors) -> None:
    held["model.layers.0.self_attn.sinks"] = torch.zeros(4)


def cut(held: Tensors) -> None:
    held["model.layers.0.mlp.down_proj.weight"] = held["model.layers.0.mlp.down_proj.weight"][:, :40]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (drop, r"has no 'model\.layers\.1\.input_layernorm\.weight'.* and 4 more"),
        (add, r"a Qwen2ForCausalLM lacks: 'model\.layers\.0\.self_attn\.sinks'"),
        (cut, r"'model\.layers\.0\.mlp\.down_proj\.weight' has shape \(32, 40\), .* needs \(32, 48\)"),
    ],
)
def test_tensors_of_another_model_are_rejected_before_any_is_read(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, edit: Callable[[Tensors], None], message: str
) -> None:
    checkpoint = SafetensorsCheckpoint(copy(model, tmp_path, edit))
    monkeypatch.setattr(checkpoint, "read", lambda *_: pytest.fail("a tensor was read"))
    with pytest.raises(UnsupportedModelError, match=message):
        load_weights(checkpoint, torch.float32)


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float64])
def test_types_are_converted_while_they_are_loaded(model: Path, tmp_path: Path, stored: torch.dtype) -> None:
    def convert(held: Tensors) -> None:
        for name in held:
            held[name] = held[name].to(stored)

    checkpoint = SafetensorsCheckpoint(copy(model, tmp_path, convert))
    weights = load_weights(checkpoint, torch.bfloat16)
    name = "model.layers.1.mlp.down_proj.weight"
    expected = load_file(tmp_path / "model.safetensors")[name].to(torch.bfloat16)
    assert torch.equal(weights.layers[1].mlp.down_DF.dense(), expected)


def values_of(directory: Path) -> Tensors:
    return all_tensors(SafetensorsCheckpoint(directory))


def test_a_copy_of_the_weights_in_another_format_is_not_read(model: Path, tmp_path: Path) -> None:
    copy(model, tmp_path, lambda held: None)
    save_file({"layers.0.attention.wq.weight": torch.ones(4, 4)}, tmp_path / "consolidated.safetensors")
    assert values_of(tmp_path).keys() == values_of(model).keys()


def test_tensors_without_the_prefix_and_the_head_are_a_whole_model(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As models for embeddings are published."""

    def flatten(held: Tensors) -> None:
        del held["lm_head.weight"]
        for name in list(held):
            held[name.removeprefix("model.")] = held.pop(name)

    expected = values_of(model)
    del expected["lm_head.weight"]
    found = SafetensorsCheckpoint(copy(model, tmp_path, flatten))
    assert found.config.tie_embeddings
    assert "computed with the embedding" in caplog.text
    assert found.kinds.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found.read(name), tensor)
    load_weights(found, torch.float32)


def test_a_model_that_says_it_has_a_head_and_lacks_it_is_rejected(model: Path, tmp_path: Path) -> None:
    def behead(held: Tensors) -> None:
        del held["lm_head.weight"]

    found = SafetensorsCheckpoint(copy(model, tmp_path, behead))
    with pytest.raises(UnsupportedModelError, match=r"no 'lm_head\.weight'"):
        load_weights(found, torch.float32)


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_a_stored_head_is_used_if_it_differs_from_the_embedding(factor: float, model: Path, tmp_path: Path) -> None:
    """As in transformers, although config.json ties the two."""
    copy(model, tmp_path, lambda held: held.update({"lm_head.weight": factor * held["model.embed_tokens.weight"]}))
    values = json.loads((model / "config.json").read_text()) | {"tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert SafetensorsCheckpoint(tmp_path).config.tie_embeddings == (factor == 1)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.layers.1.self_attn.rotary_emb.cos_cached",
        "model.layers.1.self_attn.k_scale",
        "mtp.layers.0.mlp.up_proj.weight",
    ],
)
def test_tensors_that_a_decoder_does_not_use_are_ignored(name: str, model: Path, tmp_path: Path) -> None:
    copy(model, tmp_path, lambda held: held.update({name: torch.ones(3)}))
    assert values_of(tmp_path).keys() == values_of(model).keys()


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model.", "model.text_model.", "llm."])
def test_the_text_part_of_a_multimodal_model_is_read(prefix: str, model: Path, tmp_path: Path) -> None:
    def embed(held: Tensors) -> None:
        for name in list(held):
            stored = name.replace("model.", prefix, 1) if name.startswith("model.") else f"language_model.{name}"
            held[stored] = held.pop(name)
        for name in ("vision_tower.encoder.layers.0.weight", "encoder.layers.0.weight", "image_newline"):
            held[name] = torch.ones(3)

    copy(model, tmp_path, embed)
    text = json.loads((model / "config.json").read_text()) | {"eos_token_id": [3, 5]}
    whole = {"architectures": ["SomeForConditionalGeneration"], "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    expected = values_of(model)
    found = SafetensorsCheckpoint(tmp_path)
    assert found.config == replace(SafetensorsCheckpoint(model).config, eos_token_ids=(3, 5))
    assert found.kinds.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found.read(name), tensor)


def test_a_text_part_has_the_defaults_of_its_family(tmp_path: Path) -> None:
    """Published models leave out what transformers adds."""
    from transformers import Gemma3Config

    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    whole = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    config, expected = read_config(tmp_path), Gemma3Config(text_config=text).text_config
    assert config.num_heads == expected.num_attention_heads
    assert config.num_kv_heads == expected.num_key_value_heads
    assert config.head_dim == expected.head_dim
    assert config.vocab_size == expected.vocab_size
    assert config.rms_norm_eps == expected.rms_norm_eps
    assert config.max_position_embeddings == expected.max_position_embeddings
    assert config.sliding is not None
    assert config.sliding.window == expected.sliding_window
    assert config.bos_token_id == expected.bos_token_id
    assert config.tie_embeddings


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_every_size_of_a_text_part_has_the_default_of_transformers(kind: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    whole = {"architectures": ["LlavaForConditionalGeneration"], "text_config": {"model_type": kind}}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    config, expected = read_config(tmp_path), AutoConfig.for_model(kind)
    assert (config.vocab_size, config.hidden_size) == (expected.vocab_size, expected.hidden_size)
    assert (config.intermediate_size, config.num_layers) == (expected.intermediate_size, expected.num_hidden_layers)
    assert (config.num_heads, config.num_kv_heads) == (expected.num_attention_heads, expected.num_key_value_heads)
    assert config.head_dim == (getattr(expected, "head_dim", None) or config.hidden_size // config.num_heads)
    assert config.rms_norm_eps == expected.rms_norm_eps
    assert config.max_position_embeddings == expected.max_position_embeddings


@pytest.mark.parametrize("architectures", [None, [], ["Qwen2Model"]])
def test_a_model_without_its_own_architecture_is_identified_by_its_type(
    architectures: list[str] | None, model: Path, tmp_path: Path
) -> None:
    copy(model, tmp_path, lambda held: None)
    values = json.loads((model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, "architectures": architectures, "bos_token_id": -1}))
    assert SafetensorsCheckpoint(tmp_path).config == SafetensorsCheckpoint(model).config
    (tmp_path / "config.json").write_text(json.dumps({**values, "architectures": ["Qwen2ForTokenClassification"]}))
    with pytest.raises(UnsupportedModelError, match="Qwen2ForTokenClassification"):
        SafetensorsCheckpoint(tmp_path)


def test_one_file_is_preferred_to_an_index(model: Path, tmp_path: Path) -> None:
    """As in transformers. The index can be a leftover."""
    copy(model, tmp_path, lambda held: None)
    shutil.copy(model / INDEX_FILE, tmp_path)
    assert values_of(tmp_path).keys() == values_of(model).keys()


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_pointer_of_git_lfs_is_rejected_with_the_remedy(name: str, model: Path, tmp_path: Path) -> None:
    copy(model, tmp_path, lambda held: None)
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(ModelFileError, match=rf"{name} is a Git LFS pointer.*git lfs pull"):
        SafetensorsCheckpoint(tmp_path)


def test_two_tensors_for_one_name_are_rejected(model: Path, tmp_path: Path) -> None:
    """A prefix hides the second one, so neither may win silently."""

    def embed(held: Tensors) -> None:
        for name in [name for name in held if name.startswith("model.")]:
            held[f"language_model.{name}"] = held.pop(name)
        held["model.norm.weight"] = torch.ones(32)

    with pytest.raises(ModelFileError, match=r"two tensors for 'model\.norm\.weight'"):
        SafetensorsCheckpoint(copy(model, tmp_path, embed))
