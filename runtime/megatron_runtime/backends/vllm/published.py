"""Receives a trainer's weights into a model directory in shared memory, and offers the weights to other engines.

vLLM loads the weights from this directory in the same way as from any model directory. The directory contains the
trainer's manifest, so that any process of this engine can offer the weights again.
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import torch
from safetensors import safe_open

from megatron_runtime.backends.copies import open_weight_port
from megatron_runtime.backends.vllm.models import MANIFEST_FILE, require_same_shapes, weight_files
from megatron_runtime.checkpoints.published import WeightStream
from megatron_runtime.checkpoints.safetensors import INDEX_FILE, num_bytes, write_safetensors
from megatron_runtime.distributed.weight_port import Offer, OfferedTensors, WeightPort
from megatron_runtime.engine.settings import EngineSettings
from megatron_runtime.models.tensors import TensorKind
from megatron_runtime.process.progress import PROGRESS, Stage
from megatron_runtime.protocol.published_weights import (
    VALUE_BYTES,
    PublishedSource,
    WeightsManifest,
    WeightsUnavailableError,
    digest_of,
)

logger = logging.getLogger(__name__)


def receive(source: str, directory: Path, *, model: Path, current: Path, keys_dir: Path | None) -> None:
    """Receive weights from an engine that `source` names or, if that fails, from the trainer. Verify every block.

    directory: model directory to create, with the weights and with links to the other files of `model`.
    current:   directory of the weights in use. The received tensors must have the same names and shapes.

    Raises WeightsUnavailableError, KeyFileError, and ValueError for tensors of another model or for a lack of memory.
    """
    reference = PublishedSource.parse(source)
    for engine in (*reference.copies[:1], ""):
        try:
            with WeightStream(reference, keys_dir=keys_dir, engine=engine) as stream:
                _write(stream, directory, model=model, current=current)
            return
        except BaseException as error:
            shutil.rmtree(directory, ignore_errors=True)
            if not engine or not isinstance(error, WeightsUnavailableError):
                raise
            logger.warning("asking the trainer instead: %s", error)


def _write(stream: WeightStream, directory: Path, *, model: Path, current: Path) -> None:
    tensors = stream.manifest.tensors
    stored = [tensor.name for tensor in tensors if tensor.dtype not in VALUE_BYTES]
    if stored:
        raise stream.unavailable(f"tensor {stored[0]!r} has other types than a trainer publishes")
    require_same_shapes({tensor.name: tensor.shape for tensor in tensors}, current, where="of the trainer")
    kinds = {tensor.name: TensorKind(tensor.shape, getattr(torch, tensor.dtype)) for tensor in tensors}
    numbers = {tensor.name: number for number, tensor in enumerate(tensors)}
    directory.mkdir()
    size, free = sum(map(num_bytes, kinds.values())), shutil.disk_usage(directory).free
    if size > free:
        raise ValueError(
            f"the weights of the trainer have {size >> 20} MiB, {directory.parent.parent} has {free >> 20} MiB free: "
            "raise the memory limit of the engine's container, or --shm-size of docker"
        )
    received = 0

    def read(name: str) -> torch.Tensor:
        number, kind = numbers[name], kinds[name]
        tensor = torch.empty(kind.shape, dtype=kind.dtype)
        for block in range(tensors[number].num_blocks):
            tensor[tensors[number].rows(block)] = stream.block(number, block)
        return tensor

    def note(count: int) -> None:
        nonlocal received
        received += count
        PROGRESS.report(Stage.DOWNLOAD, received, size)

    write_safetensors(kinds, directory, read=read, written=note)
    for file in model.iterdir():
        is_weights = file.suffix == ".safetensors" or file.name == INDEX_FILE
        if not is_weights and not file.name.startswith("."):
            (directory / file.name).symlink_to(file.absolute())
    (directory / MANIFEST_FILE).write_bytes(stream.manifest_data)  # the last file: the directory is complete


class CopyPort:
    """A port on which this engine offers received weights to other engines. It opens at the first offer."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._port: WeightPort | None = None

    def offer(self, directory: Path) -> str:
        """Withdraw the last offer. If a trainer published the weights in `directory`, offer these weights.

        Returns the address at which engines get the weights; empty if none are offered or the port cannot be opened.
        """
        manifest = directory / MANIFEST_FILE
        if not manifest.exists():
            if self._port is not None:
                self._port.offer()
            return ""
        try:
            self._port = self._port or open_weight_port(self._settings)
        except (OSError, ValueError) as error:
            logger.error("other engines cannot get weights from this one: %s", error)
            return ""
        data = manifest.read_bytes()
        parsed, tensors = WeightsManifest.from_bytes(data), _mapped(directory)
        named = [(tensor.name, tensors[tensor.name]) for tensor in parsed.tensors]
        offered = OfferedTensors(named, epoch=parsed.epoch, manifest=data)
        self._port.offer(Offer(f"{parsed.epoch}-{digest_of(data)}", offered))
        return self._port.address

    def close(self) -> None:
        if self._port is not None:
            self._port.close()


def _mapped(directory: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a directory, mapped into memory."""
    tensors: dict[str, torch.Tensor] = {}
    for file in weight_files(directory):
        with safe_open(file, framework="pt") as opened:
            tensors.update((name, opened.get_tensor(name)) for name in opened.keys())  # noqa: SIM118
    return tensors
