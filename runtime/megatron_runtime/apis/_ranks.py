"""This process among those that torch.distributed started, if it did."""

from __future__ import annotations

import os
import sys
from typing import Any

_MAX_TEXT_BYTES = 256


def _distributed() -> Any | None:
    """torch.distributed, if a process group was initialised. Loads nothing."""
    module = sys.modules.get("torch.distributed")
    return module if module is not None and module.is_available() and module.is_initialized() else None


def global_rank() -> int:
    distributed = _distributed()
    if distributed is not None:
        return int(distributed.get_rank())
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    distributed = _distributed()
    return int(distributed.get_world_size()) if distributed is not None else 1


def broadcast_text(text: str) -> str:
    """What rank 0 gave. Every rank of the process group has to call this."""
    import torch

    distributed = _distributed()
    assert distributed is not None, "torch.distributed is not initialised"
    device = "cuda" if distributed.get_backend() == "nccl" else "cpu"
    data = text.encode().ljust(_MAX_TEXT_BYTES, b"\0")
    if len(data) > _MAX_TEXT_BYTES:
        raise ValueError(f"text of {len(data)} bytes: at most {_MAX_TEXT_BYTES}")
    tensor = torch.tensor(list(data), dtype=torch.uint8, device=device)
    distributed.broadcast(tensor, src=0)
    return bytes(tensor.tolist()).rstrip(b"\0").decode()
