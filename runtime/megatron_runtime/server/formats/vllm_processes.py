"""Manages the processes that run vllm_worker.py, and repeats calls after the loss of a worker process.

A call is a request of the server to a worker, such as to parse new text. Each worker handles one batch of calls at a
time. Calls that arrive in the meantime form the next batch, so that one message carries the new text of many answers. A
lost worker is replaced. The server then repeats each call of the lost batch in a separate batch. If a second worker is
lost, only the call that it handled fails.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
import subprocess
from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from megatron_runtime.process.children import child_environment, module_command
from megatron_runtime.protocol import strict_json as json
from megatron_runtime.protocol.codec import MalformedMessageError, pack, unpack
from megatron_runtime.server.formats.chat_format import AnswerParserError
from megatron_runtime.server.formats.parser import CallArguments, CallBegin, Event, Reasoning, Text
from megatron_runtime.server.formats.vllm_worker import (
    ARGUMENTS,
    CALL,
    HEADER,
    MESSAGE_LIMITS,
    REASONING,
    SIZE,
    TEXT,
)
from megatron_runtime.tokenization.loader import VLLM_ENVIRONMENT

logger = logging.getLogger(__name__)

START_SECONDS = 300.0
"""Timeout in seconds for importing vLLM and reading the tokenizer, which take about a minute on two loaded cores."""
FORK_SECONDS = 30.0
BATCH_SECONDS = 30.0
"""Timeout of a batch, in seconds. A worker that takes longer is considered lost."""
_GRACE_SECONDS = 2.0
"""The server waits this number of seconds longer than the worker's own alarm, which terminates the worker.

The alarm also terminates a worker whose server has exited.
"""
WORKER_BYTES = 2 << 30
"""Maximum number of bytes of a worker's address space, in addition to the imported modules."""
RENDERERS = 2
"""Number of workers that render conversations. Each worker renders one conversation at a time."""
PARSERS = 2
"""Number of workers that parse answers. Each answer stays with one worker."""
_MAX_BATCH = 256
_ENVIRONMENT: Mapping[str, str] = {**VLLM_ENVIRONMENT, "TOKENIZERS_PARALLELISM": "false"}
_CLASSES: Mapping[int, type[Text | Reasoning | CallArguments]] = {
    TEXT: Text,
    REASONING: Reasoning,
    ARGUMENTS: CallArguments,
}


class UnusableError(RuntimeError):
    """vLLM cannot render conversations and parse answers for this model. The message gives the reason."""


class UnknownSettingError(ValueError):
    """A setting of the server names a parser that the installed vLLM does not have."""


@dataclass(eq=False, slots=True)
class _Call:
    """A call that waits for its reply. losses: number of workers that were lost while they handled the call."""

    message: _Message
    reply: asyncio.Future[dict[str, Any]]
    losses: int = 0


class _Message:
    """A message from the server to a worker process. content() returns its content for the worker with this number."""

    def content(self, worker: int) -> dict[str, Any]:
        raise NotImplementedError


@dataclass(eq=False, slots=True)
class _Render(_Message):
    fields: Mapping[str, Any]

    def content(self, worker: int) -> dict[str, Any]:
        return {"do": "render", **self.fields}


@dataclass(eq=False, slots=True)
class _Parse(_Message):
    answer: VllmAnswer
    piece: tuple[str, bytes]
    is_last: bool

    def content(self, worker: int) -> dict[str, Any]:
        text, tokens = self.piece
        fields = {"do": "parse", "answer": self.answer.key, "text": text, "tokens": tokens, "is_last": self.is_last}
        if self.answer.opened_in != worker:
            fields |= {"opening": self.answer.opening, "earlier": self.answer.earlier}
        return fields


