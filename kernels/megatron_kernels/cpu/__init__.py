"""C++ kernels that compute the steps of a decoder on the CPU, for several instruction sets.

Python calls the kernels through ctypes.
"""
