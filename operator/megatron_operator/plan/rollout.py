"""The rollout planner: the next single step, from the observed state of each engine. Pure and stateless.

Invariants, which a test verifies in every reachable state (tests/unit/operator/test_rollout_model.py):

- A step reduces capacity only by DRAIN, and only while more than `replicas - maxUnavailable` engines are available.
- An engine loses its pods only if it has another revision and either does not serve or was drained.
- Until the desired revision is proven, at most `maxUnavailable` engines get it, so a bad revision does not spread and
  restarting engines are not replaced by it. Proven means: an engine of it serves and its canary passed.
- No engine is drained for the desired revision or gets it before the check of the revision has passed, if engines of
  another revision serve.
- Engines that do not serve are replaced first, because that costs no capacity.
- An engine of the desired revision is never changed, whatever revisions were desired in between: edits collapse into
  the last one, and a revert keeps engines of the old revision.
- The number of pods belongs to the revision: it changes together with the template, never before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Canary(StrEnum):
    """Verification of an engine that a rollout replaced, by a canary completion."""

    NONE = ""  # it was not replaced by a rollout
    PENDING = "Pending"
    PASSED = "Passed"
    SKIPPED = "Skipped"  # its coordinator cannot pin a request to an engine
    FAILED = "Failed"


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """The view of one desired engine that a rollout needs."""

    name: str
    current: bool
    """Its StatefulSet has the desired revision."""
    leftover: bool = False
    """Its StatefulSet has the desired revision and some of its pods have not."""
    serving: bool = True
    """The coordinator routes to it, or would if it was not draining."""
    draining: bool = False
    """The coordinator dispatches no requests to it."""
    drained: bool = False
    """A DRAIN of it is unnecessary."""
    canary: Canary = Canary.NONE
    leaving: bool = False
    """Pods of it are being deleted already."""
    responsive: bool = True
    """It sends heartbeats."""

    @property
    def available(self) -> bool:
        return self.serving and self.responsive and not self.draining

    @property
    def unproven(self) -> bool:
        """It has the desired revision, which it has not proven yet."""
        return self.current and (not self.serving or self.leftover or self.canary in (Canary.PENDING, Canary.FAILED))


@dataclass(frozen=True, slots=True)
class Check:
    """Check the desired revision, before this engine is replaced."""

    name: str


@dataclass(frozen=True, slots=True)
class Replace:
    """Apply the desired template of these engines and delete their old pods."""

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
    """Wait: a step is in progress, or the next one would reduce capacity too much."""

    names: tuple[str, ...]
    what: str


@dataclass(frozen=True, slots=True)
class Halt:
    """The new revision gives wrong answers: the rollout stops until the spec changes."""

    name: str
    drain: bool
    """It still gets requests and must not."""


@dataclass(frozen=True, slots=True)
class Finished:
    """All engines have the desired revision."""


Step = Check | Replace | Drain | Prove | Await | Halt | Finished


def keeps_revision(*, current: bool, has_pods: bool, wants_pods: bool) -> bool:
    """Return whether an engine keeps template and number of pods of its own revision, until a Replace step.

    Args:
        current: its StatefulSet has the desired revision.
        has_pods: its StatefulSet has pods, or creates them.
        wants_pods: the lifecycle lets it have pods.
    """
    return has_pods and wants_pods and not current


def next_step(engines: Sequence[EngineFacts], *, max_unavailable: int, running: bool, checked: bool) -> Step:
    """Return the next single step.

    Args:
        engines: every desired engine that has or should have pods, by index.
        checked: the desired revision needs no check: it has passed, an engine of it serves or served, or no engine of
            another revision serves.
        running: the resource runs, so that engines may be drained and get canaries.
    """
    leftover = [engine for engine in engines if engine.leftover and not engine.leaving]
    if leftover:
        return Replace(tuple(engine.name for engine in leftover))
    outdated = [engine for engine in engines if not engine.current]
    down = _down(engines, outdated, max_unavailable)
    if outdated and not checked and (down or running):
        return Check(outdated[-1].name)
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
    """Return outdated engines that do not serve and may be replaced now."""
    down = [engine.name for engine in outdated if not engine.serving]
    return tuple(reversed(down))[: _room(engines, max_unavailable)]


def _room(engines: Sequence[EngineFacts], max_unavailable: int) -> int:
    """Return how many more engines may get the desired revision now."""
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
