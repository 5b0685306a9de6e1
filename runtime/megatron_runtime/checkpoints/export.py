"""Write any model this runtime reads as a directory that transformers reads."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import save_file

from megatron_runtime.checkpoints.checkpoint import open_checkpoint, tensors
from megatron_runtime.checkpoints.source import ModelSource, resolve
from megatron_runtime.models.families import config_to_hf


def export_hf(source: ModelSource | str, directory: Path) -> None:
    """Write config.json, generation_config.json and model.safetensors (float32 where it was quantised).

    source:    a model reference or what `resolve` made of one.
    directory: made if needed; files of these names are replaced.
    """
    checkpoint = open_checkpoint(resolve(source) if isinstance(source, str) else source)
    held = {name: tensor.contiguous() for name, tensor in tensors(checkpoint)}
    dtype = str(next(iter(held.values())).dtype).removeprefix("torch.")
    directory.mkdir(parents=True, exist_ok=True)
    save_file(held, directory / "model.safetensors", metadata={"format": "pt"})
    config = checkpoint.config
    values = {**config_to_hf(config), "dtype": dtype}
    (directory / "config.json").write_text(json.dumps(values, indent=2) + "\n")
    generation = {"eos_token_id": list(config.eos_token_ids), "bos_token_id": config.bos_token_id}
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
