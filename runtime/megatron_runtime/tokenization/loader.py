"""From a model reference to its tokenizer."""

from __future__ import annotations

from pathlib import Path

from megatron_runtime.checkpoints.hub import HUB_PREFIX
from megatron_runtime.checkpoints.model_files import ModelDirectory, ModelFileError
from megatron_runtime.checkpoints.source import GGUFSource, ModelSourceError, resolve
from megatron_runtime.tokenization.gguf_tokenizer import tokenizer_from_gguf
from megatron_runtime.tokenization.hf_tokenizer import TOKENIZER_FILE, tokenizer_from_directory, write_tokenizer
from megatron_runtime.tokenization.tokenizer import Tokenizer


class TokenizerLoadError(ValueError):
    """No tokenizer for this model reference. The message names the reference and the remedy."""


def load_tokenizer(model: str, *, renders_chat: bool = True) -> Tokenizer:
    """Return the tokenizer of a model reference.

    model: `builtin:NAME`, `hf:ORG/NAME[@REVISION]`, a .gguf file, or a directory with a tokenizer.json, with one .gguf
           file, or with a Megatron-Core checkpoint and a tokenizer.json.
    renders_chat: with its chat template, which only who speaks to clients needs.
    """
    try:
        path = _locate(model)
    except ModelFileError as error:
        raise TokenizerLoadError(f"the tokenizer of model {model!r} cannot be loaded: {error}") from error
    try:
        load = tokenizer_from_gguf if path.is_file() else tokenizer_from_directory
        return load(path, renders_chat=renders_chat)
    except (ValueError, OSError, MemoryError) as error:
        raise TokenizerLoadError(f"the tokenizer of model {model!r} cannot be loaded: {error}") from error


def _locate(model: str) -> Path:
    if model.startswith(HUB_PREFIX):
        from megatron_runtime.checkpoints.hub.download import tokenizer_directory

        model = str(tokenizer_directory(model))
    directory = Path(model).expanduser()
    if ModelDirectory(directory).file(TOKENIZER_FILE) is not None:
        return directory
    try:
        source = resolve(model)
    except ModelSourceError as error:
        raise TokenizerLoadError(str(error)) from error
    if isinstance(source, GGUFSource):
        return source.path
    if ModelDirectory(source.location).file(TOKENIZER_FILE) is not None:
        return source.location
    raise TokenizerLoadError(f"model {model!r} has no {TOKENIZER_FILE} in {source.location}: complete the directory")


def write_gguf_tokenizer(path: Path, directory: Path) -> list[int]:
    """Write the tokenizer of the .gguf file at `path` to `directory`, as transformers reads it; return its EOS ids.

    Raises what tokenizer_from_gguf raises.
    """
    tokenizer = tokenizer_from_gguf(path)
    write_tokenizer(tokenizer, directory)
    return list(tokenizer.eos_ids)
