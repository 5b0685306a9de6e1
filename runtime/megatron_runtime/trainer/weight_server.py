"""Publishes the weights of a training program to all engines of a coordinator, as one transaction.

with WeightServer(policy, coordinator="coordinator:5557", keys=Path("/keys")) as server:
    for epoch in range(1, steps + 1):
        train(policy)
        server.publish(epoch)
"""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path
from typing import Any, Self

import torch.distributed as dist

from megatron_runtime.distributed.weight_port import Offer, WeightPort, address_towards
from megatron_runtime.in_process.event_loop import EventLoopManager
from megatron_runtime.protocol.headers import ErrorCode, Header, Role
from megatron_runtime.protocol.lifecycle import CoordinatorState
from megatron_runtime.protocol.messages import Control, ControlAck, Hello, StatusReply
from megatron_runtime.protocol.published_weights import PublishedSource
from megatron_runtime.trainer.published import PublishedWeights, PublishError
from megatron_runtime.trainer.ranks import TrainerRanks
from megatron_runtime.transport.addresses import CoordinatorAddresses, coordinator_address
from megatron_runtime.transport.control_calls import ControlCalls, ControlRejectedError
from megatron_runtime.transport.peer_link import CoordinatorUnreachableError, PeerLink
from megatron_runtime.transport.security import TRAINER, PeerKeys

CONNECT_SECONDS = 30.0
RETRY_SECONDS = 0.5
"""Seconds between two attempts while another operation is in progress, or while the coordinator is recovering."""


