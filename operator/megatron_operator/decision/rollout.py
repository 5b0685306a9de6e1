"""The rollout planner. It returns the next single step from the observed state of each engine, and keeps no state.

Invariants, which a test verifies in every reachable state (tests/unit/operator/test_rollout_model.py):

- A step reduces capacity only by DRAIN, and only while more than `replicas - maxUnavailable` engines are available.
  Surge engines count as available. They are engines of the desired revision in excess of `replicas`, at most
  `maxSurge`. They are removed when all other engines have the desired revision and serve, or when another revision is
  desired, unless their capacity is needed.
- An engine loses its pods only if it has another revision and either does not serve or was drained.
- Until the desired revision is proven, at most `maxUnavailable` engines (at least one) get it. A bad revision therefore
  does not spread, and does not replace engines that restart. A revision is proven when an engine of this revision
  serves and has passed its canary.
- While engines of another revision serve, the desired revision must pass its check. Before that, no engine is drained
  for the desired revision, and no engine gets it.
- Engines that do not serve are replaced first, because their replacement costs no capacity.
- An engine of the desired revision is never changed, even if other revisions were desired for a time. Several edits
  therefore collapse into the last one, and a revert keeps engines of the old revision.
- The number of pods belongs to the revision. It changes together with the template, never before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any


class Canary(StrEnum):
    """Result of the canary completion that verifies an engine after a rollout replaced it."""

    NONE = ""  # it was not replaced by a rollout
    PENDING = "Pending"
    PASSED = "Passed"
    SKIPPED = "Skipped"  # its coordinator cannot pin a request to an engine
    FAILED = "Failed"


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """The facts about one engine on which the rollout planner depends."""

    name: str
    current: bool
    """Whether the engine's StatefulSet has the desired revision."""
    leftover: bool = False
    """Whether some of the engine's pods have an earlier revision than its StatefulSet."""
    serving: bool = True
    """Whether the coordinator routes requests to the engine, or would if the engine were not draining."""
    draining: bool = False
    """Whether the coordinator dispatches no requests to the engine."""
    drained: bool = False
    """Whether the engine needs no DRAIN."""
    canary: Canary = Canary.NONE
    leaving: bool = False
    """Whether the engine's pods of an earlier revision are already being deleted."""
    responsive: bool = True
    """Whether the engine sends heartbeats."""

    @property
    def available(self) -> bool:
        return self.serving and self.responsive and not self.draining

    @property
    def unproven(self) -> bool:
        """Whether the engine has the desired revision, but has not yet proven that this revision works."""
        return self.current and (not self.serving or self.leftover or self.canary in (Canary.PENDING, Canary.FAILED))

    @property
    def done(self) -> bool:
        """Whether the engine has completed the rollout and is available."""
        return self.current and self.available and not self.unproven


@dataclass(frozen=True, slots=True)
class Check:
    """Step: check the desired revision before this engine is replaced."""

    name: str


@dataclass(frozen=True, slots=True)
class Replace:
    """Step: apply the desired template to these engines and delete their old pods."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Recreate:
    """Step: delete those pods of these engines that were created from an earlier template.

    This completes an interrupted Replace.
    """

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Surge:
    """Step: add a surge engine with the desired revision before the engine `name` is drained."""

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
    """Result: wait, because a step is in progress or the next step would reduce capacity too much."""

    names: tuple[str, ...]
    what: str


@dataclass(frozen=True, slots=True)
class Halt:
    """Result: stop the rollout until the spec changes, because an engine of the new revision gave a wrong answer."""

    name: str
    drain: bool
    """Whether the engine still gets requests, and must be drained."""


@dataclass(frozen=True, slots=True)
class Finished:
    """Result: all engines have the desired revision."""


Step = Check | Replace | Recreate | Surge | Drain | Prove | Await | Halt | Finished


def keeps_revision(*, current: bool, has_pods: bool, wants_pods: bool) -> bool:
    """Return whether an engine keeps the template and number of pods of its revision until a Replace step.

    Args:
        current: whether the engine's StatefulSet has the desired revision.
        has_pods: whether the engine's StatefulSet has pods, or creates them.
        wants_pods: whether the lifecycle allows the engine to have pods.
    """
    return has_pods and wants_pods and not current


def kept_extras(
    engines: Sequence[EngineFacts], extras: Sequence[EngineFacts], *, max_unavailable: int
) -> tuple[str, ...]:
    """Return the names of the surplus engines that must not be removed now.

    Surge engines stay until every desired engine is done (`EngineFacts.done`). A surge engine whose canary failed stays
    too. Engines of another revision stay if fewer than `replicas - maxUnavailable` engines would be available without
    them.

    Args:
        engines: every desired engine, by index.
        extras: the surplus engines, by index.
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
    """The facts that the rules of a rollout read."""

    engines: Sequence[EngineFacts]
    """Every desired engine that has or should have pods, by index."""
    extras: Sequence[EngineFacts] = ()
    """Engines in excess of `replicas` that `kept_extras` keeps."""
    max_unavailable: int
    max_surge: int = 0
    running: bool
    """Whether the resource runs, so that engines may be drained and get canaries."""
    checked: bool
    """Whether the desired revision needs no check. It has passed its check, an engine serves or has served with it, or
    no engine of another revision serves.
    """
    paused: bool = False
    """Whether engines of another revision must not be changed."""

    @cached_property
    def every(self) -> Sequence[EngineFacts]:
        return (*self.engines, *self.extras)

    @cached_property
    def half_replaced(self) -> list[EngineFacts]:
        """Engines that still have pods of another revision than the revision of their StatefulSet."""
        return [
            engine
            for engine in self.engines
            if engine.leftover and (engine.current or (self.paused and not engine.serving))
        ]

    @cached_property
    def interrupted(self) -> tuple[str, ...]:
        """Engines whose new template was applied, but whose old pods are not being deleted."""
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
        """The first `quota` outdated engines that do not serve, highest index first."""
        return _names(engine for engine in reversed(self.outdated) if not engine.serving)[: self.quota]

    @cached_property
    def wrong(self) -> EngineFacts | None:
        """An engine of the desired revision whose canary answer is wrong, or None."""
        return next((engine for engine in self.every if engine.current and engine.canary is Canary.FAILED), None)

    @cached_property
    def unanswered(self) -> EngineFacts | None:
        """An engine of the desired revision that serves and has not answered its canary, or None."""
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
        """Engines that get no new requests and whose DRAIN is not complete."""
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
        """Engines for which a rollout waits.

        The value has the engines that do not serve. If all engines serve, it has the engines that are unavailable.
        """
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
    """One step of a rollout, and the condition under which the step is taken."""

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
"""The rules of a rollout, in order. The first rule that applies determines the step."""


def rule_for(situation: Situation) -> RolloutRule:
    """Return the first rule of a rollout that applies."""
    return next(rule for rule in RULES if rule.when(situation))


def next_step(engines: Sequence[EngineFacts], **options: Any) -> Step:
    """Return the single next step of a rollout.

    engines, options: fields of `Situation`.
    """
    situation = Situation(engines=engines, **options)
    return rule_for(situation).step(situation)
