"""The memory of the KV cache of one rank. It may be given back, and keep what some of its pages hold."""

from __future__ import annotations

import mmap
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from megatron_runtime.backends.native.memory import require_memory


@dataclass(frozen=True, slots=True)
class _Kept:
    pages: torch.Tensor
    values_LNXE: torch.Tensor


class KVPool:
    """A tensor cache_LPXE: layers, pages, tokens of a page, keys and values of one token.

    cache_LPXE: None while the memory is given back.
    """

    def __init__(self, *, layers: int, pages: int, page_size: int, width: int, dtype: torch.dtype) -> None:
        self.cache_LPXE: torch.Tensor | None = None
        self._shape = (layers, pages, page_size, width)
        self._dtype = dtype
        self._kept: _Kept | None = None

    @torch.inference_mode()
    def allocate(self) -> None:
        """Have the memory, with what was kept in it. Does nothing if it is there."""
        if self.cache_LPXE is not None:
            return
        kept = self._kept
        if kept is not None:
            require_memory(kept.values_LNXE.nbytes, what="bringing the KV cache back")
        # A mapping of its own: it is zeroed page by page when first touched, and unmapped with the tensor. Zeros: what
        # a page holds before it is written is masked out of the attention, but must be finite.
        size = int(np.prod(self._shape)) * self._dtype.itemsize
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.cache_LPXE = torch.frombuffer(memory, dtype=self._dtype).view(self._shape)
        if kept is not None:
            self.cache_LPXE[:, kept.pages] = kept.values_LNXE
            self._kept = None

    @torch.inference_mode()
    def release(self, keep_pages: npt.NDArray[np.int64] | None = None) -> None:
        """Give the memory back. What `keep_pages` hold is copied out, and in again by allocate()."""
        cache = self.cache_LPXE
        if cache is None:
            return
        if keep_pages is not None and len(keep_pages):
            pages = torch.from_numpy(keep_pages.astype(np.int64))
            self._kept = _Kept(pages, cache[:, pages])
        self.cache_LPXE = None
