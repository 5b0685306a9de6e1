"""The rollout planner: the next single step, from the observed state of each engine. Pure and stateless.

Invariants, which a test verifies in every reachable state (tests/unit/operator/test_rollout_model.py):

- A step reduces capacity only by DRAIN, and only while more than `replicas - maxUnavailable` engines are available.
  Surge engines count as available: engines of the desired revision beyond `replicas`, at most `maxSurge`. They are
  removed when all others have the desired revision and serve, or another one is desired, unless their capacity is
  needed.
- An engine loses its pods only if it has another revision and either does not serve or was drained.
- Until the desired revision is proven, at most `maxUnavailable` engines (at least one) get it, so a bad revision does
  not spread and restarting engines are not replaced by it. Proven means: an engine of it serves and its canary passed.
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
    """The view of one engine that a rollout needs."""

    name: str
    current: bool
    """Its StatefulSet has the desired revision."""
    leftover: bool = False
    """Some of its pods are of an earlier revision than its StatefulSet."""
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

    @property
    def done(self) -> bool:
        """The rollout of this engine is complete, and it is available."""
        return self.current and self.available and not self.unproven


@dataclass(frozen=True, slots=True)
class Check:
    """Check the desired revision, before this engine is replaced."""

    name: str


@dataclass(frozen=True, slots=True)
class Replace:
    """Apply the desired template of these engines and delete their old pods."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Recreate:
    """Delete the pods of these engines that do not have the template, which an interrupted Replace has applied."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Surge:
    """Add an engine of the desired revision, before this engine is drained."""

    name: str


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


Step = Check | Replace | Recreate | Surge | Drain | Prove | Await | Halt | Finished


def keeps_revision(*, current: bool, has_pods: bool, wants_pods: bool) -> bool:
    """Return whether an engine keeps template and number of pods of its own revision, until a Replace step.

    Args:
        current: its StatefulSet has the desired revision.
        has_pods: its StatefulSet has pods, or creates them.
        wants_pods: the lifecycle lets it have pods.
    """
    return has_pods and wants_pods and not current


def kept_extras(
    engines: Sequence[EngineFacts], extras: Sequence[EngineFacts], *, max_unavailable: int
) -> tuple[str, ...]:
    """Return the names of the engines beyond `replicas`, within `maxSurge`, that are not to be removed now.

    Surge engines stay until every other engine is done; one whose canary failed stays as it is. Engines of another
    revision stay while `replicas - maxUnavailable` engines are available only with them.

    Args:
        engines: every desired engine, by index.
        extras: the engines beyond them, by index.
    """
    unfinished = not all(engine.done for engine in engines)
    available = sum(engine.available for engine in (*engines, *extras))
    kept = []
    for extra in extras:
        useful = not extra.leftover and (not extra.draining or extra.canary is Canary.FAILED)
        needed = extra.available and available <= len(engines) - max_unavailable
        if needed or (extra.current and unfinished and useful):
            kept.append(extra.name)
        else:
            available -= extra.available
    return tuple(kept)


def next_step(
    engines: Sequence[EngineFacts],
    *,
    extras: Sequence[EngineFacts] = (),
    max_unavailable: int,
    max_surge: int = 0,
    running: bool,
    checked: bool,
    paused: bool = False,
) -> Step:
    """Return the next single step.

    Args:
        engines: every desired engine that has or should have pods, by index.
        extras: engines beyond `replicas` that `kept_extras` keeps.
        checked: the desired revision needs no check: it has passed, an engine of it serves or served, or no engine of
            another revision serves.
        running: the resource runs, so that engines may be drained and get canaries.
        paused: engines of another revision are left as they are.
    """
    half = [engine for engine in engines if engine.leftover and (engine.current or (paused and not engine.serving))]
    interrupted = tuple(engine.name for engine in half if not engine.leaving)
    if interrupted:
        return Recreate(interrupted)
    outdated = [engine for engine in engines if not engine.current and not paused]
    every = [*engines, *extras]
    room = _room(every, max_unavailable)
    down = tuple(engine.name for engine in reversed(outdated) if not engine.serving)[:room]
    if outdated and not checked and (down or running):
        return Check(outdated[-1].name)
    if down:
        return Replace(down)
    if half:
        return Await(tuple(engine.name for engine in half), "its old pods to end")
    if not running:
        return Finished()
    failed = next((engine for engine in every if engine.current and engine.canary is Canary.FAILED), None)
    if failed is not None:
        return Halt(failed.name, drain=failed.available and not failed.drained)
    asked = next((engine for engine in every if _to_prove(engine)), None)
    if asked is not None:
        return Prove(asked.name)
    if not outdated:
        return Finished()
    serving = [engine for engine in outdated if engine.serving]
    idle = [engine for engine in serving if engine.drained]
    if idle and room:
        return Replace((idle[-1].name,))
    half_drained = [engine for engine in serving if engine.draining and not engine.drained]
    if half_drained:
        return Drain(half_drained[-1].name)
    if serving and room and len(extras) < min(max_surge, len(outdated)):
        return Surge(serving[-1].name)
    absent = tuple(engine.name for engine in every if not engine.serving)
    unavailable = tuple(engine.name for engine in every if not engine.available)
    if not serving or len(every) - len(unavailable) <= len(engines) - max_unavailable:
        return Await(absent or unavailable, "to register before the next engine is taken")
    return Drain(serving[-1].name)


def _to_prove(engine: EngineFacts) -> bool:
    return engine.current and engine.serving and engine.canary is Canary.PENDING


def _room(engines: Sequence[EngineFacts], max_unavailable: int) -> int:
    """Return how many more engines may get the desired revision now."""
    if any(engine.current and not engine.unproven for engine in engines):
        return len(engines)
    return max(0, max(1, max_unavailable) - sum(engine.unproven for engine in engines))
