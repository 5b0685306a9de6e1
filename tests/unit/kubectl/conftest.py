"""The dashboard in front of a fake API server, on a real port, and its page in Chromium."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import fake_kubectl
import pytest
import yaml
from browser import chromium as chromium  # fixtures
from browser import driver as driver
from browser import page as page
from in_memory_cluster import Cluster
from kubernetes.aio.client import Configuration
from machine import scaled

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
def verb_seconds() -> float:
    """The time-out of verbs; a test that waits for it sets another one."""
    return 10.0


@pytest.fixture
async def settings(fake: Any, verb_seconds: float) -> AsyncIterator[DashboardSettings]:
    """The settings of a dashboard that serves during the test."""
    configuration = Configuration()
    configuration.host = fake.url
    with socket.create_server(("127.0.0.1", 0)) as listener:
        made = DashboardSettings(
            listener.getsockname()[1], "default", "test", sample_seconds=1.0, verb_seconds=verb_seconds
        )
        async with KubeApi(configuration) as api:
            server = DashboardServer(Dashboard(api, made))
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            yield made
            server.should_exit = True
            await serving


@pytest.fixture
def kubeconfig(fake: Any, tmp_path: Path) -> Path:
    """A kubeconfig of the fake API server, with the context `here` and its namespace `default`."""
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u", "namespace": "default"}}],
        "clusters": [{"name": "c", "cluster": {"server": fake.url}}],
        "users": [{"name": "u", "user": {}}],
    }
    path = tmp_path / "kubeconfig"
    path.write_text(yaml.safe_dump(config))
    return path


@dataclass
class Command:
    """`kubectl megatron dashboard` as a process, and the URL that it printed."""

    process: asyncio.subprocess.Process
    url: str


@pytest.fixture
async def command(kubeconfig: Path) -> AsyncIterator[Command]:
    """The command in front of the fake API server, through a stand-in for kubectl."""
    path = fake_kubectl.install(kubeconfig.parent)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "megatron_kubectl.cli", "dashboard", "--no-browser"),
        env={**os.environ, "KUBECONFIG": str(kubeconfig), "PATH": path, "PYTHONUNBUFFERED": "1"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    assert process.stdout is not None
    line = (await asyncio.wait_for(process.stdout.readline(), scaled(30))).decode()
    found = re.fullmatch(r"dashboard of here: (http://127\.0\.0\.1:\d+/#token=\S+)\n", line)
    assert found is not None, line
    yield Command(process, found[1])
    if process.returncode is None:
        process.send_signal(signal.SIGCONT)
        process.send_signal(signal.SIGINT)
        await asyncio.wait_for(process.wait(), scaled(30))
