"""The operations of a decoder layer and of sampling on a GPU, each in two files.

`NAME.py` says what the operation is: shapes, types, bound, source, and a reference in torch that runs on any device.
`NAME_triton.py` is the same function as a Triton kernel; `registry` chooses. Importing this package or a reference
never imports triton and never asks for a GPU. Nothing here imports the runtime or the operator.
"""