class WeightServer:
    """A server in a training program that sends weights to engines.

    The server keeps a copy of the published weights in host memory, for engines that start later. During a call of
    publish(), host memory contains two copies. The program can use torch.distributed. This class uses only the
    process group `group`.

    With a group, every rank creates a WeightServer with its part of the model and otherwise equal arguments, and calls
    publish() and close(). Only rank 0 listens, connects, and has the copy of the whole model.

    model:       see PublishedWeights. publish() reads the values at the time of the call.
    coordinator: "HOST:PORT" of the coordinator's admin port. None: publish() updates no engine. In a program with
                 MegatronLLM, update_weights(source=Trainer(...)) loads the weights.
    keys:        directory of trainer.key, trainer.pub, server.pub and engine.pub; None: no encryption.
    host:        address of this machine to which engines connect; None: the address of the interface that reaches the
                 coordinator, or 127.0.0.1 without a coordinator.
    port:        port for the engines' connections. The server listens on no other port. 0: a free port.
    group:       the torch.distributed ranks that hold parts of one GPTModel, with any tensor, pipeline, expert and data
                 parallel sizes. The group needs a CPU backend, such as new_group(backend="gloo"), and a timeout longer
                 than publish(). None: this rank has the whole model.

    The constructor raises KeyFileError, OSError if it cannot listen, CoordinatorUnreachableError, and ValueError for a
    group without a CPU backend. On ranks other than rank 0, it raises PublishError instead.
    """

    def __init__(
        self,
        model: Any,
        *,
        coordinator: str | None = None,
        keys: Path | None = None,
        host: str | None = None,
        port: int = 0,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._model = model
        self._keys = keys
        self._ranks = TrainerRanks(group)
        self._closed = not self._ranks.is_first
        self._held: dict[str, Offer] = {}
        """The offers of weights, by session."""
        self._link: PeerLink | None = None
        self._calls: ControlCalls | None = None
        self.address = self._ranks.run(lambda: self._listen(coordinator, host, port))
        """Address "HOST:PORT" to which engines connect."""

    def _listen(self, coordinator: str | None, host: str | None, port: int) -> str:
        address = coordinator_address(coordinator) if coordinator is not None else None
        if host is None:
            host = address_towards(address) if address is not None else "127.0.0.1"
        self._port = WeightPort(host, port, keys_dir=self._keys, role=TRAINER)
        self._loop = EventLoopManager()
        self._loop.start()
        if address is not None:
            try:
                self._loop.run_sync(self._start(address))
            except BaseException:
                self._loop.stop()
                self._port.close()
                raise
        return self._port.address.removeprefix("tcp://")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Disconnect when all engines that are receiving weights have received them. Idempotent.

        The method waits at most EXCHANGE_SECONDS for an engine that makes no progress. Engines keep the weights, and
        send them to engines that start later.
        """
        if self._closed:
            return
        self._closed = True

        async def close() -> None:
            if self._link is not None and self._calls is not None:
                self._calls.close()
                self._link.close("closed")

        self._loop.run_sync(close())
        self._loop.stop()
        self._port.close()
        self._held.clear()

    def publish(self, epoch: int, *, timeout_seconds: float = 600.0) -> str:
        """Replace the weights of all engines by the current weights of the model, or replace none.

        Return the reference of the new weights when every engine has received and verified them and the coordinator has
        committed. An engine that is lost during the update receives the new weights when it restarts, before it serves.

        epoch: epoch of the new weights, greater than the epoch of the engines.

        Raises ValueError if the model cannot be published, and PublishError. In a group of trainer ranks, an error on
        rank 0 raises PublishError on the other ranks.
        """
        return self._ranks.publish(self._model, lambda model: self._publish(model, epoch, timeout_seconds))

    def _publish(self, model: Any, epoch: int, timeout_seconds: float) -> str:
        weights = PublishedWeights(model, epoch=epoch)
        host = self._port.host
        source = str(PublishedSource(f"[{host}]" if ":" in host else host, self._port.port, epoch, weights.digest))
        before, offer = dict(self._held), Offer(weights.session, weights)
        self._offer({**before, offer.session: offer})
        try:
            if self._link is not None:
                self._loop.run_sync(self._update(epoch, source, timeout_seconds))
        except ControlRejectedError as error:
            self._offer(before)
            raise PublishError(error.message, is_committed=False) from error
        except CoordinatorUnreachableError as error:
            raise PublishError(str(error), is_committed=None) from error
        self._offer({offer.session: offer})
        return source

    def _offer(self, held: dict[str, Offer]) -> None:
        self._held = held
        self._port.offer(*held.values())

    def set_generation_epoch(self, epoch: int) -> None:
        """Label all tokens that are sampled from now on with `epoch`.

        In a group of trainer ranks, only rank 0 can call this method.

        Raises ControlRejectedError and CoordinatorUnreachableError.
        """
        self._control(Control(kind=Header.SET_GENERATION_EPOCH, epoch=epoch, fence=0))

    def status(self) -> StatusReply:
        """Return the coordinator's status: the current epoch, and epoch, source and digest of each engine's weights.

        In a group of trainer ranks, only rank 0 can call this method.
        """
        calls = self._connected()

        async def status() -> StatusReply:
            return await calls.status(timeout_seconds=CONNECT_SECONDS)

        return self._loop.run_sync(status())

    # --- the coordinator --------------------------------------------------------------------------------------------

    async def _start(self, address: str) -> None:
        name = f"trainer-{uuid.uuid4().hex[:12]}"
        link = PeerLink(
            CoordinatorAddresses(address),
            keys=PeerKeys.load(self._keys, TRAINER) if self._keys is not None else None,
            hello=lambda incarnation: Hello(role=Role.ADMIN, name=name, incarnation=incarnation),
            on_ack=lambda _ack, _forgotten: calls.resend(),
            on_message=lambda message: calls.handle(message),
        )
        calls = ControlCalls(link.send, address=address)
        self._link, self._calls = link, calls
        await link.start(connect_timeout_seconds=CONNECT_SECONDS)

    def _connected(self) -> ControlCalls:
        if self._calls is None:
            raise RuntimeError(
                "no coordinator is connected: the program with the engines updates them, or give a coordinator; with a "
                "group, call this method on its rank 0"
            )
        return self._calls

    def _control(self, control: Control) -> ControlAck:
        calls = self._connected()

        async def send() -> ControlAck:
            return await calls.control(control)

        return self._loop.run_sync(send())

    async def _update(self, epoch: int, source: str, timeout_seconds: float) -> None:
        """Send UPDATE_WEIGHTS until the coordinator accepts the signal.

        The coordinator rejects the signal during another operation and during recovery.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_seconds
        while True:
            left = max(1.0, deadline - loop.time())
            update = Control(kind=Header.UPDATE_WEIGHTS, epoch=epoch, source=source, timeout_seconds=left, fence=0)
            try:
                await self._connected().control(update)
                return
            except ControlRejectedError as error:
                is_recovering = error.state == CoordinatorState.RECOVERING
                if not (error.code == ErrorCode.IN_PROGRESS or is_recovering) or loop.time() >= deadline:
                    raise
            await asyncio.sleep(RETRY_SECONDS)
