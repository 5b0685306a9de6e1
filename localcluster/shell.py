"""Running other programs: one function that captures output and turns failure into a readable error."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from localcluster.errors import ClusterError


def run(
    command: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdin: str | None = None,
    check: bool = True,
    timeout: float | None = None,
) -> subprocess.CompletedProcess[str]:
    """Runs a program to its end; with `check`, a failure raises with the last lines of what it said."""
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


def tail(text: str, lines: int = 15) -> str:
    return "\n".join("    " + line for line in text.strip().splitlines()[-lines:])
