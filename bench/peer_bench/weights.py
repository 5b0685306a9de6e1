"""Writes the same weights in the file formats of all engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from megatron_runtime.checkpoints.convert import convert
from megatron_runtime.checkpoints.source import resolve
from megatron_runtime.tokenization.loader import write_gguf_tokenizer

DTYPES = {"4-bit": "int4", "bfloat16": "bfloat16", "float32": "float32"}
"""Our engine's `--dtype` for each kind of weights."""
_BUILTIN = "builtin:smollm2-135m"
_FILE_TYPES = {
    gguf.GGMLQuantizationType.F32: gguf.LlamaFileType.ALL_F32,
    gguf.GGMLQuantizationType.F16: gguf.LlamaFileType.MOSTLY_F16,
}


@dataclass(frozen=True, slots=True)
class BenchModel:
    """A model of the comparison. The output layer shares its parameters with the embedding.

    layer_parameters: number of parameters of all layers.
    head_parameters: number of parameters of the output layer.
    layer_type: GGML type of 4-bit matrices.
    """

    layer_parameters: int
    head_parameters: int
    layer_type: gguf.GGMLQuantizationType

    def step_bytes(self, weights: str) -> float:
        """Return the number of bytes of weights that a step reads. This number does not depend on the batch size."""
        if weights != "4-bit":
            return (self.layer_parameters + self.head_parameters) * (2 if weights == "bfloat16" else 4)
        layer, head = (gguf.GGML_QUANT_SIZES[kind] for kind in (self.layer_type, gguf.GGMLQuantizationType.Q8_0))
        return self.layer_parameters * layer[1] / layer[0] + self.head_parameters * head[1] / head[0]


