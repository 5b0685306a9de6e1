"""Files and programs of Go modules that tests use."""

from __future__ import annotations

import hashlib
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
    return program if program.exists() else _build(program, package, module_directory(module))


def own_program(module: Path) -> Path:
    """Build the program of a module of this repository, once for each content, and return its path."""
    content = hashlib.sha256(b"".join(module.joinpath(name).read_bytes() for name in ("go.mod", "go.sum", "main.go")))
    program = kept_programs() / f"{module.name}-{content.hexdigest()[:16]}"
    return program if program.exists() else _build(program, ".", module)


def _build(program: Path, package: str, directory: Path) -> Path:
    made = program.with_name(f"{program.name}.{os.getpid()}")
    command = ["go", "build", "-trimpath", "-ldflags", "-s -w", "-o", made, package]
    environment = os.environ | {"CGO_ENABLED": "0"}
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=directory, env=environment)
    assert done.returncode == 0, done.stderr
    return made.replace(program)
