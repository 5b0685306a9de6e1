"""Triton's interpreter runs the kernels here too (tests/unit/conftest.py)."""

from __future__ import annotations

from one_thread import one_thread as one_thread  # the fixture
