"""Limits of requests and tokens per minute: counted once, by the coordinator, for all its clients."""

from __future__ import annotations

import asyncio
import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_runtime.coordinator.core.settings import CoordinatorSettings
from megatron_runtime.protocol.headers import Role
from megatron_runtime.protocol.messages import Charge, Error, Hello, HelloAck, Quota, Reserve, decode
from megatron_runtime.requests import quotas
from megatron_runtime.requests.quotas import WINDOW_SECONDS, Quotas

from .core_driver import CoreDriver

LIMIT = 1000


def reserve(tokens: int = 0, *, requests: int = 0, tenant: str = "a", **fields: Any) -> Reserve:
    fields = {"uid": random.randbytes(16), "tokens_per_minute": LIMIT, **fields}
    return Reserve(tenant=tenant, tokens=tokens, requests=requests, **fields)


def charge(tokens: int, *, window: int | None = None, tenant: str = "a") -> Charge:
    return Charge(tenant=tenant, tokens_per_minute=LIMIT, tokens=tokens, window=window)


def left(counts: Quotas, now: float, tenant: str = "a") -> int | None:
    return counts.reserve(now, reserve(tenant=tenant)).tokens_left


def test_a_reservation_is_accepted_if_it_fits_and_says_when_it_will() -> None:
    counts = Quotas()
    assert (left(counts, 0.0), len(counts)) == (LIMIT, 0), "to ask takes no memory and begins no window"
    assert counts.reserve(10.0, reserve(700)).tokens_left == 300
    rejected = counts.reserve(20.0, reserve(301))
    assert not rejected.accepted
    assert rejected.tokens_left == 300, "what is rejected is not counted"
    assert rejected.retry_after_seconds == rejected.tokens_reset_seconds == 50.0
    assert counts.reserve(20.0, reserve(300)).tokens_left == 0
    assert counts.reserve(20.0, reserve(1000, tenant="b")).accepted, "each tenant has its own"
    assert counts.reserve(20.0, reserve(5000, tokens_per_minute=None)).tokens_left is None
    assert not counts.reserve(69.9, reserve(1)).accepted
    assert counts.reserve(70.0, reserve(1000)).accepted
    assert not counts.reserve(71.0, reserve(1001, tenant="c")).accepted, "it never fits"


def test_requests_and_tokens_are_counted_together_or_not_at_all() -> None:
    counts = Quotas()
    both = {"requests_per_minute": 2}
    assert counts.reserve(0.0, reserve(600, requests=1, **both)).requests_left == 1
    rejected = counts.reserve(0.0, reserve(600, requests=1, **both))
    assert (rejected.accepted, rejected.requests_left, rejected.tokens_left) == (False, 1, 400)
    assert counts.reserve(0.0, reserve(400, **both)).accepted, "a reservation without requests needs none left"
    rejected = counts.reserve(1.0, reserve(requests=1, **both))
    assert (rejected.accepted, rejected.requests_left) == (False, 1), "a request without tokens left is rejected"
    assert counts.reserve(1.0, reserve(requests=1, **both, tokens_per_minute=None)).accepted
    assert not counts.reserve(1.0, reserve(requests=1, **both, tokens_per_minute=None)).accepted


def test_unused_tokens_return_to_their_own_window_only() -> None:
    counts = Quotas(first_window=70)
    first = counts.reserve(0.0, reserve(800))
    counts.charge(1.0, charge(-500, window=first.window))
    assert left(counts, 1.0) == 700
    counts.charge(2.0, charge(-5000, window=first.window))
    assert left(counts, 2.0) == LIMIT, "no more than a limit is ever left"
    second = counts.reserve(60.0, reserve(800))
    assert second.window != first.window
    for window in (first.window, None, second.window + 1):
        counts.charge(61.0, charge(-500, window=window))
    assert left(counts, 61.0) == 200


def test_what_exceeds_a_limit_counts_in_the_minutes_that_follow() -> None:
    counts = Quotas()
    assert counts.reserve(0.0, reserve(1000)).accepted
    counts.charge(5.0, charge(1500))
    rejected = counts.reserve(10.0, reserve(600))
    assert (rejected.tokens_left, rejected.retry_after_seconds) == (0, 170.0), "2,500 and 600 fit after three minutes"
    assert counts.reserve(10.0, reserve(500)).retry_after_seconds == 110.0
    assert counts.reserve(10.0, reserve()).tokens_reset_seconds == 170.0
    assert left(counts, 60.0) == 0
    assert left(counts, 120.0) == 500
    assert counts.reserve(125.0, reserve(500)).accepted
    assert left(counts, 180.0) == LIMIT
    counts.charge(200.0, charge(10**9))
    assert counts.reserve(200.0, reserve(1)).retry_after_seconds == 86400.0, "the most that the message may have"


