"""Starts Python modules as child processes that exit with their parent. No other module starts such processes.

A child imports modules from the same places as its parent, but not from the working directory, which may be a
downloaded model. A child exits only on SIGINT. The parent sends SIGINT, or the kernel sends it when the parent dies. A
child ignores SIGTERM, because service managers send it to all processes of a group at the same time, but the parent
must stop its children in order.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future

PARENT_VARIABLE = "MEGATRON_PARENT_PID"
"""Environment variable that a parent sets for its children, which exit when the parent exits for any reason."""
END_SIGNAL = signal.SIGINT
"""Signal that stops a child in an orderly way."""

STOP_SECONDS = 10.0
ENDED_SECONDS = 1.0
LAST_LINES = 10
"""Number of lines at the end of a child's output that an error quotes."""

_PR_SET_PDEATHSIG = 1


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs `module` with this interpreter.

    The option `-P` excludes the working directory from the child's module search path.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def child_environment(variables: Mapping[str, str] | None = None, *, ends_with_parent: bool = False) -> dict[str, str]:
    """Return the environment of a child.

    The child finds modules in the same places as this process, including folders that a program has added to sys.path.

    variables:        variables that replace or extend the variables of this process.
    ends_with_parent: whether the child calls end_with_parent(). If so, the kernel sends SIGINT to the child when the
                      thread that started the child exits.
    """
    here = os.path.realpath(os.getcwd())
    entries = [*sys.path, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    path = [entry for entry in dict.fromkeys(entries) if entry and os.path.realpath(entry) != here]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        **({PARENT_VARIABLE: str(os.getpid())} if ends_with_parent else {}),
        **(variables or {}),
    }


def be_child() -> None:
    """Ignore SIGTERM from now on. A child calls this function, because the parent sends SIGINT to stop the child."""
    global _is_child
    _is_child = True
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def end_with_parent() -> None:
    """Ignore SIGTERM, and let the kernel send END_SIGNAL to this process when its parent dies.

    Do nothing if this process was not started as a child.
    """
    parent = os.environ.pop(PARENT_VARIABLE, None)
    if parent is None:
        return
    be_child()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, END_SIGNAL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    # If the parent died before the call above, the kernel sends no signal.
    if os.getppid() != int(parent):
        sys.exit(f"Error: the parent process {parent} has exited")


def end_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that shut this process down in an orderly way. Call this function after end_with_parent()."""
    return (END_SIGNAL,) if _is_child else (signal.SIGTERM, signal.SIGINT)


class WatchedChild:
    """A module that runs as a child process.

    The child's standard error is copied to this process's standard error.

    what:  name of the child in the description of its exit.
    ended: future with a description of the child's exit. Callbacks run on a thread.
    """

    def __init__(self, what: str, module: str, *arguments: str) -> None:
        self.ended: Future[str] = Future()
        self._what = what
        self._lock = threading.Lock()
        errors, child_errors = os.pipe()
        try:
            self.process = subprocess.Popen(
                module_command(module, *arguments),
                env=child_environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=child_errors,
            )
        except BaseException:
            os.close(errors)
            raise
        finally:
            os.close(child_errors)
        threading.Thread(target=self._watch, args=(errors,), name=f"end of {what}", daemon=True).start()

    @property
    def pid(self) -> int:
        return self.process.pid

    def exchange(self, line: bytes, *, seconds: float) -> bytes:
        """Write a line to the child's standard input, and return the first line of its standard output.

        Raises:
            OSError: the pipe to the child is broken.
            TimeoutError: the child did not answer within `seconds`.
            ValueError: the child exited before answering.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(line + b"\n")
        self.process.stdin.flush()
        ready, _, _ = select.select([self.process.stdout], [], [], seconds)
        if not ready:
            raise TimeoutError(f"no answer within {seconds:g} s")
        answer: bytes = self.process.stdout.readline()
        if not answer:
            raise ValueError("the process ended before it answered")
        return answer

    def stop(self, *, grace_seconds: float = STOP_SECONDS) -> None:
        """Stop the process with END_SIGNAL and, after the grace period, with SIGKILL. Block until the process has
        exited.

        This method is idempotent.
        """
        with self._lock, self.process:  # leaving the block closes the pipes and waits for the process
            self.process.send_signal(END_SIGNAL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(grace_seconds)
            self.process.kill()
        with contextlib.suppress(TimeoutError):  # another process may hold a copy of its standard error
            self.ended.result(ENDED_SECONDS)

    def _watch(self, errors: int) -> None:
        """Copy the child's standard error, the pipe `errors`, to this process's standard error. Then set `ended`."""
        lines: deque[bytes] = deque(maxlen=LAST_LINES)
        with open(errors, "rb") as pipe:
            for line in pipe:
                lines.append(line)
                with contextlib.suppress(OSError):
                    os.write(2, line)
        status = self.process.wait()
        how = f"exit status {status}" if status >= 0 else f"signal {signal.Signals(-status).name}"
        if status == -signal.SIGKILL:
            how += ", which the kernel sends if memory runs out"
        last = b"".join(lines).decode(errors="replace").strip()
        self.ended.set_result(
            f"{self._what}, process {self.process.pid}, ended with {how}; "
            + (f"its last lines: {last}" if last else "it wrote no message")
        )


_is_child = False
