"""vLLM's cache events become the digests that the coordinator routes by."""

from __future__ import annotations

from megatron_runtime.requests.hashing import block_digests

TOKENS = list(range(100, 112))
DIGESTS = block_digests(TOKENS, 4)


def _translator():
    from megatron_runtime.backends.vllm.cache_events import CacheEventTranslator

    return CacheEventTranslator(4)


def _batch(*events):
    from vllm.distributed.kv_events import KVEventBatch

    return KVEventBatch(ts=0.0, events=list(events))


def _stored(hashes, tokens, *, parent=None, keys=None, adapter=None):
    from vllm.distributed.kv_events import BlockStored

    return BlockStored(
        block_hashes=hashes,
        parent_block_hash=parent,
        token_ids=tokens,
        block_size=4,
        lora_name=adapter,
        extra_keys=keys,
    )


def test_stored_blocks_have_the_digests_of_their_whole_prefix() -> None:
    translator = _translator()
    first = translator.translate(0, _batch(_stored([7], TOKENS[:4])))
    second = translator.translate(1, _batch(_stored([8, 9], TOKENS[4:], parent=7)))
    assert [*first.stored, *second.stored] == DIGESTS


def test_salts_and_adapters_have_blocks_of_their_own() -> None:
    salted = _stored([7], TOKENS[:4], keys=[("tenant",)])
    assert _translator().translate(0, _batch(salted)).stored == block_digests(TOKENS[:4], 4, salt=b"tenant")
    adapted = _stored([8], TOKENS[:4], keys=[("sql@1",)], adapter="sql@1")
    assert _translator().translate(0, _batch(adapted)).stored == block_digests(TOKENS[:4], 4, adapter="sql@1")
    both = _stored([9], TOKENS[:4], keys=[("sql@1", "tenant")], adapter="sql@1")
    expected = block_digests(TOKENS[:4], 4, salt=b"tenant", adapter="sql@1")
    assert _translator().translate(0, _batch(both)).stored == expected


def test_blocks_have_the_digests_of_the_media_in_them() -> None:
    from megatron_runtime.backends.vllm.cache_events import CacheEventTranslator

    translator = CacheEventTranslator(4, {"hash of a cat": b"cat", "hash of a dog": b"dog"})
    keys = [("tenant", ["hash of a cat", 2]), (["hash of a cat", -2], ["hash of a dog", 3]), None]
    events = translator.translate(0, _batch(_stored([7, 8, 9], TOKENS, keys=keys)))
    assert events.stored == block_digests(TOKENS, 4, salt=b"tenant", media={0: b"cat", 1: b"catdog"})


def test_removed_blocks_are_evicted_by_their_digest() -> None:
    from vllm.distributed.kv_events import BlockRemoved

    translator = _translator()
    translator.translate(0, _batch(_stored([7, 8, 9], TOKENS)))
    events = translator.translate(1, _batch(BlockRemoved(block_hashes=[8, 55])))
    assert (events.stored, events.evicted, events.cleared) == ([], DIGESTS[1:2], False)


def test_a_block_that_is_stored_and_removed_in_one_batch_is_not_stored() -> None:
    from vllm.distributed.kv_events import BlockRemoved

    batch = _batch(_stored([7, 8], TOKENS[:8]), BlockRemoved(block_hashes=[8]), _stored([9], TOKENS[4:8], parent=7))
    events = _translator().translate(0, batch)
    assert (sorted(events.stored), events.evicted) == (sorted(DIGESTS[:2]), [])


def test_an_engine_has_the_blocks_of_any_of_its_data_parallel_ranks() -> None:
    from megatron_runtime.backends.vllm.cache_events import MergedCaches
    from megatron_runtime.engine.backend import CacheEvents

    a, b, c = DIGESTS
    merged = MergedCaches(2)
    assert merged.merge(0, CacheEvents([a, b])) == CacheEvents([a, b], [])
    assert merged.merge(1, CacheEvents([b, c])) == CacheEvents([c], [])
    assert not merged.merge(0, CacheEvents([], [b]))
    assert merged.merge(1, CacheEvents([], [b, c])) == CacheEvents([], [b, c])
    assert not merged.merge(1, CacheEvents([a]))
    assert merged.merge(0, CacheEvents([c], cleared=True)) == CacheEvents([c], [])
    assert merged.merge(1, CacheEvents(cleared=True)) == CacheEvents([], [a])


def test_blocks_of_another_size_are_ignored() -> None:
    other = _stored([7], TOKENS[:8])
    other.block_size = 8
    assert not _translator().translate(0, _batch(other))


def test_a_cleared_cache_and_a_lost_batch_clear_the_prefix_table() -> None:
    from vllm.distributed.kv_events import AllBlocksCleared

    translator = _translator()
    translator.translate(0, _batch(_stored([7], TOKENS[:4])))
    assert translator.translate(1, _batch(AllBlocksCleared())).cleared
    assert not translator.translate(2, _batch(_stored([8], TOKENS[4:8], parent=7)))
    assert translator.translate(4, _batch(_stored([9], TOKENS[:4]))).cleared
