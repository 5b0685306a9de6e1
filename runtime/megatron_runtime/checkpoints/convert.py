"""Converts a checkpoint to another format, together with the configuration and the tokenizer of the model."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch

from megatron_runtime.checkpoints.checkpoint import open_checkpoint
from megatron_runtime.checkpoints.model_files import MAX_TOKENIZER_BYTES
from megatron_runtime.checkpoints.packed import write_packed
from megatron_runtime.checkpoints.safetensors import num_bytes, write_safetensors
from megatron_runtime.checkpoints.source import ModelSource, find_beside, resolve
from megatron_runtime.checkpoints.torch_dist.checkpoint import write_torch_dist
from megatron_runtime.models.config import ModelConfig
from megatron_runtime.models.families import config_to_hf
from megatron_runtime.models.layers.cpu import FORMATS, numbers_of
from megatron_runtime.models.tensors import Checkpoint, Part, TensorKind
from megatron_runtime.models.weights import require_fitting
from megatron_runtime.protocol import strict_json as json

Format = Literal["safetensors", "torch_dist", "packed"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

GGUFTokenizerWriter = Callable[[Path, Path], Sequence[int]]
"""Writes the tokenizer of a .gguf file to a directory in transformers' format. Returns the ids of its end tokens."""

CONFIG_FILE, GENERATION_FILE = "config.json", "generation_config.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/tool_use.jinja",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)


class DestinationError(ValueError):
    """Raised if the destination cannot be written. The message names the directory and the remedy."""


