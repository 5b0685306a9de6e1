from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any


class MoveDirectionality(Enum):
    UNIDIRECTIONAL = 0
    SWAP = 1


@dataclass
class BatchUpdate:
    batch_size: int
    removed: list[int]
    added: list[tuple[Any, ...]]
    moved: list[tuple[Any, ...]]


class LogitsProcessor:
    pass
