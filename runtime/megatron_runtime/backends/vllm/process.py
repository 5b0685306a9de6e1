"""Starts vLLM in a separate process, and exchanges messages with this process. Imports neither vLLM nor torch.

The separate process releases all memory when it exits. If it crashes, the engine's process survives and reports the
cause. The two processes exchange messages over a pair of sockets (channel.py):

    to the process
        [number, method, arguments]                       the methods are in service.py
    from the process
        [number, result, error]                           the reply; number 0 reports the start of vLLM or its failure
        ["outputs", ...], ["cache", ...], ["metrics", ...]
        ["progress", stage, done, total]                  before the reply to load, and before number 0
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_runtime.backends.vllm.channel import Channel, OnMessage, frame, receive
from megatron_runtime.distributed.shard import ParallelSizes
from megatron_runtime.engine.settings import EngineSettings
from megatron_runtime.process.children import child_environment, module_command
from megatron_runtime.process.progress import PROGRESS, Stage
from megatron_runtime.protocol.published_weights import WeightsUnavailableError

PROGRAM = "megatron_runtime.backends.vllm.service"
STARTED = 0
"""Number of the message with which the process reports that it has started."""
SHUTDOWN_SECONDS = 30.0
"""Maximum seconds for vLLM to exit voluntarily. After that, its processes are killed."""
LOG_SECONDS = 0.2
"""Seconds to wait for the last log lines of an exited process."""
LOG_LINES = 400
"""Number of vLLM's newest log lines that are searched for the cause of a failure."""

_EXCEPTION = re.compile(r"(?:^|[\s\]])(?P<type>[A-Za-z_][\w.]*(?:Error|Exception)): (?P<text>\S.*)$")
_CONSEQUENCE = re.compile(
    r"Engine core initialization failed|WorkerProc initialization failed|EngineCore encountered an issue"
    r"|cancelled|EngineDeadError"
)
"""Errors that vLLM reports as a consequence of another error."""
_STAGES = (
    (re.compile(r"Loading [\w ]*checkpoint shards: *(?P<percent>\d+)% Completed"), Stage.LOAD),
    (re.compile(r"Loading weights took|Model loading took|Warming up model"), Stage.COMPILE),
    (re.compile(r"Capturing CUDA graphs.*?: *(?P<percent>\d+)%"), Stage.CAPTURE),
)
"""Lines of vLLM's log that show the progress of its start."""
_KV_CACHE = re.compile(r"Available KV cache memory: (?P<gib>\d+(\.\d+)?) GiB")
"""Line of vLLM's log with the free memory that a rank on a GPU measured after loading."""
_KILLED = re.compile(r"Failed core proc\(s\): \{[^}]*: (?P<status>-?\d+)")


class VllmError(RuntimeError):
    """Raised if vLLM failed. The message has the cause."""


class VllmKilledError(VllmError):
    """Raised if a process of vLLM was killed, usually because it exceeded its memory limit.

    A later start may succeed.
    """


class VllmRejectedError(ValueError):
    """Raised if vLLM rejects its arguments, the model or a request. The message names the rejected value.

    field: for a pooling request, the name of the invalid argument; empty if unknown.
    """

    def __init__(self, message: str, *, field: str = "") -> None:
        super().__init__(message)
        self.field = field


OnLost = Callable[[VllmError], None]


def cause_of(lines: Iterable[str], status: int | None) -> str:
    """Return why vLLM's processes exited.

    lines:  lines of vLLM's log. The cause is the newest exception that is not a consequence of another exception.
    status: exit status of vLLM's first process; negative for a signal; None while the process runs.
    """
    cause, killed = "", None
    for line in lines:
        found = _EXCEPTION.search(line.rstrip())
        if found is not None and not _CONSEQUENCE.search(line):
            cause = f"{found['type'].rpartition('.')[2]}: {found['text']}"
        failed = _KILLED.search(line)
        if failed is not None:
            killed = int(failed["status"])
    if killed is not None and killed < 0:
        return f"its engine process was {_signal_name(killed)}" + (f"; {cause}" if cause else "")
    if cause:
        return cause
    if status is not None and status < 0:
        return f"its process was {_signal_name(status)}"
    return f"its process ended with exit status {status}" if status is not None else "its process closed the connection"


def _signal_name(status: int) -> str:
    name = signal.Signals(-status).name
    return f"killed by {name}" + (", most often because its memory limit was exceeded" if name == "SIGKILL" else "")


def map_of(settings: EngineSettings) -> dict[str, Any]:
    """Return the settings as plain values that msgpack can encode."""
    return {**asdict(settings), "keys_dir": None if settings.keys_dir is None else str(settings.keys_dir)}


def settings_of(values: Mapping[str, Any]) -> EngineSettings:
    """Return the settings that map_of() converted to `values`."""
    keys_dir = None if values["keys_dir"] is None else Path(values["keys_dir"])
    return EngineSettings(**{**values, "parallel": ParallelSizes(**values["parallel"]), "keys_dir": keys_dir})


