"""A decoder's step, compiled for the processor: tiles in LLVM IR, loops in numba, threads that meet at barriers."""
