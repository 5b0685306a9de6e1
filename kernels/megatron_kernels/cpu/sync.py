"""Synchronisation primitives that numba lacks: loads and stores by address, atomic addition, semaphores of libc."""

from __future__ import annotations

from llvmlite import ir
from numba import types

from megatron_kernels.cpu.ir import I32, I64, Code, compiled, function

sem_init = types.ExternalFunction("sem_init", types.int32(types.int64, types.int32, types.uint32))
sem_post = types.ExternalFunction("sem_post", types.int32(types.int64))
_sem_wait = types.ExternalFunction("sem_wait", types.int32(types.int64))
_sched_yield = types.ExternalFunction("sched_yield", types.int32())


@function(I64, address=I64, amount=I64)
def fetch_add(code: Code, a: dict[str, ir.Value]) -> ir.Value:
    """Add to the word at an address atomically; return its previous value."""
    pointer = code.b.inttoptr(a["address"], I64.as_pointer())
    return code.b.atomic_rmw("add", pointer, a["amount"], "seq_cst")


@function(I64, address=I64)
def read(code: Code, a: dict[str, ir.Value]) -> ir.Value:
    """Load the word at an address with acquire ordering."""
    pointer = code.b.inttoptr(a["address"], I64.as_pointer())
    return code.b.load_atomic(pointer, "acquire", 8, typ=I64)


@function(address=I64, value=I64)
def write(code: Code, a: dict[str, ir.Value]) -> None:
    """Store the word at an address with release ordering."""
    code.b.store_atomic(a["value"], code.b.inttoptr(a["address"], I64.as_pointer()), "release", 8)


@function(I32, address=I64)
def read_int32(code: Code, a: dict[str, ir.Value]) -> ir.Value:
    return code.load(I32, a["address"])


@compiled
def barrier(address, threads):
    """Return when all threads have arrived. `address`: of two words, arrivals and generation, both 0 at first."""
    generation = read(address + 8)
    if fetch_add(address, 1) == threads - 1:
        write(address, 0)
        fetch_add(address + 8, 1)
        return
    while read(address + 8) == generation:
        _sched_yield()


@compiled
def wait(semaphore):
    """Decrement the semaphore; sleep until that is possible."""
    while _sem_wait(semaphore) != 0:
        continue
