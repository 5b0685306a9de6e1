"""The operations of the compiled function."""

from __future__ import annotations

import numpy as np

LEAD, SERVE, LOOK_UP, PACK, MAKE_SEMAPHORES, POST, VALIDATE = range(7)
"""
LEAD             (job, semaphores, others)     run a job as thread 0, with `others` threads that serve
SERVE            (job, semaphore, thread)      run jobs as this thread until one is STOP
LOOK_UP          (matrix, ids, count, y)       unpack rows of a matrix
PACK             (packing, first, stop)        pack some units of a matrix
MAKE_SEMAPHORES  (semaphores, count)
POST             (semaphores, count)
VALIDATE         (validation)                  sum stored weights and check that their scales are finite
"""

STOP, RUN_STEP, RUN_PRODUCT = range(3)

JOB = np.dtype([("kind", np.int64), ("record", np.int64)])
"""The next job of the threads. `record` is the address of a STEP or a PRODUCT."""
