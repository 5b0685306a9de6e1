"""Fixtures around the small cluster of tests/support."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
from in_memory_cluster import MINIMAL, Cluster

from megatron_operator.decision.world import World


@pytest.fixture
def minimal_spec() -> dict[str, Any]:
    return copy.deepcopy(MINIMAL)


@pytest.fixture
def make_cluster() -> Any:
    def make(**fields: Any) -> Cluster:
        image = fields.pop("image", "runtime:1")
        return Cluster({**copy.deepcopy(MINIMAL), **fields}, image=image)

    return make


@pytest.fixture
def world(make_cluster: Any) -> World:
    """The very first observation of a minimal resource."""
    first: World = make_cluster().world()
    return replace(first)
