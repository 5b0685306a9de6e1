"""KV blocks of engines of several ranks: each rank reads and writes its own part, and the answers stay the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import pytest
from rank_program import KV_CACHE_MEMORY

from megatron_runtime.backends.native.backend import NativeBackend
from megatron_runtime.backends.native.cpu.executor import CpuExecutor
from megatron_runtime.backends.native.engine import EngineCore
from megatron_runtime.backends.native.micro_batches import expert_of_pages
from megatron_runtime.backends.native.ranked.channel import Kind
from megatron_runtime.backends.native.ranked.executor import EnginePart, RankedExecutor
from megatron_runtime.backends.native.ranked.plan_codec import pack_frames, unpack_frames
from megatron_runtime.checkpoints.source import resolve
from megatron_runtime.distributed.shard import ParallelSizes
from megatron_runtime.distributed.watch import StepProgress
from megatron_runtime.engine.backend import Capability, UnsupportedVerbError
from megatron_runtime.protocol.messages import KVPort
from megatron_runtime.requests.config import InferenceConfig

from .test_ranks_match_one_rank import alone, check_equal

ONE = ParallelSizes()
SIZES = [
    ParallelSizes(tensor=2),
    ParallelSizes(pipeline=2),
    ParallelSizes(tensor=2, pipeline=2),
    ParallelSizes(expert=2),
    ParallelSizes(tensor=2, pipeline=2, expert=2),
]
TABLE = np.array([[4, 9], [2, 3], [7, 8]], np.int32)
"""Pages of a prompt of three blocks."""
BLOCKS = range(1, 3)
PROMPTS = [[5] * 40, [7, 3] * 33, [2, 9, 4] * 18, [11] * 35 + [6] * 9]


class RanksInProcess:
    """Implements post() and collect() of LeaderChannel for ranks in this process.

    received: bytes of the orders by rank.
    """

    failure = None

    def __init__(self, executors: list[CpuExecutor]) -> None:
        self._parts = list(map(EnginePart, executors))
        self._answers: dict[int, Any] = {}
        self.received = [0] * len(executors)

    def post(self, kind: Kind, body: Any, by_rank: Mapping[int, Any] | None = None) -> int:
        for rank in range(1, len(self._parts)):
            frames = pack_frames((by_rank or {}).get(rank, body))
            self.received[rank] += sum(map(len, frames))
            answer = pack_frames([None, self._parts[rank].perform(*unpack_frames(frames))])
            self._answers[rank] = unpack_frames(answer)
        return 1

    def collect(self, number: int, ranks: Iterable[int]) -> dict[int, Any]:
        return {rank: self._answers[rank] for rank in ranks if rank}


def executor_of(model: str, sizes: ParallelSizes, rank: int) -> CpuExecutor:
    memory = {"kv_cache_memory": KV_CACHE_MEMORY, "threads": 1}
    executor = CpuExecutor(resolve(model), dtype="float32", shard=sizes.shard(rank), **memory)
    executor._pool.allocate()
    return executor


def engine_of(model: str, sizes: ParallelSizes) -> tuple[RankedExecutor, RanksInProcess, list[CpuExecutor]]:
    parts = [executor_of(model, sizes, rank) for rank in range(sizes.world)]
    channel: Any = RanksInProcess(parts)
    engine = RankedExecutor(
        parts[0], channel, sizes, progress=StepProgress(), warm_up=lambda _pages: [], measures=False
    )
    return engine, channel, parts


@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: sizes.product)
def test_each_rank_gets_its_part_of_a_block(mixtral: str, sizes: ParallelSizes) -> None:
    engine, channel, parts = engine_of(mixtral, sizes)
    data = np.random.default_rng(1).random(engine.page_bytes // 4 * 4, dtype=np.float32).tobytes()
    assert len(data) == engine.page_bytes * TABLE[BLOCKS.start : BLOCKS.stop].size
    channel.received = [0] * sizes.world
    engine.write_blocks(TABLE, BLOCKS, data)
    received = channel.received
    assert engine.read_blocks(TABLE, BLOCKS) == data
    assert engine.read_blocks(TABLE, range(2, 3)) == data[len(data) // 2 :]
    owner = expert_of_pages(TABLE[:1, 0], sizes.expert)[0]
    contents = [part.read_blocks(TABLE, BLOCKS) for part in parts]
    holders = [rank for rank in range(sizes.world) if sizes.shard(rank).expert_rank == owner]
    assert sorted(b"".join(contents[rank] for rank in holders)) == sorted(data)
    for rank in range(1, sizes.world):
        assert received[rank] - (len(contents[rank]) if rank in holders else 0) < 200, "the rank gets only its part"
    for rank in set(range(sizes.world)) - set(holders):
        assert not any(contents[rank]), "the requests of this expert rank do not have the block"


def test_engines_that_divide_a_model_differently_have_different_layouts(
    mixtral: str, llama: Callable[..., str]
) -> None:
    layouts = {executor_of(mixtral, ONE, 0).kv_layout, *(engine_of(mixtral, sizes)[0].kv_layout for sizes in SIZES)}
    assert len(layouts) == 1 + len(SIZES)
    assert max(map(len, layouts)) <= 100
    again, other = (engine_of(model, SIZES[0])[0].kv_layout for model in (mixtral, llama(6, 2)))
    assert again in layouts
    assert other not in layouts


def test_an_engine_of_several_ranks_exchanges_blocks(mixtral: str) -> None:
    engine = engine_of(mixtral, SIZES[-1])[0]
    backend = NativeBackend(EngineCore(engine, InferenceConfig(enable_prefix_caching=True)), ranks=engine)
    backend.info.require("--role prefill", Capability.KV_TRANSFER)
    assert backend.kv is not None
    assert backend.kv.block_bytes == engine.page_bytes * (backend.info.block_size_tokens // engine.page_size)
    port = KVPort(address="tcp://10.0.0.7:5558", layout=backend.kv.layout, block_bytes=backend.kv.block_bytes)
    assert port.layout == backend.kv.layout
    without = NativeBackend(EngineCore(engine, InferenceConfig()), ranks=engine)
    with pytest.raises(UnsupportedVerbError, match="use prefix caching"):
        without.info.require("--role prefill", Capability.KV_TRANSFER)


@pytest.mark.long
@pytest.mark.parametrize(
    ("tensor", "pipeline", "expert"),
    [pytest.param(2, 2, 1, id="TP 2 x PP 2"), pytest.param(2, 1, 2, id="TP 2 x EP 2")],
)
def test_answers_after_an_import_equal_one_rank(
    start, llama: Callable[..., str], mixtral: str, *, tensor: int, pipeline: int, expert: int
) -> None:
    options = {
        "prompts": PROMPTS,
        "sampling": [{"temperature": 0.0, "return_log_probs": True, "skip_prompt_log_probs": True}] * len(PROMPTS),
        "model": mixtral if expert > 1 else llama(4, 2),
        "records_routing": False,
    }
    sizes = {"tensor": tensor, "pipeline": pipeline, "expert": expert}
    exporter = start({**options, **sizes, "imports": [], "fail": [1, "read_blocks", 1]})
    expected, exported = alone(options["model"], options), exporter.next_message()
    assert exporter.exit_codes() == [0] * 4
    check_equal(exported["answers"], expected)
    importer = start({**options, **sizes, "imports": exported["exports"], "fail": [1, "write_blocks", 1]})
    imported = importer.next_message()
    assert importer.exit_codes() == [0] * 4
    check_equal(imported["answers"], expected)
    assert imported["exports"] == exported["exports"]
    assert imported["layout"] == exported["layout"]
    assert imported["computed"] == exported["computed"] - sum(16 * len(digests) for digests, _ in exported["exports"])
    for engine, name in ((exported, "read_blocks"), (imported, "write_blocks")):
        assert engine["errors"] == [f"rank 1: {name}: {name} fails: injected fault"]
        assert len(set(engine["owners"].values())) == expert
    assert (imported["owners"] == exported["owners"]) == (expert == 1)
