"""Megatron-Core's names: a program changes its prefix `megatron.core.inference` to `megatron_runtime.megatron_core`.

The sub-paths are Megatron-Core's own. The modules re-export or wrap the packages below; nothing else imports them.
"""

from typing import Any

from megatron_runtime.requests.request import make_tensors_with


def _torch() -> Any:
    """Import torch when the first tensor is needed, so that programs without tensors, such as clients, do not load
    it.
    """
    import torch

    return torch


make_tensors_with(_torch)
