"""Processes that are stopped after each test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from fleet import Fleet
from soak import SOAK


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    fleet = Fleet(tmp_path, warm_coordinators=not SOAK)  # `make soak` measures times of recovery
    yield fleet
    await fleet.close()
