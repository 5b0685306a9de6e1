"""The engine process: an engine on its thread, a link to the coordinator, and the state machine between them."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from prometheus_client import CollectorRegistry, ProcessCollector

from megatron_runtime.backends.native.kv.prefix_cache import BlockEvents
from megatron_runtime.distributed.errors import RankLostError
from megatron_runtime.engine.build import LoadedEngine, build_engine
from megatron_runtime.engine.engine_request import EngineRequest
from megatron_runtime.engine.engine_thread import EngineStopped, EngineThread, Outputs
from megatron_runtime.engine.grammar_queue import GrammarQueue
from megatron_runtime.engine.lifecycle import Lifecycle
from megatron_runtime.engine.metrics import EngineMetrics
from megatron_runtime.engine.output_stage import OutputStage
from megatron_runtime.engine.settings import EngineSettings
from megatron_runtime.engine.termination import write_termination_message
from megatron_runtime.process.health import HealthServer
from megatron_runtime.protocol import limits
from megatron_runtime.protocol.headers import ErrorCode, Header, Role
from megatron_runtime.protocol.lifecycle import CoordinatorState, EngineState
from megatron_runtime.protocol.messages import (
    ENGINE_FAILED,
    PARAMETERS,
    Abort,
    Control,
    ControlCommit,
    Dispatch,
    Error,
    EvictedBlocks,
    Heartbeat,
    Hello,
    HelloAck,
    Message,
    Plain,
    tokens_from_bytes,
    unpack,
)
from megatron_runtime.requests.errors import RequestOverflowError
from megatron_runtime.requests.hashing import hash_of_digest
from megatron_runtime.requests.sampling_params import SamplingParams
from megatron_runtime.sampling.grammar_limits import MAX_GRAMMAR_BYTES
from megatron_runtime.transport.peer_link import PeerLink, coordinator_address
from megatron_runtime.transport.security import PeerKeys

if TYPE_CHECKING:
    from megatron_runtime.sampling.structured_output import GrammarState

logger = logging.getLogger(__name__)

LOAD_SILENCE_SECONDS = 600.0
"""How long the coordinator may hear nothing while weights load (a load holds the interpreter at times)."""


class EngineWorker:
    """One data-parallel engine. All methods run on the event loop; the engine itself runs on its thread."""

    def __init__(self, settings: EngineSettings, loaded: LoadedEngine) -> None:
        keys = PeerKeys.load(settings.keys_dir, Role.ENGINE) if settings.keys_dir is not None else None
        self.failure: BaseException | None = None
        self.ended = asyncio.Event()
        self.joined = asyncio.Event()
        """Set once it serves, in the state that the coordinator told."""
        self._settings = settings
        self._loaded = loaded
        self._thread = EngineThread(
            loaded.engine, on_step=self._on_step, on_blocks=self._on_blocks, on_failure=self.fail
        )
        self._lifecycle = Lifecycle(self._thread, ranks=loaded.ranks)
        self._serving = False
        self._leaving = False
        self._goodbye = "engine leaves"
        self._aborts_under_way = 0
        self._weights_wanted = True
        self._coordinator_state: CoordinatorState | None = None
        self._controls: asyncio.Queue[Control | ControlCommit | HelloAck] = asyncio.Queue()
        self._busy_for = 0.0
        self._link = (loaded.link or PeerLink)(
            coordinator_address(settings.coordinator),
            keys=keys,
            hello=self._hello,
            heartbeat=self._heartbeat,
            on_ack=self._on_ack,
            on_message=self._on_message,
        )
        self._outputs = OutputStage(
            send=self._link.send,
            finish_early=lambda dispatch_id: self._thread.call(lambda engine: engine.abort_request(dispatch_id)),
            detokenizer=loaded.detokenizer,
        )
        self._grammars = GrammarQueue()
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._registry.register(EngineMetrics(self._thread, self._lifecycle, loaded.engine.stats))

    @property
    def lifecycle(self) -> Lifecycle:
        return self._lifecycle

    async def run(self) -> None:
        """Serve until `ended` is set or the engine fails."""
        self._thread.start()
        health = None
        if self._settings.health_port is not None:
            health = HealthServer(missing=self._missing, registry=self._registry, port=self._settings.health_port)
            await health.start()
        controller = asyncio.create_task(self._control_loop())
        await self._link.start(connect_timeout_seconds=0)
        try:
            await self.ended.wait()
        finally:
            controller.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await controller
            self._link.close(self._goodbye)
            self._grammars.close()
            await self._thread.stop()
            await asyncio.to_thread(self._loaded.close_grammars)  # the thread's last step may still need a mask
            if health is not None:
                await health.stop()

    async def drain_and_stop(self) -> None:
        """Take no new work, finish what is in flight while the drain time lasts, hand over the rest, end."""
        self._leaving = True
        self._serving = False
        self._link.say_hello()
        if self._lifecycle.state is EngineState.RUNNING:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._outputs.idle.wait(), self._settings.drain_seconds)
        self.ended.set()

    def _missing(self) -> list[str]:
        missing = []
        if not self._link.registered:
            missing.append(f"registration with the coordinator at {self._settings.coordinator}")
        if self._weights_wanted and not self._serving:
            missing.append(f"weights of {self._settings.model}")
        if self._lifecycle.state is EngineState.STOPPED:
            missing.append("stopped")
        return missing

    def _hello(self, incarnation: int) -> Hello:
        settings, loaded = self._settings, self._loaded
        return Hello(
            role=Role.ENGINE,
            name=settings.name,
            incarnation=incarnation,
            serving=self._serving,
            state=self._lifecycle.settled_state,
            epoch=self._lifecycle.epoch,
            source=self._lifecycle.source,
            fence=self._lifecycle.fence,
            ranks=self._lifecycle.ranks,
            model=settings.model_hash,
            revision=settings.revision,
            max_requests=settings.max_requests,
            max_sequence_length=loaded.engine.context.max_sequence_length,
            block_size_tokens=settings.block_size_tokens if settings.prefix_caching else 0,
        )

    def _heartbeat(self, incarnation: int) -> Heartbeat:
        return Heartbeat(
            incarnation=incarnation,
            state=self._lifecycle.state,
            epoch=self._lifecycle.epoch,
            source=self._lifecycle.source,
            running=len(self._outputs.open) + self._aborts_under_way,
            steps=self._thread.steps,
            busy_for=self._busy_for,
            digest=self._loaded.engine.executor.digest,
        )

    def _on_ack(self, ack: HelloAck, given_away: bool) -> None:
        if given_away:
            self._drop_all()
        self._coordinator_state = ack.state
        self._controls.put_nowait(ack)

    def _drop_all(self) -> None:
        """Forget every request: their owner dispatches or submits them anew."""
        for dispatch_id in list(self._outputs.open):
            self._abort(dispatch_id)

    def _abort(self, dispatch_id: int) -> None:
        """Forget a request. It counts as running until the engine's thread, between two steps, has let go of it."""
        self._outputs.forget(dispatch_id)
        self._grammars.drop(dispatch_id)
        self._aborts_under_way += 1
        aborted = self._thread.call(lambda engine: engine.abort_request(dispatch_id))
        aborted.add_done_callback(lambda _: self._aborted())

    def _aborted(self) -> None:
        """The coordinator may wait for the engine to be empty."""
        self._aborts_under_way -= 1
        if not self._aborts_under_way and not self._outputs.open:
            self._link.beat()

    def _on_message(self, message: Message) -> None:
        match message:
            case Dispatch():
                self._dispatch(message)
            case Abort(id=int() as dispatch_id):
                self._abort(dispatch_id)
            case Control() | ControlCommit():
                self._controls.put_nowait(message)
            case Heartbeat():
                if message.state is not None:
                    self._note_coordinator_state(CoordinatorState(message.state.value))
            case Error():
                logger.warning("the coordinator refused a message: %s %s", message.code.name, message.message)
            case Plain(items=[Header.SHUTDOWN]):
                self.ended.set()
            case _:
                logger.warning("ignored an unexpected message: %.120r", message)

    def _note_coordinator_state(self, state: CoordinatorState) -> None:
        """A coordinator that has recovered may be in another state than it was told here: ask for it by HELLO."""
        recovered = self._coordinator_state is CoordinatorState.RECOVERING and state is not CoordinatorState.RECOVERING
        self._coordinator_state = state
        if recovered:
            self._link.say_hello()

    async def _control_loop(self) -> None:
        """One control message at a time. What fails outside a message's own answer ends the engine, never this loop
        alone: an engine that hears no more must not go on serving.
        """
        try:
            while not self.ended.is_set():
                await self._obey(await self._controls.get())
        except Exception as error:
            logger.exception("the engine cannot follow its coordinator")
            self.fail(error, goodbye="engine cannot follow its coordinator")

    async def _obey(self, message: Control | ControlCommit | HelloAck) -> None:
        if isinstance(message, Control):
            with self._reading_weights(message.kind in (Header.RESUME, Header.UPDATE_WEIGHTS)):
                ack = await self._lifecycle.handle(message)
            self._link.send(ack.to_frames())
        elif isinstance(message, ControlCommit):
            await self._commit(message)
        else:
            await self._enter(message)

    async def _commit(self, commit: ControlCommit) -> None:
        await self._lifecycle.commit(commit)
        if self._lifecycle.stopped.is_set():
            logger.info("stopped")
            self._drop_all()
            self._weights_wanted = False
            self._link.close("stopped")

    async def _enter(self, ack: HelloAck) -> None:
        """Reach the state that HELLO_ACK names, loading weights first where they are needed."""
        if self._leaving or ack.state is CoordinatorState.RECOVERING:
            return
        if ack.fence <= limits.MAX_FENCE:
            self._lifecycle.fence = max(self._lifecycle.fence, ack.fence)
        else:
            logger.warning("the coordinator's fence %d is ignored: at most %d", ack.fence, limits.MAX_FENCE)
        with self._reading_weights(ack.source is not None):
            await self._lifecycle.adopt(ack.source, ack.epoch)
        if self._serving:
            await self._lifecycle.converge(ack.state)
            self._link.beat()
            self.joined.set()
            return
        self._weights_wanted = ack.state is not CoordinatorState.SUSPENDED
        if self._weights_wanted:
            await self._load()
        else:
            self._lifecycle.state = EngineState.SUSPENDED
        self._serving = True
        self._link.say_hello()

    async def _load(self) -> None:
        with self._reading_weights(True):
            await self._thread.call(lambda engine: engine.executor.load())
            await asyncio.to_thread(self._loaded.prepare_grammars)

    @contextlib.contextmanager
    def _reading_weights(self, is_reading: bool) -> Iterator[None]:
        """Heartbeats announce that there may be none for a while."""
        if is_reading:
            self._busy_for = LOAD_SILENCE_SECONDS
            self._link.beat()
        try:
            yield
        finally:
            self._busy_for = 0.0

    def _dispatch(self, dispatch: Dispatch) -> None:
        try:
            params = SamplingParams.deserialize(unpack(dispatch.params, PARAMETERS))
            generated = tokens_from_bytes(dispatch.generated)
            self._outputs.add(dispatch, params, generated.tolist())
        except (ValueError, TypeError, AttributeError) as error:
            self._outputs.refuse(dispatch, ErrorCode.INVALID_REQUEST, error)
            return
        if dispatch.dispatch_id not in self._outputs.open:
            return
        if params.structured_output is None:
            self._add(dispatch, params, grammar=None)
            return
        received = time.monotonic()
        tokens = generated.tolist()
        self._grammars.add(
            dispatch.dispatch_id,
            lambda: self._loaded.begin_grammar(params, tokens),
            # To look up a description beyond the limits would take long; begin_grammar() rejects it at once.
            is_known=len(dispatch.params) > 2 * MAX_GRAMMAR_BYTES or self._loaded.is_grammar_known(params),
            deadline_seconds=_deadline_seconds(dispatch),
            on_done=lambda begun: self._add_begun(dispatch, params, begun, received=received),
        )

    def _add_begun(
        self, dispatch: Dispatch, params: SamplingParams, begun: asyncio.Task[GrammarState | None], *, received: float
    ) -> None:
        if begun.exception() is not None:
            self._refuse_if_failed(dispatch, begun)
        elif dispatch.dispatch_id in self._outputs.open:
            self._add(dispatch, params, grammar=begun.result(), waited=time.monotonic() - received)

    def _add(
        self, dispatch: Dispatch, params: SamplingParams, *, grammar: GrammarState | None, waited: float = 0.0
    ) -> None:
        deadline_seconds = _deadline_seconds(dispatch)
        request = EngineRequest(
            request_id=dispatch.dispatch_id,
            prompt_tokens=tokens_from_bytes(dispatch.prompt),
            generated_tokens=tokens_from_bytes(dispatch.generated),
            sampling_params=params,
            seed=dispatch.meta.seed,
            deadline_seconds=None if deadline_seconds is None else max(0.0, deadline_seconds - waited),
            grammar=grammar,
            tenant=dispatch.meta.tenant or f"client {dispatch.route}",
        )
        added = self._thread.call(lambda engine: engine.add_request(request))
        added.add_done_callback(lambda future: self._refuse_if_failed(dispatch, future))

    def _refuse_if_failed(self, dispatch: Dispatch, added: asyncio.Future[Any]) -> None:
        error = added.exception() if not added.cancelled() else None
        if isinstance(error, RequestOverflowError):
            self._outputs.refuse(dispatch, ErrorCode.QUEUE_FULL, error)
        elif isinstance(error, ValueError):
            self._outputs.refuse(dispatch, ErrorCode.INVALID_REQUEST, error)
        elif isinstance(error, TimeoutError):
            message = f"the request had {_deadline_seconds(dispatch):g} s, which ended while its grammar was compiled"
            self._outputs.refuse(dispatch, ErrorCode.DEADLINE, message)
        elif isinstance(error, EngineStopped):
            # Not this request's fault: as the engine leaves, the coordinator gives what is unanswered to another.
            logger.info("request %d came when the engine had stopped", dispatch.dispatch_id)
        elif error is not None:
            logger.error("a request could not be added: %r", error)
            self._outputs.refuse(dispatch, ErrorCode.ENGINE_FAILED, error)

    def _on_step(self, outputs: Outputs) -> None:
        self._outputs.step(outputs)

    def _on_blocks(self, events: BlockEvents) -> None:
        if events.cleared or events.evicted:
            hashes = np.array([hash_of_digest(digest) for digest in events.evicted], dtype="<i8")
            self._link.send(EvictedBlocks(hashes.tobytes(), cleared=events.cleared).to_frames())

    def fail(self, error: BaseException, *, goodbye: str = ENGINE_FAILED) -> None:
        """End the engine with this cause, if it has no earlier one.

        goodbye: reason of its DISCONNECT. ENGINE_FAILED counts against the requests that it has; a rank that is only
                 silent does not.
        """
        if self.failure is None:
            self.failure = error
            is_silence = isinstance(error, RankLostError) and error.by_silence
            self._goodbye = "a rank is silent" if is_silence else goodbye
        self.ended.set()


