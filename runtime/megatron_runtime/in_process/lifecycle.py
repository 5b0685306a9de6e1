"""The lifecycle of a program's engine at a coordinator: its verbs, its failures, its HTTP server and its shutdown."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from megatron_runtime.backends.native.engine import EngineCore
from megatron_runtime.checkpoints.in_memory import model_in_memory
from megatron_runtime.checkpoints.published import newest
from megatron_runtime.checkpoints.source import IN_MEMORY, Trainer
from megatron_runtime.client.coordinator_client import CoordinatorClient
from megatron_runtime.client.rejection import UnavailableError
from megatron_runtime.coordinator.spawn import CoordinatorFailedError
from megatron_runtime.engine.lifecycle import LANDED
from megatron_runtime.in_process.calls import EngineFailedError
from megatron_runtime.in_process.client_calls import ClientCalls
from megatron_runtime.in_process.front_end import FrontEnd
from megatron_runtime.in_process.ranks import ProgramRanks
from megatron_runtime.in_process.service import ServedEngine
from megatron_runtime.protocol.headers import ErrorCode, Header
from megatron_runtime.protocol.lifecycle import TRANSITIONS
from megatron_runtime.protocol.messages import Control
from megatron_runtime.transport.control_calls import ControlRejectedError
from megatron_runtime.transport.peer_link import CoordinatorUnreachableError

T = TypeVar("T")

logger = logging.getLogger(__name__)

SHUTDOWN_SECONDS = 30.0
"""Timeout of each control signal of a shutdown, which then continues without the engines that have not answered."""

REACHED = {kind: LANDED[change.passing, change.lands_in] for kind, change in TRANSITIONS.items()}
"""For each verb, the state that a rank without a client waits for. Such a rank sends no verb."""


class ProgramLifecycle:
    """One rank of an engine, from its registration with the coordinator to its shutdown.

    If the coordinator's process exits, or if this engine fails and no other engine serves, every open and later call
    raises the error of raise_failure(). Use this object only on the event loop of the connection.

    core:   engine core of this rank, which has the epoch and the executor.
    service: connects `core` to the coordinator. start() has already been called.
    client: on the primary rank, the client that sends the verbs. None on other ranks, which wait for the states of
            their engines.
    ranks:  ranks of the program.
    places: maximum number of prompts that calls with lists of prompts submit at the same time, over all calls.
    """

    def __init__(
        self,
        core: EngineCore,
        service: ServedEngine,
        *,
        client: CoordinatorClient | None,
        ranks: ProgramRanks,
        places: int,
    ) -> None:
        self.front_end: FrontEnd | None = None
        """The HTTP server, after serve()."""
        self._core = core
        self._service = service
        self._client = client
        self._ranks = ranks
        self._is_closed = False
        self._failure: Callable[[], Exception] | None = None
        """Returns the error that stopped the coordinator, or the last engine."""
        self._failed = asyncio.Event()
        self._failing: asyncio.Task[None] | None = None
        # A joining engine may pass through states without a call of this program.
        self._reached = {state: service.events.times(state) for state in REACHED.values()}
        """On a rank without a client, how many times its calls have waited for each state."""
        self._calls: ClientCalls | None = None
        self._watching: asyncio.Task[None] | None = None
        if client is not None:
            self._calls = ClientCalls(client, places=places, raise_failure=self.raise_failure)
            self._watching = asyncio.create_task(self._watch_engine(client))
            if service.coordinator is not None:
                loop = asyncio.get_running_loop()
                service.coordinator.ended.add_done_callback(partial(self._on_coordinator_end, loop))

    @property
    def calls(self) -> ClientCalls:
        """The calls of generate() and generate_stream() on the primary rank."""
        assert self._calls is not None
        return self._calls

    # --- failures -----------------------------------------------------------------------------------------------

    def _on_coordinator_end(self, loop: asyncio.AbstractEventLoop, ended: concurrent.futures.Future[str]) -> None:
        error = partial(CoordinatorFailedError, f"{ended.result()}: construct the object again")
        with contextlib.suppress(RuntimeError):  # the event loop has ended as well
            loop.call_soon_threadsafe(self._fail, error)

    async def _watch_engine(self, client: CoordinatorClient) -> None:
        assert self._service.task is not None
        try:
            await asyncio.shield(self._service.task)
            return  # the engine was stopped on request
        except EngineFailedError as error:
            message, cause = str(error), error.__cause__
        with contextlib.suppress(CoordinatorUnreachableError):
            if (await client.status()).engines:
                logger.warning("%s; the other engines continue", message)
                return

        def failure() -> Exception:
            error = EngineFailedError(f"{message}: construct the object again")
            error.__cause__ = cause
            return error

        self._fail(failure)

    def _fail(self, failure: Callable[[], Exception]) -> None:
        if self._failure is None and not self._is_closed and self._client is not None:
            logger.error("%s", failure())
            self._failure = failure
            self._failed.set()
            self._client.stop(failure, is_lost=True)
            if self.front_end is not None:
                self._failing = asyncio.create_task(self.front_end.fail(str(failure())))

    def raise_failure(self) -> None:
        """Raise the error that stopped the coordinator or the last engine, if there is one."""
        if self._failure is not None:
            raise self._failure()

    async def confirmed(self, signal: Awaitable[T]) -> T:
        """Return the answer to a control signal. If a failure ends the wait, raise the error of raise_failure()."""
        try:
            return await signal
        except asyncio.CancelledError:
            self.raise_failure()
            raise

    # --- verbs --------------------------------------------------------------------------------------------------

    async def verb(self, kind: Header, **options: Any) -> None:
        """Send a control message from the primary rank, and wait until every engine has confirmed it.

        A rank without a client sends nothing. It waits until its own engine has reached the state to which the message
        leads.

        options: fields of Control.
        """
        if self._client is not None:
            self.raise_failure()
            await self.confirmed(self._client.control(Control(kind=kind, **options)))
        elif (state := REACHED.get(kind)) is not None:
            # The states are counted, because the engine may have left the state again before this rank waits for it.
            wanted = self._reached[state] + 1
            await self._service.wait_until(state, times=wanted)
            self._reached[state] = min(wanted, self._service.events.times(state))

    async def update_weights(self, source: Any, epoch: int | None) -> None:
        """Switch every engine to the weights of `source` under the number `epoch`.

        `source` is a model reference, a model in memory, or a Trainer. A Trainer assigns the epochs itself. With a
        model in memory, every rank of the program makes this call, and each engine reads the model of its own rank. The
        call returns when all engines have copied the weights.

        epoch: None means the current epoch plus one.
        """
        if isinstance(source, Trainer) and epoch is not None:
            raise ValueError(f"epoch={epoch}: leave it out, because the trainer publishes its weights under an epoch")
        epoch = self._core.epoch + 1 if epoch is None else epoch
        if isinstance(source, Trainer):
            executor: Any = self._core.executor
            executor.use_keys(source.keys)
            await self._ranks.wait()  # every rank has the keys
            if self._client is not None:
                reference = await asyncio.to_thread(newest, source)
                await self.verb(Header.UPDATE_WEIGHTS, source=str(reference), epoch=reference.epoch)
            await self._ranks.wait()
            return
        if isinstance(source, str | Path):
            await self.verb(Header.UPDATE_WEIGHTS, source=str(source), epoch=epoch)
            return
        executor = self._core.executor
        executor.use_memory(model_in_memory(source, ends=executor.eos_ids))
        await self._ranks.wait()  # each rank has set its own model
        failure: Exception | None = None
        try:
            await self.verb(Header.UPDATE_WEIGHTS, source=IN_MEMORY, epoch=epoch)
        except Exception as error:
            failure = error
        await self._ranks.wait()  # every engine has copied the weights
        cause = await self._ranks.text_of_first("" if failure is None else str(failure) or type(failure).__name__)
        if failure is not None:
            raise failure
        if cause:
            raise RuntimeError(f"the weights were not updated: {cause}")

    # --- HTTP ---------------------------------------------------------------------------------------------------

    async def serve(self, front_end: Callable[[], FrontEnd]) -> None:
        """Start the HTTP server that `front_end` returns. Raises RuntimeError if a server is already running."""
        if self.front_end is not None:
            raise RuntimeError(f"HTTP is served already at {self.front_end.url}")
        self.front_end = front_end()
        try:
            await self.front_end.start()
        except BaseException:
            self.front_end = None
            raise

    async def stop_serving(self) -> None:
        """Drain and stop the HTTP server, if there is one."""
        front_end, self.front_end = self.front_end, None
        if front_end is not None:
            await front_end.stop()

    # --- the end ------------------------------------------------------------------------------------------------

    async def wait_for_end(self) -> None:
        """Wait until the engine has stopped. Raises EngineFailedError or CoordinatorFailedError after a failure."""
        assert self._service.task is not None
        failed = asyncio.create_task(self._failed.wait())
        try:
            await asyncio.wait({self._service.task, failed}, return_when=asyncio.FIRST_COMPLETED)
            self.raise_failure()
            await asyncio.shield(self._service.task)
        finally:
            failed.cancel()

    async def stop(self) -> None:
        """Stop every engine. A rank without a client waits until its engine has stopped.

        Engines that do not answer in time are not stopped.
        """
        if self.front_end is not None:
            await self.front_end.stop()
        if self._failure is not None:
            return  # the signal will not be answered
        if self._client is None:
            # The primary rank stops this engine, unless the primary rank has exited.
            assert self._service.task is not None
            await asyncio.wait({self._service.task}, timeout=2 * SHUTDOWN_SECONDS)
            return
        try:
            await self.verb(Header.PAUSE, timeout_seconds=SHUTDOWN_SECONDS)
            await self.verb(Header.STOP, timeout_seconds=SHUTDOWN_SECONDS)
        except (
            ControlRejectedError,
            CoordinatorFailedError,
            CoordinatorUnreachableError,
            EngineFailedError,
        ) as error:
            logger.warning("shutting down without a clean stop of the engines: %s", error)

    async def close(self) -> None:
        """Stop the HTTP server and the client. Open calls raise the error of raise_failure(), or UnavailableError.

        This method is idempotent.
        """
        self._is_closed = True
        if self._watching is not None:
            self._watching.cancel()
        try:
            if self.front_end is not None:
                await self.front_end.stop()
        finally:
            if self._client is not None:
                message = "the engine was shut down before the answer was complete"
                self._client.stop(self._failure or partial(UnavailableError, ErrorCode.UNAVAILABLE, message))
