"""Calls of generate() and generate_stream() without a coordinator. One thread runs the engine for all calls.

Callers only read streams, and only the engine's thread uses the engine. A caller can therefore abandon, cancel or
interrupt a call at any point.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from queue import SimpleQueue
from typing import Any, TypeAlias, TypeVar

from megatron_runtime.backends.native.engine import EngineCore
from megatron_runtime.backends.native.ranked.executor import EnginePart, RankedExecutor
from megatron_runtime.backends.text import ModelText
from megatron_runtime.client.pending import PendingRequest, partial_frames
from megatron_runtime.engine.engine_request import EngineRequest
from megatron_runtime.engine.output_stage import OutputStage
from megatron_runtime.in_process.answers import PromptBatch
from megatron_runtime.protocol.headers import ErrorCode
from megatron_runtime.protocol.messages import DETAILS, Dispatch, Final, Frames, Partial, decode, pack, unpack
from megatron_runtime.requests.async_stream import AnyStream, AsyncStream, BlockingStream

logger = logging.getLogger(__name__)

T = TypeVar("T")
MakeStream: TypeAlias = Callable[[Callable[[], object]], AnyStream]
"""Creates the stream of a call. Its argument is a function that aborts the call without taking a lock."""

END_SECONDS = 10.0
"""Maximum time that close() and the exit of the interpreter wait for the step in progress."""
_LOOK_SECONDS = 0.5
"""Interval at which a waiting thread checks that the engine's thread runs."""

_dispatch_ids = count(1)


class EngineFailedError(RuntimeError):
    """The engine stopped before the call or during the call. The exception's __cause__ is the cause."""


class CallsClosedError(RuntimeError):
    """The call ended without an answer, because the engine was reset or shut down, or because the interpreter exits."""


@dataclass(eq=False, slots=True, kw_only=True)
class Call:
    """One generate() call with its prompts, in the engine's thread.

    stream:      receives `{"partial": frame}` while streaming, and one `{"final": reply}` for each prompt, in
                 completion order. `request_id` in both is the index of the prompt.
    waiting:     requests that were not passed to the engine yet.
    open:        dispatch ids of the requests that the engine has, by uid.
    number, fingerprint: number of the call and fingerprint of its arguments, for the other ranks of the engine.
    items:       packed items that `stream` received, for the other ranks; None if there are no other ranks.
    """

    waiting: deque[PendingRequest]
    number: int
    fingerprint: str
    items: list[bytes] | None
    stream: Any = None
    open: dict[bytes, int] = field(default_factory=dict)

    def put(self, item: dict[str, Any]) -> None:
        if self.items is not None:
            self.items.append(pack(item))
        self.stream.put(item)


def fingerprint(prompts: PromptBatch, *, streaming: bool) -> str:
    """Return a digest of a call's arguments.

    The ranks of an engine compare their digests, to verify that they make the same call.
    """
    params = [prompts.params[number].serialize() for number in prompts.sent]
    return hashlib.sha256(pack([streaming, [prompts.tokens[number] for number in prompts.sent], params])).hexdigest()


