"""The part of the engine process above its backend: the link to the coordinator, requests, signals, probes and metrics.

The worker is the same for every backend. It calls the backend only through the interface EngineBackend (backend.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import uvloop
from prometheus_client import CollectorRegistry, ProcessCollector

from megatron_runtime.distributed.errors import RankLostError
from megatron_runtime.engine.backend import CacheEvents, Capability, EngineBackend
from megatron_runtime.engine.engine_request import RequestOutput
from megatron_runtime.engine.lifecycle import Lifecycle
from megatron_runtime.engine.metrics import EngineMetrics
from megatron_runtime.engine.open_requests import OpenRequests
from megatron_runtime.engine.settings import EngineSettings
from megatron_runtime.process.children import end_signals
from megatron_runtime.process.health import HealthServer, serve_on_thread
from megatron_runtime.process.logs import write_termination_message
from megatron_runtime.process.progress import PROGRESS
from megatron_runtime.process.tracing import Tracer, tracer_from_environment
from megatron_runtime.protocol import limits
from megatron_runtime.protocol.adapters import AdapterList
from megatron_runtime.protocol.headers import Header, Role
from megatron_runtime.protocol.lifecycle import CoordinatorState, EngineState
from megatron_runtime.protocol.media import MEDIA_NEED
from megatron_runtime.protocol.messages import (
    ENGINE_FAILED,
    ENGINE_LEAVES,
    ENGINE_STOPPED,
    Abort,
    CachedBlocks,
    Control,
    ControlCommit,
    Dispatch,
    Error,
    Heartbeat,
    Hello,
    HelloAck,
    KVPort,
    Message,
    Plain,
    Prefill,
    ReleaseBlocks,
    Transfer,
)
from megatron_runtime.protocol.published_weights import WeightsUnavailableError
from megatron_runtime.requests.capabilities import KNOWN_PARAMETERS
from megatron_runtime.requests.hashing import hash_of_digest
from megatron_runtime.transport.addresses import CoordinatorAddresses, coordinator_address
from megatron_runtime.transport.peer_link import CoordinatorUnreachableError, PeerLink, unreachable_cause
from megatron_runtime.transport.security import PeerKeys

logger = logging.getLogger(__name__)

MakeBackend = Callable[[EngineSettings], EngineBackend]
MakeLink = Callable[..., PeerLink]
"""A function that returns a PeerLink. It takes the arguments of PeerLink."""

FIRST_REPORT_SECONDS = 10.0
REPORT_SECONDS = 30.0
"""Interval of log messages about a coordinator that does not answer, counted from the start."""
WEIGHTS_RETRY_SECONDS = 1.0
"""Time between two attempts of a starting engine to get the weights of a trainer."""
LOAD_SILENCE_SECONDS = 600.0
"""Silence that the coordinator allows while weights load, because loading can hold the interpreter lock."""


class EngineWorker:
    """One data-parallel engine. The worker connects `backend` to the coordinator of `settings`.

    It implements BackendListener. All methods run on the event loop.

    link:   factory of the connection to the coordinator.
    tracer: records spans of requests; None if requests are not traced.
    """

    def __init__(
        self,
        settings: EngineSettings,
        backend: EngineBackend,
        *,
        link: MakeLink | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self.failure: BaseException | None = None
        self.ended = asyncio.Event()
        self.joined = asyncio.Event()
        """Set when the engine serves and has reached the coordinator's state."""
        self.lifecycle = Lifecycle(backend)
        self._settings = settings
        self._backend = backend
        self._started_ms = time.time_ns() // 1_000_000
        self._serving = False
        self._leaving: asyncio.Task[None] | None = None
        self._goodbye = ENGINE_LEAVES
        self._weights_wanted = True
        self._weights_unavailable = ""
        """Why the trainer's weights cannot be loaded; empty otherwise. While it is set, the engine does not serve."""
        self._coordinator_state: CoordinatorState | None = None
        self._acknowledged = asyncio.Event()
        self._last_rejection = ""
        """Error of the last rejected message since the last HELLO_ACK. The error has been logged."""
        self._controls: asyncio.Queue[Control | ControlCommit | HelloAck] = asyncio.Queue()
        self._after_update: list[Message] | None = None
        """Messages about requests that arrived after a commit of UPDATE_WEIGHTS. They wait until the new weights are in
        use.
        """
        self._busy_for = 0.0
        self._link = (link or PeerLink)(
            CoordinatorAddresses(coordinator_address(settings.coordinator)),
            keys=PeerKeys.load(settings.keys_dir, Role.ENGINE) if settings.keys_dir is not None else None,
            hello=self._hello,
            heartbeat=self._heartbeat,
            on_ack=self._on_ack,
            on_message=self._on_message,
        )
        self._requests = OpenRequests(
            settings,
            backend,
            adapters=self.lifecycle.adapters,
            send=self._link.send,
            on_idle=self._link.beat,
            tracer=tracer,
        )
        self._registry = _registry_of(EngineMetrics(self.lifecycle, backend))

    async def run(self) -> None:
        """Serve until `ended` is set, the engine fails, or STOP ends it.

        After STOP, an engine of a custom resource (an engine with a revision) stays idle instead of exiting, because
        the kubelet would restart an exited container.
        """
        await self._backend.start(self)
        health = None
        if self._settings.health_port is not None:
            health = HealthServer(
                missing=self._missing,
                registry=self._registry,
                pages={"/progress": lambda: None if self._serving else PROGRESS.page()},
                port=self._settings.health_port,
            )
            await health.start()
        controller = asyncio.create_task(self._control_loop())
        registration = asyncio.create_task(self._report_until_registered())
        self._link.open()
        try:
            await self.ended.wait()
        finally:
            controller.cancel()
            registration.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await controller
            self._link.close(self._goodbye)
            self._requests.close()
            await self._backend.stop(self.failure)
            if health is not None:
                await health.stop()

    def on_leave(self) -> None:
        """Accept no new requests, finish the requests in flight, and hand over requests that outlast the drain time.

        This method is idempotent.
        """
        if self._leaving is None:
            self._leaving = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        self._serving = False
        self._link.say_hello()
        if self.lifecycle.state is EngineState.RUNNING:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._requests.wait_idle(), self._settings.drain_seconds)
        self.ended.set()

    def _missing(self) -> list[str]:
        missing = []
        if not self._link.registered:
            missing.append(f"registration with the coordinator at {self._settings.coordinator}")
        if self._weights_wanted and not self._serving:
            missing.append(self._weights_unavailable or f"weights of {self._settings.model}")
        if self.lifecycle.state is EngineState.STOPPED:
            missing.append("stopped")
        return missing

    def _hello(self, incarnation: int) -> Hello:
        settings, info = self._settings, self._backend.info
        lacks = info.lacks if self._requests.exchange is not None else (*info.lacks, Capability.KV_TRANSFER.name)
        return Hello(
            role=Role.ENGINE,
            name=settings.name,
            incarnation=incarnation,
            serving=self._serving,
            state=self.lifecycle.settled_state,
            epoch=self.lifecycle.epoch,
            source=self.lifecycle.source,
            adapters=self.lifecycle.adapters.current,
            adapter_errors=self.lifecycle.adapters.errors or None,
            fence=self.lifecycle.fence,
            ranks=info.ranks,
            tokenizes=Capability.TEXT in info.capabilities,
            model=settings.model_hash,
            revision=settings.revision,
            max_requests=info.max_requests,
            max_sequence_length=info.max_sequence_length,
            max_tokens=info.max_tokens or None,
            kv_cache_bytes=info.kv_cache_bytes or None,
            block_size_tokens=info.block_size_tokens,
            started_ms=self._started_ms,
            backend=info.name,
            task=info.task,
            weights_unavailable=self._weights_unavailable or None,
            engine_role=settings.role,
            kv=self._kv_port(),
            copies=self._backend.copies or None,
            lacks=lacks or None,
            parameters=(*KNOWN_PARAMETERS, MEDIA_NEED) if Capability.MEDIA in info.capabilities else KNOWN_PARAMETERS,
        )

    def _kv_port(self) -> KVPort | None:
        """Return the description of the port on which other engines import KV blocks, or None if the engine has no such
        port.

        The port opens with the first connection to the coordinator. Its address is the local address of this
        connection, because other engines can also reach this address.
        """
        exchange, host = self._requests.exchange, self._link.local_host
        if exchange is not None and host is not None:
            try:
                exchange.listen(host, self._settings.kv_port)
            except OSError as error:
                self.fail(OSError(error.errno, f"--kv-port {self._settings.kv_port} on {host}: {error.strerror}"))
        return None if exchange is None else exchange.port

    def _heartbeat(self, incarnation: int) -> Heartbeat:
        stats = self._backend.stats()
        return Heartbeat(
            incarnation=incarnation,
            state=self.lifecycle.state,
            epoch=self.lifecycle.epoch,
            source=self.lifecycle.source,
            adapters=self.lifecycle.adapters.current.generation,
            running=self._requests.num_running,
            steps=stats.steps,
            busy_for=self._busy_for,
            digest=stats.weights_digest,
            prefill_rate=stats.prefill_rate,
            decode_rate=stats.decode_rate,
            queued_tokens=stats.queued_tokens,
            last_dispatch=stats.last_request,
            free_blocks=stats.free_blocks if self._requests.exchange is not None else None,
        )

    async def _report_until_registered(self) -> None:
        """Log the coordinator's address and why the coordinator does not answer, until it answers or the engine
        exits.
        """
        limit = math.inf if self._settings.registration_seconds is None else self._settings.registration_seconds
        waited, pause = 0.0, FIRST_REPORT_SECONDS
        while True:
            pause = min(pause, limit - waited)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._acknowledged.wait(), pause)
                return
            waited, pause = waited + pause, REPORT_SECONDS
            address = self._link.address
            message = (
                f"engine {self._settings.name}: no coordinator answered at {address} for {waited:g} s: "
                f"{await unreachable_cause(address)}"
            )
            if waited >= limit:
                self.fail(CoordinatorUnreachableError(message), goodbye="no coordinator answered")
                return
            logger.warning("%s", message)

    def _on_ack(self, ack: HelloAck, given_away: bool) -> None:
        self._acknowledged.set()
        self._last_rejection = ""
        if given_away:
            self._requests.drop_all()
        self._coordinator_state = ack.state
        self._controls.put_nowait(ack)

    def _on_message(self, message: Message) -> None:
        waiting = self._after_update
        match message:
            case Dispatch() | Abort() | ReleaseBlocks() | Prefill() | Transfer():
                if waiting is None:
                    self._requests.receive(message)
                else:
                    waiting.append(message)
            case Control() | ControlCommit():
                if _commits_weights(message) and waiting is None:
                    self._after_update = []
                self._controls.put_nowait(message)
            case Heartbeat():
                if message.state is not None:
                    self._note_coordinator_state(CoordinatorState(message.state.value))
            case Error():
                rejection = f"{message.code.name} {message.message}"
                if rejection != self._last_rejection:  # HELLO is sent again until it is accepted
                    self._last_rejection = rejection
                    logger.warning("the coordinator rejected a message: %s", rejection)
            case Plain(items=[Header.SHUTDOWN]):
                self.ended.set()
            case _:
                logger.warning("ignored an unexpected message: %.120r", message)

    def _note_coordinator_state(self, state: CoordinatorState) -> None:
        """Send HELLO if the coordinator has just recovered.

        The coordinator answers with the state that this engine must adopt, which may have changed.
        """
        recovered = self._coordinator_state is CoordinatorState.RECOVERING and state is not CoordinatorState.RECOVERING
        self._coordinator_state = state
        if recovered:
            self._link.say_hello()

    async def _control_loop(self) -> None:
        """Handle one control message at a time.

        An exception terminates the engine, because an engine that does not follow its coordinator must not serve.
        """
        try:
            while not self.ended.is_set():
                message = await self._controls.get()
                await self._handle_control(message)
                if _commits_weights(message):
                    waiting, self._after_update = self._after_update, None
                    for each in waiting or ():
                        self._on_message(each)
        except Exception as error:
            if not isinstance(error, OSError | ValueError):  # their messages name the cause and the remedy
                logger.exception("the engine cannot follow its coordinator")
            self.fail(error, goodbye="engine cannot follow its coordinator")

    async def _handle_control(self, message: Control | ControlCommit | HelloAck) -> None:
        if isinstance(message, Control):
            with self._reading_weights(message.kind in (Header.RESUME, Header.UPDATE_WEIGHTS, Header.SET_ADAPTERS)):
                ack = await self.lifecycle.handle(message)
            self._link.send(ack.to_frames())
            if self.lifecycle.unknown_weights is not None:
                self.fail(RuntimeError(self.lifecycle.unknown_weights), goodbye="its weights could not be loaded")
        elif isinstance(message, HelloAck):
            await self._enter(message)
        else:
            copies = self._backend.copies
            await self.lifecycle.commit(message)
            if message.signal is Header.SET_ADAPTERS:
                self._link.say_hello()  # HELLO reports the adapters: only then does the coordinator dispatch to them
            if self._backend.copies != copies:
                self._link.say_hello()
            if self.lifecycle.state is EngineState.STOPPED:
                logger.info("stopped")
                self._requests.drop_all()
                self._weights_wanted = False
                self._link.close(ENGINE_STOPPED)
                if not self._settings.revision:
                    self.ended.set()

    async def _enter(self, ack: HelloAck) -> None:
        """Adopt the weights and the adapters of HELLO_ACK, and then enter its state."""
        if self._leaving is not None or ack.state is CoordinatorState.RECOVERING:
            return
        if ack.fence <= limits.MAX_FENCE:
            self.lifecycle.fence = max(self.lifecycle.fence, ack.fence)
        else:
            logger.warning("ignored the coordinator's fence %d: at most %d", ack.fence, limits.MAX_FENCE)
        is_loaded = self._serving and self.lifecycle.state is not EngineState.SUSPENDED
        with self._reading_weights(ack.source is not None):
            await self.lifecycle.adopt(ack.source, ack.epoch, copies=ack.copies or (), is_loaded=is_loaded)
        adapters = ack.adapters or AdapterList()
        if self._serving:
            with self._reading_weights(adapters != self.lifecycle.adapters.current):
                if await self.lifecycle.adopt_adapters(adapters):
                    self._link.say_hello()
            await self.lifecycle.converge(ack.state)
            self._link.beat()
            self.joined.set()
            return
        self._weights_wanted = ack.state is not CoordinatorState.SUSPENDED
        if self._weights_wanted:
            try:
                with self._reading_weights(True):
                    await self._backend.load()
            except WeightsUnavailableError as error:
                self._wait_for_weights(error)
                return
            self._weights_unavailable = ""
        else:
            self._backend.info.require("joining a suspended pool", Capability.SUSPEND)
            self.lifecycle.events.enter(EngineState.SUSPENDED)
        with self._reading_weights(bool(adapters.adapters)):
            await self.lifecycle.adopt_adapters(adapters)
        self._serving = True
        self._link.say_hello()

    def _wait_for_weights(self, error: WeightsUnavailableError) -> None:
        """Send HELLO again after some seconds, so that the coordinator names the weights to load.

        By then, the trainer may publish the same weights again, or other weights.
        """
        if str(error) != self._weights_unavailable:
            self._weights_unavailable = str(error)
            logger.warning("WeightsUnavailable: %s; trying again every %g s", error, WEIGHTS_RETRY_SECONDS)
        asyncio.get_running_loop().call_later(WEIGHTS_RETRY_SECONDS, self._link.say_hello)

    @contextlib.contextmanager
    def _reading_weights(self, is_reading: bool) -> Iterator[None]:
        """Announce in a heartbeat that heartbeats can be missing while the `with` block loads weights.

        Another heartbeat announces the end, so that an engine that stops right after it is removed soon.

        is_reading: whether the `with` block loads weights. If not, nothing is announced.
        """
        if not is_reading:
            yield
            return
        self._busy_for = LOAD_SILENCE_SECONDS
        self._link.beat()
        try:
            yield
        finally:
            self._busy_for = 0.0
            self._link.beat()

    # --- BackendListener ----------------------------------------------------------------------------------------

    def on_outputs(self, outputs: Iterable[RequestOutput]) -> None:
        self._requests.take(outputs)

    def on_cache_events(self, events: CacheEvents) -> None:
        if not events:
            return
        evicted, stored = (
            np.array([hash_of_digest(digest) for digest in digests], dtype="<i8").tobytes()
            for digests in (events.evicted, events.stored)
        )
        self._link.send(CachedBlocks(evicted, stored, events.cleared).to_frames())

    def on_failure(self, cause: BaseException) -> None:
        is_silent = isinstance(cause, RankLostError) and cause.by_silence
        self.fail(cause, goodbye="a rank is silent" if is_silent else ENGINE_FAILED)

    def fail(self, error: BaseException, *, goodbye: str = ENGINE_FAILED) -> None:
        """Terminate the engine because of `error`, unless an earlier error is already terminating the engine.

        goodbye: reason in the DISCONNECT message. Only ENGINE_FAILED counts as a crash against requests in flight.
        """
        if self.failure is None:
            self.failure = error
            self._goodbye = goodbye
        self.ended.set()


