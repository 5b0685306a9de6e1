"""The status of the largest resource is smaller than an object of etcd may be."""

from __future__ import annotations

import copy
import json
from typing import Any

from in_memory_cluster import MINIMAL, Cluster

ENGINES = 1024
MAX_BYTES = 1_000_000
"""etcd accepts 1.5 MiB, with the spec and its managed fields."""
TEXT = '"\\' * 1000


def _fields(value: Any) -> dict[str, Any]:
    """Return the managed fields of a status that is applied."""
    found: dict[str, Any] = {}
    if isinstance(value, dict):
        return {f"f:{key}": _fields(each) for key, each in value.items()}
    for entry in value if isinstance(value, list) else ():
        key = next((key for key in ("name", "type", "component") if isinstance(entry, dict) and key in entry), None)
        if key is not None:
            found[f"k:{json.dumps({key: entry[key]})}"] = {".": {}, **_fields(entry)}
    return found


def test_the_status_of_1024_failed_engines_is_bounded() -> None:
    spec = {**copy.deepcopy(MINIMAL), "replicas": ENGINES}
    cluster = Cluster(spec, name="a" * 40)
    cluster.step()
    failed = {
        "state": "Failed",
        "revision": "0123456789",
        "restarts": 6,
        "epoch": 1,
        "ranks": 8,
        "forgivenAt": "2026-01-01T00:10:00.000Z",
        "incidents": 6,
        "retries": 1,
        "diagnosis": TEXT,
        "canaryMessage": TEXT,
        "canary": "Failed",
    }
    cluster.status["engines"] = [{**entry, **failed} for entry in cluster.status["engines"]]
    cluster.step()
    stored = json.dumps([cluster.status, _fields(cluster.status)], separators=(",", ":"))
    assert len(cluster.status["engines"]) == ENGINES
    assert all(entry["diagnosis"] for entry in cluster.status["engines"])
    assert len(stored) < MAX_BYTES
    assert f"{ENGINES - 1} more engines have failed" in cluster.condition("Degraded")["message"]
    before = [entry["diagnosis"] for entry in cluster.status["engines"]]
    cluster.step()
    assert [entry["diagnosis"] for entry in cluster.status["engines"]] == before, "texts are cut once"
