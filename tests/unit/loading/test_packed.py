"""Models that are stored in the panels of the CPU kernels, and mapped."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from random_checkpoint import CONFIGS, all_tensors, assert_equal_weights, random_tensors, write_model

from megatron_kernels.cpu.packing import INTEGER_FORMATS
from megatron_runtime.backends.native.memory import MemoryShortError
from megatron_runtime.backends.native.weight_store import WeightStore
from megatron_runtime.checkpoints.checkpoint import UnusableWeightsError, open_checkpoint
from megatron_runtime.checkpoints.convert import convert
from megatron_runtime.checkpoints.model_files import ModelFileError
from megatron_runtime.checkpoints.packed import PACKED_FILE, PackedCheckpoint
from megatron_runtime.checkpoints.source import resolve
from megatron_runtime.distributed.shard import ParallelSizes
from megatron_runtime.models.config import ModelConfig, UnsupportedModelError
from megatron_runtime.models.families import FAMILIES
from megatron_runtime.models.layers.cpu import FORMATS, PackedLinear, PackedLinears, numbers_of
from megatron_runtime.models.weights import load_weights

_SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 8,
    "num_kv_heads": 2,
    "head_dim": 16,
}
BUILTIN = "builtin:smollm2-135m"
MODELS = {name: replace(CONFIGS[name], **_SIZES) for name in ("llama", "llama, tied, scaled", "qwen2", "qwen3_moe")}
MODELS["a size without whole panels"] = replace(MODELS["llama"], intermediate_size=100, vocab_size=100)


def written(directory: Path, config: ModelConfig, *, dtype: torch.dtype = torch.float32) -> Path:
    return write_model(directory, config, random_tensors(config, dtype=dtype))


def packed(model: Path | str, directory: Path, *, dtype: str = "keep") -> Path:
    convert(str(model), directory, to="packed", dtype=dtype)
    return directory


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_a_load_gives_the_matrices_of_the_original(name: str, config: ModelConfig, tmp_path: Path) -> None:
    model = written(tmp_path / "hf", config)
    checkpoint = open_checkpoint(resolve(str(packed(model, tmp_path / "packed", dtype=name))))
    assert numbers_of("auto", checkpoint) == FORMATS[name]
    ours = load_weights(checkpoint, torch.float32, linears=FORMATS[name].linears())
    theirs = load_weights(open_checkpoint(resolve(str(model))), torch.float32, linears=FORMATS[name].linears())
    assert_equal_weights(ours, theirs)


def test_quantized_matrices_keep_their_blocks(tmp_path: Path) -> None:
    """The layers of the built-in model have matrices of Q4_1, its embedding is Q8_0."""
    places = BUILTIN, str(packed(BUILTIN, tmp_path / "packed", dtype="int4"))
    ours, theirs = (
        load_weights(open_checkpoint(resolve(place)), torch.float32, linears=PackedLinears("int4")) for place in places
    )
    for mine, other in zip(ours.linears, theirs.linears, strict=True):
        assert isinstance(mine, PackedLinear)
        assert isinstance(other, PackedLinear)
        for one, two in zip(mine.matrices, other.matrices, strict=True):
            assert one.format == two.format
            assert torch.equal(one.data, two.data)


@pytest.mark.parametrize(("stored", "wanted"), [("bfloat16", "float32"), ("float32", "bfloat16"), ("int4", "float16")])
def test_another_format_is_converted_when_it_is_loaded(stored: str, wanted: str, tmp_path: Path) -> None:
    model = written(tmp_path / "hf", MODELS["llama"])
    checkpoint = open_checkpoint(resolve(str(packed(model, tmp_path / "packed", dtype=stored))))
    values = load_weights(checkpoint, torch.float32, linears=FORMATS[wanted].linears())
    expected = {name: tensor.to(checkpoint.kinds[name].dtype) for name, tensor in all_tensors(checkpoint).items()}
    rewritten = write_model(tmp_path / "rewritten", MODELS["llama"], expected)
    again = load_weights(open_checkpoint(resolve(str(rewritten))), torch.float32, linears=FORMATS[wanted].linears())
    assert_equal_weights(values, again)


def test_a_load_copies_no_matrix(tmp_path: Path) -> None:
    """Queries, keys and values are one matrix, of three tensors in the file; so are the halves of the feed-forward."""
    checkpoint = PackedCheckpoint(packed(written(tmp_path / "hf", MODELS["llama"]), tmp_path / "packed"))
    name = FAMILIES["llama"].hf_name("head")
    head = checkpoint.panels(name, wanted=PackedLinears("float32").panel_formats)
    assert head is not None
    weights = load_weights(checkpoint, torch.float32, linears=PackedLinears("float32"))
    for linear in weights.linears:
        assert isinstance(linear, PackedLinear)
        (matrix,) = linear.matrices
        assert matrix.data.untyped_storage().data_ptr() == head.data.untyped_storage().data_ptr()


@pytest.mark.parametrize("name", ["float32", "bfloat16", "int8"])
def test_each_rank_gets_its_part(name: str, tmp_path: Path) -> None:
    model = written(tmp_path / "hf", MODELS["llama"])
    places = model, packed(model, tmp_path / "packed", dtype=name)
    for rank in range(2):
        shard = ParallelSizes(tensor=2).shard(rank)
        ours, theirs = (
            load_weights(
                open_checkpoint(resolve(str(place))), torch.float32, shard=shard, linears=FORMATS[name].linears()
            )
            for place in places
        )
        assert_equal_weights(ours, theirs)


def test_values_survive_a_conversion_there_and_back(tmp_path: Path) -> None:
    config = MODELS["qwen3_moe"]
    model = written(tmp_path / "hf", config, dtype=torch.bfloat16)
    packed(model, tmp_path / "packed")
    convert(str(tmp_path / "packed"), tmp_path / "back", to="safetensors")
    for name, tensor in random_tensors(config, dtype=torch.bfloat16).items():
        found = open_checkpoint(resolve(str(tmp_path / "back"))).read(name)
        assert found.dtype is tensor.dtype
        assert torch.equal(found, tensor)


def test_a_load_needs_no_memory_for_a_mapped_file(tmp_path: Path) -> None:
    def short(needed: int, *, what: str) -> None:
        raise MemoryShortError(f"{what} needs {needed}")

    model = written(tmp_path / "hf", MODELS["llama"])
    mapped = resolve(str(packed(model, tmp_path / "packed")))
    WeightStore(mapped, torch.float32, FORMATS["float32"].linears, require_memory=short).load()
    for source, name in ((mapped, "bfloat16"), (resolve(str(model)), "float32")):
        with pytest.raises(MemoryShortError):
            WeightStore(source, torch.float32, FORMATS[name].linears, require_memory=short).load()


def test_weights_that_are_not_finite_are_rejected(tmp_path: Path) -> None:
    for name in FORMATS:
        directory = packed(written(tmp_path / f"hf-{name}", MODELS["llama"]), tmp_path / name, dtype=name)
        store = WeightStore(resolve(str(directory)), torch.float32, FORMATS[name].linears)
        store.load()
        digest = store.digest
        store.release()
        store.load()
        assert store.digest == digest
        store.release()
        matrix = next(iter(header_of(directory / PACKED_FILE)[0].values()))
        data = bytearray((directory / PACKED_FILE).read_bytes())
        end = len(data) - (payload(data) - matrix["data_offsets"][1])
        # The last two bytes of every block are a value, or a scale or an offset.
        data[end - 2 : end] = b"\xff\x7f"
        (directory / "new").write_bytes(data)
        (directory / "new").rename(directory / PACKED_FILE)
        with pytest.raises(UnusableWeightsError, match=r"embed_tokens.weight' has values that are not finite"):
            store.load()


def header_of(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return header, header.pop("__metadata__")


def payload(data: bytes) -> int:
    """Return the size of the tensors."""
    return len(data) - 8 - int.from_bytes(data[:8], "little")


Edit = Callable[[dict[str, Any], dict[str, Any]], object]
Q = "model.layers.0.self_attn.q_proj.weight"
DAMAGES: dict[str, tuple[Edit, str]] = {
    "another version": (lambda tensors, meta: meta.update(format="megatron-packed-9"), "reads megatron-packed-1"),
    "an unknown format": (lambda tensors, meta: meta.update(numbers="int3"), "numbers 'int3', known are float32"),
    "a format that is a list": (lambda tensors, meta: meta.update(numbers=["int4"]), "numbers a list of length 1"),
    "no list": (lambda tensors, meta: meta.update(matrices="{"), "the list of matrices of .* is not valid JSON"),
    "not a list": (lambda tensors, meta: meta.update(matrices='{"a": 1}'), "described as 'null'"),
    "wrong inputs": (lambda tensors, meta: redescribe(meta, ["float32", 96]), r"""described as '\["float32", 96\]'"""),
    "half a block": (lambda tensors, meta: redescribe(meta, ["float32", 65]), r"""described as '\["float32", 65\]'"""),
    "an overflow": (lambda tensors, meta: redescribe(meta, ["float32", 64 + (1 << 64)]), "which its shape"),
    "wrong format": (lambda tensors, meta: redescribe(meta, ["int4", 64]), r"""described as '\["int4", 64\]'"""),
    "a format of another kind": (lambda tensors, meta: redescribe(meta, [5, 64]), r"described as '\[5, 64\]'"),
    "one axis": (lambda tensors, meta: tensors[Q].update(shape=[8 * 4096]), r"its shape \(32768,\) is not"),
}


def redescribe(metadata: dict[str, Any], description: list[Any]) -> None:
    metadata["matrices"] = json.dumps({**json.loads(metadata["matrices"]), Q: description})


def rewrite_header(path: Path, edit: Edit) -> None:
    tensors, metadata = header_of(path)
    data = path.read_bytes()[-payload(path.read_bytes()) :]
    edit(tensors, metadata)
    text = json.dumps({"__metadata__": metadata, **tensors}).encode()
    # Never in place: the file may be mapped.
    path.with_suffix(".new").write_bytes(struct.pack("<Q", len(text)) + text + data)
    path.with_suffix(".new").rename(path)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_that_contradicts_itself_is_rejected(damage: str, tmp_path: Path) -> None:
    edit, message = DAMAGES[damage]
    directory = packed(written(tmp_path / "hf", MODELS["llama"]), tmp_path / "packed")
    rewrite_header(directory / PACKED_FILE, edit)
    with pytest.raises(ModelFileError, match=message):
        PackedCheckpoint(directory)


def test_tensors_may_begin_at_any_address(tmp_path: Path) -> None:
    directory = packed(written(tmp_path / "hf", MODELS["llama"]), tmp_path / "packed", dtype="bfloat16")
    expected = load_weights(PackedCheckpoint(directory), torch.float32, linears=PackedLinears("bfloat16"))
    for size in range(1, 4):
        rewrite_header(directory / PACKED_FILE, lambda tensors, meta, size=size: meta.update(padding="x" * size))
        found = load_weights(PackedCheckpoint(directory), torch.float32, linears=PackedLinears("bfloat16"))
        assert_equal_weights(found, expected)


def test_a_short_file_is_rejected(tmp_path: Path) -> None:
    directory = packed(written(tmp_path / "hf", MODELS["llama"]), tmp_path / "packed")
    data = (directory / PACKED_FILE).read_bytes()
    for size in (0, 5, 1000, len(data) - 1):
        (directory / PACKED_FILE).write_bytes(data[:size])
        with pytest.raises(ModelFileError, match="cut short"):
            PackedCheckpoint(directory)
    (directory / PACKED_FILE).unlink()
    with pytest.raises(ModelFileError, match=r"model.packed is missing"):
        PackedCheckpoint(directory)


def test_a_matrix_of_another_shape_than_the_configuration_is_rejected(tmp_path: Path) -> None:
    directory = packed(written(tmp_path / "hf", MODELS["llama"]), tmp_path / "packed")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "intermediate_size": 256}))
    with pytest.raises(UnsupportedModelError, match="of another shape"):
        WeightStore(resolve(str(directory)), torch.float32, FORMATS["float32"].linears).load()


def test_only_integer_formats_keep_integers(tmp_path: Path) -> None:
    checkpoint = PackedCheckpoint(packed(written(tmp_path / "hf", MODELS["llama"]), tmp_path / "packed", dtype="int4"))
    assert checkpoint.panels(Q, wanted=PackedLinears("bfloat16").panel_formats) is None
    found = checkpoint.panels(Q, wanted=PackedLinears("int8").panel_formats)
    assert found is not None
    assert found.format in INTEGER_FORMATS


def test_a_type_that_cannot_be_written_is_rejected(tmp_path: Path) -> None:
    model = written(tmp_path / "hf", MODELS["llama"])
    with pytest.raises(ValueError, match=r"dtype='int4' cannot be written as safetensors: use keep, float32"):
        convert(str(model), tmp_path / "out", to="safetensors", dtype="int4")
    with pytest.raises(ValueError, match=r"dtype='int2' cannot be written as packed: use keep, float32"):
        packed(model, tmp_path / "out", dtype="int2")
    assert not (tmp_path / "out").exists()