class DirectCalls:
    """The calls of all threads and event loops of this process, which one engine thread runs.

    While the thread runs, only the thread may use `core`.

    The thread starts with the first call. It ends when close() is called, when this object is garbage-collected, or
    when the interpreter exits. While no call is open, the thread holds no reference to this object or to `core`.

    text: converts the engine's tokens to text; None if they have no text.
    """

    def __init__(self, core: EngineCore, text: ModelText | None) -> None:
        self.core = core
        self.text = text
        self._numbers = count(1)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._commands: SimpleQueue[_Command | None] = SimpleQueue()
        self._end: weakref.finalize[Any, Any] | None = None
        self._is_ending = False
        """Whether the thread will end, or has ended, because of close()."""
        self._pid = os.getpid()

    @property
    def _is_running(self) -> bool:
        """Whether the engine's thread runs. If it does not run, no call is open."""
        return self._thread is not None and self._thread.is_alive()

    def begin(self) -> None:
        """Load the weights. If the engine has other ranks, start to monitor them.

        From then on, the loss of a rank stops all ranks, and the other ranks exit with this process.
        """
        executor = self.core.executor
        executor.load()
        if isinstance(executor, RankedExecutor):
            executor.watch(on_failure=lambda _failure: None, on_leave=lambda: None)
            atexit.register(self._end_ranks, executor)

    def _end_ranks(self, executor: RankedExecutor) -> None:
        self.close()
        executor.end(None)

    def open(self, prompts: PromptBatch, make_stream: MakeStream[AnyStream], *, streaming: bool) -> AnyStream:
        """Start a call and return its stream. Closing the stream early aborts the call.

        A request without a seed gets a random seed.
        """
        require_process(self._pid)
        is_ranked = isinstance(self.core.executor, RankedExecutor)
        call = Call(
            waiting=_pending_requests(prompts, streaming=streaming),
            number=next(self._numbers),
            fingerprint=fingerprint(prompts, streaming=streaming) if is_ranked else "",
            items=[] if is_ranked else None,
        )
        number = call.number  # a reference from the stream to its call would be a cycle
        with self._lock:
            commands = self._started()
            stream = call.stream = make_stream(lambda: commands.put((self, lambda runner: runner.abort(number))))
            commands.put((self, lambda runner: runner.add(call)))
        return stream

    def perform(self, action: Callable[[_Runner], T]) -> T:
        """Run `action` in the engine's thread between two steps, and return its result.

        Raises the errors of `action`, and CallsClosedError if the thread ends first.
        """
        require_process(self._pid)
        outcome: Future[T] = Future()

        def run(runner: _Runner) -> None:
            try:
                outcome.set_result(action(runner))
            except BaseException as error:
                outcome.set_exception(error)

        with self._lock:
            commands = self._started()
            thread = self._thread
            assert thread is not None
            commands.put((self, run))
        while not wait([outcome], _LOOK_SECONDS).done:
            if not thread.is_alive() and not outcome.done():
                raise CallsClosedError("the engine was closed")
        return outcome.result()

    def between_steps(self, action: Callable[[], T]) -> T:
        """Run `action`, which uses the engine, in the engine's thread between two steps. Return its result."""
        return self.perform(lambda _: action()) if self._is_running else action()

    def require_none_open(self, what: str) -> None:
        """Raise RuntimeError if a call is open. what: the operation that requires this, for the message."""
        if self._is_running and self.perform(lambda runner: bool(runner.calls)):
            raise RuntimeError(f"{what} while calls of generate() or generate_stream() are open: close them first")

    def reset(self, *, preserve_prefix_cache: bool) -> None:
        """Drop every request, including open calls, whose readers get CallsClosedError. See EngineCore.reset()."""
        if self._is_running:
            error = partial(CallsClosedError, "reset() dropped the request")
            self.perform(lambda runner: runner.fail_all(error, preserve_prefix_cache=preserve_prefix_cache))
        else:
            self.core.reset(preserve_prefix_cache=preserve_prefix_cache)

    def settle(self) -> None:
        """Wait until the engine has dropped all generate() calls that have been aborted so far.

        Do not call this method in the engine's thread.
        """
        if self._is_running and threading.current_thread() is not self._thread:
            with contextlib.suppress(CallsClosedError):
                self.perform(lambda _: None)

    def close(self) -> None:
        """Stop the thread and end all open calls. Readers of these calls get CallsClosedError.

        A later call starts the thread again.
        """
        if self._pid != os.getpid():
            return
        with self._lock:
            if self._thread is not None:
                self._is_ending = True
                self._commands.put(None)
                self._thread.join()
        if self.text is not None:
            self.text.close_grammars()

    def _started(self) -> SimpleQueue[_Command | None]:
        """Return the command queue of the engine's thread. Start the thread if it does not run.

        The caller must hold the lock.
        """
        if self._is_ending and self._thread is not None:
            self._thread.join()  # close() may have been interrupted before its join
        if not self._is_running:
            if self._end is not None:
                self._end.detach()
            commands: SimpleQueue[_Command | None] = SimpleQueue()
            thread = threading.Thread(target=_serve, args=(commands,), name="engine", daemon=True)
            thread.start()
            self._thread, self._commands, self._is_ending = thread, commands, False
            self._end = weakref.finalize(self, _end_thread, thread, commands, os.getpid())
        return self._commands


