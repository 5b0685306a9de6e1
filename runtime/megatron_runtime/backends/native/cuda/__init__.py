"""The executor for CUDA devices.

It copies all inputs of a step in one transfer, runs the layers as kernels, and replays decode steps as CUDA graphs.
"""
