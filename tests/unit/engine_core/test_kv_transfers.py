"""Blocks of the prefix cache that engines exchange: what one engine computed, another one continues."""

import contextlib
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from echo_executor import echo_answer
from soak import size

from megatron_runtime.backends.native.engine import EngineCore
from megatron_runtime.engine.kv_transfer import ExportedBlocks, TransferEndedError

from .echo_core import BLOCK, make_engine, request, run, step

PROMPT = list(range(1, 5 * BLOCK))
BLOCKS = 4


def engine(**options: object) -> EngineCore:
    return make_engine(enable_prefix_caching=True, block_size_tokens=BLOCK, **options)


def prefill(core: EngineCore, number: int, prompt: list[int], *, generated: Sequence[int] = ()) -> ExportedBlocks:
    """Compute the blocks of a prompt, while other requests run."""
    core.add_request(replace(request(number, prompt, generated=generated), prefill_only=True))
    while True:
        for output in core.step():
            core.check_integrity()
            if output.request_id == number:
                assert output.exported is not None
                assert output.new_tokens == []
                return output.exported


def move(source: EngineCore, target: EngineCore, number: int, exported: ExportedBlocks) -> None:
    """Import the blocks of an export of the same id."""
    first = target.context.transfers.reserve(number, exported.digests)
    assert first is not None
    target.check_integrity()
    blocks = range(first, len(exported.digests))
    data = source.executor.read_blocks(source.context.transfers.exported(number), blocks)
    target.executor.write_blocks(target.context.transfers.reserved(number), blocks, data)
    target.context.transfers.complete(number)
    target.check_integrity()


def test_an_import_is_a_prefix_hit_and_the_answer_is_the_same() -> None:
    source, target = engine(), engine()
    exported = prefill(source, 1, PROMPT)
    assert len(exported.digests) == BLOCKS
    move(source, target, 1, exported)
    target.add_request(request(2, PROMPT))
    assert run(target) == {2: echo_answer(PROMPT, 10)}
    stats = target.stats()
    assert stats.prompt_tokens == len(PROMPT) - BLOCKS * BLOCK
    assert target.context.transfers.held() == [], "the request has pinned the blocks itself"
    source.context.transfers.release(1)
    source.check_integrity()


def test_a_request_that_another_engine_began_is_continued_after_an_import() -> None:
    source, target = engine(), engine()
    answer = echo_answer(PROMPT, 10)
    exported = prefill(source, 1, PROMPT, generated=answer[:4])
    move(source, target, 1, exported)
    target.add_request(request(2, PROMPT, generated=answer[:4]))
    assert run(target) == {2: answer[4:]}


def test_imported_blocks_stay_until_their_request_although_the_cache_keeps_none() -> None:
    source, target = engine(), engine(prefix_caching_eviction_policy="ref_zero")
    move(source, target, 1, prefill(source, 1, PROMPT))
    target.add_request(request(3, [9] * 20))
    run(target)
    target.add_request(request(2, PROMPT))
    assert run(target) == {2: echo_answer(PROMPT, 10)}
    assert target.stats().prompt_tokens == 20 + len(PROMPT) - BLOCKS * BLOCK


def test_exports_hold_at_most_a_quarter_of_the_cache() -> None:
    source = engine(pages=41)  # 40 usable pages, so exports may hold 10, which are 5 blocks
    assert len(prefill(source, 1, PROMPT).digests) == BLOCKS
    other = [7] * len(PROMPT)
    assert len(prefill(source, 2, other).digests) == 1
    assert prefill(source, 3, [8] * len(PROMPT)).digests == []
    source.context.transfers.release(1)
    assert len(prefill(source, 4, PROMPT).digests) == BLOCKS


def test_an_import_needs_free_blocks() -> None:
    source, target = engine(), engine(pages=7)
    exported = prefill(source, 1, PROMPT)
    assert target.context.transfers.reserve(1, exported.digests) is None
    target.check_integrity()


@pytest.mark.parametrize("change", ["epoch", "suspend", "abort"])
def test_other_weights_and_aborts_end_exports_and_imports(change: str) -> None:
    source, target = (engine(kv_cache_management_mode="recompute") for _ in range(2))
    exported = prefill(source, 1, PROMPT)
    assert target.context.transfers.reserve(1, exported.digests) == 0
    for core in (source, target):
        if change == "epoch":
            core.set_epoch(1)
            assert core.weights != exported.weights
        elif change == "suspend":
            core.suspend()
            core.resume()
        else:
            core.abort_request(1)
        core.check_integrity()
        assert core.context.transfers.held() == []
    with pytest.raises(KeyError):
        source.context.transfers.exported(1)
    with pytest.raises(KeyError):
        target.context.transfers.complete(1)


