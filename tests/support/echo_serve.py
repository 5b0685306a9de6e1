"""`megatron` whose `serve` and `run` start echo engines: the options of echo engines come from the environment."""

from __future__ import annotations

import sys

import echo_engine

from megatron_runtime.cli import main, processes, run
from megatron_runtime.process.children import module_command

PROGRAM = __file__


def command(module: str, name: str, *arguments: str) -> list[str]:
    """Return the command of a child process of `megatron`."""
    if name == "engine":
        return [sys.executable, echo_engine.PROGRAM, *arguments]
    if name == "serve":
        return [sys.executable, PROGRAM, name, *arguments]
    return module_command(module, name, *arguments)


if __name__ == "__main__":
    processes.module_command = run.module_command = command  # type: ignore[assignment]
    main(prog_name="megatron")
