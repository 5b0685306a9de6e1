"""What a benchmark's figures suffer from: other programs on the machine, and its host."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Self

import psutil

from megatron_runtime.cli.bench.report import Figure


class Surroundings:
    """Begins when it is made. `children`: processes of the benchmark that are running then and at the end."""

    def __init__(self, *children: psutil.Process) -> None:
        self._children = children
        self._before = _ProcessorSeconds.now(children)

    def figures(self) -> list[Figure]:
        """Shares of all processors' time since then."""
        before, after = self._before, _ProcessorSeconds.now(self._children)
        share = 100 / (after.there_were - before.there_were)
        others = max(0.0, (after.busy - before.busy) - (after.own - before.own))
        stolen = after.stolen - before.stolen
        return [
            Figure("others_percent", "processors taken by other programs meanwhile", others * share, "%"),
            Figure("stolen_percent", "processors taken away by the host", stolen * share, "%"),
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _ProcessorSeconds:
    """So far. own: of this process, its children that have ended, and those named; busy: of all processes."""

    there_were: float
    own: float
    busy: float
    stolen: float

    @classmethod
    def now(cls, children: tuple[psutil.Process, ...]) -> Self:
        machine, me = psutil.cpu_times(), psutil.Process().cpu_times()
        own = me.user + me.system + me.children_user + me.children_system
        for times in (child.cpu_times() for child in children):
            own += times.user + times.system
        return cls(
            there_were=time.perf_counter() * (os.cpu_count() or 1),
            own=own,
            busy=machine.user + machine.nice + machine.system + machine.irq + machine.softirq,
            stolen=machine.steal,
        )
