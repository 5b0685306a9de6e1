"""A released executor has given its memory back to the operating system, and comes back the same."""

import json
import subprocess
import sys

SCRIPT = """
import json, psutil
import numpy as np
from megatron_runtime.engines.executor import StepPlan
from megatron_runtime.engines.torch_executor import TorchExecutor
from megatron_runtime.loading.source import resolve
from megatron_runtime.sampling.columns import SamplingColumns
from megatron_runtime.sampling_params import SamplingParams

columns = SamplingColumns(1)
none = np.empty(0, np.int32)
columns.admit(0, SamplingParams(temperature=0.0), seed=0, prompt=none, generated=none)
memory = lambda: psutil.Process().memory_info().rss
executor = TorchExecutor(resolve("builtin:smollm2-135m"), dtype="float32", kv_cache_memory=256 << 20, threads=1)

def step():
    tokens, page_size = 64, executor.page_size
    table = np.arange(tokens // page_size, dtype=np.int32)
    return executor.execute(StepPlan(
        token_ids=np.arange(tokens, dtype=np.int32), positions=np.arange(tokens, dtype=np.int32),
        query_lengths=np.array([tokens], np.int32), context_lengths=np.array([tokens], np.int32),
        block_tables=table[None], slot_mapping=np.arange(tokens, dtype=np.int64),
        needs_sample=np.array([True]), sampling=columns.rows(
            np.array([0]), generated=np.array([0]), needs_sample=np.array([True]), prompt_targets={}
        ))).tokens.tolist()

report = {"made": memory()}
executor.load()
report["first"] = step()
report["loaded"] = memory()
executor.release_weights()
executor.release_kv(None)
report["released"] = memory()
executor.load()
report["second"] = step()
print(json.dumps(report))
"""


def test_release_frees_memory_and_load_brings_it_back() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    weights = 4 * 134_515_008
    assert report["loaded"] - report["made"] > 0.9 * weights
    assert report["loaded"] - report["released"] > 0.9 * weights
    assert report["first"] == report["second"]
