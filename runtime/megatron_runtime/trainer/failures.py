"""A table of the effects of losing a process during a weight update.

The table shows which weights the engines serve, and what publish() does. tests/unit/coordinator/test_update_model.py
checks this table against the coordinator's core, with the events of an update in any order. It also checks
docs/concepts/verbs.md against this table.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal


class Lost(StrEnum):
    """The kind of process that is killed during an update. Messages that it sent before still arrive."""

    TRAINER = "trainer"
    ENGINE = "engine"
    COORDINATOR = "coordinator"
    OPERATOR = "operator"


class PublishPhase(StrEnum):
    """The progress of the update when a process is lost.

    It is the progress of the lost engine or, if the lost process is not an engine, of the slowest engine.
    """

    CONNECTING = "connecting"
    RECEIVING = "receiving"
    STAGED = "staged"
    COMMITTING = "committing"


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateOutcome:
    """The outcome of an update during which a process was lost.

    epoch:   "old" or "new": the weights that all engines, including engines that restart, serve afterwards.
    publish: effect on the publish() call in progress.
    retry:   how the update continues after the loss.
    """

    epoch: Literal["old", "new"]
    publish: Literal["returns", "is lost with its process"]
    retry: str


_ENGINE = UpdateOutcome(
    epoch="new",
    publish="returns",
    retry="when the engine restarts, it gets the weights from another engine or the trainer",
)
_COORDINATOR = UpdateOutcome(epoch="new", publish="returns", retry="the trainer connects to the next coordinator")
_OPERATOR = UpdateOutcome(
    epoch="new", publish="returns", retry="no action is needed, because the operator has no part in the update"
)
_BEFORE = UpdateOutcome(
    epoch="old", publish="is lost with its process", retry="the trainer calls publish() again after its restart"
)
_AFTER = UpdateOutcome(
    epoch="new",
    publish="is lost with its process",
    retry="no action is needed; engines that restart get the weights from another engine",
)

FAILURES: dict[tuple[Lost, PublishPhase], UpdateOutcome] = {
    **{(Lost.ENGINE, phase): _ENGINE for phase in PublishPhase},
    **{(Lost.COORDINATOR, phase): _COORDINATOR for phase in PublishPhase},
    **{(Lost.OPERATOR, phase): _OPERATOR for phase in PublishPhase},
    (Lost.TRAINER, PublishPhase.CONNECTING): _BEFORE,
    (Lost.TRAINER, PublishPhase.RECEIVING): _BEFORE,
    (Lost.TRAINER, PublishPhase.STAGED): _AFTER,
    (Lost.TRAINER, PublishPhase.COMMITTING): _AFTER,
}
