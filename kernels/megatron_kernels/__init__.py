"""The operations of a decoder layer and of sampling on a GPU, each in two files.

`NAME.py` defines the operation: shapes, types, bound, source, and a reference in torch that runs on any device.
`NAME_triton.py` is the same function as a Triton kernel; `registry` selects one of them. Importing this package or a
reference does not import triton and needs no GPU. This package does not import the runtime or the operator.
"""
