"""Alerts, dashboard and autoscaling samples name only metrics that some process of the product shows."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

from megatron_operator.controller.metrics import Metrics, Reading, VerbClock
from megatron_operator.decision.coordinator_snapshot import CoordinatorSnapshot, EngineReport
from megatron_operator.resource.states import EngineState
from tools.monitoring import dashboard, expressions

ROOT = Path(__file__).parents[3]
RUNTIME = ROOT / "runtime" / "megatron_runtime"
SOURCES = [path for folder in ("coordinator", "engine", "server") for path in (RUNTIME / folder).rglob("*.py")]
NAME = re.compile(r"\bmegatron_[a-z_]+")
NATIVE_ONLY = {"megatron_engine_steps", "megatron_iteration_tokens", "megatron_seconds_since_last_step"}
"""Metrics that vLLM engines do not have."""
SUFFIX = re.compile(r"_(total|bucket|sum|count)$")


def metrics_with_a_resource() -> Metrics:
    metrics = Metrics()
    status = {
        "state": "Running",
        "conditions": [{"type": "Ready", "status": "True", "reason": "Serving"}],
        "engines": [{"name": "demo-engine-0"}],
    }
    engine = EngineReport("demo-engine-0", EngineState.RUNNING, in_flight=3)
    snapshot = CoordinatorSnapshot(reachable=True, engines=(engine,), queue_length=2)
    metrics.show(lambda: [Reading("default", "demo", status, snapshot)])
    return metrics


def shown(registry: CollectorRegistry) -> set[str]:
    return {family.name for family in registry.collect()}


def is_shown(name: str, by_operator: set[str]) -> bool:
    """By the operator, or written in the source of another process, with or without its prefix."""
    bare = SUFFIX.sub("", name)
    if bare in by_operator or name in by_operator:
        return True
    for prefix in ("megatron_coordinator_", "megatron_", ""):
        word = f'"{bare.removeprefix(prefix)}"'
        if bare.startswith(prefix) and any(word in source.read_text() for source in SOURCES):
            return True
    return False


def test_every_metric_that_is_asked_for_exists() -> None:
    by_operator = shown(metrics_with_a_resource().registry)
    samples = [path.read_text() for path in sorted((ROOT / "manifests" / "autoscaling").glob("*.yaml"))]
    asked = {name for text in (*expressions(), *samples) for name in NAME.findall(text)}
    assert len(asked) > 10
    assert [name for name in sorted(asked) if not is_shown(name, by_operator)] == []


def test_alerts_and_panels_work_with_both_backends() -> None:
    asked = {SUFFIX.sub("", name) for text in expressions() for name in NAME.findall(text)}
    assert asked & NATIVE_ONLY == set()


def test_the_check_notices_a_missing_metric() -> None:
    assert not is_shown("megatron_coordinator_no_such_thing_total", shown(Metrics().registry))


def test_resources_are_shown_with_state_conditions_queue_and_engines() -> None:
    registry = metrics_with_a_resource().registry
    where = {"namespace": "default", "name": "demo"}
    assert registry.get_sample_value("megatron_operator_resource_state", {**where, "state": "Running"}) == 1
    assert registry.get_sample_value("megatron_operator_queued_requests", where) == 2
    one = {**where, "engine": "demo-engine-0"}
    assert registry.get_sample_value("megatron_operator_in_flight_requests", one) == 3
    ready = {**where, "type": "Ready", "status": "True", "reason": "Serving"}
    assert registry.get_sample_value("megatron_operator_condition", ready) == 1


def test_a_verb_is_timed_from_its_intent_to_each_phase_once() -> None:
    metrics, now = Metrics(), [0.0]
    clock = VerbClock(metrics, lambda: now[0])
    for at, phase in ((0.0, "Pending"), (1.0, "Submitted"), (1.5, "Submitted"), (4.0, "Confirmed"), (9.0, "Confirmed")):
        now[0] = at
        clock.look({"operationId": "op-1", "signal": "PAUSE", "phase": phase})
    for phase, seconds in (("Submitted", 1.0), ("Confirmed", 4.0)):
        labels = {"verb": "PAUSE", "phase": phase}
        assert metrics.registry.get_sample_value("megatron_operator_verb_seconds_sum", labels) == seconds
        assert metrics.registry.get_sample_value("megatron_operator_verb_seconds_count", labels) == 1


def test_the_dashboard_is_valid_and_its_panels_do_not_overlap() -> None:
    found = json.loads(json.dumps(dashboard()))
    places = [tuple(panel["gridPos"].values()) for panel in found["panels"]]
    assert len(set(places)) == len(places)
    assert all(panel["targets"] for panel in found["panels"])


@pytest.mark.parametrize(
    "path", sorted((ROOT / "manifests" / "autoscaling").glob("*.yaml")), ids=lambda path: path.stem
)
def test_autoscalers_scale_the_resource(path: Path) -> None:
    body: dict[str, Any] = yaml.safe_load(path.read_text())
    target = body["spec"]["scaleTargetRef"]
    assert (target["apiVersion"], target["kind"]) == ("inference.megatron.dev/v1beta1", "MegatronInference")
