"""The files of a model for vLLM: a directory with config.json and safetensors, as transformers writes it."""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from safetensors import safe_open

from megatron_runtime.checkpoints.model_files import ModelDirectory, ModelFileError, end_tokens
from megatron_runtime.checkpoints.source import StoredModel, require_format, resolve

TensorTypes = dict[str, tuple[str, tuple[int, ...]]]
"""Type and shape of each tensor by its name."""


def model_directory(model: str, *, wanted_format: str = "Auto") -> Path:
    """Return the directory of a model that vLLM can read. Models of other formats are converted once, to bfloat16.

    model:         as for checkpoints.source.resolve().
    wanted_format: "Auto", or the only format that is accepted.

    Raises the errors of resolve(), require_format() and convert().
    """
    source = resolve(model)
    require_format(source, wanted_format, model=model)
    if source.format == "SafeTensors":
        return source.path
    directory = _cache() / _fingerprint(source)
    directory.parent.mkdir(parents=True, exist_ok=True)
    with (directory.parent / f"{directory.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # engines that start together convert it once
        if not (directory / "config.json").exists():
            # Only a conversion needs torch.
            from megatron_runtime.checkpoints.convert import convert
            from megatron_runtime.tokenization.loader import write_gguf_tokenizer

            convert(source, directory, dtype="bfloat16", write_gguf_tokenizer=write_gguf_tokenizer)
    return directory


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatron" / "converted"


def _fingerprint(source: StoredModel) -> str:
    """Return a name that changes with the files of a model."""
    files = [source.path] if source.path.is_file() else sorted(source.path.rglob("*"))
    facts = [f"{file.resolve()} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:24]


def weights_digest(directory: Path) -> str:
    """Return the SHA-256 of the names and contents of a model's weight files."""
    files = _weight_files(directory)
    with ThreadPoolExecutor(min(len(files), os.cpu_count() or 1)) as pool:
        digests = pool.map(_file_digest, files)
    lines = (f"{file.name} {digest}" for file, digest in zip(files, digests, strict=True))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def require_same_tensors(directory: Path, other: Path) -> None:
    """Raise ValueError if the tensors of two models differ in name, type or shape."""
    found, wanted = _tensor_types(directory), _tensor_types(other)
    for name in sorted(found.keys() | wanted.keys()):
        if found.get(name) != wanted.get(name):
            raise ValueError(
                f"tensor {name} at {directory} is {found.get(name, 'absent')}, the weights in use have "
                f"{wanted.get(name, 'none')}: give weights of the same model"
            )


def _tensor_types(directory: Path) -> TensorTypes:
    types: TensorTypes = {}
    for file in _weight_files(directory):
        with safe_open(file, framework="np") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is not a mapping
                described = opened.get_slice(name)
                types[name] = described.get_dtype(), tuple(described.get_shape())
    return types


def eos_ids(directory: Path) -> tuple[int, ...]:
    """Return the tokens that end an answer of a model."""
    place = ModelDirectory(directory)
    config = place.file("config.json")
    if config is None:
        raise ModelFileError(f"{directory} has no config.json: complete the directory")
    return end_tokens(place, config.read_json())


def _weight_files(directory: Path) -> Sequence[Path]:
    files = [file.path for file in ModelDirectory(directory).files(".safetensors")]
    if not files:
        raise ModelFileError(f"{directory} has no *.safetensors files: complete the directory")
    return files


def _file_digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
