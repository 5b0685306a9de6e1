"""A process whose interpreter hangs ends itself and writes where it hangs, as the first process of a container too."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest
from eventually import LONG_SECONDS

PROGRAM = """
import ctypes, os
import zmq
from megatron_runtime.backends.native.ranked import channel
from megatron_runtime.backends.native.ranked.plan_codec import pack
from megatron_runtime.distributed.watch import StepProgress

channel.HEARTBEAT_SECONDS = channel.WATCHDOG_MARGIN_SECONDS = 0.5
channel.WATCHDOG_RENEWAL_SECONDS = 0.0
context = zmq.Context()
pull, push, orders, swallow = (context.socket(kind) for kind in (zmq.PULL, zmq.PUSH, zmq.PUSH, zmq.PULL))
orders.bind("inproc://orders"), pull.connect("inproc://orders")
swallow.bind("inproc://swallow"), push.connect("inproc://swallow")
orders.send_multipart([pack([int(channel.Kind.WELCOME), 0, 0]), pack(None)])
end = channel.FollowerChannel(
    1, pull=pull, push=push, progress=StepProgress(), on_lost=lambda error: None, has_watchdog=True
)
end.start(timeout_seconds=60)
print(os.getpid(), flush=True)

def hang():
    ctypes.PyDLL(None).sleep(60)

hang()
"""
CONTAINER = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child"]


@pytest.mark.parametrize("is_first", [False, True], ids=["any", "the first of a container"])
def test_hung_process_ends_with_a_traceback(is_first: bool) -> None:
    if is_first and (shutil.which("unshare") is None or subprocess.run([*CONTAINER, "true"], check=False).returncode):
        pytest.skip("no process of this user can be the first of a container here")
    ended = subprocess.run(
        [*(CONTAINER if is_first else []), sys.executable, "-c", PROGRAM],
        check=False,
        capture_output=True,
        text=True,
        timeout=LONG_SECONDS,
    )
    assert (ended.stdout == "1\n") is is_first
    assert ended.returncode == 1
    assert "in hang" in ended.stderr
