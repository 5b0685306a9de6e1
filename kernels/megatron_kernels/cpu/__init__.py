"""A decoder's step, compiled for the CPU: tiles in LLVM IR, loops in numba, threads synchronised by barriers."""
