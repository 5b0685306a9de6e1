"""Resolves model references to files on this machine. This module reads no weights and does not import torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from megatron_runtime.checkpoints.adapters import CONFIG_FILE as ADAPTER_CONFIG_FILE
from megatron_runtime.checkpoints.builtin import BUILTINS, builtin_file
from megatron_runtime.checkpoints.gguf_metadata import gguf_parts
from megatron_runtime.checkpoints.model_files import ModelDirectory, ModelFile, ModelFileError
from megatron_runtime.checkpoints.remote import HUB_PREFIX, REMOTE_PREFIXES
from megatron_runtime.protocol.published_weights import is_published
from megatron_runtime.protocol.text import shown

IN_MEMORY = "memory:"
"""The `source` of a weight update from the model in the program's memory.

Only engines in the same process can read it.
"""
BUILTIN_PREFIX = "builtin:"
_KNOWN = ", ".join(BUILTIN_PREFIX + name for name in BUILTINS)
LATEST_FILE, RELEASE = "latest_checkpointed_iteration.txt", "release"
"""The file in which Megatron-LM names the checkpoint to load, and the name that stands for weights without training
state.
"""
_INDEX_FILE = ".metadata"
_LATEST_BYTES = 64


class ModelSourceError(ValueError):
    """Raised if a model reference does not lead to a model. The message names the reference and the remedy."""


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model that is stored in files.

    format: "GGUF" for a .gguf file or its parts; "SafeTensors" for a directory with config.json and *.safetensors in
            the layout of transformers; "TorchDist" for a Megatron-Core checkpoint; "Packed" for a directory with
            config.json and model.packed.
    path: the (first) .gguf file, or the directory. The directory of a Megatron-Core checkpoint contains `.metadata`.
          Its config.json and tokenizer are in this directory or in the directory above.
    """

    format: Literal["GGUF", "SafeTensors", "TorchDist", "Packed"]
    path: Path

    @property
    def location(self) -> Path:
        """The file or directory that contains the tokenizer."""
        tokenizer = find_beside(self, "tokenizer.json")
        return self.path if tokenizer is None else tokenizer.path.parent


@dataclass(frozen=True, slots=True, eq=False)
class ModelInMemory:
    """A model in the memory of the program: its Checkpoint, and its name for messages.

    reopen: returns a new Checkpoint of the model's current weights, which the program may have trained in the meantime.
    records_routing: whether the model's configuration requests that the engine records the experts of each token.
    """

    checkpoint: Any  # not typed as Checkpoint, because its module needs torch and servers import this module
    name: str
    reopen: Callable[[], Any] | None = None
    records_routing: bool = False
    format: ClassVar[str] = "memory"

    @property
    def location(self) -> Path:
        raise ModelSourceError(f"{self.name} is in memory: it has no tokenizer of its own, give one")


@dataclass(frozen=True, slots=True)
class PublishedModel:
    """Weights that a trainer publishes, as a source for an engine that has the model's configuration and tokenizer.

    source:   "trainer://HOST:PORT/EPOCH-DIGEST", optionally with the addresses of engines that have copies; see
              PublishedSource.
    config:   ModelConfig of the engine's model.
    keys_dir: directory of engine.key, engine.pub and trainer.pub; None means no encryption.
    """

    source: str
    config: Any
    keys_dir: Path | None
    format: ClassVar[str] = "published"

    def __str__(self) -> str:
        return self.source

    @property
    def location(self) -> Path:
        raise ModelSourceError(f"{self.source} has no tokenizer: the model of the engine has it")


@dataclass(frozen=True, slots=True)
class Trainer:
    """The weights that a trainer has published last, for use as `source` of a weight update in a program with
    MegatronLLM.

    address: "HOST:PORT" of the trainer's WeightServer.
    keys:    directory of engine.key, engine.pub and trainer.pub; None means no encryption.
    """

    address: str
    keys: Path | None = None


ModelSource = StoredModel | ModelInMemory | PublishedModel


