"""Engines that run in their own processes. Requests and answers are lines of JSON."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WORKERS = Path(__file__).parent.parent / "peer_workers"
START_SECONDS = 600
_RUN_SECONDS = 180
_MESSAGE_CHARACTERS = 300


class WorkerError(RuntimeError):
    """Raised if an engine does not start or does not answer. The message is the last line that the engine wrote."""


class Worker:
    """One engine process.

    cpus:  CPUs on which all threads of the process run.
    ready: duration and memory of the start, as reported by peer_workers/worker.py.
    """

    def __init__(self, command: Sequence[str], *, cpus: set[int]) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            command,
            cwd=WORKERS,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            bufsize=1,
            preexec_fn=lambda: os.sched_setaffinity(0, cpus),
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"},
        )
        self.ready: dict[str, float] = self._read(START_SECONDS)

    def ask(self, *, batch: int, prompt_tokens: int, new_tokens: int, seed: int) -> dict[str, float]:
        """Run a batch in the engine.

        Return the seconds of the batch, the seconds until every prompt has its first token, and the peak memory so far.
        """
        assert self._process.stdin is not None
        question = {"batch": batch, "prompt_tokens": prompt_tokens, "new_tokens": new_tokens, "seed": seed}
        with contextlib.suppress(BrokenPipeError):  # the process has ended, and _read() reports its last line
            self._process.stdin.write(json.dumps(question) + "\n")
        return self._read(_RUN_SECONDS)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._errors.close()

    def _read(self, seconds: float) -> Any:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], seconds)
        line = self._process.stdout.readline() if ready else ""
        if line:
            return json.loads(line)
        self._process.kill()
        self._process.wait()
        message = last_line(self._errors) if ready else f"no answer within {seconds:.0f} s"
        self._errors.close()
        raise WorkerError(message)


def last_line(log: Any) -> str:
    """Return the last line that a process wrote."""
    log.seek(0)
    lines = [text for text in log.read().splitlines() if text.strip()]
    return lines[-1][:_MESSAGE_CHARACTERS] if lines else "it ended without a message"
