"""A request that ends engines is found and failed; a request that shared engines with it never is."""

from __future__ import annotations

import pytest
from soak import size

from megatron_runtime.coordinator.core.quarantine import (
    ACQUITTAL_TOKENS,
    REMEMBERED_FAILURES,
    VERDICT_SECONDS,
)
from megatron_runtime.coordinator.core.settings import Timing
from megatron_runtime.protocol.headers import ErrorCode, Header
from megatron_runtime.protocol.lifecycle import EngineState
from megatron_runtime.protocol.messages import ENGINE_FAILED, pack, unpack

from .simulated_fleet import POISON, TURN_SECONDS, SimulatedEngine, SimulatedFleet


@pytest.fixture
async def fleet() -> SimulatedFleet:
    return SimulatedFleet()


def engines_of(fleet: SimulatedFleet, count: int, **options) -> list[SimulatedEngine]:
    return [fleet.engine(f"engine-{number}", **options) for number in range(count)]


def two_crashes(fleet: SimulatedFleet) -> None:
    """Two engines crash, one after the other, with all that is open on each."""
    for name in ("crash-0", "crash-1"):
        engine = fleet.engine(name)
        fleet.until(lambda engine=engine: len(engine.jobs) == len(fleet.asked))
        fleet.turn()
        fleet.crash(engine)


def check_conviction(fleet: SimulatedFleet, poison, *, exits: int = 3) -> None:
    assert poison.error is not None
    assert poison.error.code is ErrorCode.ENGINE_FAILED
    assert poison.error.retry_after_seconds is None
    assert poison.uid.hex() in poison.error.message
    failed = fleet.core.status().failed_requests
    assert [(entry.uid, len(entry.engines)) for entry in failed] == [(poison.uid.hex(), exits)]
    assert fleet.core.counters.poison_requests == 1


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("poison_length", [1, 20])
@pytest.mark.parametrize("streaming", [True, False])
async def test_a_poison_request_costs_three_engines_and_only_its_sender_an_error(
    fleet, count, poison_length, streaming
) -> None:
    fleet.restart_turns = 15
    engines_of(fleet, count, poison_length=poison_length)
    innocent = [fleet.ask(n, tokens=80, streaming=n % 3 > 0) for n in range(1, 9)]
    poison = fleet.ask(POISON, tokens=80, streaming=streaming)
    fleet.finish(*innocent)
    assert len(fleet.crashes) == 3
    check_conviction(fleet, poison)
    assert poison.error.message.endswith("do not send it again")
    later = fleet.ask(5)
    fleet.finish(later)
    assert not any(engine.reserved for engine in fleet.core.engines)


async def test_after_one_crash_everything_is_replayed_at_once(fleet) -> None:
    first, second = engines_of(fleet, 2)
    asked = [fleet.ask(n, streaming=n % 2 > 0) for n in range(1, 9)]
    fleet.turns(3)
    fleet.crash(first)
    assert fleet.core.dispatcher.queue.length == 0, "a request waits after one crash"
    fleet.finish(turns=60)
    assert second.max_jobs == len(asked)
    for one in asked:
        one.check()
    assert fleet.core.counters.suspects == 0


@pytest.mark.parametrize("way", ["cut", "engine failed", "new process"])
async def test_these_ends_of_engines_are_crashes(fleet, way) -> None:
    asked = [fleet.ask(n) for n in range(1, 5)]
    for number in range(2):
        engine = fleet.engine("engine")
        fleet.turns(4)
        assert len(engine.jobs) == 4
        if way == "cut":
            fleet.crash(engine)
        elif way == "engine failed":
            fleet.leave(engine, ENGINE_FAILED)
        else:
            engine.alive = False
            fleet.engine("engine", loading_turns=10**6)
        assert fleet.core.counters.engine_crashes == number + 1
    assert fleet.core.counters.suspects == 4
    fleet.engine("healthy")
    fleet.finish(*asked)


