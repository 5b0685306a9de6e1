"""Does the thread that runs steps get on? Judged from another thread of its process, twice a second. No torch.

From one mark of StepProgress to the next there are a few operations of one layer. What takes longer than STUCK_SECONDS
is
 - blocked, if the thread has hardly used the processor and did not wait for it or for a disk: it will not come back;
 - looping, if it has used many times the processor time that it should have by its pace in the steps before;
 - else merely slow: a large prompt on a slow processor, or one that many share. That may last for the step timeout.
   A warm-up, before which there is no pace, may take longer.
A thread in an exchange waits for others: rank 0 judges that, by the reports of all. What the network carries is a sign
that an exchange gets on.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

from megatron_runtime.distributed.step_progress import Phase, Report, StepProgress

STUCK_SECONDS = 3.0
WARM_UP_SECONDS = 300.0
"""That a part of a warm-up may take: kernels are compiled, and pages of weights read for the first time."""
LOOKS = 4
"""Fewer tell nothing: the process has hardly run."""
TIMES_EXPECTED = 8.0
IDLE_SHARE = 0.05
"""Of the time, that a thread which is blocked uses the processor at most."""
TRAFFIC_BYTES = 1 << 16
"""Between two looks; what this watch reads itself is less."""
_TICKS = os.sysconf("SC_CLK_TCK")


class StepWatch:
    """progress: of this process. step_timeout_seconds: no part of a step may take longer.

    compiles: kernels are compiled as steps first need them, by processes that a warm-up waits for.
    """

    def __init__(self, progress: StepProgress, *, step_timeout_seconds: float, compiles: bool = False) -> None:
        self.progress = progress
        self._compiles = compiles
        self._step_timeout = step_timeout_seconds
        self._seen = -1
        self._cpu_before = 0.0
        self._looks = self._busy_looks = 0
        self._extra_signs = 0
        self._traffic = 0

    @property
    def is_setting_up(self) -> bool:
        """Kernels are compiled and ranks of GPUs connected: nothing may be seen of this rank for long."""
        return self._compiles and self.progress.is_warm_up

    def report(self) -> Report:
        progress = self.progress
        signs = progress.marks + self._extra_signs
        return Report(progress.done, signs, progress.exchanges, progress.phase, progress.place())

    def look(self) -> str | None:
        """What is wrong with this rank's step, if it does not get on. Called about every half second."""
        progress = self.progress
        if progress.phase is Phase.EXCHANGING:
            self._look_at_traffic()
            return None
        if progress.phase is Phase.IDLE or progress.thread_id is None:
            self._seen = -1
            return None
        seconds, is_busy = _processor_time(progress.thread_id)
        if progress.marks != self._seen:
            self._seen, self._cpu_before = progress.marks, seconds
            self._looks = self._busy_looks = 0
            return None
        self._looks += 1
        self._busy_looks += is_busy
        return self._judge(time.monotonic() - progress.marked_at, seconds - self._cpu_before)

    def _judge(self, elapsed: float, used: float) -> str | None:
        if elapsed < STUCK_SECONDS or self._looks < LOOKS:
            return None
        is_warm_up = self.progress.is_warm_up
        expected = None if is_warm_up else self.progress.expected_seconds()
        is_blocked = used < IDLE_SHARE * elapsed and self._busy_looks < self._looks / 2
        if is_blocked and not self.is_setting_up:
            how = "blocked"
        elif expected is not None and used > max(STUCK_SECONDS, TIMES_EXPECTED * expected):
            how = f"computing, which took less than {expected:.2g} s before"
        elif elapsed > (max(WARM_UP_SECONDS, self._step_timeout) if is_warm_up else self._step_timeout):
            how = "computing"
        else:
            return None
        return f"it has not got on for {elapsed:.1f} s in {self.progress.place()}: it is {how}{self._position()}"

    def _position(self) -> str:
        """Where its program is."""
        for thread in threading.enumerate():
            frame = sys._current_frames().get(thread.ident or 0)
            if thread.native_id == self.progress.thread_id and frame is not None:
                return f", at {Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"
        return ""

    def _look_at_traffic(self) -> None:
        """gloo reads and writes as one does files, which the system counts; ZeroMQ does not."""
        found = _bytes_moved()
        if found - self._traffic > TRAFFIC_BYTES:
            self._extra_signs += 1
        self._traffic = found


def _processor_time(thread_id: int) -> tuple[float, bool]:
    """What a thread of this process has used, in seconds, and whether it runs, waits for a processor, or for a disk."""
    try:
        fields = Path(f"/proc/self/task/{thread_id}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0, True  # no such system: only the step timeout judges
    return (int(fields[11]) + int(fields[12])) / _TICKS, fields[0] in "RD"


def _bytes_moved() -> int:
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.partition(" ")[2]) for line in lines if line.startswith(("rchar", "wchar")))