def test_each_reservation_is_checked_against_the_limit_that_it_names() -> None:
    """Two servers read a changed file of keys at different times."""
    counts = Quotas()
    assert counts.reserve(0.0, reserve(900)).accepted
    assert not counts.reserve(1.0, reserve(100, tokens_per_minute=500)).accepted
    assert counts.reserve(2.0, reserve(1100, tokens_per_minute=2000)).accepted
    assert counts.reserve(3.0, reserve(tokens_per_minute=500)).tokens_left == 0
    assert counts.reserve(3.0, reserve(tokens_per_minute=3000)).tokens_left == 1000


def test_a_reservation_that_is_sent_again_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = Quotas(first_window=5)
    one = reserve(600)
    first = counts.reserve(0.0, one)
    again = counts.reserve(1.0, one)
    assert (again.accepted, again.window, again.tokens_left) == (True, first.window, 400)
    late = counts.reserve(61.0, one)
    assert (late.accepted, late.tokens_left) == (True, LIMIT), "it was counted in a minute that is over"
    rejected = reserve(1001)
    assert not counts.reserve(62.0, rejected).accepted
    assert not counts.reserve(62.0, rejected).accepted
    monkeypatch.setattr(quotas, "MAX_RESERVATIONS", 2)
    monkeypatch.setattr(quotas, "MAX_WINDOWS", 3)
    for number in range(20):
        counts.reserve(63.0, reserve(1, tenant=str(number)))
    assert (len(counts), len(counts._reservations)) == (3, 2)
    assert left(counts, 64.0, "19") == LIMIT - 1
    left(counts, 200.0)
    assert len(counts) == 0, "an idle tenant takes no memory"


_AMOUNTS = st.integers(1, 1200)
_STEPS = st.one_of(
    st.tuples(st.just("reserve"), _AMOUNTS),
    st.tuples(st.just("settle"), st.integers(0, 1 << 16), st.floats(0, 1)),
    st.tuples(st.just("charge"), st.integers(1, 3000)),
    st.tuples(st.just("wait"), st.floats(0, 100)),
)


@given(st.lists(_STEPS, max_size=60))
def test_no_sequence_of_events_accepts_more_than_the_limit(steps: list[tuple[Any, ...]]) -> None:
    """Used: what open requests have reserved, what ended ones have used of it, and what was charged beyond."""
    counts, now, began = Quotas(), 0.0, math.inf
    windows: list[int] = []
    used: list[int] = []
    """By reservation that was accepted: what it has reserved; once it has ended, what it has used."""
    times: list[float] = []
    open_requests: list[int] = []
    charged = 0
    for kind, *values in steps:
        if kind == "wait":
            now += values[0]
        elif kind == "charge":
            counts.charge(now, charge(values[0]))
            charged, began = charged + values[0], min(began, now)
        elif kind == "settle" and open_requests:
            place = open_requests.pop(values[0] % len(open_requests))
            unused = used[place] - int(used[place] * values[1])
            counts.charge(now, charge(-unused, window=windows[place]))
            used[place] -= unused
        elif kind == "reserve" and (quota := counts.reserve(now, reserve(values[0]))).accepted:
            began = min(began, now)
            open_requests.append(len(used))
            windows.append(quota.window)
            used.append(values[0])
            times.append(now)
            minutes = 1 + math.floor((now - began) / WINDOW_SECONDS)
            assert charged + sum(used) <= LIMIT * minutes, "more than each minute's limit"
            last_minute = sum(tokens for tokens, at in zip(used, times, strict=True) if at > now - WINDOW_SECONDS)
            assert last_minute <= 2 * LIMIT, "a minute has parts of two windows"


class Clients:
    """Clients of a core at a simulated time, and what they were sent."""

    def __init__(self, *names: str) -> None:
        self.received: dict[tuple[int, bytes], list[Any]] = {}
        self.driver = CoreDriver(CoordinatorSettings(), self._deliver)
        for name in names:
            self.connect(name, name.encode())

    def connect(self, name: str, connection: bytes) -> HelloAck:
        self.driver.say((Role.CLIENT, connection), Hello(role=Role.CLIENT, name=name, incarnation=len(self.received)))
        return self.received[Role.CLIENT, connection][-1]

    def say(self, connection: bytes, message: Any) -> Any:
        """Return the answer, if there is one."""
        before = len(self.received.setdefault((Role.CLIENT, connection), []))
        self.driver.say((Role.CLIENT, connection), message)
        return next(iter(self.received[Role.CLIENT, connection][before:]), None)

    def _deliver(self, peer: tuple[int, bytes], frames: list[bytes]) -> bool:
        self.received.setdefault(peer, []).append(decode(frames))
        return True


