"""The table of failures, against the coordinator's core: every order of the events of an update, and one loss in it."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from soak import size

from megatron_runtime.coordinator.core.settings import CoordinatorSettings, Timing
from megatron_runtime.protocol.headers import ErrorCode, Header, Role
from megatron_runtime.protocol.lifecycle import CoordinatorState, EngineState
from megatron_runtime.protocol.messages import Control, ControlAck, ControlCommit, Heartbeat, Hello, HelloAck, decode
from megatron_runtime.trainer.failures import FAILURES, Lost, PublishPhase

from .core_driver import CoreDriver, Peer

OLD, NEW = (f"trainer://10.0.0.1:7000/{epoch}-{str(epoch) * 64}" for epoch in (1, 2))
EPOCHS = {OLD: 1, NEW: 2}
HEARTBEAT = 0.5
ORDER = list(PublishPhase)


@dataclass(eq=False)
class Engine:
    """An engine: `staging` while it receives weights, `staged` when it has them. unsent: its acknowledgement."""

    name: str
    peer: Peer
    source: str | None = OLD
    serving: bool = True
    incarnation: int = 1
    staging: Control | None = None
    staged: Control | None = None
    unsent: ControlAck | None = None
    phase: PublishPhase = PublishPhase.CONNECTING

    @property
    def epoch(self) -> int:
        return EPOCHS.get(self.source or "", 0)

    def hello(self) -> Hello:
        return Hello(
            role=Role.ENGINE,
            name=self.name,
            incarnation=self.incarnation,
            serving=self.serving,
            state=EngineState.RUNNING,
            epoch=self.epoch,
            source=self.source,
            copies=(self.name,) if self.serving and self.source is not None else None,
        )


@dataclass(eq=False)
class World:
    """Two engines with the weights OLD, and a trainer that publishes NEW."""

    inboxes: dict[Peer, deque[Any]] = field(default_factory=dict)
    held: set[str] = field(default_factory=lambda: {OLD, NEW})
    published: str | None = None
    operations: int = 0
    count: int = 0

    def __post_init__(self) -> None:
        self.trainer_lives = True
        self.start_coordinator()
        self.engines = [Engine(f"engine-{number}", self.peer(Role.ENGINE)) for number in range(2)]
        for engine in self.engines:
            self.driver.say(engine.peer, engine.hello())
        self.driver.advance(6.0)  # it has recovered: from the engines, so it knows OLD
        self.connect_trainer()
        for inbox in self.inboxes.values():
            inbox.clear()
        self.send_update()

    def start_coordinator(self) -> None:
        timing = Timing(heartbeat=HEARTBEAT, recovery=5.0, dead=1e6, suspect=1e6, client_dead=1e6)
        settings = CoordinatorSettings(timing=timing)
        self.driver = CoreDriver(settings, self.deliver, is_connected=self.inboxes.__contains__)

    def peer(self, role: Role) -> Peer:
        self.count += 1
        peer = int(role), b"p%d" % self.count
        self.inboxes[peer] = deque()
        return peer

    def deliver(self, peer: Peer, frames: list[bytes]) -> bool | None:
        if peer not in self.inboxes:
            return None
        self.inboxes[peer].append(decode(frames))
        return True

    # --- the trainer ----------------------------------------------------------------------------------------------

    def connect_trainer(self) -> None:
        self.admin = self.peer(Role.ADMIN)
        self.driver.say(self.admin, Hello(role=Role.ADMIN, name="trainer", incarnation=self.count))

    def send_update(self) -> None:
        """As WeightServer._update(): a new operation each time. The fence stands for the trainer's key."""
        self.operations += 1
        update = Control(kind=Header.UPDATE_WEIGHTS, operation_id=f"op-{self.operations}", fence=0, source=NEW, epoch=2)
        self.driver.say(self.admin, update)

    def trainer_reads(self) -> None:
        message = self.inboxes[self.admin].popleft()
        if isinstance(message, ControlAck) and self.published is None:
            retried = message.code == ErrorCode.IN_PROGRESS or message.state == CoordinatorState.RECOVERING
            if message.ok:
                self.published = "returns"
            elif retried:
                self.driver.advance(HEARTBEAT)
                self.send_update()
            else:
                self.published = f"raises {message.error}"

    # --- the engines ----------------------------------------------------------------------------------------------

    def engine_reads(self, engine: Engine) -> None:
        message = self.inboxes[engine.peer].popleft()
        match message:
            case Control():
                engine.staged, engine.staging, engine.phase = None, message, PublishPhase.CONNECTING
            case ControlCommit(discard=True):
                engine.staged = None
            case ControlCommit() if engine.staged is not None and engine.staged.operation_id == message.operation_id:
                engine.source, engine.staged = engine.staged.source, None
            case HelloAck() if message.state is CoordinatorState.RUNNING:
                self.adopt(engine, message)

    def adopt(self, engine: Engine, ack: HelloAck) -> None:
        """As EngineWorker._enter(): an engine without the weights gets them from another engine, else from the trainer,
        or waits.
        """
        is_copied = any(
            other.serving and other.source == ack.source for other in self.engines if other.name in (ack.copies or ())
        )
        if ack.source is not None and ack.source != engine.source:
            engine.staged = None
            if engine.serving and not is_copied and not self.available(ack.source):  # it ends, and starts again
                self.restart(engine)
                return
            engine.source = ack.source
        if not engine.serving and (engine.source is None or is_copied or self.available(engine.source)):
            engine.serving = True
            self.driver.say(engine.peer, engine.hello())

    def available(self, source: str) -> bool:
        return self.trainer_lives and source in self.held

    def stage(self, engine: Engine) -> None:
        """One step of an engine that receives: it connects, then it has everything, and acknowledges."""
        control = engine.staging
        assert control is not None
        assert control.source is not None
        if self.available(control.source) and engine.phase is PublishPhase.CONNECTING:
            engine.phase = PublishPhase.RECEIVING
            return
        ok = self.available(control.source)
        engine.staging, engine.staged = None, control if ok else None
        engine.phase = PublishPhase.STAGED
        engine.unsent = ControlAck(operation_id=control.operation_id or "-", ok=ok, state=EngineState.RUNNING, ranks=1)

    def acknowledge(self, engine: Engine) -> None:
        ack, engine.unsent = engine.unsent, None
        assert ack is not None
        self.driver.say(engine.peer, ack)

    def restart(self, engine: Engine) -> None:
        """The process ends and starts again, with the files that it was configured with."""
        self.inboxes.pop(engine.peer)
        self.driver.connection_lost(engine.peer, by_peer=True)
        self.count += 1
        engine.source, engine.serving, engine.staging, engine.staged, engine.unsent = None, False, None, None, None
        engine.peer, engine.incarnation = self.peer(Role.ENGINE), self.count
        self.driver.say(engine.peer, engine.hello())

    # --- events ---------------------------------------------------------------------------------------------------

    def events(self) -> list[tuple[Any, ...]]:
        """The events that can be next."""
        events: list[tuple[Any, ...]] = []
        for engine in self.engines:
            if engine.unsent is not None:
                events.append((self.acknowledge, engine))
            elif engine.staging is not None:
                events.append((self.stage, engine))
            elif self.inboxes[engine.peer]:
                events.append((self.engine_reads, engine))
        if self.trainer_lives and self.inboxes[self.admin]:
            events.append((self.trainer_reads,))
        return events

    def phase(self, lost: Lost) -> PublishPhase:
        if self.driver.core.verbs.source == NEW:
            return PublishPhase.COMMITTING
        engines = self.engines[:1] if lost is Lost.ENGINE else self.engines
        return min((engine.phase for engine in engines), key=ORDER.index)

    def lose(self, lost: Lost) -> None:
        if lost is Lost.ENGINE:
            self.restart(self.engines[0])
        elif lost is Lost.TRAINER:
            self.trainer_lives, self.published = False, "is lost with its process"
            self.driver.connection_lost(self.admin, by_peer=True)
        elif lost is Lost.COORDINATOR:
            sent = {peer: list(inbox) for peer, inbox in self.inboxes.items()}
            self.start_coordinator()
            for engine in self.engines:
                for _ in sent[engine.peer]:
                    self.engine_reads(engine)
                self.inboxes.pop(engine.peer)
                engine.peer, engine.unsent = self.peer(Role.ENGINE), None
                self.driver.say(engine.peer, engine.hello())
            for _ in sent[self.admin]:
                self.trainer_reads()
            self.connect_trainer()
            if self.published is None:
                self.send_update()

    def settle(self) -> None:
        """Carry out everything that is under way, with the heartbeats of engines."""
        for _ in range(60):
            while events := self.events():
                call, *arguments = events[0]
                call(*arguments)
            for engine in self.engines:
                beat = Heartbeat(
                    incarnation=engine.incarnation, state=EngineState.RUNNING, epoch=engine.epoch, source=engine.source
                )
                self.driver.say(engine.peer, beat if engine.serving else engine.hello())
            self.driver.advance(HEARTBEAT)


