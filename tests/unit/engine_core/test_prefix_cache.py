"""Pages are free, held or idle, each exactly once; the prefix cache follows its rules, also under random use."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule
from soak import size

from megatron_runtime.backends.native.kv.prefix_cache import PrefixCache
from megatron_runtime.requests.config import PrefixCachingEvictionPolicy

NO_PAGES = np.empty(0, np.int32)
LRU = PrefixCachingEvictionPolicy.LRU
REF_ZERO = PrefixCachingEvictionPolicy.REF_ZERO


def make(pages: int = 9, policy: PrefixCachingEvictionPolicy = LRU, *, pages_per_block: int = 1) -> PrefixCache:
    return PrefixCache(pages, policy, pages_per_block=pages_per_block)


def fill(cache: PrefixCache, *keys: bytes) -> np.ndarray:
    """Compute and register a chain of blocks, as one request does. Returns the pages it holds."""
    found = cache.find(keys)
    held = [cache.pin(found)]
    for key in keys[len(found) :]:
        pages = cache.allocate(cache.pages_per_block)
        assert pages is not None
        assert cache.register(key, pages)
        held.append(pages)
    return np.concatenate(held)


def allocate(cache: PrefixCache, count: int) -> np.ndarray:
    pages = cache.allocate(count)
    assert pages is not None
    return pages


def test_the_last_page_is_a_dummy_that_is_never_allocated() -> None:
    cache = make(pages=5)
    assert (cache.dummy, cache.num_usable) == (4, 4)
    assert cache.allocate(5) is None
    assert sorted(allocate(cache, 4).tolist()) == [0, 1, 2, 3]


def test_too_few_pages_in_total_are_rejected_with_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"num_pages=1.*kv_cache_memory"):
        make(pages=1)


def test_an_allocation_of_too_many_pages_changes_nothing() -> None:
    cache = make(pages=5)
    taken = allocate(cache, 3)
    assert cache.allocate(2) is None
    assert cache.num_free == 1
    cache.check_integrity(taken)


def test_free_pages_are_allocated_last_in_first_out() -> None:
    cache = make(pages=10)
    first = allocate(cache, 4)
    cache.release(first)
    assert allocate(cache, 4).tolist() == first.tolist()


def test_a_page_of_several_owners_is_freed_by_the_last_and_the_order_of_release_is_kept() -> None:
    cache = make(pages=10, policy=REF_ZERO)
    held = fill(cache, b"a")
    shared = cache.pin(cache.find([b"a"]))
    others = allocate(cache, 2)
    assert cache.num_held == 3
    cache.release(np.concatenate([held, others[::-1]]))
    assert (cache.num_held, cache.num_free) == (1, 8)
    cache.release(shared)
    assert cache.num_free == 9
    cache.check_integrity(NO_PAGES)
    assert allocate(cache, 3).tolist() == [*held, *others[::-1]]


def test_a_cached_page_is_idle_without_owners_and_free_after_clear() -> None:
    cache = make(pages=10)
    cache.release(fill(cache, b"a", b"b", b"c"))
    assert (cache.num_free, cache.num_idle, cache.num_held) == (6, 3, 0)
    held = cache.pin(cache.find([b"a"]))
    cache.check_integrity(held)
    assert (cache.num_idle, cache.num_held) == (2, 1)
    cache.clear()
    assert (cache.num_free, cache.num_idle, cache.num_held) == (8, 0, 1)
    cache.check_integrity(held)


def test_a_page_released_more_often_than_held_is_an_error() -> None:
    cache = make(pages=10)
    taken = allocate(cache, 1)
    cache.release(taken)
    with pytest.raises(AssertionError, match="more often than held"):
        cache.release(taken)


def test_the_integrity_check_finds_a_leaked_page() -> None:
    cache = make(pages=10)
    taken = allocate(cache, 2)
    with pytest.raises(AssertionError, match="owners"):
        cache.check_integrity(taken[:1])


def test_the_chain_breaks_at_the_first_miss() -> None:
    cache = make()
    fill(cache, b"a", b"b")
    assert [block.key for block in cache.find([b"a", b"b", b"c"])] == [b"a", b"b"]
    assert [block.key for block in cache.find([b"a", b"x", b"b"])] == [b"a"]
    assert cache.find([b"b"]) != []  # keys are digests of the whole prefix: no caller looks up b alone


def test_ref_zero_evicts_at_once_and_lru_keeps_idle_blocks() -> None:
    for policy, kept in ((REF_ZERO, 0), (LRU, 2)):
        cache = make(policy=policy)
        held = fill(cache, b"a", b"b")
        cache.release(held)
        assert len(cache) == kept
        assert cache.num_held == 0
        assert cache.num_available() == 8
        cache.check_integrity(NO_PAGES)
        assert sorted(cache.take_events().evicted) == ([b"a", b"b"] if policy is REF_ZERO else [])


def test_a_block_that_is_cached_again_is_not_reported_as_evicted() -> None:
    cache = make(pages=3)
    cache.release(fill(cache, b"a"))
    taken = cache.allocate(2)
    assert taken is not None
    cache.release(taken)
    cache.release(fill(cache, b"a"))
    events = cache.take_events()
    assert (events.stored, events.evicted) == ([b"a"], [])


def test_idle_blocks_stay_evictable_however_often_they_were_used() -> None:
    cache = make(pages=4)
    for _ in range(200):
        for key in (b"a", b"b", b"c"):
            cache.release(fill(cache, key))
        cache.check_integrity(NO_PAGES)
    assert cache.allocate(3) is not None
    assert len(cache) == 0


def test_lru_evicts_the_block_idle_for_longest_and_never_a_block_before_its_continuation() -> None:
    cache = make(pages=5)
    old = fill(cache, b"a", b"b")
    new = fill(cache, b"x", b"y")
    cache.release(old)
    cache.release(new)
    cache.take_events()
    order, taken = [], [NO_PAGES]
    for _ in range(4):
        taken.append(allocate(cache, 1))
        order += cache.take_events().evicted
        cache.check_integrity(np.concatenate(taken))
    assert order == [b"b", b"a", b"y", b"x"]


def test_blocks_that_were_released_together_are_evicted_from_the_last_to_the_first() -> None:
    cache = make(pages=4)
    cache.release(np.concatenate([fill(cache, key) for key in (b"b", b"a", b"c")]))
    assert cache.allocate(3) is not None
    assert cache.take_events().evicted == [b"c", b"a", b"b"]


def test_a_prefix_that_was_used_again_outlives_its_continuation() -> None:
    cache = make(pages=4)
    cache.release(fill(cache, b"a", b"b"))
    cache.release(fill(cache, b"x"))
    cache.release(cache.pin(cache.find([b"a"])))
    assert cache.allocate(3) is not None
    assert cache.take_events().evicted == [b"b", b"x", b"a"]


def test_a_held_block_is_never_evicted_and_a_failed_allocation_evicts_nothing() -> None:
    cache = make(pages=5)
    held = fill(cache, b"a", b"b")
    cache.release(fill(cache, b"x"))
    cache.take_events()
    assert cache.allocate(3) is None
    assert len(cache) == 3
    assert not cache.take_events()
    assert cache.allocate(2) is not None
    assert cache.take_events().evicted == [b"x"]
    assert [block.key for block in cache.find([b"a", b"b"])] == [b"a", b"b"]
    cache.release(held)


def test_a_block_used_again_is_evicted_later() -> None:
    cache = make(pages=3)
    for key in (b"a", b"b"):
        cache.release(fill(cache, key))
    cache.release(cache.pin(cache.find([b"a"])))
    assert cache.allocate(1) is not None
    assert cache.take_events().evicted == [b"b"]


def test_the_same_key_again_changes_nothing_and_another_key_on_a_live_block_is_an_error() -> None:
    cache = make()
    pages = fill(cache, b"a")
    other = cache.allocate(1)
    assert other is not None
    assert cache.register(b"a", pages)
    assert not cache.register(b"a", other)
    assert cache.take_events().stored == [b"a"]
    with pytest.raises(AssertionError, match="cannot hold another"):
        cache.register(b"z", pages)


def test_available_pages_do_not_include_the_blocks_that_the_request_will_pin() -> None:
    cache = make(pages=9, pages_per_block=2)
    cache.release(fill(cache, b"a", b"b"))
    matched = cache.find([b"a", b"b"])
    assert cache.num_available() == 8
    assert cache.num_available(matched) == 4
    cache.pin(matched[:1])
    assert cache.num_available(matched) == 4
    cache.pin(matched[1:])
    assert cache.num_available(matched) == 4


def test_usage_counts_a_shared_block_once() -> None:
    cache = make(pages_per_block=2)
    fill(cache, b"a")
    cache.pin(cache.find([b"a"]))
    assert cache.num_held == 2


def test_clear_evicts_all_blocks_and_frees_the_pages_without_an_owner() -> None:
    cache = make()
    held = fill(cache, b"a", b"b")
    cache.release(fill(cache, b"x"))
    cache.take_events()
    cache.clear()
    events = cache.take_events()
    assert events.cleared
    assert not events.evicted
    assert not cache.find([b"a"])
    cache.check_integrity(held)
    assert cache.num_idle == 0
    cache.release(held)
    assert cache.num_free == 8


def test_a_stored_block_is_reported_once() -> None:
    cache = make()
    fill(cache, b"a")
    assert cache.take_events().stored == [b"a"]
    assert not cache.take_events()


class Machine(RuleBasedStateMachine):
    """Requests have chains from a small tree of prefixes, and end in any order."""

    requests = Bundle("requests")

    def __init__(self) -> None:
        super().__init__()
        self.cache = self.fresh()
        self.held: dict[int, np.ndarray] = {}
        self.findable: set[bytes] = set()

    def fresh(self) -> PrefixCache:
        return make(pages=14, pages_per_block=2)

    @rule(target=requests, path=st.lists(st.sampled_from(b"ab"), min_size=1, max_size=4), tail=st.integers(0, 2))
    def admit(self, path: list[int], tail: int) -> int:
        keys = [bytes(path[: depth + 1]) for depth in range(len(path))]
        matched = self.cache.find(keys)
        needed = 2 * (len(keys) - len(matched)) + tail
        fits = needed <= self.cache.num_available(matched)
        pages = self.cache.pin(matched)
        new = self.cache.allocate(needed)
        assert (new is not None) is fits
        number = len(self.held) and max(self.held) + 1
        if new is None:
            self.cache.release(pages)
            self.held[number] = np.empty(0, np.int32)
            return number
        for index, key in enumerate(keys[len(matched) :]):
            assert self.cache.register(key, new[2 * index : 2 * index + 2])
        self.held[number] = np.concatenate([pages, new])
        return number

    @rule(request=requests)
    def finish(self, request: int) -> None:
        self.cache.release(self.held[request])
        self.held[request] = np.empty(0, np.int32)

    @rule()
    def clear(self) -> None:
        self.cache.clear()

    @invariant()
    def counts_and_events_agree_with_the_cached_blocks(self) -> None:
        self.cache.check_integrity(np.concatenate([NO_PAGES, *self.held.values()]))
        events = self.cache.take_events()
        if events.cleared:
            self.findable.clear()
        self.findable.difference_update(events.evicted)
        self.findable.update(events.stored)
        keys = set(self.cache._by_key)
        assert self.findable == keys
        assert all(key[:-1] in keys for key in keys if len(key) > 1), "a block outlives the block before it"


class RefZeroMachine(Machine):
    def fresh(self) -> PrefixCache:
        return make(pages=14, policy=REF_ZERO, pages_per_block=2)


TestLru = Machine.TestCase
TestRefZero = RefZeroMachine.TestCase
TestLru.settings = TestRefZero.settings = settings(max_examples=size(12, soak=2000), stateful_step_count=30)