@pytest.mark.parametrize(
    "way",
    ["SIGTERM", "cannot follow", "silence", "node lost", "drained", "paused", "evicted", "amid a verb", "leaving"],
)
async def test_these_ends_of_engines_are_no_crashes(fleet, way) -> None:
    asked = [fleet.ask(n, tokens=400) for n in range(1, 5)]
    for _ in range(3):
        engine = fleet.engine("engine")
        fleet.turns(4)
        assert len(engine.jobs) == 4
        if way == "SIGTERM":
            fleet.leave(engine)
        elif way == "cannot follow":
            fleet.leave(engine, "engine cannot follow its coordinator")
        elif way == "silence":
            engine.silent = True
            fleet.until(lambda: not len(fleet.core.engines))
        elif way == "node lost":
            fleet.cut(engine, by_peer=False)
        elif way == "drained":
            fleet.control(Header.DRAIN, engine="engine")
            fleet.crash(engine)
        elif way == "paused":
            fleet.control(Header.PAUSE)
            fleet.turns(2)
            assert fleet.core.engines.named("engine").state is EngineState.PAUSED
            fleet.crash(engine)
            fleet.control(Header.UNPAUSE)
        elif way == "evicted":
            engine.failing = {Header.UPDATE_WEIGHTS}
            fleet.control(Header.UPDATE_WEIGHTS, epoch=1, source="x")
            fleet.turn()
        elif way == "amid a verb":
            engine.silent = True
            fleet.control(Header.UPDATE_WEIGHTS, epoch=1, source="x")
            fleet.crash(engine)
        elif way == "leaving":
            fleet.say(engine.peer, engine.hello(serving=False))
            fleet.crash(engine)
        engine.alive = False
        assert len(fleet.core.engines) == 0
    assert fleet.core.counters.engine_crashes == fleet.core.counters.suspects == 0
    fleet.engine("healthy")
    fleet.finish(*asked)


async def test_an_engine_that_outlives_its_connection_did_not_crash(fleet) -> None:
    asked = [fleet.ask(n, tokens=200) for n in range(1, 5)]
    engine = fleet.engine("engine")
    for _ in range(4):
        fleet.turns(3)
        fleet.cut(engine)
        fleet.reconnect(engine)
    assert not any(entry.crashes and any(crash.counts for crash in entry.crashes) for entry in fleet_entries(fleet))
    fleet.finish()
    assert engine.max_jobs == 4
    for one in asked:
        one.check()


def fleet_entries(fleet: SimulatedFleet) -> list:
    return list(fleet.core.dispatcher.journal)


async def test_a_suspect_whose_engine_outlives_its_connection_is_not_failed(fleet) -> None:
    asked = [fleet.ask(n, tokens=200) for n in range(1, 4)]
    two_crashes(fleet)
    engine = fleet.engine("engine")
    fleet.turns(3)
    assert len(engine.jobs) == 1
    fleet.cut(engine)
    fleet.driver.advance(VERDICT_SECONDS / 2)
    assert not any(one.ended for one in asked)
    fleet.reconnect(engine)
    fleet.finish(*asked)
    assert fleet.core.counters.poison_requests == 0


async def test_only_the_engine_that_a_suspect_had_alone_decides_about_it(fleet) -> None:
    """An engine of an earlier crash comes back meanwhile, as a new process or as the one that it was."""
    asked = [fleet.ask(n, tokens=200) for n in range(1, 4)]
    two_crashes(fleet)
    engine = fleet.engine("engine")
    fleet.turns(3)
    fleet.cut(engine)
    fleet.engine("crash-0", loading_turns=10**6)
    fleet.turn()
    assert not any(one.ended for one in asked)
    earlier = fleet.engines["crash-1"]
    earlier.alive = True
    fleet.reconnect(earlier)
    fleet.turn()
    assert len(fleet.core.dispatcher.quarantine) == 1, "of the others one crash is left"
    fleet.reconnect(engine)
    fleet.finish(*asked)


async def test_the_verdict_waits_for_the_engine_to_come_back_and_no_longer(fleet) -> None:
    poison, other = fleet.ask(POISON), fleet.ask(1)
    fleet.restart_turns = 1
    fleet.engine("engine")
    fleet.until(lambda: len(fleet.crashes) == 2)
    fleet.restart_turns = None
    fleet.until(lambda: len(fleet.crashes) == 3)
    assert not poison.ended
    fleet.driver.advance(VERDICT_SECONDS)
    fleet.turn()
    check_conviction(fleet, poison)
    assert not other.ended


