"""The client of a coordinator: submit requests, stream their tokens, send control messages. No torch."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import zmq

from megatron_runtime.client.engine_verbs import EngineVerbs
from megatron_runtime.client.loop_bridge import awaited, called, cancel, running_loop, settle
from megatron_runtime.client.pending import PendingRequest, partial_frames
from megatron_runtime.client.rejection import (
    DeadlineExceededError,
    EngineFailedError,
    InvalidRequestError,
    ModelChangedError,
    QueueFullError,
    RequestRejectedError,
    RequestTooLargeError,
    UnavailableError,
    rejection,
)
from megatron_runtime.protocol import limits
from megatron_runtime.protocol.headers import CONTROLS, ErrorCode, Header, Role
from megatron_runtime.protocol.messages import (
    Abort,
    Control,
    ControlAck,
    Error,
    Final,
    Hello,
    HelloAck,
    MalformedMessageError,
    Message,
    Partial,
    StatusReply,
    pack,
)
from megatron_runtime.requests.async_stream import AsyncStream
from megatron_runtime.requests.request import DynamicInferenceRequestRecord
from megatron_runtime.requests.sampling_params import SamplingParams
from megatron_runtime.transport.control_link import ControlCalls, ControlRefusedError
from megatron_runtime.transport.peer_link import (
    CoordinatorUnreachableError,
    HandshakeRefusedError,
    PeerLink,
    coordinator_address,
)
from megatron_runtime.transport.security import PeerKeys

__all__ = [
    "ControlRefusedError",
    "CoordinatorUnreachableError",
    "DeadlineExceededError",
    "EngineFailedError",
    "HandshakeRefusedError",
    "InferenceClient",
    "InvalidRequestError",
    "ModelChangedError",
    "QueueFullError",
    "RequestRejectedError",
    "RequestTooLargeError",
    "UnavailableError",
]

logger = logging.getLogger(__name__)

T = TypeVar("T")

DEADLINE_MARGIN_SECONDS = 5.0
"""Beyond a request's deadline: by then the coordinator has said that its time is up, unless there is none."""


