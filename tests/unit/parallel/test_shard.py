"""The ranks of an engine hold each part of the model once. Sizes that do not divide are rejected by name."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_runtime.distributed.shard import (
    IndivisibleError,
    ParallelSizes,
    RankIdentity,
    Shard,
    node_identity,
    rank_identity,
)

SIZES = st.builds(ParallelSizes, tensor=st.integers(1, 6), pipeline=st.integers(1, 5), expert=st.integers(1, 4))


def shards(sizes: ParallelSizes) -> list[Shard]:
    return [sizes.shard(rank) for rank in range(sizes.world)]


@given(SIZES)
def test_ranks_are_numbered_tensor_first(sizes: ParallelSizes) -> None:
    found = shards(sizes)
    assert [shard.rank for shard in found] == list(range(sizes.world))
    places = [(shard.pipeline_rank, shard.expert_rank, shard.tensor_rank) for shard in found]
    assert places == sorted(set(places))


@given(SIZES, st.integers(1, 7), st.integers(5, 40), st.integers(1, 1000))
def test_every_part_is_held_once(sizes: ParallelSizes, factor: int, layers: int, vocabulary: int) -> None:
    heads = sizes.tensor * factor
    for tensor_rank_zero in [one for one in shards(sizes) if one.tensor_rank == 0]:
        group = shards(sizes)[tensor_rank_zero.rank : tensor_rank_zero.rank + sizes.tensor]
        for held, size in (
            ([shard.heads(heads) for shard in group], heads),
            ([shard.feed_forward(heads) for shard in group], heads),
            ([shard.vocabulary(vocabulary) for shard in group], vocabulary),
        ):
            assert [item for part in held for item in part] == list(range(size))
        assert max(len(shard.vocabulary(vocabulary)) for shard in group) == group[0].vocabulary_width(vocabulary)
    stages = [one for one in shards(sizes) if one.tensor_rank == one.expert_rank == 0]
    assert [layer for stage in stages for layer in stage.layers(layers)] == list(range(layers))
    assert len(stages[0].layers(layers)) == max(len(stage.layers(layers)) for stage in stages)
    assert [stage.has_embedding for stage in stages] == [True] + [False] * (sizes.pipeline - 1)
    assert [stage.has_head for stage in stages] == [False] * (sizes.pipeline - 1) + [True]


@pytest.mark.parametrize(
    ("tensor", "heads", "kv_heads"), [(2, 4, 1), (4, 8, 2), (3, 9, 3), (2, 8, 4), (6, 12, 3), (1, 9, 3)]
)
def test_a_rank_holds_the_key_value_heads_of_its_query_heads(tensor: int, heads: int, kv_heads: int) -> None:
    for shard in shards(ParallelSizes(tensor=tensor)):
        group = heads // kv_heads
        assert list(shard.kv_heads(kv_heads)) == sorted({head // group for head in shard.heads(heads)})


def test_indivisible_sizes_are_rejected_with_numbers_and_remedy() -> None:
    shard = ParallelSizes(tensor=2, pipeline=4, expert=3).shard(0)
    for reject, message in (
        (lambda: shard.heads(9), r"tensor_parallel_size=2 does not divide the model's 9 query heads: use 1, 3 or 9"),
        (lambda: shard.kv_heads(3), r"tensor_parallel_size=2 does not divide the model's 3 key-value heads"),
        (lambda: shard.feed_forward(7), r"2 does not divide the model's 7 feed-forward size: use 1 or 7"),
        (lambda: shard.layers(3), r"pipeline_parallel_size=4: the model has 3 layers: use at most that"),
        (lambda: shard.experts(8), r"expert_parallel_size=3 does not divide the model's 8 experts: use 1, 2, 4 or 8"),
        (lambda: ParallelSizes(tensor=4).shard(0).kv_heads(3), r"not a multiple of the model's 3 .*: use 3 or 6"),
        (lambda: ParallelSizes(tensor=0), "tensor_parallel_size=0: want at least 1"),
        (
            lambda: ParallelSizes(tensor=2, expert=2, data=3),
            "expert_parallel_size=2: with data_parallel_size=3 want 1 or tensor x data = 6",
        ),
        (lambda: ParallelSizes().shard(1), "rank 1: tensor x pipeline x expert is 1 ranks"),
    ):
        with pytest.raises(IndivisibleError, match=message):
            reject()


@pytest.mark.parametrize("expert", [1, 8])
def test_data_parallelism_replaces_the_expert_dimension(expert: int) -> None:
    sizes = ParallelSizes(tensor=2, pipeline=3, expert=expert, data=4)
    assert sizes.world == 24
    with pytest.raises(IndivisibleError, match="tensor 2 x pipeline 3 x data 4 is 24"):
        node_identity(sizes, {"NNODES": "2", "NPROC_PER_NODE": "1", "MASTER_ADDR": "a"})


def test_rank_is_read_from_torchrun_or_the_pod() -> None:
    sizes = ParallelSizes(tensor=2, pipeline=2)
    torchrun = {"RANK": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "a"}
    assert rank_identity(sizes, torchrun) == RankIdentity(
        rank=3, world=4, local_rank=1, local_world=2, address="a", port=29500
    )
    pod = {"NNODES": "4", "NODE_RANK": "2", "NPROC_PER_NODE": "1", "MASTER_ADDR": "e-0.e", "MASTER_PORT": "29500"}
    assert rank_identity(sizes, pod) == RankIdentity(
        rank=2, world=4, local_rank=0, local_world=1, address="e-0.e", port=29500
    )
    shared = {**pod, "NNODES": "2", "NPROC_PER_NODE": "2", "NODE_RANK": "1"}
    assert rank_identity(sizes, shared) is None
    node = node_identity(sizes, shared)
    assert (node.node_rank, node.nodes, node.ranks_per_node, node.address, node.port) == (1, 2, 2, "e-0.e", 29500)
    assert rank_identity(sizes, {}) is None
    assert node_identity(sizes, {}).ranks_per_node == 4
    for wrong in ({**torchrun, "WORLD_SIZE": "8"}, {**pod, "NNODES": "3"}):
        with pytest.raises(IndivisibleError, match="tensor 2 x pipeline 2 x expert 1 is 4"):
            rank_identity(sizes, wrong)
