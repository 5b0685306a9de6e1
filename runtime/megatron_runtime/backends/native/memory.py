"""Checks of the available memory, and the memory of the KV cache of one rank."""

from __future__ import annotations

import math
import mmap

import numpy as np
import numpy.typing as npt
import torch

from megatron_runtime.engine.settings import DEFAULT_CPU_CACHE_BYTES
from megatron_runtime.process.memory import available_bytes


class MemoryShortError(RuntimeError):
    """Raised if there is too little memory. The message has the needed and the available bytes, and the remedy."""


_OF_THE_HOST = "free memory on the node or raise the memory limit of the container"
_OF_A_GPU = "end other processes that use this GPU, or divide the model over more GPUs (tensor or expert parallelism)"


def require_memory(
    needed: int,
    *,
    what: str,
    available: int | None = None,
    device: torch.device | None = None,
    remedy: str = _OF_A_GPU,
) -> None:
    """Raise MemoryShortError unless `needed` bytes are available. what: what needs the memory, for the message.

    available: available bytes. None means the amount that `device` reports if it is a GPU, otherwise the amount that
               the system reports.
    remedy:    what to do if GPU memory is short, for the message.
    """
    is_gpu = device is not None and device.type == "cuda"
    if available is None:
        available = torch.cuda.mem_get_info(device)[0] if is_gpu else available_bytes()
    if available is not None and needed > available:
        where = f"free on {device}" if is_gpu else "available"
        raise MemoryShortError(
            f"{what} needs {needed / (1 << 20):.0f} MiB, {available / (1 << 20):.0f} MiB are {where}: "
            f"{remedy if is_gpu else _OF_THE_HOST}"
        )


def unset_cache_bytes(device: torch.device, *, weights: int) -> int:
    """Return the size in bytes of a KV cache for which no size is configured.

    On a CPU, the size is a constant. On a GPU, it is the memory that the weights leave free, minus a tenth of the
    device memory for activations and graphs.

    weights: bytes of this rank's weights, which are not loaded yet.
    """
    if device.type != "cuda" or not torch.cuda.is_available():  # a check may run on a machine without a GPU
        return DEFAULT_CPU_CACHE_BYTES
    free, total = torch.cuda.mem_get_info(device)
    return max(0, free - weights - total // 10)


class KVPool:
    """The KV cache of one rank. Its memory can be released and reallocated; selected pages keep their contents.

    cache_LPXE: shape (layers, pages, tokens of a page, keys and values of one token); None while the memory is
                released.
    """

    def __init__(self, shape_LPXE: tuple[int, int, int, int], *, dtype: torch.dtype, device: torch.device) -> None:
        self.cache_LPXE: torch.Tensor | None = None
        self._shape_LPXE, self._dtype, self._device = shape_LPXE, dtype, device
        self._kept: tuple[torch.Tensor, torch.Tensor] | None = None
        """The pages whose contents are kept, and their values_LNXE in host memory."""

    @torch.inference_mode()
    def allocate(self) -> None:
        """Allocate the memory if it was released, and restore the kept pages. Raises MemoryShortError."""
        if self.cache_LPXE is not None:
            return
        kept = self._kept
        if self._device.type == "cuda":
            size = math.prod(self._shape_LPXE) * self._dtype.itemsize
            torch.cuda.empty_cache()  # memory that torch caches is not free
            lower = "lower kv_cache_memory, or end other processes that use this GPU"
            require_memory(size, what="allocating the KV cache", device=self._device, remedy=lower)
        elif kept is not None:
            require_memory(kept[1].nbytes, what="restoring the KV cache")
        self.cache_LPXE = self._zeros()
        if kept is not None:
            pages, values_LNXE = kept[0].to(self._device), kept[1]
            for layer_PXE, values_NXE in zip(self.cache_LPXE, values_LNXE, strict=True):
                layer_PXE[pages] = values_NXE.to(self._device)
            self._kept = None

    @torch.inference_mode()
    def release(self, keep_pages: npt.NDArray[np.int64] | None = None) -> None:
        """Release the memory. Copy `keep_pages` to the host first, so that allocate() can restore these pages.

        If `keep_pages` is None, no pages are kept.
        """
        cache_LPXE, self.cache_LPXE = self.cache_LPXE, None
        if cache_LPXE is None or keep_pages is None or not len(keep_pages):
            return
        pages = torch.from_numpy(keep_pages.astype(np.int64))
        layers, _, tokens, width = self._shape_LPXE
        values_LNXE = torch.empty(layers, len(pages), tokens, width, dtype=self._dtype)
        on_device = pages.to(self._device)
        # One layer at a time, so that the device needs memory for a copy of one layer only.
        for layer_PXE, values_NXE in zip(cache_LPXE, values_LNXE, strict=True):
            values_NXE.copy_(layer_PXE[on_device])
        self._kept = pages, values_LNXE

    @torch.inference_mode()
    def read(self, pages: npt.NDArray[np.int32]) -> bytes:
        """Return the contents of `pages`, layer by layer. Raises MemoryShortError while the memory is released."""
        cache_LPXE = self._allocated()
        where = torch.from_numpy(pages.astype(np.int64)).to(self._device)
        values_LNXE = cache_LPXE.index_select(1, where)
        return values_LNXE.cpu().view(torch.uint8).numpy().tobytes()

    @torch.inference_mode()
    def write(self, pages: npt.NDArray[np.int32], data: bytes) -> None:
        """Write `data`, which read() has returned, to `pages`."""
        cache_LPXE = self._allocated()
        layers, _, tokens, width = self._shape_LPXE
        values = torch.frombuffer(bytearray(data), dtype=self._dtype).view(layers, len(pages), tokens, width)
        where = torch.from_numpy(pages.astype(np.int64)).to(self._device)
        cache_LPXE.index_copy_(1, where, values.to(self._device))

    def _allocated(self) -> torch.Tensor:
        if self.cache_LPXE is None:
            raise MemoryShortError("the memory of the KV cache is released: RESUME first")
        return self.cache_LPXE

    def _zeros(self) -> torch.Tensor:
        """Allocate the cache, filled with zeros.

        Attention masks slots that are not written yet, but their values must be finite.
        """
        if self._device.type != "cpu":
            return torch.zeros(self._shape_LPXE, dtype=self._dtype, device=self._device)
        # A separate mapping: the system zeroes each page at its first use, and unmaps all pages with the tensor.
        size = math.prod(self._shape_LPXE) * self._dtype.itemsize
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return torch.frombuffer(memory, dtype=self._dtype).view(self._shape_LPXE)