def _deadline_seconds(dispatch: Dispatch) -> float | None:
    return None if dispatch.meta.deadline_ms is None else dispatch.meta.deadline_ms / 1000


async def _serve(settings: EngineSettings) -> BaseException | None:
    loaded = build_engine(settings)
    # What imports made stays as long as the process: a collection takes 90 ms to go through it, and 0.1 ms without.
    gc.freeze()
    worker = EngineWorker(settings, loaded)
    loop = asyncio.get_running_loop()
    leaving: list[asyncio.Task[None]] = []

    def leave() -> None:
        if not leaving:
            leaving.append(loop.create_task(worker.drain_and_stop()))

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, leave)
    others = loaded.others
    if others is not None:
        others.watch(
            on_failure=lambda error: loop.call_soon_threadsafe(worker.fail, error),
            on_leave=lambda: loop.call_soon_threadsafe(leave),
        )
    await worker.run()
    if others is not None:
        others.end(worker.failure)
    return worker.failure


def run(settings: EngineSettings) -> None:
    """Run an engine until SIGTERM. Exits with status 1, the cause on standard error, if the engine fails."""
    failure = asyncio.run(_serve(settings))
    if failure is not None:
        print(f"engine {settings.name} failed: {failure}", file=sys.stderr, flush=True)
        write_termination_message(failure)
        # The engine thread may hang in native code: nothing of it is worth waiting for.
        os._exit(1)