class VllmProcess:
    """A running process of vLLM.

    started:     properties of the model and of vLLM's configuration, from VllmService.describe().
    is_starting: whether the log is read for progress. Set it to False after load().
    kv_cache_bytes: KV cache size in bytes on the rank with the smallest cache, as measured by vLLM; 0 if not measured.
    checks_only: whether vLLM only checks the settings. If so, the machine need not have the GPU that the settings
                 require.

    The constructor waits until the process has imported vLLM and has checked its settings, which takes ten seconds or
    more. Call it in a thread if there is an event loop.

    Raises:
        VllmRejectedError: a setting, the model or the version of vLLM is not usable.
        VllmError: the process ended; the message has the cause. VllmKilledError if it was killed.
    """

    def __init__(self, settings: EngineSettings, *, checks_only: bool = False) -> None:
        self._log: deque[str] = deque(maxlen=LOG_LINES)
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._number = STARTED
        self._channel: Channel | None = None
        self._losing: asyncio.Task[None] | None = None
        self._is_ending = False
        self.is_starting = True
        self.kv_cache_bytes = 0
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                module_command(PROGRAM, str(theirs.fileno())),
                env=child_environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                encoding="utf-8",  # text mode, so that a carriage return also ends a line: progress bars write them
                errors="replace",
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # a process group that holds all of vLLM's processes
            )
        self._log_reader = threading.Thread(target=self._forward_log, daemon=True)
        self._log_reader.start()
        try:
            self._socket.sendall(frame([map_of(settings), checks_only]))
            while isinstance((message := receive(self._socket))[0], str):
                note_progress(message)
            _, started, error = message
        except OSError as lost:
            status = self._end_status()
            kind = VllmKilledError if status == -signal.SIGKILL else VllmError
            raise kind(f"vLLM did not start: {cause_of(self._log, status)}") from lost
        except BaseException:
            self.kill()
            raise
        if error is not None:
            self.kill()
            raise _exception(error)
        self.started: dict[str, Any] = started

    def _forward_log(self) -> None:
        assert self._process.stdout is not None
        for text in self._process.stdout:
            self._log.append(text)
            sys.stderr.write(text)
            if self.is_starting:
                self._note(text)

    def _note(self, line: str) -> None:
        """Report the progress of vLLM's start if `line` of vLLM's log shows it."""
        for pattern, stage in _STAGES:
            if (match := pattern.search(line)) is not None:
                percent = int(match.groupdict().get("percent") or 0)
                total = PROGRESS.total if stage is Stage.LOAD else 100 if stage is Stage.CAPTURE else 0
                PROGRESS.report(stage, percent * total // 100, total)
        if (measured := _KV_CACHE.search(line)) is not None:
            found = int(float(measured["gib"]) * (1 << 30))
            self.kv_cache_bytes = min(self.kv_cache_bytes or found, found)

    async def connect(self, on_message: OnMessage, on_lost: OnLost) -> None:
        """Start to receive messages on the running loop.

        on_message: called with each message that is not a reply.
        on_lost:    called once if the process exits without end().
        """
        self._on_message, self._on_lost = on_message, on_lost
        self._channel = await Channel.open(self._socket, self._received, self._closed)

    def _received(self, message: list[Any]) -> None:
        if isinstance(message[0], str):
            self._on_message(message)
            return
        number, result, error = message
        call = self._calls.pop(number, None)
        if call is None or call.done():
            return
        if error is None:
            call.set_result(result)
        elif _CONSEQUENCE.search(error[1]):
            asyncio.get_running_loop().call_later(LOG_SECONDS, self._fail_by_log, call)
        else:
            call.set_exception(_exception(error))

    def _fail_by_log(self, call: asyncio.Future[Any]) -> None:
        if not call.done():
            call.set_exception(VllmError(cause_of(self._log, None)))

    def _closed(self) -> None:
        if not self._is_ending:
            self._losing = asyncio.create_task(self._lose())

    async def _lose(self) -> None:
        status = await asyncio.to_thread(self._end_status)
        lost = VllmError(f"vLLM failed: {cause_of(self._log, status)}")
        for call in self._calls.values():
            if not call.done():
                call.set_exception(lost)
        self._calls.clear()
        self._on_lost(lost)

    def _end_status(self) -> int | None:
        """Kill all processes of vLLM, after its main process has closed the connection.

        Return the exit status of the main process, or None if it was still running after one second.
        """
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
        status = self._process.poll()
        self.kill()
        return status

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of service.py and return its result.

        Raises VllmError, VllmRejectedError or WeightsUnavailableError.
        """
        self._number += 1
        call = self._calls[self._number] = asyncio.get_running_loop().create_future()
        self._write([self._number, method, arguments])
        return await call

    def send(self, method: str, *arguments: Any) -> None:
        """Call a method of service.py without waiting for its result."""
        self._write([STARTED, method, arguments])

    def _write(self, message: list[Any]) -> None:
        assert self._channel is not None
        if self._losing is None:
            self._channel.send(message)
        elif (call := self._calls.pop(message[0], None)) is not None:
            call.set_exception(VllmError("vLLM's process has ended"))

    async def end(self) -> None:
        """Stop vLLM, and wait until its processes have exited."""
        if self._channel is not None and self._losing is None:
            with contextlib.suppress(VllmError, TimeoutError):
                await asyncio.wait_for(self.call("shutdown"), SHUTDOWN_SECONDS)
        self._is_ending = True
        if self._losing is not None:
            self._losing.cancel()
            await asyncio.gather(self._losing, return_exceptions=True)
        await asyncio.to_thread(self.kill)
        if self._channel is not None:
            self._channel.close()

    def kill(self) -> None:
        """Kill all remaining processes of vLLM. Idempotent."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._log_reader.join(timeout=1)
        if self._channel is None:
            self._socket.close()


def note_progress(message: list[Any]) -> None:
    """Report the stage and the progress that a "progress" message of vLLM's process contains."""
    _, stage, done, total = message
    PROGRESS.report(Stage(stage), done, total)


def _exception(error: list[str]) -> Exception:
    kind, text = error
    if kind == "unavailable":
        return WeightsUnavailableError(text)
    return VllmRejectedError(text) if kind == "rejected" else VllmError(text)
