"""Pages: free, held or idle, each exactly once."""

import numpy as np
import pytest

from megatron_runtime.backends.native.kv.prefix_cache import BlockAllocator


def pages(*ids: int) -> np.ndarray:
    return np.array(ids, np.int32)


def test_the_last_page_is_a_dummy_that_is_never_given_out() -> None:
    allocator = BlockAllocator(5)
    assert (allocator.dummy, allocator.num_usable) == (4, 4)
    assert allocator.allocate(5) is None
    taken = allocator.allocate(4)
    assert taken is not None
    assert sorted(taken.tolist()) == [0, 1, 2, 3]


def test_too_small_a_pool_is_rejected_with_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"num_pages=1.*kv_cache_memory"):
        BlockAllocator(1)


def test_too_few_pages_and_nothing_is_touched() -> None:
    allocator = BlockAllocator(5)
    taken = allocator.allocate(3)
    assert taken is not None
    assert allocator.allocate(2) is None
    assert allocator.num_free == 1
    allocator.check_integrity(taken)


def test_last_in_first_out() -> None:
    allocator = BlockAllocator(10)
    first = allocator.allocate(4)
    assert first is not None
    allocator.release(first)
    again = allocator.allocate(4)
    assert again is not None
    assert again.tolist() == first.tolist()


def test_a_batched_release_decrements_for_each_entry_and_frees_once() -> None:
    allocator = BlockAllocator(10)
    taken = allocator.allocate(2)
    assert taken is not None
    allocator.pin(taken[:1])
    allocator.pin(taken[:1])
    assert allocator.num_held == 2
    unowned = allocator.release(pages(taken[0], taken[1], taken[0]))
    assert unowned.tolist() == [taken[1]]
    assert allocator.release(taken[:1]).tolist() == [taken[0]]
    assert allocator.num_free == 9
    allocator.check_integrity(pages())


def test_a_batched_release_keeps_its_order_with_shared_pages() -> None:
    allocator = BlockAllocator(10)
    taken = allocator.allocate(3)
    assert taken is not None
    first, second, third = taken.tolist()
    allocator.pin(taken[2:])
    assert allocator.release(pages(third, first, third, second)).tolist() == [third, first, second]
    again = allocator.allocate(3)
    assert again is not None
    assert again.tolist() == [third, first, second]


def test_a_kept_page_is_idle_without_owners_and_free_when_no_longer_kept() -> None:
    allocator = BlockAllocator(10)
    taken = allocator.allocate(3)
    assert taken is not None
    allocator.keep(taken)
    allocator.release(taken)
    assert (allocator.num_free, allocator.num_idle, allocator.num_held) == (6, 3, 0)
    allocator.pin(taken[:1])
    allocator.check_integrity(taken[:1])
    assert (allocator.num_idle, allocator.num_held) == (2, 1)
    allocator.unkeep(taken)
    assert (allocator.num_free, allocator.num_idle, allocator.num_held) == (8, 0, 1)
    allocator.check_integrity(taken[:1])


def test_a_page_released_more_often_than_held_is_an_error() -> None:
    allocator = BlockAllocator(10)
    taken = allocator.allocate(1)
    assert taken is not None
    allocator.release(taken)
    with pytest.raises(AssertionError, match="more often than held"):
        allocator.release(taken)


def test_the_integrity_check_finds_a_leaked_page() -> None:
    allocator = BlockAllocator(10)
    taken = allocator.allocate(2)
    assert taken is not None
    with pytest.raises(AssertionError, match="owners"):
        allocator.check_integrity(taken[:1])
