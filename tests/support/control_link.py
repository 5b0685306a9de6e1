"""An administrator's connection to a coordinator, on which tests send verbs and STATUS."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

from eventually import LONG_SECONDS

from megatron_runtime.protocol.headers import Header, Role
from megatron_runtime.protocol.messages import Control, ControlAck, Error, Hello, Message, StatusReply
from megatron_runtime.transport.addresses import CoordinatorAddresses, coordinator_address
from megatron_runtime.transport.control_calls import ControlCalls
from megatron_runtime.transport.peer_link import PeerLink
from megatron_runtime.transport.security import PeerKeys


class ControlLink:
    """A connection to a coordinator's admin port (or to its only port), kept registered until close().

    errors: every ERROR that the coordinator has sent.
    """

    def __init__(self, address: int | str, *, keys: PeerKeys | None = None, name: str | None = None) -> None:
        self.errors: list[Error] = []
        self._name = name or f"admin-{uuid.uuid4().hex[:12]}"
        self._link = PeerLink(
            CoordinatorAddresses(coordinator_address(address)),
            keys=keys,
            hello=lambda incarnation: Hello(role=Role.ADMIN, name=self._name, incarnation=incarnation),
            on_ack=lambda _ack, _forgotten: self._calls.resend(),
            on_message=self._receive,
        )
        self._calls = ControlCalls(self._link.send, address=self._link.address)

    @property
    def connected(self) -> bool:
        return self._link.registered

    @property
    def coordinator_incarnation(self) -> int:
        """A number that is different after each restart of the coordinator; 0 before its first answer."""
        return self._link.coordinator_incarnation

    async def start(self, *, connect_timeout_seconds: float = LONG_SECONDS) -> None:
        """Connect.

        Raises CoordinatorUnreachableError or HandshakeRejectedError. The link is closed then.
        """
        await self._link.start(connect_timeout_seconds=connect_timeout_seconds)

    def control(self, kind: Header, **fields: Any) -> asyncio.Future[ControlAck]:
        """Send a control message now; `fields` are those of Control. See ControlCalls.control() for its errors."""
        return self._calls.control(Control(kind=kind, **fields))

    def status(self, *, timeout_seconds: float = LONG_SECONDS) -> asyncio.Future[StatusReply]:
        return self._calls.status(timeout_seconds=timeout_seconds)

    def _receive(self, message: Message) -> None:
        if isinstance(message, Error):
            self.errors.append(message)
        self._calls.handle(message)

    def close(self) -> None:
        """Cancel calls without an answer and disconnect. Idempotent."""
        self._calls.close()
        self._link.close("closed")
