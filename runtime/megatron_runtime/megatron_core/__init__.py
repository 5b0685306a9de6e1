"""Megatron-Core's Python API. A program changes its prefix `megatron.core.inference` to
`megatron_runtime.megatron_core`.

Below the prefix, the module paths are the same as in Megatron-Core. The modules re-export or wrap other packages of
this runtime. No other package imports them.
"""

from typing import Any

from megatron_runtime.requests.request import make_tensors_with


def _torch() -> Any:
    """Import torch when the first tensor is needed. Programs without tensors, such as clients, do not load torch."""
    import torch

    return torch


make_tensors_with(_torch)
