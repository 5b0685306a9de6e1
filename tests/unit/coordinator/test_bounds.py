"""Every table stays small in the long run, and a peer that does not read delays no other."""

import asyncio
import random
from collections.abc import Sized
from types import ModuleType

import pytest
from coordinator_tables import check_tables
from echo_executor import echo_answer
from soak import size

from megatron_runtime.client.rejection import RequestRejectedError
from megatron_runtime.coordinator.core.routing import MAX_KNOWN_BLOCKS
from megatron_runtime.coordinator.core.settings import CoordinatorSettings, RoutingPolicy, Timing
from megatron_runtime.protocol.headers import ErrorCode, Header, Role
from megatron_runtime.protocol.lifecycle import EngineState
from megatron_runtime.protocol.messages import (
    Abort,
    CachedBlocks,
    Control,
    ControlAck,
    Disconnect,
    Dispatch,
    Final,
    Heartbeat,
    Hello,
    RequestMeta,
    Submit,
    decode,
    pack,
    tokens_to_bytes,
)
from megatron_runtime.transport.control_calls import ControlRejectedError

from .core_driver import CoreDriver, Peer
from .simulated_fleet import SimulatedFleet

WEEK_SECONDS = 7 * 24 * 3600
STEP_SECONDS = 600


class Sink:
    """Takes what the coordinator sends; engines answer verbs and remember their dispatches."""

    def __init__(self) -> None:
        self.dispatched: list[tuple[Peer, Dispatch]] = []
        self.controls: list[tuple[Peer, Control]] = []

    def deliver(self, peer: Peer, frames: list[bytes]) -> bool:
        if peer[0] == Role.ENGINE:
            message = decode(frames)
            if isinstance(message, Dispatch):
                self.dispatched.append((peer, message))
            elif isinstance(message, Control):
                self.controls.append((peer, message))
        return True


def sizes(root: object) -> dict[str, int]:
    """Length of every container that can be reached from an object of the coordinator."""
    found: dict[str, int] = {}
    seen: set[int] = set()
    pending: list[tuple[str, object]] = [("coordinator", root)]
    while pending:
        path, item = pending.pop()
        if id(item) in seen or isinstance(item, ModuleType | type | str | bytes):
            continue
        seen.add(id(item))
        if isinstance(item, Sized):
            found[path] = max(found.get(path, 0), len(item))
        if isinstance(item, dict):
            pending += [(f"{path}[]", value) for value in item.values()]
        elif isinstance(item, list | tuple | set):
            pending += [(f"{path}[]", value) for value in item]
        elif type(item).__module__.startswith("megatron_runtime.coordinator"):
            names = [*getattr(item, "__dict__", ()), *getattr(type(item), "__slots__", ())]
            pending += [(f"{path}.{name}", getattr(item, name, None)) for name in names]
    return found


