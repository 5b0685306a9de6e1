"""A process whose interpreter hangs ends, with the place where it hangs, the first process of a container as well."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from megatron_runtime.parallel.interpreter_watch import END_STATUS

PROGRAM = """
import ctypes, os, sys
from megatron_runtime.parallel import interpreter_watch

interpreter_watch.END_SECONDS = 0.5
watch = interpreter_watch.InterpreterWatch()
watch.beat(is_long=False)
watch.end()
watch = interpreter_watch.InterpreterWatch()
watch.beat(is_long=True)
watch.beat(is_long=False)
print(os.getpid(), flush=True)

def hang():
    ctypes.PyDLL(None).sleep(60)

hang()
"""
CONTAINER = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child"]


def run(*before: str) -> subprocess.CompletedProcess[str]:
    program = [*before, sys.executable, "-c", PROGRAM]
    return subprocess.run(program, check=False, capture_output=True, text=True, timeout=50)


@pytest.mark.parametrize("is_first", [False, True], ids=["any", "the first of a container"])
def test_it_ends_and_says_where_it_hung(is_first: bool) -> None:
    if is_first and (shutil.which("unshare") is None or subprocess.run([*CONTAINER, "true"], check=False).returncode):
        pytest.skip("no process of this user can be the first of a container here")
    ended = run(*CONTAINER) if is_first else run()
    assert (ended.stdout == "1\n") is is_first
    assert ended.returncode == END_STATUS
    assert "in hang" in ended.stderr
