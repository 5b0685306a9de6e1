"""Base class of checkpoints whose tensors are assembled from chunks of Megatron-Core's tensors."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Generic, Protocol, TypeVar

import torch

from megatron_runtime.checkpoints.model_files import ModelFileError
from megatron_runtime.checkpoints.torch_dist.names import (
    EMBEDDING,
    HEAD,
    Layout,
    Stored,
    find_layout,
    pieces,
    stored_tensors,
)
from megatron_runtime.models.config import ModelConfig, UnsupportedModelError
from megatron_runtime.models.families import FAMILIES
from megatron_runtime.models.tensors import Checkpoint, Part, TensorKind
from megatron_runtime.protocol.text import escaped, shown

_MAX_PLACES = 1 << 20
"""Maximum number of indices on the leading axes that the chunks of one stored tensor may cover."""


class Chunk(Protocol):
    """A rectangular part of a stored tensor: one range of indices per axis."""

    @property
    def box(self) -> tuple[range, ...]: ...


C = TypeVar("C", bound=Chunk)


@dataclass(frozen=True, slots=True)
class TensorIndex(Generic[C]):
    """The description of a stored tensor: its whole shape and its chunks."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[C, ...]


class ChunkedCheckpoint(Checkpoint, Generic[C]):
    """Base class of checkpoints whose stored tensors consist of chunks, in files or in a live model.

    The constructor raises an error for unknown tensors, missing tensors and wrong shapes.

    index:  all tensors of Megatron-Core's model, by key.
    where:  name of the file or model that holds the tensors, for errors.
    remedy: text that says what to do if tensors do not fit the configuration.
    absent: type of the tensors that `index` can lack because other ranks hold them; None if `index` must be complete.

    Raises UnsupportedModelError or ModelFileError.
    """

    def __init__(
        self,
        config: ModelConfig,
        index: Mapping[str, TensorIndex[C]],
        *,
        where: str,
        remedy: str,
        absent: torch.dtype | None = None,
    ) -> None:
        self.config = config
        self._where = where
        layout = find_layout(index)
        stored = stored_tensors(config, layout)
        _require_fit(stored, index, layout, config, where, remedy, may_lack=absent is not None)
        hf_name = FAMILIES[config.family].hf_name
        self._pieces = {hf_name(piece.name): piece for piece in pieces(config, layout)}
        self._chunks = {
            key: _chunks_by_place(index[key], axes=len(tensor.grid)) for key, tensor in stored.items() if key in index
        }
        self.kinds = {
            name: TensorKind(piece.shape, index[piece.key].dtype if piece.key in index else absent or torch.float32)
            for name, piece in self._pieces.items()
        }

    @abstractmethod
    def _values(self, chunk: C, index: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return the bytes of a chunk at one index of the leading axes, uint8 [*other axes, itemsize].

        Raises ModelFileError if the type of the chunk is not `dtype`.
        """

    @abstractmethod
    def _incomplete(self, name: str, *, held: int, wanted: int) -> Exception:
        """Return the error for a read of `wanted` bytes of tensor `name` if the chunks contain only `held` of them."""

    def read(self, name: str, part: Part = ()) -> torch.Tensor:
        """Return a copy of a tensor, or of a part of the tensor."""
        piece, dtype = self._pieces[name], self.kinds[name].dtype
        cuts = (*part, *(slice(None) for _ in piece.shape[len(part) :]))
        wanted = [range(extent)[cut] for extent, cut in zip(piece.shape, cuts, strict=True)]
        out = torch.empty(*map(len, wanted), dtype=dtype)
        out_bytes = out.view(torch.uint8).view(*out.shape, dtype.itemsize)
        filled = at = 0
        for first, count in piece.rows:
            # In the stored tensor, the rows of the piece begin `shift` rows later.
            shift, rows = first - at, _overlap(wanted[0], range(at, at + count))
            at += count
            box = (range(rows.start + shift, rows.stop + shift), *wanted[1:])
            origin = (wanted[0].start + shift, *(axis.start for axis in wanted[1:]))
            for chunk in self._chunks.get(piece.key, {}).get(piece.index, ()) if rows else ():
                held = chunk.box[len(piece.index) :]
                common = [_overlap(axis, other) for axis, other in zip(box, held, strict=True)]
                if all(common):
                    source = self._values(chunk, piece.index, dtype)[_slices(common, [axis.start for axis in held])]
                    out_bytes[_slices(common, origin)] = source
                    filled += source.numel()
        if filled != out.nbytes:
            raise self._incomplete(name, held=filled, wanted=out.nbytes)
        return out


def _overlap(one: range, other: range) -> range:
    start = max(one.start, other.start)
    return range(start, max(start, min(one.stop, other.stop)))


def _slices(box: Sequence[range], origin: Sequence[int]) -> tuple[slice, ...]:
    """Return the slices that select `box` in a tensor whose first value has the position `origin`."""
    return tuple(slice(axis.start - first, axis.stop - first) for axis, first in zip(box, origin, strict=True))


def _chunks_by_place(index: TensorIndex[C], *, axes: int) -> dict[tuple[int, ...], list[C]]:
    """Return a map from each index on the first `axes` axes of a stored tensor to the chunks at this index.

    A chunk that spans several indices is listed at each of them.
    """
    by_place: dict[tuple[int, ...], list[C]] = {}
    count = 0
    for chunk in index.chunks:
        count += math.prod(map(len, chunk.box[:axes]))
        if count > _MAX_PLACES:
            raise ModelFileError(f"a tensor has more than {_MAX_PLACES} parts: save the checkpoint again")
        for place in product(*chunk.box[:axes]):
            by_place.setdefault(place, []).append(chunk)
    return by_place


def _require_fit(
    stored: Mapping[str, Stored],
    index: Mapping[str, TensorIndex[C]],
    layout: Layout,
    config: ModelConfig,
    where: str,
    remedy: str,
    *,
    may_lack: bool,
) -> None:
    keys: Collection[str] = set(index)
    if config.tie_embeddings:
        # Ignore the head, which some programs save although it is tied to the embedding.
        keys = set(index) - {layout.prefix + HEAD}
    missing, extra = sorted(set(stored) - set(keys)), sorted(set(keys) - set(stored))
    if extra or (missing and not may_lack):
        lists = [
            f"{what} {len(names)}: {', '.join(map(escaped, names[:6]))}"
            for what, names in (("lacks", missing), ("has", extra))
            if names
        ]
        raise UnsupportedModelError(
            f"{where} does not hold the model its configuration describes; of its {len(stored)} tensors it "
            f"{'; beside them it '.join(lists)}: {remedy}"
        )
    for key, wanted in stored.items():
        if key not in index:
            continue
        shape = index[key].shape
        is_padded = key.endswith((EMBEDDING, HEAD)) and len(shape) == 2 and shape[0] > wanted.shape[0]
        if shape != wanted.shape and not (is_padded and shape[1] == wanted.shape[1]):
            raise UnsupportedModelError(
                f"tensor {shown(key)} of {where} has shape {shape}: the model's configuration asks for {wanted.shape}"
            )
        if not index[key].dtype.is_floating_point:
            raise UnsupportedModelError(f"tensor {key!r} of {where} has type {index[key].dtype}: want floating point")
