"""Do the ranks of an engine get on together? Judged on rank 0, from what each says of itself. No torch, no clock.

A rank that computes is judged by itself. What is left: all others wait in exchanges, for each other or for one that
does not even begin.
"""

from __future__ import annotations

from collections.abc import Mapping

from megatron_runtime.parallel.step_progress import Phase, Report

STANDSTILL_SECONDS = 3.0


def behind(order: int, reports: Mapping[int, Report]) -> int:
    """The rank that the others wait for in this order: it has not done it, does not wait itself, came the least far."""

    def lateness(rank: int) -> tuple[bool, bool, int]:
        report = reports[rank]
        return report.done >= order, report.phase is Phase.EXCHANGING, report.exchanges

    return min(reports, key=lateness)


class Standstill:
    """Remembers since when nothing has changed."""

    def __init__(self) -> None:
        self._seen: dict[int, Report] = {}
        self._since = 0.0

    def look(self, order: int, reports: Mapping[int, Report], *, now: float) -> tuple[int, str] | None:
        """The rank whose fault it seems to be that no rank gets on in `order`, the last step that was ordered, and what
        is seen. `now` in seconds.
        """
        late = {rank: report for rank, report in reports.items() if report.done < order}
        if not late or dict(reports) != self._seen or any(one.phase is Phase.COMPUTING for one in late.values()):
            self._seen, self._since = dict(reports), now
            return None
        if now - self._since < STANDSTILL_SECONDS:
            return None
        places = "; ".join(f"rank {rank} is in {report.place}" for rank, report in sorted(late.items()))
        seconds = now - self._since
        return behind(order, late), f"no rank has got on for {seconds:.1f} s, all wait for each other: {places}"
