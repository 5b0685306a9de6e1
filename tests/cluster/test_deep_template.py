"""A resource nested as deeply as the API server accepts, beside a resource of another tenant."""

from __future__ import annotations

from typing import Any

import pytest
from eventually import eventually

from megatron_operator.cluster.kinds import RESOURCE

pytestmark = pytest.mark.cluster

DEPTH = 9_900
"""The API server decodes 10,000 levels."""


async def test_a_deeply_nested_template_does_not_affect_other_resources(
    resource: Any, operator: Any, node: Any, kubectl: Any, namespace: str
) -> None:
    nested = '{"a":' * DEPTH + "1" + "}" * DEPTH
    head = f'{{"apiVersion":"{RESOURCE.api_version}","kind":"{RESOURCE.kind}","metadata":{{"name":"deep"}},'
    spec = f'"spec":{{"model":{{"source":{{"builtin":"x"}}}},"engine":{{"podTemplate":{{"spec":{nested}}}}}}}}}'
    taken = kubectl("create", "-n", namespace, "--validate=ignore", "-f", "-", stdin=head + spec)
    assert taken.returncode == 0, taken.stderr[-2000:]
    await resource.create(replicas=1)
    await resource.settled("Running")
    reason = "{.status.conditions[?(@.type=='Degraded')].reason}"

    async def is_rejected() -> bool:
        shown = kubectl("get", "mi", "deep", "-n", namespace, "-o", f"jsonpath={reason}")
        return shown.stdout in ("NotAllowed", "InvalidSpec")

    await eventually(is_rejected, what="the nested resource is rejected")
