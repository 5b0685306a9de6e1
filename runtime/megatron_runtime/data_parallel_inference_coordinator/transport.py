"""The coordinator's ROUTER sockets: bind, receive, send without ever blocking. It knows ports, not peers."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable
from enum import Enum, auto
from typing import TypeAlias

import zmq

from megatron_runtime.data_parallel_inference_coordinator.settings import CoordinatorSettings
from megatron_runtime.wire import limits
from megatron_runtime.wire.event_socket import EventSocket
from megatron_runtime.wire.headers import Role
from megatron_runtime.wire.messages import Frames, KeyReport
from megatron_runtime.wire.security import Gatekeeper, KeyDirectory

SHARED_PORT = 3
"""Port number of the one-port mode; the others are the values of Role."""

PeerId: TypeAlias = tuple[int, bytes]
"""Port and routing id: one connection."""

OnMessage: TypeAlias = Callable[[PeerId, list[bytes]], None]

_CLIENT_SEND_MARK = 10_000
_ENGINE_SEND_MARK = 100_000
"""Messages kept for an engine whose connection is full; it gets no work until it reads."""
_CLOSE_LINGER_MS = 1000


class Sent(Enum):
    OK = auto()
    FULL = auto()
    """The peer reads too slowly; nothing was sent."""
    GONE = auto()
    """There is no such connection any more."""


_OK = Sent.OK  # see dispatching.py


class BindError(OSError):
    """A port could not be bound. Names the address and the remedy."""


class Transport:
    """addresses: after start(), the bound address of each role."""

    def __init__(self, settings: CoordinatorSettings, on_message: OnMessage) -> None:
        self.addresses: dict[Role, str] = {}
        self.gatekeeper: Gatekeeper | None = None
        self._settings = settings
        self._on_message = on_message
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets: dict[int, EventSocket] = {}
        self._keys = KeyDirectory(settings.keys_dir) if settings.keys_dir is not None else None
        self._server_public = b""

    @property
    def handler_errors(self) -> int:
        return sum(socket.handler_errors for socket in self._sockets.values())

    def start(self) -> None:
        """Bind. With keys the gatekeeper runs first: no connection is made unchecked."""
        if self._keys is not None:
            self.gatekeeper = Gatekeeper(self._context, self._keys.keys)
            self.gatekeeper.start()
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
        """Close all sockets; what was sent goes out within a second. Idempotent."""
        for socket in self._sockets.values():
            socket.close(linger_ms=_CLOSE_LINGER_MS)
        if self.gatekeeper is not None:
            self.gatekeeper.serve_until_closed()
        self._context.term()

    def socket(self, port: int) -> zmq.Socket[bytes]:
        return self._sockets[port].socket

    def send(self, peer: PeerId, frames: Frames) -> Sent:
        port, routing_id = peer
        try:
            return _OK if self._sockets[port].send([routing_id, *frames]) else Sent.FULL
        except zmq.ZMQError as error:
            if error.errno == errno.EHOSTUNREACH:
                return Sent.GONE
            raise

    def sender_key(self, peer: PeerId) -> bytes:
        """The public key that `peer`, whose message is being handled, was admitted with; b"" without keys."""
        return self._sockets[peer[0]].sender_key() if self._keys is not None else b""

    def keys_changed(self) -> bool:
        """Read the key files again if they changed. True when other keys are admitted from now on."""
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
        """End a connection: nothing from it arrives and nothing reaches it any more.

        ZeroMQ has no call for this. A ROUTER with handover gives a routing id to whoever connects with it last, so
        the connection is taken over from inside this process and dropped. The peer's next attempt is refused by the
        gatekeeper; the TCP connection it leaves behind fails its next check.
        """
        port, routing_id = peer
        with self._context.socket(zmq.DEALER) as usurper:
            usurper.setsockopt(zmq.LINGER, 0)
            usurper.setsockopt(zmq.ROUTING_ID, routing_id)
            usurper.connect(_inner_endpoint(port))

    def _bind(self, port: int, number: int) -> str:
        socket = self._context.socket(zmq.ROUTER)
        limit = limits.MAX_CLIENT_MESSAGE_BYTES if port == Role.CLIENT else limits.MAX_ENGINE_MESSAGE_BYTES
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        socket.setsockopt(zmq.SNDHWM, _ENGINE_SEND_MARK if port == Role.ENGINE else _CLIENT_SEND_MARK)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, limit)
        interval_ms = int(self._settings.timing.connection_check * 1000)
        socket.setsockopt(zmq.HEARTBEAT_IVL, interval_ms)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, interval_ms)
        if self._keys is not None and self.gatekeeper is not None:
            self._keys.keys.apply(socket, _key_role(port))
            self.gatekeeper.guard(socket)
            socket.bind(_inner_endpoint(port))
        address = f"tcp://{self._settings.listen}:{number or '*'}"
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            socket.close(linger=0)
            raise BindError(error.errno, f"cannot bind {address} ({error.strerror}): choose another port") from error
        receive = self._on_message
        event_socket = EventSocket(socket, lambda frames: receive((port, frames.pop(0)), frames))
        self._sockets[port] = event_socket
        event_socket.start()
        endpoint: bytes = socket.getsockopt(zmq.LAST_ENDPOINT)  # type: ignore[assignment]
        return endpoint.rstrip(b"\0").decode()


def _key_role(port: int) -> Role:
    """Whose keys open a port; the one port of all roles takes those of clients."""
    return Role.CLIENT if port == SHARED_PORT else Role(port)


def _inner_endpoint(port: int) -> str:
    return f"inproc://port-{port}"
