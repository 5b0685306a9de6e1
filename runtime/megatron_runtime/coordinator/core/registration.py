"""Who may speak: HELLO and its answer, plain registrations, and what follows when somebody leaves or is replaced."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from megatron_runtime.coordinator.core.clients import ClientRegistry
from megatron_runtime.coordinator.core.engines import EngineRegistry
from megatron_runtime.coordinator.core.records import Client, CrashEvidence, Engine
from megatron_runtime.coordinator.core.recovery import Recovery
from megatron_runtime.coordinator.core.verbs import Verbs
from megatron_runtime.coordinator.transport import SHARED_PORT, PeerId
from megatron_runtime.protocol import limits
from megatron_runtime.protocol.headers import PROTOCOL_VERSION, ErrorCode, Header, Role
from megatron_runtime.protocol.lifecycle import EngineState
from megatron_runtime.protocol.messages import Frames, Hello, HelloAck, pack

logger = logging.getLogger(__name__)


class Surroundings(Protocol):
    def refuse(self, peer: PeerId, code: ErrorCode, message: str) -> None:
        """Answer ERROR."""

    def send(self, peer: PeerId, frames: Frames) -> object: ...

    def lose_engine(self, engine: Engine, reason: str, crash: CrashEvidence = CrashEvidence.NONE) -> None: ...

    def engine_is_back(self, name: str, *, has_outlived: bool) -> None:
        """An engine of this name has made a new registration. `has_outlived`: its process is the one before."""

    def lose_client(self, client: Client, reason: str) -> None: ...

    def catch_up(self, client: Client) -> None: ...

    def pump(self) -> None: ...


class Registration:
    """sender_key: the public key that the sender of the message being handled was admitted with."""

    def __init__(
        self,
        *,
        incarnation: int,
        engines: EngineRegistry,
        clients: ClientRegistry,
        verbs: Verbs,
        recovery: Recovery,
        heartbeat_seconds: float,
        max_clients: int,
        now: Callable[[], float],
        sender_key: Callable[[PeerId], bytes],
        surroundings: Surroundings,
    ) -> None:
        self._incarnation = incarnation
        self._engines = engines
        self._clients = clients
        self._verbs = verbs
        self._recovery = recovery
        self._heartbeat_seconds = heartbeat_seconds
        self._max_clients = max_clients
        self._now = now
        self._sender_key = sender_key
        self._surroundings = surroundings

    def hello(self, peer: PeerId, hello: Hello) -> None:
        if not PROTOCOL_VERSION - 1 <= hello.version <= PROTOCOL_VERSION + 1:
            message = f"version {hello.version}: this coordinator speaks {PROTOCOL_VERSION}"
            self._surroundings.refuse(peer, ErrorCode.VERSION, message)
        elif peer[0] not in (SHARED_PORT, hello.role):
            message = f"HELLO of a {hello.role.name} on the {Role(peer[0]).name} port"
            self._surroundings.refuse(peer, ErrorCode.WRONG_ROLE, message)
        elif not self._may_change(peer, hello):
            message = f"this connection is registered in another role than {hello.role.name}: open a new one"
            self._surroundings.refuse(peer, ErrorCode.WRONG_ROLE, message)
        elif hello.role is Role.ENGINE:
            self._hello_engine(peer, hello)
        else:
            self._hello_client(peer, hello)

    def _may_change(self, peer: PeerId, hello: Hello) -> bool:
        client = self._clients.at(peer)
        if hello.role is Role.ENGINE:
            return client is None
        return self._engines.at(peer) is None and (client is None or client.role is hello.role)

    # --- engines ------------------------------------------------------------------------------------------------

    def _hello_engine(self, peer: PeerId, hello: Hello) -> None:
        engine = self._engines.named(hello.name)
        other = self._engines.at(peer)
        if other is not None and other is not engine:
            self._surroundings.lose_engine(other, f"its connection now calls itself {hello.name}")
        renewed = engine is not None and engine.peer == peer and engine.incarnation == hello.incarnation
        if engine is not None and not renewed:
            # A process that lives says that it serves, on whichever connection; one that starts has to load first.
            restarted = not hello.serving and engine.incarnation != hello.incarnation
            crash = CrashEvidence.CERTAIN if restarted else CrashEvidence.NONE
            self._surroundings.lose_engine(engine, "it registered again", crash)
        if engine is None and len(self._engines) >= limits.MAX_ENGINES:
            message = f"{len(self._engines)} engines are registered already: at most {limits.MAX_ENGINES}"
            self._surroundings.refuse(peer, ErrorCode.UNAVAILABLE, message)
            return
        if engine is None or not renewed:
            survivor = hello.serving
            self._surroundings.engine_is_back(hello.name, has_outlived=survivor)
            key = self._sender_key(peer)
            engine = self._engines.add(hello.name, peer, incarnation=hello.incarnation, now=self._now(), key=key)
            logger.info("engine %s registered (serving: %s)", hello.name, hello.serving)
        else:
            survivor = False
        engine.heard = self._now()
        engine.learn(hello)
        self._recovery.registered(engine, hello, survivor=survivor)
        current = self._verbs.current
        if current is not None and engine not in current.asked:
            engine.entered_during = current.operation_id
        self.welcome(engine)
        self._surroundings.pump()

    def welcome(self, engine: Engine) -> None:
        """Tell an engine the state to be in."""
        engine.told = self._now()
        state = self._verbs.target_state
        ack = HelloAck(
            incarnation=self._incarnation,
            state=state,
            epoch=self._verbs.epoch,
            fence=self._verbs.fence,
            heartbeat_seconds=self._heartbeat_seconds,
            max_message_bytes=limits.MAX_ENGINE_MESSAGE_BYTES,
            source=self._verbs.source_for(engine),
        )
        self._surroundings.send(engine.peer, ack.to_frames())

    def plain_engine(self, peer: PeerId) -> None:
        known = self._engines.at(peer)
        if known is not None:
            self._surroundings.lose_engine(known, "it registered again", CrashEvidence.CERTAIN)
        name = peer[1].decode("utf-8", "replace") if peer[1][:1] != b"\0" else peer[1].hex()
        namesake = self._engines.named(name)
        if namesake is not None:
            self._surroundings.lose_engine(namesake, "another engine took its name")
        if len(self._engines) >= limits.MAX_ENGINES:
            logger.warning("plain engine %s rejected: %d engines are registered already", name, len(self._engines))
            return
        engine = self._engines.add(name, peer, incarnation=0, now=self._now(), plain=True)
        engine.serving = True
        engine.state = EngineState.RUNNING
        logger.info("plain engine %s registered", name)
        self._surroundings.pump()

    # --- clients ------------------------------------------------------------------------------------------------

    def _hello_client(self, peer: PeerId, hello: Hello) -> None:
        key = self._sender_key(peer)
        client = self._clients.named(hello.role, hello.name)
        other = self._clients.at(peer)
        if other is not None and other is not client:
            self._surroundings.lose_client(other, f"its connection now calls itself {hello.name}")
        if client is None:
            if not self._has_room(peer):
                return
            client = self._clients.add(hello.name, peer, hello.role, incarnation=hello.incarnation, key=key)
        elif client.peer != peer or client.incarnation != hello.incarnation:
            self._clients.move(client, peer, incarnation=hello.incarnation, key=key)
        client.heard = self._now()
        client.model = hello.model
        ack = HelloAck(
            incarnation=self._incarnation,
            state=self._verbs.state,
            epoch=self._verbs.epoch,
            fence=self._verbs.fence,
            route=client.route,
            heartbeat_seconds=self._heartbeat_seconds,
        )
        self._surroundings.send(peer, ack.to_frames())
        if client.blocked:
            self._surroundings.catch_up(client)

    def plain_client(self, peer: PeerId) -> None:
        client = self._clients.at(peer)
        if client is None:
            if not self._has_room(peer):
                return
            client = self._clients.add(f"plain-{peer[1].hex()}", peer, Role.CLIENT, incarnation=0, plain=True)
        client.heard = self._now()
        self._surroundings.send(peer, [pack([int(Header.CONNECT_ACK)])])

    def _has_room(self, peer: PeerId) -> bool:
        """For one more client; where there is none, `peer` is told."""
        if len(self._clients) < self._max_clients:
            return True
        message = f"{len(self._clients)} clients are registered already"
        self._surroundings.refuse(peer, ErrorCode.UNAVAILABLE, message)
        return False
