from __future__ import annotations

import os
import time
from typing import Any

from vllm.v1.engine.async_llm import log


class MultiprocExecutor:
    """The ranks of another pod than the first. They end when the file $FAKE_VLLM_LOG.end exists."""

    def __init__(self, vllm_config: Any, *, monitor_workers: bool = True) -> None:
        log(f"workers of pod {vllm_config._args.node_rank} start")

    def start_worker_monitor(self, *, inline: bool = False) -> None:
        while not os.path.exists(os.environ["FAKE_VLLM_LOG"] + ".end"):
            time.sleep(0.05)
        print("RuntimeError: a rank of the fake ended", flush=True)
