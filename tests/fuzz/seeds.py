"""Write the valid seeds of the model formats, and the small model whose files the inputs replace.

Run as `.venv/bin/python -m tests.fuzz.seeds` from the root of the repository.
"""

from __future__ import annotations

import io
import json
import pickle
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import gguf
import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from random_checkpoint import CONFIGS, LLAMA, random_tensors, write_model  # noqa: E402

from megatron_runtime.checkpoints.checkpoint import open_checkpoint  # noqa: E402
from megatron_runtime.checkpoints.convert import convert  # noqa: E402
from megatron_runtime.checkpoints.safetensors import INDEX_FILE, write_safetensors  # noqa: E402
from megatron_runtime.checkpoints.source import resolve  # noqa: E402
from megatron_runtime.models.families import config_to_hf  # noqa: E402
from megatron_runtime.models.tensors import TensorKind  # noqa: E402
from tests.fuzz.harness import CORPUS  # noqa: E402
from tests.fuzz.model_targets import MODEL  # noqa: E402

SMALL = replace(
    LLAMA, vocab_size=8, hidden_size=8, intermediate_size=8, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=4
)


def main() -> None:
    shutil.rmtree(MODEL, ignore_errors=True)
    held = random_tensors(SMALL)
    transformers = write_model(MODEL / "transformers", SMALL, held)
    _write("safetensors", "valid", (transformers / "model.safetensors").read_bytes())
    convert(str(transformers), MODEL / "saved", to="torch_dist")
    (MODEL / "saved" / "release").rename(MODEL / "megatron")
    shutil.rmtree(MODEL / "saved")
    megatron = MODEL / "megatron"
    _write("torch_dist_arguments", "valid", (megatron / "common.pt").read_bytes())
    shutil.copyfile(transformers / "config.json", megatron / "config.json")
    _write("torch_dist_index", "valid", (megatron / ".metadata").read_bytes())
    _write("pickle", "valid-index", (megatron / ".metadata").read_bytes())
    _write("pickle", "valid-protocol-0", pickle.dumps({"a": [1, 2.5, None, "x", (1, True)]}, protocol=0))
    saved = io.BytesIO()
    torch.save(torch.arange(6.0).view(2, 3), saved)
    _write("torch_dist_tensor", "valid", saved.getvalue())
    kinds = {name: TensorKind(tuple(tensor.shape), tensor.dtype) for name, tensor in held.items()}
    (transformers / "model.safetensors").unlink()
    write_safetensors(kinds, transformers, read=held.__getitem__, written=lambda count: None, file_bytes=3000)
    _write("safetensors_index", "valid", (transformers / INDEX_FILE).read_bytes())
    for name, config in CONFIGS.items():
        _write(
            "config", f"valid-{name.replace(', ', '-').replace(' ', '-')}", json.dumps(config_to_hf(config)).encode()
        )
    _write("generation_config", "valid", json.dumps({"eos_token_id": [1, 2], "bos_token_id": 0}).encode())
    _write("gguf", "valid", _gguf())
    for directory in (transformers, megatron):
        open_checkpoint(resolve(str(directory)))


def _gguf() -> bytes:
    path = MODEL / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(8)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_token_list(["a", "b", "<s>"])
    writer.add_token_types([1, 1, 3])
    writer.add_array("nested", [[1, 2], [3]])
    names = {
        "token_embd": (8, 8),
        "output_norm": (8,),
        "blk.0.attn_norm": (8,),
        "blk.0.attn_q": (8, 8),
        "blk.0.attn_k": (4, 8),
        "blk.0.attn_v": (4, 8),
        "blk.0.attn_output": (8, 8),
        "blk.0.ffn_norm": (8,),
        "blk.0.ffn_gate": (8, 8),
        "blk.0.ffn_up": (8, 8),
        "blk.0.ffn_down": (8, 8),
    }
    for name, shape in names.items():
        writer.add_tensor(f"{name}.weight", torch.ones(shape).numpy())
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    data = path.read_bytes()
    path.unlink()
    return data


def _write(target: str, name: str, data: bytes) -> None:
    path = CORPUS / target / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


if __name__ == "__main__":
    main()
