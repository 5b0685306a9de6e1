"""A decoder's step on the CPU: C++ kernels for several instruction sets, called by ctypes."""
