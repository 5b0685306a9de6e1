"""A copy of a trainer's weights in host memory, in blocks with their digests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from megatron_runtime.checkpoints.checkpoint import is_finite
from megatron_runtime.checkpoints.in_memory import model_in_memory
from megatron_runtime.checkpoints.published import block_digest
from megatron_runtime.protocol.published_weights import VALUE_BYTES, PublishedTensor, WeightsManifest, digest_of

_HASHING_THREADS = 4


class PublishedWeights:
    """The weights of one epoch. The constructor copies them, so the program may continue training.

    model: a causal language model of transformers in eval mode, a GPTModel of Megatron-Core on one rank, or a mapping
           of transformers names to whole tensors of float32, bfloat16 or float16, on any device.

    Raises ValueError naming the tensor that cannot be published, and UnsupportedModelError for another model.
    """

    def __init__(self, model: Any, *, epoch: int) -> None:
        self._tensors = [(name, _on_host(name, tensor)) for name, tensor in _whole_tensors(model)]
        with ThreadPoolExecutor(_HASHING_THREADS) as pool:
            self._entries = tuple(pool.map(_entry, self._tensors))
        self.epoch = epoch
        self.manifest = WeightsManifest(epoch, self._entries).to_bytes()
        self.digest = digest_of(self.manifest)

    @property
    def session(self) -> str:
        return f"{self.epoch}-{self.digest}"

    def block(self, tensor: int, block: int) -> torch.Tensor:
        """Return a block, a view. Raises IndexError for numbers that the manifest does not have."""
        if not 0 <= tensor < len(self._entries) or not 0 <= block < self._entries[tensor].num_blocks:
            raise IndexError(f"there is no block {block} of tensor {tensor}")
        return self._tensors[tensor][1][self._entries[tensor].rows(block)]


def _whole_tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(model, Mapping):
        yield from model.items()
        return
    source = model_in_memory(model)
    checkpoint = source.reopen() if source.reopen is not None else source.checkpoint
    for name in checkpoint.kinds:
        yield name, checkpoint.read(name)


@torch.no_grad()
def _on_host(name: str, tensor: torch.Tensor) -> torch.Tensor:
    kind = str(tensor.dtype).removeprefix("torch.")
    if kind not in VALUE_BYTES or not tensor.numel():
        raise ValueError(f"tensor {name!r} of type {kind}, shape {tuple(tensor.shape)}: want {', '.join(VALUE_BYTES)}")
    if not is_finite(tensor):
        raise ValueError(f"tensor {name!r} has values that are not finite: they are not published")
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def _entry(item: tuple[str, torch.Tensor]) -> PublishedTensor:
    name, tensor = item
    entry = PublishedTensor(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
    digests = b"".join(block_digest(tensor[entry.rows(block)]) for block in range(entry.num_blocks))
    return PublishedTensor(entry.name, entry.shape, entry.dtype, digests)
