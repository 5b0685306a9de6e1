"""The forward pass on a CUDA device: a step's numbers in one copy, layers of kernels, decode steps as graphs."""