class FollowedCalls:
    """The generate() calls on a rank other than the first.

    The first rank runs each call. The stream on this rank gets all items when the call has ended.

    Every rank numbers its calls. A call can therefore end before a call that began earlier.

    wait: waits until the first rank has stopped the engine.
    """

    def __init__(self, part: EnginePart, *, rank: int, wait: Callable[[], object]) -> None:
        self._rank = rank
        self._wait = wait
        self._numbers = count(1)
        self._lock = threading.Lock()
        self._waiting: dict[int, tuple[str, AsyncStream | BlockingStream] | None] = {}
        """Streams of calls without an answer, by call number. None if the caller has closed the stream."""
        self._early: dict[int, dict[str, Any]] = {}
        """Answers to calls that this rank has not yet made."""
        self._has_ended = False
        part.on_answers = self._take

    def begin(self) -> None:
        """Register an exit handler that waits until the first rank has stopped the engine."""
        atexit.register(self._wait)

    def open(self, prompts: PromptBatch, make_stream: MakeStream[AnyStream], *, streaming: bool) -> AnyStream:
        """Start a call and return its stream, as DirectCalls.open() does.

        The stream raises ValueError if the first rank's call with this number has different arguments. It raises
        EngineFailedError for an error of the first rank.
        """
        expected = fingerprint(prompts, streaming=streaming)
        with self._lock:
            number = next(self._numbers)
            stream = make_stream(lambda: self._waiting.update({number: None}))
            early = self._early.pop(number, None)
            if early is None and not self._has_ended:
                self._waiting[number] = (expected, stream)
                return stream
        self._deliver(early, expected, stream)
        return stream

    def between_steps(self, action: Callable[[], T]) -> T:
        """Run `action` immediately, because only the first rank runs steps. Return its result."""
        return action()

    def require_none_open(self, what: str) -> None:
        """Do nothing, because only the first rank has requests."""

    def reset(self, *, preserve_prefix_cache: bool) -> None:
        """Do nothing, because only the first rank has requests."""

    def settle(self) -> None:
        """Do nothing, because an aborted call is dropped immediately."""

    def close(self) -> None:
        """Do nothing, because the first rank stops the engine."""

    def _take(self, answers: dict[str, Any] | None) -> None:
        """Deliver the first rank's answers to the stream of their call.

        Runs in the thread that executes the first rank's commands.

        answers: None if the engine has stopped. All open streams then get an error.
        """
        with self._lock:
            if answers is None:
                self._has_ended = True
                ended, self._waiting = list(self._waiting.values()), {}
            elif (number := answers["number"]) in self._waiting:
                ended = [self._waiting.pop(number)]
            else:
                self._early[number], ended = answers, []
        for waiting in ended:
            if waiting is not None:
                self._deliver(answers, *waiting)

    def _deliver(self, answers: dict[str, Any] | None, expected: str, stream: AsyncStream | BlockingStream) -> None:
        error: Exception | None = None
        if answers is None:
            error = EngineFailedError("the first rank of the engine has ended: end this rank, too")
        elif answers["call"] != expected:
            error = ValueError(
                f"rank {self._rank} of the engine has other prompts or sampling parameters than its first rank: "
                "make the same calls on all ranks, in the same order, or construct with use_coordinator=True"
            )
        elif answers["error"] is not None:
            error = EngineFailedError(f"the first rank of the engine reports: {answers['error']}")
        else:
            for item in answers["items"]:
                stream.put(unpack(item, DETAILS))
        stream.finish(error)


def require_process(pid: int) -> None:
    """Raise RuntimeError if the id of this process is not `pid`."""
    if os.getpid() != pid:
        raise RuntimeError(
            f"process {os.getpid()} was forked from process {pid}, which has the engine and its threads: construct the "
            'object in the process that uses it, and start processes with the method "spawn" or "forkserver"'
        )


def _end_thread(thread: threading.Thread, commands: SimpleQueue[_Command | None], pid: int) -> None:
    """End the engine's thread after the step in progress. A finalizer may call this function, so it takes no lock."""
    if os.getpid() == pid:
        commands.put(None)
        if threading.current_thread() is not thread:
            thread.join(END_SECONDS)


def _serve(commands: SimpleQueue[_Command | None]) -> None:
    """Run the commands of the queue until a command is None. While a call is open, also run steps.

    This function is the body of the engine's thread.
    """
    ended = False
    while not ended and (command := commands.get()) is not None:
        calls, action = command
        runner = _Runner(calls.core, calls.text, commands)
        try:
            action(runner)
            ended = runner.run()
        except BaseException as error:  # otherwise readers would wait forever
            logger.exception("the engine's thread failed")
            runner.fail_all(partial(_itself, error))
        runner.close()
        del command, calls, action, runner  # these references in an idle thread would keep the engine alive


def _itself(error: BaseException) -> BaseException:
    return error


