"""Which coordinator of a pair is active.

Both coordinators run. One is active, the other one is on standby: it sends peers to the active one. The standby takes
over when a peer asks it to, and it has not heard from the other coordinator for some time. So it needs two witnesses, a
peer and itself, and neither the API server nor the operator.

Each takeover has a term, one more than the highest that is known. Two coordinators may be active at the same time, if
they cannot reach each other. A peer is registered with one coordinator at a time, and never follows one with a lower
term than it has seen. As soon as two active coordinators hear of each other, directly or from a peer, the one with the
lower term stands by again. Of two equal terms, the lower incarnation stands by.
"""

from __future__ import annotations

from enum import Enum

from megatron_runtime.protocol.messages import PairState


class Answer(Enum):
    """What to do with a message of a peer."""

    SERVE = "serve"
    REDIRECT = "redirect"
    """The other coordinator is active."""
    WAIT = "wait"
    """No answer: the peer asks again."""


class Election:
    """The state of one coordinator of a pair. Begins on standby.

    now:         time of creation, seconds on the clock of all calls.
    incarnation: a random number of 64 bits.
    takeover:    seconds of silence after which the other coordinator counts as lost.
    """

    def __init__(self, *, now: float, incarnation: int, takeover: float) -> None:
        self.active = False
        self.term = 0
        """The own term if active, otherwise the highest that is known."""
        self._incarnation = incarnation
        self.takeover = takeover
        self._silent_since = now
        self._other: PairState | None = None
        self._leaves = False

    @property
    def state(self) -> PairState:
        """What to send to the other coordinator."""
        return PairState(incarnation=self._incarnation, term=self.term, active=self.active)

    def heard(self, now: float, other: PairState) -> None:
        """The other coordinator reports its state."""
        self._silent_since, self._other = now, other
        if self.active and other.active and (other.term, other.incarnation) > (self.term, self._incarnation):
            self.active = False
        if not self.active:
            self.term = max(self.term, other.term)

    def asked(self, now: float, term: int) -> Answer:
        """A peer sent a message. It has been registered with a coordinator of `term`, 0 if it does not say."""
        if self.active and term <= self.term:
            return Answer.SERVE
        heard = self._hears(now)
        if not self.active and (self._leaves or (heard is not None and heard.active)):
            return Answer.REDIRECT
        if heard is None and now - self._silent_since < self.takeover:
            return Answer.WAIT
        self.active, self.term = True, max(self.term, term) + 1
        return Answer.SERVE

    def stalled(self, now: float) -> None:
        """This process handled no messages for some time, in which the other coordinator may have taken over."""
        self._silent_since, self._other = now, None

    def leave(self, now: float) -> bool:
        """This process ends. Stand by for the rest of its life, if the other coordinator is there to take over."""
        self._leaves = self._hears(now) is not None
        self.active = self.active and not self._leaves
        return self._leaves

    def _hears(self, now: float) -> PairState | None:
        """Return the state of the other coordinator; None if it is silent or unknown."""
        return self._other if now - self._silent_since < self.takeover else None
