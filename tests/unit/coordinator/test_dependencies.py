"""The operator's image runs coordinators: they need no package of the runtime's extra dependencies."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).parents[3] / "pyproject.toml"
PROGRAM = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name in sys.argv[1:]:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Absent())
import megatron_runtime.cli.containers
import megatron_runtime.coordinator.metrics
import megatron_runtime.coordinator.service
import megatron_runtime.process.health
import megatron_runtime.requests.hashing
import megatron_runtime.transport.zmtp.curve
"""


def test_a_coordinator_starts_without_the_dependencies_of_engines_and_servers() -> None:
    extras = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]
    names = [re.split(r"[^\w-]", entry)[0] for extra in ("runtime", "operator") for entry in extras[extra]]
    assert "torch" in names
    result = subprocess.run([sys.executable, "-c", PROGRAM, *names], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
