"""What `megatron serve` imports before it starts its processes."""

import subprocess
import sys

SLOW = ("httpx", "pydantic", "zmq", "numpy", "torch")


def test_serve_starts_its_processes_before_it_imports_what_takes_long() -> None:
    program = f"import sys, megatron_runtime.cli.serve; print([name for name in {SLOW} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