async def test_suspects_run_alone_one_after_another_and_only_past_the_point_of_the_last_crash(fleet) -> None:
    """A thousand of them must not be run to their ends one by one."""
    length = 500
    asked = [fleet.ask(n, tokens=length) for n in range(1, 21)]
    two_crashes(fleet)
    begun = fleet.driver.now
    first = fleet.engine("first")
    fleet.until(lambda: len(fleet.core.dispatcher.quarantine) == 0)
    fleet.turn()
    assert first.max_jobs == 1
    assert len(set(first.ran)) == len(first.ran) == 20, "a suspect was tried twice"
    alone_turns = (fleet.driver.now - begun) / TURN_SECONDS
    assert alone_turns < 20 * (ACQUITTAL_TOKENS + 5)
    normal = fleet.engine("normal")
    fleet.turns(ACQUITTAL_TOKENS + 2)
    assert fleet.core.counters.acquitted == 20
    assert len(normal.jobs) == 19, "the acquitted wait"
    assert len(first.jobs) == 1, "the last suspect was moved"
    fleet.ask(99)
    fleet.finish()
    assert len(first.ran) > 20, "the engine stays reserved"
    for one in asked:
        one.check()


async def test_a_request_past_the_point_of_its_first_crash_is_acquitted_of_it(fleet) -> None:
    first, second, _third = engines_of(fleet, 3)
    asked = [fleet.ask(n, tokens=200) for n in range(1, 13)]
    fleet.turns(5)
    fleet.crash(first)
    fleet.turns(ACQUITTAL_TOKENS + 2)
    fleet.crash(second)
    assert fleet.core.counters.suspects == 0
    assert fleet.core.dispatcher.queue.length == 0
    fleet.finish(*asked)


async def test_without_an_empty_engine_the_least_busy_one_empties_and_an_empty_one_is_preferred(fleet) -> None:
    busy, less_busy = engines_of(fleet, 2)
    others = [fleet.ask(n, tokens=100) for n in range(10, 19)]
    fleet.turn()
    assert [len(engine.jobs) for engine in (busy, less_busy)] == [5, 4]
    crashing = [fleet.engine(f"crash-{number}") for number in range(2)]
    suspects = [fleet.ask(n, tokens=100) for n in range(1, 4)]
    fleet.turn()
    for engine in sorted(crashing, key=lambda engine: -len(engine.jobs)):
        fleet.turn()
        fleet.crash(engine)
    assert len(fleet.core.dispatcher.quarantine) > 0
    late = [fleet.ask(n, tokens=10) for n in range(20, 24)]
    fleet.turn()
    reserved = next(engine for engine in fleet.core.engines if engine.reserved)
    emptying = fleet.engines[reserved.name]
    before = len(emptying.jobs)
    fleet.turns(3)
    assert len(emptying.jobs) <= before < max(len(busy.jobs), len(less_busy.jobs))
    empty = fleet.engine("empty")
    fleet.turns(2)
    assert empty.max_jobs == 1
    fleet.finish(*suspects, *others, *late)


async def test_with_one_engine_it_empties_first_then_the_suspects_run_then_all_others(fleet) -> None:
    fleet.restart_turns = 5
    engine = fleet.engine("engine")
    suspects = [fleet.ask(n, tokens=60) for n in range(1, 5)]
    for _ in range(2):
        fleet.until(lambda: len(fleet.engines["engine"].jobs) == 4)
        fleet.crash(fleet.engines["engine"])
    late = [fleet.ask(n, tokens=60) for n in range(10, 15)]
    fleet.until(lambda: fleet.engines["engine"] is not engine and fleet.engines["engine"].ran)
    fleet.finish()
    ran = fleet.engines["engine"].ran
    assert {one.uid for one in suspects} == set(ran[:4])
    for one in (*suspects, *late):
        one.check()


async def test_of_two_poison_requests_each_is_failed_and_no_more_engines_end_than_three_for_each(fleet) -> None:
    fleet.restart_turns = 10
    engines_of(fleet, 2)
    innocent = [fleet.ask(n, tokens=60) for n in range(1, 9)]
    poison = [fleet.ask(POISON, n) for n in (1, 2)]
    fleet.finish(*innocent)
    assert all(asked.error is not None and asked.error.code is ErrorCode.ENGINE_FAILED for asked in poison)
    assert len(fleet.crashes) <= 6
    assert fleet.core.counters.poison_requests == 2


