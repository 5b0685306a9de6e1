"""A pair of coordinators. This module decides which coordinator is active, and exchanges states between the two.

Both coordinators run. One is active. The other is on standby and redirects peers to the active coordinator. The standby
takes over if a peer sends it a message and the other coordinator has been silent for some time. A takeover therefore
needs two witnesses, a peer and the standby itself, but neither the API server nor the operator.

Each takeover has a term, which is one higher than the highest known term. Two coordinators may be active at the same
time if they cannot reach each other. A peer is registered with one coordinator at a time, and never follows a
coordinator with a lower term than it has seen. When two active coordinators learn of each other, directly or from a
peer, the coordinator with the lower term returns to standby. If the terms are equal, the coordinator with the lower
incarnation returns to standby.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import random
from collections.abc import Callable
from enum import Enum

from megatron_runtime.coordinator.core.records import PeerId
from megatron_runtime.coordinator.core.settings import CoordinatorSettings
from megatron_runtime.protocol import limits
from megatron_runtime.protocol.codec import header_of
from megatron_runtime.protocol.headers import ErrorCode, Header, Role
from megatron_runtime.protocol.messages import Error, Frames, Hello, MalformedMessageError, PairState, decode
from megatron_runtime.transport.security import Gatekeeper, PeerKeys
from megatron_runtime.transport.zmtp.dealer import Dealer

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 1.0
"""Timeout of an attempt to connect. Each further attempt uses the next key of the other coordinator."""

_HELLO, _PAIR_STATE = int(Header.HELLO), int(Header.PAIR_STATE)


class Answer(Enum):
    """How a coordinator of a pair handles a message from a peer."""

    SERVE = "serve"
    REDIRECT = "redirect"
    """The peer must connect to the other coordinator, which is active."""
    WAIT = "wait"
    """The message gets no answer, so that the peer sends it again."""


class Election:
    """The state of one coordinator of a pair, which starts as the standby.

    now:         time of creation, in seconds on the same clock as the argument `now` of the methods.
    incarnation: a random number of 64 bits.
    takeover:    seconds of silence after which the other coordinator counts as lost.
    """

    def __init__(self, *, now: float, incarnation: int, takeover: float) -> None:
        self.active = False
        self.term = 0
        """The coordinator's own term if it is active, otherwise the highest known term."""
        self._incarnation = incarnation
        self.takeover = takeover
        self._silent_since = now
        self._other: PairState | None = None
        self._leaves = False

    @property
    def state(self) -> PairState:
        """The state that is sent to the other coordinator."""
        return PairState(incarnation=self._incarnation, term=self.term, active=self.active)

    def heard(self, now: float, other: PairState) -> None:
        """Handle the state that the other coordinator has reported."""
        self._silent_since, self._other = now, other
        if self.active and other.active and (other.term, other.incarnation) > (self.term, self._incarnation):
            self.active = False
        if not self.active:
            self.term = max(self.term, other.term)

    def asked(self, now: float, term: int) -> Answer:
        """Handle a message from a peer, and return how this coordinator must treat the message.

        This method can make this coordinator active.

        term: term of the coordinator with which the peer was registered; 0 if the peer does not report one.
        """
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
        """Handle a stall of this process, during which the other coordinator may have taken over."""
        self._silent_since, self._other = now, None

    def leave(self, now: float) -> bool:
        """Prepare for the exit of this process. Become the standby if the other coordinator is alive.

        Return whether the other coordinator is alive.
        """
        self._leaves = self._hears(now) is not None
        self.active = self.active and not self._leaves
        return self._leaves

    def _hears(self, now: float) -> PairState | None:
        """Return the state of the other coordinator, or None if it is silent or unknown."""
        return self._other if now - self._silent_since < self.takeover else None


