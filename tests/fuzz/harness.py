"""Run a fuzz target in a child process with limits on time and memory, and report the input that exceeds them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import resource
import signal
import struct
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import hypothesis
from eventually import LONG_SECONDS
from hypothesis import HealthCheck, Phase, settings
from hypothesis.strategies import SearchStrategy
from warm_python import warm_context

from tests.fuzz.strategies import mutated

CORPUS = Path(__file__).parent / "corpus"
FINDINGS = Path(__file__).parents[2] / "build" / "fuzz"
HANG_SECONDS = 1.0
"""Limit of CPU time for one input, on the reference machine."""
STALL_SECONDS = 2 * LONG_SECONDS
"""Limit of wall-clock time for one input."""
START_SECONDS = 600.0
"""Limit of wall-clock time until the first input: a cold machine imports torch first."""
_REFERENCE_SECONDS = 0.04
"""CPU time of the calibration on the reference machine."""
_LARGEST = 1 << 20
"""Bytes of an input that a report contains."""
_HEAD = struct.Struct("<QQ")
_BATCH = 100
MIN_INPUTS = 10
"""New inputs that are run whatever time they take: a loaded machine may use up the time before the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A parser of untrusted bytes.

    name:         name of the target and of its corpus.
    run:          parses its argument. The current directory is empty at first and may be written to.
    errors:       the exceptions that it may raise.
    strategy:     generates inputs from the corpus; by default mutations of bytes.
    memory_bytes: limit of the process's growth.
    """

    name: str
    run: Callable[[bytes], object]
    errors: tuple[type[Exception], ...]
    strategy: Callable[[Sequence[bytes]], SearchStrategy[bytes]] = mutated
    memory_bytes: int = 256 << 20

    def corpus(self) -> list[bytes]:
        """Return its valid seeds, then past findings, by name."""
        paths = sorted((CORPUS / self.name).iterdir(), key=lambda path: (not path.name.startswith("valid"), path.name))
        return [path.read_bytes() for path in paths]


@dataclass(frozen=True, slots=True)
class Finding:
    """An input that a target fails for, and the failure."""

    what: str
    data: bytes


@dataclass(frozen=True, slots=True)
class Outcome:
    inputs: int
    finding: Finding | None


def fuzz(target: Target, *, seconds: float, seed: int) -> Outcome:
    """Run `target` on its corpus, then on new inputs for some seconds of wall-clock time."""
    outcome = _run(target, target.corpus(), seconds=seconds, seed=seed)
    if outcome.finding is not None and outcome.finding.what.startswith("took"):
        # The machine may have been suspended for a second: run the input a second time.
        return Outcome(outcome.inputs, replay(target, [outcome.finding.data]).finding)
    return outcome


def replay(target: Target, inputs: Sequence[bytes]) -> Outcome:
    """Run `target` on a valid input, then on some others."""
    return _run(target, [target.corpus()[0], *inputs], seconds=0, seed=0)


def keep(target: Target, finding: Finding) -> Path:
    """Write the input to a file, and return its path."""
    path = FINDINGS / target.name / hashlib.sha256(finding.data).hexdigest()[:16]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(finding.data)
    return path


def _run(target: Target, corpus: Sequence[bytes], *, seconds: float, seed: int) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "current")
        place.write_bytes(bytes(_HEAD.size + _LARGEST))
        process = warm_context().Process(
            target=_be_child, args=(target.name, [bytes(data) for data in corpus], seconds, seed, folder)
        )
        process.start()
        with place.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as shared:
            stalled = _watch(process, shared)
            inputs, length = _HEAD.unpack_from(shared)
            current = shared[_HEAD.size : _HEAD.size + length]
        report = Path(folder, "report.json")
        if stalled:
            return Outcome(inputs, Finding(f"took no new input for {STALL_SECONDS:g} s", current))
        if process.exitcode == -signal.SIGPROF:
            return Outcome(inputs, Finding(f"took more than {HANG_SECONDS:g} s of CPU time, calibrated", current))
        if process.exitcode != 0 or not report.is_file():
            return Outcome(inputs, Finding(f"terminated the process with {process.exitcode}", current))
        found = json.loads(report.read_text())
        return Outcome(inputs, None if found is None else Finding(found["what"], bytes.fromhex(found["data"])))


def _watch(process: object, shared: mmap.mmap) -> bool:
    """Wait until the child exits. Return True if it made no progress and was killed."""
    before, since = 0, time.monotonic()
    while True:
        process.join(1.0)  # type: ignore[attr-defined]
        if process.exitcode is not None:  # type: ignore[attr-defined]
            return False
        done = _HEAD.unpack_from(shared)[0]
        if done != before:
            before, since = done, time.monotonic()
        elif time.monotonic() - since > (STALL_SECONDS if done else START_SECONDS):
            process.kill()  # type: ignore[attr-defined]
            process.join()  # type: ignore[attr-defined]
            return True


# --- in the child ----------------------------------------------------------------------------------------------------


class _Broken(Exception):
    """The target failed."""


def _be_child(name: str, corpus: list[bytes], seconds: float, seed: int, folder: str) -> None:
    from tests.fuzz.misbehaving import MISBEHAVING
    from tests.fuzz.targets import TARGETS

    child = _Child({**TARGETS, MISBEHAVING.name: MISBEHAVING}[name], Path(folder))
    finding: dict[str, str] | None = None
    try:
        child.replay(corpus)
        child.explore(corpus, seconds=seconds, seed=seed)
    except _Broken as broken:
        finding = {"what": str(broken), "data": child.current.hex()}
    Path(folder, "report.json").write_text(json.dumps(finding))
    # Skip the clean-up, which a broken target could disturb.
    os._exit(0)


class _Child:
    def __init__(self, target: Target, folder: Path) -> None:
        self._target = target
        self._inputs = 0
        self._limit = HANG_SECONDS * max(1.0, _calibration() / _REFERENCE_SECONDS)
        self._baseline: int | None = None
        self.current = b""
        with (folder / "current").open("r+b") as file:
            self._shared = mmap.mmap(file.fileno(), 0)
        work = folder / "work"
        work.mkdir()
        os.chdir(work)
        signal.signal(signal.SIGPROF, signal.SIG_DFL)

    def replay(self, corpus: Sequence[bytes]) -> None:
        """Run the target on the corpus, which begins with a valid input."""
        # One-time allocations, such as lazily imported modules, do not count.
        self.check(corpus[0])
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        maximum = pages * resource.getpagesize() + 4 * self._target.memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (maximum, maximum))
        self._baseline = _peak()
        for data in corpus:
            self.check(data)

    def explore(self, corpus: Sequence[bytes], *, seconds: float, seed: int) -> None:
        until = time.monotonic() + seconds
        strategy = self._target.strategy(corpus)
        batch = 0
        minimum = self._inputs + (MIN_INPUTS if seconds else 0)  # a replay explores nothing
        while self._inputs < minimum or time.monotonic() < until:

            @hypothesis.seed(seed * 1_000_003 + batch)
            @settings(
                max_examples=_BATCH,
                database=None,
                deadline=None,
                phases=(Phase.generate, Phase.shrink),
                suppress_health_check=list(HealthCheck),
                report_multiple_bugs=False,
            )
            @hypothesis.given(data=strategy)
            def examples(data: bytes) -> None:
                if self._inputs < minimum or time.monotonic() < until:
                    self.check(data)

            with _quiet():
                examples()
            batch += 1

    def check(self, data: bytes) -> None:
        """Run the target on `data`. Raises _Broken; a signal terminates the process if it exceeds the time limit."""
        self._inputs += 1
        self.current = data[:_LARGEST]
        self._shared[_HEAD.size : _HEAD.size + len(self.current)] = self.current
        _HEAD.pack_into(self._shared, 0, self._inputs, len(self.current))
        # The default action of the signal terminates the process, also in compiled code.
        signal.setitimer(signal.ITIMER_PROF, self._limit)
        try:
            self._target.run(data)
        except self._target.errors as error:
            if _is_of_memory(error):
                raise _Broken(f"ran out of memory and raised {error!r}"[:500]) from error
            str(error).encode()
        except Exception as error:
            raise _Broken(f"raised {type(error).__name__}: {error}"[:500]) from error
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        grown = 0 if self._baseline is None else _peak() - self._baseline
        if grown > self._target.memory_bytes:
            self._baseline = None  # the peak includes this input: the check cannot measure later inputs
            raise _Broken(f"took {grown >> 20} MiB of memory: at most {self._target.memory_bytes >> 20} are allowed")


def _is_of_memory(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, MemoryError):
            return True
        error = error.__cause__ or error.__context__
    return False


def _peak() -> int:
    """Return the peak of resident memory in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _calibration() -> float:
    """Return the CPU time of a fixed amount of work."""
    begin = time.process_time()
    total = 0
    for number in range(500_000):
        total += number & 7
    return time.process_time() - begin


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Discard the output of Hypothesis: the parent reports the finding."""
    with Path(os.devnull).open("w") as null, contextlib.redirect_stdout(null), contextlib.redirect_stderr(null):
        yield
