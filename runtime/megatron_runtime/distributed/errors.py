"""How an engine of many ranks ends: always with a rank and a cause. No torch."""

from __future__ import annotations


class RankError(RuntimeError):
    """Something failed on one rank. `rank` is its number, the message names it, `remedy` says what to do.

    reason: a word for programs.
    """

    reason = "RankFailed"
    remedy = "see the log of this rank's container"

    def __init__(self, rank: int, cause: str) -> None:
        super().__init__(f"rank {rank}: {cause}")
        self.rank = rank
        self.cause = cause


class RankLostError(RankError):
    """A rank is gone or does not answer: its engine ends, and is started whole again.

    by_silence: nothing shows that its process has ended or that a step of it failed; its node may be lost.
    """

    reason = "RankLost"
    remedy = "the engine starts again with all its ranks; see why this rank ended in its container's last log"

    def __init__(self, rank: int, cause: str, *, by_silence: bool = False) -> None:
        super().__init__(rank, cause)
        self.by_silence = by_silence


class RendezvousError(RankError):
    """Ranks of an engine do not find each other."""

    reason = "RendezvousFailed"
    remedy = "check that all pods of the engine run, and that their network lets them talk to each other on every port"
