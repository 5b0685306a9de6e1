"""The guides are correct: their commands run, their resources are valid, their programs compile.

Each `sh` block of `docs/get-started` and `docs/guides` has a marker in the line above it:

    <!-- test: run -->                   a test runs it; a marked `python` block as well
    <!-- test: background until "X" -->  a test starts it and waits until it prints X
    <!-- test: soak -->                  run with MEGATRON_SOAK=1: it takes long, or much disk
    <!-- test: cluster -->               needs a cluster of the reader's own; `cluster/test_guides.py` runs those that
                                         install, upgrade or change something, and compares their effects
    <!-- test: setup -->                 sets up the environment that the tests run in
    <!-- test: skip: REASON -->          does not run here, for that reason

The blocks of a page run in order, in one folder with links to the repository's own, and with a free port for port 8000.
A command in the background is started once for all pages that have it. Programs in Python run in the test's process.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from eventually import LONG_SECONDS
from guide_blocks import KINDS, PAGES, ROOT, Block, blocks
from soak import SOAK

from megatron_operator.resource.names import KIND
from megatron_operator.resource.spec import parse_spec
from megatron_runtime.cli.processes import free_ports

UPGRADE = re.compile(r"helm upgrade [^\n`]+")
"""A command with arguments. In prose, `helm upgrade` has none."""
WRITTEN = re.compile(r" > ([\w.-]+)$", re.M)
"""Files that commands write."""
LINKED = ("bench", "charts", "docs", "manifests")


def _named(pages: list[Path]) -> list[Any]:
    return [pytest.param(page, id=page.stem) for page in pages]


@pytest.mark.parametrize("guide", _named(PAGES))
def test_every_shell_block_says_whether_it_runs(guide: Path) -> None:
    wrong = [
        block.code
        for block in blocks(guide)
        if (block.language in ("sh", "console") or block.marker) and not KINDS.fullmatch(block.marker)
    ]
    assert not wrong, f"{guide}: give these blocks a marker; {__doc__}"


@pytest.mark.parametrize("guide", _named(PAGES))
def test_every_resource_is_valid(guide: Path) -> None:
    """A block with a spec alone shows some fields of a resource."""
    for block in blocks(guide):
        if block.language != "yaml":
            continue
        for document in yaml.safe_load_all(block.code):
            if document.get("kind", KIND) == KIND and "spec" in document:
                model = {"source": {"builtin": "smollm2-135m"}}
                parse_spec({"model": model, **document["spec"]})


@pytest.mark.parametrize("guide", _named(PAGES))
def test_every_program_compiles(guide: Path) -> None:
    for block in blocks(guide):
        if block.language == "python":
            compile(block.code, str(guide), "exec")


def test_every_helm_upgrade_keeps_the_values_of_the_installation() -> None:
    """With --set alone, helm drops them: an operator that serves two namespaces then serves all."""
    folders = {"docs": "*.md", "charts": "*", "operator": "*.py", "runtime": "*.py", "tools": "*.py", ".github": "*"}
    files = [file for folder, name in folders.items() for file in (ROOT / folder).rglob(name) if file.is_file()]
    commands = {
        (str(file.relative_to(ROOT)), command)
        for file in [*files, *ROOT.glob("*.md"), ROOT / "Makefile"]
        for command in UPGRADE.findall(file.read_text(errors="replace").replace("\\\n", " "))
    }
    assert {"docs/guides/upgrade.md", "charts/megatron-inference/templates/NOTES.txt"} <= {name for name, _ in commands}
    wrong = [found for found in commands if "--reset-then-reuse-values" not in found[1].split()]
    assert not wrong, "give --reset-then-reuse-values: --reuse-values lacks the defaults of a newer chart"


class _Background:
    """Runs the commands in the background, each once, with a free port for port 8000."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._environments: dict[str, dict[str, str]] = {}
        self._processes: list[subprocess.Popen[str]] = []

    def environment_of(self, block: Block) -> dict[str, str]:
        """Return the environment of the blocks that follow this one, when it has printed what they need."""
        if block.code not in self._environments:
            environment = _environment()
            process = _start(block, self._folder, environment)
            self._processes.append(process)
            with _ended_after(process, LONG_SECONDS):
                printed = _read_until(process, block.ready_text or "")
            assert block.ready_text in printed, f"{block.code}\nended or printed no {block.ready_text!r}:\n{printed}"
            # The pipe must not fill up.
            threading.Thread(target=process.stdout.read, daemon=True).start()  # type: ignore[union-attr]
            self._environments[block.code] = environment
        return self._environments[block.code]

    def close(self) -> None:
        for process in self._processes:
            os.killpg(process.pid, signal.SIGTERM)
        for process in self._processes:
            process.wait(LONG_SECONDS)


@pytest.fixture(scope="module")
def background(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Background]:
    found = _Background(tmp_path_factory.mktemp("background"))
    yield found
    found.close()


@pytest.mark.long
@pytest.mark.parametrize("guide", _named([page for page in PAGES if any(block.runs for block in blocks(page))]))
def test_commands_run(guide: Path, tmp_path: Path, background: _Background, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LINKED:
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    environment = _environment()
    for block in [block for block in blocks(guide) if block.runs and (block.marker != "soak" or SOAK)]:
        if block.ready_text is not None:
            environment = background.environment_of(block)
        elif block.language == "python":
            for name, value in environment.items():
                monkeypatch.setenv(name, value)
            exec(compile(_local(block.code, environment), str(guide), "exec"), {"__name__": "__main__"})
        else:
            process = _start(block, tmp_path, environment)
            with _ended_after(process, LONG_SECONDS):
                printed, _ = process.communicate()
            assert process.returncode == 0, f"{block.code}\nexit code {process.returncode}:\n{printed}"
            for name in WRITTEN.findall(block.code):
                assert (tmp_path / name).read_text(), f"{block.code}\nwrote nothing to {name}:\n{printed}"


PORT = "GUIDE_PORT"
"""The variable with the port that replaces port 8000."""


def _environment() -> dict[str, str]:
    (port,) = free_ports(1)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    url = f"http://127.0.0.1:{port}"
    return {**os.environ, "PATH": path, PORT: str(port), "MEGATRON_URL": url, "HF_HUB_OFFLINE": "1", "NO_PROXY": "*"}


def _local(code: str, environment: dict[str, str]) -> str:
    return code.replace("8000", environment[PORT])


def _start(block: Block, folder: Path, environment: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["bash", "-euc", _local(block.code, environment)],
        cwd=folder,
        env=environment,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


@contextmanager
def _ended_after(process: subprocess.Popen[str], seconds: float) -> Iterator[None]:
    timer = threading.Timer(seconds, os.killpg, (process.pid, signal.SIGKILL))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _read_until(process: subprocess.Popen[str], text: str) -> str:
    printed = ""
    assert process.stdout is not None
    for line in process.stdout:
        printed += line
        if text in line:
            break
    return printed
