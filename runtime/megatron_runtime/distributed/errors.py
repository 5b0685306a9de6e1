"""Errors of engines with several ranks. Each error names a rank and a cause. Imports no torch."""

from __future__ import annotations


class RankError(RuntimeError):
    """The error of one rank.

    rank:   number of the rank, which is also in the message.
    reason: the machine-readable cause in the termination message.
    remedy: what the user can do.
    """

    reason = "RankFailed"
    remedy = "see the log of this rank's container"

    def __init__(self, rank: int, cause: str) -> None:
        super().__init__(f"rank {rank}: {cause}")
        self.rank = rank
        self.cause = cause


class RankLostError(RankError):
    """A rank exited or is stalled. Its engine therefore exits, and is started again with all ranks.

    by_silence: whether the rank sends nothing although no failure of its process or its step is known. Its node or the
                network may be lost.
    """

    reason = "RankLost"
    remedy = "the engine starts again with all its ranks; the previous log of this rank's container has the cause"

    def __init__(self, rank: int, cause: str, *, by_silence: bool = False) -> None:
        super().__init__(rank, cause)
        self.by_silence = by_silence


class RendezvousError(RankError):
    """The ranks of an engine cannot reach each other."""

    reason = "RendezvousFailed"
    remedy = "check that all pods of the engine run, and that they can reach each other on every port"
