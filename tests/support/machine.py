"""The speed of this machine, measured once before the tests, so that timeouts scale with it.

A timeout in a test is written for an idle machine with two cores. `scaled()` multiplies it by the factor by which this
machine is slower. MEGATRON_TIME_SCALE sets the factor.

The factor is at least 1: most timeouts include timers of the product or of Kubernetes, such as heartbeats, backoffs and
grace periods, which a fast machine does not shorten. No passing test waits until a timeout.
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
    """Return the time that concurrent threads take for a fixed computation, divided by the reference.

    The threads compute without the interpreter lock, so the factor includes a CPU quota and the load of other
    processes.
    """

    def work() -> None:
        hashlib.pbkdf2_hmac("sha256", b"calibration", b"salt", _WORK)

    threads = [threading.Thread(target=work) for _ in range(min(os.cpu_count() or 1, 4))]
    begun = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return (time.monotonic() - begun) / _REFERENCE_SECONDS


if "MEGATRON_TIME_SCALE" not in os.environ:
    # Worker processes of pytest-xdist and programs of tests inherit the measurement.
    os.environ["MEGATRON_TIME_SCALE"] = f"{measure_scale():.2f}"
SCALE = max(1.0, float(os.environ["MEGATRON_TIME_SCALE"]))


def scaled(seconds: float) -> float:
    """Convert seconds of an idle two-core machine to seconds of this machine."""
    return seconds * SCALE
