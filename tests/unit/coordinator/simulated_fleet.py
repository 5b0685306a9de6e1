"""The core of a coordinator, simulated engines and a simulated client in one thread, at a simulated time.

Engines generate the tokens of echo engines. A request whose prompt begins with POISON crashes the engine that runs it.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from coordinator_tables import check_tables
from echo_executor import echo_answer, echo_token

from megatron_runtime.coordinator.core.context import SHARED_PORT
from megatron_runtime.coordinator.core.settings import CoordinatorSettings, Timing
from megatron_runtime.protocol.headers import Header, Role
from megatron_runtime.protocol.lifecycle import TRANSITIONS, EngineState
from megatron_runtime.protocol.messages import (
    ENGINE_FAILED,
    Abort,
    Control,
    ControlAck,
    ControlCommit,
    Disconnect,
    Dispatch,
    Error,
    Final,
    Heartbeat,
    Hello,
    MalformedMessageError,
    Partial,
    PartialEntry,
    RequestMeta,
    Submit,
    decode,
    pack,
    tokens_from_bytes,
    tokens_to_bytes,
    unpack,
)

from .core_driver import CoreDriver, Peer

POISON = 666
VOCABULARY = 50_000
TURN_SECONDS = 0.1


@dataclass(eq=False)
class Job:
    dispatch_id: int
    prompt: list[int]
    tokens: list[int]
    budget: int
    uid: bytes = b""
    route: int = 0
    streaming: bool = False


@dataclass(eq=False)
class SimulatedEngine:
    """A simulated engine.

    poison_length: tokens of prompt and answer at which a poison request crashes the engine.
    silent:        neither generates nor sends.
    lacks:         features that it announces not to have.
    """

    name: str
    peer: Peer
    incarnation: int
    max_requests: int = 64
    model: str = ""
    lacks: tuple[str, ...] = ()
    plain: bool = False
    poison_length: int = 1
    alive: bool = True
    silent: bool = False
    loading_turns: int = 0
    state: EngineState = EngineState.RUNNING
    failing: set[Header] = field(default_factory=set)
    jobs: dict[int, Job] = field(default_factory=dict)
    max_jobs: int = 0
    ran: list[bytes] = field(default_factory=list)

    def hello(self, *, serving: bool) -> Hello:
        return Hello(
            role=Role.ENGINE,
            name=self.name,
            incarnation=self.incarnation,
            serving=serving,
            state=self.state,
            model=self.model,
            max_requests=self.max_requests,
            lacks=self.lacks,
        )


@dataclass(eq=False)
class ClientRequest:
    """A request of the client and its answer."""

    uid: bytes
    prompt: list[int]
    length: int
    tokens: list[int] = field(default_factory=list)
    answer: list[int] | None = None
    error: Error | None = None
    reply: dict[str, Any] | None = None

    @property
    def ended(self) -> bool:
        return self.answer is not None or self.error is not None or self.reply is not None

    def check(self) -> None:
        """Check that the answer equals that of an undisturbed engine."""
        assert self.error is None, self.error
        assert self.answer == echo_answer(self.prompt, self.length, vocab_size=VOCABULARY)
        assert self.tokens == self.answer[: len(self.tokens)], "a token was lost, duplicated or reordered"


class SimulatedFleet:
    def __init__(self, *, seed: int = 1, suspect: float = 2.0, dead: float = 10.0, **settings: Any) -> None:
        self.inboxes: dict[Peer, deque[Any]] = {}
        """Messages to each connection, which its peer reads in the next turn."""
        self.full: set[Peer] = set()
        """Connections that currently accept no message."""
        self.random = random.Random(seed)
        timing = Timing(suspect=suspect, dead=dead, client_dead=1e9, recovery=0.0)
        self.driver = CoreDriver(
            CoordinatorSettings(timing=timing, **settings),
            self._deliver,
            is_connected=lambda peer: peer in self.inboxes,
            full=self.full,
        )
        self.core = self.driver.core
        self.say = self.driver.say
        self.engines: dict[str, SimulatedEngine] = {}
        self.asked: dict[bytes, ClientRequest] = {}
        self.crashes: list[str] = []
        """Names of engines crashed by a poison request or crash(), in order."""
        self.restart_turns: int | None = None
        """Turns after which a crashed engine restarts; None: never."""
        self._returning: list[list[Any]] = []
        self._count = 0
        self.client = self._peer(Role.CLIENT)
        self.admin = self._peer(Role.ADMIN)
        self.acks: list[ControlAck] = []
        self.say(self.client, Hello(role=Role.CLIENT, name="client", incarnation=1))
        self.say(self.admin, Hello(role=Role.ADMIN, name="admin", incarnation=1))

    def _peer(self, port: int) -> Peer:
        self._count += 1
        peer = (int(port), b"p%d" % self._count)
        self.inboxes[peer] = deque()
        return peer

    def _deliver(self, peer: Peer, frames: list[bytes]) -> bool | None:
        inbox = self.inboxes.get(peer)
        if inbox is None:
            return None
        if peer in self.full:
            return False
        inbox.append(decode(frames))
        return True

    # --- engines ------------------------------------------------------------------------------------------------

    def engine(self, name: str, *, loading_turns: int = 0, **options: Any) -> SimulatedEngine:
        """Start an engine: it registers now and serves after `loading_turns`."""
        engine = SimulatedEngine(
            name, self._peer(Role.ENGINE), self.random.getrandbits(63), loading_turns=loading_turns, **options
        )
        self.engines[name] = engine
        self.say(engine.peer, engine.hello(serving=False))
        if not loading_turns:
            self.say(engine.peer, engine.hello(serving=True))
        return engine

    def plain_engine(self, name: str) -> SimulatedEngine:
        """Start an engine of the Megatron protocol. Needs `single_port=True`."""
        peer = (SHARED_PORT, name.encode())
        self.inboxes[peer] = deque()
        engine = self.engines[name] = SimulatedEngine(name, peer, 0, plain=True)
        self.driver.receive(peer, [b""])
        return engine

    def cut(self, engine: SimulatedEngine, *, by_peer: bool = True) -> None:
        """Close the engine's connection. The engine keeps running."""
        self.inboxes.pop(engine.peer, None)
        self.driver.connection_lost(engine.peer, by_peer=by_peer)

    def crash(self, engine: SimulatedEngine) -> None:
        """Crash an engine."""
        engine.alive = False
        self.crashes.append(engine.name)
        if self.restart_turns is not None:
            self._returning.append([self.restart_turns, engine])
        self.cut(engine)

    def reconnect(self, engine: SimulatedEngine) -> None:
        """Open a new connection of a running engine, which drops its requests."""
        engine.peer = self._peer(Role.ENGINE)
        engine.incarnation = self.random.getrandbits(63)
        engine.jobs.clear()
        self.say(engine.peer, engine.hello(serving=True))

    def leave(self, engine: SimulatedEngine, reason: str = "engine leaves") -> None:
        engine.alive = False
        if reason == ENGINE_FAILED:
            self.crashes.append(engine.name)
        self.say(engine.peer, Disconnect(reason=reason))
        self.inboxes.pop(engine.peer, None)

    # --- requests -----------------------------------------------------------------------------------------------

    def ask(
        self, *prompt: int, tokens: int = 40, streaming: bool = True, model: str = "", **meta: Any
    ) -> ClientRequest:
        asked = ClientRequest(self.random.randbytes(16), list(prompt), tokens)
        self.asked[asked.uid] = asked
        params = pack({"num_tokens_to_generate": tokens, "streaming": streaming})
        if model:
            self.say(self.client, Hello(role=Role.CLIENT, name="client", incarnation=1, model=model))
        submit = Submit(asked.uid, RequestMeta(streaming, 1, **meta), tokens_to_bytes(asked.prompt), b"", params)
        self.say(self.client, submit)
        return asked

    def abort(self, asked: ClientRequest) -> None:
        del self.asked[asked.uid]
        self.say(self.client, Abort(asked.uid))

    def control(self, kind: Header, **options: Any) -> None:
        self.say(self.admin, Control(kind=kind, operation_id=f"op-{self.random.random()}", fence=1, **options))

    # --- turns --------------------------------------------------------------------------------------------------

    def turn(self) -> None:
        """Let all peers read their messages and all engines make one step, and advance the time."""
        for engine in list(self.engines.values()):
            if engine.alive:
                self._play(engine)
        self._read()
        for item in list(self._returning):
            item[0] -= 1
            if item[0] <= 0:
                self._returning.remove(item)
                gone = item[1]
                options = {"model": gone.model, "lacks": gone.lacks, "poison_length": gone.poison_length}
                self.engine(gone.name, loading_turns=2, **options)
        self.driver.advance(TURN_SECONDS)
        check_tables(self.core)

    def turns(self, number: int) -> None:
        for _ in range(number):
            self.turn()

    def until(self, condition: Any, *, turns: int = 3000) -> None:
        for _ in range(turns):
            if condition():
                return
            self.turn()
        raise AssertionError(f"not within {turns} turns")

    def finish(self, *complete: ClientRequest, turns: int = 3000) -> None:
        """Run turns until every request has an answer or an error. complete: check() succeeds for these."""
        self.until(lambda: all(asked.ended for asked in self.asked.values()), turns=turns)
        for asked in complete:
            asked.check()

    def _play(self, engine: SimulatedEngine) -> None:
        if engine.loading_turns:
            engine.loading_turns -= 1
            if not engine.loading_turns:
                self.say(engine.peer, engine.hello(serving=True))
        if engine.silent:
            return
        inbox = self.inboxes.get(engine.peer)
        while inbox:
            self._obey(engine, inbox.popleft())
        if engine.state is EngineState.RUNNING:
            self._step(engine)
        if engine.alive and not engine.plain:
            self.say(engine.peer, Heartbeat(incarnation=1, state=engine.state, running=len(engine.jobs)))

    def _obey(self, engine: SimulatedEngine, message: Any) -> None:
        match message:
            case Dispatch():
                prompt = tokens_from_bytes(message.prompt).tolist()
                job = Job(message.dispatch_id, prompt, tokens_from_bytes(message.generated).tolist(), 0)
                job.uid, job.route, job.streaming = message.uid, message.route, message.meta.streaming
                try:
                    job.budget = unpack(message.params)["num_tokens_to_generate"]
                except (MalformedMessageError, KeyError, TypeError):  # of a hostile client
                    self._answer(engine, job, status="FAILED")
                    return
                engine.jobs[job.dispatch_id] = job
                engine.ran.append(message.uid)
            case Abort(id=number):
                engine.jobs.pop(number, None)
            case Control(kind=kind, operation_id=operation_id):
                ok = kind not in engine.failing
                if ok and kind in TRANSITIONS:
                    engine.state = TRANSITIONS[kind].passing
                ack = ControlAck(operation_id=operation_id or "-", ok=ok, state=engine.state, ranks=1)
                self.say(engine.peer, ack)
            case ControlCommit(state=EngineState() as state):
                engine.state = state
            case _ if engine.plain and getattr(message, "items", [0])[0] == Header.SUBMIT_REQUEST:
                _, number, prompt, params = message.items
                engine.jobs[number] = Job(number, prompt, [], params["num_tokens_to_generate"])

    def _step(self, engine: SimulatedEngine) -> None:
        engine.max_jobs = max(engine.max_jobs, len(engine.jobs))
        for job in engine.jobs.values():
            if job.prompt[:1] == [POISON] and len(job.prompt) + len(job.tokens) >= engine.poison_length:
                self.crash(engine)
                return
        for job in list(engine.jobs.values()):
            job.tokens.append(echo_token(job.prompt + job.tokens, VOCABULARY))
            if len(job.tokens) >= job.budget:
                del engine.jobs[job.dispatch_id]
                self._answer(engine, job)
            elif job.streaming:
                entry = PartialEntry(job.uid, job.dispatch_id, len(job.tokens) - 1, 1)
                self.say(engine.peer, Partial(job.route, [entry], tokens_to_bytes(job.tokens[-1:])))

    def _answer(self, engine: SimulatedEngine, job: Job, *, status: str = "COMPLETED") -> None:
        reply = {"status": status, "finish_reason": "length"}
        if engine.plain:
            output = {**reply, "request_id": job.dispatch_id, "generated_tokens": job.tokens}
            self.driver.receive(engine.peer, [pack([int(Header.ENGINE_REPLY), [output]])])
        else:
            self.say(engine.peer, Final(job.dispatch_id, job.uid, tokens_to_bytes(job.tokens), pack(reply)))

    def _read(self) -> None:
        inbox = self.inboxes[self.client]
        while inbox:
            match inbox.popleft():
                case Partial() as partial:
                    new = iter(tokens_from_bytes(partial.tokens).tolist())
                    for uid, _, offset, count in partial.entries:
                        tokens = [next(new) for _ in range(count)]
                        asked = self.asked.get(uid)
                        if asked is not None:
                            assert offset == len(asked.tokens), "a partial is missing or repeated"
                            asked.tokens += tokens
                case Final() as final if final.uid in self.asked:
                    self.asked[final.uid].answer = tokens_from_bytes(final.tokens).tolist()
                case Error(uid=bytes() as uid) as error if uid in self.asked:
                    self.asked[uid].error = error
        inbox = self.inboxes[self.admin]
        while inbox:
            message = inbox.popleft()
            if isinstance(message, ControlAck):
                self.acks.append(message)
