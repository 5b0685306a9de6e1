"""The verdict, which is the result of a policy that applies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from megatron_operator.decision.actions import Action
from megatron_operator.decision.operation import Operation
from megatron_operator.resource.conditions import Reason


class Recorded(Enum):
    """Marks that a verdict leaves the recorded operation unchanged."""

    UNCHANGED = "unchanged"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of the policy that decided: messages for the status, actions, and the operation to record."""

    reason: Reason
    message: str
    """The message of the Ready condition, one sentence."""
    operation: Operation | Recorded | None = Recorded.UNCHANGED
    """The operation to record. None means that the recorded operation has ended."""
    step: str = ""
    """The current step; empty if all changes are complete."""
    waiting_on: str = ""
    """The condition that the step waits for."""
    actions: tuple[Action, ...] = ()
    requeue_after: float | None = None
    upkeep: bool = True
    """Whether the upkeep of children continues with this verdict."""


Policy = Callable[..., Verdict | None]
"""A policy. Its parameters name the topics of the scene that it reads. It returns None if it does not apply."""


def waiting(
    reason: Reason,
    step: str,
    waiting_on: str,
    *,
    actions: tuple[Action, ...] = (),
    requeue_after: float | None = None,
    operation: Operation | Recorded | None = Recorded.UNCHANGED,
) -> Verdict:
    """Return a verdict whose message says that `step` waits for `waiting_on`."""
    return Verdict(
        reason=reason,
        message=f"{step}: waiting for {waiting_on}",
        operation=operation,
        step=step,
        waiting_on=waiting_on,
        actions=actions,
        requeue_after=requeue_after,
    )
