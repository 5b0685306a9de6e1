"""Publish the weights of a training program to all engines of a coordinator, as one transaction.

with WeightServer(policy, coordinator="coordinator:5557", keys=Path("/keys")) as server:
    for epoch in range(1, steps + 1):
        train(policy)
        server.publish(epoch)
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
import uuid
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist

from megatron_runtime.checkpoints.published import CLOSED
from megatron_runtime.distributed.pair_group import (
    SENDER,
    PairGroup,
    PairLostError,
    listen_store,
    local_address,
    wait_for_receiver,
)
from megatron_runtime.in_process.event_loop import EventLoopManager
from megatron_runtime.protocol import limits
from megatron_runtime.protocol.codec import Frames, MalformedMessageError
from megatron_runtime.protocol.headers import ErrorCode, Header, Role
from megatron_runtime.protocol.lifecycle import CoordinatorState
from megatron_runtime.protocol.messages import Control, ControlAck, Hello, StatusReply
from megatron_runtime.protocol.published_weights import OpenSession, PublishedSource, SessionOpened
from megatron_runtime.trainer.published import PublishedWeights
from megatron_runtime.transport.addresses import CoordinatorAddresses
from megatron_runtime.transport.control_calls import ControlCalls, ControlRejectedError
from megatron_runtime.transport.peer_link import CoordinatorUnreachableError, PeerLink, coordinator_address
from megatron_runtime.transport.security import TRAINER, PeerKeys, public_keys
from megatron_runtime.transport.zmtp.connection import Connection, PeerId
from megatron_runtime.transport.zmtp.dealer import parse_address
from megatron_runtime.transport.zmtp.handshake import Handshake, NullHandshake
from megatron_runtime.transport.zmtp.router import Router

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 30.0
RETRY_SECONDS = 0.5
"""Time between two tries while another operation is under way, or the coordinator is recovering."""
CHECK_SECONDS = 5.0


class PublishError(RuntimeError):
    """The update failed. The message names the engine and the cause.

    is_committed: False: every engine keeps the weights that it has. None: unknown, because the coordinator did not
                  answer. Publish again: the same weights under the same epoch change nothing that was committed.
    """

    def __init__(self, message: str, *, is_committed: bool | None) -> None:
        super().__init__(message)
        self.is_committed = is_committed


class WeightServer:
    """Sends weights to engines, and keeps the published ones in host memory for engines that start later.

    The program may use torch.distributed: this class uses none of its groups. Between two calls of publish(), host
    memory has one copy of the weights; during a call, two.

    model:       see PublishedWeights. publish() reads its values at the time of the call.
    coordinator: "HOST:PORT" of its admin port.
    keys:        directory of trainer.key, trainer.pub, server.pub and engine.pub. None: no encryption; only for a
                 coordinator with one port.
    host:        address of this machine that the engines connect to; None: the one that reaches the coordinator.
    port:        port for the engines' connections; 0: a free port. The rendezvous store and gloo listen on free ports.

    The constructor raises KeyFileError, OSError if it cannot listen, and CoordinatorUnreachableError.
    """

    def __init__(
        self, model: Any, *, coordinator: str, keys: Path | None = None, host: str | None = None, port: int = 0
    ) -> None:
        self._model = model
        self._keys = keys
        address = coordinator_address(coordinator)
        target = parse_address(address)
        self._host = host or ("127.0.0.1" if isinstance(target, Path) else local_address(*target))
        self._port = port
        self._held: dict[str, PublishedWeights] = {}
        """By session. Threads that send a session keep it after it is removed from here."""
        self._closing = threading.Event()
        self._senders: set[threading.Thread] = set()
        self._store = listen_store(self._host)
        self._loop = EventLoopManager()
        self._loop.start()
        try:
            self._loop.run_sync(self._start(address))
        except BaseException:
            self._loop.stop()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Disconnect once all receiving engines have the weights. Wait for a silent engine no longer than
        EXCHANGE_SECONDS. Engines keep the weights that they have. An engine that restarts later waits for a trainer.
        """

        async def close() -> None:
            self._calls.close()
            self._link.close("closed")
            self._router.close()

        self._closing.set()
        self._loop.run_sync(close())
        self._loop.stop()
        for sender in list(self._senders):
            sender.join()
        self._held.clear()

    def publish(self, epoch: int, *, timeout_seconds: float = 600.0) -> str:
        """Replace the weights of every engine by the model's current weights, or of no engine, and return their source.

        Returns when each engine has received and verified them and the coordinator has committed. An engine that is
        lost meanwhile gets them when it restarts, before it serves.

        epoch: must be above the engines' epoch.

        Raises ValueError if the model cannot be published, and PublishError.
        """
        weights = PublishedWeights(self._model, epoch=epoch)
        source = str(PublishedSource(self._url_host, self._port, epoch, weights.digest))
        self._held[weights.session] = weights
        try:
            self._loop.run_sync(self._update(epoch, source, timeout_seconds))
        except ControlRejectedError as error:
            del self._held[weights.session]
            raise PublishError(error.message, is_committed=False) from error
        except CoordinatorUnreachableError as error:
            raise PublishError(str(error), is_committed=None) from error
        self._held = {weights.session: weights}
        return source

    def set_generation_epoch(self, epoch: int) -> None:
        """Label the following tokens with `epoch`. Raises ControlRejectedError and CoordinatorUnreachableError."""
        self._loop.run_sync(self._control(Control(kind=Header.SET_GENERATION_EPOCH, epoch=epoch)))

    def status(self) -> StatusReply:
        """Return the coordinator's report: the epoch, and of each engine epoch, source and digest."""

        async def status() -> StatusReply:
            return await self._calls.status(timeout_seconds=CONNECT_SECONDS)

        return self._loop.run_sync(status())

    # --- the coordinator --------------------------------------------------------------------------------------------

    async def _start(self, address: str) -> None:
        self._router = Router(
            0,
            connections={},
            handshake=self._handshakes(),
            on_message=self._opened,
            max_message_bytes=1 << 16,
            send_buffer_bytes=4 * limits.MAX_ENGINE_MESSAGE_BYTES,
            check_seconds=CHECK_SECONDS,
        )
        self._connections: dict[PeerId, Connection] = self._router.connections
        self._port = int(self._router.bind(self._host, self._port).rpartition(":")[2])
        name = f"trainer-{uuid.uuid4().hex[:12]}"
        self._link = PeerLink(
            CoordinatorAddresses(address),
            keys=PeerKeys.load(self._keys, TRAINER) if self._keys is not None else None,
            hello=lambda incarnation: Hello(role=Role.ADMIN, name=name, incarnation=incarnation),
            on_ack=lambda _ack, _forgotten: self._calls.resend(),
            on_message=lambda message: self._calls.handle(message),
        )
        self._calls = ControlCalls(self._link.send, address=address)
        try:
            await self._link.start(connect_timeout_seconds=CONNECT_SECONDS)
        except BaseException:
            self._router.close()
            raise

    async def _control(self, control: Control) -> ControlAck:
        return await self._calls.control(control)

    async def _update(self, epoch: int, source: str, timeout_seconds: float) -> None:
        """Send UPDATE_WEIGHTS until it is accepted. Other operations, such as the operator's, go first."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_seconds
        while True:
            left = max(1.0, deadline - loop.time())
            update = Control(kind=Header.UPDATE_WEIGHTS, epoch=epoch, source=source, timeout_seconds=left)
            try:
                await self._control(update)
                return
            except ControlRejectedError as error:
                is_recovering = error.state == CoordinatorState.RECOVERING
                if not (error.code == ErrorCode.IN_PROGRESS or is_recovering) or loop.time() >= deadline:
                    raise
            await asyncio.sleep(RETRY_SECONDS)

    # --- the engines ------------------------------------------------------------------------------------------------

    @property
    def _url_host(self) -> str:
        return f"[{self._host}]" if ":" in self._host else self._host

    def _handshakes(self) -> Any:
        keys = self._keys
        if keys is None:
            return NullHandshake
        from megatron_runtime.transport.zmtp.curve import CurveHandshake, CurveServer

        current = PeerKeys.load(keys, TRAINER)

        def handshake(properties: bytes) -> Handshake:
            nonlocal current
            current = current.refreshed()  # they may have been rotated
            server = CurveServer.from_z85(current.own.secret, lambda key: key in public_keys(keys, Role.ENGINE))
            return CurveHandshake(server, properties)

        return handshake

    def _opened(self, peer: PeerId, frames: Frames) -> None:
        """Open a session for a rank of an engine: send it the manifest, then the tensors on a separate thread."""
        connection = self._connections.get(peer)
        if connection is None:
            return
        try:
            opening = OpenSession.from_bytes(frames[0])
        except MalformedMessageError as error:
            connection.send([SessionOpened(error=str(error)).to_bytes()])
            return
        session = opening.session
        weights = self._held.get(session)
        if weights is None:
            held = ", ".join(str(one.epoch) for one in list(self._held.values())) or "none"
            cause = f"it does not hold session {session[:24]}; epochs that it holds: {held}. Publish again"
            connection.send([SessionOpened(error=cause).to_bytes()])
            return
        if opening.is_question:
            connection.send([SessionOpened().to_bytes()])
            return
        token = secrets.token_hex(16)
        sender = threading.Thread(target=self._send, args=(weights, token), name=f"send {session}")
        self._senders.add(sender)
        sender.start()
        answer = SessionOpened(manifest=weights.manifest, store_port=self._store.port, token=token)
        connection.send([answer.to_bytes()])

    def _send(self, weights: PublishedWeights, token: str) -> None:
        """Send the requested blocks to one rank, until it has all, disconnects or times out."""
        wanted, store = torch.empty(2, dtype=torch.int64), dist.PrefixStore(token, self._store)
        try:
            wait_for_receiver(store, closing=self._closing)
            with PairGroup(store, rank=SENDER, host=self._host) as group:
                while True:
                    group.receive(wanted)
                    tensor, block = wanted.tolist()
                    if tensor == CLOSED:
                        return
                    group.send(weights.block(tensor, block))
        except (PairLostError, IndexError) as error:
            logger.warning("an engine stopped receiving the weights of epoch %d: %s", weights.epoch, error)
        finally:
            self._senders.discard(threading.current_thread())
