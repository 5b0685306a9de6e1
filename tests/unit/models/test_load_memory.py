"""Memory that loading takes beside the weights: at most one tensor, and the resident pages of the mapped file."""

import json
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from eventually import LONG_SECONDS
from safetensors.torch import save_file

from megatron_runtime.checkpoints.mapped import RESIDENT_BYTES
from megatron_runtime.models.families import FAMILIES, config_from_hf, config_to_hf
from megatron_runtime.models.tensors import tensor_shapes

LLAMA = FAMILIES["llama"]
VALUES = {
    "architectures": [LLAMA.architecture],
    "vocab_size": 24000,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
CONFIG = config_from_hf(VALUES, ends=(), where="the test")
SHAPES = {LLAMA.hf_name(name): shape for name, shape in tensor_shapes(CONFIG).items()}
WEIGHTS = 4 * sum(int(np.prod(shape)) for shape in SHAPES.values())
LARGEST = 4 * max(int(np.prod(shape)) for shape in SHAPES.values())

MEASURE = """
import sys
from pathlib import Path
import torch
from megatron_runtime.checkpoints.checkpoint import open_checkpoint
from megatron_runtime.checkpoints.source import resolve
from megatron_runtime.checkpoints.checkpoint import VerifiedCheckpoint
from megatron_runtime.models.weights import load_weights

def memory(field):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024

torch.set_num_threads(1)
torch.rand(64, 64) @ torch.rand(64, 64)
checkpoint = VerifiedCheckpoint(open_checkpoint(resolve(sys.argv[1])))
before = memory("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
with torch.inference_mode():
    weights = load_weights(checkpoint, torch.float32)
print(memory("VmHWM") - before)
"""


def write_safetensors(directory: Path, dtype: torch.dtype) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config_to_hf(CONFIG)))
    save_file({name: torch.ones(shape, dtype=dtype) for name, shape in SHAPES.items()}, directory / "m.safetensors")
    return directory


def write_gguf(path: Path) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(CONFIG.num_layers)
    writer.add_context_length(CONFIG.max_position_embeddings)
    writer.add_embedding_length(CONFIG.hidden_size)
    writer.add_feed_forward_length(CONFIG.intermediate_size)
    writer.add_head_count(CONFIG.num_heads)
    writer.add_layer_norm_rms_eps(CONFIG.rms_norm_eps)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, CONFIG.num_layers)
    for name, shape in SHAPES.items():
        kind = gguf.GGMLQuantizationType.Q8_0 if len(shape) == 2 else gguf.GGMLQuantizationType.F32
        rows = gguf.quants.quantize(np.ones((1, shape[-1]), np.float32), kind)
        data = np.repeat(rows, shape[0], axis=0) if len(shape) == 2 else rows[0]
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="a peak can be reset on Linux only")
@pytest.mark.parametrize("form", ["float32", "bfloat16", "gguf"])
def test_loading_takes_the_weights_and_at_most_one_tensor(form: str, tmp_path: Path) -> None:
    if form == "gguf":
        source = write_gguf(tmp_path / "m.gguf")
    else:
        source = write_safetensors(tmp_path / "model", getattr(torch, form))
    measured = subprocess.run(
        [sys.executable, "-c", MEASURE, str(source)], capture_output=True, text=True, check=True, timeout=LONG_SECONDS
    )
    peak = int(measured.stdout)
    assert WEIGHTS < peak < WEIGHTS + LARGEST + RESIDENT_BYTES, f"{peak / WEIGHTS:.2f} of the weights"