class _Runner:
    """The open generate() calls of an engine, in the engine's thread.

    The object is created for the first open call, and dropped after the last open call has ended.

    The engine generates tokens, the worker's OutputStage builds the protocol messages, and the client's PendingRequest
    reads the messages. Answers are therefore the same with and without a coordinator.
    """

    def __init__(self, core: EngineCore, text: ModelText | None, commands: SimpleQueue[_Command | None]) -> None:
        self.core = core
        self.calls: dict[int, Call] = {}
        """Calls by number."""
        self._text = text
        self._commands = commands
        self._feeding: deque[Call] = deque()
        """Calls with waiting requests. These calls add requests round robin."""
        self._open: dict[bytes, tuple[Call, PendingRequest]] = {}
        self._stage = OutputStage(
            send=self._receive,
            finish_early=core.abort_request,
            tokenizer=lambda: None if text is None else text.tokenizer,
        )

    def run(self) -> bool:
        """Run steps until no call is open. Return whether the engine's thread must end."""
        commands = self._commands
        while self.calls:
            while not commands.empty():
                command = commands.get()
                if command is None:
                    self.fail_all(lambda: CallsClosedError("the engine was shut down before the answer was complete"))
                    return True
                command[1](self)
            try:
                self._step()
            except BaseException as error:
                self.fail_all(partial(_itself, error))
        return False

    def close(self) -> None:
        """Break the reference cycle that would keep the engine alive until the next garbage collection."""
        del self._stage

    def add(self, call: Call) -> None:
        self.calls[call.number] = call
        try:
            self.core.executor.load()
        except BaseException as error:
            self._end(call, error)
            return
        if call.waiting:
            self._feeding.append(call)
        else:
            self._end(call)

    def abort(self, number: int) -> None:
        """Drop the call with this number. Do nothing if the call has already ended."""
        call = self.calls.get(number)
        if call is None:
            return
        call.waiting.clear()
        for uid, dispatch_id in call.open.items():
            self.core.abort_request(dispatch_id)
            self._stage.forget(dispatch_id)
            del self._open[uid]
        call.open.clear()
        self._end(call)

    def fail_all(self, error: Callable[[], BaseException], *, preserve_prefix_cache: bool = False) -> None:
        """End every call with an error, and reset the engine."""
        calls, self.calls = self.calls, {}
        self._open.clear()
        self._feeding.clear()
        for dispatch_id in list(self._stage.open):
            self._stage.forget(dispatch_id)
        try:
            self.core.reset(preserve_prefix_cache=preserve_prefix_cache)
        except Exception:
            logger.exception("the engine could not be reset")
        for call in calls.values():
            self._end(call, error())

    def _end(self, call: Call, error: BaseException | None = None) -> None:
        self.calls.pop(call.number, None)
        if call.items is not None:
            assert isinstance(self.core.executor, RankedExecutor)
            text = None if error is None else str(error) or type(error).__name__
            answers = {"number": call.number, "call": call.fingerprint, "items": call.items, "error": text}
            try:
                self.core.executor.share_answers(answers)
            except Exception as unreachable:
                error = error or unreachable
        call.stream.finish(error)

    def _step(self) -> None:
        limit = self.core.config.max_waiting
        while self._feeding and len(self._open) < limit:
            call = self._feeding.popleft()
            if call.waiting:  # the request may have been dropped
                self._add(call, call.waiting.popleft())
                self._feeding.append(call)
        if self._open:
            self._stage.step(self.core.step())

    def _add(self, call: Call, request: PendingRequest) -> None:
        dispatch = Dispatch(next(_dispatch_ids), request.uid, 0, request.meta, request.prompt, b"", request.params)
        params, text = request.sampling_params, self._text
        self._open[request.uid] = (call, request)
        call.open[request.uid] = dispatch.dispatch_id
        try:
            grammar = text.begin_grammar(params) if text is not None else None
            bad_words = None
            if params.bad_words and text is not None:
                bad_words = text.bad_words(params.bad_words, vocab_size=self.core.executor.vocab_size)
            engine_request = EngineRequest.of_dispatch(dispatch, params, bad_words=bad_words)
            self._stage.add(dispatch, params, [])
            if dispatch.dispatch_id in self._stage.open:
                self.core.add_request(engine_request, grammar=grammar)
        except Exception as error:  # only this request fails
            is_invalid = isinstance(error, ValueError)
            self._stage.reject(dispatch, ErrorCode.INVALID_REQUEST if is_invalid else ErrorCode.ENGINE_FAILED, error)

    def _receive(self, frames: Frames) -> None:
        match decode(list(frames)):
            case Partial() as message:
                for request, frame in partial_frames(message, lambda uid: self._open[uid][1]):
                    self._open[request.uid][0].put({"partial": frame})
            case Final() as final:
                call, request = self._open.pop(final.uid)
                del call.open[final.uid]
                call.put({"final": request.reply(final)})
                if not call.open and not call.waiting:
                    self._end(call)


def _pending_requests(prompts: PromptBatch, *, streaming: bool) -> deque[PendingRequest]:
    """Return the requests of a call. The id of each request is the index of its prompt."""
    requests: deque[PendingRequest] = deque()
    for number in prompts.sent:
        request = PendingRequest.make(prompts.tokens[number], prompts.params[number], streaming=streaming, record=True)
        request.request_id = number
        requests.append(request)
    return requests


_Command: TypeAlias = tuple[DirectCalls, Callable[[_Runner], object]]
"""The open calls of an engine, and a function that the engine's thread runs on them."""