def _registry_of(metrics: EngineMetrics) -> CollectorRegistry:
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    registry.register(metrics)
    return registry


def _commits_weights(message: Control | ControlCommit | HelloAck) -> bool:
    return isinstance(message, ControlCommit) and message.signal is Header.UPDATE_WEIGHTS


def run(settings: EngineSettings, make_backend: MakeBackend) -> None:
    """Run an engine until SIGTERM or STOP (see EngineWorker.run()).

    If the engine fails, write the cause to standard error and to the termination message, and exit with status 1. If
    `make_backend` raises an error, write it to the termination message and raise it.

    make_backend: factory of the backend: backends.registry.build_backend, or the factory of an external backend.
    """
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            failure = runner.run(_serve(settings, make_backend))
    except Exception as error:
        # A setting that this machine does not support, a model that cannot be opened, or a process that was killed.
        write_termination_message(error)
        raise
    if failure is not None:
        logger.error("engine %s failed: %s", settings.name, failure)
        write_termination_message(failure)
        os._exit(1)  # does not wait for threads of the backend, which may hang in native code


async def _serve(settings: EngineSettings, make_backend: MakeBackend) -> BaseException | None:
    with _probes_of_start(settings):
        backend = make_backend(settings)
    tracer = tracer_from_environment("megatron-engine")
    gc.freeze()  # a collection takes 90 ms with the objects of all imports, but 0.1 ms without them
    worker = EngineWorker(settings, backend, tracer=tracer)
    for number in end_signals():
        asyncio.get_running_loop().add_signal_handler(number, worker.on_leave)
    try:
        await worker.run()
    finally:
        if tracer is not None:
            tracer.close()
    return worker.failure


@contextlib.contextmanager
def _probes_of_start(settings: EngineSettings) -> Iterator[None]:
    """Return a context manager that answers probes on a thread while its `with` block creates the backend.

    This can take long, because the backend may download the model.
    """
    if not settings.health_port:
        yield
        return
    missing = f"model {settings.model}"
    server = HealthServer(missing=lambda: [missing], pages={"/progress": PROGRESS.page}, port=settings.health_port)
    stop = serve_on_thread(server)
    try:
        yield
    finally:
        stop()
