"""The Python API of Megatron-Core.

A program that imports modules of `megatron.core.inference` changes this prefix to `megatron_runtime.megatron_core`.
Below the prefix, the module paths are the same. The modules re-export or wrap classes of other packages in this
runtime. No other package imports these modules.
"""

from typing import Any

from megatron_runtime.requests.request import make_tensors_with


def _torch() -> Any:
    """Import torch and return the module.

    Called for the first tensor, so that programs without tensors do not load torch.
    """
    import torch

    return torch


make_tensors_with(_torch)
