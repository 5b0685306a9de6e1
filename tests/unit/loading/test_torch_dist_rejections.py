"""Invalid checkpoints are rejected before any tensor is read, with both numbers and a remedy."""

import json
import pickle
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from random_checkpoint import CONFIGS, TORCH_DIST_CONFIGS

from megatron_runtime.checkpoints.checkpoint import open_checkpoint
from megatron_runtime.checkpoints.model_files import ModelFileError
from megatron_runtime.checkpoints.source import ModelSourceError, resolve
from megatron_runtime.checkpoints.torch_dist.configuration import arguments_of, config_json_of
from megatron_runtime.distributed.shard import IndivisibleError, ParallelSizes
from megatron_runtime.models.config import LinearScaling, ModelConfig, UnsupportedModelError
from megatron_runtime.models.families import config_from_hf
from megatron_runtime.models.weights import load_weights

NORM = "decoder.layers.self_attention.linear_qkv.layer_norm_weight"


def change_index(release: Path, change: Callable[[Any], None]) -> None:
    index = pickle.loads((release / ".metadata").read_bytes())
    change(index)
    (release / ".metadata").write_bytes(pickle.dumps(index))


def change_config(release: Path, **values: object) -> None:
    path = release.parent / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def error_of_opening(release: Path, kind: type[Exception]) -> str:
    """Return the error of opening the checkpoint, whose files of tensors have no content."""
    for file in release.glob("*.distcp"):
        size = file.stat().st_size
        file.unlink()
        with file.open("wb") as empty:
            empty.truncate(size)
    with pytest.raises(kind) as caught:
        open_checkpoint(resolve(str(release.parent)))
    return str(caught.value)


def test_a_missing_tensor_is_rejected(release: Path) -> None:
    change_index(release, lambda index: index.state_dict_metadata.pop(NORM))
    message = error_of_opening(release, UnsupportedModelError)
    assert f"of its 9 tensors it lacks 1: {NORM}" in message


def test_an_unknown_tensor_is_rejected(release: Path) -> None:
    def add(index: Any) -> None:
        index.state_dict_metadata["decoder.layers.mlp.shared_experts.linear_fc1.weight"] = index.state_dict_metadata[
            "decoder.final_layernorm.weight"
        ]
        where = next(where for where in index.storage_data if where.fqn == "decoder.final_layernorm.weight")
        index.storage_data[replace_name(where, "decoder.layers.mlp.shared_experts.linear_fc1.weight")] = (
            index.storage_data[where]
        )

    change_index(release, add)
    message = error_of_opening(release, UnsupportedModelError)
    assert "has 1: decoder.layers.mlp.shared_experts.linear_fc1.weight" in message


def replace_name(where: Any, name: str) -> Any:
    return type(where)(name, where.offset, where.index)


@pytest.mark.parametrize(
    ("field", "value", "key", "found", "wanted"),
    [
        ("intermediate_size", 64, "decoder.layers.mlp.linear_fc1.weight", (3, 96, 32), (3, 128, 32)),
        ("num_hidden_layers", 2, NORM, (3, 32), (2, 32)),
        ("num_key_value_heads", 3, "decoder.layers.self_attention.linear_qkv.weight", (3, 80, 32), (3, 96, 32)),
        ("vocab_size", 151, "embedding.word_embeddings.weight", (150, 32), (151, 32)),
    ],
)
def test_a_tensor_of_another_shape_is_rejected(
    release: Path, field: str, value: int, key: str, found: tuple[int, ...], wanted: tuple[int, ...]
) -> None:
    change_config(release, **{field: value})
    message = error_of_opening(release, UnsupportedModelError)
    assert f"'{key}'" in message
    assert f"shape {found}: the model's configuration asks for {wanted}" in message


def test_the_padding_of_a_vocabulary_is_not_read(release: Path) -> None:
    change_config(release, vocab_size=140)
    checkpoint = open_checkpoint(resolve(str(release)))
    assert checkpoint.kinds["lm_head.weight"].shape == (140, 32)
    assert checkpoint.read("lm_head.weight").shape == (140, 32)


def test_a_missing_file_is_rejected(release: Path) -> None:
    (release / "__0_0.distcp").unlink()
    with pytest.raises(ModelFileError, match=r"__0_0\.distcp is missing: copy the whole directory, it has 1 files"):
        open_checkpoint(resolve(str(release)))


def test_a_truncated_file_is_rejected(release: Path) -> None:
    file = release / "__0_0.distcp"
    size = file.stat().st_size
    with file.open("r+b") as opened:
        opened.truncate(size - 1)
    with pytest.raises(ModelFileError, match=f"it has {size - 1} bytes, the index needs {size}"):
        open_checkpoint(resolve(str(release)))


def test_a_part_that_no_rank_saved_is_rejected(release: Path) -> None:
    change_index(release, lambda index: index.state_dict_metadata[NORM].chunks.pop())
    assert f"lists 64 of the 96 values of '{NORM}'" in error_of_opening(release, ModelFileError)


