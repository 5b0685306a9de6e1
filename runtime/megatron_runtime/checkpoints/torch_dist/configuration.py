"""The configuration of the model in a Megatron-Core checkpoint: config.json beside it, or arguments in common.pt."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_runtime.checkpoints.checkpoint import UnsupportedModelError
from megatron_runtime.checkpoints.inert_pickle import ordered_dict, read_pickle
from megatron_runtime.checkpoints.model_files import ModelDirectory, ModelFile
from megatron_runtime.checkpoints.safetensors import read_config as read_config_json
from megatron_runtime.checkpoints.torch_dist.archive import saved_archive
from megatron_runtime.checkpoints.torch_dist.arguments import config_json_of
from megatron_runtime.models.config import ModelConfig
from megatron_runtime.models.families import config_from_hf

CONFIG_FILE, COMMON_FILE = "config.json", "common.pt"

_TRUSTED: Mapping[tuple[str, str], Any] = {
    ("argparse", "Namespace"): Namespace,
    ("collections", "OrderedDict"): ordered_dict,
}


def read_config(directory: Path) -> ModelConfig:
    """config.json, in the directory of the checkpoint or the one above, is believed before the arguments.

    Raises UnsupportedModelError, UnsafePickleError, DamagedFileError.
    """
    for place in (directory, directory.parent):
        if ModelDirectory(place).file(CONFIG_FILE) is not None:
            return read_config_json(place)
    file = ModelDirectory(directory).file(COMMON_FILE)
    if file is None:
        raise UnsupportedModelError(
            f"{directory} has neither {CONFIG_FILE} nor {COMMON_FILE}: put the model's {CONFIG_FILE} there"
        )
    where = str(file.path)
    return config_from_hf(config_json_of(read_arguments(file), where=where), ends=(), where=where)


def read_arguments(common: ModelFile) -> dict[str, Any]:
    """The arguments in a common.pt that are plain values; all else in it is passed over, and nothing of it is run."""
    path = common.path
    with common.open() as file, saved_archive(file, where=str(path)) as archive:
        pickled = archive.pickle()
    # The arguments of a training name classes of whatever it was run with; none of them is needed, none is imported.
    found = read_pickle(
        pickled, where=str(path), trusted=_TRUSTED, opaque=lambda module, name: True, persistent=lambda pid: None
    )
    arguments = found.get("args") if isinstance(found, dict) else None
    if not isinstance(arguments, Namespace):
        raise UnsupportedModelError(f"{path} holds no arguments of a training: put the model's {CONFIG_FILE} beside")
    return {name: value for name, value in vars(arguments).items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    """A scalar, or a flat list of scalars: nested ones could have more values than memory."""
    if isinstance(value, list | tuple):
        return all(map(_is_scalar, value))
    return _is_scalar(value)


def _is_scalar(value: Any) -> bool:
    if isinstance(value, int):
        return -(1 << 63) <= value < 1 << 63
    return value is None or isinstance(value, float | str)
