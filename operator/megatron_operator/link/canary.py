"""Canaries. A canary is one short greedy completion by one engine, followed by a check of its answer."""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_operator.decision.actions import AskCanary
from megatron_operator.decision.coordinator_snapshot import CanaryReport
from megatron_operator.link.snapshot import printable
from megatron_runtime.protocol.headers import ErrorCode
from megatron_runtime.protocol.messages import Error, Final, MalformedMessageError, RequestMeta, Submit, pack, unpack

logger = logging.getLogger(__name__)

NEW_TOKENS = 4
MAX_TOKENS = 64
"""Maximum number of tokens of an answer that a message quotes in full."""
DEADLINE_SECONDS = 60.0
ANY_PROMPT = (1, 2, 3, 4)
"""Token ids that every vocabulary has."""
UNSUPPORTED = frozenset({ErrorCode.WRONG_ROLE, ErrorCode.MALFORMED})
PASSING = frozenset({ErrorCode.UNKNOWN_PEER, ErrorCode.ENGINES_MISSING, ErrorCode.UNAVAILABLE, ErrorCode.QUEUE_FULL})
"""Error codes of an engine or coordinator that was unavailable, so that there is no verdict. The canary is sent
again.
"""


@dataclass(frozen=True, slots=True)
class Expectation:
    """A prompt whose greedy continuation is the same at any precision.

    At each position, the log-probability of the chosen token exceeds the log-probability of every other token by
    at least 3.5.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]


KNOWN: dict[str, Expectation] = {
    # "1, 2, 3, 4, 5, 6, 7," continues with " 8, ".
    "builtin:smollm2-135m": Expectation(
        prompt=(33, 28, 216, 34, 28, 216, 35, 28, 216, 36, 28, 216, 37, 28, 216, 38, 28, 216, 39, 28),
        tokens=(216, 40, 28, 216),
    ),
}
"""Expectations by the value of `--model`."""


@dataclass(frozen=True, slots=True)
class SentCanary:
    """A canary that was sent to an engine."""

    uid: bytes
    asked: AskCanary
    until: float
    """Deadline of the answer, on the sender's clock."""


def new_canary(asked: AskCanary, *, now: float) -> SentCanary:
    return SentCanary(secrets.token_bytes(16), asked, now + DEADLINE_SECONDS + 5.0)


def frames_of(canary: SentCanary) -> list[bytes]:
    """Return the frames of the canary's SUBMIT message, which pins the request to the engine."""
    known = KNOWN.get(canary.asked.model)
    prompt = np.asarray(known.prompt if known else ANY_PROMPT, dtype="<i4").tobytes()
    meta = RequestMeta(deadline_ms=int(DEADLINE_SECONDS * 1000), engine=canary.asked.engine)
    params = {"temperature": 0.0, "top_k": 1, "num_tokens_to_generate": NEW_TOKENS, "return_log_probs": True}
    return list(Submit(canary.uid, meta, prompt, b"", pack(params)).to_frames())


def judge(canary: SentCanary, answer: Final | Error) -> CanaryReport | None:
    """Return the verdict on the engine, or None if the answer allows no verdict."""
    revision = canary.asked.revision
    if isinstance(answer, Error):
        if answer.code in PASSING:
            return None
        supported = answer.code not in UNSUPPORTED
        return CanaryReport(
            revision, ok=False, message=f"{answer.code.name}: {printable(answer.message, 400)}", supported=supported
        )
    try:
        reply = unpack(answer.reply)
    except MalformedMessageError as error:
        return CanaryReport(revision, ok=False, message=f"the completion cannot be read: {error}")
    reply = reply if isinstance(reply, dict) else {}
    found = reply.get("error")
    reason: dict[Any, Any] = found if isinstance(found, dict) else {}
    if reason.get("code") in list(PASSING):
        return None
    fault = _fault(canary, answer, reply, cause=reason.get("message", "without a reason"))
    return CanaryReport(revision, ok=fault is None, message=fault or "")


def _fault(canary: SentCanary, answer: Final, reply: dict[str, Any], *, cause: object) -> str | None:
    if reply.get("status") != "COMPLETED":
        return f"the completion failed: {printable(str(cause), 400)}"
    tokens = np.frombuffer(answer.tokens, dtype="<i4")
    if not len(tokens):
        return "the completion is empty"
    if len(tokens) > MAX_TOKENS:
        return f"{len(tokens)} tokens instead of {NEW_TOKENS}"
    found = reply.get("generated_log_probs")
    log_probs = found if isinstance(found, list) else []
    finite = [value for value in log_probs if isinstance(value, int | float) and math.isfinite(value)]
    if not len(finite) == len(log_probs) == len(tokens):
        return f"log-probabilities {log_probs!r:.200} of {len(tokens)} tokens; each token must have a finite one"
    known = KNOWN.get(canary.asked.model)
    if known is not None and tuple(tokens.tolist()) != known.tokens:
        return f"tokens {tokens.tolist()} instead of {list(known.tokens)}"
    return None


class CanaryBook:
    """The canaries of one link: the unanswered canaries, and the last verdict on each engine."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._waiting: dict[str, SentCanary] = {}
        self.reports: dict[str, CanaryReport] = {}

    def ask(self, asked: AskCanary, send: Callable[[list[bytes]], bool]) -> bool:
        """Send a canary, unless the same canary to this engine is unanswered.

        Returns False if the canary must be sent but cannot be sent, otherwise True.
        """
        waiting = self._waiting.get(asked.engine)
        if waiting is not None and waiting.asked == asked and waiting.until > self._clock():
            return True
        canary = new_canary(asked, now=self._clock())
        if not send(frames_of(canary)):
            return False
        self._waiting[asked.engine] = canary
        return True

    def answered(self, answer: Final | Error, uid: bytes | None) -> bool:
        """Handle the answer to a canary. Return whether it led to a verdict.

        uid: uid of the answered canary; None for an ERROR without a uid. A coordinator that does not support canaries
             rejects each canary with such an ERROR.
        """
        engine = next((name for name, canary in self._waiting.items() if uid in (None, canary.uid)), None)
        if engine is None:
            return False
        report = judge(self._waiting.pop(engine), answer)
        if report is None:
            logger.info("canary not answered; it is sent again", extra={"engine": engine, "answer": repr(answer)[:200]})
            return False
        self.reports[engine] = report
        logger.info("canary answered", extra={"engine": engine, "ok": report.ok, "fault": report.message})
        return True

    def forget_sent(self) -> None:
        """Forget unanswered canaries, because their connection has ended."""
        self._waiting.clear()
