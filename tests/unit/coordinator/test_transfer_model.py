"""The table of transfers, against the coordinator: every row of it, and the events of split requests in any order."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from soak import size

from megatron_runtime.coordinator.core.records import Entry, RequestStage
from megatron_runtime.coordinator.core.settings import CoordinatorSettings, Timing
from megatron_runtime.coordinator.core.transfers import EXPORTED_SECONDS, MEASURED_SECONDS, TABLE, StageChange
from megatron_runtime.protocol.adapters import Adapter, AdapterList
from megatron_runtime.protocol.headers import Header, Role
from megatron_runtime.protocol.lifecycle import EngineState
from megatron_runtime.protocol.messages import (
    Abort,
    Control,
    ControlAck,
    ControlCommit,
    Dispatch,
    Error,
    Exported,
    Final,
    Heartbeat,
    Hello,
    HelloAck,
    Imported,
    KVPort,
    Prefill,
    ReleaseBlocks,
    RequestMeta,
    Submit,
    Transfer,
    decode,
    pack,
    tokens_to_bytes,
)
from megatron_runtime.requests.config import RoutingPolicy

from .core_driver import CoreDriver, Peer

HEARTBEAT = 0.5
BLOCK = 16
TOKENS = 25 * BLOCK
ANSWER = tokens_to_bytes([7, 8, 9])
ADAPTERS = AdapterList((Adapter("sql", "/adapters/sql"),), generation=1)


@dataclass(eq=False)
class Engine:
    """An engine that has read its messages up to here: what it works on, and the blocks that it keeps, by id."""

    name: str
    stage: str
    peer: Peer
    incarnation: int
    prefills: set[int] = field(default_factory=set)
    exports: set[int] = field(default_factory=set)
    imports: dict[int, Transfer] = field(default_factory=dict)
    kept: set[int] = field(default_factory=set)
    decodes: dict[int, Dispatch] = field(default_factory=dict)
    free_blocks: int = 1000
    epoch: int = 0
    has_adapter: bool = True
    adapters: AdapterList = ADAPTERS
    staged: AdapterList = ADAPTERS

    def hello(self) -> Hello:
        return Hello(
            role=Role.ENGINE,
            name=self.name,
            incarnation=self.incarnation,
            serving=True,
            state=EngineState.RUNNING,
            epoch=self.epoch,
            max_requests=4,
            block_size_tokens=BLOCK,
            engine_role=self.stage,
            adapters=self.adapters,
            adapter_errors=None if self.has_adapter else {"sql": "no such directory"},
            kv=KVPort(address=f"tcp://127.0.0.1:{self.incarnation}", layout="float32", block_bytes=1024),
        )

    def beat(self) -> Heartbeat:
        running = len(self.prefills) + len(self.imports) + len(self.decodes)
        return Heartbeat(
            incarnation=self.incarnation,
            state=EngineState.RUNNING,
            epoch=self.epoch,
            running=running,
            digest="d0",
            free_blocks=self.free_blocks,
        )

    def drop(self, dispatch_id: int) -> None:
        """ABORT_REQUEST and RELEASE: nothing with this id is left."""
        self.prefills.discard(dispatch_id)
        self.exports.discard(dispatch_id)
        self.kept.discard(dispatch_id)
        self.imports.pop(dispatch_id, None)
        self.decodes.pop(dispatch_id, None)


@dataclass(eq=False)
class World:
    """A client, an administrator, and engines: p-0 and p-1 prefill, d-0 and d-1 decode.

    handle: of every export; with one, engines free the blocks when they were read.
    without_adapter: engines that could not load the adapter "sql".
    """

    stages: tuple[str, ...] = ("prefill", "prefill", "decode", "decode")
    handle: bytes = b""
    without_adapter: tuple[str, ...] = ()
    read_once: set[int] = field(default_factory=set)
    inboxes: dict[Peer, deque[Any]] = field(default_factory=dict)
    ended: dict[bytes, Any] = field(default_factory=dict)
    sent: list[tuple[Peer, Any]] = field(default_factory=list)
    count: int = 0

    def __post_init__(self) -> None:
        timing = Timing(heartbeat=HEARTBEAT, recovery=0.0, dead=1e6, suspect=1e6, client_dead=1e6)
        settings = CoordinatorSettings(timing=timing, routing_policy=RoutingPolicy.LEAST_COST)
        self.driver = CoreDriver(settings, self.deliver, is_connected=self.inboxes.__contains__)
        self.client, self.admin = self.peer(Role.CLIENT), self.peer(Role.ADMIN)
        self.driver.say(self.client, Hello(role=Role.CLIENT, name="client", incarnation=1))
        self.driver.say(self.admin, Hello(role=Role.ADMIN, name="admin", incarnation=1))
        numbers = {"prefill": 0, "decode": 0}
        self.engines = []
        for stage in self.stages:
            name = f"{stage[0]}-{numbers[stage]}"
            has_adapter = name not in self.without_adapter
            engine = Engine(name, stage, self.peer(Role.ENGINE), self.count, has_adapter=has_adapter)
            numbers[stage] += 1
            self.engines.append(engine)
            self.driver.say(engine.peer, engine.hello())
            self.driver.say(engine.peer, engine.beat())

    def peer(self, role: Role) -> Peer:
        self.count += 1
        peer = int(role), b"p%d" % self.count
        self.inboxes[peer] = deque()
        return peer

    def deliver(self, peer: Peer, frames: list[bytes]) -> bool | None:
        if peer not in self.inboxes:
            return None
        message = decode(frames)
        self.inboxes[peer].append(message)
        self.sent.append((peer, message))
        if peer == self.client and isinstance(message, Final | Error) and message.uid is not None:
            assert message.uid not in self.ended, "a request is answered once"
            self.ended[message.uid] = message
        return True

    def named(self, name: str) -> Engine:
        return next(engine for engine in self.engines if engine.name == name)

    # --- the client -----------------------------------------------------------------------------------------------

    def submit(self, number: int, *, tokens: int = TOKENS, needs: str = "", salt: str = "", adapter: str = "") -> bytes:
        uid = number.to_bytes(16, "big")
        prompt = tokens_to_bytes([number * 1000 + place for place in range(tokens)])
        meta = RequestMeta(streaming=True, needs=needs, cache_salt=salt, adapter=adapter)
        self.driver.say(self.client, Submit(uid, meta, prompt, b"", pack({})))
        return uid

    def abort(self, uid: bytes) -> None:
        self.ended.setdefault(uid, "aborted")
        self.driver.say(self.client, Abort(uid))

    def entry(self, uid: bytes) -> Entry | None:
        return self.driver.core.dispatcher.journal.get(uid)

    # --- the engines ----------------------------------------------------------------------------------------------

    def read(self, engine: Engine) -> None:
        match self.inboxes[engine.peer].popleft():
            case Prefill(dispatch=dispatch):
                assert engine.has_adapter or not dispatch.meta.adapter
                engine.prefills.add(dispatch.dispatch_id)
            case Transfer(address=""):
                pass
            case Transfer() as transfer:
                assert transfer.handle == self.handle
                assert not (self.handle and transfer.export_id in self.read_once), "its blocks may be of others now"
                self.read_once.add(transfer.export_id)
                engine.imports[transfer.dispatch_id] = transfer
            case Dispatch() as dispatch:
                assert engine.has_adapter or not dispatch.meta.adapter
                engine.decodes[dispatch.dispatch_id] = dispatch
                engine.kept.clear()  # the request that was announced begins with these blocks
            case Abort(id=int() as dispatch_id) | ReleaseBlocks(dispatch_id=dispatch_id):
                engine.drop(dispatch_id)
            case Control() as control:
                engine.staged = control.adapters or engine.staged
                ack = ControlAck(operation_id=control.operation_id or "-", ok=True, state=EngineState.RUNNING, ranks=1)
                self.driver.say(engine.peer, ack)
            case ControlCommit(signal=Header.SET_ADAPTERS):
                engine.adapters = engine.staged
                self.driver.say(engine.peer, engine.hello())
            case ControlCommit(epoch=int() as epoch) | HelloAck(epoch=epoch) as message:
                if epoch != engine.epoch:
                    engine.kept.clear()
                engine.epoch = epoch
                if isinstance(message, HelloAck) and message.adapters not in (None, engine.adapters):
                    engine.adapters = message.adapters
                    self.driver.say(engine.peer, engine.hello())

    def export(self, engine: Engine, *, blocks: int = 25) -> None:
        dispatch_id = min(engine.prefills)
        engine.prefills.discard(dispatch_id)
        if blocks:
            engine.exports.add(dispatch_id)
        weights = f"{engine.epoch} d0"
        self.driver.say(engine.peer, Exported(dispatch_id, bytes(32 * blocks), weights, self.handle))

    def finish_import(self, engine: Engine, *, ok: bool = True, has_room: bool = True) -> None:
        """End the first import. One whose exporter does not hold the blocks any more fails."""
        dispatch_id, transfer = min(engine.imports.items())
        del engine.imports[dispatch_id]
        ok = ok and has_room and any(transfer.export_id in other.exports for other in self.engines)
        if ok:
            engine.kept.add(dispatch_id)
        self.driver.say(
            engine.peer,
            Imported(dispatch_id=dispatch_id, ok=ok, has_room=has_room, received_bytes=1000 * ok, seconds=0.1),
        )

    def answer(self, engine: Engine) -> None:
        dispatch_id, dispatch = min(engine.decodes.items())
        del engine.decodes[dispatch_id]
        reply = pack({"status": "COMPLETED"})
        self.driver.say(engine.peer, Final(dispatch_id, dispatch.uid, ANSWER, reply))

    def lose(self, engine: Engine, *, crash: bool = True) -> None:
        """The process ends, and starts again. What it had sent has arrived."""
        self.inboxes.pop(engine.peer)
        self.driver.connection_lost(engine.peer, by_peer=crash)
        self.count += 1
        peer = self.peer(Role.ENGINE)
        fresh = Engine(engine.name, engine.stage, peer, self.count, epoch=engine.epoch, has_adapter=engine.has_adapter)
        fresh.adapters = AdapterList()
        self.engines[self.engines.index(engine)] = fresh
        self.driver.say(fresh.peer, fresh.hello().model_copy(update={"serving": False}))
        self.driver.say(fresh.peer, fresh.hello())
        self.driver.say(fresh.peer, fresh.beat())

    def verb(self) -> None:
        self.count += 1
        epoch = self.driver.core.verbs.epoch + 1
        verb = Control(kind=Header.SET_GENERATION_EPOCH, operation_id=f"op-{self.count}", fence=1, epoch=epoch)
        self.driver.say(self.admin, verb)

    def replace_adapter(self) -> None:
        self.count += 1
        wanted = AdapterList((Adapter("sql", f"/adapters/{self.count}"),))
        verb = Control(kind=Header.SET_ADAPTERS, operation_id=f"op-{self.count}", fence=1, adapters=wanted)
        self.driver.say(self.admin, verb)

    # --- events ---------------------------------------------------------------------------------------------------

    def events(self) -> list[Callable[[], None]]:
        """What engines may do next."""
        events: list[Callable[[], None]] = []
        for engine in self.engines:
            if self.inboxes[engine.peer]:
                events.append(lambda engine=engine: self.read(engine))
            if engine.prefills:
                events.append(lambda engine=engine: self.export(engine))
            if engine.imports:
                events.append(lambda engine=engine: self.finish_import(engine))
            if engine.decodes:
                events.append(lambda engine=engine: self.answer(engine))
        return events

    def faults(self, order: random.Random) -> list[Callable[[], None]]:
        engine = order.choice(self.engines)
        open_uids = [entry.uid for entry in self.driver.core.dispatcher.journal]
        faults: list[Callable[[], None]] = [
            lambda: self.lose(engine, crash=False),
            self.verb,
            self.replace_adapter,
            lambda: self.driver.advance(EXPORTED_SECONDS / 3),
        ]
        if open_uids:
            faults.append(lambda: self.abort(order.choice(open_uids)))
        for other in self.engines:
            if other.prefills:
                faults.append(lambda other=other: self.export(other, blocks=0))
            if other.imports:
                faults.append(lambda other=other: self.finish_import(other, ok=False))
                faults.append(lambda other=other: self.finish_import(other, has_room=False))
        return faults

    def read_all(self) -> None:
        while any(self.inboxes[engine.peer] for engine in self.engines):
            for engine in self.engines:
                while self.inboxes[engine.peer]:
                    self.read(engine)

    def beat_all(self) -> None:
        for engine in self.engines:
            self.driver.say(engine.peer, engine.beat())
        self.driver.advance(HEARTBEAT)

    def settle(self) -> None:
        """Carry out everything that is under way."""
        for _ in range(100):
            while events := self.events():
                events[0]()
            if not len(self.driver.core.dispatcher.journal):
                break
            self.beat_all()
        self.read_all()

    # --- a request at a stage -------------------------------------------------------------------------------------

    def at(self, stage: RequestStage) -> tuple[bytes, Engine, Engine | None]:
        """Submit a request and take it to `stage`. Return it, its prefill engine, and its decode engine."""
        uid = self.submit(1)
        self.read_all()
        prefiller = next(engine for engine in self.engines if engine.prefills)
        if stage is RequestStage.PREFILLING:
            return uid, prefiller, None
        if stage is RequestStage.EXPORTED:
            for engine in self.engines:
                if engine.stage == "decode":
                    engine.free_blocks = 0
                    self.driver.say(engine.peer, engine.beat())
        self.export(prefiller)
        self.read_all()
        if stage is RequestStage.EXPORTED:
            return uid, prefiller, None
        decoder = next(engine for engine in self.engines if engine.imports)
        if stage is RequestStage.DECODING:
            self.finish_import(decoder)
            self.read_all()
        return uid, prefiller, decoder


def cause(world: World, change: StageChange, uid: bytes, prefiller: Engine, decoder: Engine | None) -> None:
    """Have a change happen to a request."""
    match change:
        case StageChange.PREFILL_LOST:
            world.engines.remove(prefiller)  # it does not return
            world.inboxes.pop(prefiller.peer)
            world.driver.connection_lost(prefiller.peer, by_peer=True)
        case StageChange.DECODE_LOST:
            for engine in [engine for engine in world.engines if engine.stage == "decode"]:
                if engine is not decoder:  # so that the request stays where the table says
                    engine.free_blocks = 0
                    world.driver.say(engine.peer, engine.beat())
            assert decoder is not None
            world.engines.remove(decoder)
            world.inboxes.pop(decoder.peer)
            world.driver.connection_lost(decoder.peer, by_peer=True)
        case StageChange.NO_ROOM:
            for engine in [engine for engine in world.engines if engine.stage == "decode" and engine is not decoder]:
                engine.free_blocks = 0
                world.driver.say(engine.peer, engine.beat())
            assert decoder is not None
            world.finish_import(decoder, has_room=False)
        case StageChange.FAILED if decoder is None:
            world.export(prefiller, blocks=0)
        case StageChange.FAILED:
            world.finish_import(decoder, ok=False)
        case StageChange.EXPIRED:
            world.driver.advance(EXPORTED_SECONDS + 2 * HEARTBEAT)
        case StageChange.VERB:
            world.verb()
        case StageChange.ENDED:
            world.abort(uid)
        case StageChange.COORDINATOR_LOST:
            raise AssertionError("engines drop what they have when they register with another coordinator")


ROWS = [(stage, change) for stage, change in TABLE if change is not StageChange.COORDINATOR_LOST]


@pytest.mark.parametrize(("stage", "change"), ROWS, ids=[f"{stage} {change}" for stage, change in ROWS])
def test_a_change_moves_a_request_as_the_table_says(stage: RequestStage, change: StageChange) -> None:
    world, row = World(), TABLE[stage, change]
    uid, prefiller, decoder = world.at(stage)
    entry = world.entry(uid)
    assert entry is not None
    assert entry.stage is stage
    stages: list[RequestStage] = []
    transfers = world.driver.core.dispatcher.transfers
    move = transfers.move

    def watched(moved: Entry, to: RequestStage) -> None:
        if moved is entry:
            stages.append(to)
        move(moved, to)

    transfers.move = watched  # type: ignore[method-assign]
    world.sent.clear()
    cause(world, change, uid, prefiller, decoder)
    reached = stages[0] if stages else stage
    if row.to is None:
        assert world.entry(uid) is None
    else:
        assert reached is row.to, stages
    peers = {"prefill": prefiller.peer, "decode": None if decoder is None else decoder.peer}
    released = {peer for peer, message in world.sent if isinstance(message, Abort | ReleaseBlocks)}
    assert released == {peers[name] for name in row.releases.split(" and ") if name}
    accused = {crash.engine for crash in entry.crashes}
    engines = {"prefill": prefiller.name, "decode": "" if decoder is None else decoder.name}
    assert accused == ({engines[row.accuses]} if row.accuses else set())
    world.settle()
    assert uid in world.ended


@pytest.mark.parametrize("change", [StageChange.DECODE_LOST, StageChange.NO_ROOM])
def test_blocks_that_can_be_read_once_are_computed_again_after_an_import_that_did_not_end(change: StageChange) -> None:
    world = World(handle=b"once")
    uid, prefiller, decoder = world.at(RequestStage.IMPORTING)
    entry = world.entry(uid)
    assert entry is not None
    export = entry.export
    assert export is not None
    cause(world, change, uid, prefiller, decoder)
    assert entry.export is None
    assert (prefiller.peer, ReleaseBlocks(dispatch_id=export.id)) in world.sent
    world.settle()
    assert isinstance(world.ended[uid], Final)


def test_an_import_of_vllm_ends_when_its_prefill_engine_is_lost() -> None:
    """The prefill engine may be frozen, which vLLM does not detect."""
    world = World(handle=b"once")
    uid, prefiller, decoder = world.at(RequestStage.IMPORTING)
    assert decoder is not None
    (dispatch_id,) = decoder.imports
    cause(world, StageChange.PREFILL_LOST, uid, prefiller, decoder)
    assert (decoder.peer, Abort(id=dispatch_id)) in world.sent
    world.read_all()
    assert sum(len(engine.decodes) for engine in world.engines) == 1
    assert world.driver.core.counters.failed_imports == 1
    world.settle()
    assert isinstance(world.ended[uid], Final)


def test_events_in_any_order_end_every_request_once_and_leave_no_block() -> None:
    reached = set()
    for seed in range(size(120, soak=20_000)):
        order = random.Random(seed)
        world = World(handle=b"once" * (seed % 2), without_adapter=order.choice(((), ("p-1",), ("d-0", "d-1"))))
        numbers = range(1, order.choice((3, 6, 14)))
        uids = [world.submit(number, adapter=order.choice(("", "sql"))) for number in numbers]
        for _ in range(order.randrange(60)):
            events = world.events()
            choices = world.faults(order) if order.random() < 0.15 or not events else events
            order.choice(choices)()
            reached |= {entry.stage for entry in world.driver.core.dispatcher.journal}
        world.settle()
        assert set(world.ended) == set(uids), seed
        for uid, answer in world.ended.items():
            assert answer == "aborted" or (isinstance(answer, Final) and answer.tokens == ANSWER), (seed, uid, answer)
        for engine in world.engines:
            assert (engine.prefills, engine.exports, engine.imports) == (set(), set(), {}), (seed, engine)
        transfers = world.driver.core.dispatcher.transfers
        assert (transfers._promised, transfers._exported) == (0, {}), seed
    assert reached == set(RequestStage)


@pytest.mark.parametrize("late", [Exported(dispatch_id=77, digests=bytes(32)), Imported(dispatch_id=77, ok=True)])
def test_an_answer_with_an_id_of_another_stage_is_released(late: Exported | Imported) -> None:
    world = World()
    uid, prefiller, _ = world.at(RequestStage.PREFILLING)
    world.sent.clear()
    world.driver.say(prefiller.peer, late)
    assert [(peer, message.dispatch_id) for peer, message in world.sent] == [(prefiller.peer, 77)]
    assert world.entry(uid) is not None
    world.settle()
    assert isinstance(world.ended[uid], Final)


def test_short_prompts_and_requests_about_the_prompt_are_not_split() -> None:
    world = World()
    world.submit(1, tokens=200)
    world.submit(2, needs="PROMPT_LOG_PROBS")
    world.submit(3, needs="HIDDEN_STATES")
    world.read_all()
    assert not any(engine.prefills for engine in world.engines)
    world.settle()
    assert len(world.ended) == 3


def test_a_request_with_an_adapter_is_split_between_engines_that_have_it() -> None:
    world = World(without_adapter=("p-0", "d-0"))
    uid = world.submit(1, adapter="sql")
    world.read_all()
    assert [engine.name for engine in world.engines if engine.prefills] == ["p-1"]
    world.export(world.named("p-1"))
    world.read_all()
    assert [engine.name for engine in world.engines if engine.imports] == ["d-1"]
    world.settle()
    assert isinstance(world.ended[uid], Final)


def test_a_prefill_engine_answers_what_no_decode_engine_can_answer() -> None:
    world = World(without_adapter=("d-0", "d-1"))
    world.submit(1, adapter="sql")
    world.read_all()
    assert sum(len(engine.decodes) for engine in world.engines if engine.stage == "prefill") == 1


def test_a_prefix_that_the_decode_engine_holds_is_not_computed_again() -> None:
    world = World(stages=("prefill", "decode"))
    world.at(RequestStage.DECODING)
    world.settle()
    world.driver.say(
        world.client,
        Submit(bytes(16), RequestMeta(), tokens_to_bytes([1000 + place for place in range(TOKENS)]), b"", pack({})),
    )
    world.read_all()
    assert len(world.named("d-0").decodes) == 1


def test_a_slow_import_stops_the_split_for_a_limited_time() -> None:
    world = World(stages=("prefill", "decode"))
    prefiller, decoder = world.engines
    uid = world.submit(1)
    world.read_all()
    for engine in world.engines:  # the blocks of a prompt take 2.5 s, its computation 0.4 s
        rates = {"prefill_rate": 1000.0, "decode_rate": 1e6}
        world.driver.say(engine.peer, engine.beat().model_copy(update=rates))
    world.driver.advance(HEARTBEAT)
    world.export(prefiller)
    world.read_all()
    world.finish_import(decoder)
    world.read_all()
    world.answer(decoder)
    assert uid in world.ended
    world.submit(2)
    world.read_all()
    assert len(decoder.decodes) == 1
    world.answer(decoder)
    world.driver.advance(MEASURED_SECONDS)
    world.submit(3)
    world.read_all()
    assert len(prefiller.prefills) == 1
    assert world.driver.core.counters.split_requests == 2


def test_engines_of_one_stage_alone_answer_every_request() -> None:
    for stages in (("prefill", "prefill"), ("decode", "decode")):
        world = World(stages=stages)
        uid = world.submit(1)
        world.read_all()
        assert sum(len(engine.decodes) for engine in world.engines) == 1
        world.settle()
        assert isinstance(world.ended[uid], Final)


def test_engines_with_other_weights_exchange_nothing_and_the_status_names_the_reason() -> None:
    world = World(stages=("prefill", "decode"))
    decoder = world.named("d-0")
    world.driver.say(decoder.peer, decoder.beat().model_copy(update={"digest": "d1"}))
    world.submit(1)
    world.read_all()
    assert len(decoder.decodes) == 1
    (status,) = [engine for engine in world.driver.core.status().engines if engine.name == "d-0"]
    assert status.recomputes == "another digest of the weights than engine p-0"


def test_no_prefill_starts_that_the_free_blocks_of_decode_engines_cannot_hold() -> None:
    world = World(stages=("prefill", "decode"))
    decoder = world.named("d-0")
    decoder.free_blocks = 60  # of two prompts with 25 blocks each
    world.driver.say(decoder.peer, decoder.beat())
    for number in range(1, 4):
        world.submit(number)
    world.read_all()
    assert len(world.named("p-0").prefills) == 2
    assert len(decoder.decodes) == 1


def test_the_page_about_failures_has_the_table() -> None:
    page = (Path(__file__).parents[3] / "docs/decisions/110-prefill-and-decode-apart.md").read_text()
    for (stage, change), row in TABLE.items():
        cells = (stage.value, change.value, row.to.value if row.to else "ended", row.releases, row.accuses)
        assert "| " + " | ".join(cell or "–" for cell in cells) + " |" in page
