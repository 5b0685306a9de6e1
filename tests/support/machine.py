"""How slow this machine is, measured once before the tests, so that no timeout depends on its speed.

A timeout in a test says how long an idle two-core machine may take; `scaled()` makes it as much longer as this machine
is slower. MEGATRON_TIME_SCALE sets the factor instead of measuring it.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time

_WORK = 400_000
"""Rounds of SHA-256: 0.15 s of one idle core of the machine for which the timeouts were written."""
_REFERENCE_SECONDS = 0.15


def measure_scale() -> float:
    """The factor: the time that concurrent threads take for a fixed piece of work, over the reference; at least 1.

    The threads compute without the interpreter lock, so a CPU quota and the load of other processes count.
    """

    def work() -> None:
        hashlib.pbkdf2_hmac("sha256", b"calibration", b"salt", _WORK)

    threads = [threading.Thread(target=work) for _ in range(min(os.cpu_count() or 1, 4))]
    begun = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return max(1.0, (time.monotonic() - begun) / _REFERENCE_SECONDS)


# Processes of pytest-xdist inherit the first one's measurement.
SCALE = float(os.environ.setdefault("MEGATRON_TIME_SCALE", f"{measure_scale():.2f}"))


def scaled(seconds: float) -> float:
    """`seconds` of an idle two-core machine, in seconds of this one."""
    return seconds * SCALE
