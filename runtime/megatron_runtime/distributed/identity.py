"""Which rank this process is, as torchrun's environment says it. No torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_runtime.distributed.shard import IndivisibleError, ParallelSizes

RENDEZVOUS_PORT = 29500


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
    """This machine or pod among those of the engine; alone, it is the only one and picks a port."""

    node_rank: int = 0
    nodes: int = 1
    ranks_per_node: int
    address: str = "127.0.0.1"
    port: int | None = None


def rank_identity(sizes: ParallelSizes, environment: Mapping[str, str] = os.environ) -> RankIdentity | None:
    """What torchrun, the launcher or the pod of a single rank told; None where ranks have yet to be started.

    Raises IndivisibleError when it is not about an engine of these sizes.
    """
    node = node_identity(sizes, environment)
    if "RANK" in environment:
        rank = int(environment["RANK"])
        local_rank = int(environment.get("LOCAL_RANK", "0"))
        local_world = int(environment.get("LOCAL_WORLD_SIZE", "1"))
        _check_world(sizes, int(environment.get("WORLD_SIZE", str(sizes.world))))
    elif node.nodes > 1 and node.ranks_per_node == 1:
        rank, local_rank, local_world = node.node_rank, 0, 1
    else:
        return None
    port = int(environment.get("MASTER_PORT", str(RENDEZVOUS_PORT)))
    address = environment.get("MASTER_ADDR", node.address)
    return RankIdentity(
        rank=rank, world=sizes.world, local_rank=local_rank, local_world=local_world, address=address, port=port
    )


def node_identity(sizes: ParallelSizes, environment: Mapping[str, str] = os.environ) -> NodeIdentity:
    """Raises IndivisibleError when the nodes do not hold all ranks."""
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
        port=int(environment.get("MASTER_PORT", str(RENDEZVOUS_PORT))),
    )


def _check_world(sizes: ParallelSizes, world: int) -> None:
    if world != sizes.world:
        raise IndivisibleError(
            f"{world} ranks were started, tensor {sizes.tensor} x pipeline {sizes.pipeline} x expert {sizes.expert} "
            f"is {sizes.world}: make NNODES x NPROC_PER_NODE (torchrun: --nnodes x --nproc-per-node) equal to it"
        )
