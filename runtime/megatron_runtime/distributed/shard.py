"""Computes the part of a model that each rank holds, and the rank of this process. Uses no torch and no communication.

The ranks of an engine are numbered in the order of Megatron-Core: the tensor index varies fastest, then the expert
index, then the pipeline index. The ranks of a tensor group, which exchange the most data, therefore have adjacent
numbers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_runtime.process.secrets import integer

RENDEZVOUS_PORT = 29500
FOLDER_VARIABLE = "MEGATRON_RANKS_FOLDER"
"""Environment variable that the launcher sets for the ranks of an engine on one host; see RankIdentity.folder."""


class IndivisibleError(ValueError):
    """A parallel size does not divide the model or the ranks. The message names both numbers and the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelSizes:
    """The number of ranks in each dimension of an engine.

    With `data` above 1, which only vLLM supports, the engine has `data` copies of the dense layers. The experts are
    either not divided (`expert` 1) or divided between all ranks of a stage (`expert` = tensor x data).
    """

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    data: int = 1

    def __post_init__(self) -> None:
        for name in ("tensor", "pipeline", "expert", "data"):
            if getattr(self, name) < 1:
                raise IndivisibleError(f"{name}_parallel_size={getattr(self, name)}: want at least 1")
        if self.data > 1 and self.expert not in (1, self.tensor * self.data):
            raise IndivisibleError(
                f"expert_parallel_size={self.expert}: with data_parallel_size={self.data} want 1 or tensor x data = "
                f"{self.tensor * self.data}"
            )

    @property
    def product(self) -> str:
        """The dimensions and sizes whose product is the number of ranks, as text for error messages."""
        if self.data > 1:
            return f"tensor {self.tensor} x pipeline {self.pipeline} x data {self.data}"
        return f"tensor {self.tensor} x pipeline {self.pipeline} x expert {self.expert}"

    @property
    def world(self) -> int:
        return self.tensor * self.pipeline * (self.data if self.data > 1 else self.expert)

    def shard(self, rank: int) -> Shard:
        """Return the part of the model that `rank` of the engine holds."""
        if not 0 <= rank < self.world:
            raise IndivisibleError(f"rank {rank}: tensor x pipeline x expert is {self.world} ranks, counted from 0")
        rest, tensor_rank = divmod(rank, self.tensor)
        pipeline_rank, expert_rank = divmod(rest, self.expert)
        return Shard(sizes=self, tensor_rank=tensor_rank, pipeline_rank=pipeline_rank, expert_rank=expert_rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """The part of a model that one rank holds. Shard() without arguments is the whole model.

    Most methods take a size of the whole model, and return the half-open range that this rank holds.
    """

    sizes: ParallelSizes = ParallelSizes()
    tensor_rank: int = 0
    pipeline_rank: int = 0
    expert_rank: int = 0

    @property
    def rank(self) -> int:
        """Number of this rank in the engine."""
        return (self.pipeline_rank * self.sizes.expert + self.expert_rank) * self.sizes.tensor + self.tensor_rank

    @property
    def has_embedding(self) -> bool:
        """Whether this is the first pipeline stage, which converts tokens to hidden states."""
        return self.pipeline_rank == 0

    @property
    def has_head(self) -> bool:
        """Whether this is the last pipeline stage, which converts hidden states to logits."""
        return self.pipeline_rank == self.sizes.pipeline - 1

    def layers(self, num_layers: int) -> range:
        """Return the layers of this rank's pipeline stage.

        If the number of layers is not divisible by the number of stages, the first stages have one more layer each.
        """
        if num_layers < self.sizes.pipeline:
            raise IndivisibleError(
                f"pipeline_parallel_size={self.sizes.pipeline}: the model has {num_layers} layers: use at most that"
            )
        return _part(num_layers, self.pipeline_rank, self.sizes.pipeline)

    def heads(self, num_heads: int) -> range:
        """Return the range of query heads that this rank holds."""
        return self._even(num_heads, "query heads", "tensor")

    def kv_heads(self, num_kv_heads: int) -> range:
        """Return the range of key-value heads that this rank holds.

        If there are fewer heads than ranks, several ranks hold the same head.
        """
        if num_kv_heads >= self.sizes.tensor:
            return self._even(num_kv_heads, "key-value heads", "tensor")
        if self.sizes.tensor % num_kv_heads:
            multiple = self.sizes.tensor // num_kv_heads * num_kv_heads
            raise IndivisibleError(
                f"tensor_parallel_size={self.sizes.tensor} is not a multiple of the model's {num_kv_heads} key-value "
                f"heads: use {multiple} or {multiple + num_kv_heads}"
            )
        head = self.tensor_rank * num_kv_heads // self.sizes.tensor
        return range(head, head + 1)

    def feed_forward(self, intermediate_size: int) -> range:
        """Return the rows of the gate and up matrices that this rank holds.

        The same range selects the rank's columns of the down matrix.
        """
        return self._even(intermediate_size, "feed-forward size", "tensor")

    def vocabulary(self, vocab_size: int) -> range:
        """Return the rows of the embedding and of the output head that this rank holds.

        The range has `vocabulary_width` rows. On the last ranks, it can have fewer rows.
        """
        width = self.vocabulary_width(vocab_size)
        start = min(vocab_size, self.tensor_rank * width)
        return range(start, min(vocab_size, start + width))

    def vocabulary_width(self, vocab_size: int) -> int:
        """Return the maximum number of rows of the embedding and of the output head that a rank holds."""
        return -(-vocab_size // self.sizes.tensor)

    def experts(self, num_experts: int) -> range:
        """Return the range of experts that this rank holds in each layer.

        The tensor ranks divide each expert, like the feed-forward network of a dense layer.
        """
        return self._even(num_experts, "experts", "expert")

    def _even(self, size: int, what: str, dimension: Literal["tensor", "expert"]) -> range:
        rank, ranks = getattr(self, f"{dimension}_rank"), getattr(self.sizes, dimension)
        if size % ranks:
            raise IndivisibleError(
                f"{dimension}_parallel_size={ranks} does not divide the model's {size} {what}: use {_divisors(size)}"
            )
        return _part(size, rank, ranks)


def _part(size: int, index: int, parts: int) -> range:
    each, over = divmod(size, parts)
    start = index * each + min(index, over)
    return range(start, start + each + (index < over))


def _divisors(size: int) -> str:
    """Return the divisors of `size` up to 64 as text, for an error message."""
    divisors = [number for number in range(1, min(size, 64) + 1) if size % number == 0]
    return ", ".join(map(str, divisors[:-1])) + f" or {divisors[-1]}" if len(divisors) > 1 else "1"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankIdentity:
    """The rank of a process in its engine, which has `world` ranks.

    local_rank, local_world: rank and number of ranks on this host or pod.
    address, port:           address and port on which rank 0 listens.
    engine, engines:         index of this engine and number of engines, in a program that runs several engines. The
                             program's torch.distributed contains the ranks of all engines, engine after engine.
    build_index:             number of engines that this program has constructed before this engine.
    folder:                  private folder of all ranks, if they run on one host and connect by Unix sockets in this
                             folder. None if the ranks connect by TCP, at `address` and `port`.
    """

    rank: int
    world: int
    local_rank: int
    local_world: int
    address: str
    port: int
    engine: int = 0
    engines: int = 1
    build_index: int = 0
    folder: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeIdentity:
    """The host or pod of this process among the hosts or pods of its engine, which are called nodes.

    If the engine has only one node, `port` is None, because the ranks then use no port.
    """

    node_rank: int = 0
    nodes: int = 1
    ranks_per_node: int
    address: str = "127.0.0.1"
    port: int | None = None


def rank_identity(sizes: ParallelSizes, environment: Mapping[str, str] = os.environ) -> RankIdentity | None:
    """Return this process's rank from the environment variables of torchrun, the launcher or a pod with one rank.

    Returns None if this process is not a rank and must start the ranks of its node. Raises IndivisibleError if the
    variables describe an engine of another size.
    """
    node = node_identity(sizes, environment)
    if "RANK" in environment:
        rank, local_rank = integer(environment, "RANK", 0), integer(environment, "LOCAL_RANK", 0)
        local_world = integer(environment, "LOCAL_WORLD_SIZE", 1)
        _check_world(sizes, integer(environment, "WORLD_SIZE", sizes.world))
    elif node.nodes > 1 and node.ranks_per_node == 1:
        rank, local_rank, local_world = node.node_rank, 0, 1
    else:
        return None
    return RankIdentity(
        rank=rank,
        world=sizes.world,
        local_rank=local_rank,
        local_world=local_world,
        address=environment.get("MASTER_ADDR", node.address),
        port=integer(environment, "MASTER_PORT", RENDEZVOUS_PORT),
        folder=Path(environment[FOLDER_VARIABLE]) if FOLDER_VARIABLE in environment else None,
    )


def node_identity(sizes: ParallelSizes, environment: Mapping[str, str] = os.environ) -> NodeIdentity:
    """Return the identity of this node from NNODES, NODE_RANK, NPROC_PER_NODE, MASTER_ADDR and MASTER_PORT.

    Raises IndivisibleError if all nodes together do not have exactly the ranks of the engine.
    """
    nodes = integer(environment, "NNODES", 1)
    if nodes == 1:
        return NodeIdentity(ranks_per_node=sizes.world)
    per_node = integer(environment, "NPROC_PER_NODE", max(1, sizes.world // nodes))
    _check_world(sizes, nodes * per_node)
    return NodeIdentity(
        node_rank=integer(environment, "NODE_RANK", 0),
        nodes=nodes,
        ranks_per_node=per_node,
        address=environment["MASTER_ADDR"],
        port=integer(environment, "MASTER_PORT", RENDEZVOUS_PORT),
    )


def _check_world(sizes: ParallelSizes, world: int) -> None:
    if world != sizes.world:
        raise IndivisibleError(
            f"{world} ranks were started, {sizes.product} is {sizes.world}: make NNODES x NPROC_PER_NODE (torchrun: "
            "--nnodes x --nproc-per-node) equal to it"
        )
