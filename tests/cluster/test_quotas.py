"""ResourceQuotas and LimitRanges that keep pods from being created, in the words of the API server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from soak import SOAK

from megatron_operator.cluster.kinds import ObjectKind

from .conftest import condition

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

QUOTA = ObjectKind("ResourceQuota", "", "v1", "resourcequotas")
LIMIT_RANGE = ObjectKind("LimitRange", "", "v1", "limitranges")
LARGE = {"spec": {"containers": [{"name": "engine", "resources": {"requests": {"cpu": "8"}, "limits": {"cpu": "16"}}}]}}


def range_of(**limits: Any) -> dict[str, Any]:
    return {"limits": [{"type": "Container", **limits}]}


CASES: list[tuple[str, ObjectKind, dict[str, Any], str, list[str]]] = [
    (
        "gpus",
        QUOTA,
        {"hard": {"requests.nvidia.com/gpu": "1"}},
        "QuotaExceeded",
        ["exceeded quota: gpus", "requests.nvidia.com/gpu=2", "raise the ResourceQuota", "spec.engine.podTemplate"],
    ),
    (
        "limits",
        QUOTA,
        {"hard": {"limits.cpu": "64"}},
        "LimitRequired",
        ["failed quota: limits: must specify limits.cpu for: ", "a larger ResourceQuota does not help"],
    ),
    (
        "maximum",
        LIMIT_RANGE,
        range_of(max={"cpu": "4"}, default={"cpu": "1"}, defaultRequest={"cpu": "100m"}),
        "LimitRangeViolated",
        ["maximum cpu usage per Container is 4, but limit is 16", "spec.engine.podTemplate"],
    ),
    (
        "cpus",
        QUOTA,
        {"hard": {"requests.cpu": "6"}},
        "QuotaExceeded",
        ["exceeded quota: cpus", "requests.cpu=8", "lower the requests and limits in spec.engine.podTemplate"],
    ),
    (
        "minimum",
        LIMIT_RANGE,
        range_of(min={"memory": "8Gi"}),
        "LimitRangeViolated",
        ["minimum memory usage per Container is 8Gi, but request is "],
    ),
    (
        "ratio",
        LIMIT_RANGE,
        range_of(maxLimitRequestRatio={"cpu": "1500m"}, default={"cpu": "100m"}, defaultRequest={"cpu": "100m"}),
        "LimitRangeViolated",
        ["cpu max limit to request ratio per Container is 1500m", "change the LimitRange"],
    ),
]


async def test_what_limits_pods_is_named_with_the_remedy(
    make_resource: Callable[[str], Any], operator: Any, api: Any, namespace: str
) -> None:
    gpus = {"gpusPerPod": 2, "podTemplate": LARGE}
    for name, kind, spec, reason, words in CASES if SOAK else CASES[:3]:
        await api.create(kind, {"metadata": {"name": name, "namespace": namespace}, "spec": spec}, manager="test")
        resource = make_resource(name)
        await resource.create(replicas=1, parallelism={"tensor": 2}, engine=gpus)

        def is_named(status: dict[str, Any], reason: str = reason, words: list[str] = words) -> bool:
            degraded = condition(status, "Degraded")
            return degraded.get("reason") == reason and all(word in degraded["message"] for word in words)

        degraded = condition(await resource.until(is_named), "Degraded")
        print(f"\n{name}: {degraded['reason']}: {degraded['message']}")
        await resource.delete()
        await api.request("DELETE", kind.path(namespace, name))
