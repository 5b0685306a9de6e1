"""Which rank this process is, and which part of a model a rank holds. Numbers only: no torch, no communication.

Ranks of an engine are numbered tensor first, then expert, then pipeline, as in Megatron-Core: ranks of one tensor
group, which exchange the most data, are neighbours.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

RENDEZVOUS_PORT = 29500


class IndivisibleError(ValueError):
    """A parallel size does not fit the model. The message names both numbers and the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelSizes:
    """The number of ranks in each dimension of an engine."""

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1

    def __post_init__(self) -> None:
        for name in ("tensor", "pipeline", "expert"):
            if getattr(self, name) < 1:
                raise IndivisibleError(f"{name}_parallel_size={getattr(self, name)}: want at least 1")

    @property
    def world(self) -> int:
        return self.tensor * self.expert * self.pipeline

    def shard(self, rank: int) -> Shard:
        """What `rank` of the engine holds."""
        if not 0 <= rank < self.world:
            raise IndivisibleError(f"rank {rank}: tensor x pipeline x expert is {self.world} ranks, counted from 0")
        rest, tensor_rank = divmod(rank, self.tensor)
        pipeline_rank, expert_rank = divmod(rest, self.expert)
        return Shard(
            tensor_rank=tensor_rank,
            tensor_size=self.tensor,
            pipeline_rank=pipeline_rank,
            pipeline_size=self.pipeline,
            expert_rank=expert_rank,
            expert_size=self.expert,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One rank's part of a model; Shard() holds all of it.

    Every method takes the model's whole size and returns the half-open range of it that this rank holds.
    """

    tensor_rank: int = 0
    tensor_size: int = 1
    pipeline_rank: int = 0
    pipeline_size: int = 1
    expert_rank: int = 0
    expert_size: int = 1

    @property
    def sizes(self) -> ParallelSizes:
        return ParallelSizes(tensor=self.tensor_size, pipeline=self.pipeline_size, expert=self.expert_size)

    @property
    def rank(self) -> int:
        """Of the engine."""
        return (self.pipeline_rank * self.expert_size + self.expert_rank) * self.tensor_size + self.tensor_rank

    @property
    def has_embedding(self) -> bool:
        """Tokens become hidden states in the first pipeline stage."""
        return self.pipeline_rank == 0

    @property
    def has_head(self) -> bool:
        """Hidden states become logits in the last pipeline stage."""
        return self.pipeline_rank == self.pipeline_size - 1

    def layers(self, num_layers: int) -> range:
        """Layers of this rank's stage. The first stages have one more where they cannot be equal."""
        if num_layers < self.pipeline_size:
            raise IndivisibleError(
                f"pipeline_parallel_size={self.pipeline_size}: the model has {num_layers} layers: use at most that"
            )
        return _part(num_layers, self.pipeline_rank, self.pipeline_size)

    def heads(self, num_heads: int) -> range:
        """Query heads."""
        return self._even(num_heads, "query heads")

    def kv_heads(self, num_kv_heads: int) -> range:
        """Key-value heads; where there are fewer than ranks, each is held by several ranks."""
        if num_kv_heads >= self.tensor_size:
            return self._even(num_kv_heads, "key-value heads")
        if self.tensor_size % num_kv_heads:
            raise IndivisibleError(
                f"tensor_parallel_size={self.tensor_size} is not a multiple of the model's {num_kv_heads} key-value "
                f"heads: use {_fitting(self.tensor_size, num_kv_heads)}"
            )
        head = self.tensor_rank * num_kv_heads // self.tensor_size
        return range(head, head + 1)

    def feed_forward(self, intermediate_size: int) -> range:
        """Rows of gate and up, columns of down."""
        return self._even(intermediate_size, "feed-forward size")

    def vocabulary(self, vocab_size: int) -> range:
        """Rows of embedding and head. Every rank but the last ones has `vocabulary_width` of them."""
        width = self.vocabulary_width(vocab_size)
        start = min(vocab_size, self.tensor_rank * width)
        return range(start, min(vocab_size, start + width))

    def vocabulary_width(self, vocab_size: int) -> int:
        """The most rows of embedding and head that a rank has."""
        return -(-vocab_size // self.tensor_size)

    def experts(self, num_experts: int) -> range:
        """Experts of each layer; each is split over the tensor ranks like a dense feed-forward."""
        if num_experts % self.expert_size:
            raise IndivisibleError(
                f"expert_parallel_size={self.expert_size} does not divide the model's {num_experts} experts: "
                f"use {_divisors(num_experts)}"
            )
        return _part(num_experts, self.expert_rank, self.expert_size)

    def _even(self, size: int, what: str) -> range:
        if size % self.tensor_size:
            raise IndivisibleError(
                f"tensor_parallel_size={self.tensor_size} does not divide the model's {size} {what}: "
                f"use {_divisors(size)}"
            )
        return _part(size, self.tensor_rank, self.tensor_size)


def _part(size: int, index: int, parts: int) -> range:
    each, over = divmod(size, parts)
    start = index * each + min(index, over)
    return range(start, start + each + (index < over))


def _divisors(size: int) -> str:
    """The divisors of `size` up to 64, for an error message."""
    found = [number for number in range(1, min(size, 64) + 1) if size % number == 0]
    return ", ".join(map(str, found[:-1])) + f" or {found[-1]}" if len(found) > 1 else "1"


def _fitting(wanted: int, num_kv_heads: int) -> str:
    below = wanted // num_kv_heads * num_kv_heads
    return f"{below} or {below + num_kv_heads}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankIdentity:
    """One rank.

    rank, world:             of the engine.
    local_rank, local_world: of this machine or pod.
    address, port:           where rank 0 listens.
    """

    rank: int
    world: int
    local_rank: int
    local_world: int
    address: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeIdentity:
    """This machine or pod among those of the engine. A single node has port None: it picks a free one."""

    node_rank: int = 0
    nodes: int = 1
    ranks_per_node: int
    address: str = "127.0.0.1"
    port: int | None = None


def rank_identity(sizes: ParallelSizes, environment: Mapping[str, str] = os.environ) -> RankIdentity | None:
    """This process's rank from the environment variables of torchrun, the launcher or a pod of one rank.

    Returns None if the ranks of this node have not been started yet. Raises IndivisibleError if the variables describe
    an engine of another size.
    """
    node = node_identity(sizes, environment)
    if "RANK" in environment:
        rank, local_rank, local_world = (
            int(environment.get(name, default))
            for name, default in (("RANK", "0"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1"))
        )
        _check_world(sizes, int(environment.get("WORLD_SIZE", str(sizes.world))))
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
        port=int(environment.get("MASTER_PORT", RENDEZVOUS_PORT)),
    )


def node_identity(sizes: ParallelSizes, environment: Mapping[str, str] = os.environ) -> NodeIdentity:
    """This node, from NNODES, NODE_RANK, NPROC_PER_NODE, MASTER_ADDR and MASTER_PORT.

    Raises IndivisibleError if the nodes do not hold all ranks.
    """
    nodes = int(environment.get("NNODES", "1"))
    if nodes == 1:
        return NodeIdentity(ranks_per_node=sizes.world)
    per_node = int(environment.get("NPROC_PER_NODE", str(max(1, sizes.world // nodes))))
    _check_world(sizes, nodes * per_node)
    return NodeIdentity(
        node_rank=int(environment.get("NODE_RANK", "0")),
        nodes=nodes,
        ranks_per_node=per_node,
        address=environment["MASTER_ADDR"],
        port=int(environment.get("MASTER_PORT", RENDEZVOUS_PORT)),
    )


def _check_world(sizes: ParallelSizes, world: int) -> None:
    if world != sizes.world:
        raise IndivisibleError(
            f"{world} ranks were started, tensor {sizes.tensor} x pipeline {sizes.pipeline} x expert {sizes.expert} "
            f"is {sizes.world}: make NNODES x NPROC_PER_NODE (torchrun: --nnodes x --nproc-per-node) equal to it"
        )
