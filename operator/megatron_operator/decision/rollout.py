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

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any


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
        """Whether the engine has the desired revision and has not proven it yet."""
        return self.current and (not self.serving or self.leftover or self.canary in (Canary.PENDING, Canary.FAILED))

    @property
    def done(self) -> bool:
        """Whether the rollout of this engine is complete and the engine is available."""
        return self.current and self.available and not self.unproven


@dataclass(frozen=True, slots=True)
class Check:
    """Step: check the desired revision before this engine is replaced."""

    name: str


@dataclass(frozen=True, slots=True)
class Replace:
    """Step: apply the desired template of these engines and delete their old pods."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Recreate:
    """Step: complete a Replace that was interrupted: delete the pods of these engines with an earlier template."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Surge:
    """Step: add an engine of the desired revision before this engine is drained."""

    name: str


@dataclass(frozen=True, slots=True)
class Drain:
    name: str


@dataclass(frozen=True, slots=True)
class Prove:
    """Step: send this engine a canary completion."""

    name: str


@dataclass(frozen=True, slots=True)
class Await:
    """Result: wait, because a step is in progress or the next one would reduce capacity too much."""

    names: tuple[str, ...]
    what: str


@dataclass(frozen=True, slots=True)
class Halt:
    """Result: stop the rollout until the spec changes, because an engine of the new revision gave a wrong answer."""

    name: str
    drain: bool
    """It still gets requests and must not."""


@dataclass(frozen=True, slots=True)
class Finished:
    """Result: all engines have the desired revision."""


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


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What the rules of a rollout read."""

    engines: Sequence[EngineFacts]
    """Every desired engine that has or should have pods, by index."""
    extras: Sequence[EngineFacts] = ()
    """Engines beyond `replicas` that `kept_extras` keeps."""
    max_unavailable: int
    max_surge: int = 0
    running: bool
    """The resource runs, so that engines may be drained and get canaries."""
    checked: bool
    """The desired revision needs no check: it has passed, an engine of it serves or served, or no engine of another
    revision serves."""
    paused: bool = False
    """Engines of another revision are not changed."""

    @cached_property
    def every(self) -> Sequence[EngineFacts]:
        return (*self.engines, *self.extras)

    @cached_property
    def half_replaced(self) -> list[EngineFacts]:
        """Engines with pods of two revisions."""
        return [
            engine
            for engine in self.engines
            if engine.leftover and (engine.current or (self.paused and not engine.serving))
        ]

    @cached_property
    def interrupted(self) -> tuple[str, ...]:
        """Engines whose template was applied and whose old pods were not deleted."""
        return _names(engine for engine in self.half_replaced if not engine.leaving)

    @cached_property
    def outdated(self) -> list[EngineFacts]:
        return [engine for engine in self.engines if not engine.current and not self.paused]

    @cached_property
    def quota(self) -> int:
        """How many more engines may get the desired revision now."""
        if any(engine.current and not engine.unproven for engine in self.every):
            return len(self.every)
        return max(0, max(1, self.max_unavailable) - sum(engine.unproven for engine in self.every))

    @cached_property
    def down(self) -> tuple[str, ...]:
        """Outdated engines that do not serve, within the quota, highest index first."""
        return _names(engine for engine in reversed(self.outdated) if not engine.serving)[: self.quota]

    @cached_property
    def wrong(self) -> EngineFacts | None:
        """An engine of the desired revision whose canary answer is wrong."""
        return next((engine for engine in self.every if engine.current and engine.canary is Canary.FAILED), None)

    @cached_property
    def unanswered(self) -> EngineFacts | None:
        """An engine of the desired revision that serves and has not answered its canary."""
        serving = (engine for engine in self.every if engine.current and engine.serving)
        return next((engine for engine in serving if engine.canary is Canary.PENDING), None)

    @cached_property
    def serving(self) -> list[EngineFacts]:
        """Outdated engines that serve."""
        return [engine for engine in self.outdated if engine.serving]

    @cached_property
    def drained(self) -> list[EngineFacts]:
        return [engine for engine in self.serving if engine.drained]

    @cached_property
    def half_drained(self) -> list[EngineFacts]:
        """Engines that get no requests and whose DRAIN is not complete."""
        return [engine for engine in self.serving if engine.draining and not engine.drained]

    @cached_property
    def may_surge(self) -> bool:
        limit = min(self.max_surge, len(self.outdated))
        return bool(self.serving) and self.quota > 0 and len(self.extras) < limit

    @cached_property
    def may_drain(self) -> bool:
        """Whether one more engine may become unavailable."""
        available = sum(engine.available for engine in self.every)
        return bool(self.serving) and available > len(self.engines) - self.max_unavailable

    @cached_property
    def missing(self) -> tuple[str, ...]:
        """Engines that a rollout waits for: engines that do not serve; if all serve, engines that are not available."""
        absent = _names(engine for engine in self.every if not engine.serving)
        return absent or _names(engine for engine in self.every if not engine.available)


def _names(engines: Iterable[EngineFacts]) -> tuple[str, ...]:
    return tuple(engine.name for engine in engines)


def _halt(situation: Situation) -> Step:
    wrong = situation.wrong
    assert wrong is not None
    return Halt(wrong.name, drain=wrong.available and not wrong.drained)


def _prove(situation: Situation) -> Step:
    assert situation.unanswered is not None
    return Prove(situation.unanswered.name)


@dataclass(frozen=True, slots=True)
class RolloutRule:
    """One step of a rollout, and when it is taken."""

    name: str
    when: Callable[[Situation], object]
    step: Callable[[Situation], Step]


RULES = (
    RolloutRule(
        "finish an interrupted replacement", lambda now: now.interrupted, lambda now: Recreate(now.interrupted)
    ),
    RolloutRule(
        "check the desired revision",
        lambda now: now.outdated and not now.checked and (now.down or now.running),
        lambda now: Check(now.outdated[-1].name),
    ),
    RolloutRule("replace engines that do not serve", lambda now: now.down, lambda now: Replace(now.down)),
    RolloutRule(
        "wait for old pods",
        lambda now: now.half_replaced,
        lambda now: Await(_names(now.half_replaced), "its old pods to terminate"),
    ),
    RolloutRule("leave serving engines while not running", lambda now: not now.running, lambda now: Finished()),
    RolloutRule("halt at a wrong answer", lambda now: now.wrong, _halt),
    RolloutRule("send a canary", lambda now: now.unanswered, _prove),
    RolloutRule("finish", lambda now: not now.outdated, lambda now: Finished()),
    RolloutRule(
        "replace a drained engine",
        lambda now: now.drained and now.quota,
        lambda now: Replace((now.drained[-1].name,)),
    ),
    RolloutRule("continue a drain", lambda now: now.half_drained, lambda now: Drain(now.half_drained[-1].name)),
    RolloutRule("add a surge engine", lambda now: now.may_surge, lambda now: Surge(now.serving[-1].name)),
    RolloutRule("drain the next engine", lambda now: now.may_drain, lambda now: Drain(now.serving[-1].name)),
    RolloutRule(
        "wait for capacity",
        lambda now: True,
        lambda now: Await(now.missing, "to register before the next engine is replaced"),
    ),
)
"""The rules of a rollout, in their order. The first that applies gives the step."""


def rule_for(situation: Situation) -> RolloutRule:
    """Return the first rule that applies."""
    return next(rule for rule in RULES if rule.when(situation))


def next_step(engines: Sequence[EngineFacts], **options: Any) -> Step:
    """Return the next single step. engines, options: fields of `Situation`."""
    situation = Situation(engines=engines, **options)
    return rule_for(situation).step(situation)
