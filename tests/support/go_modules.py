"""Files and programs of Go modules that tests use."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path


def kept_programs() -> Path:
    """Return the directory in which programs of tests are kept."""
    directory = Path.home() / ".cache/megatron/test-programs"
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def module_directory(module: str) -> Path:
    """Download `PATH@VERSION` and return its directory."""
    command = ["go", "mod", "download", "-json", module]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stdout + done.stderr
    return Path(json.loads(done.stdout)["Dir"])


def built_program(module: str, package: str) -> Path:
    """Build the program of a package of `PATH@VERSION` on its first use, and return its path.

    `go install` rejects modules with `replace` directives, so this builds in the directory of the module.
    """
    program = kept_programs() / f"{module.replace('/', '-')}-{Path(package).name}"
    if not program.exists():
        made = program.with_name(f"{program.name}.{os.getpid()}")
        command = ["go", "build", "-trimpath", "-ldflags", "-s -w", "-o", made, package]
        environment = os.environ | {"CGO_ENABLED": "0"}
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, cwd=module_directory(module), env=environment
        )
        assert done.returncode == 0, done.stderr
        made.replace(program)
    return program