def test_a_prompt_without_a_complete_block_is_rejected() -> None:
    with pytest.raises(ValueError, match="no block of 8 tokens"):
        engine().add_request(replace(request(1, PROMPT[:9]), prefill_only=True))


def test_two_imports_of_the_same_prompt_share_the_blocks() -> None:
    source, target = engine(), engine()
    exported = prefill(source, 1, PROMPT)
    transfers = target.context.transfers
    assert transfers.reserve(1, exported.digests) == transfers.reserve(2, exported.digests) == 0
    for number in (1, 2):
        data = source.executor.read_blocks(source.context.transfers.exported(1), range(BLOCKS))
        target.executor.write_blocks(transfers.reserved(number), range(BLOCKS), data)
        transfers.complete(number)
        target.check_integrity()
    before = target.context.prefix_cache.num_held
    transfers.release(1)
    target.check_integrity()
    assert target.context.prefix_cache.num_held == before
    transfers.release(2)
    assert target.context.prefix_cache.num_held == 0


def test_blocks_of_two_expert_ranks_do_not_become_one_prefix() -> None:
    """Otherwise a request would run on the rank of the first block, without the KV of the imported blocks."""
    results = set()
    for blocks in range(2, 12):  # the first pages of request and import are of one rank or of two
        prompt = list(range(1, blocks * BLOCK + 3))
        source, target = (engine(expert_size=2, prefix_caching_eviction_policy="lru") for _ in range(2))
        exported = prefill(source, 1, prompt)
        transfers = target.context.transfers
        assert transfers.reserve(1, exported.digests) == 0
        target.add_request(request(2, prompt[: BLOCK + 2]))
        run(target)
        data = source.executor.read_blocks(source.context.transfers.exported(1), range(blocks))
        target.executor.write_blocks(transfers.reserved(1), range(blocks), data)
        try:
            transfers.complete(1)
        except TransferEndedError:
            transfers.release(1)
        results.add(len(target.context.prefix_cache.find(exported.digests)) == blocks)
        target.add_request(request(3, prompt))
        assert run(target) == {3: echo_answer(prompt, 10)}
    assert results == {True, False}


def test_random_prefills_imports_and_aborts_change_no_answer_and_leak_no_page() -> None:
    for seed in range(size(30, soak=3000)):
        rng = random.Random(seed)
        pages = rng.choice((24, 60, 200))
        policy = rng.choice(("lru", "ref_zero"))
        source, target = (
            engine(pages=pages, expert_size=rng.choice((1, 2, 3)), prefix_caching_eviction_policy=policy)
            for _ in range(2)
        )
        answers: dict[int, list[int]] = {}
        prompts: dict[int, list[int]] = {}
        for number in range(12):
            prompt = [rng.choice((5, 6))] * rng.choice((3, 8, 17, 40)) + [number] * rng.choice((0, 9))
            try:
                exported = prefill(source, number, prompt)
            except ValueError:
                exported = ExportedBlocks([], source.weights)
            if exported.digests and target.context.transfers.reserve(100 + number, exported.digests) is not None:
                if rng.random() < 0.7:
                    blocks = range(len(exported.digests))
                    data = source.executor.read_blocks(source.context.transfers.exported(number), blocks)
                    target.executor.write_blocks(target.context.transfers.reserved(100 + number), blocks, data)
                    for _ in range(rng.randrange(3)):
                        step(target, answers)
                    with contextlib.suppress(TransferEndedError):
                        target.context.transfers.complete(100 + number)
                if rng.random() < 0.3:
                    target.abort_request(100 + number)
            if rng.random() < 0.8:
                source.abort_request(number)
            prompts[number] = prompt
            target.add_request(request(number, prompt, 5))
            for _ in range(rng.randrange(4)):
                step(target, answers)
            if rng.random() < 0.1:
                target.set_epoch(target.epoch + 1)
                target.check_integrity()
            source.check_integrity()
        for number in range(12):  # deadlines of the transfers
            source.abort_request(number)
            target.context.transfers.release(100 + number)
        run(target, answers)
        assert answers == {number: echo_answer(prompt, 5) for number, prompt in prompts.items()}, seed
        assert source.context.usage == target.context.usage == 0.0
