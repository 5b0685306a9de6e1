"""What the coordinator counts. Plain integers: reading them costs nothing on the request path."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Counters:
    rejected: Counter[str] = field(default_factory=Counter)
    """Frames dropped, by reason: malformed, wrong_role, unknown_peer, unexpected."""
    stale: int = 0
    """Answers of engines that are not the current dispatch of their request, or not its next tokens."""
    late: int = 0
    """Final answers of engines that had been removed, delivered all the same."""
    evicted_blocks: int = 0
    """Prefix blocks that engines said they no longer hold."""
    replays: int = 0
    """Requests dispatched anew because their engine was lost."""
    moved: int = 0
    """Requests taken from an engine to make room for another tenant."""
    completed: int = 0
    refused: int = 0
    """Requests answered with an error by the coordinator."""
    aborted: int = 0
    partials: int = 0
    engines_lost: int = 0
    engine_crashes: int = 0
    """Engines lost by a crash while they had requests."""
    suspects: int = 0
    """Requests held back after a second crash, to run alone."""
    acquitted: int = 0
    """Of these, those that ran alone past the point of the last crash."""
    poison_requests: int = 0
    """Requests failed because they end engines."""

    @property
    def rejected_frames(self) -> int:
        return self.rejected.total()
