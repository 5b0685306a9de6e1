"""The client of a coordinator: submits requests, streams their tokens and sends control signals. No torch."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import uuid
from collections.abc import Callable, Coroutine, Generator, Iterable, Sequence
from typing import Any, TypedDict, TypeVar, Unpack

import zmq

from megatron_runtime.client import megatron_protocol
from megatron_runtime.client.pending import (
    PendingRequest,
    Serializable,
    merge_partials,
    partial_frames,
    running_loop,
)
from megatron_runtime.client.quota_calls import QuotaCalls
from megatron_runtime.client.rejection import rejection
from megatron_runtime.process.logs import of_request
from megatron_runtime.protocol import limits
from megatron_runtime.protocol.adapters import Adapter, AdapterList
from megatron_runtime.protocol.headers import CONTROLS, ErrorCode, Header, Role
from megatron_runtime.protocol.lifecycle import TRANSITIONS, EngineState
from megatron_runtime.protocol.messages import (
    Abort,
    Charge,
    Control,
    ControlAck,
    Error,
    Final,
    Heartbeat,
    Hello,
    HelloAck,
    MalformedMessageError,
    Message,
    Partial,
    Plain,
    Quota,
    Reserve,
    StatusReply,
    pack,
)
from megatron_runtime.requests.async_stream import AsyncStream, BlockingStream
from megatron_runtime.requests.request import DynamicInferenceRequestRecord
from megatron_runtime.requests.sampling_params import SamplingParams
from megatron_runtime.transport.control_calls import ControlCalls, ControlRejectedError
from megatron_runtime.transport.peer_link import GOODBYE_LINGER_MS, PeerLink, coordinator_address
from megatron_runtime.transport.security import PeerKeys

logger = logging.getLogger(__name__)

T = TypeVar("T")
AnyStream = TypeVar("AnyStream", AsyncStream, BlockingStream)

DEADLINE_MARGIN_SECONDS = 5.0
"""Added to a request's deadline before the client fails the request itself, so that the coordinator answers first."""


class RequestOptions(TypedDict, total=False):
    """Options of add_request() and add_request_streaming().

    deadline_seconds: time after which the coordinator fails the request; None or absent: no deadline.
    engine:           name of the only engine that may answer; the request fails with it. Empty: any engine.
    tenant:           tenant in whose share of the engines the request counts, an opaque text of at most 64 characters.
                      Empty: this client.
    adapter:          name of the LoRA adapter that answers. Empty: the base model.
    request_id:       id by which logs and traces of all components name the request, of at most 128 characters.
    traceparent:      W3C trace context of the caller's span. Empty: the request is not traced.
    on_tokens:        called with the number of new tokens when they arrive, on the connection's event loop, whether a
                      stream is read or not. Tokens then arrive as they are generated also without a stream.
    """

    deadline_seconds: float | None
    engine: str
    tenant: str
    adapter: str
    request_id: str
    traceparent: str
    on_tokens: Callable[[int], object] | None