class VllmProcesses:
    """The processes that run vLLM's renderer and parsers: a parent process and the workers that it forks.

    All methods run on one event loop, except render(), which runs in threads.

    setup: as for vllm_worker.Formats.
    """

    def __init__(self, setup: Mapping[str, Any]) -> None:
        self._setup = {**setup, "memory_bytes": WORKER_BYTES}
        self._lock = asyncio.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closed = False
        self.renderers = [_Worker(self, batch=1) for _ in range(RENDERERS)]
        self.parsers = [_Worker(self, batch=_MAX_BATCH) for _ in range(PARSERS)]
        self._keys = itertools.count()

    async def start(self) -> dict[str, Any]:
        """Start the parent process, and return its description of the model.

        The description has the keys `tools` and `reasoning` (names of parsers), `skips_special`, `numbers_calls`, and
        `takes` (kinds of media that the model accepts). Raises UnusableError or UnknownSettingError.
        """
        self._loop = asyncio.get_running_loop()
        async with self._lock:
            return await self._start()

    async def _start(self) -> dict[str, Any]:
        control = self._start_parent()
        try:
            reply = await asyncio.to_thread(_reply, control, START_SECONDS)
        except OSError as error:
            self._end()
            raise UnusableError(f"its process ended or did not start within {START_SECONDS:g} s ({error})") from error
        if (reason := reply.get("unusable")) is not None:
            self._end()
            raise (UnknownSettingError if reply["is_setting"] else UnusableError)(reason)
        return reply

    def _start_parent(self) -> socket.socket:
        """Start the parent process, and return the socket that is connected to it."""
        self._end()
        self._control, theirs = socket.socketpair()
        with theirs:
            command = module_command(
                "megatron_runtime.server.formats.vllm_worker", str(theirs.fileno()), json.dumps(self._setup)
            )
            self._process = subprocess.Popen(
                command,
                env=child_environment(_ENVIRONMENT),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                # In a terminal, Ctrl-C reaches the whole process group, but only the server may stop its child
                # processes.
                start_new_session=True,
            )
        return self._control

    async def fork(self) -> tuple[socket.socket, int]:
        """Fork a new worker. Return the worker's socket and process id.

        If the parent process has exited, start it again before the fork.

        Raises OSError, UnusableError, UnknownSettingError.
        """
        async with self._lock:
            try:
                return await self._fork()
            except OSError as error:
                logger.error("the process with vLLM's parsers is lost (%s): starting it again", error)
                self._end()
                return await self._fork()

    async def _fork(self) -> tuple[socket.socket, int]:
        if self._is_closed:
            raise UnusableError("the server is shutting down")
        if self._control is None:
            await self._start()
        assert self._control is not None
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._control, [b"f"], [theirs.fileno()])
                reply = await asyncio.to_thread(_reply, self._control, FORK_SECONDS)
            except BaseException:
                ours.close()
                raise
        ours.setblocking(False)
        return ours, reply["pid"]

    def render(self, conversation: Mapping[str, Any], media: Sequence[tuple[str, bytes]] = ()) -> dict[str, Any]:
        """Return a worker's reply for a conversation: `text` and `tokens`, or the reason as `rejected`.

        Blocks. Call this method in a thread other than the event loop's.

        conversation: `messages`, `tools` and `variables` of the template. If `continues` is true, the prompt ends
                      within the last message.
        media:        kind and file of the images, audio and video to which parts of messages refer by index.

        Raises AnswerParserError.
        """
        assert self._loop is not None
        fields = {"conversation": json.dumps(conversation), "media": media}
        worker = min(self.renderers, key=lambda worker: worker.load)
        done: Future[dict[str, Any]] = asyncio.run_coroutine_threadsafe(worker.call(_Render(fields)), self._loop)
        return done.result()

    def answer(self, request: Mapping[str, Any], prompt: Sequence[int]) -> VllmAnswer:
        """Return a parser for a new choice.

        request: `tools` of the request, `variables` of the template, and `earlier_calls` of the conversation.
        """
        worker = min(self.parsers, key=lambda worker: worker.answers)
        opening = {"request": json.dumps(request), "prompt": array("i", prompt).tobytes()}
        return VllmAnswer(next(self._keys), opening, worker)

    def close(self) -> None:
        """Stop all processes. Idempotent."""
        self._is_closed = True
        for worker in (*self.renderers, *self.parsers):
            worker.close()
        self._end()

    def _end(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def _reply(control: socket.socket, seconds: float) -> dict[str, Any]:
    control.settimeout(seconds)
    (size,) = SIZE.unpack(_exactly(control, SIZE.size))
    reply: dict[str, Any] = unpack(_exactly(control, size), MESSAGE_LIMITS)
    return reply


def _exactly(control: socket.socket, size: int) -> bytes:
    received = bytearray()
    while len(received) < size:
        part = control.recv(size - len(received))
        if not part:
            raise ConnectionResetError("it closed the connection")
        received += part
    return bytes(received)


class _Worker:
    """A worker, which has at most one process at a time.

    The process is forked when it is first needed. If it is lost, a new process replaces it.

    worker_number: number of processes that were forked for this worker. It identifies the current process.
    answers: number of answers whose parsers this worker has.
    load:    number of calls without a reply.
    pid:        process id of the current process; None: no process.
    """

    def __init__(self, processes: VllmProcesses, *, batch: int) -> None:
        self.worker_number = 0
        self.answers = 0
        self.pid: int | None = None
        self._processes = processes
        self._max_batch = batch
        self._waiting: deque[_Call] = deque()
        self._suspects: deque[_Call] = deque()
        """Calls from the batch of a lost worker."""
        self._closed: list[int] = []
        self._channel: socket.socket | None = None
        self._task: asyncio.Task[None] | None = None
        self._batch: Sequence[_Call] = ()

    @property
    def load(self) -> int:
        return len(self._waiting) + len(self._suspects) + len(self._batch)

    async def call(self, message: _Message) -> dict[str, Any]:
        """Send a message and return the reply. Raises AnswerParserError."""
        call = _Call(message, asyncio.get_running_loop().create_future())
        self._waiting.append(call)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        return await call.reply

    def forget(self, key: int) -> None:
        """Make the worker drop the parser of an answer when the next batch is sent. key: number of the answer."""
        self.answers -= 1
        self._closed.append(key)

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
        for call in (*self._batch, *self._suspects, *self._waiting):
            _fail(call, "the server is shutting down")
        self._disconnect()

    async def _run(self) -> None:
        """Send the waiting calls in batches until no call is waiting."""
        while self._waiting or self._suspects:
            if self._suspects:
                batch = [self._suspects.popleft()]
            else:
                batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), self._max_batch))]
            self._batch = batch = [call for call in batch if not call.reply.done()]
            try:
                if batch:
                    await self._handle(batch)
            finally:
                self._batch = ()

    async def _handle(self, batch: Sequence[_Call]) -> None:
        try:
            if self._channel is None:
                self._channel, self.pid = await self._processes.fork()
                self.worker_number += 1
                self._closed.clear()
        except (OSError, UnusableError, UnknownSettingError) as error:
            for call in batch:
                _fail(call, f"vLLM's parsers could not be started: {error}")
            return
        try:
            replies = await self._exchange(batch)
        except (OSError, TimeoutError, MalformedMessageError) as error:
            logger.warning("worker %s of vLLM's parsers lost (%s): repeating its calls", self.pid, error)
            self._disconnect()
            for call in batch:
                call.losses += 1
                if call.losses > 1:
                    _fail(call, "it crashed two processes of vLLM's renderer and parsers")
                else:
                    self._suspects.append(call)
            return
        for call, reply in zip(batch, replies, strict=True):
            if not call.reply.done():
                call.reply.set_result(reply)

    async def _exchange(self, batch: Sequence[_Call]) -> list[dict[str, Any]]:
        assert self._channel is not None
        loop = asyncio.get_running_loop()
        contents = [call.message.content(self.worker_number) for call in batch]
        closed, self._closed = self._closed, []
        contents[0]["closed"] = closed
        data = pack(contents)
        async with asyncio.timeout(BATCH_SECONDS + _GRACE_SECONDS):
            await loop.sock_sendall(self._channel, HEADER.pack(BATCH_SECONDS, len(data)) + data)
            (size,) = SIZE.unpack(await self._received(SIZE.size))
            replies: list[dict[str, Any]] = unpack(await self._received(size), MESSAGE_LIMITS)
        return replies

    async def _received(self, size: int) -> bytes:
        assert self._channel is not None
        loop, received = asyncio.get_running_loop(), bytearray()
        while len(received) < size:
            part = await loop.sock_recv(self._channel, min(size - len(received), 1 << 20))
            if not part:
                raise ConnectionResetError("it ended")
            received += part
        return bytes(received)

    def _disconnect(self) -> None:
        """Close the socket to the worker process. An idle process then exits, and a time limit ends a busy process."""
        if self._channel is not None:
            self._channel.close()
            self._channel = self.pid = None


