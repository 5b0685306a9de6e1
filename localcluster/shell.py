"""Runs other programs, captures or follows their output, and reports failures as readable errors."""

from __future__ import annotations

import os
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from localcluster.errors import ClusterError

TICK_SECONDS = 1.0


def run(
    command: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdin: str | None = None,
    check: bool = True,
    timeout: float | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a program until it exits.

    check: whether to raise ClusterError with the last lines of the output if the program fails.
    """
    argv = [str(part) for part in command]
    result = subprocess.run(
        argv,
        input=stdin,
        stdin=None if stdin is not None else subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        env={**os.environ, **env} if env else None,
        cwd=cwd,
        timeout=timeout,
        check=False,
    )
    if check and result.returncode != 0:
        raise ClusterError(
            f"`{' '.join(argv[:6])}` ended with {result.returncode}:\n{tail(result.stderr or result.stdout)}"
        )
    return result


def follow(
    command: Sequence[str | Path],
    on_line: Callable[[str], None],
    on_tick: Callable[[], None],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> int:
    """Run a program until it exits, without standard input and output, and return its exit code.

    on_line: called with each line of its standard error.
    on_tick: called every TICK_SECONDS.
    """
    lines: queue.Queue[str | None] = queue.Queue()

    def read(stream: IO[str]) -> None:
        for line in stream:
            lines.put(line.rstrip("\n"))
        lines.put(None)

    process = subprocess.Popen(
        [str(part) for part in command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={**os.environ, **env} if env else None,
        cwd=cwd,
    )
    assert process.stderr is not None
    reader = threading.Thread(target=read, args=(process.stderr,), daemon=True)
    reader.start()
    try:
        next_tick = time.monotonic() + TICK_SECONDS
        while True:
            try:
                line = lines.get(timeout=max(0.0, next_tick - time.monotonic()))
            except queue.Empty:
                on_tick()
                next_tick = time.monotonic() + TICK_SECONDS
                continue
            if line is None:
                return process.wait()
            on_line(line)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
        reader.join()
        process.stderr.close()


def tail(text: str, lines: int = 15) -> str:
    return "\n".join("    " + line for line in text.strip().splitlines()[-lines:])
