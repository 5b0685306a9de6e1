"""What long steps print: the Go build, and activity where no live display is possible."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from localcluster import programs, shell
from localcluster.errors import ClusterError
from localcluster.progress import Steps

GO = """#!/bin/sh
if [ "$1" = list ]; then
    echo 'go: downloading k8s.io/api v0.34.2' >&2
    printf 'a.example/x\\na.example/y\\na.example/cmd/kubectl\\n'
    exit
fi
while [ "$1" != -o ]; do shift; done
echo a.example/x >&2; sleep 0.4; echo a.example/y >&2; sleep 0.4; echo a.example/cmd/kubectl >&2
{
    [ -z "$FAILS" ] || { echo 'a.example/y: main.go:3:1: undefined: x' >&2; exit 1; }
    echo program >"$2/kubectl"
}
sleep 0.4
"""


@pytest.fixture
def output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """The lines of the steps. `go` prints what a build of three packages prints."""
    (tmp_path / "go").write_text(GO)
    (tmp_path / "go").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(shell, "TICK_SECONDS", 0.1)
    return io.StringIO()


def build(output: io.StringIO, folder: Path, *, interval: float) -> None:
    steps = Steps(console=Console(file=output, soft_wrap=True), interval=interval)
    with steps.step("build kubectl") as step:
        programs._build(["kubectl"], folder, step)


def test_a_build_says_how_many_packages_are_done(output: io.StringIO, tmp_path: Path) -> None:
    build(output, tmp_path, interval=0.0)
    lines = output.getvalue().splitlines()
    assert "          … build kubectl: 1 modules downloaded" in lines
    assert any("1 of 3 packages, 0 of 1 programs" in line for line in lines)
    assert any("3 of 3 packages, 1 of 1 programs" in line for line in lines)
    assert (tmp_path / "kubectl").read_text() == "program\n"


def test_without_a_terminal_an_activity_is_a_line_only_from_time_to_time(output: io.StringIO, tmp_path: Path) -> None:
    build(output, tmp_path, interval=60.0)
    (line,) = output.getvalue().splitlines()
    assert line.endswith("s] build kubectl")


def test_a_build_that_fails_shows_the_compiler_and_no_package(
    output: io.StringIO, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAILS", "1")
    with pytest.raises(ClusterError, match=r"undefined: x") as caught:
        build(output, tmp_path, interval=60.0)
    assert "a.example/x" not in str(caught.value)


def test_the_time_left_is_estimated_from_what_is_done() -> None:
    now = 100.0
    progress = programs.BuildProgress(packages=940, programs=2, clock=lambda: now)
    assert progress.text() == "0 of 940 packages, 0 of 2 programs"
    progress.compiled, now = 250, 220.0
    assert progress.text() == "250 of 940 packages, 0 of 2 programs, about 6 min left"
    progress.compiled, progress.linked, now = 940, 1, 580.0
    assert progress.text() == "940 of 940 packages, 1 of 2 programs, less than a minute left"
    progress.linked = 2
    assert progress.text() == "940 of 940 packages, 2 of 2 programs"