def _fail(call: _Call, reason: str) -> None:
    if not call.reply.done():
        call.reply.set_exception(AnswerParserError(reason))


@dataclass(eq=False, slots=True)
class VllmAnswer:
    """The connection of the server to vLLM's parser of one choice, which runs in a worker process.

    opened_in: `worker_number` of the process that has the parser; 0 before the first feed().
    earlier:   parts of the answer that the parser has read. If the worker process is replaced, the new process reads
               these parts again, and drops their events.
    """

    key: int
    opening: dict[str, Any]
    worker: _Worker
    opened_in: int = 0
    earlier: list[tuple[str, bytes]] = field(default_factory=list)
    _is_open: bool = True

    def __post_init__(self) -> None:
        self.worker.answers += 1

    async def feed(self, text: str, tokens: Sequence[int], *, is_last: bool) -> list[Event]:
        """Parse the next part of the answer, and return the events that it completes. Raises AnswerParserError."""
        piece = (text, array("i", tokens).tobytes())
        reply = await self.worker.call(_Parse(self, piece, is_last))
        if (reason := reply.get("failed")) is not None:
            raise AnswerParserError(f"vLLM's parser failed: {reason}")
        self.opened_in = self.worker.worker_number
        self.earlier.append(piece)
        return [CallBegin(*rest) if kind == CALL else _CLASSES[kind](*rest) for kind, *rest in reply["events"]]

    def close(self) -> None:
        """Discard the parser. Idempotent."""
        if self._is_open:
            self._is_open = False
            self.worker.forget(self.key)
