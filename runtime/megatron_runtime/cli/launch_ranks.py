"""Starts the ranks of an engine on this machine or in this pod, by torch's elastic agent with a static rendezvous.

A rank that ends is never started again by itself: the agent ends the others, and this process with them.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING

import psutil

from megatron_runtime.distributed.identity import NodeIdentity
from megatron_runtime.process.parent import PARENT_VARIABLE

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

logger = logging.getLogger(__name__)

RENDEZVOUS_SECONDS = 900
LAST_SECONDS = 4.0
"""Once a rank has ended the others have so long to end by themselves. The agent would wait longer for a stopped one."""
_LOOK_SECONDS = 0.5
_NOT_OURS = "SIGUSR2"
"""The agent would end its ranks at once on the signals that it handles; SIGTERM has to let rank 0 drain."""


class RanksFailedError(RuntimeError):
    """The ranks have ended because one failed. The message is for people; the cause was told by the rank itself."""


def launch(node: NodeIdentity, arguments: Sequence[str]) -> None:
    """Run `megatron` with `arguments` once for each rank of this node; return when all have ended well.

    SIGTERM and SIGINT are handed to the ranks, of which rank 0 ends the engine in order.

    Raises RanksFailedError.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    def hand_on(number: int, _frame: FrameType | None) -> None:
        for child in psutil.Process().children():
            child.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, hand_on)
    os.environ[PARENT_VARIABLE] = str(os.getpid())
    threading.Thread(target=_end_together, args=(node.ranks_per_node,), name="end", daemon=True).start()
    config = LaunchConfig(
        min_nodes=node.nodes,
        max_nodes=node.nodes,
        nproc_per_node=node.ranks_per_node,
        run_id="engine",
        rdzv_backend="static",
        rdzv_endpoint=f"{node.address}:{node.port or _free_port()}",
        rdzv_configs={"rank": node.node_rank, "timeout": RENDEZVOUS_SECONDS},
        max_restarts=0,
        monitor_interval=0.1,
        signals_to_handle=_NOT_OURS,
    )
    try:
        elastic_launch(config, sys.executable)("-u", "-m", "megatron_runtime.cli", *arguments)
    except ChildFailedError as error:
        rank, first = cause(error.failures)
        how = f"signal {first.signal_name()}" if first.exitcode < 0 else f"status {first.exitcode}"
        raise RanksFailedError(f"rank {rank} ended with {how}, and the engine with it") from error


def cause(failures: Mapping[int, ProcessFailure]) -> tuple[int, ProcessFailure]:
    """The rank, of those that were found ended in one look, whose end was the cause of the others'.

    One that a signal ended did not choose to; one that left with a status may have done so because of it.
    """
    return min(failures.items(), key=lambda failure: (failure[1].exitcode >= 0, failure[1].timestamp))


def _end_together(ranks: int) -> None:
    """Kill the ranks that outlive another for too long."""
    alone_since: float | None = None
    seen = 0
    while True:
        time.sleep(_LOOK_SECONDS)
        living = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
        seen = max(seen, len(living))
        if seen < ranks or len(living) == seen:
            continue
        now = time.monotonic()
        alone_since = alone_since or now
        if now - alone_since > LAST_SECONDS:
            for child in living:
                child.kill()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