class InferenceClient:
    """Connects one DEALER socket to a coordinator and registers again after each restart of the coordinator.

    The constructor connects, and start() registers. The connection belongs to the event loop of start(). Requests and
    signals may also come from any other running loop; their futures and streams then belong to that loop. Requests may
    be added before start() and while there is no coordinator: they are submitted after the next registration, with the
    tokens that they already have.

    inference_coordinator_port: a port on this host, "host:port" or "tcp://host:port".
    deserialize: result of a future. None: a DynamicInferenceRequestRecord; True: its merged request; False: a map.
    records:     the engine also returns the text and the times of an answer; None: unless `deserialize` is False.
    keys:        for a coordinator with CURVE keys.
    name:        identity of the client; None: a random one.
    model:       hash of the model that requests are made for; engines with another model do not answer. Empty: any.
    libzmq:      connect in the constructor, by libzmq. False: at start(), in the event loop itself, which passes no
                 message to another thread. `socket` is then None.
    """

    def __init__(
        self,
        inference_coordinator_port: int | str,
        *,
        deserialize: bool | None = None,
        records: bool | None = None,
        keys: PeerKeys | None = None,
        name: str | None = None,
        model: str = "",
        libzmq: bool = True,
    ) -> None:
        self.next_request_id = 0
        self.listener_task: asyncio.Task[None] | None = None
        self._deserialize = deserialize
        self._records = deserialize is not False if records is None else records
        self._name = name or f"client-{uuid.uuid4().hex[:12]}"
        self._open: dict[bytes, PendingRequest] = {}
        self._by_id: dict[int, PendingRequest] = {}
        self._link = PeerLink(
            coordinator_address(inference_coordinator_port),
            keys=keys,
            hello=lambda incarnation: Hello(role=Role.CLIENT, name=self._name, incarnation=incarnation, model=model),
            greets=True,
            on_ack=self._on_ack,
            on_plain=self._on_plain,
            on_message=self._on_message,
        )
        self.adapters = AdapterList()
        """The adapters that requests may name, as far as this client knows."""
        if libzmq:
            self._link.connect_early()
        self._calls = ControlCalls(self._link.send, address=self._link.address)
        self._quotas = QuotaCalls(self._link.send, is_connected=lambda: self._link.registered)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ids = threading.Lock()
        self._ever_registered = False
        self._megatron_streams = False
        self._stopped = False

    @property
    def completion_futures(self) -> dict[int, asyncio.Future[Any]]:
        """The futures of the open requests, by request id."""
        return {id_: request.future for id_, request in self._by_id.copy().items() if request.future is not None}

    @property
    def streams(self) -> dict[int, AsyncStream | BlockingStream]:
        """The streams of the open requests, by request id."""
        return {id_: request.stream for id_, request in self._by_id.copy().items() if request.stream is not None}

    @property
    def context(self) -> zmq.Context[zmq.Socket[bytes]]:
        return self._link.context

    @property
    def socket(self) -> zmq.Socket[bytes] | None:
        return self._link.socket

    @property
    def connected(self) -> bool:
        """Whether the client is registered and got a message within the last seconds."""
        return self._link.registered

    @property
    def counts_quotas(self) -> bool:
        """Whether the coordinator counts requests and tokens of tenants, as far as this client knows."""
        return self._quotas.supported is True

    # --- start and stop -----------------------------------------------------------------------------------------

    def start(
        self, loop: asyncio.AbstractEventLoop | None = None, connect_timeout_seconds: float = 30.0
    ) -> Coroutine[Any, Any, None]:
        """Register. The result may be awaited, to wait for the registration, or ignored.

        The call begins at once if an event loop runs, and otherwise when the result is awaited. With a timeout of 0 the
        client registers in the background. A coordinator of Megatron-Core is used in its own protocol: it confirms no
        signal, and sends no heartbeat.

        loop: the loop of the connection; None: the loop of the caller.

        Raises:
            CoordinatorUnreachableError: no answer in time. The client is closed and cannot be started again.
            HandshakeRejectedError: at once, if the coordinator rejected HELLO or the peer is no coordinator.
        """
        return _Starting(lambda: self._start(loop, connect_timeout_seconds))

    async def _start(self, loop: asyncio.AbstractEventLoop | None, connect_timeout_seconds: float) -> None:
        async def connect_and_listen() -> None:
            await self._connect_with_inference_coordinator(connect_timeout_seconds)
            self.listener_task = asyncio.create_task(self._recv_task(), name=f"{self._name} listens")
            self.listener_task.add_done_callback(lambda _: self._stop())

        if self._stopped:
            return
        here = asyncio.get_running_loop()
        self._loop = loop or here
        starting = connect_and_listen()
        if self._loop is here:
            await starting
        else:
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(starting, self._loop))

    async def _connect_with_inference_coordinator(self, connect_timeout_seconds: float = 30.0) -> None:
        """Open the connection, send CONNECT, then HELLO, and wait for the answers. The first step of start()."""
        await self._link.start(connect_timeout_seconds=connect_timeout_seconds)

    async def _recv_task(self) -> None:
        """Run until the client stops. Cancelling the task, as the end of its loop does, stops the client.

        Messages are handled by callbacks, not here.
        """
        await asyncio.get_running_loop().create_future()

    def stop(self, error: Callable[[], Exception] | None = None, *, is_lost: bool = False) -> None:
        """Disconnect: cancel pending futures, end streams; the coordinator aborts the requests. Idempotent.

        error:   called for each open request; its future or stream raises the result instead.
        is_lost: the coordinator has ended, so DISCONNECT does not wait for it.
        """

        async def stop_there() -> None:
            self._stop(error, is_lost)

        loop = self._other_loop()
        if loop is None:
            self._stop(error, is_lost)
        else:
            asyncio.run_coroutine_threadsafe(stop_there(), loop).result()

    def _stop(self, error: Callable[[], Exception] | None = None, is_lost: bool = False) -> None:
        if self._stopped:
            return
        self._stopped = True
        if self.listener_task is not None and self._loop is not None and not self._loop.is_closed():
            self.listener_task.cancel()
        for request in list(self._open.values()):
            self._forget(request)
            if error is None:
                request.end()
            else:
                request.fail(error())
        self._calls.close()
        self._quotas.close()
        self._link.close("client stopped", linger_ms=0 if is_lost else GOODBYE_LINGER_MS)

    def _other_loop(self) -> asyncio.AbstractEventLoop | None:
        """Return the connection's loop if it runs and is not the caller's."""
        loop = self._loop
        return loop if loop is not None and loop.is_running() and loop is not running_loop() else None

    def _at_home(self, action: Callable[[], object]) -> None:
        """Run `action` on the connection's loop: now, or in its next iteration."""
        loop = self._other_loop()
        if loop is None:
            action()
        else:
            loop.call_soon_threadsafe(action)

    # --- requests -----------------------------------------------------------------------------------------------

    def add_request(
        self, prompt: str | Sequence[int], sampling_params: Serializable, **options: Unpack[RequestOptions]
    ) -> asyncio.Future[Any]:
        """Submit a request now. The future gives the answer or raises RequestRejectedError; cancelling it aborts.

        prompt:  token ids, shape [n], or text, which the engine tokenizes.
        sampling_params: SamplingParams, or another object whose serialize() returns fields of them.
        options: see RequestOptions.
        """
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        request = self._new_request(prompt, sampling_params, streaming=False, **options)
        request.future = future
        future.add_done_callback(lambda done: self.abort_request(request.request_id) if done.cancelled() else None)
        self._at_home(lambda: self._submit(request))
        return future

    def add_request_streaming(
        self, prompt: str | Sequence[int], sampling_params: Serializable, **options: Unpack[RequestOptions]
    ) -> AsyncStream:
        """Submit a request now. The stream gives `{"partial": {"request_id", "new_tokens", …}}` …, `{"final": reply}`.

        If log-probabilities are requested, a partial has "new_log_probs" and "new_top_n_logprobs", and the first one
        "prompt_log_probs" and "prompt_top_n_logprobs". If MAX_UNREAD_ITEMS partials were not read, the last of them
        takes up the tokens of the next ones. Sets `streaming` on the caller's parameters. Closing the stream aborts the
        request. The arguments are those of add_request().
        """
        if isinstance(sampling_params, SamplingParams):
            sampling_params.streaming = True
        reader = running_loop() if self._other_loop() is not None else None
        return self.add_request_to_stream(
            prompt,
            sampling_params,
            lambda request_id: AsyncStream(request_id, self.abort_request, loop=reader, merge=merge_partials),
            **options,
        )

    def add_request_to_stream(
        self,
        prompt: str | Sequence[int],
        sampling_params: Serializable,
        make_stream: Callable[[int], AnyStream],
        **options: Unpack[RequestOptions],
    ) -> AnyStream:
        """Do what add_request_streaming() does, with a stream of the caller's, from any thread.

        make_stream: returns the stream of a request id, which aborts by abort_request().
        """
        request = self._new_request(prompt, sampling_params, streaming=True, **options)
        stream = make_stream(request.request_id)
        request.stream = stream
        self._at_home(lambda: self._submit(request))
        return stream

    def add_request_with_kv_handoff(
        self, prompt: str | Sequence[int], sampling_params: SamplingParams, kv_meta: Any, src_block_ids: Sequence[int]
    ) -> asyncio.Future[Any]:
        """Return a future that raises UnsupportedByBackendError: no backend reads the KV cache of another engine.

        The arguments are those of Megatron-Core, whose decode engines read the KV of a prefill engine.
        """
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        future.set_exception(_no_kv_handoff())
        return future

    def add_request_with_kv_handoff_streaming(
        self, prompt: str | Sequence[int], sampling_params: SamplingParams, kv_meta: Any, src_block_ids: Sequence[int]
    ) -> AsyncStream:
        """Return a stream that raises UnsupportedByBackendError: see add_request_with_kv_handoff()."""
        stream = AsyncStream(self.next_request_id, self.abort_request)
        stream.finish(_no_kv_handoff())
        return stream

    def release_handoff(self, request_id: int) -> None:
        """Raise UnsupportedByBackendError: see add_request_with_kv_handoff()."""
        raise _no_kv_handoff()

    def abort_request(self, request_id: int) -> None:
        """Abort a request here and at the coordinator. An unknown or finished id is ignored."""

        def abort() -> None:
            request = self._by_id.get(request_id)
            if request is not None:
                self._forget(request)
                self._send_abort(request)
                request.end()

        self._at_home(abort)

    def _new_request(
        self, prompt: str | Sequence[int], params: Serializable, *, streaming: bool, **options: Unpack[RequestOptions]
    ) -> PendingRequest:
        request = PendingRequest.make(prompt, params, streaming=streaming, record=self._records, **options)
        with self._ids:
            request.request_id = self.next_request_id
            self.next_request_id += 1
        return request

    def _submit(self, request: PendingRequest) -> None:
        if request.is_done:  # cancelled before it was submitted
            return
        self._open[request.uid] = request
        self._by_id[request.request_id] = request
        if self._stopped:
            self._reject(request, rejection(ErrorCode.UNAVAILABLE, "this client was stopped"))
        elif request.meta.adapter and self.connected and not self.adapters.generation:
            message = f"the engines have no adapter {request.meta.adapter!r}: SET_ADAPTERS was never sent"
            self._reject(request, rejection(ErrorCode.ADAPTER_NOT_FOUND, message))
        elif request.size > self._link.max_message_bytes - limits.MAX_NAME_BYTES:
            message = f"the request takes {request.size} bytes: at most {self._link.max_message_bytes}"
            self._reject(request, rejection(ErrorCode.TOO_LARGE, message))
        else:
            if request.deadline is not None:
                seconds = request.deadline - time.perf_counter() + DEADLINE_MARGIN_SECONDS
                request.timer = asyncio.get_running_loop().call_later(seconds, self._expire, request)
            self._send_submit(request)

    def _send_submit(self, request: PendingRequest) -> None:
        plain = self._link.is_plain
        self._link.send(megatron_protocol.submit_frames(request) if plain else request.submit().to_frames())

    def _send_abort(self, request: PendingRequest) -> None:
        """A coordinator of Megatron-Core of a release without streams has no aborts: an unknown message ends it."""
        if not self._link.is_plain:
            self._link.send(Abort(request.uid).to_frames())
        elif self._megatron_streams:
            self._link.send(megatron_protocol.abort_frames(request))

    def _expire(self, request: PendingRequest) -> None:
        """Fail a request after its deadline. The coordinator does so first, unless it is unreachable."""
        self._send_abort(request)
        message = f"no answer within the deadline; there is no answer from the coordinator at {self._link.address}"
        self._reject(request, rejection(ErrorCode.DEADLINE, message))

    def _forget(self, request: PendingRequest) -> None:
        if request.timer is not None:
            request.timer.cancel()
        self._open.pop(request.uid, None)
        self._by_id.pop(request.request_id, None)

    def _reject(self, request: PendingRequest, error: Exception) -> None:
        self._forget(request)
        request.fail(error)

    # --- answers ------------------------------------------------------------------------------------------------

    def _on_ack(self, ack: HelloAck, forgotten: bool) -> None:
        if ack.adapters is None:
            self.adapters = AdapterList()
            for request in list(self._open.values()):
                if request.meta.adapter:
                    message = "the coordinator is of a release without adapters, after it was restarted: upgrade it"
                    self._reject(request, rejection(ErrorCode.ADAPTER_NOT_FOUND, message))
        elif ack.adapters.generation:  # a restarted coordinator learns the list after it has answered
            self.adapters = ack.adapters
        if forgotten or not self._ever_registered:
            for request in list(self._open.values()):
                self._send_submit(request)
            self._calls.resend()
        self._quotas.registered(supported=bool(ack.quotas), is_forgotten=forgotten or not self._ever_registered)
        self._ever_registered = True

    def _on_plain(self) -> None:
        """The coordinator is one of Megatron-Core: requests that were added before are submitted to it."""
        self._ever_registered = True
        self._quotas.registered(supported=False, is_forgotten=True)
        for request in list(self._open.values()):
            self._send_submit(request)

    def _on_plain_message(self, items: list[Any]) -> None:
        match items:
            case [Header.ENGINE_REPLY | Header.ENGINE_REPLY_PARTIAL as kind, number, content, *_]:
                request = self._by_id.get(number) if isinstance(number, int) else None
                if request is None:
                    return
                try:
                    if kind == Header.ENGINE_REPLY:
                        self._on_message(megatron_protocol.read_final(request, content))
                    else:
                        self._megatron_streams = True
                        self._on_message(megatron_protocol.read_partial(request, content))
                except MalformedMessageError as error:
                    self._reject(request, rejection(ErrorCode.ENGINE_FAILED, f"unreadable answer: {error}"))
            case _:
                logger.debug("ignored a message of a coordinator of Megatron-Core: %.120r", items)

    def _on_message(self, message: Message) -> None:
        match message:
            case Plain(items=items) if self._link.is_plain:
                self._on_plain_message(items)
            case Partial():
                for request, frame in partial_frames(message, self._open.get):
                    if request.on_tokens is not None:
                        request.on_tokens(len(frame["new_tokens"]))
                    if request.stream is not None:
                        request.stream.put({"partial": frame})
            case Final():
                self._on_final(message)
            case Quota():
                self._quotas.answered(message)
            case Heartbeat(adapters=int() as generation) if generation != self.adapters.generation:
                self._link.say_hello()
            case Error(uid=bytes() as uid):
                rejected = self._open.get(uid)
                if rejected is not None:
                    code, text, retry = message.code, message.message, message.retry_after_seconds
                    self._reject(rejected, rejection(code, text, retry, message.field))
            case _:
                if not self._calls.handle(message) and isinstance(message, Error):
                    logger.warning("the coordinator rejected a message: %s %s", message.code.name, message.message)

    def _on_final(self, message: Final) -> None:
        request = self._open.get(message.uid)
        if request is None:
            return
        try:
            reply = request.reply(message)
            result: Any = reply
            if self._deserialize is not False and request.stream is None:
                result = DynamicInferenceRequestRecord.from_reply(reply)
                result[0].sampling_params = request.sampling_params
                if self._deserialize:
                    result = result.merge()
        except (MalformedMessageError, ValueError, TypeError, KeyError) as error:
            extra = of_request(request.meta.request_id)
            logger.exception("the answer to request %d cannot be read", request.request_id, extra=extra)
            self._reject(request, rejection(ErrorCode.ENGINE_FAILED, f"unreadable answer: {error}"))
            return
        self._forget(request)
        if request.on_tokens is not None:
            request.on_tokens(max(0, len(reply["generated_tokens"]) - request.held))
        request.complete(result)

    # --- limits of tenants --------------------------------------------------------------------------------------

    def reserve(self, reserve: Reserve) -> asyncio.Future[Quota | None]:
        """Count requests and tokens of a tenant at the coordinator, now or after the next registration.

        The future gives the answer; None if the coordinator is of a release that does not count. Cancelling it returns
        the tokens.
        """
        return self._call(lambda: self._quotas.reserve(reserve))

    def charge(self, charge: Charge) -> None:
        """Count tokens of a tenant at the coordinator, or return tokens. Without a connection it is lost."""
        self._at_home(lambda: self._quotas.charge(charge))

    # --- control signals --------------------------------------------------------------------------------------------

    def shutdown_coordinator(self) -> None:
        """End the coordinator. Only a coordinator with one port accepts this."""
        self._at_home(lambda: self._link.send([pack([int(Header.SHUTDOWN)])]))

    def status(self, *, timeout_seconds: float = 5.0) -> asyncio.Future[StatusReply]:
        return self._call(lambda: self._calls.status(timeout_seconds=timeout_seconds))

    def pause_engines(self, **options: Any) -> asyncio.Future[ControlAck]:
        """Pause generation. The future gives the coordinator's acknowledgement when every engine has paused.

        All signals take `operation_id`, `fence`, `timeout_seconds` and `expected_engines`. The call itself sends the
        signal; the caller may ignore the future, which raises ControlRejectedError or CoordinatorUnreachableError.
        A coordinator with three ports accepts signals on its admin port only, which the operator uses.
        """
        return self._send_signal_to_engines(Header.PAUSE, **options)

    def unpause_engines(self, **options: Any) -> asyncio.Future[ControlAck]:
        """Continue generation."""
        return self._send_signal_to_engines(Header.UNPAUSE, **options)

    def suspend_engines(self, **options: Any) -> asyncio.Future[ControlAck]:
        """Release memory. Allowed when paused."""
        return self._send_signal_to_engines(Header.SUSPEND, **options)

    def resume_engines(self, **options: Any) -> asyncio.Future[ControlAck]:
        """Reallocate memory. Afterwards the engines are paused."""
        return self._send_signal_to_engines(Header.RESUME, **options)

    def stop_engines(self, **options: Any) -> asyncio.Future[ControlAck]:
        """Stop the engines; open requests fail. Allowed when paused or suspended."""
        return self._send_signal_to_engines(Header.STOP, **options)

    def set_generation_epoch(self, epoch: int, **options: Any) -> asyncio.Future[ControlAck]:
        """Label tokens that are sampled from now on with `epoch`."""
        return self._send_signal_to_engines(Header.SET_GENERATION_EPOCH, **options, epoch=epoch)

    def update_weights(self, source: str, epoch: int, **options: Any) -> asyncio.Future[ControlAck]:
        """Switch to the weights at `source`, a model reference that every engine can read, and label them `epoch`.

        Acknowledged when every engine has verified and loaded them. The KV of requests in flight is computed again.
        """
        return self._send_signal_to_engines(Header.UPDATE_WEIGHTS, **options, source=source, epoch=epoch)

    def set_adapters(self, adapters: Iterable[Adapter], **options: Any) -> asyncio.Future[ControlAck]:
        """Make `adapters` all LoRA adapters of the engines. Requests name one of them as `adapter`.

        Acknowledged when every engine has loaded the new ones. Requests in flight end with the adapter that they have;
        one that is not in the list is unloaded then. If an engine cannot load an adapter, nothing changes.
        """
        adapter_list = AdapterList(tuple(adapters))
        return self._send_signal_to_engines(Header.SET_ADAPTERS, **options, adapters=adapter_list)

    def drain(self, engine: str | None = None, **options: Any) -> asyncio.Future[ControlAck]:
        """Stop dispatching to `engine` (None: to all). Acknowledged when it has no request in flight."""
        return self._send_signal_to_engines(Header.DRAIN, **options, engine=engine)

    def start_cuda_profiler(self, **options: Any) -> asyncio.Future[ControlAck]:
        """Call cudaProfilerStart on every rank, in any state.

        Nsight Systems records the range if it runs the engines with `--capture-range=cudaProfilerApi
        --capture-range-end=repeat` (by default the end of a range also ends the engine). Without a profiler nothing is
        recorded. Fails with ENGINE_FAILED if an engine has no GPU; the message names the engine, which keeps serving.
        """
        return self._send_signal_to_engines(Header.START_CUDA_PROFILER, **options)

    def stop_cuda_profiler(self, **options: Any) -> asyncio.Future[ControlAck]:
        """Call cudaProfilerStop on every rank."""
        return self._send_signal_to_engines(Header.STOP_CUDA_PROFILER, **options)

    def _send_signal_to_engines(self, signal: Header, **options: Any) -> asyncio.Future[ControlAck]:
        """Send a control message now. Raises ValueError if `signal` is not one."""
        if signal not in CONTROLS:
            raise ValueError(f"signal {signal!r}: want one of {', '.join(sorted(header.name for header in CONTROLS))}")
        control = Control(kind=Header(signal), **options)
        return self._call(lambda: self._send_plain(control) if self._link.is_plain else self._calls.control(control))

    def _send_plain(self, control: Control) -> asyncio.Future[ControlAck]:
        """Send a signal to a coordinator of Megatron-Core. The future is done at once: nothing confirms the signal."""
        future: asyncio.Future[ControlAck] = asyncio.get_running_loop().create_future()
        if control.kind in megatron_protocol.SIGNALS:
            self._link.send(megatron_protocol.signal_frames(control.kind, control.epoch))
            transition = TRANSITIONS.get(control.kind)
            state = transition.lands_in if transition is not None else EngineState.RUNNING
            future.set_result(ControlAck(operation_id=control.operation_id or "-", ok=True, state=state))
        else:
            message = f"{control.kind.name}: a coordinator of Megatron-Core has no such message"
            future.set_exception(ControlRejectedError(int(ErrorCode.UNSUPPORTED), message))
            future.exception()  # the caller may ignore it
        return future

    def _call(self, send: Callable[[], asyncio.Future[T]]) -> asyncio.Future[T]:
        loop = self._other_loop()
        if loop is None:
            return send()

        async def answered() -> T:
            return await send()

        answer = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(answered(), loop))
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())  # the caller may ignore it
        return answer


