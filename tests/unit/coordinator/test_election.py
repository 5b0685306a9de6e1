"""Which coordinator of a pair serves: every rule, and random histories of loss, freezes and partitions."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from soak import size

from megatron_runtime.coordinator.pair import Answer, Election
from megatron_runtime.protocol.messages import PairState

TAKEOVER = 2.0
ACTIVE = PairState(incarnation=9, term=3, active=True)
STANDBY = PairState(incarnation=9, term=3, active=False)


def election(*heard: tuple[float, PairState], incarnation: int = 5) -> Election:
    """An election that began at 0 and heard these states."""
    made = Election(now=0.0, incarnation=incarnation, takeover=TAKEOVER)
    for now, state in heard:
        made.heard(now, state)
    return made


@pytest.mark.parametrize(
    ("heard", "now", "term", "answer", "own_term"),
    [
        ((), 1.9, 0, Answer.WAIT, 0),
        ((), 2.0, 0, Answer.SERVE, 1),
        ((), 2.0, 7, Answer.SERVE, 8),
        (((1.0, STANDBY),), 1.1, 0, Answer.SERVE, 4),
        (((1.0, ACTIVE),), 2.9, 0, Answer.REDIRECT, 3),
        (((1.0, ACTIVE),), 3.0, 0, Answer.SERVE, 4),
        (((1.0, ACTIVE),), 3.0, 6, Answer.SERVE, 7),
        (((1.0, ACTIVE), (2.0, STANDBY)), 2.1, 0, Answer.SERVE, 4),
    ],
    ids=[
        "the other one may still begin",
        "the other one is silent since the start",
        "the peer knows a higher term",
        "the other one is on standby",
        "the other one is active",
        "the active one is silent",
        "the active one is silent and the peer knows a higher term",
        "the active one has handed over",
    ],
)
def test_a_standby_takes_over_only_if_the_other_one_does_not_serve(
    heard: tuple[tuple[float, PairState], ...], now: float, term: int, answer: Answer, own_term: int
) -> None:
    standby = election(*heard)
    assert standby.asked(now, term) is answer
    assert (standby.active, standby.term) == (answer is Answer.SERVE, own_term)


def test_it_does_not_take_over_unasked() -> None:
    standby = election((0.0, ACTIVE))
    standby.heard(60.0, STANDBY)
    assert not standby.active


@pytest.mark.parametrize(
    ("other", "stays"),
    [
        (PairState(incarnation=1, term=2, active=True), False),
        (PairState(incarnation=1, term=1, active=True), True),
        (PairState(incarnation=9, term=1, active=True), False),
        (PairState(incarnation=9, term=2, active=False), True),
    ],
    ids=["higher term", "equal term, lower incarnation", "equal term, higher incarnation", "it is on standby"],
)
def test_of_two_active_ones_the_lower_stands_by(other: PairState, stays: bool) -> None:
    active = election()
    assert active.asked(5.0, 0) is Answer.SERVE
    active.heard(5.1, other)
    assert active.active is stays
    assert active.asked(5.2, 0) is (Answer.SERVE if stays else Answer.REDIRECT)


def test_an_active_one_serves_a_peer_of_a_higher_term_only_if_that_one_is_gone() -> None:
    active = election()
    active.asked(5.0, 0)
    active.heard(6.0, STANDBY)
    active.stalled(20.0)
    assert active.asked(20.1, 4) is Answer.WAIT
    assert active.asked(20.1, 1) is Answer.SERVE
    assert active.asked(22.0, 4) is Answer.SERVE
    assert active.term == 5


def test_one_that_leaves_hands_over_to_a_live_standby_for_good() -> None:
    alone = election()
    alone.asked(5.0, 0)
    assert (alone.leave(5.1), alone.active) == (False, True)

    active = election()
    active.asked(5.0, 0)
    active.heard(5.1, STANDBY)
    assert (active.leave(5.2), active.active) == (True, False)
    assert active.asked(60.0, 0) is Answer.REDIRECT


@dataclass
class Simulation:
    """Two coordinators and peers. Any of them may be frozen, and any connection cut, until the end."""

    random: random.Random
    now: float = 0.0
    frozen: set[int] = field(default_factory=set)
    cut: set[tuple[str, int, int]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.pair = [Election(now=0.0, incarnation=number, takeover=TAKEOVER) for number in (1, 2)]
        self.due = [0.0, 0.0]
        self.at: list[int | None] = [None] * 3
        self.terms = [0] * 3
        self.tries = [0] * 3
        self.lost_at = [0.0] * 3

    def step(self) -> None:
        """Half a second: states are exchanged, and peers register."""
        self.now += 0.5
        for number, election in enumerate(self.pair):
            if number in self.frozen:
                continue
            if self.now > self.due[number] + TAKEOVER:
                election.stalled(self.now)
            self.due[number] = self.now + 0.5
            if 1 - number not in self.frozen and ("pair", 0, 0) not in self.cut:
                self.pair[1 - number].heard(self.now, election.state)
        for peer in range(len(self.at)):
            self.register(peer)

    def register(self, peer: int) -> None:
        at = self.at[peer]
        reaches = [number not in self.frozen and ("peer", peer, number) not in self.cut for number in (0, 1)]
        if at is not None and reaches[at] and self.pair[at].active and self.pair[at].term >= self.terms[peer]:
            self.terms[peer], self.lost_at[peer] = self.pair[at].term, self.now
            return
        if at is not None and not reaches[at] and self.now - self.lost_at[peer] < 3.0:
            return  # it has not noticed the loss
        self.at[peer] = None
        number = self.tries[peer] % 2
        if reaches[number]:
            answer = self.pair[number].asked(self.now, self.terms[peer])
            if answer is Answer.SERVE:
                assert self.pair[number].term >= self.terms[peer], "it went back to an earlier term"
                self.at[peer], self.terms[peer], self.lost_at[peer] = number, self.pair[number].term, self.now
            if answer is not Answer.REDIRECT:
                return
        self.tries[peer] += 1


@pytest.mark.parametrize("seed", range(size(15, soak=10_000)))
def test_a_random_history_ends_with_one_active_coordinator_that_has_all_peers(seed: int) -> None:
    simulation = Simulation(random.Random(seed))
    faults = [("pair", 0, 0), *(("peer", peer, number) for peer in range(3) for number in (0, 1))]
    for _ in range(simulation.random.randint(1, 200)):
        if simulation.random.random() < 0.2:
            simulation.frozen ^= {simulation.random.randint(0, 1)}
        if simulation.random.random() < 0.3:
            simulation.cut ^= {simulation.random.choice(faults)}
        simulation.step()
    simulation.frozen.clear()
    simulation.cut.clear()
    for _ in range(20):
        simulation.step()
    (active,) = (number for number, election in enumerate(simulation.pair) if election.active)
    assert simulation.at == [active] * 3
    terms = [election.term for election in simulation.pair]
    for _ in range(20):
        simulation.step()
    assert [election.term for election in simulation.pair] == terms, "it is not settled"