def convert(
    source: ModelSource | str,
    directory: Path,
    *,
    to: Format = "safetensors",
    dtype: str = "keep",
    replace: bool = False,
    write_gguf_tokenizer: GGUFTokenizerWriter | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Write the weights, configuration and tokenizer of the model at `source` to `directory`.

    source:    a model reference, or the result of `resolve`.
    directory: destination, which this function creates when all files are complete.
    to:        "safetensors" for transformers, "torch_dist" for Megatron-LM, "packed" for engines on the CPU.
    dtype:     type of the weights: "float32", "bfloat16", "float16", or "keep" for the type in the source. "keep"
               stores quantized tensors as float32. The format "packed" also accepts "int8" and "int4", with which
               matrices that are quantized in the source keep their quantization blocks. For "packed", "keep" selects
               the type that an engine with dtype "auto" would select.
    replace:   whether to replace an existing `directory`.
    write_gguf_tokenizer: converts the tokenizer of a GGUF file; None leaves this tokenizer out.
    progress:  called with the number of bytes written so far and the total number.

    Only one tensor is in memory at a time. Raises DestinationError, UnsupportedModelError, ValueError for an unknown
    dtype, and the errors of the source's format.
    """
    resolved = resolve(source) if isinstance(source, str) else source
    opened = open_checkpoint(resolved)
    allowed = ("keep", *(FORMATS if to == "packed" else DTYPES))
    if dtype not in allowed:
        raise ValueError(f"dtype={dtype!r} cannot be written as {to}: use {', '.join(allowed)}")
    checkpoint = opened if to == "packed" else _OfType(opened, DTYPES.get(dtype))
    require_fitting(checkpoint)
    total = sum(map(num_bytes, checkpoint.kinds.values()))
    done = 0

    def written(count: int) -> None:
        nonlocal done
        done += count
        progress(done, total)

    with new_directory(directory, replace=replace) as partial:
        if to == "torch_dist":
            write_torch_dist(checkpoint, partial, written=written)
        elif to == "packed":
            numbers = numbers_of("auto" if dtype == "keep" else dtype, checkpoint).weights
            write_packed(checkpoint, partial, numbers=numbers, written=written)
        else:
            write_safetensors(checkpoint.kinds, partial, read=checkpoint.read, written=written)
        types = {str(kind.dtype).removeprefix("torch.") for kind in checkpoint.kinds.values() if len(kind.shape) > 1}
        own = find_beside(resolved, CONFIG_FILE)
        # Start from the model's own config.json, which may have fields that are unknown to this runtime.
        values = config_to_hf(checkpoint.config) if own is None else own.read_json()
        for name in (
            "torch_dtype",
            "quantization_config",
        ):  # wrong for the dequantized weights
            values.pop(name, None)
        _write_json(partial / CONFIG_FILE, {**values, "dtype": min(types)})
        write_text_files(checkpoint.config, resolved, partial, write_gguf_tokenizer=write_gguf_tokenizer)


class _OfType(Checkpoint):
    """A wrapper of a checkpoint that returns dense tensors, converted to `dtype` unless `dtype` is None."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype | None) -> None:
        self._checkpoint = checkpoint
        self.config = checkpoint.config
        self.kinds = {name: TensorKind(kind.shape, dtype or kind.dtype) for name, kind in checkpoint.kinds.items()}

    def read(self, name: str, part: Part = ()) -> torch.Tensor:
        return self._checkpoint.read(name, part).to(self.kinds[name].dtype)


def write_text_files(
    config: ModelConfig,
    source: ModelSource,
    directory: Path,
    *,
    write_gguf_tokenizer: GGUFTokenizerWriter | None = None,
) -> None:
    """Write the tokenizer, the chat template, and generation_config.json with the ids of the tokens that end an answer.

    The tokenizer of a GGUF file can have more of these ids than `config`.
    """
    for name in (*TOKENIZER_FILES, GENERATION_FILE):
        file = find_beside(source, name)
        if file is not None:
            (directory / name).parent.mkdir(exist_ok=True)
            (directory / name).write_bytes(file.read_bytes(MAX_TOKENIZER_BYTES))
    ends = config.eos_token_ids
    if source.format == "GGUF" and write_gguf_tokenizer is not None:
        ends = tuple(dict.fromkeys((*ends, *write_gguf_tokenizer(source.location, directory))))
    if ends and not (directory / GENERATION_FILE).exists():
        _write_json(directory / GENERATION_FILE, {"eos_token_id": list(ends), "bos_token_id": config.bos_token_id})


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n")


@contextmanager
def new_directory(directory: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yield an empty directory next to `directory`, in which the `with` block writes files.

    At the end of the block, the new directory is renamed to `directory`. If the block fails, the new directory is
    removed. If the process is killed, the next process that calls this function removes the files.

    replace: whether the new directory takes the place of an existing `directory`. If False, `directory` must be absent
             or empty.

    Raises DestinationError.
    """
    directory = directory.absolute()
    if directory.exists() and not directory.is_dir():
        raise DestinationError(f"{directory} is not a directory: name a new one")
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial, replaced = (directory.with_name(f".{directory.name}.{end}") for end in ("partial", "replaced"))
    lock = _lock(partial)
    try:
        if replaced.is_dir() and not directory.exists():
            replaced.rename(directory)  # a process was killed between two renames
        shutil.rmtree(replaced, ignore_errors=True)
        if not replace and directory.is_dir() and any(directory.iterdir()):
            raise DestinationError(f"{directory} is not empty: name a new directory, or let it be replaced")
        for entry in partial.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
        yield partial
        for root, _, files in os.walk(partial):
            for path in (*(Path(root, name) for name in files), Path(root)):
                _sync(path)
        if directory.is_dir():
            directory.rename(replaced)
        partial.rename(directory)
        _sync(directory.parent)
        shutil.rmtree(replaced, ignore_errors=True)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def _lock(partial: Path) -> int:
    """Lock a partial directory, so that only one process writes to it.

    The kernel releases the lock if this process exits.
    """
    partial.mkdir(exist_ok=True)
    held = os.open(partial, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(held).st_ino != partial.stat().st_ino:
            raise BlockingIOError(f"{partial} was just replaced")
    except OSError as error:
        os.close(held)
        raise DestinationError(f"another process is writing {partial}: wait for it or choose another name") from error
    return held


def _sync(path: Path) -> None:
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
