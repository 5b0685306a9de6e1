"""A suspended engine has given its memory back to the operating system, and goes on where it was."""

import json
import subprocess
import sys

import pytest
from eventually import LONG_SECONDS
from soak import size

from megatron_runtime.requests.config import KVCacheManagementMode

LIBRARIES_KEEP = 80 << 20
"""What kernels may keep as scratch memory. Some MiB where it was measured."""

SCRIPT = """
import gc
import json
import sys
import threading
import numpy as np, psutil
from megatron_runtime.requests.config import InferenceConfig, KVCacheManagementMode
from megatron_runtime.backends.native.engine import EngineCore
from megatron_runtime.engine.engine_request import EngineRequest
from megatron_runtime.backends.native.cpu.executor import CpuExecutor
from megatron_kernels.cpu.memory import PAGES_THREAD
from megatron_runtime.checkpoints.source import resolve
from megatron_runtime.requests.sampling_params import IGNORE_EOS, SamplingParams

gc.disable()  # a collection of a large heap takes seconds, in which an engine sends no heartbeat


def memory():
    # Its own: what a process maps of files, libraries above all, the kernel takes and gives as it likes.
    info = psutil.Process().memory_info()
    return info.rss - info.shared


def suspend(engine):
    engine.suspend()
    for thread in threading.enumerate():
        if thread.name == PAGES_THREAD:
            thread.join()  # it may hold one mapping for as long as it joins two MiB of it


def life(mode):
    config = InferenceConfig(
        kv_cache_management_mode=mode, enable_prefix_caching=True, block_size_tokens=16, enable_chunked_prefill=True
    )
    executor = CpuExecutor(
        resolve("builtin:smollm2-135m"), dtype=sys.argv[1], kv_cache_memory=256 << 20, threads=1
    )
    engine = EngineCore(executor, config)
    report = {"made": memory()}
    executor.load()
    report["loaded"] = memory()
    params = SamplingParams(temperature=0.0, num_tokens_to_generate=6, termination_id=IGNORE_EOS)
    engine.add_request(EngineRequest(0, np.arange(9, 309, dtype=np.int32), np.empty(0, np.int32), params))
    step = lambda: [token for output in engine.step() for token in output.new_tokens]
    answer = step() + step()
    report["used"] = memory()
    suspend(engine)
    report["suspended"] = memory()
    engine.resume()
    while engine.has_work:
        answer += step()
    suspend(engine)
    return {**report, "answer": answer}

print(json.dumps({mode: life(KVCacheManagementMode(mode)) for mode in sys.argv[2:]}))
"""


MODES = tuple(mode.value for mode in KVCacheManagementMode)


@pytest.mark.parametrize(
    ("dtype", "itemsize", "modes"), [("float32", 4, MODES), *size([], soak=[("bfloat16", 2, MODES)])]
)
def test_a_suspend_releases_all_memory_of_the_load_and_a_resume_continues(
    dtype: str, itemsize: int, modes: tuple[str, ...]
) -> None:
    command = [sys.executable, "-c", SCRIPT, dtype, *modes]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONG_SECONDS)
    assert done.returncode == 0, done.stderr
    reports = json.loads(done.stdout)
    assert set(reports) == set(modes)
    sizes = {
        mode: {name: size >> 20 for name, size in report.items() if name != "answer"}
        for mode, report in reports.items()
    }
    made = reports["persist"]["made"]  # the first: nothing was loaded before it
    weights = itemsize * 134_515_008
    for mode, report in reports.items():
        assert report["loaded"] - report["made"] > 0.9 * weights, (mode, sizes)
        assert report["used"] - report["suspended"] > 0.9 * weights, (mode, sizes)
        assert report["suspended"] - made < LIBRARIES_KEEP, (mode, sizes)
        if mode != "recompute" or dtype == "float32":  # in fewer bits what is computed again is rounded otherwise
            assert report["answer"] == reports["persist"]["answer"]
    assert len(reports["persist"]["answer"]) == 6
    if dtype == "float32":  # the cache is large enough to be seen
        cache = itemsize * 300 * 2 * 30 * 3 * 64  # of the prompt: 30 layers with 3 heads of keys and values
        kept = {mode: report["suspended"] - report["made"] for mode, report in reports.items()}
        assert kept["persist"] > 0.5 * cache, sizes
        assert kept["offload"] - kept["recompute"] > 0.5 * cache, sizes  # both after the libraries are loaded