async def test_when_the_poison_is_found_those_that_were_there_with_it_are_free(fleet) -> None:
    fleet.restart_turns = 5
    fleet.engine("engine")
    innocent = [fleet.ask(n, tokens=300, streaming=False) for n in range(1, 21)]
    poison = fleet.ask(POISON)
    fleet.until(lambda: poison.ended)
    assert len(fleet.core.dispatcher.quarantine) == 0
    fleet.finish(*innocent, turns=400)


@pytest.mark.parametrize("moment", ["waits", "on trial", "accused"])
@pytest.mark.parametrize("way", ["abort", "deadline"])
async def test_a_suspect_may_be_aborted_or_run_out_of_time(fleet, moment, way) -> None:
    options = {"deadline_ms": 8000} if way == "deadline" else {}
    other = fleet.ask(1, tokens=200)
    suspect = fleet.ask(2, tokens=10_000, **options)
    two_crashes(fleet)
    if moment != "waits":
        engine = fleet.engine("engine")
        fleet.turn()
        assert [job.uid for job in engine.jobs.values()] == [suspect.uid]
        if moment == "accused":
            fleet.crash(engine)
    if way == "abort":
        fleet.abort(suspect)
    else:
        fleet.driver.advance(8.0 if moment != "accused" else VERDICT_SECONDS - 0.1)
        if moment == "accused":
            fleet.abort(suspect)
    fleet.turn()
    assert suspect.uid not in {entry.uid for entry in fleet_entries(fleet)}
    if way == "deadline" and moment != "accused":
        assert suspect.error.code is ErrorCode.DEADLINE
    fleet.engine("healthy")
    fleet.driver.advance(VERDICT_SECONDS)
    fleet.finish(other)
    assert fleet.core.counters.poison_requests == 0


async def test_aborted_requests_are_no_evidence_against_the_next_suspect(fleet) -> None:
    """The engine may still be in the step that the aborted request ends."""
    engine = fleet.engine("engine", poison_length=30)
    aborted = fleet.ask(POISON, tokens=100)
    fleet.turn()
    crashing = [fleet.engine(f"crash-{number}") for number in range(2)]
    suspect = fleet.ask(1, tokens=100)
    fleet.turn()
    for one in sorted(crashing, key=lambda one: -len(one.jobs)):
        fleet.turn()
        fleet.crash(one)
    assert len(fleet.core.dispatcher.quarantine) == 1
    engine.silent = True
    fleet.abort(aborted)
    fleet.driver.pump()
    assert len(fleet.core.engines.named("engine").in_flight) == 0, "a suspect went where something may run"
    fleet.crash(engine)
    fleet.engine("healthy")
    fleet.finish(suspect)


async def test_a_request_for_one_engine_does_not_disturb_the_suspect_there(fleet) -> None:
    suspects = [fleet.ask(n, tokens=100) for n in (1, 2)]
    two_crashes(fleet)
    engine = fleet.engine("engine")
    fleet.turn()
    pinned = fleet.ask(7, engine="engine")
    fleet.turn()
    assert pinned.error.code is ErrorCode.ENGINES_MISSING
    assert "reserved" in pinned.error.message
    assert len(engine.jobs) == 1
    fleet.finish(*suspects)


async def test_pause_and_drain_with_a_suspect_on_trial(fleet) -> None:
    suspects = [fleet.ask(n, tokens=100) for n in (1, 2, 3)]
    two_crashes(fleet)
    first, _second = engines_of(fleet, 2)
    fleet.turns(3)
    fleet.control(Header.PAUSE)
    fleet.turns(3)
    assert fleet.acks[-1].ok
    fleet.control(Header.UNPAUSE)
    fleet.turns(3)
    trial = fleet.engines[fleet.core.dispatcher.quarantine._reserved.name]
    fleet.control(Header.DRAIN, engine=trial.name)
    fleet.finish()
    assert fleet.acks[-1].ok, fleet.acks[-1]
    for one in suspects:
        one.check()
    assert trial is first or trial.name == "engine-1"


