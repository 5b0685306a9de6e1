"""The client of a coordinator: submits requests, streams tokens and sends control messages. Does not import torch."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypedDict, TypeVar, Unpack

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
from megatron_runtime.protocol.adapters import AdapterList
from megatron_runtime.protocol.headers import ErrorCode, Role
from megatron_runtime.protocol.media import Media
from megatron_runtime.protocol.messages import (
    Abort,
    AnswerFormats,
    Charge,
    Control,
    ControlAck,
    Error,
    Final,
    Frames,
    Heartbeat,
    Hello,
    HelloAck,
    MalformedMessageError,
    Message,
    Partial,
    Quota,
    ReleaseBlocks,
    Reserve,
    StatusReply,
)
from megatron_runtime.requests.async_stream import AnyStream, AsyncStream
from megatron_runtime.requests.sampling_params import SamplingParams
from megatron_runtime.transport.addresses import CoordinatorAddresses, coordinator_address
from megatron_runtime.transport.control_calls import ControlCalls
from megatron_runtime.transport.peer_link import GOODBYE_LINGER_MS, OpenSocket, PeerLink, open_dealer
from megatron_runtime.transport.security import PeerKeys

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_HANDOFFS = 4096
"""Maximum number of answers with a KV handoff that a client remembers. The oldest is forgotten first."""
DEADLINE_MARGIN_SECONDS = 5.0
"""Seconds after a request's deadline at which the client itself fails the request.

