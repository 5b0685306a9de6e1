"""`python load_worker.py MODEL DTYPE THREADS` loads a model once, and prints the measured seconds as JSON."""

from __future__ import annotations

import importlib
import json
import os
import sys
import time

# As in an engine process.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def main() -> None:
    model, dtype, threads = sys.argv[1:]
    begun = time.perf_counter()
    importlib.import_module("torch")
    torch_at, cpu_at = time.perf_counter(), time.process_time()
    from megatron_runtime.backends.native.build import build_native
    from megatron_runtime.engine.settings import EngineSettings

    imported = time.perf_counter()
    loaded = build_native(
        EngineSettings(
            coordinator="tcp://127.0.0.1:0",  # never connected to
            name="bench",
            model=model,
            dtype=dtype,
            max_sequence_length=1024,
            threads=int(threads),
        )
    )
    loaded.core.executor.load()
    ready, cpu_ready = time.perf_counter(), time.process_time()
    assert loaded.controller is not None
    loaded.controller.tokenizer  # noqa: B018 - loaded at first use
    figures = {
        "import_torch": torch_at - begun,
        "import_own": imported - torch_at,
        "load": ready - imported,
        "total": ready - torch_at,
        "cpu": cpu_ready - cpu_at,
        "tokenizer": time.perf_counter() - ready,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
