"""The Lease: one leader, a term that only grows, expiry on the holder's own clock."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import pytest
from eventually import LONG_SECONDS

from megatron_operator.cluster.api import KubeApiError
from megatron_operator.cluster.lease import (
    NAMESPACES_ANNOTATION,
    TERM_ANNOTATION,
    Elector,
    LeadershipLostError,
    LeaseSettings,
)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def elector(store: Any, clock: Clock, identity: str, *, duration: float = 15.0) -> Elector:
    return Elector(store, LeaseSettings("system", "op", identity, duration), clock=clock)


def stored(store: Any) -> dict[str, Any]:
    return store.objects["Lease", "system", "op"]


async def test_first_leader_has_term_one(store: Any) -> None:
    first = elector(store, Clock(), "a")
    with pytest.raises(LeadershipLostError):
        first.require_leadership()

    assert await first.acquire() == 1

    first.require_leadership()
    assert stored(store)["spec"]["holderIdentity"] == "a"
    assert stored(store)["metadata"]["annotations"][TERM_ANNOTATION] == "1"


async def test_the_lease_names_the_namespaces_that_its_holder_serves(store: Any) -> None:
    narrow = LeaseSettings("system", "op", "a", namespaces=("prod", "test"))
    await Elector(store, narrow).acquire()
    assert stored(store)["metadata"]["annotations"][NAMESPACES_ANNOTATION] == "prod,test"
    await Elector(store, LeaseSettings("system", "op", "a")).acquire()
    annotations = stored(store)["metadata"]["annotations"]
    assert NAMESPACES_ANNOTATION not in annotations, "the new holder serves all"
    assert annotations[TERM_ANNOTATION] == "2"


async def test_expiry_is_checked_against_the_holders_clock_before_the_lease_is_free(store: Any) -> None:
    clock = Clock()
    first = elector(store, clock, "a", duration=15)
    await first.acquire()

    clock.now += 9.9
    first.require_leadership()
    clock.now += 0.2
    with pytest.raises(LeadershipLostError, match="not renewed for 10 s"):
        first.require_leadership()


async def test_challenger_waits_its_own_duration_since_it_saw_a_change_and_takes_the_next_term(store: Any) -> None:
    clock = Clock()
    await elector(store, clock, "a").acquire()
    challenger = elector(store, clock, "b")

    assert not await challenger._try_acquire()
    clock.now += 14
    assert not await challenger._try_acquire()
    clock.now += 2
    assert await challenger._try_acquire()

    assert challenger.term == 2
    assert stored(store)["spec"]["leaseTransitions"] == 2


async def test_a_renewal_restarts_the_wait_of_the_challenger(store: Any) -> None:
    clock = Clock()
    first, challenger = elector(store, clock, "a"), elector(store, clock, "b")
    await first.acquire()
    assert not await challenger._try_acquire()

    clock.now += 9
    await first._renew()
    clock.now += 9
    assert not await challenger._try_acquire()
    assert first.term == 1


async def test_same_pod_takes_over_at_once_with_a_new_term(store: Any) -> None:
    clock = Clock()
    await elector(store, clock, "pod_uid").acquire()
    again = elector(store, clock, "pod_uid")

    assert await again.acquire() == 2


async def test_released_lease_is_free_at_once(store: Any) -> None:
    clock = Clock()
    first = elector(store, clock, "a")
    await first.acquire()
    await first.release()
    with pytest.raises(LeadershipLostError):
        first.require_leadership()

    assert await elector(store, clock, "b").acquire() == 2


async def test_only_one_of_two_that_swap_at_once_wins(store: Any) -> None:
    clock = Clock()
    first = elector(store, clock, "a")
    await first.acquire()
    await first.release()

    left, right = elector(store, clock, "l"), elector(store, clock, "r")
    lease = await store.get(_lease_kind(), "system", "op")
    left._lease = right._lease = lease
    await left._write(term=2)
    with pytest.raises(KubeApiError) as rejected:
        await right._write(term=2)

    assert rejected.value.conflict
    assert (left.leading, right.leading) == (True, False)


async def test_old_holder_that_comes_back_finds_the_lease_taken_and_ends(store: Any) -> None:
    clock, thawed = Clock(), Clock()
    first = elector(store, thawed, "a", duration=0.5)
    await first.acquire()
    challenger = elector(store, clock, "b", duration=0.5)
    await challenger._try_acquire()
    clock.now += 2
    assert await challenger._try_acquire()

    with pytest.raises(LeadershipLostError, match="now held by b"):
        await asyncio.wait_for(first.hold(), LONG_SECONDS)
    with pytest.raises(LeadershipLostError):
        first.require_leadership()


async def test_api_outage_ends_leadership_only_after_the_deadline(store: Any) -> None:
    clock = Clock()
    first = elector(store, clock, "a", duration=0.3)
    await first.acquire()
    store.reject = KubeApiError(503, "Unavailable", "try again")
    hold = asyncio.create_task(first.hold())
    await asyncio.sleep(0.2)
    assert not hold.done()

    clock.now += 1
    with pytest.raises(LeadershipLostError):
        await asyncio.wait_for(hold, LONG_SECONDS)


async def test_an_error_of_the_read_after_a_failed_swap_does_not_end_the_leader(store: Any) -> None:
    clock = Clock()
    first = elector(store, clock, "a", duration=0.3)
    await first.acquire()
    store.replace = _raising(KubeApiError(409, "Conflict", "the answer to the last renewal was lost"))
    get = store.get
    store.get = _raising(KubeApiError(503, "Unavailable", "try again"))
    hold = asyncio.create_task(first.hold())
    await asyncio.sleep(0.2)
    assert not hold.done()
    store.get = get
    del store.replace
    await asyncio.sleep(0.2)
    assert not hold.done()
    hold.cancel()


async def test_a_lease_of_the_past_ends_the_leader_because_all_that_it_knows_is_of_the_future(store: Any) -> None:
    first = elector(store, Clock(), "a", duration=0.3)
    await first.acquire()
    backup = copy.deepcopy(stored(store))
    await first._renew()
    store.objects["Lease", "system", "op"] = backup
    with pytest.raises(LeadershipLostError, match="etcd was restored"):
        await asyncio.wait_for(first.hold(), LONG_SECONDS)
    assert not first.leading
    await elector(store, Clock(), "a").acquire()


def _raising(error: KubeApiError) -> Any:
    async def request(*arguments: Any, **options: Any) -> Any:
        raise error

    return request


async def test_a_write_ends_before_another_process_may_lead(store: Any) -> None:
    clock = Clock()
    leader, successor = elector(store, clock, "a"), elector(store, clock, "b")
    await leader.acquire()
    assert not await successor._try_acquire()
    clock.now += 6.0  # near the end of the renewal's validity
    left = leader.write_seconds()
    clock.now += left
    assert not await successor._try_acquire()
    clock.now += 0.1
    assert await successor._try_acquire()
    with pytest.raises(LeadershipLostError):
        leader.write_seconds()


@pytest.mark.parametrize("found", [str(1 << 64), "-3", "many"])
async def test_an_implausible_term_is_counted_from_the_beginning(store: Any, found: str) -> None:
    clock = Clock()
    first = elector(store, clock, "a")
    await first.acquire()
    await first.release()
    stored(store)["metadata"]["annotations"][TERM_ANNOTATION] = found
    assert await elector(store, clock, "b").acquire() == 1


def _lease_kind() -> Any:
    from megatron_operator.cluster.kinds import LEASE

    return LEASE
