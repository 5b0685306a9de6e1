"""The executor for CUDA devices. It copies a step's inputs at once, runs layers of kernels, and replays decode steps as
graphs.
"""
