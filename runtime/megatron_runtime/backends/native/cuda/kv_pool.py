"""The memory of the KV cache on a device."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch


class DeviceKVPool:
    """As engines.kv_pool.KVPool, on a device: what is kept of it while the memory is given back lies on the host."""

    def __init__(
        self, *, layers: int, pages: int, page_size: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.cache_LPXE: torch.Tensor | None = None
        self._shape = (layers, pages, page_size, width)
        self._dtype = dtype
        self._device = device
        self._kept: tuple[torch.Tensor, torch.Tensor] | None = None

    @torch.inference_mode()
    def allocate(self) -> None:
        """Have the memory, with what was kept in it. Does nothing if it is there."""
        if self.cache_LPXE is not None:
            return
        # Zeros: what a page holds before it is written is masked out of the attention, but must be finite.
        self.cache_LPXE = torch.zeros(self._shape, dtype=self._dtype, device=self._device)
        if self._kept is not None:
            pages, values_LNXE = self._kept
            self.cache_LPXE[:, pages.to(self._device)] = values_LNXE.to(self._device)
            self._kept = None

    @torch.inference_mode()
    def release(self, keep_pages: npt.NDArray[np.int64] | None = None) -> None:
        """Give the memory back. What `keep_pages` hold is copied to the host, and back by allocate()."""
        cache = self.cache_LPXE
        if cache is None:
            return
        if keep_pages is not None and len(keep_pages):
            pages = torch.from_numpy(keep_pages.astype(np.int64))
            # A layer at a time: what is kept need not fit on the device a second time.
            self._kept = pages, torch.stack([layer_PXE[pages.to(self._device)].cpu() for layer_PXE in cache])
        self.cache_LPXE = None