async def test_stop_answers_suspects_too(fleet) -> None:
    suspects = [fleet.ask(n, tokens=100) for n in (1, 2, 3)]
    two_crashes(fleet)
    fleet.engine("engine")
    fleet.turns(2)
    fleet.control(Header.PAUSE)
    fleet.turns(2)
    fleet.control(Header.STOP)
    fleet.turns(2)
    assert {one.error.code for one in suspects} == {ErrorCode.UNAVAILABLE}
    assert not fleet.core.dispatcher.quarantine.active


async def test_a_suspect_on_trial_goes_on_elsewhere_when_its_engine_leaves_or_is_silent(fleet) -> None:
    suspects = [fleet.ask(n, tokens=100) for n in (1, 2)]
    two_crashes(fleet)
    leaving = fleet.engine("leaving")
    fleet.turns(4)
    fleet.leave(leaving)
    silent = fleet.engine("silent")
    fleet.turns(4)
    assert len(silent.jobs) == 1
    silent.silent = True
    healthy = fleet.engine("healthy")
    fleet.until(lambda: healthy.jobs)
    assert healthy.max_jobs <= 1
    fleet.finish(*suspects)
    assert fleet.core.counters.poison_requests == 0


async def test_a_request_that_hangs_an_engine_and_then_ends_it_is_counted(fleet) -> None:
    """It was taken from the silent engine, which crashed after all."""
    first, second = engines_of(fleet, 2)
    asked = fleet.ask(1, tokens=400)
    fleet.turns(2)
    hung, other = (first, second) if first.jobs else (second, first)
    hung.silent = True
    fleet.until(lambda: other.jobs)
    fleet.crash(hung)
    assert len(next(iter(fleet.core.dispatcher.journal)).crashes) == 1
    fleet.crash(other)
    assert fleet.core.counters.suspects == 1
    fleet.engine("healthy")
    fleet.finish(asked)


async def test_a_request_that_two_hung_engines_ended_with_is_tried_alone(fleet) -> None:
    """It was taken from both engines while they were silent and runs on a third one, with another request, when the
    second of them crashes."""
    first, second, third = engines_of(fleet, 3)
    asked = fleet.ask(1, tokens=900)
    hung = []
    for _ in range(2):
        fleet.until(lambda: any(engine.jobs for engine in (first, second, third) if engine not in hung))
        (engine,) = (engine for engine in (first, second, third) if engine.jobs and engine not in hung)
        engine.silent = True
        hung.append(engine)
    (left,) = {first, second, third} - set(hung)
    fleet.until(lambda: left.jobs)
    other = fleet.ask(2, tokens=900)
    fleet.until(lambda: len(left.jobs) == 2)
    for engine in hung:
        fleet.crash(engine)
    assert fleet.core.counters.suspects == 1
    fleet.turns(3)
    assert [job.uid for job in left.jobs.values()] == [other.uid], "the suspect waits for an engine of its own"
    fleet.engine("healthy")
    fleet.finish(asked, other)


async def test_suspects_are_tried_on_engines_of_their_model(fleet) -> None:
    one = fleet.ask(1, tokens=100, model="one")
    two = fleet.ask(2, tokens=100, model="two")
    for name in ("crash-0", "crash-1"):
        engine = fleet.engine(name)
        fleet.until(lambda engine=engine: len(engine.jobs) == 2)
        fleet.crash(engine)
    of_one = fleet.engine("of-one", model="one")
    fleet.turns(3)
    assert [job.uid for job in of_one.jobs.values()] == [one.uid]
    fleet.engine("of-two", model="two")
    fleet.finish(one, two)


async def test_a_suspect_whose_model_no_engine_runs_is_rejected(fleet) -> None:
    asked = fleet.ask(1, tokens=100, model="one")
    two_crashes(fleet)
    fleet.engine("of-two", model="two")
    fleet.turn()
    assert asked.error.code is ErrorCode.MODEL_CHANGED


async def test_plain_engines_are_tried_too(fleet) -> None:
    fleet = SimulatedFleet(single_port=True)
    asked = [fleet.ask(n, tokens=30, streaming=False) for n in (1, 2)]
    poison = fleet.ask(POISON, tokens=30, streaming=False)
    for number in range(3):
        engine = fleet.plain_engine(f"plain-{number}")
        for _ in range(80):
            if not engine.alive:
                break
            fleet.turn()
        # An idle plain engine has time to connect again.
        fleet.driver.pump()
        fleet.driver.advance(Timing().plain_reconnect + VERDICT_SECONDS)
    fleet.plain_engine("healthy")
    fleet.finish(*asked)
    check_conviction(fleet, poison)


