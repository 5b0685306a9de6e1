"""Runs `megatron serve` of any checkout, with coordinator and server under valgrind's callgrind.

    python bench/peer_workers/callgrind_serve.py FOLDER ECHO_ENGINE serve --port 8000

Run this program with the Python of the checkout. FOLDER receives callgrind's files. ECHO_ENGINE is a program that
replaces `megatron engine` and accepts the same options. If ECHO_ENGINE is empty, `megatron engine` runs.
"""

from __future__ import annotations

import sys
from pathlib import Path

from megatron_runtime.cli import main, processes, readiness
from megatron_runtime.process.children import module_command

FOLDER, ECHO_ENGINE = sys.argv[1:3]
COUNTED = ("coordinator", "server")


def command(module: str, name: str, *arguments: str) -> list[str]:
    """Return the command line with which `megatron serve` starts the component `name`.

    If ECHO_ENGINE is set, it replaces the engine. The components in COUNTED run under callgrind.
    """
    if name == "engine" and ECHO_ENGINE:
        return [sys.executable, ECHO_ENGINE, *arguments]
    program = module_command(module, name, *arguments)
    if name not in COUNTED:
        return program
    return ["valgrind", "--quiet", "--tool=callgrind", f"--callgrind-out-file={Path(FOLDER, 'out.%p')}", *program]


if __name__ == "__main__":
    sys.argv[1:3] = []
    processes.module_command = command  # type: ignore[assignment]
    readiness._CONNECT_SECONDS = 600.0  # a coordinator needs minutes to start under callgrind
    main(prog_name="megatron")
