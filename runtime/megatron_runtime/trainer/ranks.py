"""The ranks of a trainer that hold parts of one Megatron-Core model. The first rank publishes the whole model.

A box is a rectangular part of one of Megatron's tensors. The first rank reads the boxes of the other ranks like a
checkpoint that several ranks have saved. Each rank describes its boxes, and sends the bytes of a box when the first
rank requests the box. The last message of each call is the result of the call.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from megatron_runtime.checkpoints.torch_dist.chunked import ChunkedCheckpoint, TensorIndex
from megatron_runtime.checkpoints.torch_dist.live_model import LiveChunk, config_of, is_megatron_model, live_index
from megatron_runtime.models.config import ModelConfig, UnsupportedModelError
from megatron_runtime.protocol import strict_json as json
from megatron_runtime.protocol.text import shown
from megatron_runtime.trainer.published import PublishError

logger = logging.getLogger(__name__)

_BUCKET_BYTES = 64 << 20
"""Maximum number of bytes in one message with values."""
_KEPT_MATRICES = 2
"""Number of stored tensors that are kept. A stored tensor can contain several tensors of the model, such as the weights
of query, key and value.
"""
_HEADER_NUMBERS = 4
"""Number of integers in a header.

In a request: the number of a chunk, the number of leading axes, and the index on up to two axes.
Before a text: _TEXT, and the number of bytes.
"""
_TEXT = -1


@dataclass(frozen=True, slots=True)
class RankChunk:
    """A rectangular part of the stored tensor `key` on one rank.

    box:    range of the part on each axis of the tensor.
    number: number of the part among all parts on the rank.
    """

    key: str
    box: tuple[range, ...]
    rank: int
    number: int


Receive = Callable[[RankChunk, tuple[int, ...], torch.Tensor], None]
"""Fills a uint8 tensor with the values of a chunk at one index of its leading axes."""


class TrainerRanks:
    """The ranks of a torch.distributed group. Every rank must make the same calls in the same order.

    During a call, nothing else may use the group.

    group: a group of torch.distributed with a backend for CPU tensors; None: this process is the only rank.

    Raises ValueError if the group does not contain this rank or has no such backend.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self.is_first = group is None or dist.get_rank(group) == 0
        if group is None:
            return
        if dist.get_rank(group) < 0:
            raise ValueError("group lacks this rank: create WeightServer only on the ranks of the group")
        backends = dist.get_backend_config(group)
        if "cpu:" not in backends:
            raise ValueError(
                f"group has backend {backends!r}: want one for the CPU: torch.distributed.new_group(backend='gloo')"
            )
        self._ranks = dist.get_process_group_ranks(group)

    def run(self, act: Callable[[], str]) -> str:
        """Call act() on the first rank, and return its result on all ranks.

        If act() raises an error, the other ranks raise PublishError.
        """
        return self._run(act, [])

    def publish(self, model: Any, act: Callable[[Any], str]) -> str:
        """Call `act` on the first rank with a checkpoint of the whole model, and return its result on all ranks.

        model: this rank's part, a GPTModel. If this process is the only rank, `act` gets `model` itself.

        Raises PublishError if a rank is lost. If `act` raises an error, the other ranks raise PublishError.
        """
        if self._group is None:
            return act(model)
        held: list[LiveChunk] = []
        try:
            description = _describe(model, held)
        except ValueError as error:
            description = {"error": str(error)}
        if not self.is_first:
            self._send_text(0, description)

        def gather() -> str:
            others = [self._receive_text(rank) for rank in range(1, len(self._ranks))]
            index = _union([description, *others])

            def receive(chunk: RankChunk, place: tuple[int, ...], out: torch.Tensor) -> None:
                if chunk.rank == 0:
                    out.copy_(held[chunk.number].bytes_at(place).reshape(-1))
                else:
                    self._request(chunk, place, out)

            return act(GatheredModel(config_of(model), index, receive, num_ranks=len(self._ranks)))

        return self._run(gather, held)

    def _run(self, act: Callable[[], str], held: Sequence[LiveChunk]) -> str:
        if not self.is_first:
            return self._follow(held)
        try:
            result = act()
        except BaseException as error:
            is_committed = False if isinstance(error, ValueError) else getattr(error, "is_committed", None)
            self._end({"error": str(error) or type(error).__name__, "is_committed": is_committed})
            raise
        self._end({"result": result})
        return result

    def _end(self, result: dict[str, Any]) -> None:
        """Send the result of a call to the other ranks. The loss of a rank does not change the result."""
        for rank in range(1, len(self._ranks)) if self._group is not None else ():
            try:
                self._send_text(rank, result)
            except PublishError as error:
                logger.warning("%s", error)

    def _follow(self, held: Sequence[LiveChunk]) -> str:
        """Send the values that the first rank requests, until it sends the result of its call. Return the result.

        held: the chunks of the model that this rank has.

        Raises PublishError if the call of publish() or run() failed on the first rank, or if the first rank is lost.
        """
        while (header := self._receive_header(0))[0] != _TEXT:
            number, axes, *place = header
            for bucket in held[number].bytes_at(tuple(place[:axes])).reshape(-1).split(_BUCKET_BYTES):
                self._send(0, bucket.cpu())
        result = self._receive_body(0, header)
        if "error" in result:
            raise PublishError(f"the first rank of the trainer: {result['error']}", is_committed=result["is_committed"])
        return str(result["result"])

    def _request(self, chunk: RankChunk, place: tuple[int, ...], out: torch.Tensor) -> None:
        self._send_header(chunk.rank, chunk.number, len(place), *place)
        for bucket in out.split(_BUCKET_BYTES):
            self._receive(chunk.rank, bucket)

    # --- messages ---------------------------------------------------------------------------------------------------

    def _send_text(self, rank: int, value: dict[str, Any]) -> None:
        data = json.dumps(value).encode()
        self._send_header(rank, _TEXT, len(data))
        self._send(rank, torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def _receive_text(self, rank: int) -> dict[str, Any]:
        return self._receive_body(rank, self._receive_header(rank))

    def _receive_body(self, rank: int, header: Sequence[int]) -> dict[str, Any]:
        data = torch.empty(header[1], dtype=torch.uint8)
        self._receive(rank, data)
        return dict(json.loads(data.numpy().tobytes()))

    def _send_header(self, rank: int, *numbers: int) -> None:
        self._send(rank, torch.tensor([*numbers, *[0] * (_HEADER_NUMBERS - len(numbers))]))

    def _receive_header(self, rank: int) -> list[int]:
        header = torch.empty(_HEADER_NUMBERS, dtype=torch.int64)
        self._receive(rank, header)
        return [int(number) for number in header.tolist()]

    def _send(self, rank: int, tensor: torch.Tensor) -> None:
        try:
            dist.send(tensor, self._ranks[rank], group=self._group)
        except RuntimeError as error:
            raise self._lost(rank, error) from error

    def _receive(self, rank: int, tensor: torch.Tensor) -> None:
        try:
            dist.recv(tensor, self._ranks[rank], group=self._group)
        except RuntimeError as error:
            raise self._lost(rank, error) from error

    def _lost(self, rank: int, error: RuntimeError) -> PublishError:
        # Without the first rank, the result is unknown. The other ranks are needed only before the update.
        cause = f"rank {rank} of the trainer's group is lost: {error}; restart the ranks of the trainer"
        return PublishError(cause, is_committed=False if self.is_first else None)


class GatheredModel(ChunkedCheckpoint[RankChunk]):
    """A checkpoint of a model whose parts are on several ranks. read() receives the values from the ranks.

    index:     the stored tensors with their parts on all ranks.
    receive:   reads the values of a chunk from its rank; see Receive.
    num_ranks: number of ranks, for errors.

    Raises UnsupportedModelError if a part of the model is missing on all ranks.
    """

    def __init__(
        self, config: ModelConfig, index: Mapping[str, TensorIndex[RankChunk]], receive: Receive, *, num_ranks: int
    ) -> None:
        where = f"the GPTModel of {num_ranks} ranks"
        super().__init__(config, index, where=where, remedy="give WeightServer a group with all ranks of the model")
        self._receive = receive
        self._received: OrderedDict[tuple[str, tuple[int, ...]], dict[RankChunk, torch.Tensor]] = OrderedDict()

    def _values(self, chunk: RankChunk, index: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        chunks = self._received.setdefault((chunk.key, index), {})
        if len(self._received) > _KEPT_MATRICES:
            self._received.popitem(last=False)
        if chunk not in chunks:
            shape = [*map(len, chunk.box[len(index) :]), dtype.itemsize]
            values = torch.empty(prod(shape), dtype=torch.uint8)
            self._receive(chunk, index, values)
            chunks[chunk] = values.view(shape)
        return chunks[chunk]

    def _incomplete(self, name: str, *, held: int, wanted: int) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"{self._where} has {held} of the {wanted} bytes of {name!r}: give WeightServer a group with all ranks of "
            "the model"
        )


def _describe(model: Any, held: list[LiveChunk]) -> dict[str, Any]:
    """Return a message with the name, shape, type and parts of each of the model's tensors on this rank.

    Append the parts to `held` in the order of the message.
    """
    if not is_megatron_model(model):
        raise UnsupportedModelError(f"model is {type(model).__name__}: with a group, want a GPTModel of Megatron-Core")
    tensors = []
    for key, tensor in live_index(model).items():
        held.extend(tensor.chunks)
        boxes = [[[axis.start, axis.stop] for axis in chunk.box] for chunk in tensor.chunks]
        tensors.append([key, tensor.shape, str(tensor.dtype).removeprefix("torch."), boxes])
    return {"tensors": tensors}


def _union(descriptions: Iterable[dict[str, Any]]) -> dict[str, TensorIndex[RankChunk]]:
    """Return the index of the model's tensors, with their parts on all ranks.

    If several ranks have the same part, such as data-parallel replicas, the first of these ranks is used. Raises
    UnsupportedModelError if a rank reports an error, or if two ranks have parts of different models.
    """
    kinds: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    chunks: dict[str, dict[tuple[range, ...], RankChunk]] = {}
    for rank, description in enumerate(descriptions):
        if "error" in description:
            raise UnsupportedModelError(f"rank {rank} of the trainer's group: {description['error']}")
        number = 0
        for key, shape, dtype, boxes in description["tensors"]:
            kind = (tuple(shape), getattr(torch, dtype))
            if kinds.setdefault(key, kind) != kind:
                raise UnsupportedModelError(
                    f"tensor {shown(key)} is {kind} on rank {rank} and {kinds[key]} on others: give the ranks parts of "
                    "the same model"
                )
            for axes in boxes:
                box = tuple(range(start, stop) for start, stop in axes)
                chunks.setdefault(key, {}).setdefault(box, RankChunk(key, box, rank, number))
                number += 1
    return {key: TensorIndex(*kinds[key], tuple(chunks[key].values())) for key in kinds}