def test_the_coordinator_counts_for_all_its_clients_and_after_their_end() -> None:
    clients = Clients("server-0", "server-1")
    clients.connect("server-0", b"server-0")
    first = clients.say(b"server-0", reserve(700, requests=1, requests_per_minute=2))
    assert (first.accepted, first.tokens_left, first.requests_left) == (True, 300, 1)
    assert clients.say(b"server-1", reserve(301)).accepted is False
    assert clients.driver.core.counters.over_limit == 1
    assert clients.say(b"server-1", charge(100)) is None
    clients.driver.advance(15.0)  # both clients are silent, and removed
    assert len(clients.driver.core.clients) == 0
    clients.connect("server-2", b"server-2")
    answer = clients.say(b"server-2", reserve())
    assert isinstance(answer, Quota)
    assert (answer.tokens_left, answer.tokens_reset_seconds) == (200, 45.0), "a lost server's reservations stay"
    lost = reserve(200)
    assert clients.say(b"server-2", lost).accepted
    clients.connect("server-2", b"another connection")
    again = clients.say(b"another connection", lost)
    assert (again.accepted, again.tokens_left) == (True, 0)
    clients.say(b"another connection", charge(-150, window=again.window))
    assert clients.say(b"another connection", reserve()).tokens_left == 150


def test_a_coordinator_that_takes_over_has_counted_nothing() -> None:
    before, after = Clients("server-0"), Clients()
    quota = before.say(b"server-0", reserve(1000))
    after.driver.core.quotas = Quotas(first_window=quota.window + 1)
    after.connect("server-0", b"server-0")
    assert after.say(b"server-0", reserve(400)).accepted
    after.say(b"server-0", charge(-1000, window=quota.window))
    assert after.say(b"server-0", reserve()).tokens_left == 600, "tokens return to the coordinator that counted them"


def test_only_registered_clients_reserve_tokens() -> None:
    clients = Clients()
    clients.driver.say((Role.ADMIN, b"operator"), Hello(role=Role.ADMIN, name="operator", incarnation=1))
    for peer in ((Role.ADMIN, b"operator"), (Role.CLIENT, b"unknown")):
        clients.driver.say(peer, reserve(1))
        assert isinstance(clients.received[peer][-1], Error)
    assert len(clients.driver.core.quotas) == 0


async def test_servers_share_a_limit_through_their_clients(stage: Any) -> None:
    coordinator = stage.coordinator()
    first, second = await stage.native_client(), await stage.native_client()
    answers = await asyncio.gather(*(client.reserve(reserve(300)) for client in (first, second) * 4))
    assert sum(quota.accepted for quota in answers) == 3
    waiting = first.reserve(reserve(100))
    waiting.cancel()  # the HTTP client is gone: the tokens return when the answer arrives
    await stage.until(lambda: left(coordinator.core.quotas, coordinator._time()) == 100)
    first.charge(charge(50))
    await stage.until(lambda: left(coordinator.core.quotas, coordinator._time()) == 50)


async def test_a_reservation_whose_answer_is_lost_is_sent_again_and_counts_once(
    stage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator = stage.coordinator()
    client = await stage.native_client()
    send, lost = coordinator.transport.send, []

    def cut_before_the_first_quota(peer: Any, frames: list[bytes]) -> bool:
        if isinstance(decode(frames), Quota) and not lost:
            lost.append(peer)
            coordinator.transport.cut(peer)
            return False
        return send(peer, frames)

    monkeypatch.setattr(coordinator.transport, "send", cut_before_the_first_quota)
    quota = await client.reserve(reserve(600))
    assert lost
    assert (quota.accepted, quota.tokens_left) == (True, 400)


async def test_a_client_waits_for_a_coordinator_and_the_next_one_has_counted_nothing(stage: Any) -> None:
    ports = {"client_port": 0, "engine_port": 0, "admin_port": 0}
    old = stage.coordinator(**ports)
    client = await stage.native_client()
    quota = await client.reserve(reserve(900))
    taken = {f"{role.name.lower()}_port": int(a.rpartition(":")[2]) for role, a in old.transport.addresses.items()}
    await old.close()
    await stage.until(lambda: not client.connected)
    abandoned = client.reserve(reserve(500))
    abandoned.cancel()
    waiting = client.reserve(reserve(400))
    client.charge(charge(-900, window=quota.window))
    stage.coordinator(**taken)
    assert (await waiting).tokens_left == 600
    client.charge(charge(-900, window=quota.window))
    assert (await client.reserve(reserve())).tokens_left == 600, "the new coordinator has not counted those"
