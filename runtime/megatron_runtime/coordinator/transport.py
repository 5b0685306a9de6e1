"""The coordinator's ROUTER ports: bind, receive, and send without blocking."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from enum import Enum, auto
from typing import TypeAlias

from megatron_runtime.coordinator.core.context import SHARED_PORT, PeerId
from megatron_runtime.coordinator.core.settings import CoordinatorSettings
from megatron_runtime.protocol import limits
from megatron_runtime.protocol.headers import Role
from megatron_runtime.protocol.messages import Frames, KeyReport
from megatron_runtime.transport.security import Gatekeeper, KeyDirectory
from megatron_runtime.transport.zmtp.connection import Connection
from megatron_runtime.transport.zmtp.handshake import Handshake, NullHandshake
from megatron_runtime.transport.zmtp.router import Router

OnMessage: TypeAlias = Callable[[PeerId, Frames], None]
OnGone: TypeAlias = Callable[[PeerId, bool], None]
"""Called with the peer of a connection that ended, and whether the peer's side ended it."""

_CLIENT_SEND_BYTES = 4 << 20
_ENGINE_SEND_BYTES = 64 << 20
"""Limit of what waits for an engine that reads too slowly; until it has read, it gets no work."""


class Sent(Enum):
    OK = auto()
    FULL = auto()
    """The peer reads too slowly; nothing was sent."""
    GONE = auto()
    """There is no such connection any more."""


_OK = Sent.OK  # see core/registries.py


class BindError(OSError):
    """A port could not be bound. Names the address and the remedy."""


class Transport:
    """The sockets of one coordinator.

    addresses:  after start(), the bound address of each role.
    gatekeeper: checks keys; None without encryption.
    on_gone:    called with each peer whose connection ended, and whether its side ended it. The end of a process does,
                however it ends; silence, a broken network and a protocol violation end a connection from here.
    """

    def __init__(self, settings: CoordinatorSettings, on_message: OnMessage, on_gone: OnGone) -> None:
        self.addresses: dict[Role, str] = {}
        self.gatekeeper: Gatekeeper | None = None
        self._settings = settings
        self._on_message = on_message
        self._on_gone = on_gone
        self._routers: dict[int, Router] = {}
        self._connections: dict[PeerId, Connection] = {}
        self._keys = KeyDirectory(settings.keys_dir) if settings.keys_dir is not None else None
        self._server_public = b""

    @property
    def handler_errors(self) -> int:
        return sum(router.handler_errors for router in self._routers.values())

    def start(self) -> None:
        """Bind."""
        if self._keys is not None:
            self.gatekeeper = Gatekeeper(self._keys.keys)
            self._server_public = self._keys.keys.own.public
        settings = self._settings
        if settings.single_port:
            address = self._bind(SHARED_PORT, settings.client_port)
            self.addresses = dict.fromkeys(Role, address)
            return
        ports = {Role.CLIENT: settings.client_port, Role.ENGINE: settings.engine_port, Role.ADMIN: settings.admin_port}
        for role, port in ports.items():
            self.addresses[role] = self._bind(int(role), port)

    def stop(self) -> None:
        """Stop listening. Idempotent. What was sent leaves while closed() is awaited."""
        for router in self._routers.values():
            router.close()

    async def closed(self) -> None:
        """Return when what was sent before stop() has left, after a second at most."""
        await asyncio.gather(*(router.closed() for router in self._routers.values()))

    def router(self, port: int) -> Router:
        return self._routers[port]

    def send(self, peer: PeerId, frames: Frames) -> Sent:
        connection = self._connections.get(peer)
        if connection is None:
            return Sent.GONE
        return _OK if connection.send(frames) else Sent.FULL

    def flush(self) -> None:
        """Send now what would be sent at the end of this iteration of the loop."""
        for router in self._routers.values():
            router.flush()

    def sender_key(self, peer: PeerId) -> bytes:
        """The public key that `peer` was admitted with; b"" without keys."""
        connection = self._connections.get(peer)
        return connection.key if connection is not None else b""

    def keys_changed(self) -> bool:
        """Read the key files again if they changed. True if other keys are admitted from now on."""
        if self._keys is None or self.gatekeeper is None or not self._keys.changed():
            return False
        self.gatekeeper.keys = self._keys.keys
        return True

    def key_report(self, connected: Iterable[bytes]) -> KeyReport | None:
        """The keys in use, those of `connected` peers among them; None without encryption."""
        if self.gatekeeper is None:
            return None
        admitted = {key for keys in self.gatekeeper.keys.allowed.values() for key in keys}
        return KeyReport(
            server=self._server_public.decode(),
            admitted=sorted(key.decode() for key in admitted),
            connected=sorted(key.decode() for key in connected),
        )

    def admits(self, peer: PeerId, key: bytes) -> bool:
        """Whether a connection made with `key` may stay."""
        return self.gatekeeper is None or self.gatekeeper.admits(_key_role(peer[0]), key)

    def cut(self, peer: PeerId) -> None:
        """End a connection: nothing from it arrives and nothing reaches it any more."""
        self._routers[peer[0]].cut(peer)

    def _bind(self, port: int, number: int) -> str:
        settings = self._settings
        router = Router(
            port,
            connections=self._connections,
            handshake=self._handshakes(_key_role(port)),
            on_message=self._on_message,
            on_gone=self._on_gone,
            on_refused=self.gatekeeper.refuse if self.gatekeeper is not None else lambda: None,
            max_message_bytes=(
                limits.MAX_CLIENT_MESSAGE_BYTES if port == Role.CLIENT else limits.MAX_ENGINE_MESSAGE_BYTES
            ),
            send_buffer_bytes=_ENGINE_SEND_BYTES if port == Role.ENGINE else _CLIENT_SEND_BYTES,
            check_seconds=settings.timing.connection_check,
        )
        try:
            address = router.bind(settings.listen, number)
        except OSError as error:
            where = f"tcp://{settings.listen}:{number or '*'}"
            reason = error.strerror or error
            raise BindError(error.errno, f"cannot bind {where} ({reason}): choose another port") from error
        self._routers[port] = router
        return address

    def _handshakes(self, role: Role) -> Callable[[bytes], Handshake]:
        if self._keys is None or self.gatekeeper is None:
            return NullHandshake
        from megatron_runtime.transport.zmtp.curve import CurveHandshake, CurveServer

        gatekeeper = self.gatekeeper
        server = CurveServer.from_z85(self._keys.keys.own.secret, lambda key: gatekeeper.admits(role, key))
        return lambda properties: CurveHandshake(server, properties)


def _key_role(port: int) -> Role:
    """The role whose keys open a port; the shared port takes those of clients."""
    return Role.CLIENT if port == SHARED_PORT else Role(port)
