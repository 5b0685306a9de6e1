"""A copy of a trainer's weights in host memory, in blocks with their digests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from megatron_runtime.checkpoints.checkpoint import is_finite
from megatron_runtime.checkpoints.in_memory import model_in_memory
from megatron_runtime.checkpoints.torch_dist.live_model import LiveModelCheckpoint
from megatron_runtime.distributed.weight_port import OfferedTensors
from megatron_runtime.models.config import UnsupportedModelError
from megatron_runtime.protocol.published_weights import VALUE_BYTES, digest_of


class PublishError(RuntimeError):
    """The update failed. The message names the cause, and the engine or the rank of the trainer that failed.

    is_committed: False: every engine keeps its weights. None: it is unknown whether the update was committed, because
                  the coordinator or the first rank of the trainer did not answer. If so, publish the same weights with
                  the same epoch again. This has no effect if the weights were committed.
    """

    def __init__(self, message: str, *, is_committed: bool | None) -> None:
        super().__init__(message)
        self.is_committed = is_committed


class PublishedWeights(OfferedTensors):
    """A copy of the weights of one epoch, which the constructor makes, so that the program can continue training.

    model: a causal language model of transformers in eval mode, a GPTModel of Megatron-Core on one rank, a checkpoint,
           or a mapping from transformers names to complete float32, bfloat16 or float16 tensors on any device.

    Raises ValueError with the name of a tensor that cannot be published, and UnsupportedModelError for any other model.
    """

    def __init__(self, model: Any, *, epoch: int) -> None:
        super().__init__([(name, _on_host(name, tensor)) for name, tensor in _whole_tensors(model)], epoch=epoch)
        self.digest = digest_of(self.manifest)

    @property
    def session(self) -> str:
        return f"{self.epoch}-{self.digest}"


def _whole_tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(model, Mapping):
        yield from model.items()
        return
    source = model_in_memory(model)
    checkpoint = source.reopen() if source.reopen is not None else source.checkpoint
    if isinstance(checkpoint, LiveModelCheckpoint) and (sizes := checkpoint.shard.sizes).world > 1:
        raise UnsupportedModelError(
            f"this rank holds a part of the model, with tensor {sizes.tensor} x pipeline {sizes.pipeline} x expert "
            f"{sizes.expert} parallel ranks: give WeightServer a group of all these ranks"
        )
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
