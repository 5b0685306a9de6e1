"""The rollout planner: from what is observed of each engine to the next single step. Pure arithmetic, no memory.

Invariants, held by a search over every reachable state (tests/unit/operator/test_rollout_model.py):

- A step takes capacity away only by DRAIN, and only while more than `replicas - maxUnavailable` engines are available.
- An engine loses its pods only when it is of another revision and either does not serve or was drained.
- While nothing proves the wanted revision, at most `maxUnavailable` engines are given it: a bad revision never spreads,
  and an engine that is merely restarting is not lost to it. Proven means: an engine of it serves and its canary passed.
- Engines that do not serve are replaced first, because that costs nothing.
- An engine of the wanted revision is never touched, whatever revisions were wanted in between: edits collapse into
  the last one, and a revert keeps what still runs the old one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Canary(StrEnum):
    """Whether an engine that a rollout replaced has answered a completion of its own."""

    NONE = ""  # it was not replaced by a rollout
    PENDING = "Pending"
    PASSED = "Passed"
    SKIPPED = "Skipped"  # its coordinator cannot pin a request to an engine
    FAILED = "Failed"


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """One wanted engine, as far as a rollout cares."""

    name: str
    current: bool
    """Its StatefulSet is of the wanted revision."""
    leftover: bool = False
    """Its StatefulSet is of the wanted revision and some of its pods are not."""
    serving: bool = True
    """The coordinator routes to it, or would if it were not draining."""
    draining: bool = False
    """The coordinator gives it no work."""
    drained: bool = False
    """Nothing is gained by draining it (again)."""
    canary: Canary = Canary.NONE
    leaving: bool = False
    """Pods of it are being deleted already."""

    @property
    def available(self) -> bool:
        return self.serving and not self.draining

    @property
    def unproven(self) -> bool:
        """Of the wanted revision, and it has not shown that this revision works."""
        return self.current and (not self.serving or self.leftover or self.canary in (Canary.PENDING, Canary.FAILED))


@dataclass(frozen=True, slots=True)
class Replace:
    """Give these engines the wanted template and delete their old pods."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Drain:
    name: str


@dataclass(frozen=True, slots=True)
class Prove:
    """Send this engine a canary completion."""

    name: str


@dataclass(frozen=True, slots=True)
class Await:
    """Something is under way, or the next step would take too much."""

    names: tuple[str, ...]
    what: str


@dataclass(frozen=True, slots=True)
class Halt:
    """The new revision answers wrongly: nothing more is replaced until the spec changes."""

    name: str
    drain: bool
    """It is still given work; it must not be."""


@dataclass(frozen=True, slots=True)
class Finished:
    """Nothing is to be rolled."""


Step = Replace | Drain | Prove | Await | Halt | Finished


def next_step(engines: Sequence[EngineFacts], *, max_unavailable: int, running: bool) -> Step:
    """The next single step.

    Args:
        engines: every wanted engine that has or is to have pods, by index.
        running: the resource runs, so that engines may be drained and asked.
    """
    leftover = [engine for engine in engines if engine.leftover and not engine.leaving]
    if leftover:
        return Replace(tuple(engine.name for engine in leftover))
    outdated = [engine for engine in engines if not engine.current]
    down = _down(engines, outdated, max_unavailable)
    if down:
        return Replace(down)
    going = tuple(engine.name for engine in engines if engine.leftover)
    if going:
        return Await(going, "its old pods to end")
    if not running:
        return Finished()
    failed = next((engine for engine in engines if engine.current and engine.canary is Canary.FAILED), None)
    if failed is not None:
        return Halt(failed.name, drain=failed.available and not failed.drained)
    asked = next((engine for engine in engines if _to_prove(engine)), None)
    if asked is not None:
        return Prove(asked.name)
    return _next_outdated(engines, outdated, max_unavailable) if outdated else Finished()


def _to_prove(engine: EngineFacts) -> bool:
    return engine.current and engine.serving and engine.canary is Canary.PENDING


def _down(engines: Sequence[EngineFacts], outdated: list[EngineFacts], max_unavailable: int) -> tuple[str, ...]:
    """Outdated engines that do not serve and may be replaced now."""
    down = [engine.name for engine in outdated if not engine.serving]
    return tuple(reversed(down))[: _room(engines, max_unavailable)]


def _room(engines: Sequence[EngineFacts], max_unavailable: int) -> int:
    """How many more engines may be given the wanted revision now."""
    if any(engine.current and not engine.unproven for engine in engines):
        return len(engines)
    return max(0, max_unavailable - sum(engine.unproven for engine in engines))


def _next_outdated(engines: Sequence[EngineFacts], outdated: list[EngineFacts], max_unavailable: int) -> Step:
    idle = [engine for engine in outdated if engine.serving and engine.drained]
    absent = tuple(engine.name for engine in engines if not engine.serving)
    if idle and _room(engines, max_unavailable):
        return Replace((idle[-1].name,))
    half_drained = [engine for engine in outdated if engine.serving and engine.draining and not engine.drained]
    if half_drained:
        return Drain(half_drained[-1].name)
    serving = [engine for engine in outdated if engine.serving]
    unavailable = [engine.name for engine in engines if not engine.available]
    if not serving or len(unavailable) >= max_unavailable:
        return Await(absent or tuple(unavailable), "to register before the next engine is taken")
    return Drain(serving[-1].name)
