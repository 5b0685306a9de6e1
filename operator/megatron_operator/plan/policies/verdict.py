"""The verdict of a policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron_operator.model.conditions import Reason
from megatron_operator.plan.operation import Operation
from megatron_operator.plan.scene import Scene
from megatron_operator.plan.world import Action


@dataclass(frozen=True, slots=True)
class Verdict:
    """Messages and actions of the policy that decided."""

    reason: Reason
    message: str
    """One sentence: the message of the Ready condition."""
    operation: Operation | None
    """The operation to record; usually the scene's own."""
    step: str = ""
    """The current step; empty if nothing is left to do."""
    waiting_on: str = ""
    """What the step waits for."""
    actions: tuple[Action, ...] = ()
    requeue_after: float | None = None
    upkeep: bool = True
    """Whether the upkeep of children continues with this verdict."""


Policy = Callable[[Scene], Verdict | None]


def waiting(
    scene: Scene,
    reason: Reason,
    step: str,
    waiting_on: str,
    *,
    actions: tuple[Action, ...] = (),
    requeue_after: float | None = None,
) -> Verdict:
    """Return a verdict that waits, with the operation unchanged."""
    return Verdict(
        reason=reason,
        message=f"{step}: waiting for {waiting_on}",
        operation=scene.operation,
        step=step,
        waiting_on=waiting_on,
        actions=actions,
        requeue_after=requeue_after,
    )
