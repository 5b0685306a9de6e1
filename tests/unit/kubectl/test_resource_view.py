"""What lists show of a resource, and when a rollout is done or cannot end."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from in_memory_cluster import MINIMAL, Cluster

from megatron_kubectl.resource_view import age, rollout, table


def resource(cluster: Cluster) -> dict[str, Any]:
    metadata = {"name": "demo", "namespace": "default", "generation": cluster.generation}
    return {"metadata": metadata, "spec": cluster.spec, "status": cluster.status}


def test_a_rollout_is_done_when_every_engine_has_the_revision_and_serves() -> None:
    cluster = Cluster({**MINIMAL, "replicas": 2})
    assert rollout(resource(cluster))["text"] == "the operator has not processed the latest change of the spec yet"
    cluster.settle()
    found = rollout(resource(cluster))
    assert (found["done"], found["text"]) == (True, "2 of 2 engines updated, 2/2 ready")
    cluster.patch(model={**MINIMAL["model"], "dtype": "Float32"})
    seen = []
    for _ in range(40):
        found = rollout(resource(cluster))
        seen.append(found["text"])
        if found["done"]:
            break
        cluster.step()
        cluster.tick()
    assert found["done"], seen
    assert any(text.startswith(("0 of 2 engines updated", "1 of 2")) for text in seen)


def test_a_rollout_that_is_paused_fails_with_the_remedy() -> None:
    cluster = Cluster({**MINIMAL, "replicas": 2}).settled()
    cluster.change(model={**MINIMAL["model"], "dtype": "Float32"}, rollout={"paused": True})
    found = rollout(resource(cluster))
    assert not found["done"]
    assert found["failed"] == "spec.rollout.paused holds the rollout; set it to false"


def test_a_stopped_resource_has_no_rollout_to_wait_for() -> None:
    cluster = Cluster({**MINIMAL, "desiredState": "Stopped"}).settled()
    found = rollout(resource(cluster))
    assert (found["done"], found["text"]) == (True, "Stopped, as requested")


def test_a_degraded_resource_fails_only_if_nothing_makes_progress() -> None:
    cluster = Cluster(MINIMAL).settled()
    found = resource(cluster)
    entries = {entry["type"]: entry for entry in found["status"]["conditions"]}
    entries["Degraded"] |= {"status": "True", "reason": "CanaryFailed", "message": "engine 0 is wrong"}
    assert rollout(found)["failed"] == "CanaryFailed: engine 0 is wrong"
    entries["Progressing"] |= {"status": "True"}
    assert (rollout(found)["failed"], rollout(found)["done"]) == ("", False)


@pytest.mark.parametrize(
    ("seconds", "shown"), [(5, "5s"), (119, "119s"), (120, "2m"), (3 * 3600, "3h"), (10 * 86400, "10d")]
)
def test_an_age_is_shown_in_its_largest_unit(seconds: int, shown: str) -> None:
    now = datetime(2026, 1, 20, tzinfo=UTC)
    created = (now - timedelta(seconds=seconds)).isoformat().replace("+00:00", "Z")
    assert age({"metadata": {"creationTimestamp": created}}, now) == shown


def test_a_table_aligns_its_columns() -> None:
    assert table(["A", "LONG"], [["wide", ""], ["x", "1"]]) == ["A      LONG", "wide   -", "x      1"]
