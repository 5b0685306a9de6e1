"""Quarantine of poison requests, which are requests that crash the engine that runs them.

A request that was in flight at two crashes is a suspect. Suspects run one at a time, alone, on one engine. If the
engine crashes while a suspect runs alone, the suspect is failed. A suspect that gets past the point of its last crash
is acquitted. docs/decisions/025-requests-that-crash-engines.md explains the reasons and limits of this rule.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import pairwise

from megatron_runtime.coordinator.core.context import Context
from megatron_runtime.coordinator.core.records import Crash, Engine, Entry
from megatron_runtime.coordinator.core.rejections import Rejection
from megatron_runtime.process.logs import of_request
from megatron_runtime.protocol import limits
from megatron_runtime.protocol.headers import ErrorCode
from megatron_runtime.protocol.messages import FailedRequest, Partial

logger = logging.getLogger(__name__)

SUSPECT_CRASHES = 2
"""Number of crashes after which a request that was in flight at each of them is a suspect."""
ACQUITTAL_TOKENS = 16
"""Number of tokens that a request must have, beyond the tokens known at its last crash, to be acquitted."""
VERDICT_SECONDS = 3.0
"""Time within which a live engine registers again after its connection was cut."""
REMEMBERED_FAILURES = 16
"""Maximum number of failed requests that STATUS lists."""
NAMED_ENGINES = 16
"""Maximum number of crashed engines that STATUS and the error of a failed request name. The most recent ones are
named.
"""
REMEMBERED_CUTS = 1024
"""Maximum number of engines with a cut connection that are remembered. If such an engine registers again, it did not
crash.
"""


class Quarantine:
    """The waiting suspects, the suspect on trial, and the engine that is reserved for the trial.

    failures:     records of the last requests that the quarantine has failed, oldest first.
    requeue:      removes a request from its engine or queue. If the request is a suspect, the quarantine then holds it.
                  Otherwise it is queued ahead of all requests of its priority and model.
    fail:         ends a request with an error.
    reject_unanswerable: ends a request that no engine can answer; returns whether it ended the request.
    """

    def __init__(
        self,
        context: Context,
        *,
        requeue: Callable[[Entry], None],
        fail: Callable[[Entry, Rejection], None],
        reject_unanswerable: Callable[[Entry], bool],
    ) -> None:
        self.failures: deque[FailedRequest] = deque(maxlen=REMEMBERED_FAILURES)
        self._context = context
        self._requeue = requeue
        self._fail = fail
        self._reject_unanswerable = reject_unanswerable
        self._engines = context.engines
        self._counters = context.counters
        self._waiting: dict[bytes, Entry] = {}
        self._trial: Entry | None = None
        self._trial_since = 0.0
        self._reserved: Engine | None = None
        self._accused: Entry | None = None
        """A suspect that ran alone when its engine's connection was cut. It waits for proof that the engine crashed."""
        self._cuts: dict[str, Crash] = {}
        """Last crash of each engine, by name, while only the loss of its connection is known."""

    def __len__(self) -> int:
        """Number of suspects that wait for an engine."""
        return len(self._waiting)

    @property
    def active(self) -> bool:
        """Whether a suspect waits for its trial, or an engine is reserved."""
        return bool(self._waiting) or self._reserved is not None

    @staticmethod
    def suspects(entry: Entry) -> bool:
        return sum(crash.counts for crash in entry.crashes) >= SUSPECT_CRASHES

    # --- engines end --------------------------------------------------------------------------------------------

    def crashed(self, engine: Engine, *, certain: bool) -> None:
        """Count a crash of `engine` against every request that it ran. Call this before its requests are released.

        certain: False if only the loss of the connection is known. In this case, returned() can still revoke the crash.
        """
        relieved = [entry for entry in engine.relieved if entry.is_open]
        entries = [entry for entry in (*engine.in_flight.values(), *relieved) if not entry.meta.engine]
        if not entries:
            return
        self._counters.engine_crashes += 1
        crash = Crash(engine.name, self._context.now)
        if not certain:
            self._cuts[engine.name] = crash
            if len(self._cuts) > REMEMBERED_CUTS:
                del self._cuts[next(iter(self._cuts))]
        for entry in entries:
            self._charge(entry, crash)
        for entry in relieved:
            if self.suspects(entry) and entry is not self._trial:
                self._requeue(entry)
        trial = self._trial
        if trial is not None and trial.engine is engine and entries == [trial]:
            if certain:
                self._convict(trial)
            else:
                self._accused = trial
                self._context.set_timer("verdict", self._context.now + VERDICT_SECONDS, partial(self._convict, trial))

    def _charge(self, entry: Entry, crash: Crash) -> None:
        crashes = [crash for crash in entry.crashes if crash.counts]
        if _is_past(entry):
            crashes.clear()
        if len(crashes) + 1 == SUSPECT_CRASHES:
            self._counters.suspects += 1
        entry.crashes = (*crashes, crash)
        entry.crash_position = entry.tokens_so_far if entry.meta.streaming else None

    def lost(self, engine: Engine) -> None:
        """Handle the removal of `engine`, whose requests the caller requeues."""
        engine.relieved.clear()
        if self._trial is not None and self._trial.engine is engine:
            self._trial = None
        if self._reserved is engine:
            self._reserve(None)

    def returned(self, name: str, *, has_outlived: bool) -> None:
        """Handle the registration of the engine with this name.

        has_outlived: whether the engine's process outlived its previous connection. If so, the engine did not crash.
        """
        crash = self._cuts.pop(name, None)
        if crash is None:
            return
        accused = self._accused
        if accused is not None and accused.crashes[-1] is not crash:
            accused = None
        if has_outlived:
            crash.counts = False
            if accused is not None:
                self._drop_accusation()
            self._free_cleared()
        elif accused is not None:
            self._convict(accused)

    def _convict(self, entry: Entry) -> None:
        """Fail a request that crashed an engine while it ran alone.

        The crashes during which this request was in flight no longer count against other requests.
        """
        names = [crash.engine[: limits.MAX_NAME_BYTES] for crash in entry.crashes if crash.counts][-NAMED_ENGINES:]
        uid, listed = entry.uid.hex(), ", ".join(names)
        extra = of_request(entry.meta.request_id)
        logger.error("request %s is failed: it ended %d engines (%s)", uid, len(names), listed, extra=extra)
        self._counters.poison_requests += 1
        at = round(self._context.now + self._context.wall_offset, 3)
        self.failures.append(FailedRequest(uid=uid, engines=names, at=at))
        for crash in entry.crashes:
            crash.counts = False
        ended = f"ended {len(names)} engines ({listed}), the last while it ran alone"
        self._fail(entry, Rejection(ErrorCode.ENGINE_FAILED, f"request {uid} {ended}: do not send it again"))
        self._free_cleared()

    def _free_cleared(self) -> None:
        """Move requests from the quarantine to the normal queue if they are no longer suspects.

        Call this method after a crash has stopped counting against requests.
        """
        for entry in self._latest_first():
            if not self.suspects(entry):
                self.forget(entry)
                self._requeue(entry)
        if self._trial is not None and not self.suspects(self._trial):
            self._end_trial(self._trial)

    # --- suspects -----------------------------------------------------------------------------------------------

    def add(self, entry: Entry) -> None:
        """Hold a suspect request until its trial, in which it runs alone on an engine.

        The caller must have removed the request from its engine.
        """
        if self._trial is entry:
            self._trial = None
        self._waiting[entry.uid] = entry

    def forget(self, entry: Entry) -> None:
        """Remove a request from the quarantine, because it has ended or is no longer a suspect."""
        self._waiting.pop(entry.uid, None)
        if self._trial is entry:
            self._trial = None
        if self._accused is entry:
            self._drop_accusation()

    def next_trial(self) -> tuple[Entry, Engine] | None:
        """Return the suspect to dispatch now, and an idle engine for it.

        Returns None if no suspect can be dispatched.

        The caller must call begin() after it has dispatched the suspect.
        """
        if self._trial is not None:
            return None
        entry, engine = self._choose() if self._accused is None else (None, None)
        self._reserve(engine)
        if entry is None or engine is None or not _is_empty(engine):
            return None
        return entry, engine

    def begin(self, entry: Entry) -> None:
        """Record that the suspect was dispatched."""
        if self._waiting.pop(entry.uid, None) is not None:
            self._trial, self._trial_since = entry, self._context.now

    def _choose(self) -> tuple[Entry, Engine] | tuple[None, None]:
        """Return the waiting suspect that arrived last, and an engine for its trial.

        Return (None, None) if no waiting suspect can run on an engine now.

        The last suspect is tried first, because a request that has run for a long time without a crash is less likely
        to be poison.
        """
        serving = self._engines.serving()
        available = [engine for engine in serving if engine.available()]
        for entry in self._latest_first():
            if serving and self._reject_unanswerable(entry):
                continue
            fitting = [engine for engine in available if engine.runs(entry)]
            if fitting:
                return entry, min(fitting, key=self._preference)
        return None, None

    def _latest_first(self) -> list[Entry]:
        return sorted(self._waiting.values(), key=lambda entry: entry.arrived, reverse=True)

    def _preference(self, engine: Engine) -> tuple[bool, bool, int, int]:
        """Return the sort key of an engine.

        Idle engines come first, then the reserved engine, then the engines with the lowest number of requests.
        """
        return not _is_empty(engine), engine is not self._reserved, len(engine.in_flight), engine.index

    def _reserve(self, engine: Engine | None) -> None:
        if self._reserved is not None:
            self._reserved.reserved = False
        self._reserved = engine
        if engine is not None:
            engine.reserved = True

    def note_progress(self, engine: Engine, message: Partial) -> None:
        """Record the progress that a reserved engine reports for a suspect that does not stream."""
        for uid, dispatch_id, offset, count in message.entries:
            entry = engine.in_flight.get(dispatch_id)
            if entry is not None and entry.uid == uid:
                entry.progress = offset + count

    def advanced(self, engine: Engine) -> bool:
        """Handle tokens from a reserved engine.

        Return True if the tokens acquit the suspect on trial, because the suspect is past the point of its last crash.
        """
        trial = self._trial
        if trial is None or trial.engine is not engine or not self._has_stood(trial):
            return False
        self._counters.acquitted += 1
        trial.crashes = ()
        self._end_trial(trial)
        return True

    def _has_stood(self, trial: Entry) -> bool:
        """Return whether the suspect on trial is past the point of its last crash.

        The point is a number of tokens. It is unknown at first if the request does not stream. In this case, return
        False until the trial has lasted as long as the longest earlier period without a crash. The number of tokens at
        that time becomes the point.
        """
        if trial.meta.streaming:
            return _is_past(trial)
        if trial.crash_position is None:
            moments = [trial.arrived, *(crash.at for crash in trial.crashes)]
            longest = max(after - before for before, after in pairwise(moments))
            if self._context.now - self._trial_since >= longest:
                trial.crash_position = trial.progress
            return False
        return trial.progress >= trial.crash_position + ACQUITTAL_TOKENS

    def _end_trial(self, entry: Entry) -> None:
        """End the trial of a request. The request stays at its engine if no other suspect needs the engine."""
        self._trial = None
        if self._waiting:
            self._requeue(entry)

    def _drop_accusation(self) -> None:
        self._accused = None
        self._context.cancel_timer("verdict")


def _is_past(entry: Entry) -> bool:
    """Return whether a streaming request has at least ACQUITTAL_TOKENS more tokens than at its last crash."""
    before = entry.crash_position
    return before is not None and entry.meta.streaming and entry.tokens_so_far >= before + ACQUITTAL_TOKENS


def _is_empty(engine: Engine) -> bool:
    return not engine.in_flight and not engine.unsettled
