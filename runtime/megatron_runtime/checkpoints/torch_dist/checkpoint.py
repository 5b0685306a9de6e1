"""Read any part of any tensor of a Megatron-Core checkpoint from the mapped files."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from itertools import product
from pathlib import Path

import torch

from megatron_runtime.checkpoints.mapped import MappedFile
from megatron_runtime.checkpoints.model_files import ModelDirectory, ModelFileError
from megatron_runtime.checkpoints.torch_dist.configuration import read_config
from megatron_runtime.checkpoints.torch_dist.names import (
    HEAD,
    VOCABULARY_KEYS,
    Piece,
    Stored,
    find_layout,
    pieces,
    stored_tensors,
)
from megatron_runtime.checkpoints.torch_dist.saved_files import Chunk, SavedTensor, TensorIndex, find_tensor, read_index
from megatron_runtime.models.config import UnsupportedModelError
from megatron_runtime.models.families import FAMILIES
from megatron_runtime.models.tensors import Part, TensorKind
from megatron_runtime.protocol.text import escaped, shown

_TRAINING_PREFIXES = ("optimizer.", "chained_", "rng_state", "rerun_state_machine_state", "opt_param_scheduler")
_MAX_PLACES = 1 << 20
"""Limit of the number of indices on the leading axes that the chunks of one stored tensor cover."""


class TorchDistCheckpoint:
    """Implements Checkpoint. The constructor reads the index and rejects missing and unknown tensors and wrong shapes.

    directory: has `.metadata`.

    Raises UnsupportedModelError, ModelFileError, UnsafePickleError.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        index = read_index(directory)
        weights = {key for key in index if not key.startswith(_TRAINING_PREFIXES) and not key.endswith("._extra_state")}
        layout = find_layout(weights)
        self.config = read_config(directory)
        stored = stored_tensors(self.config, layout)
        if self.config.tie_embeddings:
            # Some programs save a head although it is tied to the embedding.
            weights.discard(layout.prefix + HEAD)
        _require_fit(stored, index, weights, directory)
        hf_name = FAMILIES[self.config.family].hf_name
        self._pieces = {hf_name(piece.name): piece for piece in pieces(self.config, layout)}
        self._chunks = {key: _chunks_by_place(index[key], axes=len(tensor.grid)) for key, tensor in stored.items()}
        self._files: dict[str, MappedFile] = {}
        self._saved: dict[Chunk, SavedTensor] = {}
        self.kinds: Mapping[str, TensorKind] = {
            name: TensorKind(piece.shape, index[piece.key].dtype) for name, piece in self._pieces.items()
        }

    def read(self, name: str, part: Part = ()) -> torch.Tensor:
        """Return a copy of the tensor, or of a part of it."""
        piece, dtype = self._pieces[name], self.kinds[name].dtype
        cuts = (*part, *(slice(None) for _ in piece.shape[len(part) :]))
        rows, *columns = (range(extent)[cut] for extent, cut in zip(piece.shape, cuts, strict=True))
        out = torch.empty(len(rows), len(columns[0]) if columns else 1, dtype=dtype)
        filled = self._fill(out, piece, rows=rows, columns=columns[0] if columns else range(1))
        if filled != out.nbytes:
            raise ModelFileError(
                f"{self._directory} holds {filled} of the {out.nbytes} bytes of {name!r}: a part was not saved"
            )
        return out if columns else out.view(-1)

    def blocks(self, name: str, part: Part = (), *, wanted: Container[int]) -> None:
        return None

    def _fill(self, out: torch.Tensor, piece: Piece, *, rows: range, columns: range) -> int:
        """Copy `rows` and `columns` of the piece to `out`; return the number of bytes."""
        filled = at = 0
        size, data = out.itemsize, out.view(torch.uint8)
        for first, count in piece.rows:
            # In the stored tensor, these rows of the piece begin `shift` rows later.
            shift, own = first - at, _overlap(rows, range(at, at + count))
            at += count
            for chunk in self._chunks[piece.key].get(piece.index, ()) if own else ():
                # A vector has one column.
                held_rows, held_columns, *_ = *chunk.box[len(piece.index) :], range(1)
                down = _overlap(range(own.start + shift, own.stop + shift), held_rows)
                across = _overlap(columns, held_columns)
                if not down or not across:
                    continue
                source = self._values(chunk, piece.index, out.dtype).view(len(held_rows), -1)[
                    down.start - held_rows.start : down.stop - held_rows.start,
                    (across.start - held_columns.start) * size : (across.stop - held_columns.start) * size,
                ]
                top, left = down.start - shift - rows.start, across.start - columns.start
                data[top : top + len(down), left * size : (left + len(across)) * size] = source
                filled += source.numel()
        return filled

    def _values(self, chunk: Chunk, index: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return the bytes of a chunk at one index of the leading axes. Raises ModelFileError for another type."""
        if chunk.file not in self._files:
            found = ModelDirectory(self._directory).file(chunk.file)
            if found is None:
                raise ModelFileError(f"{self._directory / chunk.file} is missing: copy the whole directory")
            self._files[chunk.file] = MappedFile(found)
        file = self._files[chunk.file]
        if chunk not in self._saved:
            saved = find_tensor(file.file, offset=chunk.offset, length=chunk.length)
            shape = tuple(map(len, chunk.box))
            if (saved.shape, saved.dtype) != (shape, dtype):
                raise ModelFileError(
                    f"{file.file.path} at byte {chunk.offset} has shape {saved.shape} and type {saved.dtype}, "
                    f"the index says {shape} and {dtype}"
                )
            self._saved[chunk] = saved
        place = tuple(at - axis.start for at, axis in zip(index, chunk.box, strict=False))
        return self._saved[chunk].bytes_in(file)[place]


def _overlap(one: range, other: range) -> range:
    start = max(one.start, other.start)
    return range(start, max(start, min(one.stop, other.stop)))


def _chunks_by_place(index: TensorIndex, *, axes: int) -> dict[tuple[int, ...], list[Chunk]]:
    """Return the chunks of a stored tensor by index on the leading axes; a chunk may span several indices."""
    found: dict[tuple[int, ...], list[Chunk]] = {}
    count = 0
    for chunk in index.chunks:
        count += math.prod(map(len, chunk.box[:axes]))
        if count > _MAX_PLACES:
            raise ModelFileError(f"a tensor has more than {_MAX_PLACES} parts: save the checkpoint again")
        for place in product(*chunk.box[:axes]):
            found.setdefault(place, []).append(chunk)
    return found


def _require_fit(
    stored: Mapping[str, Stored], index: Mapping[str, TensorIndex], weights: set[str], directory: Path
) -> None:
    missing, extra = sorted(set(stored) - weights), sorted(weights - set(stored))
    if missing or extra:
        lists = [
            f"{what} {len(keys)}: {', '.join(map(escaped, keys[:6]))}"
            for what, keys in (("lacks", missing), ("has", extra))
            if keys
        ]
        raise UnsupportedModelError(
            f"{directory} does not hold the model its configuration describes; of its {len(stored)} tensors it "
            f"{'; beside them it '.join(lists)}: correct config.json or the arguments, or save the model again"
        )
    for key, wanted in stored.items():
        shape = index[key].shape
        padded = key.endswith(VOCABULARY_KEYS) and len(shape) == 2 and shape[0] > wanted.rows
        if shape != wanted.shape and not (padded and shape[1] == wanted.columns):
            raise UnsupportedModelError(
                f"tensor {shown(key)} of {directory} has shape {shape}: "
                f"the model's configuration asks for {wanted.shape}"
            )
        if not index[key].dtype.is_floating_point:
            raise UnsupportedModelError(
                f"tensor {key!r} of {directory} has type {index[key].dtype}: want floating point"
            )
