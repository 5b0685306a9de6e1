"""The operations of a decoder layer and of sampling on a GPU. Each operation has two files.

`NAME.py` defines the operation: shapes, types, performance bound, source, and a reference implementation in torch for
any device. `NAME_triton.py` implements the same function as a Triton kernel. `registry` selects one of the two.
Importing this package or a reference does not import triton and needs no GPU. This package imports neither the runtime
nor the operator.
"""
