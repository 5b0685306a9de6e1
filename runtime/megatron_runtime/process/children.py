"""Starts Python modules as child processes, and ends them with their parent: the one place that does so. No torch.

A child imports what its parent imports and nothing from the working directory, which may be a downloaded model. It ends
on SIGINT alone: its parent sends it, or the kernel when the parent dies. Service managers send SIGTERM to all processes
of a group at once, and the parent must end its children in order.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Mapping

PARENT_VARIABLE = "MEGATRON_PARENT_PID"
"""A parent sets it for its children, which end when the parent ends for any reason."""
END_SIGNAL = signal.SIGINT
"""Ends a child in order."""

_PR_SET_PDEATHSIG = 1


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs `module` with this interpreter. `-P` keeps the working directory off its path."""
    return [sys.executable, "-P", "-m", module, *arguments]


def child_environment(variables: Mapping[str, str] | None = None, *, ends_with_parent: bool = False) -> dict[str, str]:
    """Return the environment of a child.

    The child finds modules where this process does, also in folders that a program has added to sys.path.

    variables:        which differ from those of this process.
    ends_with_parent: the child calls end_with_parent(). The kernel takes the thread that starts it for its parent.
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
    """Ignore SIGTERM: the parent ends this process."""
    global _is_child
    _is_child = True
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def end_with_parent() -> None:
    """If this process is a child, ignore SIGTERM, and have the kernel send END_SIGNAL when the parent dies."""
    parent = os.environ.pop(PARENT_VARIABLE, None)
    if parent is None:
        return
    be_child()
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, END_SIGNAL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    # If the parent died before the call above, the kernel sends no signal.
    if os.getppid() != int(parent):
        sys.exit(1)


def end_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that end this process in order. Call it after end_with_parent()."""
    return (END_SIGNAL,) if _is_child else (signal.SIGTERM, signal.SIGINT)


_is_child = False
