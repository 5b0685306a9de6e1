"""The dashboard in front of a fake API server, on a real port, and its page in Chromium."""

from __future__ import annotations

import asyncio
import importlib.util
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from browser import chromium as chromium  # fixtures
from browser import page as page
from in_memory_cluster import Cluster
from kubernetes.aio.client import Configuration

from megatron_kubectl.dashboard.app import Dashboard, DashboardServer, DashboardSettings
from megatron_operator.cluster.api import KubeApi

SPEC: dict[str, Any] = {"replicas": 2, "model": {"source": {"builtin": "smollm2-135m"}}}


def _sibling(name: str) -> ModuleType:
    """Import a helper of this folder; test folders are no packages."""
    full_name = f"dashboard_tests_{name}"
    if full_name not in sys.modules:
        spec = importlib.util.spec_from_file_location(full_name, Path(__file__).with_name(f"{name}.py"))
        assert spec is not None
        assert spec.loader is not None
        sys.modules[full_name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[full_name])
    return sys.modules[full_name]


@pytest.fixture
async def fake() -> AsyncIterator[Any]:
    """An API server with `demo`, which runs, and `broken`, one of whose engines crashes."""
    broken = Cluster({**SPEC, "replicas": 1}, name="broken")
    broken.broken_engines.add("broken-engine-0")
    made = _sibling("fake_api").FakeApi(Cluster(SPEC), broken)
    await made.start()
    yield made
    await made.stop()


@pytest.fixture
async def settings(fake: Any) -> AsyncIterator[DashboardSettings]:
    """The settings of a dashboard that serves during the test."""
    configuration = Configuration()
    configuration.host = fake.url
    with socket.create_server(("127.0.0.1", 0)) as listener:
        made = DashboardSettings(listener.getsockname()[1], "default", "test", sample_seconds=0.3)
        async with KubeApi(configuration) as api:
            server = DashboardServer(Dashboard(api, made))
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            yield made
            server.should_exit = True
            await serving
