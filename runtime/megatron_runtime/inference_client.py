"""The client of a coordinator: submit requests, stream their tokens, send control messages. No torch."""

from __future__ import annotations

import asyncio
import importlib
import logging
import secrets
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import zmq

from megatron_runtime.async_stream import AsyncStream
from megatron_runtime.control_link import ControlCalls, ControlRefusedError
from megatron_runtime.peer_link import (
    CoordinatorUnreachableError,
    HandshakeRefusedError,
    PeerLink,
    coordinator_address,
)
from megatron_runtime.sampling_params import SamplingParams
from megatron_runtime.wire import limits
from megatron_runtime.wire.headers import ErrorCode, Header, Role
from megatron_runtime.wire.messages import (
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
    RequestMeta,
    StatusReply,
    Submit,
    pack,
    tokens_from_bytes,
    tokens_to_bytes,
    unpack,
)
from megatron_runtime.wire.security import PeerKeys

__all__ = [
    "ControlRefusedError",
    "CoordinatorUnreachableError",
    "HandshakeRefusedError",
    "InferenceClient",
    "RequestRejectedError",
]

logger = logging.getLogger(__name__)

_REPLY_DEFAULTS: dict[str, Any] = {
    "status": "COMPLETED",
    "finish_reason": None,
    "stop_reason": None,
    "generated_text": None,
    "prompt_length": None,
    "generated_length": None,
    "num_cached_tokens": 0,
    "generated_log_probs": None,
    "policy_epoch": None,
    "kv_cache_epoch": None,
    "error": None,
}


