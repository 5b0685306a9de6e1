"""The peers of one coordinator that use Megatron-Core's protocol, and their translators."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from megatron_runtime.coordinator.core.context import SHARED_PORT
from megatron_runtime.coordinator.core.coordinator import CoordinatorCore
from megatron_runtime.coordinator.core.records import PeerId
from megatron_runtime.coordinator.plain.client import ClientTranslator
from megatron_runtime.coordinator.plain.engine import EngineTranslator
from megatron_runtime.coordinator.plain.messages import FrameForm, OpenRequest
from megatron_runtime.protocol import limits
from megatron_runtime.protocol.headers import PROTOCOL_VERSION, ErrorCode, Header, Role
from megatron_runtime.protocol.messages import (
    Disconnect,
    Frames,
    MalformedMessageError,
    NativeMessage,
    header_of,
    pack,
    unpack,
)

_GREETED = [pack([int(Header.CONNECT_ACK), PROTOCOL_VERSION])]
PLAIN_PORTS = frozenset({SHARED_PORT, int(Role.CLIENT)})
"""The ports that accept messages of Megatron-Core's protocol, and greetings of clients."""
_CONNECT, _SHUTDOWN = int(Header.CONNECT), int(Header.SHUTDOWN)


class PlainPeers:
    """The plain peers, which use Megatron-Core's protocol.

    Each plain peer has a translator, which converts its messages to and from the native protocol. This class passes
    messages between the peers, the translators and the core.

    On the shared port, a peer whose first message is CONNECT is a plain client, and a peer whose first message begins
    with an empty frame is a plain engine. A CONNECT that contains a protocol version comes from a client of this
    project. This client continues with HELLO.

    send:         sends a message to a peer. The last argument is whether to send it even if the send buffer is full.
                  Returns False if the connection did not accept the message.
    is_connected: whether the peer has a connection.
    now:          seconds on the core's clock.
    shut_down:    ends the coordinator at a client's request.
    """

    def __init__(
        self,
        core: CoordinatorCore,
        *,
        send: Callable[..., bool],
        is_connected: Callable[[PeerId], bool],
        now: Callable[[], float],
        shut_down: Callable[[], None],
    ) -> None:
        self.translators: dict[PeerId, ClientTranslator | EngineTranslator] = {}
        core.context.translated = self.translators
        self.messages: deque[tuple[PeerId, NativeMessage]] = deque()
        """Messages of translators that the core has not yet handled."""
        self._requests: dict[bytes, OpenRequest] = {}
        self._core = core
        self._send = send
        self._is_connected = is_connected
        self._now = now
        self._shut_down = shut_down

    def receive(self, peer: PeerId, frames: Frames) -> bool:
        """Handle a message of a plain peer. Return False if the message belongs to the native protocol."""
        translator = self.translators.get(peer)
        frame = frames[0]
        if translator is None:
            header = frame[1] if len(frame) > 1 else None
            if frame and header not in (_CONNECT, _SHUTDOWN):
                return False
            if header == _CONNECT and _names_version(frames) and peer[0] in PLAIN_PORTS:
                self._send(peer, _GREETED)
                return True
            if peer[0] != SHARED_PORT or header_of(frame) == _SHUTDOWN:
                return self._is_shutdown(peer, frame)
            translator = self.translators[peer] = self._translator(peer, is_client=bool(frame))
        if not (len(frame) > 1 and frame[1] == _SHUTDOWN and self._is_shutdown(peer, frame)):
            try:
                translator.receive(frames)
            except MalformedMessageError as error:
                self._core.context.reject(peer, ErrorCode.MALFORMED, str(error))
        return True

    def deliver(self) -> None:
        """Pass the messages that the translators have queued in `messages` to the core."""
        while self.messages:
            peer, message = self.messages.popleft()
            kind = type(message)
            self._core.received(self._now(), peer, message)
            if kind is Disconnect and not self._is_connected(peer):
                self.translators.pop(peer, None)

    def gone(self, peer: PeerId, *, by_peer: bool) -> bool:
        """Handle the end of a connection. Return False if the peer is not a plain peer."""
        translator = self.translators.get(peer)
        if isinstance(translator, ClientTranslator):
            translator.close()
        elif translator is not None:
            translator.cut(by_peer=by_peer)
            if self._core.engines.at(peer) is None:
                del self.translators[peer]
            else:
                self._core.has_room(self._now(), peer)  # the next connection is not full
        return translator is not None

    def number_of(self, uid: bytes) -> int | None:
        """Return the id that a client of Megatron-Core gave to an open request, or None for other requests."""
        request = self._requests.get(uid)
        return request.number if request is not None else None

    def _form_of_clients(self) -> FrameForm:
        """Return the frame format of the connected Megatron-Core clients.

        Without such a client, return the configured format.
        """
        clients = (one for one in self.translators.values() if isinstance(one, ClientTranslator))
        forms = (client.form for client in clients if client.form is not None)
        return next(forms, FrameForm(self._core.context.settings.plain_release))

    def _is_shutdown(self, peer: PeerId, frame: bytes) -> bool:
        if peer[0] != SHARED_PORT or not frame or header_of(frame) != _SHUTDOWN or self._core.clients.at(peer) is None:
            return False
        self._shut_down()
        return True

    def _translator(self, peer: PeerId, *, is_client: bool) -> ClientTranslator | EngineTranslator:
        core = self._core
        routing_id = peer[1]
        randbits = core.context.randbits

        def accept(message: NativeMessage) -> None:
            self.messages.append((peer, message))

        def send(*messages: Frames) -> bool:
            """Send all messages or none. Return whether they were sent."""
            return all(self._send(peer, message, number > 0) for number, message in enumerate(messages))

        if is_client:
            return ClientTranslator(
                f"plain-{routing_id.hex()}"[: limits.MAX_NAME_BYTES],
                accept=accept,
                send=send,
                requests=self._requests,
                randbits=randbits,
                detokenize=getattr(core.prompts.tokenizer, "detokenize", None),
            )
        name = routing_id.decode("utf-8", "replace") if routing_id[:1] != b"\0" else routing_id.hex()
        return EngineTranslator(
            name[: limits.MAX_NAME_BYTES],
            accept=accept,
            send=send,
            is_connected=lambda: self._is_connected(peer),
            now=self._now,
            requests=self._requests,
            randbits=randbits,
            prompts=core.prompts,
            detokenize=getattr(core.prompts.tokenizer, "detokenize", None),
            choose_form=self._form_of_clients,
            reconnect=core.context.settings.timing.plain_reconnect,
            max_requests=core.context.settings.plain_max_requests,
        )


def _names_version(frames: Frames) -> bool:
    """Return whether a CONNECT has a protocol version."""
    try:
        match unpack(frames[0]):
            case [_, int(), *_]:
                return True
    except MalformedMessageError:
        pass
    return False
