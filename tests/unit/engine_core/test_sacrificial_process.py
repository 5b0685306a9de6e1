"""A process that works on hostile input: its end is an exception in its parent, and its parent's end is its end."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from eventually import LONG_SECONDS, eventually

from megatron_runtime.process.sacrificial_process import ProcessLostError, ProcessStartError, SacrificialProcess

SUPPORT = Path(__file__).parents[2] / "support"
MEMORY = 256 << 20


@pytest.fixture
def helper(monkeypatch: pytest.MonkeyPatch) -> Iterator[SacrificialProcess]:
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))
    helper = SacrificialProcess("sacrificed", memory_bytes=MEMORY, setup=b"setup", max_reply_bytes=1 << 20)
    yield helper
    helper.close()


def pid_of(helper: SacrificialProcess) -> int:
    """Of the process that answers a call now."""
    pid, setup, request = helper.call(b"hello", timeout_seconds=LONG_SECONDS).split()
    assert (setup, request, int(pid)) == (b"setup", b"hello", helper.pid)
    return int(pid)


@pytest.mark.parametrize(
    ("request_", "timeout_seconds", "cause"),
    [
        (b"crash", LONG_SECONDS, "SIGSEGV"),
        (b"raise", LONG_SECONDS, "exit status 1"),
        (b"sleep 600", 0.2, "longer than 0.2 s"),
        (b"hold 600", 0.2, "longer than 0.2 s"),
        (b"allocate 1000000000", LONG_SECONDS, "256 MiB of memory"),
        (b"reply 2000000", LONG_SECONDS, "2000000 bytes, at most 1048576"),
    ],
)
def test_a_lost_process_is_an_error_of_its_call_alone(
    helper: SacrificialProcess, request_: bytes, timeout_seconds: float, cause: str
) -> None:
    before = pid_of(helper)
    assert pid_of(helper) == before, "one process for all calls"
    with pytest.raises(ProcessLostError, match=cause):
        helper.call(request_, timeout_seconds=timeout_seconds)
    assert not is_alive(before)
    assert pid_of(helper) != before


def test_a_process_killed_between_two_calls_is_started_again(helper: SacrificialProcess) -> None:
    before = pid_of(helper)
    os.kill(before, signal.SIGKILL)
    os.waitid(os.P_PID, before, os.WEXITED | os.WNOWAIT)
    assert pid_of(helper) != before


def test_requests_and_replies_of_a_megabyte_pass(helper: SacrificialProcess) -> None:
    body = b"x" * (1 << 19)
    assert helper.call(body, timeout_seconds=LONG_SECONDS).endswith(b"setup " + body)


def test_a_process_that_cannot_prepare_is_no_fault_of_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))
    helper = SacrificialProcess("sacrificed", memory_bytes=MEMORY, setup=b"fail")
    with pytest.raises(ProcessStartError, match="exit status 1"):
        helper.call(b"hello", timeout_seconds=LONG_SECONDS)
    assert helper.pid is None


async def test_closing_ends_a_call_in_progress_and_the_process(helper: SacrificialProcess) -> None:
    pid = pid_of(helper)
    errors: list[BaseException] = []

    def call() -> None:
        try:
            helper.call(b"sleep 600", timeout_seconds=LONG_SECONDS)
        except (ProcessLostError, ProcessStartError) as error:  # closed during the call, or before it
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    helper.close()
    thread.join()
    assert not is_alive(pid)
    assert len(errors) == 1
    with pytest.raises(ProcessStartError, match="closed"):
        helper.call(b"hello", timeout_seconds=LONG_SECONDS)


@pytest.mark.slow
@pytest.mark.parametrize("work", ["sleep 600", "hold 600", ""], ids=["busy", "busy in native code", "idle"])
async def test_it_ends_with_a_parent_that_is_killed(work: str) -> None:
    pid = pid_whose_parent_was_killed(work)

    async def is_gone() -> bool:
        return not is_alive(pid)

    await eventually(is_gone, what="the end of the process whose parent was killed")


def pid_whose_parent_was_killed(work: str) -> int:
    program = f"""
import sys, threading, time
from megatron_runtime.process.sacrificial_process import SacrificialProcess
helper = SacrificialProcess("sacrificed", memory_bytes={MEMORY})
helper.call(b"hello", timeout_seconds=60)
if {bool(work)}:
    threading.Thread(target=helper.call, args=(b"{work}",), kwargs=dict(timeout_seconds=1), daemon=True).start()
    time.sleep(0.2)
print(helper.pid, flush=True)
time.sleep(600)
"""
    environment = {**os.environ, "PYTHONPATH": str(SUPPORT)}
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert is_alive(pid)
        parent.kill()
    return pid


def is_alive(pid: int) -> bool:
    """Whether the process runs: one that ended and waits for its parent does not."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] != "Z"
