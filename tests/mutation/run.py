"""Mutation testing: change one expression or statement of the product, and check whether a test fails.

`docs/development/mutation-testing.md` explains the results.

    MEGATRON_MUTANTS=N   number of mutants, a random sample (default 200).
    MEGATRON_SEED=N      seed of the sample (default 1).
    MEGATRON_MUTATED=P   mutate only modules whose path contains P.
    MEGATRON_MUTATION_SECONDS=N  start no mutant after N seconds (default 3600).

The changes are made in copies of the repository under build/, not in the working tree.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import queue
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modules import MODULES
from mutants import Mutant, mutants_of

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "mutation"
REPORT = ROOT / "build" / "mutation.json"
COPIED = ("operator", "runtime", "kernels", "tests", "charts", "manifests", "docs", "pyproject.toml")
WORKERS = min(4, os.cpu_count() or 1)
TEST_SECONDS = 15
"""A test that takes longer than this under a mutant has failed: the longest takes three seconds."""
LEAST_KILLED = 0.65
"""Minimum share of killed mutants. Of 161 mutants the tests killed 78 %; a small sample may have far fewer."""


@dataclass(frozen=True)
class Record:
    """lines: for each module and line the tests that execute it; "" stands for the import of the module."""

    lines: dict[str, dict[str, list[str]]]
    seconds: dict[str, float]

    def tests_for(self, mutant: Mutant) -> list[str]:
        """Return the tests that can detect the mutant, shortest first. For import-time code: all of the module."""
        lines = self.lines.get(mutant.path, {})
        found = {test for line in range(mutant.begins, mutant.last + 1) for test in lines.get(str(line), ())}
        if "" in found or not found & self.seconds.keys():
            imported = "" in found
            found = {test for tests in lines.values() for test in tests} if imported else set()
        return sorted(found & self.seconds.keys(), key=lambda test: (self.seconds[test], test))


def copy_to(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=ignored, symlinks=True)
        else:
            shutil.copy2(ROOT / name, folder / name)
    return folder


def environment(folder: Path, **more: str) -> dict[str, str]:
    """Return the environment for tests of the copy in `folder`, without the variables of `make soak`."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("MEGATRON_")}
    paths = [folder / "operator", folder / "runtime", folder / "kernels", folder / "tests/mutation", folder]
    return {**inherited, "PYTHONPATH": ":".join(map(str, paths)), **more}


def pytest(folder: Path, *arguments: str, env: dict[str, str], seconds: float) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=seconds)


def record(folder: Path, modules: set[str], tests: tuple[str, ...]) -> Record:
    """Run the tests once without a mutant. Reuse the previous record if no file has changed."""
    digest = hashlib.sha256(repr((sorted(modules), tests)).encode())
    files = [path for name in ("operator", "runtime", "tests") for path in (folder / name).rglob("*.py")]
    for path in sorted(path for path in files if path.parent.name != "mutation"):
        digest.update(path.read_bytes())
    kept = BUILD / f"lines-{digest.hexdigest()[:16]}.json"
    if not kept.exists():
        sources = ":".join(sorted({str(folder / Path(module).parent) for module in modules}))
        env = environment(folder, MUTATION_SOURCES=sources, MUTATION_RECORD=str(kept.with_suffix(".part")))
        done = pytest(folder, "-p", "recorder", *tests, env=env, seconds=1200)
        if done.returncode != 0:
            sys.exit(f"the tests fail without a mutant:\n{done.stdout[-3000:]}\n{done.stderr[-1000:]}")
        kept.with_suffix(".part").rename(kept)
    return Record(**json.loads(kept.read_text()))


_times = itertools.count(1_000_000_000)


def put(path: Path, source: str) -> None:
    """Write a version of a module with a new modification time, so that Python does not use stale bytecode."""
    path.write_text(source)
    moment = next(_times)
    os.utime(path, (moment, moment))


def try_out(mutant: Mutant, folder: Path, tests: list[str], seconds: float) -> dict[str, Any]:
    """Write the mutant into `folder`, run the tests, and restore the module."""
    begun = time.monotonic()
    original = (folder / mutant.path).read_text()
    outcome, by = "not covered" if not tests else "survived", None
    try:
        put(folder / mutant.path, mutant.source)
        if tests:
            limits = "--timeout", str(TEST_SECONDS), "--timeout-method", "signal"
            done = pytest(folder, "-p", "quick_exit", *limits, *tests, env=environment(folder), seconds=seconds)
            if done.returncode != 0:
                outcome = "killed"
                failed = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("FAILED ")]
                by = failed[0] if failed else "import"
    except subprocess.TimeoutExpired:
        outcome, by = "killed", "time limit"
    finally:
        put(folder / mutant.path, original)
    fields = {name: getattr(mutant, name) for name in ("path", "first", "before", "after")}
    return {**fields, "outcome": outcome, "by": by, "tests": len(tests), "seconds": round(time.monotonic() - begun, 1)}


def main() -> None:
    seed = int(os.environ.get("MEGATRON_SEED", "1"))
    wanted, only = int(os.environ.get("MEGATRON_MUTANTS", "200")), os.environ.get("MEGATRON_MUTATED", "")
    folders: queue.Queue[Path] = queue.Queue()
    for number in range(WORKERS):
        folders.put(copy_to(BUILD / f"copy-{number}"))
    tests_of = {
        str(path.relative_to(ROOT)): tests for pattern, tests in MODULES.items() for path in sorted(ROOT.glob(pattern))
    }
    for pattern in MODULES:
        if not any(ROOT.glob(pattern)):
            sys.exit(f"tests/mutation/modules.py: no module matches {pattern}")
    everything = [
        mutant for path in sorted(tests_of) if only in path for mutant in mutants_of(path, (ROOT / path).read_text())
    ]
    sample = random.Random(seed).sample(everything, min(wanted, len(everything)))
    used = {tests_of[mutant.path] for mutant in sample}
    records = {
        tests: record(BUILD / "copy-0", {path for path, its in tests_of.items() if its == tests}, tests)
        for tests in sorted(used)
    }
    print(f"{len(sample)} of {len(everything)} mutants, seed {seed}", flush=True)

    results: list[dict[str, Any]] = []
    until = time.monotonic() + float(os.environ.get("MEGATRON_MUTATION_SECONDS", "3600"))

    def one(mutant: Mutant) -> None:
        if time.monotonic() > until:
            return
        found = records[tests_of[mutant.path]]
        tests = found.tests_for(mutant)
        seconds = min(180.0, 60 + 5 * sum(found.seconds[test] for test in tests))
        folder = folders.get()
        try:
            result = try_out(mutant, folder, tests, seconds)
        finally:
            folders.put(folder)
        if result["outcome"] != "killed":
            print("{outcome}: {path}:{first}: {before}  ->  {after}".format(**result), flush=True)
        results.append(result)

    with ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(one, sample))
    counts = Counter(result["outcome"] for result in results)
    killed = counts["killed"] / max(1, len(results))
    REPORT.write_text(json.dumps({"seed": seed, "killed": killed, "counts": counts, "mutants": results}, indent=1))
    print(f"{dict(counts)} of {len(results)} tried: {killed:.0%} killed; {REPORT.relative_to(ROOT)}")
    sys.exit(killed < LEAST_KILLED)


if __name__ == "__main__":
    main()