Usually the coordinator has failed the request by then.
"""


class RequestOptions(TypedDict, total=False):
    """Options of add_request() and add_request_streaming().

    deadline_seconds: time after which the coordinator fails the request; None or absent: no deadline.
    engine:           name of the only engine that is allowed to answer. The request fails if this engine fails. Empty:
                      any engine.
    tenant:           opaque name of the tenant, at most 64 characters. The tenants have fair shares of the engines.
                      Empty: this client is the tenant.
    adapter:          name of the LoRA adapter that answers. Empty: the base model.
    request_id:       id of the request in the logs and traces of all components, at most 128 characters.
    traceparent:      W3C trace context of the caller's span. Empty: the request is not traced.
    session:          opaque id of at most 64 characters. Requests with the same id go to the same engine while the
                      engine caches their prefix. Empty: no session.
    on_tokens:        called, on the connection's event loop, with the number of tokens that have just arrived. With
                      this option, tokens arrive as they are generated even if the request has no stream.
    media:            images, audio and video of a prompt of token ids. If several open requests have the same media,
                      the client sends the data once.
    kv_meta:          `kv_meta` from the answer to an earlier request with do_kv_handoff and the same prompt. The KV of
                      the earlier request can be used once.
    """

    deadline_seconds: float | None
    engine: str
    tenant: str
    adapter: str
    request_id: str
    traceparent: str
    session: str
    on_tokens: Callable[[int], object] | None
    media: Media | None
    kv_meta: Any


class CoordinatorClient:
    """One connection to a coordinator. The client registers again after each restart of the coordinator.

    The connection belongs to the event loop on which start() is called. Callers on other running loops can also add
    requests and send control messages, and get futures and streams of their own loop. Callers can add requests before
    start() and while the coordinator is down. The client submits these requests at the next registration. A request
    that has already received tokens is submitted with these tokens.

    address:    a port on this host, "host:port" or "tcp://host:port".
    keys:       keys for a coordinator that uses CURVE.
    name:       identity of the client; None: a random name.
    model:      hash of the model that must answer the requests. Engines with another model get no requests. Empty: any
                model.
    records:    whether engines also return the text of an answer and the times of its tokens.
    read_reply: converts the reply map of a request to the result of its future. If read_reply raises ValueError,
                TypeError or KeyError, the request fails.
    open_socket: opens the socket of the connection.
    on_stopped: called once, on the connection's loop, when the client has stopped.
    """

    def __init__(
        self,
        address: int | str,
        *,
        keys: PeerKeys | None = None,
        name: str | None = None,
        model: str = "",
        records: bool = False,
        read_reply: Callable[[dict[str, Any], SamplingParams], Any] = lambda reply, _: reply,
        open_socket: OpenSocket = open_dealer,
        on_stopped: Callable[[], object] = lambda: None,
    ) -> None:
        self.next_request_id = 0
        self.requests: dict[int, PendingRequest] = {}
        """The open requests, by request id."""
        self._open: dict[bytes, PendingRequest] = {}
        """The open requests, by uid."""
        self._handoffs: dict[int, int] = {}
        """Maps this client's request id to the coordinator's request id, for each answer with a KV handoff."""
        self._sent_media: Counter[bytes] = Counter()
        """For each media digest, the number of open requests that this client submitted to this coordinator with the
        media.
        """
        self._records = records
        self._read_reply = read_reply
        self._on_stopped = on_stopped
        self.name = name or f"client-{uuid.uuid4().hex[:12]}"
        self._link = PeerLink(
            CoordinatorAddresses(coordinator_address(address)),
            keys=keys,
            hello=lambda incarnation: Hello(
                role=Role.CLIENT, name=self.name, incarnation=incarnation, model=model, formats=self.formats
            ),
            on_ack=self._on_ack,
            on_message=self._on_message,
            open_socket=open_socket,
        )
        self.formats: AnswerFormats | None = None
        """The answer formats that this client reads if it is an OpenAI server. Set before start()."""
        self.adapters = AdapterList()
        """The adapters that requests can name, as last reported by the coordinator."""
        self.tasks: tuple[str, ...] = ()
        """The tasks of the engines: "generate", or tasks of pooling models. Empty: no engine has served yet."""
        self._calls = ControlCalls(self._link.send, address=self._link.address)
        self._quotas = QuotaCalls(self._link.send, is_connected=lambda: self._link.registered)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ids = threading.Lock()
        self._ever_registered = False
        self._stopped = False

    @property
    def connected(self) -> bool:
        """Whether the client is registered and has received a message from the coordinator in the last few seconds."""
        return self._link.registered

    # --- start and stop -----------------------------------------------------------------------------------------

    async def start(self, *, connect_timeout_seconds: float = 30.0) -> None:
        """Register at the coordinator, on the running event loop, and wait until the client is registered.

        If the timeout is 0, do not wait, and register in the background.

        Raises:
            CoordinatorUnreachableError: no answer within the timeout. The client is stopped and cannot be started
            again.
            HandshakeRejectedError: immediately, if the coordinator rejects HELLO or the peer is not a coordinator.
        """
        if self._stopped:
            return
        self._loop = asyncio.get_running_loop()
        if not connect_timeout_seconds:
            self._link.open()
            return
        try:
            await self._link.start(connect_timeout_seconds=connect_timeout_seconds)
        except BaseException:
            self._stop()
            raise

    def stop(self, error: Callable[[], Exception] | None = None, *, is_lost: bool = False) -> None:
        """Disconnect, and end the futures and streams of open requests.

        The coordinator aborts these requests. Idempotent.

        error:   called for each open request. The future or stream of the request raises the error that the call
                 returns. None: futures are cancelled and streams end.
        is_lost: whether the coordinator has exited. If so, the client does not wait until DISCONNECT has been sent.
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
        for request in list(self._open.values()):
            self._forget(request)
            if error is None:
                request.end()
            else:
                request.fail(error())
        self._calls.close()
        self._quotas.close()
        self._link.close("client stopped", linger_ms=0 if is_lost else GOODBYE_LINGER_MS)
        self._on_stopped()

    def _other_loop(self) -> asyncio.AbstractEventLoop | None:
        """Return the connection's event loop if it is running and the caller does not run on it, otherwise None."""
        loop = self._loop
        return loop if loop is not None and loop.is_running() and loop is not running_loop() else None

    def _at_home(self, action: Callable[[], object]) -> None:
        """Run `action` on the connection's event loop.

        The action runs now if the caller runs on this loop, otherwise in the loop's next iteration.
        """
        loop = self._other_loop()
        if loop is None:
            action()
        else:
            loop.call_soon_threadsafe(action)

    # --- requests -----------------------------------------------------------------------------------------------

    def add_request(
        self, prompt: str | Sequence[int], sampling_params: Serializable, **options: Unpack[RequestOptions]
    ) -> asyncio.Future[Any]:
        """Submit a request immediately, and return a future for its answer.

        The future returns the answer or raises RequestRejectedError. Cancelling the future aborts the request.

        prompt:  token ids, shape [n], or text, which the engine tokenizes.
        sampling_params: SamplingParams, or another object whose serialize() returns fields of SamplingParams.
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
        """Submit a request immediately, and return a stream of its answer.

        The stream yields any number of `{"partial": {"request_id", "new_tokens", …}}`, then `{"final": reply}`. If
        log-probabilities are requested, each partial has "new_log_probs" and "new_top_n_logprobs". The first partial
        also has "prompt_log_probs" and "prompt_top_n_logprobs". If MAX_UNREAD_ITEMS partials are unread, further tokens
        are added to the last unread partial. The method sets `streaming` in `sampling_params`. Closing the stream
        aborts the request. The arguments are the same as for add_request().
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
        """Submit a request like add_request_streaming(), but with a stream that the caller makes. Return this stream.

        Any thread may call this method.

        make_stream: returns the stream for a request id. To abort the request, the stream must call abort_request().
        """
        request = self._new_request(prompt, sampling_params, streaming=True, **options)
        stream = make_stream(request.request_id)
        request.stream = stream
        self._at_home(lambda: self._submit(request))
        return stream

    def abort_request(self, request_id: int) -> None:
        """Abort a request in this client and at the coordinator.

        An unknown id and the id of a finished request are ignored.
        """

        def abort() -> None:
            request = self.requests.get(request_id)
            if request is not None:
                self._forget(request)
                self._link.send(Abort(request.uid).to_frames())
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
        self.requests[request.request_id] = request
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
            self._send(request)

    def _send(self, request: PendingRequest) -> None:
        """Send SUBMIT for `request`, without media data that another open request has already sent."""
        if request.media is None:
            self._link.send(request.submit().to_frames())
            return
        self._link.send(request.submit(known_media=self._sent_media).to_frames())
        self._sent_media.update({item.digest for item in request.media.items})

    def _expire(self, request: PendingRequest) -> None:
        """Fail a request whose deadline has passed without an answer from the coordinator."""
        self._link.send(Abort(request.uid).to_frames())
        message = f"no answer within the deadline; there is no answer from the coordinator at {self._link.address}"
        self._reject(request, rejection(ErrorCode.DEADLINE, message))

    def _forget(self, request: PendingRequest) -> None:
        if request.timer is not None:
            request.timer.cancel()
        was_open = self._open.pop(request.uid, None) is not None
        self.requests.pop(request.request_id, None)
        if request.media is not None and was_open:
            for digest in {item.digest for item in request.media.items}:
                self._sent_media[digest] -= 1
                if self._sent_media[digest] <= 0:
                    del self._sent_media[digest]

    def _reject(self, request: PendingRequest, error: Exception) -> None:
        self._forget(request)
        request.fail(error)

    # --- answers ------------------------------------------------------------------------------------------------

    def _on_ack(self, ack: HelloAck, forgotten: bool) -> None:
        if ack.adapters is not None and ack.adapters.generation:  # a restarted coordinator sends the adapters later
            self.adapters = ack.adapters
        self.tasks = ack.tasks or self.tasks  # while no engine serves, keep the last reported tasks
        if forgotten or not self._ever_registered:
            self._sent_media.clear()
            for request in list(self._open.values()):
                self._send(request)
            self._calls.resend()
        self._quotas.registered(is_forgotten=forgotten or not self._ever_registered)
        self._ever_registered = True

    def _on_message(self, message: Message) -> None:
        match message:
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
            case Heartbeat():
                self.tasks = message.tasks or self.tasks
                if message.adapters is not None and message.adapters != self.adapters.generation:
                    self._link.say_hello()
            case Error(uid=bytes() as uid):
                rejected = self._open.get(uid)
                if rejected is not None and message.code is ErrorCode.MEDIA_MISSING:
                    # The request that sent the media ended before the coordinator read this request. Send the media
                    # again.
                    self._link.send(rejected.submit().to_frames())
                elif rejected is not None:
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
            result = reply if request.stream is not None else self._read_reply(reply, request.sampling_params)
        except (MalformedMessageError, ValueError, TypeError, KeyError) as error:
            extra = of_request(request.meta.request_id)
            logger.exception("the answer to request %d cannot be read", request.request_id, extra=extra)
            self._reject(request, rejection(ErrorCode.ENGINE_FAILED, f"unreadable answer: {error}"))
            return
        self._forget(request)
        self._note_handoff(reply)
        if request.on_tokens is not None:
            request.on_tokens(max(0, len(reply["generated_tokens"]) - request.held))
        request.complete(result)

    # --- handoffs of KV -----------------------------------------------------------------------------------------

    def _note_handoff(self, reply: dict[str, Any]) -> None:
        """Replace the coordinator's request id in `disaggregated_params` of an answer by this client's request id."""
        handoff = reply.get("disaggregated_params")
        if isinstance(handoff, dict) and isinstance(handoff.get("request_id"), int):
            self._handoffs[reply["request_id"]] = handoff["request_id"]
            handoff["request_id"] = reply["request_id"]
            if len(self._handoffs) > MAX_HANDOFFS:
                del self._handoffs[next(iter(self._handoffs))]

    def release_handoff(self, request_id: int) -> None:
        """Release the KV that an engine keeps after the answer to a request. An id without a KV handoff is ignored."""

        def release() -> None:
            number = self._handoffs.pop(request_id, None)
            if number is not None:
                self._link.send(ReleaseBlocks(number).to_frames())

        self._at_home(release)

    # --- limits of tenants --------------------------------------------------------------------------------------

    def reserve(self, reserve: Reserve) -> asyncio.Future[Quota]:
        """Ask the coordinator to reserve requests and tokens within a tenant's limits.

        The message is sent now or after the next registration. Return a future for the coordinator's answer. If the
        future is cancelled, the client gives the reserved tokens back when the answer arrives.
        """
        return self._call(lambda: self._quotas.reserve(reserve))

    def charge(self, charge: Charge) -> None:
        """Ask the coordinator to count tokens against a tenant's limit, or to return unused tokens of a reservation.

        The message is lost if there is no connection.
        """
        self._at_home(lambda: self._quotas.charge(charge))

    # --- control messages -------------------------------------------------------------------------------------------

    def send(self, frames: Frames) -> None:
        """Send a message that has no answer. It is lost if there is no connection."""
        self._at_home(lambda: self._link.send(frames))

    def status(self, *, timeout_seconds: float = 5.0) -> asyncio.Future[StatusReply]:
        return self._call(lambda: self._calls.status(timeout_seconds=timeout_seconds))

    def control(self, control: Control) -> asyncio.Future[ControlAck]:
        """Send a control message, and return a future for the coordinator's acknowledgement.

        The future raises ControlRejectedError or CoordinatorUnreachableError. The caller can ignore the future.
        """
        return self._call(lambda: self._calls.control(control))

    def _call(self, send: Callable[[], asyncio.Future[T]]) -> asyncio.Future[T]:
        loop = self._other_loop()
        if loop is None:
            return send()

        async def answered() -> T:
            return await send()

        answer = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(answered(), loop))
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())  # the caller may ignore it
        return answer