def resolve(model: str) -> StoredModel:
    """Return the location of the weights of `model` on this machine.

    Weights at a hub or in an object store are fetched unless they are cached.

    model: "builtin:NAME", "hf:ORG/NAME[@REVISION]", the URL of an object store, a .gguf file (any part if the model has
           several), or a directory. The directory contains config.json with safetensors or model.packed, the .gguf
           files of one model, a Megatron-Core checkpoint, or the checkpoints of a Megatron-LM training run.

    Raises ModelSourceError and ModelFileError; for a hub or a store also HubError and HubUnavailableError.
    """
    if model == IN_MEMORY:
        raise ModelSourceError(
            f"model {model!r} is in the memory of another program: give a path that every engine can read"
        )
    if is_published(model):
        raise ModelSourceError(
            f"model {model!r} is a reference to weights of a trainer: give the model that the engine starts with"
        )
    if model.startswith(BUILTIN_PREFIX):
        name = model.removeprefix(BUILTIN_PREFIX)
        if name not in BUILTINS:
            raise ModelSourceError(f"model {model!r} is not built in: use {_KNOWN}, a .gguf file or a model directory")
        try:
            return StoredModel("GGUF", builtin_file(name))
        except (ModelFileError, OSError) as error:
            raise ModelSourceError(f"model {model!r} cannot be used: {error}") from error
    if model.startswith(REMOTE_PREFIXES):
        # Imported here because the HTTP client takes 0.1 s to import.
        from megatron_runtime.checkpoints.remote.download import cached_directory

        return resolve(str(cached_directory(model)))
    path = Path(model).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelSourceError(f"model {model!r} is a file but not a .gguf file: give a .gguf file or a directory")
        return StoredModel("GGUF", gguf_parts(path)[0])
    if not path.is_dir():
        raise ModelSourceError(
            f"model {model!r} does not exist: give {_KNOWN}, {HUB_PREFIX}ORG/NAME, s3://BUCKET/PREFIX, a .gguf file or "
            "a model directory"
        )
    directory = ModelDirectory(path)
    distributed = _torch_dist(directory, model)
    if distributed is not None:
        return distributed
    has_config = directory.file("config.json") is not None
    if has_config and directory.files(".packed"):
        return StoredModel("Packed", path)
    has_weights = bool(directory.files(".safetensors"))
    if has_config and has_weights:
        return StoredModel("SafeTensors", path)
    # A projector of images is a file of its own, whose name contains "mmproj".
    files = [file.path for file in directory.files(".gguf") if "mmproj" not in file.path.name.lower()]
    if (has_config or has_weights) and not files:
        missing = "*.safetensors files" if has_config else "config.json"
        remedy = "complete the directory"
        if directory.file(ADAPTER_CONFIG_FILE) is not None:
            remedy = "it holds an adapter, name the directory of its base model or of both merged"
        elif directory.files(".bin"):
            remedy = "*.bin files are pickles and are not read, save the model as safetensors"
        raise ModelSourceError(f"model {model!r} has no {missing} in {path}: {remedy}")
    models = {gguf_parts(file)[0] for file in files}
    if len(models) != 1:
        raise ModelSourceError(
            f"model {model!r}: {path} holds {len(files)} .gguf files of {len(models)} models and no config.json with "
            "safetensors: name one .gguf file or complete the directory"
        )
    return StoredModel("GGUF", models.pop())


def require_format(source: ModelSource, wanted: str, *, model: str) -> None:
    """Raise ValueError unless `wanted` is "Auto" or the format of `source`.

    model: the model reference, for the error.
    """
    if wanted not in ("Auto", source.format):
        raise ValueError(f"format={wanted}: model {model!r} is {source.format}: use Auto or {source.format}")


def find_beside(source: ModelSource, name: str) -> ModelFile | None:
    """Return the file `name` in the directory of a model's weights; None if there is no such file.

    Raises ModelFileError.
    """
    places: tuple[Path, ...] = ()
    if isinstance(source, StoredModel) and source.format != "GGUF":
        places = (source.path, source.path.parent) if source.format == "TorchDist" else (source.path,)
    files = (ModelDirectory(place).file(name) for place in places)
    return next((file for file in files if file is not None), None)


def _torch_dist(directory: ModelDirectory, model: str) -> StoredModel | None:
    if directory.file(_INDEX_FILE) is not None:
        return StoredModel("TorchDist", directory.path)
    latest = directory.file(LATEST_FILE)
    if latest is None:
        return None
    # Megatron-LM writes an iteration number, or RELEASE for weights without training state.
    word = latest.read_text(_LATEST_BYTES).strip()
    checkpoint = directory.directory(f"iter_{int(word):07}" if word.isdecimal() else RELEASE)
    if checkpoint.file(_INDEX_FILE) is None:
        raise ModelSourceError(
            f"model {model!r}: {latest.path} says {shown(word)}, but {checkpoint.path} holds no torch_dist checkpoint: "
            f"save with --ckpt-format torch_dist, or name a directory with {_INDEX_FILE}"
        )
    return StoredModel("TorchDist", checkpoint.path)