_HIDDEN, _LAYERS, _HEADS, _KV_HEADS, _FEED_FORWARD, _VOCABULARY = 2048, 16, 32, 8, 8192, 49152
_ATTENTION = 2 * _HIDDEN * (_HIDDEN + _HIDDEN * _KV_HEADS // _HEADS)
MODELS = {
    "smollm2-135m": BenchModel(134_515_008 - 49152 * 576, 49152 * 576, gguf.GGMLQuantizationType.Q4_1),
    "llama-1b": BenchModel(
        _LAYERS * (_ATTENTION + 3 * _HIDDEN * _FEED_FORWARD), _VOCABULARY * _HIDDEN, gguf.GGMLQuantizationType.Q4_0
    ),
}
"""The built-in model, and a model with random weights that has the shape of Llama 3.2 1B and the built-in
vocabulary.
"""


def write_forms(directory: Path, weights: list[str], model: str) -> dict[str, str]:
    """Write the weights in each format, and return the path of each format.

    "hf" is a directory for transformers, "packed-…" are directories for our engine, and all other names are GGUF files.

    directory: kept between runs, because some engines cache compiled code by the path of the weights. Files that are
               newer than the model are not written again.
    """
    directory = directory.absolute() / model
    original = _BUILTIN
    if model == "llama-1b":
        original = str(directory / "4-bit.gguf")
        if not Path(original).exists():
            directory.mkdir(parents=True, exist_ok=True)
            _write_random_llama(Path(original).with_suffix(".part"))
            Path(original).with_suffix(".part").rename(original)
    source = resolve(original).location
    files = {"hf": str(directory / "hf"), "4-bit": str(source)}
    last = "tokenizer_config.json"
    if not _is_current(directory / "hf" / last, source):
        convert(original, directory / "hf", replace=True, write_gguf_tokenizer=write_gguf_tokenizer)
    for name in set(weights):
        packed = directory / f"packed-{name}"
        files[f"packed-{name}"] = str(packed)
        if not _is_current(packed / last, source):
            options: dict[str, Any] = {"replace": True, "write_gguf_tokenizer": write_gguf_tokenizer}
            convert(original, packed, to="packed", dtype=DTYPES[name], **options)
    # float16 is the faster 16-bit type on CPUs without bfloat16 instructions.
    kinds = {"bfloat16": gguf.GGMLQuantizationType.F16, "float32": gguf.GGMLQuantizationType.F32}
    for name, kind in kinds.items():
        if name in weights:
            target = directory / f"{name}.gguf"
            files[name] = str(target)
            if not _is_current(target, source):
                # The file first gets another name, so that an interrupted run leaves no incomplete file.
                _write_gguf(source, target.with_suffix(".part"), kind)
                target.with_suffix(".part").rename(target)
    return files


def _is_current(written: Path, source: Path) -> bool:
    return written.exists() and written.stat().st_mtime > source.stat().st_mtime


def _write_gguf(source: Path, target: Path, kind: gguf.GGMLQuantizationType) -> None:
    """Write the model at `source` as a GGUF file whose matrices have the type `kind`."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, "llama")
    _copy_fields(reader, writer, without=("general.file_type",))
    writer.add_file_type(_FILE_TYPES[kind])
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        is_plain = values.ndim == 1 or kind is gguf.GGMLQuantizationType.F32
        data = values if is_plain else gguf.quants.quantize(values, kind)
        writer.add_tensor(tensor.name, data, raw_dtype=gguf.GGMLQuantizationType.F32 if is_plain else kind)
    _finish(writer)


def _copy_fields(reader: gguf.GGUFReader, writer: gguf.GGUFWriter, *, without: Sequence[str]) -> None:
    for name, entry in reader.fields.items():
        if not name.startswith(("GGUF.", "general.architecture", *without)):
            kinds = entry.types
            writer.add_key_value(name, entry.contents(), kinds[0], kinds[-1] if len(kinds) > 1 else None)


def _write_random_llama(target: Path) -> None:
    """Write the model "llama-1b" of MODELS."""
    writer = gguf.GGUFWriter(target, "llama")
    _copy_fields(gguf.GGUFReader(resolve(_BUILTIN).location), writer, without=("llama.", "general.file_type"))
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)
    writer.add_vocab_size(_VOCABULARY)
    writer.add_block_count(_LAYERS)
    writer.add_context_length(8192)
    writer.add_embedding_length(_HIDDEN)
    writer.add_feed_forward_length(_FEED_FORWARD)
    writer.add_head_count(_HEADS)
    writer.add_head_count_kv(_KV_HEADS)
    writer.add_rope_dimension_count(_HIDDEN // _HEADS)
    writer.add_rope_freq_base(500000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    random = np.random.default_rng(0)

    def matrix(name: str, outputs: int, inputs: int, kind: gguf.GGMLQuantizationType) -> None:
        """Add a matrix of random quantized values to the file.

        All values have the same scale, which makes their standard deviation inputs^-0.5.
        """
        values, size = gguf.GGML_QUANT_SIZES[kind]
        blocks = random.integers(0, 256, (outputs, inputs // values, size), dtype=np.uint8)
        deviation = 16 / 12**0.5 if kind == gguf.GGMLQuantizationType.Q4_0 else 256 / 12**0.5
        blocks[..., :2] = np.array([inputs**-0.5 / deviation], dtype=np.float16).view(np.uint8)
        writer.add_tensor(name, blocks.reshape(outputs, -1), raw_dtype=kind)

    q4_0, kv = gguf.GGMLQuantizationType.Q4_0, _HIDDEN * _KV_HEADS // _HEADS
    matrix("token_embd.weight", _VOCABULARY, _HIDDEN, gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("output_norm.weight", np.ones(_HIDDEN, np.float32))
    for layer in range(_LAYERS):
        at = f"blk.{layer}."
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"{at}{name}.weight", np.ones(_HIDDEN, np.float32))
        for name, outputs in (("q", _HIDDEN), ("k", kv), ("v", kv), ("output", _HIDDEN)):
            matrix(f"{at}attn_{name}.weight", outputs, _HIDDEN, q4_0)
        for name in ("gate", "up"):
            matrix(f"{at}ffn_{name}.weight", _FEED_FORWARD, _HIDDEN, q4_0)
        matrix(f"{at}ffn_down.weight", _HIDDEN, _FEED_FORWARD, q4_0)
    _finish(writer)


def _finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
