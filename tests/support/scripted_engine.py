"""A fake engine: it implements the protocol over a real socket, generates echo tokens, and fails on request."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import zmq
from echo_executor import echo_adapter, echo_token
from eventually import LONG_SECONDS
from libzmq_keys import set_keys

from megatron_runtime.megatron_core._event_socket import EventSocket
from megatron_runtime.protocol.adapters import Adapter, AdapterList
from megatron_runtime.protocol.headers import Header, Role
from megatron_runtime.protocol.lifecycle import TRANSITIONS, EngineState
from megatron_runtime.protocol.messages import (
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
    HelloAck,
    MalformedMessageError,
    Partial,
    PartialEntry,
    decode,
    pack,
    tokens_from_bytes,
    tokens_to_bytes,
    unpack,
)
from megatron_runtime.transport.security import PeerKeys

VOCABULARY = 50_000


@dataclass(eq=False)
class Job:
    dispatch: Dispatch
    prompt: list[int]
    generated: list[int]
    budget: int
    sent: int
    adapter: Adapter | None = None


@dataclass(eq=False)
class ScriptedEngine:
    """A fake engine.

    step_seconds: time between tokens; None generates only in step().

    mute:    control messages that it does not answer.
    failing: control messages that it answers with an error.
    must_load: whether it loads weights in a second step of UPDATE_WEIGHTS.
    fails_to_load, mute_load: whether this second step fails, or is not answered.
    adapters: the adapters that it has loaded; None: it behaves like a release without adapters.
    adapter_errors: why it has not loaded other adapters of the list.
    backend, lacks: its backend and the features that it lacks; None: it behaves like a release that announces neither.
    parameters: the sampling parameters that it knows; None: it behaves like a release that announces none.
    task: task of its pooling model; None: it generates tokens.
    copies: addresses at which it offers the weights of a trainer.
    reply_fields: further fields of its replies.
    log_prob: log-probability of every token; None: its replies have none.
    """

    address: str
    name: str = "engine-0"
    max_requests: int = 64
    step_seconds: float | None = 0.0
    ranks: int = 1
    state: EngineState = EngineState.RUNNING
    serving: bool = True
    epoch: int = 0
    fence: int = 0
    revision: str = ""
    model: str = ""
    source: str | None = None
    adapters: AdapterList | None = field(default_factory=AdapterList)
    adapter_errors: dict[str, str] = field(default_factory=dict)
    backend: str | None = None
    lacks: tuple[str, ...] | None = None
    parameters: tuple[str, ...] | None = None
    task: str | None = None
    copies: tuple[str, ...] | None = None
    reply_fields: dict[str, Any] = field(default_factory=dict)
    log_prob: float | None = None
    block_size_tokens: int = 16
    heartbeat_seconds: float | None = 0.05
    keys: PeerKeys | None = None
    follows_acks: bool = True
    mute: set[Header] = field(default_factory=set)
    failing: set[Header] = field(default_factory=set)
    must_load: bool = False
    fails_to_load: bool = False
    mute_load: bool = False
    acted: Counter = field(default_factory=Counter)
    controls: list[Control] = field(default_factory=list)
    commits: list[ControlCommit] = field(default_factory=list)
    acks: list[HelloAck] = field(default_factory=list)
    errors: list[Error] = field(default_factory=list)
    aborted: list[int] = field(default_factory=list)
    dispatches: list[Dispatch] = field(default_factory=list)
    jobs: dict[int, Job] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def start(self) -> ScriptedEngine:
        self.incarnation = random.getrandbits(63)
        self.context = zmq.Context()
        socket = self.context.socket(zmq.DEALER)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        if self.keys is not None:
            set_keys(socket, self.keys)
        socket.connect(self.address)
        self.socket = EventSocket(socket, self._receive)
        self._timers: list[asyncio.TimerHandle] = []
        self._stepping = False
        self.say_hello()
        await self.until(lambda: self.acks)
        self._beat()
        return self

    async def until(self, condition, *, seconds: float = LONG_SECONDS) -> None:
        async with asyncio.timeout(seconds):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    def hello(self) -> Hello:
        return Hello(
            role=Role.ENGINE,
            name=self.name,
            incarnation=self.incarnation,
            serving=self.serving,
            state=self.state,
            epoch=self.epoch,
            fence=self.fence,
            ranks=self.ranks,
            revision=self.revision,
            model=self.model,
            source=self.source,
            adapters=self.adapters,
            adapter_errors=self.adapter_errors or None,
            max_requests=self.max_requests,
            block_size_tokens=self.block_size_tokens,
            backend=self.backend,
            lacks=self.lacks,
            parameters=self.parameters,
            task=self.task,
            copies=self.copies,
        )

    def say_hello(self) -> None:
        self.send(self.hello())

    def send(self, message) -> None:
        self.socket.send(message.to_frames())

    def _beat(self) -> None:
        if self.heartbeat_seconds is not None and self.socket._loop is not None:
            beat = Heartbeat(
                incarnation=self.incarnation,
                state=self.state,
                epoch=self.epoch,
                source=self.source,
                adapters=None if self.adapters is None else self.adapters.generation,
                running=len(self.jobs),
            )
            self.send(beat)
            self._timers = [asyncio.get_running_loop().call_later(self.heartbeat_seconds, self._beat)]

    def _receive(self, frames: list[bytes]) -> None:
        match decode(frames):
            case HelloAck() as ack:
                self.acks.append(ack)
                if self.serving and self.follows_acks and ack.state.value in ("RUNNING", "PAUSED", "SUSPENDED"):
                    self.state = EngineState(ack.state.value)
                    self.epoch = ack.epoch
                    self.source = ack.source or self.source
                    if self.adapters is not None and ack.adapters != self.adapters:
                        self.adapters = ack.adapters
                        self.say_hello()
                    self._schedule()
            case Dispatch() as dispatch:
                self._dispatch(dispatch)
            case Abort(id=int() as number):
                self.aborted.append(number)
                self.jobs.pop(number, None)
            case Control() as control:
                self._control(control)
            case ControlCommit() as commit:
                self._commit(commit)
            case Error() as error:
                self.errors.append(error)
        self.changed.set()

    def _dispatch(self, dispatch: Dispatch) -> None:
        self.dispatches.append(dispatch)
        generated = tokens_from_bytes(dispatch.generated).tolist()
        try:
            budget = unpack(dispatch.params)["num_tokens_to_generate"]
        except (MalformedMessageError, KeyError, TypeError) as error:
            rejection = {"status": "FAILED", "finish_reason": "error", "error": {"code": 400, "message": str(error)}}
            self.send(Final(dispatch.dispatch_id, dispatch.uid, dispatch.generated, pack(rejection)))
            return
        prompt = tokens_from_bytes(dispatch.prompt).tolist()
        adapter = self.adapters.find(dispatch.meta.adapter) if self.adapters is not None else None
        assert dispatch.meta.adapter == (adapter.name if adapter is not None else ""), "an adapter that it lacks"
        self.jobs[dispatch.dispatch_id] = Job(dispatch, prompt, generated, budget, len(generated), adapter)
        self._schedule()

    def _schedule(self) -> None:
        if self.step_seconds is not None and not self._stepping and self.jobs and self.state is EngineState.RUNNING:
            self._stepping = True
            asyncio.get_running_loop().call_later(self.step_seconds, self._timed_step)

    def _timed_step(self) -> None:
        self._stepping = False
        if self.socket._loop is not None and self.state is EngineState.RUNNING:
            self.step()
            self._schedule()

    def step(self) -> None:
        """Generate one token for every job."""
        partials: dict[int, tuple[list[PartialEntry], list[int]]] = {}
        for number, job in list(self.jobs.items()):
            if len(job.generated) < job.budget:
                weights = echo_adapter(job.adapter.key if job.adapter is not None else "")
                job.generated.append(echo_token(job.prompt + job.generated, VOCABULARY, weights))
            dispatch = job.dispatch
            if dispatch.meta.streaming and job.sent < len(job.generated):
                entries, tokens = partials.setdefault(dispatch.route, ([], []))
                new = job.generated[job.sent :]
                entries.append(PartialEntry(dispatch.uid, number, job.sent, len(new)))
                tokens.extend(new)
                job.sent = len(job.generated)
        for route, (entries, tokens) in partials.items():
            self.send(Partial(route, entries, tokens_to_bytes(tokens)))
        for number, job in list(self.jobs.items()):
            if len(job.generated) >= job.budget:
                self.finish(number)
        self.changed.set()

    def finish(self, number: int) -> None:
        job = self.jobs.pop(number)
        reply = {
            "status": "COMPLETED",
            "finish_reason": "length",
            "prompt_length": len(job.prompt),
            **self.reply_fields,
        }
        if self.log_prob is not None:
            reply["generated_log_probs"] = [self.log_prob] * len(job.generated)
        self.send(Final(number, job.dispatch.uid, tokens_to_bytes(job.generated), pack(reply)))

    def _control(self, control: Control) -> None:
        kind = control.kind
        self.controls.append(control)
        self.fence = max(self.fence, control.fence or 0)
        if kind in self.mute or (control.load and self.mute_load):
            return
        ok = not self.fails_to_load if control.load else kind not in self.failing
        if ok:
            self.acted[kind] += 1
            self._staged = control.source
            self._staged_adapters = control.adapters
            if kind in TRANSITIONS:
                self.state = TRANSITIONS[kind].passing
        self.send(
            ControlAck(
                operation_id=control.operation_id or "-",
                ok=ok,
                state=self.state,
                ranks=self.ranks,
                error=None if ok else f"{kind.name} went wrong",
                must_load=(self.must_load and kind is Header.UPDATE_WEIGHTS and not control.load) or None,
            )
        )

    def _commit(self, commit: ControlCommit) -> None:
        self.commits.append(commit)
        if commit.discard:
            return
        if commit.state is not None:
            self.state = commit.state
        if commit.epoch is not None:
            self.epoch = commit.epoch
        if commit.signal is Header.UPDATE_WEIGHTS:
            self.source = self._staged
        if commit.signal is Header.SET_ADAPTERS:
            self.adapters = self._staged_adapters
            self.say_hello()
        self._schedule()

    def leave(self) -> None:
        """Send DISCONNECT and close."""
        self.send(Disconnect(reason="test"))
        self.close(linger_ms=500)

    def close(self, *, linger_ms: int = 0) -> None:
        """Close without DISCONNECT. Idempotent."""
        for timer in self._timers:
            timer.cancel()
        self.socket.close(linger_ms=linger_ms)
        self.context.term()
