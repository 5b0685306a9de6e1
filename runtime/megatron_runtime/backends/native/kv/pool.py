"""The memory of one rank's KV cache, which can be released and reallocated with the contents of some pages."""

from __future__ import annotations

import math
import mmap

import numpy as np
import numpy.typing as npt
import torch

from megatron_runtime.backends.native.memory import require_memory


class KVPool:
    """A tensor cache_LPXE: layers, pages, tokens of a page, keys and values of one token.

    cache_LPXE: None while the memory is released. The contents of kept pages are in host memory meanwhile.
    """

    def __init__(self, shape_LPXE: tuple[int, int, int, int], *, dtype: torch.dtype, device: torch.device) -> None:
        self.cache_LPXE: torch.Tensor | None = None
        self._shape_LPXE, self._dtype, self._device = shape_LPXE, dtype, device
        self._kept: tuple[torch.Tensor, torch.Tensor] | None = None
        """Pages, and their values_LNXE."""

    @torch.inference_mode()
    def allocate(self) -> None:
        """Allocate the memory and restore what was kept, if it was released. Raises MemoryShortError."""
        if self.cache_LPXE is not None:
            return
        kept = self._kept
        if kept is not None and self._device.type == "cpu":
            require_memory(kept[1].nbytes, what="bringing the KV cache back")
        self.cache_LPXE = self._zeros()
        if kept is not None:
            pages, values_LNXE = kept[0].to(self._device), kept[1]
            for layer_PXE, values_NXE in zip(self.cache_LPXE, values_LNXE, strict=True):
                layer_PXE[pages] = values_NXE.to(self._device)
            self._kept = None

    @torch.inference_mode()
    def release(self, keep_pages: npt.NDArray[np.int64] | None = None) -> None:
        """Release the memory. The contents of `keep_pages` are copied out, and restored by allocate()."""
        cache_LPXE, self.cache_LPXE = self.cache_LPXE, None
        if cache_LPXE is None or keep_pages is None or not len(keep_pages):
            return
        pages = torch.from_numpy(keep_pages.astype(np.int64))
        layers, _, tokens, width = self._shape_LPXE
        values_LNXE = torch.empty(layers, len(pages), tokens, width, dtype=self._dtype)
        on_device = pages.to(self._device)
        # A layer at a time: what is kept need not fit on the device a second time.
        for layer_PXE, values_NXE in zip(cache_LPXE, values_LNXE, strict=True):
            values_NXE.copy_(layer_PXE[on_device])
        self._kept = pages, values_LNXE

    def _zeros(self) -> torch.Tensor:
        """Zeros: the attention masks what a page holds before it is written, but it must be finite."""
        if self._device.type != "cpu":
            return torch.zeros(self._shape_LPXE, dtype=self._dtype, device=self._device)
        # A mapping of its own: the system zeroes each page when it is first touched, and unmaps it with the tensor.
        size = math.prod(self._shape_LPXE) * self._dtype.itemsize
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return torch.frombuffer(memory, dtype=self._dtype).view(self._shape_LPXE)