class InferenceClient(EngineVerbs):
    """Connects one DEALER to a coordinator and keeps it registered, across restarts of the coordinator.

    The connection lives on the event loop of start(). Requests and verbs may come from any other running loop, too:
    their futures and streams then belong to that loop. Requests may be added before start() and while the coordinator
    is away: they are submitted when it is there, with the tokens they already have.

    inference_coordinator_port: a port on this machine, "host:port" or "tcp://host:port".
    deserialize: what a future gives: None a DynamicInferenceRequestRecord, True its merged request, False a map.
    keys:        for a coordinator with CURVE keys.
    name:        stable identity; None makes one up.
    model:       hash of the model that requests are made for; engines of another do not answer them. Empty: any.
    """

    def __init__(
        self,
        inference_coordinator_port: int | str,
        *,
        deserialize: bool | None = None,
        keys: PeerKeys | None = None,
        name: str | None = None,
        model: str = "",
    ) -> None:
        self.completion_futures: dict[int, asyncio.Future[Any]] = {}
        self.streams: dict[int, AsyncStream] = {}
        self.next_request_id = 0
        self.stale_partials = 0
        self._deserialize = deserialize
        self._name = name or f"client-{uuid.uuid4().hex[:12]}"
        self._open: dict[bytes, PendingRequest] = {}
        self._by_id: dict[int, PendingRequest] = {}
        self._max_message_bytes = limits.MAX_CLIENT_MESSAGE_BYTES
        self._link = PeerLink(
            coordinator_address(inference_coordinator_port),
            keys=keys,
            hello=lambda incarnation: Hello(role=Role.CLIENT, name=self._name, incarnation=incarnation, model=model),
            on_ack=self._on_ack,
            on_message=self._on_message,
        )
        self._calls = ControlCalls(self._link.send, address=self._link.address)
        self.listener_task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ids = threading.Lock()
        self._ever_registered = False
        self._stopped = False

    @property
    def context(self) -> zmq.Context[zmq.Socket[bytes]]:
        return self._link.context

    @property
    def socket(self) -> zmq.Socket[bytes] | None:
        return self._link.socket

    @property
    def connected(self) -> bool:
        """The coordinator knows this client and has spoken within the last seconds."""
        return self._link.registered

    async def start(self, loop: asyncio.AbstractEventLoop | None = None, connect_timeout_seconds: float = 30.0) -> None:
        """Connect and register. With a timeout of 0 it returns at once and connects in the background.

        loop: where the connection lives; None means the loop of the caller.

        Raises:
            CoordinatorUnreachableError: nobody answered in time; the client is then closed for good.
            HandshakeRefusedError: the coordinator refused.
        """
        self._loop = loop or asyncio.get_running_loop()
        if self._loop is asyncio.get_running_loop():
            await self._start(connect_timeout_seconds)
        else:
            starting = asyncio.run_coroutine_threadsafe(self._start(connect_timeout_seconds), self._loop)
            await asyncio.wrap_future(starting)

    async def _start(self, connect_timeout_seconds: float) -> None:
        await self._connect_with_inference_coordinator(connect_timeout_seconds)
        self.listener_task = asyncio.create_task(self._recv_task(), name=f"{self._name} listens")
        self.listener_task.add_done_callback(lambda _: self._stop())

    async def _connect_with_inference_coordinator(self, connect_timeout_seconds: float = 30.0) -> None:
        """Open the connection, say HELLO, and wait for the coordinator to acknowledge it. The first step of start()."""
        await self._link.start(connect_timeout_seconds=connect_timeout_seconds)

    async def _recv_task(self) -> None:
        """Lasts while the client listens. Messages are handled as they come, not here; but whoever cancels this task,
        as the end of its loop does, stops the client.
        """
        await asyncio.get_running_loop().create_future()

    def stop(self) -> None:
        """Leave: pending futures are cancelled, open streams end, the coordinator aborts what is open. Idempotent."""
        if self._loop is not None and self._loop.is_running() and not self._is_home():
            asyncio.run_coroutine_threadsafe(called(self._stop), self._loop).result()
        else:
            self._stop()

    def _stop(self) -> None:
        if self._stopped:
            return
        self._stopped = True
        if self.listener_task is not None and self._loop is not None and not self._loop.is_closed():
            self.listener_task.cancel()
        for request in list(self._open.values()):
            self._forget(request)
            self._end(request)
        self._calls.close()
        self._link.close("client stopped")

    def _is_home(self) -> bool:
        """Called where the connection lives. Before start() that is everywhere."""
        return self._loop is None or running_loop() is self._loop

    def _at_home(self, action: Callable[[], object]) -> None:
        """Run `action` where the connection lives: now, or as soon as that loop turns."""
        if self._is_home() or self._loop is None or not self._loop.is_running():
            action()
        else:
            self._loop.call_soon_threadsafe(action)

    # --- requests -----------------------------------------------------------------------------------------------

    def add_request(
        self,
        prompt: str | Sequence[int],
        sampling_params: SamplingParams,
        *,
        deadline_seconds: float | None = None,
        engine: str = "",
        tenant: str = "",
    ) -> asyncio.Future[Any]:
        """Submit now. The future gives the answer, or raises RequestRejectedError; cancelling it aborts the request.

        prompt:           token ids, shape [n]; text only where the coordinator has a tokenizer.
        deadline_seconds: after that the coordinator gives the request up.
        engine:           name of the one engine that may answer; the request fails with it. Empty: any.
        tenant:           whose share of the engines the request counts against, an opaque text of at most 64
                          characters. Empty: this client's.
        """
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        request = self._new_request(
            prompt,
            sampling_params,
            streaming=False,
            deadline_seconds=deadline_seconds,
            engine=engine,
            tenant=tenant,
        )
        request.future = future
        future.add_done_callback(lambda done: self.abort_request(request.request_id) if done.cancelled() else None)
        self._at_home(lambda: self._submit(request))
        return future

    def add_request_streaming(
        self,
        prompt: str | Sequence[int],
        sampling_params: SamplingParams,
        *,
        deadline_seconds: float | None = None,
        engine: str = "",
        tenant: str = "",
    ) -> AsyncStream:
        """Submit now. The stream gives `{"partial": {"request_id", "new_tokens", …}}` …, then `{"final": reply}`.

        A partial has "new_log_probs" and "new_top_n_logprobs" where they were asked for, the first one also
        "prompt_log_probs" and "prompt_top_n_logprobs". Sets `streaming` on the caller's parameters. Closing the stream
        aborts the request. The arguments are those of add_request().
        """
        sampling_params.streaming = True
        request = self._new_request(
            prompt,
            sampling_params,
            streaming=True,
            deadline_seconds=deadline_seconds,
            engine=engine,
            tenant=tenant,
        )
        reader = None if self._is_home() else running_loop()
        request.stream = AsyncStream(request.request_id, self.abort_request, loop=reader)
        self._at_home(lambda: self._submit(request))
        return request.stream

    def abort_request(self, request_id: int) -> None:
        """Forget a request and tell the coordinator. An unknown or finished id is ignored."""
        self._at_home(lambda: self._abort(request_id))

    def _abort(self, request_id: int) -> None:
        request = self._by_id.get(request_id)
        if request is None:
            return
        self._forget(request)
        self._link.send(Abort(request.uid).to_frames())
        self._end(request)

    def _new_request(self, prompt: str | Sequence[int], params: SamplingParams, **options: Any) -> PendingRequest:
        request = PendingRequest.make(prompt, params, **options)
        with self._ids:
            request.request_id = self.next_request_id
            self.next_request_id += 1
        return request

    def _submit(self, request: PendingRequest) -> None:
        if request.future is not None:
            if request.future.done():  # cancelled before it came here
                return
            self.completion_futures[request.request_id] = request.future
        if request.stream is not None:
            if request.stream.finished:
                return
            self.streams[request.request_id] = request.stream
        self._open[request.uid] = request
        self._by_id[request.request_id] = request
        if self._stopped:
            self._reject(request, rejection(ErrorCode.UNAVAILABLE, "this client was stopped"))
        elif request.size > self._max_message_bytes - limits.MAX_NAME_BYTES:
            message = f"the request takes {request.size} bytes: at most {self._max_message_bytes}"
            self._reject(request, rejection(ErrorCode.TOO_LARGE, message))
        else:
            self._watch_deadline(request)
            self._link.send(request.submit().to_frames())

    def _watch_deadline(self, request: PendingRequest) -> None:
        """A coordinator that is away ends nothing: some time after the deadline the client does."""
        if request.deadline is None:
            return
        seconds = request.deadline - time.perf_counter() + DEADLINE_MARGIN_SECONDS
        message = f"no answer within the deadline; no coordinator at {self._link.address} said why"

        def expire() -> None:
            if request.uid in self._open:
                self._link.send(Abort(request.uid).to_frames())
                self._reject(request, rejection(ErrorCode.DEADLINE, message))

        request.timer = asyncio.get_running_loop().call_later(seconds, expire)

    def _forget(self, request: PendingRequest) -> None:
        if request.timer is not None:
            request.timer.cancel()
        self._open.pop(request.uid, None)
        self._by_id.pop(request.request_id, None)
        self.completion_futures.pop(request.request_id, None)
        self.streams.pop(request.request_id, None)

    def _end(self, request: PendingRequest) -> None:
        """Without an answer and without an error."""
        if request.future is not None:
            cancel(request.future)
        if request.stream is not None:
            request.stream.finish()

    def _reject(self, request: PendingRequest, error: Exception) -> None:
        self._forget(request)
        if request.future is not None:
            settle(request.future, error=error)
        if request.stream is not None:
            request.stream.finish(error)

    # --- answers ------------------------------------------------------------------------------------------------

    def _on_ack(self, ack: HelloAck, forgotten: bool) -> None:
        self._max_message_bytes = ack.max_message_bytes
        if forgotten or not self._ever_registered:
            for request in list(self._open.values()):
                self._link.send(request.submit().to_frames())
            self._calls.resend()
        self._ever_registered = True

    def _on_message(self, message: Message) -> None:
        match message:
            case Partial():
                self._on_partial(message)
            case Final():
                self._on_final(message)
            case Error(uid=bytes() as uid):
                request = self._open.get(uid)
                if request is not None:
                    self._reject(request, rejection(message.code, message.message, message.retry_after_seconds))
            case _:
                if not self._calls.handle(message) and isinstance(message, Error):
                    logger.warning("the coordinator refused a message: %s %s", message.code.name, message.message)

    def _on_partial(self, message: Partial) -> None:
        for request, frame in partial_frames(message, self._open.get):
            if frame is None:
                self.stale_partials += 1
            elif request.stream is not None:
                request.stream.put({"partial": frame})

    def _on_final(self, message: Final) -> None:
        request = self._open.get(message.uid)
        if request is None:
            return
        try:
            reply = request.reply(message)
            result = self._result(reply) if request.stream is None else reply
        except (MalformedMessageError, ValueError, TypeError, KeyError) as error:
            logger.exception("the answer to request %d cannot be read", request.request_id)
            self._reject(request, rejection(ErrorCode.ENGINE_FAILED, f"unreadable answer: {error}"))
            return
        self._forget(request)
        if request.future is not None:
            settle(request.future, result=result)
        if request.stream is not None:
            request.stream.put({"final": reply})
            request.stream.finish()

    def _result(self, reply: dict[str, Any]) -> Any:
        if self._deserialize is False:
            return reply
        record = DynamicInferenceRequestRecord.from_reply(reply)
        return record.merge() if self._deserialize else record

    # --- control ------------------------------------------------------------------------------------------------

    def shutdown_coordinator(self) -> None:
        """End the coordinator. Taken on the one port of a library's coordinator only: a cluster's is not a client's."""
        self._at_home(lambda: self._link.send([pack([int(Header.SHUTDOWN)])]))

    def status(self, *, timeout_seconds: float = 5.0) -> asyncio.Future[StatusReply]:
        return self._call(lambda: self._calls.status(timeout_seconds=timeout_seconds))

    def _send_signal_to_engines(self, signal: Header, **options: Any) -> asyncio.Future[ControlAck]:
        if signal not in CONTROLS:
            raise ValueError(f"signal {signal!r}: want one of {', '.join(sorted(header.name for header in CONTROLS))}")
        control = Control(kind=Header(signal), **options)
        return self._call(lambda: self._calls.control(control))

    def _call(self, send: Callable[[], asyncio.Future[T]]) -> asyncio.Future[T]:
        if self._is_home() or self._loop is None:
            return send()
        answer = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(awaited(send), self._loop))
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody has to await it
        return answer