def test_a_part_of_unknown_place_is_rejected(release: Path) -> None:
    change_index(release, lambda index: index.storage_data.pop(next(w for w in index.storage_data if w.fqn == NORM)))
    assert f"does not say where the part of '{NORM}'" in error_of_opening(release, ModelFileError)


def test_a_part_outside_of_its_tensor_is_rejected(release: Path) -> None:
    def grow(index: Any) -> None:
        index.state_dict_metadata[NORM].chunks[2].sizes = torch.Size([2, 32])

    change_index(release, grow)
    assert f"has a part of '{NORM}' at (2, 0) of (2, 32): its shape is (3, 32)" in error_of_opening(
        release, ModelFileError
    )


def test_bytes_that_are_no_tensor_are_rejected(release: Path) -> None:
    file = release / "__0_0.distcp"
    file.write_bytes(bytes(file.stat().st_size))
    checkpoint = open_checkpoint(resolve(str(release)))
    with pytest.raises(ModelFileError, match="is damaged"):
        checkpoint.read("model.norm.weight")


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (ParallelSizes(tensor=4), "tensor_parallel_size=4 does not divide the model's 6 query heads"),
        (ParallelSizes(pipeline=4), "pipeline_parallel_size=4: the model has 3 layers"),
    ],
)
def test_a_parallel_size_that_does_not_divide_is_rejected(release: Path, sizes: ParallelSizes, message: str) -> None:
    for file in release.glob("*.distcp"):
        file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(IndivisibleError, match=message):
        load_weights(open_checkpoint(resolve(str(release))), torch.float32, shard=sizes.shard(0))


def test_a_model_without_configuration_is_rejected(release: Path) -> None:
    (release.parent / "config.json").unlink()
    (release / "common.pt").unlink()
    with pytest.raises(UnsupportedModelError, match=r"neither config\.json nor common\.pt"):
        open_checkpoint(resolve(str(release)))


def test_a_missing_iteration_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("100")
    with pytest.raises(ModelSourceError, match="iter_0000100 holds no torch_dist checkpoint"):
        resolve(str(tmp_path))


@pytest.mark.parametrize("case", TORCH_DIST_CONFIGS)
def test_configuration_and_arguments_convert_into_each_other(case: str) -> None:
    """Except for the tokens that begin and end an answer, which the arguments do not have."""
    config = CONFIGS[case]
    values = config_json_of(vars(arguments_of(config)), where="it")
    found = config_from_hf(values, ends=config.eos_token_ids, where="it")
    assert replace(found, bos_token_id=config.bos_token_id, intermediate_size=config.intermediate_size) == config


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("normalization", "LayerNorm"),
        ("position_embedding_type", "learned_absolute"),
        ("swiglu", False),
        ("add_bias_linear", True),
        ("rotary_percent", 0.5),
        ("multi_latent_attention", True),
        ("moe_router_score_function", "sigmoid"),
        ("moe_shared_expert_intermediate_size", 64),
    ],
)
def test_unsupported_arguments_are_rejected(name: str, value: object) -> None:
    arguments = {**vars(arguments_of(CONFIGS["llama"])), name: value}
    with pytest.raises(UnsupportedModelError, match=rf"argument {name} {value!r}: supported is"):
        config_json_of(arguments, where="it")


_OTHER_VALUES = {
    "family": "mistral",
    "num_kv_heads": 3,
    "eos_token_ids": (5,),
    "rope_scaling": LinearScaling(factor=2.0),
    "activation": "gelu_tanh",
    "query_scale": 0.5,
    "sliding": CONFIGS["mistral"].sliding,
    "moe": CONFIGS["mixtral"].moe,
}
"""Of fields whose other values cannot be derived from their type."""


def other_value(name: str) -> Any:
    """Return a value of a field that the example of a Llama does not have."""
    value = getattr(CONFIGS["llama"], name)
    if name in _OTHER_VALUES:
        return _OTHER_VALUES[name]
    assert isinstance(value, int | float), f"_OTHER_VALUES lacks {name}"
    return not value if isinstance(value, bool) else 2 * value + 2


@pytest.mark.parametrize("name", [field.name for field in fields(ModelConfig)])
def test_each_field_is_written_or_rejected(name: str) -> None:
    config = replace(CONFIGS["llama"], **{name: other_value(name)})
    try:
        arguments = arguments_of(config)
    except UnsupportedModelError as error:
        message = str(error)
    else:
        found = config_from_hf(config_json_of(vars(arguments), where="it"), ends=config.eos_token_ids, where="it")
        # The files of the tokenizer have the token, and a Mistral without a window is a Llama.
        assert getattr(found, name) == getattr(config, name) or name in ("bos_token_id", "family")
        return
    assert f"no argument for {name} " in message


@pytest.mark.parametrize(
    "name",
    ["embedding_scale", "query_scale", "norm_weight_offset", "output_norms", "activation", "sliding", "rope_scaling"],
)
def test_a_model_that_megatron_cannot_describe_is_rejected(name: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"no argument for {name} .*: convert it to safetensors"):
        arguments_of(replace(CONFIGS["llama"], **{name: other_value(name)}))
