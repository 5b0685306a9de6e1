"""The same weights in the file formats of the engines."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from megatron_runtime.checkpoints.convert import convert
from megatron_runtime.checkpoints.source import resolve
from megatron_runtime.tokenization.loader import write_gguf_tokenizer

MODEL = "builtin:smollm2-135m"
DTYPES = {"4-bit": "int4", "bfloat16": "bfloat16", "float32": "float32"}
"""`--dtype` of our engine by kind of weights."""

_HEAD = 49152 * 576
"""Parameters of the output layer, which shares them with the embedding."""
LAYER_PARAMETERS = 134_515_008 - _HEAD
_FILE_TYPES = {
    gguf.GGMLQuantizationType.F32: gguf.LlamaFileType.ALL_F32,
    gguf.GGMLQuantizationType.F16: gguf.LlamaFileType.MOSTLY_F16,
}
STEP_BYTES = {
    # Blocks of Q4_1, and of Q8_0.
    "4-bit": LAYER_PARAMETERS * 20 / 32 + _HEAD * 34 / 32,
    "bfloat16": (LAYER_PARAMETERS + _HEAD) * 2,
    "float32": (LAYER_PARAMETERS + _HEAD) * 4,
}
"""Bytes of weights that a step of any batch size reads."""


def write_forms(directory: Path, weights: list[str]) -> dict[str, str]:
    """Write the weights; return paths: "hf" is a directory for transformers, other names are GGUF files.

    directory: kept between runs, because some engines cache compiled code by the path of the weights. Files that are
    newer than the model are not written again.
    """
    directory = directory.absolute()
    source = resolve(MODEL).location
    files = {"hf": str(directory / "hf"), "4-bit": str(source)}
    last = directory / "hf" / "tokenizer_config.json"
    if not _is_current(last, source):
        convert(MODEL, directory / "hf", replace=True, write_gguf_tokenizer=write_gguf_tokenizer)
    # float16 is the faster 16-bit type on CPUs without bfloat16 instructions.
    kinds = {"bfloat16": gguf.GGMLQuantizationType.F16, "float32": gguf.GGMLQuantizationType.F32}
    for name, kind in kinds.items():
        if name in weights:
            target = directory / f"{name}.gguf"
            files[name] = str(target)
            if not _is_current(target, source):
                # Written under another name first, so that an interrupted run leaves no incomplete file.
                _write_gguf(source, target.with_suffix(".part"), kind)
                target.with_suffix(".part").rename(target)
    return files


def _is_current(written: Path, source: Path) -> bool:
    return written.exists() and written.stat().st_mtime > source.stat().st_mtime


def _write_gguf(source: Path, target: Path, kind: gguf.GGMLQuantizationType) -> None:
    """Write the model of `source` with its matrices as numbers of `kind`."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, "llama")
    for name, entry in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        writer.add_key_value(name, entry.contents(), entry.types[0], entry.types[-1] if len(entry.types) > 1 else None)
    writer.add_file_type(_FILE_TYPES[kind])
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        is_plain = values.ndim == 1 or kind is gguf.GGMLQuantizationType.F32
        data = values if is_plain else gguf.quants.quantize(values, kind)
        writer.add_tensor(tensor.name, data, raw_dtype=gguf.GGMLQuantizationType.F32 if is_plain else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
