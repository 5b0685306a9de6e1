"""Locates the files of a LoRA adapter, in PEFT's layout. This module reads no weights and does not import torch."""

from __future__ import annotations

from pathlib import Path

from megatron_runtime.checkpoints.model_files import ModelDirectory
from megatron_runtime.checkpoints.remote import HUB_PREFIX
from megatron_runtime.protocol.text import shown

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"


class AdapterSourceError(ValueError):
    """Raised if the source has no LoRA adapter. The message names the problem and the remedy."""


def adapter_directory(source: str) -> Path:
    """Return the directory of an adapter, which contains adapter_config.json and adapter_model.safetensors.

    If the adapter is at a hub and not in the cache, its repository is fetched.

    source: "hf:ORG/NAME[@REVISION]" or a directory.

    Raises AdapterSourceError and ModelFileError; for a hub also HubError and HubUnavailableError.
    """
    if source.startswith(HUB_PREFIX):
        # Imported here because the HTTP client takes 0.1 s to import.
        from megatron_runtime.checkpoints.remote.download import cached_directory

        path = cached_directory(source)
    else:
        path = Path(source)
        if not path.is_dir():
            raise AdapterSourceError("the directory does not exist: name one that every engine can read")
    directory = ModelDirectory(path)
    config = directory.file(CONFIG_FILE)
    missing = [name for name in (CONFIG_FILE, WEIGHTS_FILE) if directory.file(name) is None]
    if config is None or missing:
        raise AdapterSourceError(f"there is no {' and no '.join(missing)}: save the adapter with PEFT as safetensors")
    kind = config.read_json().get("peft_type")
    if kind != "LORA":
        raise AdapterSourceError(f"{CONFIG_FILE} has the peft_type {shown(kind)}: only LORA is supported")
    return path
