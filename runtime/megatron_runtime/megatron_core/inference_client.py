"""`InferenceClient`, and the errors that it raises. The module path is the same as in Megatron-Core."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Coroutine, Generator, Iterable, Sequence
from typing import Any, Unpack

import zmq

from megatron_runtime.client.coordinator_client import CoordinatorClient, RequestOptions
from megatron_runtime.client.pending import Serializable, running_loop
from megatron_runtime.client.rejection import (
    AdapterNotFoundError,
    DeadlineExceededError,
    InvalidRequestError,
    ModelChangedError,
    QueueFullError,
    RequestFailedError,
    RequestRejectedError,
    RequestTooLargeError,
    UnavailableError,
    UnsupportedByBackendError,
)
from megatron_runtime.megatron_core._plain_coordinator import GreetingSocket
from megatron_runtime.protocol import limits
from megatron_runtime.protocol.adapters import Adapter, AdapterList
from megatron_runtime.protocol.headers import CONTROLS, Header
from megatron_runtime.protocol.messages import Control, ControlAck, Frames, StatusReply, pack
from megatron_runtime.requests.async_stream import AsyncStream, BlockingStream
from megatron_runtime.requests.request import DynamicInferenceRequestRecord
from megatron_runtime.requests.sampling_params import SamplingParams
from megatron_runtime.transport.addresses import coordinator_address
from megatron_runtime.transport.control_calls import ControlRejectedError
from megatron_runtime.transport.peer_link import CoordinatorUnreachableError, HandshakeRejectedError
from megatron_runtime.transport.security import PeerKeys

__all__ = [
    "AdapterNotFoundError",
    "ControlRejectedError",
    "CoordinatorUnreachableError",
    "DeadlineExceededError",
    "HandshakeRejectedError",
    "InferenceClient",
    "InvalidRequestError",
    "ModelChangedError",
    "QueueFullError",
    "RequestFailedError",
    "RequestRejectedError",
    "RequestTooLargeError",
    "UnavailableError",
    "UnsupportedByBackendError",
]


class InferenceClient:
    """A client for a coordinator of this project or of Megatron-Core, with one libzmq DEALER socket.

    The constructor connects, and start() registers. The connection belongs to the event loop of start(). Callers on
    other running loops can also add requests and send signals, and get futures and streams of their own loop. Callers
    can add requests before start() and while the coordinator is down. The client submits these requests at the next
    registration. A request that has already received tokens is submitted with these tokens.

    inference_coordinator_port: a port on this host, "host:port" or "tcp://host:port".
    inference_coordinator_address: the same value, under the name in Megatron-Core's releases.
    deserialize: the result type of a future. None: a DynamicInferenceRequestRecord; True: the record merged to one
                 request; False: a map. With inference_coordinator_address, None means False, as in Megatron-Core 0.17
                 and later.
    records:     whether the engine also returns the text and the times of an answer. None: yes, unless `deserialize` is
                 False.
    keys:        keys for a coordinator that uses CURVE.
    name:        identity of the client; None: a random name.
    model:       hash of the model that must answer the requests. Engines with another model get no requests. Empty: any
                 model.
    """

    def __init__(
        self,
        inference_coordinator_port: int | str | None = None,
        deserialize: bool | None = None,
        *,
        inference_coordinator_address: str | None = None,
        records: bool | None = None,
        keys: PeerKeys | None = None,
        name: str | None = None,
        model: str = "",
    ) -> None:
        if (inference_coordinator_port is None) == (inference_coordinator_address is None):
            raise TypeError(
                f"inference_coordinator_port {inference_coordinator_port!r} and inference_coordinator_address "
                f"{inference_coordinator_address!r}: give one of them"
            )
        where = inference_coordinator_port
        if where is None:
            where, deserialize = inference_coordinator_address, bool(deserialize)
        assert where is not None
        address = coordinator_address(where)
        self.listener_task: asyncio.Task[None] | None = None
        self._starting: asyncio.Task[None] | None = None
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        early = self._dealer(address, keys)
        self.socket: zmq.Socket[bytes] | None = early
        self._early: tuple[zmq.Socket[bytes], PeerKeys | None] | None = early, keys
        """The socket that the constructor has opened, with its keys, until the native client uses it."""
        # A context waits forever if it is garbage-collected while a socket of it is open.
        self._close_early = weakref.finalize(self, early.close, 0)
        self._deserialize = deserialize
        self.native = CoordinatorClient(
            address,
            keys=keys,
            name=name,
            model=model,
            records=deserialize is not False if records is None else records,
            read_reply=self._result,
            open_socket=self._open_socket,
            on_stopped=self._on_stopped,
        )
        """The client of this project's protocol, to which this object delegates requests and signals."""

    @property
    def next_request_id(self) -> int:
        """The id of the next request."""
        return self.native.next_request_id

    @property
    def completion_futures(self) -> dict[int, asyncio.Future[Any]]:
        """The futures of the open requests, by request id."""
        requests = self.native.requests.copy()
        return {number: request.future for number, request in requests.items() if request.future is not None}

    @property
    def streams(self) -> dict[int, AsyncStream | BlockingStream]:
        """The streams of the open requests, by request id."""
        requests = self.native.requests.copy()
        return {number: request.stream for number, request in requests.items() if request.stream is not None}

    @property
    def connected(self) -> bool:
        """Whether the client is registered and has received a message from the coordinator in the last few seconds."""
        return self.native.connected

    @property
    def adapters(self) -> AdapterList:
        """The adapters that requests can name, as last reported by the coordinator."""
        return self.native.adapters

    # --- the connection -----------------------------------------------------------------------------------------

    def _dealer(self, address: str, keys: PeerKeys | None) -> zmq.Socket[bytes]:
        socket = self.context.socket(zmq.DEALER)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RECONNECT_IVL, 100)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        socket.setsockopt(zmq.MAXMSGSIZE, limits.MAX_ENGINE_MESSAGE_BYTES)
        if keys is not None:
            socket.curve_publickey = keys.own.public
            socket.curve_secretkey = keys.own.secret
            socket.curve_serverkey = keys.server_public
        socket.connect(address)
        return socket

    def _open_socket(
        self,
        address: str,
        on_message: Callable[[Frames], None],
        /,
        *,
        keys: PeerKeys | None,
        on_lost: Callable[[str], None],
        **_: object,
    ) -> GreetingSocket:
        early, self._early = self._early, None
        if early is not None and early[1] == keys:
            self._close_early.detach()
            self.socket = early[0]
        else:
            self._close_early()
            self.socket = self._dealer(address, keys)
        return GreetingSocket(self.socket, on_message, on_lost)

    def _on_stopped(self) -> None:
        if self.listener_task is not None and not self.listener_task.get_loop().is_closed():
            self.listener_task.cancel()
        self.socket = None
        if self._early is not None:
            self._early = None
            self._close_early()
        self.context.term()

    # --- start and stop -----------------------------------------------------------------------------------------

    def start(
        self, loop: asyncio.AbstractEventLoop | None = None, connect_timeout_seconds: float = 30.0
    ) -> Coroutine[Any, Any, None]:
        """Register at the coordinator. Return a coroutine that finishes after the registration. Idempotent.

        The caller can await the coroutine or ignore it. The registration begins immediately on the running event loop,
        or on `loop` if the caller runs on no event loop. If there is neither a running loop nor `loop`, the
        registration begins when the coroutine is awaited. If the timeout is 0, the client registers in the background.

        With a coordinator of Megatron-Core, the client uses Megatron-Core's protocol. Such a coordinator confirms no
        signals and sends no heartbeats. When the coordinator exits, open requests raise UnavailableError.

        loop: the event loop of the connection; None: the caller's loop.

        Raises:
            CoordinatorUnreachableError: no answer within the timeout. The client is closed and cannot be started again.
            HandshakeRejectedError: immediately, if the coordinator rejects HELLO or the peer is not a coordinator.
        """

        def begin(home: asyncio.AbstractEventLoop) -> asyncio.Task[None]:
            if self._starting is None:
                self._starting = home.create_task(self._start(loop, connect_timeout_seconds))
            return self._starting

        return _Starting(begin, loop)

    async def _start(self, loop: asyncio.AbstractEventLoop | None, connect_timeout_seconds: float) -> None:
        async def connect_and_listen() -> None:
            await self._connect_with_inference_coordinator(connect_timeout_seconds)
            if self.socket is not None:  # stop() was not called
                self.listener_task = asyncio.create_task(self._recv_task(), name="inference client listens")
                self.listener_task.add_done_callback(lambda _: self.native.stop())

        if loop is None or loop is asyncio.get_running_loop():
            await connect_and_listen()
        else:
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(connect_and_listen(), loop))

    async def _connect_with_inference_coordinator(self, connect_timeout_seconds: float = 30.0) -> None:
        """Open the connection, send CONNECT and then HELLO, and wait for the answers. start() calls this method."""
        await self.native.start(connect_timeout_seconds=connect_timeout_seconds)

    async def _recv_task(self) -> None:
        """Wait until the client stops. The client stops if this task is cancelled or its event loop is closed.

        This task handles no messages, because callbacks handle the messages.
        """
        await asyncio.get_running_loop().create_future()

    def stop(self, error: Callable[[], Exception] | None = None, *, is_lost: bool = False) -> None:
        """Disconnect, and end the futures and streams of open requests.

        The coordinator aborts these requests. Idempotent.

        error:   called for each open request. The future or stream of the request raises the error that the call
                 returns. None: futures are cancelled and streams end.
        is_lost: whether the coordinator has exited. If so, the client does not wait until DISCONNECT has been sent.
        """
        self.native.stop(error, is_lost=is_lost)

    # --- requests -----------------------------------------------------------------------------------------------

    def _result(self, reply: dict[str, Any], params: SamplingParams) -> Any:
        if self._deserialize is False:
            return reply
        # An engine may return its own version of the parameters, which may be invalid.
        record = DynamicInferenceRequestRecord.from_reply(
            {name: value for name, value in reply.items() if name not in ("sampling_params", "inference_parameters")}
        )
        record[0].sampling_params = params
        return record.merge() if self._deserialize else record

    def add_request(
        self,
        prompt: str | Sequence[int],
        sampling_params: Serializable,
        multi_modal_data: None = None,
        **options: Unpack[RequestOptions],
    ) -> asyncio.Future[Any]:
        """Submit a request immediately, and return a future for its answer.

        The future returns the answer or raises RequestRejectedError. Cancelling the future aborts the request.

        prompt:  token ids, shape [n], or text, which the engine tokenizes.
        sampling_params: SamplingParams, or another object whose serialize() returns fields of SamplingParams.
        multi_modal_data: must be None. Any other value raises ValueError.
        options: see RequestOptions.
        """
        _require_text(multi_modal_data)
        return self.native.add_request(prompt, sampling_params, **options)

    def add_request_streaming(
        self,
        prompt: str | Sequence[int],
        sampling_params: Serializable,
        multi_modal_data: None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncStream:
        """Submit a request immediately, and return a stream of its answer.

        The stream yields any number of `{"partial": {"request_id", "new_tokens", …}}`, then `{"final": reply}`. The
        method sets `streaming` in the caller's parameters. Closing the stream aborts the request. The arguments are the
        same as for add_request(). See CoordinatorClient.add_request_streaming().
        """
        _require_text(multi_modal_data)
        return self.native.add_request_streaming(prompt, sampling_params, **options)

    def abort_request(self, request_id: int) -> None:
        """Abort a request in this client and at the coordinator.

        An unknown id and the id of a finished request are ignored.
        """
        self.native.abort_request(request_id)

    def add_request_with_kv_handoff(
        self, prompt: str | Sequence[int], sampling_params: SamplingParams, kv_meta: Any, src_block_ids: Sequence[int]
    ) -> asyncio.Future[Any]:
        """Submit a request that reuses the prompt KV of an earlier request. Return a future for the answer.

        The earlier request must have had the sampling parameter `do_kv_handoff`.
        Only this client can use the KV, once and within 50 s. If the KV cannot be used, the engine computes the prompt.

        prompt:  the prompt of the earlier request, optionally followed by more tokens.
        kv_meta: `kv_meta` in `disaggregated_params` of the earlier answer. Any other value is ignored.
        src_block_ids: ignored, because `kv_meta` names the blocks.
        """
        return self.native.add_request(prompt, sampling_params, kv_meta=kv_meta)

    def add_request_with_kv_handoff_streaming(
        self, prompt: str | Sequence[int], sampling_params: SamplingParams, kv_meta: Any, src_block_ids: Sequence[int]
    ) -> AsyncStream:
        """Submit a request like add_request_with_kv_handoff(), and stream its answer like add_request_streaming()."""
        return self.native.add_request_streaming(prompt, sampling_params, kv_meta=kv_meta)

    def release_handoff(self, request_id: int) -> None:
        """Release the KV that an engine keeps after the answer to a request. Do nothing if no engine keeps any."""
        self.native.release_handoff(request_id)

    # --- control signals ----------------------------------------------------------------------------------------

    def shutdown_coordinator(self) -> None:
        """Send SHUTDOWN to the coordinator. Only a coordinator with a single port accepts this message."""
        self.native.send([pack([int(Header.SHUTDOWN)])])

    def status(self, *, timeout_seconds: float = 5.0) -> asyncio.Future[StatusReply]:
        return self.native.status(timeout_seconds=timeout_seconds)

    def pause_engines(self, **options: Any) -> asyncio.Future[ControlAck]:
        """Pause generation. The future returns the coordinator's acknowledgement when every engine has paused.

        All signals accept `operation_id`, `fence`, `timeout_seconds` and `expected_engines`. The call sends the signal
        immediately. The future, which the caller can ignore, raises ControlRejectedError or
        CoordinatorUnreachableError. A coordinator with three ports accepts signals only on its admin port, which the
        operator uses.
        """
        return self._send_signal_to_engines(Header.PAUSE, **options)

    def unpause_engines(self, **options: Any) -> asyncio.Future[ControlAck]:
        """Continue the generation that pause_engines() has paused."""
        return self._send_signal_to_engines(Header.UNPAUSE, **options)

    def suspend_engines(self, **options: Any) -> asyncio.Future[ControlAck]:
        """Release the memory of weights and KV cache. Allowed if the engines are paused."""
        return self._send_signal_to_engines(Header.SUSPEND, **options)

    def resume_engines(self, **options: Any) -> asyncio.Future[ControlAck]:
        """Reallocate the memory that suspend_engines() has released. The engines stay paused."""
        return self._send_signal_to_engines(Header.RESUME, **options)

    def stop_engines(self, **options: Any) -> asyncio.Future[ControlAck]:
        """Stop the engines. Open requests fail. Allowed if the engines are paused or suspended."""
        return self._send_signal_to_engines(Header.STOP, **options)

    def set_generation_epoch(
        self, epoch: int | None = None, *, generation_epoch: int | None = None, **options: Any
    ) -> asyncio.Future[ControlAck]:
        """Label all tokens that are sampled from now on with `epoch`.

        In Megatron-Core 0.17 and later releases of Megatron-Core, the argument is called `generation_epoch`. Raises
        TypeError unless exactly one of the two arguments is set.
        """
        if (epoch is None) is (generation_epoch is None):
            raise TypeError(f"epoch={epoch!r}, generation_epoch={generation_epoch!r}: want one of them")
        epoch = epoch if epoch is not None else generation_epoch
        return self._send_signal_to_engines(Header.SET_GENERATION_EPOCH, **options, epoch=epoch)

    def update_weights(self, source: str, epoch: int, **options: Any) -> asyncio.Future[ControlAck]:
        """Load the weights of `source` into the engines, and label the weights with `epoch`.

        The coordinator acknowledges when every engine has verified and loaded the weights. The KV of requests in flight
        is computed again.

        source: a model reference that every engine can read.
        """
        return self._send_signal_to_engines(Header.UPDATE_WEIGHTS, **options, source=source, epoch=epoch)

    def set_adapters(self, adapters: Iterable[Adapter], **options: Any) -> asyncio.Future[ControlAck]:
        """Replace the LoRA adapters of the engines by `adapters`. The option `adapter` of a request names its adapter.

        The coordinator acknowledges when every engine has loaded the new adapters. Requests in flight finish with their
        old adapter. An adapter that is not in `adapters` is unloaded after these requests have finished. If an engine
        cannot load an adapter, nothing changes.
        """
        adapter_list = AdapterList(tuple(adapters))
        return self._send_signal_to_engines(Header.SET_ADAPTERS, **options, adapters=adapter_list)

    def drain(self, engine: str | None = None, **options: Any) -> asyncio.Future[ControlAck]:
        """Stop dispatching requests to the engine with the name `engine`, or to all engines if `engine` is None.

        The coordinator acknowledges when these engines have no requests in flight.
        """
        return self._send_signal_to_engines(Header.DRAIN, **options, engine=engine)

    def start_cuda_profiler(self, **options: Any) -> asyncio.Future[ControlAck]:
        """Call cudaProfilerStart on every rank. Allowed in any state of the engines.

        Nsight Systems records until stop_cuda_profiler() if it runs the engines with `--capture-range=cudaProfilerApi
        --capture-range-end=repeat`. By default, Nsight Systems also terminates the engines at the end of a recording.
        Without a profiler, nothing is recorded. If an engine has no GPU, the signal fails with ENGINE_FAILED. The
        error message names this engine, which continues to serve.
        """
        return self._send_signal_to_engines(Header.START_CUDA_PROFILER, **options)

    def stop_cuda_profiler(self, **options: Any) -> asyncio.Future[ControlAck]:
        """Call cudaProfilerStop on every rank."""
        return self._send_signal_to_engines(Header.STOP_CUDA_PROFILER, **options)

    def _send_signal_to_engines(self, signal: Header, **options: Any) -> asyncio.Future[ControlAck]:
        """Send a control message immediately. Raises ValueError if `signal` is unknown."""
        if signal not in CONTROLS:
            raise ValueError(f"signal {signal!r}: want one of {', '.join(sorted(header.name for header in CONTROLS))}")
        return self.native.control(Control(kind=Header(signal), **options))


class _Starting(Coroutine[Any, Any, None]):
    """The coroutine that start() returns.

    If there is an event loop, the coroutine runs immediately in a task, without being awaited. It can be awaited on
    another loop.

    begin: returns the task. If the task does not exist, creates the task on the given loop.
    loop:  loop for the task if the caller runs on no loop. None: the task starts when the coroutine is awaited.
    """

    def __init__(
        self, begin: Callable[[asyncio.AbstractEventLoop], asyncio.Task[None]], loop: asyncio.AbstractEventLoop | None
    ) -> None:
        self._begin = begin
        self._task: asyncio.Task[None] | None = None
        self._steps: Generator[Any, Any, None] | None = None
        if (here := running_loop()) is not None:
            self._task = begin(here)
        elif loop is not None and loop.is_running():

            async def begin_there() -> asyncio.Task[None]:
                return begin(loop)

            self._task = asyncio.run_coroutine_threadsafe(begin_there(), loop).result()
        elif loop is not None:
            self._task = begin(loop)

    def __await__(self) -> Generator[Any, Any, None]:
        here = asyncio.get_running_loop()
        task = self._task = self._task or self._begin(here)
        if (loop := task.get_loop()) is here:
            return task.__await__()

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


def _require_text(multi_modal_data: object) -> None:
    if multi_modal_data is not None:
        kind = type(multi_modal_data).__name__
        raise ValueError(f"multi_modal_data of type {kind}: models accept text only: leave it out")