class RequestRejectedError(Exception):
    """The coordinator refused a request, or gave it up.

    code: 400 invalid, 413 too large, 429 queue full, 503 paused with Reject or stopped, 504 its time is up.
    """

    def __init__(self, code: int, message: str, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.retry_after_seconds = retry_after_seconds


@dataclass(slots=True, eq=False)
class _OpenRequest:
    """A request without a final answer. `generated` is what partials brought, and what a new coordinator is told."""

    request_id: int
    uid: bytes
    meta: RequestMeta
    prompt: bytes
    params: bytes
    sampling_params: SamplingParams
    submitted: float
    future: asyncio.Future[Any] | None = None
    stream: AsyncStream | None = None
    deadline: float | None = None
    generated: bytearray = field(default_factory=bytearray)


class InferenceClient:
    """Connects one DEALER to a coordinator and keeps it registered, across restarts of the coordinator.

    Everything runs on the event loop of start(); no method may be called from another thread. Requests may be added
    before start() and while the coordinator is away: they are submitted when it is there.

    inference_coordinator_port: a port on this machine, "host:port" or "tcp://host:port".
    deserialize: what a future gives: None a DynamicInferenceRequestRecord, True its merged request, False a map.
    keys:        for a coordinator with CURVE keys.
    name:        stable identity; None makes one up.
    """

    def __init__(
        self,
        inference_coordinator_port: int | str,
        *,
        deserialize: bool | None = None,
        keys: PeerKeys | None = None,
        name: str | None = None,
    ) -> None:
        self.completion_futures: dict[int, asyncio.Future[Any]] = {}
        self.streams: dict[int, AsyncStream] = {}
        self.next_request_id = 0
        self.stale_partials = 0
        self._deserialize = deserialize
        self._name = name or f"client-{uuid.uuid4().hex[:12]}"
        self._open: dict[bytes, _OpenRequest] = {}
        self._by_id: dict[int, _OpenRequest] = {}
        self._max_message_bytes = limits.MAX_CLIENT_MESSAGE_BYTES
        self._link = PeerLink(
            coordinator_address(inference_coordinator_port),
            keys=keys,
            hello=lambda incarnation: Hello(role=Role.CLIENT, name=self._name, incarnation=incarnation),
            on_ack=self._on_ack,
            on_message=self._on_message,
        )
        self._calls = ControlCalls(self._link.send, address=self._link.address)
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

        Raises:
            CoordinatorUnreachableError: nobody answered in time; the client is then closed for good.
            HandshakeRefusedError: the coordinator refused.
        """
        await self._link.start(loop=loop, connect_timeout_seconds=connect_timeout_seconds)

    def stop(self) -> None:
        """Leave: pending futures are cancelled, open streams end, the coordinator aborts what is open. Idempotent."""
        self._stopped = True
        for request in list(self._open.values()):
            self._forget(request)
            if request.future is not None:
                request.future.cancel()
            if request.stream is not None:
                request.stream.finish()
        self._calls.close()
        self._link.close("client stopped")

    # --- requests -----------------------------------------------------------------------------------------------

    def add_request(
        self,
        prompt: str | Sequence[int],
        sampling_params: SamplingParams,
        *,
        deadline_seconds: float | None = None,
    ) -> asyncio.Future[Any]:
        """Submit now. The future gives the answer, or raises RequestRejectedError; cancelling it aborts the request.

        prompt:           token ids, shape [n]; text only where the coordinator has a tokenizer.
        deadline_seconds: after that the coordinator gives the request up.
        """
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        request = self._new_request(prompt, sampling_params, streaming=False, deadline_seconds=deadline_seconds)
        request.future = future
        self.completion_futures[request.request_id] = future
        future.add_done_callback(lambda done: self.abort_request(request.request_id) if done.cancelled() else None)
        self._submit(request)
        return future

    def add_request_streaming(
        self,
        prompt: str | Sequence[int],
        sampling_params: SamplingParams,
        *,
        deadline_seconds: float | None = None,
    ) -> AsyncStream:
        """Submit now. The stream gives `{"partial": {"request_id", "new_tokens", …}}` …, then `{"final": reply}`.

        Sets `streaming` on the caller's parameters. Closing the stream aborts the request.
        """
        sampling_params.streaming = True
        request = self._new_request(prompt, sampling_params, streaming=True, deadline_seconds=deadline_seconds)
        request.stream = AsyncStream(request.request_id, self.abort_request)
        self.streams[request.request_id] = request.stream
        self._submit(request)
        return request.stream

    def abort_request(self, request_id: int) -> None:
        """Forget a request and tell the coordinator. An unknown or finished id is ignored."""
        request = self._by_id.get(request_id)
        if request is None:
            return
        self._forget(request)
        self._link.send(Abort(request.uid).to_frames())
        if request.future is not None:
            request.future.cancel()
        if request.stream is not None:
            request.stream.finish()

    def _new_request(
        self,
        prompt: str | Sequence[int],
        sampling_params: SamplingParams,
        *,
        streaming: bool,
        deadline_seconds: float | None,
    ) -> _OpenRequest:
        text = isinstance(prompt, str)
        body = prompt.encode() if isinstance(prompt, str) else tokens_to_bytes(prompt)
        seed = sampling_params.seed if sampling_params.seed is not None else secrets.randbits(64)
        now = time.perf_counter()
        request = _OpenRequest(
            request_id=self.next_request_id,
            uid=secrets.token_bytes(limits.UID_BYTES),
            meta=RequestMeta(streaming=streaming, seed=seed, text=text),
            prompt=body,
            params=pack(sampling_params.serialize()),
            sampling_params=sampling_params,
            submitted=now,
            deadline=now + deadline_seconds if deadline_seconds is not None else None,
        )
        self.next_request_id += 1
        return request

    def _submit(self, request: _OpenRequest) -> None:
        self._open[request.uid] = request
        self._by_id[request.request_id] = request
        size = len(request.prompt) + len(request.params)
        if self._stopped:
            self._reject(request, RequestRejectedError(int(ErrorCode.UNAVAILABLE), "this client was stopped"))
        elif size > self._max_message_bytes - limits.MAX_NAME_BYTES:
            message = f"the request takes {size} bytes: at most {self._max_message_bytes}"
            self._reject(request, RequestRejectedError(int(ErrorCode.TOO_LARGE), message))
        else:
            self._send_submit(request)

    def _send_submit(self, request: _OpenRequest) -> None:
        meta = request.meta
        if request.deadline is not None:
            left = max(0, int((request.deadline - time.perf_counter()) * 1000))
            meta = RequestMeta(meta.streaming, meta.seed, left, meta.text)
        self._link.send(Submit(request.uid, meta, request.prompt, bytes(request.generated), request.params).to_frames())

    def _forget(self, request: _OpenRequest) -> None:
        self._open.pop(request.uid, None)
        self._by_id.pop(request.request_id, None)
        self.completion_futures.pop(request.request_id, None)
        self.streams.pop(request.request_id, None)

    def _reject(self, request: _OpenRequest, error: Exception) -> None:
        self._forget(request)
        if request.future is not None and not request.future.done():
            request.future.set_exception(error)
        if request.stream is not None:
            request.stream.finish(error)

    # --- answers ------------------------------------------------------------------------------------------------

    def _on_ack(self, ack: HelloAck, forgotten: bool) -> None:
        self._max_message_bytes = ack.max_message_bytes
        if forgotten or not self._ever_registered:
            for request in list(self._open.values()):
                self._send_submit(request)
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
                    error = RequestRejectedError(int(message.code), message.message, message.retry_after_seconds)
                    self._reject(request, error)
            case _:
                if not self._calls.handle(message) and isinstance(message, Error):
                    logger.warning("the coordinator refused a message: %s %s", message.code.name, message.message)

    def _on_partial(self, message: Partial) -> None:
        extras = _extras(message.extras)
        position = 0
        for entry in message.entries:
            tokens = message.tokens[position : position + 4 * entry.count]
            position += len(tokens)
            request = self._open.get(entry.uid)
            if request is None or request.stream is None:
                continue
            held = len(request.generated) // 4
            if entry.offset > held:
                # What lies between was lost with a connection. The coordinator sends it anew once it has the SUBMIT
                # that follows each renewed registration and says what is held here.
                self.stale_partials += 1
                continue
            new = tokens[4 * (held - entry.offset) :]
            if not new:
                self.stale_partials += 1
                continue
            request.generated += new
            frame: dict[str, Any] = {"request_id": request.request_id, "new_tokens": tokens_from_bytes(new).tolist()}
            details = extras.get(entry.uid)
            if isinstance(details, dict) and len(new) == len(tokens):
                frame.update({f"new_{key}": value for key, value in details.items()})
            request.stream.put({"partial": frame})

    def _on_final(self, message: Final) -> None:
        request = self._open.get(message.uid)
        if request is None:
            return
        self._forget(request)
        try:
            reply = self._reply(request, message)
            result = self._result(reply) if request.stream is None else reply
        except (MalformedMessageError, ValueError, TypeError, KeyError) as error:
            logger.exception("the answer to request %d cannot be read", request.request_id)
            self._reject(request, RequestRejectedError(int(ErrorCode.ENGINE_FAILED), f"unreadable answer: {error}"))
            return
        if request.future is not None and not request.future.done():
            request.future.set_result(result)
        if request.stream is not None:
            request.stream.put({"final": reply})
            request.stream.finish()

    def _reply(self, request: _OpenRequest, message: Final) -> dict[str, Any]:
        body = unpack(message.reply)
        if not isinstance(body, dict):
            raise MalformedMessageError(f"reply is {type(body).__name__}: want a map")
        tokens: list[int] = np.frombuffer(message.tokens, dtype="<i4").tolist()
        reply = {**_REPLY_DEFAULTS, **body, "request_id": request.request_id, "generated_tokens": tokens}
        if reply["generated_length"] is None:
            reply["generated_length"] = len(tokens)
        if reply["prompt_length"] is None and not request.meta.text:
            reply["prompt_length"] = len(request.prompt) // 4
        if request.sampling_params.return_prompt_tokens and not request.meta.text:
            reply["prompt_tokens"] = tokens_from_bytes(request.prompt).tolist()
        reply["latency"] = time.perf_counter() - request.submitted
        return reply

    def _result(self, reply: dict[str, Any]) -> Any:
        if self._deserialize is False:
            return reply
        # Loaded by name: the class that it gives has tensor fields, and who wants maps needs no torch.
        requests = importlib.import_module("megatron_runtime.inference_request")
        record = requests.DynamicInferenceRequestRecord.from_reply(reply)
        return record.merge() if self._deserialize else record

    # --- control ------------------------------------------------------------------------------------------------

    def pause_engines(self, **options: Any) -> asyncio.Future[ControlAck]:
        """Freeze generation. The future gives the confirmed answer when every engine has paused.

        All verbs take `operation_id`, `fence`, `timeout_seconds` and `expected_engines`; their futures raise
        ControlRefusedError, or CoordinatorUnreachableError when no answer came. They are sent by the call itself.
        A coordinator with three ports takes them on its admin port only: see ControlLink.
        """
        return self._control(Header.PAUSE, options)

    def unpause_engines(self, **options: Any) -> asyncio.Future[ControlAck]:
        """Generate again, from where it was."""
        return self._control(Header.UNPAUSE, options)

    def suspend_engines(self, **options: Any) -> asyncio.Future[ControlAck]:
        """Give memory back. Legal when paused."""
        return self._control(Header.SUSPEND, options)

    def resume_engines(self, **options: Any) -> asyncio.Future[ControlAck]:
        """Take memory again; the engines are paused then."""
        return self._control(Header.RESUME, options)

    def stop_engines(self, **options: Any) -> asyncio.Future[ControlAck]:
        """End the engines; what is open is answered with an error. Legal when paused or suspended."""
        return self._control(Header.STOP, options)

    def set_generation_epoch(self, epoch: int, **options: Any) -> asyncio.Future[ControlAck]:
        """Label the tokens sampled from now on with `epoch`."""
        return self._control(Header.SET_GENERATION_EPOCH, {**options, "epoch": epoch})

    def drain(self, engine: str | None = None, **options: Any) -> asyncio.Future[ControlAck]:
        """Give no more work to `engine` (None: to all); confirmed when it has nothing in flight."""
        return self._control(Header.DRAIN, {**options, "engine": engine})

    def status(self, *, timeout_seconds: float = 5.0) -> asyncio.Future[StatusReply]:
        return self._calls.status(timeout_seconds=timeout_seconds)

    def _control(self, kind: Header, options: dict[str, Any]) -> asyncio.Future[ControlAck]:
        return self._calls.control(Control(kind=kind, **options))


def _extras(data: bytes) -> dict[Any, Any]:
    if not data:
        return {}
    extras = unpack(data)
    return extras if isinstance(extras, dict) else {}