async def test_a_plain_client_gets_a_failed_reply_that_is_not_transient() -> None:
    fleet = SimulatedFleet(single_port=True)
    peer = (3, b"plain-client")
    heard = []
    fleet.inboxes[peer] = type("Inbox", (), {"append": lambda _, message: heard.append(message)})()
    fleet.driver.receive(peer, [pack([int(Header.CONNECT)])])
    submit = [int(Header.SUBMIT_REQUEST), 5, [POISON], {"num_tokens_to_generate": 9}, None]
    fleet.driver.receive(peer, [pack(submit)])
    fleet.restart_turns = 3
    fleet.engine("engine")
    fleet.until(lambda: len(heard) > 1)
    _, number, reply = heard[-1].items
    assert (number, reply["status"]) == (5, "FAILED")
    assert reply["events"][0]["payload"]["is_transient"] is False


async def test_a_bounded_number_of_failures_is_reported(fleet) -> None:
    fleet.restart_turns = 1
    fleet.engine("engine")
    for number in range(REMEMBERED_FAILURES + 2):
        fleet.ask(POISON, number)
        fleet.finish()
    failed = fleet.core.status().failed_requests
    assert len(failed) == REMEMBERED_FAILURES
    assert failed[-1].uid == list(fleet.asked)[-1].hex()
    assert fleet.core.status().to_frames() == fleet.core.status().to_frames()


async def test_a_coordinator_without_failures_does_not_mention_them(fleet) -> None:
    assert "failed_requests" not in unpack(fleet.core.status().to_frames()[0])[1]


class Chaos:
    """Engines that come and go in every way, poison among innocents."""

    def __init__(self, seed: int) -> None:
        self.fleet = SimulatedFleet(seed=seed)
        self.random = self.fleet.random
        self.fleet.restart_turns = self.random.randint(2, 30)
        self.kills = 0
        poison_length = self.random.choice([1, 5, 25])
        for number in range(self.random.randint(1, 3)):
            self.fleet.engine(f"engine-{number}", poison_length=poison_length)
        self.poison: list = []
        self.innocent: list = []

    def act(self) -> None:
        fleet, choice = self.fleet, self.random.random()
        alive = [engine for engine in fleet.engines.values() if engine.alive and not engine.loading_turns]
        if choice < 0.25:
            length, streaming = self.random.randint(1, 60), self.random.random() < 0.7
            self.innocent.append(fleet.ask(self.random.randrange(1, 600), tokens=length, streaming=streaming))
        elif choice < 0.27 and len(self.poison) < 3:
            self.poison.append(fleet.ask(POISON, tokens=60, streaming=self.random.random() < 0.5))
        elif choice < 0.29 and self.innocent:
            aborted = self.innocent.pop(self.random.randrange(len(self.innocent)))
            if not aborted.ended:
                fleet.abort(aborted)
        elif choice < 0.32 and alive:
            self.end(self.random.choice(alive))

    def end(self, engine: SimulatedEngine) -> None:
        """In a way that is no crash, or is one of several requests."""
        fleet = self.fleet
        registered = fleet.core.engines.at(engine.peer)
        way = self.random.choice(["leave", "cut", "kill"])
        if registered is None or (way == "kill" and registered.reserved):
            return
        if way == "leave":
            fleet.leave(engine)
            fleet._returning.append([3, engine])
        elif way == "cut":
            fleet.cut(engine)
            fleet.reconnect(engine)
        else:
            fleet.crash(engine)
            self.kills += 1


@pytest.mark.slow
@pytest.mark.parametrize("seed", [825, *range(size(2, soak=800))])
async def test_whatever_happens_poison_is_failed_and_nothing_else_is(seed: int) -> None:
    chaos = Chaos(seed)
    fleet = chaos.fleet
    for _ in range(400):
        chaos.act()
        fleet.turn()
    fleet.finish(*chaos.innocent)
    for asked in chaos.poison:
        assert asked.error is not None
        assert asked.error.code is ErrorCode.ENGINE_FAILED
    by_poison = len(fleet.crashes) - chaos.kills
    assert by_poison <= 3 * len(chaos.poison)