def paths() -> Iterator[tuple[Lost, int, int]]:
    """A loss, the number of events before it, and the seed of their order."""
    for seed in range(size(5, soak=400)):
        for lost in Lost:
            for before in range(12):
                yield lost, before, seed


def test_engines_serve_what_the_table_says_whenever_a_process_is_lost() -> None:
    reached = set()
    for lost, before, seed in paths():
        world, order = World(), random.Random(seed)
        for _ in range(before):
            if events := world.events():
                call, *arguments = order.choice(events)
                call(*arguments)
        phase = world.phase(lost)
        world.lose(lost)
        world.settle()
        outcome, path = FAILURES[lost, phase], (lost, phase, before, seed)
        reached.add((lost, phase))
        if lost is Lost.TRAINER:
            expected = OLD if outcome.epoch == "old" else NEW
            assert {engine.source for engine in world.engines} == {expected}, path
            assert all(engine.serving for engine in world.engines), path
            world.restart(world.engines[0])  # while the trainer is gone
            world.settle()
            assert {(engine.source, engine.serving) for engine in world.engines} == {(expected, True)}, path
            continue
        assert world.published == outcome.publish, path
        assert {(engine.source, engine.serving) for engine in world.engines} == {(NEW, True)}, path
        assert (world.driver.core.verbs.source, world.driver.core.verbs.epoch) == (NEW, 2), path
    assert reached == set(FAILURES)


def test_engines_that_restart_without_the_trainer_serve_nothing_until_it_publishes_again() -> None:
    world = World()
    world.settle()
    world.trainer_lives = False
    for engine in world.engines:
        world.restart(engine)
    world.settle()
    assert [engine.serving for engine in world.engines] == [False, False]
    world.trainer_lives, world.published = True, None
    world.connect_trainer()
    world.send_update()
    world.settle()
    assert world.published == "returns"
    assert {(engine.source, engine.serving) for engine in world.engines} == {(NEW, True)}


def test_the_page_about_verbs_has_the_table() -> None:
    page = (Path(__file__).parents[3] / "docs/concepts/verbs.md").read_text()
    for lost in Lost:
        for outcome in {FAILURES[lost, phase] for phase in PublishPhase}:
            phases = ", ".join(phase for phase in PublishPhase if FAILURES[lost, phase] == outcome)
            assert f"| {lost} | {phases} | {outcome.epoch} | {outcome.publish} | {outcome.retry} |" in page
