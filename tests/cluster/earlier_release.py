"""The sources and the chart of an earlier commit of this repository."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
CHART = "charts/megatron-inference"
REMEDY = (
    "The test needs the history of this repository, which a shallow clone lacks: run `git fetch --unshallow`, or check "
    "out with fetch-depth 0"
)


def git(*arguments: str) -> bytes:
    """Return the output of git. A commit that the history lacks fails the test."""
    try:
        done = subprocess.run(["git", "-C", str(REPOSITORY), *arguments], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", b"") or b""
        pytest.fail(f"git {' '.join(arguments)}: {said.decode().strip() or error}. {REMEDY}", pytrace=False)
    return done.stdout


def unpack(commit: str, *paths: str, into: Path) -> Path:
    """Write the files of a commit below these paths to a folder, and return it."""
    subprocess.run(["tar", "-x", "-C", str(into)], input=git("archive", commit, *paths), check=True)
    return into
