"""Any checkpoint as a Megatron-Core checkpoint, one part of one stored tensor at a time."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from pathlib import Path

import torch

from megatron_runtime.checkpoints.checkpoint import Checkpoint
from megatron_runtime.checkpoints.source import LATEST_FILE, RELEASE
from megatron_runtime.checkpoints.torch_dist.arguments import arguments_of
from megatron_runtime.checkpoints.torch_dist.names import Piece, layout_for, pieces, stored_tensors
from megatron_runtime.checkpoints.torch_dist.writer import TorchDistWriter
from megatron_runtime.models.families import FAMILIES


def write_torch_dist(checkpoint: Checkpoint, directory: Path, *, written: Callable[[int], None]) -> None:
    """Write `checkpoint` to `directory`, which exists and is empty, so that Megatron-LM loads from it.

    written: is told the bytes of each part.

    Raises UnsupportedModelError for a model that Megatron-LM has not.
    """
    config = checkpoint.config
    arguments, layout = arguments_of(config), layout_for(config)
    stored = stored_tensors(config, layout)
    found = list(pieces(config, layout))
    names = {piece.name: FAMILIES[config.family].hf_name(piece.name) for piece in found}
    types: dict[str, torch.dtype] = {}
    for piece in found:
        own = checkpoint.kinds[names[piece.name]].dtype
        types[piece.key] = torch.promote_types(types.get(piece.key, own), own)
    release = directory / RELEASE
    release.mkdir()
    with TorchDistWriter(release) as writer:
        for (index, key), group in groupby(sorted(found, key=_place), key=_place):
            part = torch.empty(stored[key].cell, dtype=types[key])
            for piece in group:
                _put(checkpoint.read(names[piece.name]), part, piece)
            start = (*index, *(0 for _ in part.shape))
            writer.add(key, part.view(*(1 for _ in index), *part.shape), shape=stored[key].shape, start=start)
            written(part.numel() * part.element_size())
        writer.finish(arguments)
    (directory / LATEST_FILE).write_text(RELEASE)


def _place(piece: Piece) -> tuple[tuple[int, ...], str]:
    return piece.index, piece.key


def _put(tensor: torch.Tensor, part: torch.Tensor, piece: Piece) -> None:
    at = 0
    for first, count in piece.rows:
        part[first : first + count] = tensor[at : at + count]
        at += count
