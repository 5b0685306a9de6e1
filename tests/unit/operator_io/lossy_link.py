"""The operator's link over a connection that drops, doubles and delays frames, to a coordinator that plays by the book.

Frames of one direction stay in order, as TCP keeps them.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from functools import partial
from typing import Any

from in_memory_cluster import Cluster, FakeCoordinator

from megatron_operator.decision.actions import AskCanary, Signal
from megatron_operator.link.connection import CoordinatorLink
from megatron_operator.resource.states import LEGAL_SIGNALS, SignalKind
from megatron_runtime.protocol.headers import ErrorCode, Header
from megatron_runtime.protocol.messages import (
    Control,
    ControlAck,
    ControlMessage,
    EngineStatus,
    Hello,
    HelloAck,
    Operation,
    Status,
    StatusReply,
    decode,
)

from .operator_task import CanaryReport

Deliver = Callable[[list[bytes]], None]


class Wire:
    """One direction: each frame arrives never, once or twice, later, in order."""

    def __init__(self, rng: random.Random, *, fault_rate: float, deliver: Deliver) -> None:
        self._rng, self._rate, self._deliver = rng, fault_rate, deliver
        self._free_at = 0.0
        self.open = True
        self.faults = 0

    def send(self, frames: list[bytes]) -> None:
        loop, fate = asyncio.get_running_loop(), self._rng.random()
        copies, delay = 1, 0.0
        if fate < self._rate:
            self.faults += 1
            copies = self._rng.choice((0, 2, 1))
            delay = 0.03 * self._rng.random() if copies == 1 else 0.0
        self._free_at = max(self._free_at, loop.time() + delay)
        for _ in range(copies):
            loop.call_at(self._free_at, self._arrive, frames)

    def _arrive(self, frames: list[bytes]) -> None:
        if self.open:
            self._deliver(frames)


class LossySocket:
    """What the link takes for its socket."""

    def __init__(self, server: CoordinatorPort, rng: random.Random, fault_rate: float, receive: Deliver) -> None:
        self.back = Wire(rng, fault_rate=fault_rate, deliver=receive)
        self.there = Wire(rng, fault_rate=fault_rate, deliver=lambda frames: server.receive(frames, self.back.send))

    def send(self, frames: Any) -> bool:
        self.there.send(list(frames))
        return True

    def close(self, *, linger_ms: int = 0) -> None:
        self.there.open = self.back.open = False


class CoordinatorPort:
    """A FakeCoordinator behind the protocol: what is illegal is rejected, what is repeated is answered as before."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def receive(self, frames: list[bytes], reply: Callable[[list[bytes]], None]) -> None:
        coordinator, message = self._cluster.coordinator, decode(frames)
        if coordinator is None:
            return
        answer: ControlMessage | None = None
        if isinstance(message, Hello):
            answer = HelloAck(incarnation=1, state=coordinator.state)
        elif isinstance(message, Status):
            answer = self._status(coordinator)
        elif isinstance(message, Control):
            answer = self._control(coordinator, message)
        if answer is not None:
            reply(list(answer.to_frames()))

    def _control(self, coordinator: FakeCoordinator, control: Control) -> ControlAck | None:
        kind, operation_id = SignalKind(Header(control.kind).name), control.operation_id or ""
        if operation_id in coordinator.operations:
            return None
        code = None
        if coordinator.open is not None:
            code = ErrorCode.IN_PROGRESS
        elif kind not in LEGAL_SIGNALS[coordinator.state]:
            code = ErrorCode.ILLEGAL_SIGNAL
        if code is not None:
            return ControlAck(operation_id=operation_id, ok=False, state=coordinator.state, code=code)
        coordinator.receive(Signal(kind, operation_id, control.fence or 0, 0, engine=control.engine))
        return None

    def _status(self, coordinator: FakeCoordinator) -> StatusReply:
        snapshot = coordinator.snapshot()
        signals = {signal.operation_id: signal.kind for signal in coordinator.begun}
        return StatusReply(
            incarnation=1,
            state=snapshot.state,
            fence=snapshot.fence,
            engines=[
                EngineStatus(
                    name=engine.name,
                    state=engine.state,
                    serving=True,
                    revision=engine.revision,
                    draining=engine.draining,
                )
                for engine in snapshot.engines
            ],
            operations=[
                Operation(
                    operation_id=key,
                    signal=Header[signals[key].value],
                    phase=report.outcome.value,
                    ranks=report.confirmed_ranks,
                    total_ranks=report.total_ranks,
                )
                for key, report in snapshot.operations.items()
            ],
        )


class LossyLink(CoordinatorLink):
    """A link whose sockets are LossySockets. Canaries pass; they are not what is tested."""

    def connect_through(self, server: CoordinatorPort, rng: random.Random, *, fault_rate: float) -> None:
        self._server, self._rng, self._rate = server, rng, fault_rate
        self.sockets: list[LossySocket] = []

    def _open_socket(self, address: str, on_message: Deliver, /, **_: Any) -> Any:
        self.sockets.append(LossySocket(self._server, self._rng, self._rate, partial(self._receive, on_message)))
        return self.sockets[-1]

    def ask_canary(self, asked: AskCanary) -> bool:
        self._canaries.reports[asked.engine] = CanaryReport(asked.revision, ok=True)
        self._on_change()
        return True