class _Starting(Coroutine[Any, Any, None]):
    """What start() returns: a coroutine that runs from the beginning, in a task, if an event loop runs.

    Another loop may await it.
    """

    def __init__(self, begin: Callable[[], Coroutine[Any, Any, None]]) -> None:
        loop = running_loop()
        self._begin = begin
        self._task = loop.create_task(begin()) if loop is not None else None
        self._steps: Generator[Any, Any, None] | None = None

    def __await__(self) -> Generator[Any, Any, None]:
        if self._task is None:
            return self._begin().__await__()
        if (loop := self._task.get_loop()) is running_loop():
            return self._task.__await__()
        task = self._task

        async def wait() -> None:
            await task

        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(wait(), loop)).__await__()

    def send(self, value: Any) -> Any:
        self._steps = self._steps or self.__await__()
        return self._steps.send(value)

    def throw(self, *error: Any) -> Any:
        self._steps = self._steps or self.__await__()
        return self._steps.throw(*error)

    def close(self) -> None:
        if self._steps is not None:
            self._steps.close()


def _no_kv_handoff() -> Exception:
    message = (
        "UnsupportedByBackend: no backend hands KV to another engine: use add_request(), which computes the prompt"
    )
    return rejection(ErrorCode.UNSUPPORTED, message)
