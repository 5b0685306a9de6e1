"""Fixtures of the programs that run in the environment of a client."""

from __future__ import annotations

import os

import pytest


@pytest.fixture
def url() -> str:
    """The base URL of the server, with /v1."""
    return os.environ["SERVER_URL"] + "/v1"
