"""The one function that is compiled. Its first argument selects the operation."""

from __future__ import annotations

import numpy as np
from numba import carray

from megatron_kernels.cpu.entry_points import (
    JOB,
    LEAD,
    LOOK_UP,
    MAKE_SEMAPHORES,
    PACK,
    POST,
    RUN_STEP,
    SERVE,
    STOP,
    VALIDATE,
)
from megatron_kernels.cpu.ir import compiled, pointer
from megatron_kernels.cpu.lookup import look_up
from megatron_kernels.cpu.panels import pack
from megatron_kernels.cpu.products import run_product
from megatron_kernels.cpu.records import PRODUCT, STEP
from megatron_kernels.cpu.sizes import SEMAPHORE_BYTES
from megatron_kernels.cpu.step import run_step
from megatron_kernels.cpu.sync import barrier, sem_init, sem_post, wait
from megatron_kernels.cpu.validate import validate

_LEADER, _NONE = np.int64(0), np.int64(0)
_STEP_TYPE, _PRODUCT_TYPE, _JOB_TYPE = np.dtype(STEP), np.dtype(PRODUCT), np.dtype(JOB)


@compiled
def _run(job, thread):
    if job.kind == RUN_STEP:
        step = carray(pointer(job.record), 1, dtype=_STEP_TYPE)[0]
        run_step(step, thread)
        barrier(step.barrier, step.threads)
    else:
        product = carray(pointer(job.record), 1, dtype=_PRODUCT_TYPE)[0]
        run_product(product, thread)
        barrier(product.barrier, product.threads)


@compiled
def _work(job_address, semaphore, thread, others):
    """Thread 0 wakes the other threads and runs the job with them; any other thread runs jobs until STOP."""
    job = carray(pointer(job_address), 1, dtype=_JOB_TYPE)[0]
    while True:
        if thread == 0:
            for other in range(others):
                sem_post(semaphore + other * SEMAPHORE_BYTES)
        else:
            wait(semaphore)
        if job.kind == STOP:
            return
        _run(job, thread)
        if thread == 0:
            return


def entry(what, a, b, c, d):
    """Arguments by `what`: see entry_points.py."""
    if what == LEAD:
        _work(a, b, _LEADER, c)
    elif what == SERVE:
        _work(a, b, c, _NONE)
    elif what == LOOK_UP:
        look_up(a, b, c, d)
    elif what == PACK:
        pack(a, b, c)
    elif what == MAKE_SEMAPHORES:
        for number in range(b):
            sem_init(a + number * SEMAPHORE_BYTES, 0, 0)
    elif what == VALIDATE:
        validate(a)
    elif what == POST:
        for number in range(b):
            sem_post(a + number * SEMAPHORE_BYTES)
