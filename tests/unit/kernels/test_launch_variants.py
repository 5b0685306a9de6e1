"""The load of an engine on a GPU compiles every kernel that its steps launch, without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[2]


@pytest.fixture(scope="module")
def engines() -> dict[str, Any]:
    """Run the program in a separate process: a process uses Triton either as interpreter or as compiler."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (ROOT / "tests" / "support", FOLDER, ROOT)))
    program = [sys.executable, FOLDER / "launch_variants.py"]
    done = subprocess.run(program, env=environment, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_no_step_launches_a_kernel_that_the_load_has_not_compiled(engines: dict[str, Any]) -> None:
    assert min(engine["loaded"] for engine in engines.values()) > len(("norm", "swiglu", "append", "decode", "prefill"))
    assert {name: engine["later"] for name, engine in engines.items()} == {name: {} for name in engines}