class Pair:
    """One side of a pair of coordinators.

    It decides for each message whether this coordinator handles it, and exchanges states with the other coordinator.

    The states are exchanged on the admin ports.

    gatekeeper: holds the keys; None without encryption. Each coordinator connects with its own pair of keys.
    changed:    called after `active` or `term` has changed.
    send:       sends frames to a connected peer.
    """

    def __init__(
        self,
        settings: CoordinatorSettings,
        gatekeeper: Gatekeeper | None,
        *,
        changed: Callable[[], None],
        send: Callable[[PeerId, Frames], object],
    ) -> None:
        host = settings.other_host or ""
        self._address = (
            f"tcp://[{host}]:{settings.admin_port}" if ":" in host else f"tcp://{host}:{settings.admin_port}"
        )
        self._gatekeeper = gatekeeper
        self._changed = changed
        self._send = send
        self._interval = settings.timing.heartbeat
        self._loop = asyncio.get_running_loop()
        incarnation = random.SystemRandom().getrandbits(64)
        takeover = settings.timing.takeover
        self._election = Election(now=self._loop.time(), incarnation=incarnation, takeover=takeover)
        self._redirect = Error(code=ErrorCode.STANDBY, message=f"on standby: connect to {host}", other=host).to_frames()
        self._tries = itertools.count()
        self._dealer: Dealer | None = None
        self._connected = 0.0
        self._due = math.inf
        self._timer: asyncio.TimerHandle | None = None

    @property
    def active(self) -> bool:
        return self._election.active

    @property
    def term(self) -> int:
        return self._election.term

    def start(self) -> None:
        """Connect to the other coordinator, in the background."""
        self._tick()

    def close(self) -> None:
        """Close the connection after the last state is sent. This method is idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        dealer, self._dealer = self._dealer, None
        if dealer is not None:
            dealer.close(linger_ms=1000)

    def passes(self, peer: PeerId, key: bytes, frames: Frames) -> bool:
        """Return whether the core must handle this message. If not, this method has handled the message.

        key: the public key of the connection.
        """
        header = header_of(frames[0]) if len(frames) == 1 else None
        election = self._election
        if election.active and header not in (_HELLO, _PAIR_STATE):
            return True
        before, now, answer = (election.active, election.term), self._loop.time(), None
        if now > self._due + election.takeover:
            election.stalled(now)
        if header == _PAIR_STATE:
            self._receive(now, peer, key, frames)
        else:
            answer = election.asked(now, _term_of(frames) if header == _HELLO else 0)
        if (election.active, election.term) != before:
            self._announce()
        if answer is Answer.REDIRECT:
            self.redirect(peer)
        return answer is Answer.SERVE

    def redirect(self, peer: PeerId) -> None:
        """Redirect a peer to the other coordinator."""
        self._send(peer, self._redirect)

    def hand_over(self) -> bool:
        """Let the other coordinator take over before this process exits.

        Return False if the other coordinator cannot be reached.
        """
        was_active = self._election.active
        if not self._report():
            return False
        leaves = self._election.leave(self._loop.time())
        if leaves and was_active:
            self._announce()
        return leaves

    def _receive(self, now: float, peer: PeerId, key: bytes, frames: Frames) -> None:
        if peer[0] != Role.ADMIN or (self._gatekeeper is not None and key not in self._gatekeeper.servers):
            return
        try:
            message = decode(frames)
        except MalformedMessageError as error:
            logger.warning("a state of the other coordinator is dropped: %s", error)
            return
        if isinstance(message, PairState):
            self._election.heard(now, message)

    def _announce(self) -> None:
        """Report a change of this coordinator's role or term to the other coordinator.

        Call this method before peers are redirected, so that the other coordinator accepts them.
        """
        logger.warning("now %s, term %d", "active" if self.active else "on standby", self.term)
        self._report()
        self._changed()

    def _report(self) -> bool:
        return self._dealer is not None and self._dealer.send(self._election.state.to_frames())

    def _tick(self) -> None:
        now = self._loop.time()
        if now > self._due + self._election.takeover:
            self._election.stalled(now)
        self._due = now + self._interval
        self._timer = self._loop.call_at(self._due, self._tick)
        if self._report():
            self._connected = now
        elif self._dealer is None or now - self._connected > CONNECT_SECONDS:
            if self._dealer is not None:
                self._dealer.close()
            self._dealer = self._connect()
            self._connected = now

    def _connect(self) -> Dealer:
        keys = None
        if self._gatekeeper is not None:
            first, *others = self._gatekeeper.servers
            keys = PeerKeys(self._gatekeeper.own, first, tuple(others)).for_try(next(self._tries))
        return Dealer(self._address, lambda frames: None, keys=keys, max_message_bytes=limits.MAX_ADMIN_MESSAGE_BYTES)


def _term_of(frames: Frames) -> int:
    try:
        message = decode(frames)
    except MalformedMessageError:
        return 0
    return message.term or 0 if isinstance(message, Hello) else 0
