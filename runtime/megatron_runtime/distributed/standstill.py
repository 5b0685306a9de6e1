"""Do the ranks of an engine get on together? Judged on rank 0, from what each says of itself. No torch, no clock.

A rank that computes is judged by itself. What is left: all others wait in exchanges, for each other or for one that
does not even begin.
"""

from __future__ import annotations

from collections.abc import Mapping

from megatron_runtime.distributed.step_progress import Phase, Report

STANDSTILL_SECONDS = 3.0
MOST_SECONDS = 1.0
"""That one look may count for: when looks come further apart, who looks has stood still itself, as on a processor that
too many share, and knows nothing of the others.
"""


def behind(order: int, reports: Mapping[int, Report]) -> int:
    """The rank that the others wait for in this order: it has not done it, does not wait itself, came the least far."""

    def lateness(rank: int) -> tuple[bool, bool, int]:
        report = reports[rank]
        return report.done >= order, report.phase is Phase.EXCHANGING, report.exchanges

    return min(reports, key=lateness)


class Standstill:
    """Remembers for how long nothing has changed."""

    def __init__(self) -> None:
        self._seen: dict[int, Report] = {}
        self._seconds = self._looked = 0.0

    def look(
        self,
        order: int,
        reports: Mapping[int, Report],
        *,
        now: float,
        patience: float = STANDSTILL_SECONDS,
        is_current: bool = True,
    ) -> tuple[int, str] | None:
        """The rank whose fault it seems to be that no rank gets on in `order`, the last step that was ordered, for
        `patience` seconds, and what is seen. `now` in seconds.

        is_current: every rank has just said where it is. Whether one that is silent gets on nobody knows: such a look
                    does not count, and what silence means is judged elsewhere.
        """
        passed, self._looked = min(now - self._looked, MOST_SECONDS) if is_current else 0.0, now
        late = {rank: report for rank, report in reports.items() if report.done < order}
        if not late or dict(reports) != self._seen or any(one.phase is Phase.COMPUTING for one in late.values()):
            self._seen, self._seconds = dict(reports), 0.0
            return None
        self._seconds += passed
        if self._seconds < patience or not is_current:
            return None
        places = "; ".join(f"rank {rank} is in {report.place}" for rank, report in sorted(late.items()))
        return behind(order, late), f"no rank has got on for {self._seconds:.1f} s, all wait for each other: {places}"