class Week:
    """Clients come and go, ask, abort and fall silent; engines are replaced; an operator pauses and sets epochs."""

    def __init__(self) -> None:
        self.rng = random.Random(7)
        timing = Timing(heartbeat=600.0, suspect=2000.0, dead=6000.0, client_dead=6000.0, recovery=0.0)
        settings = CoordinatorSettings(routing_policy=RoutingPolicy.LONGEST_PREFIX, timing=timing)
        self.sink = Sink()
        self.driver = CoreDriver(settings, self.sink.deliver)
        self.core = self.driver.core
        self.say = self.driver.say
        self.admin = (int(Role.ADMIN), b"admin")
        self.engines: dict[int, tuple[int, bytes]] = {}
        self.clients: dict[int, tuple[int, bytes]] = {}
        self.count = 0

    def engine(self, slot: int) -> None:
        self.count += 1
        peer = self.engines[slot] = (int(Role.ENGINE), b"e%d" % self.count)
        hello = Hello(role=Role.ENGINE, name=f"engine-{slot}", incarnation=self.count, serving=True)
        state = EngineState(self.core.verbs.state.value)
        self.say(peer, hello.model_copy(update={"state": state, "max_requests": 4, "block_size_tokens": 4}))

    def client(self) -> None:
        self.count += 1
        peer = (int(Role.CLIENT), b"c%d" % self.count)
        self.clients[self.count] = peer
        self.say(peer, Hello(role=Role.CLIENT, name=f"client-{self.count}", incarnation=self.count))
        for _ in range(self.rng.randrange(4)):
            uid = self.rng.randbytes(16)
            prompt = tokens_to_bytes([self.rng.randrange(9) for _ in range(12)])
            deadline = self.rng.choice([None, 1000, 10**9])
            tenant = self.rng.choice(["", "a", "b", f"t{self.count}"])
            meta = RequestMeta(self.rng.random() < 0.5, 1, deadline, False, self.rng.randrange(3), tenant=tenant)
            self.say(peer, Submit(uid, meta, prompt, b"", b"\x80"))
            if self.rng.random() < 0.2:
                self.say(peer, Abort(uid))
        if self.rng.random() < 0.5:
            self.say(peer, Disconnect())
            del self.clients[self.count]

    def answer(self) -> None:
        for peer, dispatch in self.sink.dispatched:
            if self.rng.random() < 0.8:
                reply = pack({"status": "COMPLETED"})
                self.say(peer, Final(dispatch.dispatch_id, dispatch.uid, dispatch.generated + b"\1\0\0\0", reply))
        self.sink.dispatched.clear()
        for peer, control in self.sink.controls:
            ack = ControlAck(operation_id=control.operation_id or "-", ok=True, state=EngineState.PAUSED, ranks=1)
            self.say(peer, ack)
        self.sink.controls.clear()

    def step(self, number: int) -> None:
        self.driver.advance(STEP_SECONDS)
        self.say(self.admin, Heartbeat(incarnation=1))
        for slot, peer in self.engines.items():
            state = EngineState(self.core.verbs.state.value)
            self.say(peer, Heartbeat(incarnation=1, state=state))
            self.say(peer, CachedBlocks(self.rng.randbytes(64), cleared=slot == 0 and number % 7 == 0))
        for peer in list(self.clients.values())[-8:]:
            self.say(peer, Heartbeat(incarnation=1))
        for _ in range(3):
            self.client()
        if number % 20 == 0:
            self.engine(number // 20 % 3)
        if number % 5 == 0:
            kinds = {0: Header.PAUSE, 5: Header.UNPAUSE, 10: Header.SET_GENERATION_EPOCH, 15: Header.UPDATE_WEIGHTS}
            kind = kinds[number % 20]
            options = {"epoch": number, "source": f"/models/{number}"} if number % 20 >= 10 else {}
            self.say(self.admin, Control(kind=kind, operation_id=f"op-{number}", fence=1, **options))
        self.answer()


@pytest.mark.slow
async def test_a_simulated_week_leaves_every_table_small(caplog) -> None:
    caplog.set_level("ERROR")
    week = Week()
    week.say(week.admin, Hello(role=Role.ADMIN, name="operator", incarnation=1))
    for slot in range(3):
        week.engine(slot)
    steps = WEEK_SECONDS // STEP_SECONDS
    for number in range(steps):
        week.step(number)
        if number == steps // 10:
            early = sizes(week.core)
    assert week.core.counters.completed > 1000
    assert week.core.counters.moved > 0
    assert week.core.verbs.epoch > 0
    late = sizes(week.core)
    known = {path: size for path, size in late.items() if "_held" not in path}
    assert max(late.values()) <= MAX_KNOWN_BLOCKS
    assert max(known.values()) <= 1100, max(known, key=known.__getitem__)
    grown = {path: (early.get(path, 0), size) for path, size in known.items() if size > 3 * early.get(path, 0) + 64}
    assert not grown
    week.driver.advance(10**7)
    check_tables(week.core)
    assert len(week.core.dispatcher.journal) == len(week.core.dispatcher.deadlines._slots) == 0
    assert len(week.core.clients) == len(week.core.engines) == 0
    assert len(week.core.dispatcher.tenants) == 0


@pytest.mark.parametrize("seed", range(size(2, soak=6)))
async def test_tables_and_shares_are_consistent_whatever_tenants_send(seed: int) -> None:
    """Requests of five tenants come, end and are aborted at random; engines come back. After each event no tenant waits
    that has two requests fewer at engines than another whose requests may make room.
    """
    rng, sink = random.Random(seed), Sink()
    settings = CoordinatorSettings(timing=Timing(heartbeat=600.0, suspect=2000.0, dead=10**6, recovery=0.0))
    driver = CoreDriver(settings, sink.deliver)
    core, dispatcher = driver.core, driver.core.dispatcher
    client = (int(Role.CLIENT), b"client")
    driver.say(client, Hello(role=Role.CLIENT, name="client", incarnation=1))
    engines = [(int(Role.ENGINE), b"0"), (int(Role.ENGINE), b"1")]

    def begin(number: int, incarnation: int) -> None:
        hello = Hello(role=Role.ENGINE, name=f"engine-{number}", incarnation=incarnation, serving=True, max_requests=5)
        driver.say(engines[number], hello.model_copy(update={"state": EngineState.RUNNING}))

    for number in range(2):
        begin(number, 1)
    arrived: dict[bytes, int] = {}
    for event in range(600):
        driver.advance(rng.choice([0.0, 0.01, 0.5]))
        busy = [(peer, entry) for peer in engines if (e := core.engines.at(peer)) for entry in e.in_flight.values()]
        match rng.choices(["submit", "answer", "abort", "lose"], [6, 5, 1, 0.1])[0]:
            case "submit":
                uid = rng.randbytes(16)
                arrived[uid] = event
                meta = RequestMeta(tenant=rng.choices("abcde", [9, 3, 1, 1, 1])[0], priority=rng.choice([0, 0, 0, 1]))
                driver.say(client, Submit(uid, meta, bytes(4), b"", b"\x80"))
            case "answer" if busy:
                peer, entry = rng.choice(busy)
                reply = Final(entry.dispatch_id, entry.uid, b"\1\0\0\0", pack({"status": "COMPLETED"}))
                driver.say(peer, reply)
            case "abort" if arrived:
                driver.say(client, Abort(rng.choice(list(arrived))))
            case "lose":
                begin(rng.randrange(2), event + 2)
        driver.pump()  # as every heartbeat does
        check_tables(core)
        waiting = dispatcher.queue.heads()
        if waiting:
            assert sum(len(engine.in_flight) for engine in core.engines) == 10, "a slot is free and one waits"
        movable = [
            other.tenant.load
            for engine in core.engines
            for other in engine.in_flight.values()
            for entry in waiting
            if dispatcher.may_move(other, engine, entry, driver.now) and other.tenant.load >= entry.tenant.load + 2
        ]
        assert driver.now < dispatcher.next_search or not movable, "a tenant waits beyond its share"
    assert core.counters.moved > 10
    for lane in (lane for tenant in dispatcher.tenants for lane in tenant.lanes.values()):
        assert [arrived[uid] for uid in lane] == sorted(arrived[uid] for uid in lane), "not in the order of arrival"
    for uid in arrived:
        driver.say(client, Abort(uid))
    check_tables(core)
    assert len(dispatcher.tenants) == dispatcher.queue.length == len(dispatcher.journal) == 0
    assert not sink.controls


async def test_paused_time_counts_against_a_deadline_and_against_the_wait(stage, params) -> None:
    stage.coordinator(max_wait_seconds=2.5)
    engine = await stage.engine(step_seconds=None)
    link, client = await stage.admin(), await stage.client()
    running = client.add_request([1], params(2), deadline_seconds=2.0)
    await engine.until(lambda: engine.jobs)
    await link.control(Header.PAUSE, operation_id="p", fence=1)
    held = [client.add_request([n], params(2), deadline_seconds=seconds) for n, seconds in ((2, 0.3), (3, None))]
    for future in (running, *held):
        with pytest.raises(RequestRejectedError) as rejected:
            await future
        assert rejected.value.code == ErrorCode.DEADLINE


async def test_a_deadline_that_is_set_later_and_ends_earlier_fires_in_time() -> None:
    """All deadlines share one timer."""
    fleet = SimulatedFleet()
    late, early = fleet.ask(1, deadline_ms=60_000), fleet.ask(2, deadline_ms=50)
    fleet.turn()  # 0.1 s
    assert early.error is None, "the client reads before the clock is advanced"
    fleet.turn()
    assert early.error is not None
    assert early.error.code is ErrorCode.DEADLINE
    latest = fleet.ask(3, deadline_ms=90_000)
    fleet.driver.advance(59.0)
    fleet.turn()
    assert late.error is None
    fleet.driver.advance(1.0)
    fleet.turn()
    assert late.error is not None
    assert latest.error is None
    fleet.driver.advance(30.0)
    fleet.turn()
    assert latest.error is not None


async def test_an_engine_gets_the_remaining_time_of_a_deadline(stage, params) -> None:
    coordinator = stage.coordinator()
    client = await stage.client()
    future = client.add_request([1], params(1), deadline_seconds=60.0)
    await stage.until(lambda: coordinator.core.dispatcher.queue.length == 1)
    await asyncio.sleep(0.1)
    engine = await stage.engine()
    await future
    assert 0 < engine.dispatches[0].meta.deadline_ms <= 59_900


async def test_waiting_requests_are_served_by_priority_and_then_by_arrival(stage, params) -> None:
    coordinator = stage.coordinator()
    client = await stage.client()
    futures = [
        client.add_request([n], params(1, priority=priority)) for n, priority in ((1, 5), (2, 0), (3, -1), (4, 0))
    ]
    await stage.until(lambda: coordinator.core.dispatcher.queue.length == 4)
    engine = await stage.engine(max_requests=1)
    await asyncio.gather(*futures)
    assert [dispatch.prompt for dispatch in engine.dispatches] == [tokens_to_bytes([n]) for n in (3, 2, 4, 1)]


async def test_senders_check_the_size_limits_too(stage) -> None:
    coordinator = stage.coordinator()
    link = await stage.admin()
    with pytest.raises(ValueError, match=r"source\n.*at most 4096"):
        link.control(Header.UPDATE_WEIGHTS, operation_id="u", fence=1, epoch=1, source="x" * (9 << 20))
    link._link.max_message_bytes = 1000
    with pytest.raises(ControlRejectedError, match="max_message_bytes") as rejected:
        await link.control(Header.UPDATE_WEIGHTS, operation_id="u", fence=1, epoch=1, source="x" * 4096)
    assert rejected.value.code == ErrorCode.TOO_LARGE
    assert coordinator.core.counters.rejected.total() == 0


async def test_an_engine_whose_buffer_is_full_gets_no_work_until_there_is_room(stage, params) -> None:
    coordinator = stage.coordinator()
    engine = await stage.engine()
    peer = coordinator.core.engines.named("engine-0").peer
    send = coordinator.transport.send
    tries = 0

    def full_once(to, frames):
        nonlocal tries
        is_dispatch = to == peer and isinstance(decode(frames), Dispatch)
        tries += is_dispatch
        if is_dispatch and tries == 1:
            coordinator.transport.report_room(peer)
            return False
        return send(to, frames)

    coordinator.transport.send = full_once
    client = await stage.client()
    future = client.add_request([1], params(2))
    assert (await future)["generated_tokens"] == echo_answer([1], 2)
    assert tries == 2
    assert len(engine.dispatches) == 1
