"""No test here needs a GPU. Triton is an interpreter or a compiler from its first import on, and other packages import
it too: the choice is made before any test module is.

Tests run in several processes at once, and start more: one thread of torch in each. Threads of several processes that
meet at barriers on one CPU are many times slower than one.
"""

from __future__ import annotations

import gc
import os
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from soak import size

from megatron_runtime.cli.processes import free_ports

# Every property test has the same number of examples. No deadline per example: the machine may stall for a second.
settings.register_profile(
    "unit", max_examples=size(15, soak=5000), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("unit")

if "triton" not in sys.modules:
    os.environ["TRITON_INTERPRET"] = "1"
if "torch" not in sys.modules:
    os.environ["OMP_NUM_THREADS"] = "1"


_LARGE_PACKAGES = {"transformers": "transformers", "megatron": r"megatron\.core|gpt_models|gpt_program"}
"""Packages whose import takes longer than most files, and the modules that import them."""


@pytest.fixture
def unused_tcp_port() -> int:
    """A port that no other test of this machine gets until this process ends, in place of pytest-asyncio's fixture."""
    return free_ports(1)[0]


@cache
def _large_package(file: Path) -> str | None:
    """Return the large package that a test file, or what it has from its folder, imports; None if there is none."""
    found = [path.read_text() for path in (file, file.with_name("conftest.py")) if path.exists()]
    for name, modules in _LARGE_PACKAGES.items():
        if any(re.search(rf"^ *from ({modules})\b.* import", text, re.MULTILINE) for text in found):
            return name
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that share the import of a large package come first: one process runs them all."""
    items.sort(key=lambda item: _large_package(item.path) is None)


def pytest_collection_finish() -> None:
    """No later collection of garbage visits the modules and tests: many tests ask for one. The others are rare."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file belongs to one process, and all that need the same large package to the same one."""
    from xdist.scheduler import LoadFileScheduling

    class LoadFiles(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return _large_package(config.rootpath / file) or file

    return LoadFiles(config, log) if config.getoption("dist") == "loadfile" else None
