"""A store with the API server's compare-and-swap, and a coordinator's admin port that a test can steer."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import zmq

from megatron_operator.cluster.api import KubeApiError
from megatron_operator.cluster.kinds import ObjectKind
from megatron_runtime.megatron_core._event_socket import EventSocket
from megatron_runtime.protocol.headers import ErrorCode, Header
from megatron_runtime.protocol.lifecycle import CoordinatorState, EngineState
from megatron_runtime.protocol.messages import (
    Control,
    ControlAck,
    ControlMessage,
    Disconnect,
    EngineStatus,
    Error,
    Heartbeat,
    Hello,
    HelloAck,
    Operation,
    Status,
    StatusReply,
    decode,
)


def merged(old: Any, patch: Any) -> Any:
    """Return the result of a JSON merge patch (RFC 7386)."""
    if not isinstance(patch, dict):
        return patch
    found = dict(old) if isinstance(old, dict) else {}
    for name, value in patch.items():
        found[name] = merged(found.get(name), value)
    return {name: value for name, value in found.items() if value is not None}


class Store:
    """Objects by kind, namespace and name; versions grow; a stale version or another UID is a conflict."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str, str], dict[str, Any]] = {}
        self.version = 100
        self.writes: list[tuple[str, str]] = []
        self.reject: KubeApiError | None = None
        self.forced: list[bool] = []

    async def get(self, kind: ObjectKind, namespace: str, name: str) -> dict[str, Any] | None:
        self._maybe_reject()
        return copy.deepcopy(self.objects.get((kind.kind, namespace, name)))

    async def create(self, kind: ObjectKind, body: dict[str, Any], *, manager: str) -> dict[str, Any]:
        self._maybe_reject()
        key = self._key(kind, body)
        if key in self.objects:
            raise KubeApiError(409, "AlreadyExists", f"{key} exists")
        return self._store(key, body, uid=f"uid-{self.version}", verb="create")

    async def replace(self, kind: ObjectKind, body: dict[str, Any], *, manager: str) -> dict[str, Any]:
        self._maybe_reject()
        key = self._key(kind, body)
        old = self.objects.get(key)
        if old is None:
            raise KubeApiError(404, "NotFound", f"{key}")
        if body["metadata"].get("resourceVersion") not in (None, old["metadata"]["resourceVersion"]):
            raise KubeApiError(409, "Conflict", "the object has been modified")
        return self._store(key, body, uid=old["metadata"]["uid"], verb="replace")

    async def apply(
        self, kind: ObjectKind, body: dict[str, Any], *, manager: str, force: bool, subresource: str | None = None
    ) -> dict[str, Any]:
        self._maybe_reject()
        self.forced.append(force)
        key = self._key(kind, body)
        old = self.objects.get(key)
        uid = body["metadata"].get("uid")
        if uid is not None and (old is None or old["metadata"]["uid"] != uid):
            raise KubeApiError(409, "Conflict", "uid mismatch")
        version = body["metadata"].get("resourceVersion")
        if version is not None and old is not None and old["metadata"]["resourceVersion"] != version:
            raise KubeApiError(409, "Conflict", "the object has been modified")
        merged = {**(old or {}), **body}
        return self._store(key, merged, uid=old["metadata"]["uid"] if old else f"uid-{self.version}", verb="apply")

    async def delete(self, kind: ObjectKind, namespace: str, name: str, *, uid: str) -> None:
        self._maybe_reject()
        old = self.objects.get((kind.kind, namespace, name))
        if old is None:
            raise KubeApiError(404, "NotFound", name)
        if old["metadata"]["uid"] != uid:
            raise KubeApiError(409, "Conflict", "uid mismatch")
        del self.objects[kind.kind, namespace, name]
        self.writes.append(("delete", kind.kind))

    async def merge_patch(
        self, kind: ObjectKind, namespace: str, name: str, body: dict[str, Any], *, manager: str
    ) -> dict[str, Any]:
        self._maybe_reject()
        key = (kind.kind, namespace, name)
        old = self.objects[key]
        expected = body.get("metadata", {}).get("resourceVersion")
        if expected not in (None, old["metadata"]["resourceVersion"]):
            raise KubeApiError(409, "Conflict", "the object has been modified")
        return self._store(key, merged(old, body), uid=old["metadata"]["uid"], verb="patch")

    def _key(self, kind: ObjectKind, body: dict[str, Any]) -> tuple[str, str, str]:
        return kind.kind, body["metadata"]["namespace"], body["metadata"]["name"]

    def _store(self, key: tuple[str, str, str], body: dict[str, Any], *, uid: str, verb: str) -> dict[str, Any]:
        self.version += 1
        metadata = {**body["metadata"], "uid": uid, "resourceVersion": str(self.version)}
        self.objects[key] = copy.deepcopy({**body, "metadata": metadata})
        self.writes.append((verb, key[0]))
        return copy.deepcopy(self.objects[key])

    def _maybe_reject(self) -> None:
        if self.reject is not None:
            raise self.reject


