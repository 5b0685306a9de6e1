"""`kubectl get` of resources by their fields."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_operator.cluster.kinds import RESOURCE

pytestmark = pytest.mark.cluster

SELECTORS = {
    "spec.desiredState=Paused": {"paused"},
    "spec.desiredState!=Paused": {"default", "vllm"},
    "spec.engine.backend=VLLM": {"vllm"},
    "spec.engine.backend=Native": {"default", "paused"},
    "status.state=Running": {"paused", "vllm"},
    "status.state=": {"default"},
    "status.model=small": {"vllm"},
    "status.state=Running,spec.engine.backend=Native": {"paused"},
}
"""Field selectors, and the resources that each selects."""


async def test_resources_are_selected_by_state_model_and_backend(
    make_resource: Callable[[str], Any], api: Any, namespace: str, kubectl: Any
) -> None:
    await make_resource("default").create()
    await make_resource("paused").create(desiredState="Paused")
    await make_resource("vllm").create(engine={"backend": "VLLM"})
    for name, model in (("paused", "large"), ("vllm", "small")):
        status = {"status": {"state": "Running", "model": model}}
        await api.request(
            "PATCH",
            RESOURCE.path(namespace, name, subresource="status"),
            body=status,
            content_type="application/merge-patch+json",
        )
    for selector, names in SELECTORS.items():
        done = kubectl("get", "mi", "--field-selector", selector, "-o", "name")
        assert done.returncode == 0, done.stderr
        assert {line.partition("/")[2] for line in done.stdout.split()} == names, selector
    unknown = kubectl("get", "mi", "--field-selector", "status.endpoint=a")
    assert "field label not supported: status.endpoint" in unknown.stderr


async def test_get_all_lists_no_resource(resource: Any, kubectl: Any, tmp_path: Path) -> None:
    await resource.create()
    # The user's cache may be of another cluster at this address.
    done = kubectl("get", "all", "-o", "name", "--cache-dir", str(tmp_path))
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
