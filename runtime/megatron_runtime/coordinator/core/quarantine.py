"""Poison requests: requests that end the engine that runs them.

A request that was in flight at two crashes is a suspect. Suspects run one at a time, alone, on one engine. A suspect
that ends an engine alone is failed. One that gets past the point of its last crash is acquitted. The reasons and the
limits of this rule: docs/decisions/025-poison-requests-run-alone.md.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from typing import Protocol

from megatron_runtime.coordinator.core.clock import Clock, Timer
from megatron_runtime.coordinator.core.counters import Counters
from megatron_runtime.coordinator.core.engines import EngineRegistry
from megatron_runtime.coordinator.core.records import Crash, Engine, Entry
from megatron_runtime.protocol import limits
from megatron_runtime.protocol.messages import FailedRequest, Partial

logger = logging.getLogger(__name__)

SUSPECT_CRASHES = 2
"""Crashes at which a request has to have been in flight to be a suspect."""
ACQUITTAL_TOKENS = 16
"""A request is acquitted once it has so many tokens more than were known at its last crash."""
VERDICT_SECONDS = 3.0
"""An engine that lives registers again within this time after its connection was cut."""
REMEMBERED_FAILURES = 16
"""Failed requests that STATUS lists."""
NAMED_ENGINES = 16
"""The last engines that a failed request ended, as STATUS and its error name them."""
REMEMBERED_CUTS = 1024
"""Engines whose cut connection may still prove to be no crash."""


class Surroundings(Protocol):
    """What the quarantine does to requests. `quarantine.py` decides, the dispatcher acts."""

    def dispatch_to(self, entry: Entry, engine: Engine) -> None:
        """Send a waiting suspect to `engine`; `entry.engine` says whether it went there."""

    def pull_back(self, entry: Entry) -> None:
        """Take an open request from the queue, or from its engine, so that it is nowhere."""

    def wait_first(self, entry: Entry) -> None:
        """Queue a request that is nowhere before all others of its priority and model."""

    def limit_wait(self, entry: Entry) -> None: ...

    def refuse_model(self, entry: Entry, engines: list[Engine]) -> None:
        """Fail a request whose model no engine runs."""

    def fail_poison(self, entry: Entry, message: str) -> None: ...

    def is_open(self, entry: Entry) -> bool: ...

    def pump(self) -> None: ...


class Quarantine:
    """Suspects that wait, the one that is on trial, and the engine that is reserved for it.

    wall_time: seconds since 1970, for the time of a failure in STATUS.
    """

    def __init__(
        self,
        *,
        engines: EngineRegistry,
        counters: Counters,
        clock: Clock,
        wall_time: Callable[[], float],
        surroundings: Surroundings,
    ) -> None:
        self.failures: deque[FailedRequest] = deque(maxlen=REMEMBERED_FAILURES)
        """The last requests that were failed, oldest first."""
        self._engines = engines
        self._counters = counters
        self._clock = clock
        self._wall_time = wall_time
        self._surroundings = surroundings
        self._waiting: dict[bytes, Entry] = {}
        self._is_sorted = True
        """`_waiting` has the suspect that arrived last first."""
        self._trial: Entry | None = None
        self._trial_since = 0.0
        self._reserved: Engine | None = None
        self._accused: Entry | None = None
        """A suspect that ran alone when its engine's connection was cut. It waits for proof that the engine ended."""
        self._timer: Timer | None = None
        self._cuts: dict[str, Crash] = {}
        """By name of the engine: its last crash, as long as only its connection is known to have ended."""

    def __len__(self) -> int:
        """Suspects without an engine."""
        return len(self._waiting)

    @property
    def active(self) -> bool:
        """Whether run_next() may have something to do."""
        return bool(self._waiting) or self._reserved is not None

    @staticmethod
    def suspects(entry: Entry) -> bool:
        return sum(crash.counts for crash in entry.crashes) >= SUSPECT_CRASHES

    # --- engines end --------------------------------------------------------------------------------------------

    def crashed(self, engine: Engine, *, certain: bool) -> None:
        """Count a crash against all that `engine` ran. Called before its requests are released.

        certain: False where only the connection is known to have ended. back() then may take the crash back.
        """
        relieved = [entry for entry in engine.relieved if self._surroundings.is_open(entry)]
        entries = [entry for entry in (*engine.in_flight.values(), *relieved) if not entry.meta.engine]
        if not entries:
            return
        self._counters.engine_crashes += 1
        crash = Crash(engine.name, self._clock.time())
        if not certain:
            self._cuts[engine.name] = crash
            if len(self._cuts) > REMEMBERED_CUTS:
                del self._cuts[next(iter(self._cuts))]
        for entry in entries:
            self._charge(entry, crash)
        for entry in relieved:
            if self.suspects(entry) and entry is not self._trial:
                self._surroundings.pull_back(entry)
                self.add(entry)
        trial = self._trial
        if trial is not None and trial.engine is engine and entries == [trial]:
            if certain:
                self._convict(trial)
            else:
                self._accused = trial
                self._timer = self._clock.call_at(self._clock.time() + VERDICT_SECONDS, self._time_is_up)

    def _charge(self, entry: Entry, crash: Crash) -> None:
        crashes = [crash for crash in entry.crashes if crash.counts]
        if _is_past(entry):
            crashes.clear()
        if len(crashes) + 1 == SUSPECT_CRASHES:
            self._counters.suspects += 1
        entry.crashes = (*crashes, crash)
        entry.crash_position = entry.tokens_so_far if entry.meta.streaming else None

    def lost(self, engine: Engine) -> None:
        """`engine` left, in whichever way. Its requests are put back by the caller."""
        engine.relieved.clear()
        if self._trial is not None and self._trial.engine is engine:
            self._trial = None
        if self._reserved is engine:
            self._reserve(None)

    def back(self, name: str, *, has_outlived: bool) -> None:
        """An engine registered. One that has outlived the end of its connection did not crash."""
        crash = self._cuts.pop(name, None)
        if crash is None:
            return
        decides = self._accused is not None and self._accused.crashes[-1] is crash
        if has_outlived:
            crash.counts = False
            if decides:
                self._drop_accusation()
            self._release_cleared()
        elif decides:
            self._time_is_up()

    def _time_is_up(self) -> None:
        accused = self._accused
        if accused is not None:
            self._convict(accused)
            self._surroundings.pump()

    def _convict(self, entry: Entry) -> None:
        """Fail a request that ended an engine alone. The crashes that it was in flight at are explained by it."""
        names = [crash.engine[: limits.MAX_NAME_BYTES] for crash in entry.crashes if crash.counts][-NAMED_ENGINES:]
        uid = entry.uid.hex()
        logger.error("request %s is failed: it ended %d engines (%s)", uid, len(names), ", ".join(names))
        self._counters.poison_requests += 1
        self.failures.append(FailedRequest(uid=uid, engines=names, at=round(self._wall_time(), 3)))
        for crash in entry.crashes:
            crash.counts = False
        ended = f"ended {len(names)} engines ({', '.join(names)}), the last while it ran alone"
        message = f"request {uid} {ended}: do not send it again"
        self._surroundings.fail_poison(entry, message)
        self._release_cleared()

    def _release_cleared(self) -> None:
        """Suspects whose crashes are explained rejoin the others."""
        for entry in sorted(self._waiting.values(), key=lambda entry: entry.arrived, reverse=True):
            if not self.suspects(entry):
                self.forget(entry)
                self._surroundings.wait_first(entry)
        if self._trial is not None and not self.suspects(self._trial):
            self._end_trial(self._trial)

    # --- suspects -----------------------------------------------------------------------------------------------

    def add(self, entry: Entry) -> None:
        """Hold back a suspect that has no engine."""
        if self._trial is entry:
            self._trial = None
        self._waiting[entry.uid] = entry
        self._is_sorted = False
        self._surroundings.limit_wait(entry)

    def forget(self, entry: Entry) -> None:
        """The request is over, or no suspect any more."""
        self._waiting.pop(entry.uid, None)
        if self._trial is entry:
            self._trial = None
        if self._accused is entry:
            self._drop_accusation()

    def run_next(self) -> None:
        """Put the next suspect on trial, if none is, as soon as an engine has nothing else to do."""
        if self._trial is not None:
            return
        entry, engine = self._choose() if self._accused is None else (None, None)
        self._reserve(engine)
        if entry is None or engine is None or not _is_empty(engine):
            return
        self._surroundings.dispatch_to(entry, engine)
        if entry.engine is engine and self._waiting.pop(entry.uid, None) is not None:
            self._trial, self._trial_since = entry, self._clock.time()

    def _choose(self) -> tuple[Entry, Engine] | tuple[None, None]:
        """The suspect that arrived last, because one that ran for long without harm is less likely to be poison."""
        if not self._is_sorted:
            latest_first = sorted(self._waiting.items(), key=lambda item: item[1].arrived, reverse=True)
            self._waiting, self._is_sorted = dict(latest_first), True
        serving = self._engines.serving()
        available = [engine for engine in serving if engine.available()]
        for entry in list(self._waiting.values()):
            fitting = [engine for engine in available if engine.runs(entry.model)]
            if fitting:
                return entry, min(fitting, key=self._preference)
            if serving and not any(engine.runs(entry.model) for engine in serving):
                self._surroundings.refuse_model(entry, serving)
        return None, None

    def _preference(self, engine: Engine) -> tuple[bool, bool, int, int]:
        """An engine that is empty; else the one that empties already; else the one with the fewest requests."""
        return not _is_empty(engine), engine is not self._reserved, len(engine.in_flight), engine.index

    def _reserve(self, engine: Engine | None) -> None:
        if self._reserved is not None:
            self._reserved.reserved = False
        self._reserved = engine
        if engine is not None:
            engine.reserved = True

    def note_progress(self, engine: Engine, message: Partial) -> None:
        """A reserved engine says how far a suspect that does not stream has come."""
        for uid, dispatch_id, offset, count in message.entries:
            entry = engine.in_flight.get(dispatch_id)
            if entry is not None and entry.uid == uid:
                entry.progress = offset + count
        self.advanced(engine)

    def advanced(self, engine: Engine) -> None:
        """A reserved engine has sent tokens: acquit its suspect if it is past the point of its last crash."""
        trial = self._trial
        if trial is not None and trial.engine is engine and self._has_stood(trial):
            self._counters.acquitted += 1
            trial.crashes = ()
            self._end_trial(trial)
            self._surroundings.pump()

    def _has_stood(self, trial: Entry) -> bool:
        """Whether the suspect on trial is past the point of its last crash.

        Where that is not known in tokens, it is where the suspect stands once it has run alone for as long as it may
        have run before any of its crashes.
        """
        if trial.meta.streaming:
            return _is_past(trial)
        if trial.crash_position is None:
            moments = [trial.arrived, *(crash.at for crash in trial.crashes)]
            longest = max(after - before for before, after in pairwise(moments))
            if self._clock.time() - self._trial_since >= longest:
                trial.crash_position = trial.progress
            return False
        return trial.progress >= trial.crash_position + ACQUITTAL_TOKENS

    def _end_trial(self, entry: Entry) -> None:
        """The request is no suspect any more. It stays where it is if no other suspect needs the engine."""
        self._trial = None
        if self._waiting:
            self._surroundings.pull_back(entry)
            self._surroundings.wait_first(entry)

    def _drop_accusation(self) -> None:
        self._accused = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def stop(self) -> None:
        self._drop_accusation()

    def check_integrity(self) -> None:
        """What must hold whenever the loop is idle."""
        for entry in self._waiting.values():
            assert entry.engine is None, "a suspect waits and has an engine"
            assert self.suspects(entry), "a request is held back without two crashes"
        assert [engine for engine in self._engines if engine.reserved] == [
            engine for engine in (self._reserved,) if engine is not None
        ], "an engine is reserved for nothing"
        trial = self._trial
        if trial is not None:
            assert trial.engine is not None, "a suspect runs on no engine"
            assert trial.engine is self._reserved, "a suspect runs on an engine that is not reserved"
            assert list(trial.engine.in_flight.values()) == [trial], "a suspect does not run alone"
        assert self._accused is None or self._accused.uid in self._waiting, "an accused request does not wait"


def _is_past(entry: Entry) -> bool:
    """Whether a request that streams is so far past the point of its last crash that it is not taken for the cause."""
    before = entry.crash_position
    return before is not None and entry.meta.streaming and entry.tokens_so_far >= before + ACQUITTAL_TOKENS


def _is_empty(engine: Engine) -> bool:
    return not engine.in_flight and not engine.unsettled