@pytest.fixture
def store() -> Store:
    return Store()


class AdminPort:
    """A ROUTER that answers as a coordinator does, as far as the test lets it."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], secure: Callable[[zmq.Socket[bytes]], None]) -> None:
        self._context = context
        self._secure = secure
        self.incarnation = 1
        self.state = CoordinatorState.RUNNING
        self.engines = [EngineStatus(name="demo-engine-0", state=EngineState.RUNNING, serving=True)]
        self.operations: list[Operation] = []
        self.in_flight = 0
        self.mute = False
        self.hold_acks = False
        self.rejection: ControlAck | None = None
        self.received: list[ControlMessage] = []
        self.controls: list[Control] = []
        self.known: set[bytes] = set()
        self.heard = asyncio.Event()
        self._socket: EventSocket | None = None
        self.port = 0

    def open(self) -> None:
        socket = self._context.socket(zmq.ROUTER)
        self._secure(socket)
        self.port = socket.bind_to_random_port("tcp://127.0.0.1")
        self._socket = EventSocket(socket, self._receive)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def restart(self) -> None:
        """A new process at the same address: it knows no peer and has a new incarnation."""
        self.incarnation += 1
        self.known.clear()

    @property
    def address(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    def beat(self) -> None:
        """Send a heartbeat to every peer."""
        for peer in self.known:
            self._send(peer, Heartbeat(incarnation=self.incarnation, state=self.state))

    def answer_controls(self) -> None:
        for control in self.controls:
            self._acknowledge(self._last_sender, control)

    def _receive(self, frames: list[bytes]) -> None:
        sender, message = frames[0], decode(frames[1:])
        assert isinstance(message, ControlMessage)
        self.received.append(message)
        self.heard.set()
        if self.mute:
            return
        if isinstance(message, Disconnect):
            return
        if isinstance(message, Hello):
            self.known.add(sender)
            self._send(sender, HelloAck(incarnation=self.incarnation, state=self.state))
        elif sender not in self.known:
            error = Error(code=ErrorCode.UNKNOWN_PEER, message="say HELLO", incarnation=self.incarnation)
            self._send(sender, error)
        elif isinstance(message, Status):
            reply = StatusReply(
                incarnation=self.incarnation,
                state=self.state,
                in_flight=self.in_flight,
                engines=[engine.model_copy(update={"in_flight": self.in_flight}) for engine in self.engines],
                operations=self.operations,
            )
            self._send(sender, reply)
        elif isinstance(message, Control):
            self.controls.append(message)
            self._last_sender = sender
            if not self.hold_acks:
                self._acknowledge(sender, message)

    def _acknowledge(self, sender: bytes, control: Control) -> None:
        assert control.operation_id is not None
        if self.rejection is not None:
            self._send(sender, self.rejection.model_copy(update={"operation_id": control.operation_id}))
            return
        self.state = CoordinatorState.PAUSED
        self.operations.append(
            Operation(operation_id=control.operation_id, signal=Header.PAUSE, phase="Confirmed", ranks=1, total_ranks=1)
        )
        self._send(sender, ControlAck(operation_id=control.operation_id, ok=True, state=self.state, ranks=1))

    def _send(self, sender: bytes, message: ControlMessage) -> None:
        assert self._socket is not None
        self._socket.send([sender, *message.to_frames()])


@pytest.fixture
def zmq_context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
async def make_admin_port(
    zmq_context: zmq.Context[zmq.Socket[bytes]],
) -> AsyncIterator[Callable[..., AdminPort]]:
    ports: list[AdminPort] = []

    def make(secure: Callable[[zmq.Socket[bytes]], None] = lambda _: None) -> AdminPort:
        port = AdminPort(zmq_context, secure)
        port.open()
        ports.append(port)
        return port

    yield make
    for port in ports:
        port.close()


@pytest.fixture
async def admin_port(make_admin_port: Callable[..., AdminPort]) -> AdminPort:
    return make_admin_port()
