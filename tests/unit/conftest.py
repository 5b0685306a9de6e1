"""No test here needs a GPU. Triton is an interpreter or a compiler from its first import on, and other packages import
it too: the choice is made before any test module is.

Tests run in several processes at once, and start more: one thread of torch in each. Threads of several processes that
meet at barriers on one processor are many times slower than one.
"""

from __future__ import annotations

import os
import sys

import pytest

if "triton" not in sys.modules:
    os.environ["TRITON_INTERPRET"] = "1"
if "torch" not in sys.modules:
    os.environ["OMP_NUM_THREADS"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with long tests come first: what is begun last must not keep one process busy while others are done."""
    long = {item.path for item in items if item.get_closest_marker("long") is not None}
    items.sort(key=lambda item: item.path not in long)
