"""One checkpoint format into another, with what belongs to a model beside its weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from megatron_runtime.checkpoints.checkpoint import Checkpoint, Part, TensorKind, open_checkpoint
from megatron_runtime.checkpoints.model_files import MAX_TOKENIZER_BYTES
from megatron_runtime.checkpoints.safetensors_writer import num_bytes, write_safetensors
from megatron_runtime.checkpoints.source import GGUFSource, ModelSource, find_beside, resolve
from megatron_runtime.checkpoints.staging import new_directory
from megatron_runtime.models.config import ModelConfig
from megatron_runtime.models.families import config_to_hf
from megatron_runtime.models.weights import require_fitting
from megatron_runtime.tokenization.gguf_tokenizer import tokenizer_from_gguf
from megatron_runtime.tokenization.loader import write_tokenizer

Format = Literal["safetensors", "torch_dist"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

CONFIG_FILE, GENERATION_FILE = "config.json", "generation_config.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)


def convert(
    source: ModelSource | str,
    directory: Path,
    *,
    to: Format,
    dtype: torch.dtype | None = None,
    replace: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Write the model at `source` to `directory`: weights, configuration, tokenizer.

    source:    a model reference, or what `resolve` made of one.
    directory: is made; it is there whole or not at all.
    to:        "safetensors", as transformers reads it, or "torch_dist", as Megatron-LM does.
    dtype:     of the weights; None keeps their types (float32 where they are quantised).
    replace:   a directory of that name may be there, and goes.
    progress:  is told the bytes written so far, and of all.

    One tensor is in memory at a time. Raises DestinationError, UnsupportedModelError and the errors of the format.
    """
    found = resolve(source) if isinstance(source, str) else source
    checkpoint = _OfType(open_checkpoint(found), dtype)
    require_fitting(checkpoint)
    total = sum(map(num_bytes, checkpoint.kinds.values()))
    done = 0

    def written(count: int) -> None:
        nonlocal done
        done += count
        progress(done, total)

    with new_directory(directory, replace=replace) as partial:
        if to == "torch_dist":
            from megatron_runtime.checkpoints.torch_dist.export import write_torch_dist

            write_torch_dist(checkpoint, partial, written=written)
        else:
            write_safetensors(checkpoint.kinds, partial, read=checkpoint.read, written=written)
        _write_configuration(checkpoint, found, partial)
        write_text_files(checkpoint.config, found, partial)


class _OfType:
    """A checkpoint whose tensors are of one type."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype | None) -> None:
        self._checkpoint = checkpoint
        self._dtype = dtype
        self.config = checkpoint.config
        self.kinds: Mapping[str, TensorKind] = {
            name: TensorKind(kind.shape, dtype or kind.dtype) for name, kind in checkpoint.kinds.items()
        }

    def read(self, name: str, part: Part = ()) -> torch.Tensor:
        return self._checkpoint.read(name, part).to(self.kinds[name].dtype)

    def blocks(self, name: str, part: Part = (), *, wanted: Container[int]) -> None:
        return None


def _write_configuration(checkpoint: _OfType, source: ModelSource, directory: Path) -> None:
    types = {str(kind.dtype).removeprefix("torch.") for name, kind in checkpoint.kinds.items() if len(kind.shape) > 1}
    values = {**config_to_hf(checkpoint.config), "dtype": min(types)}
    own = find_beside(source, CONFIG_FILE)
    if own is not None:
        # It may say more than is known here, such as whom the model is from.
        values = {**own.read_json(), "dtype": min(types)}
        values.pop("torch_dtype", None)
    _write_json(directory / CONFIG_FILE, values)


def write_text_files(config: ModelConfig, source: ModelSource, directory: Path) -> None:
    """Tokenizer, chat template, and which tokens end an answer: a GGUF file knows more of them than its config."""
    for name in (*TOKENIZER_FILES, GENERATION_FILE):
        found = find_beside(source, name)
        if found is not None:
            (directory / name).write_bytes(found.read_bytes(MAX_TOKENIZER_BYTES))
    ends = config.eos_token_ids
    if isinstance(source, GGUFSource):
        tokenizer = tokenizer_from_gguf(source.path)
        write_tokenizer(tokenizer, directory)
        ends = tuple(dict.fromkeys((*ends, *tokenizer.eos_ids)))
    if ends and not (directory / GENERATION_FILE).exists():
        _write_json(directory / GENERATION_FILE, {"eos_token_id": list(ends), "bos_token_id": config.bos_token_id})


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n")
