"""A coordinator process: it answers, and it ends with the process that started it."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest
from eventually import LONG_SECONDS
from own_children import own_children

from megatron_runtime.coordinator.core.settings import CoordinatorSettings
from megatron_runtime.coordinator.spawn import CoordinatorStartError, spawn_coordinator
from megatron_runtime.megatron_core.inference_client import InferenceClient

LOOPBACK = CoordinatorSettings(listen="127.0.0.1", client_port=0, single_port=True)

PARENT = """
    import os, sys, time
    from megatron_runtime.coordinator.core.settings import CoordinatorSettings
    from megatron_runtime.coordinator.spawn import spawn_coordinator

    spawned = spawn_coordinator(CoordinatorSettings(listen="127.0.0.1", client_port=0, single_port=True))
    if os.fork() == 0:
        # A child that inherits every descriptor of its parent must not keep the coordinator alive.
        time.sleep(600)
    print(spawned.pid, flush=True)
    sys.stdin.read()
"""


async def test_it_answers_at_its_address_until_stop() -> None:
    spawned = spawn_coordinator(LOOPBACK)
    try:
        client = InferenceClient(spawned.address, deserialize=False)
        await client.start()
        assert (await client.status()).engines == []
        client.stop()
    finally:
        spawned.stop()
        spawned.stop()
    assert spawned.process.returncode == 0
    assert not psutil.pid_exists(spawned.pid)


def test_it_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    # No `if __name__ == "__main__"`: the caller's main module must not run again in the child.
    script.write_text(textwrap.dedent(PARENT))
    parent = subprocess.Popen([sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    coordinator = psutil.Process(int(parent.stdout.readline()))
    others = psutil.Process(parent.pid).children()
    try:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        coordinator.wait(timeout=LONG_SECONDS)
    finally:
        for other in others:
            if other.is_running():
                other.kill()
    assert not coordinator.is_running()


def test_a_port_in_use_is_an_error_and_leaves_no_process() -> None:
    before = own_children()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(CoordinatorStartError, match=f"127.0.0.1:{port} did not start"):
            spawn_coordinator(CoordinatorSettings(listen="127.0.0.1", client_port=port, single_port=True))
    assert own_children() <= before  # an earlier one may have been reaped since


async def test_stop_accepts_a_killed_coordinator() -> None:
    spawned = await asyncio.to_thread(spawn_coordinator, LOOPBACK)
    os.kill(spawned.pid, signal.SIGKILL)
    await asyncio.to_thread(spawned.stop)
    assert spawned.process.returncode == -signal.SIGKILL
