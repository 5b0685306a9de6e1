"""The chart's monitors and alerts in Prometheus. It needs helm, no control plane."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from machine import scaled
from prometheus import prometheus
from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server
from run_record import used

from localcluster import installation, programs
from localcluster.progress import Steps
from megatron_operator.controller.metrics import Metrics, Reading
from megatron_operator.decision.coordinator_snapshot import CoordinatorSnapshot
from megatron_runtime.cli.processes import free_ports
from tools.monitoring import ALERTS

OF_A_RESOURCE = {
    "MegatronChildContested",
    "MegatronManagedElsewhere",
    "MegatronResourceDegraded",
    "MegatronResourceFailed",
    "MegatronKeyRotationStuck",
    "MegatronStateUnknown",
    "MegatronNoEngineServes",
    "MegatronEnginesLost",
    "MegatronQueueGrows",
}
"""Alerts whose summary begins with the resource."""


def status(state: str, kind: str, reason: str) -> dict[str, Any]:
    return {"state": state, "conditions": [{"type": kind, "status": "True", "reason": reason}]}


class Process:
    """The metrics of a process with every fault. The counters grow, as in a real process."""

    def __init__(self) -> None:
        self.operator = Metrics()
        self.operator.isolated.set(1)
        unreachable = CoordinatorSnapshot(reachable=False)
        self.operator.show(
            lambda: [
                Reading("team-a", "demo", status("Failed", "Degraded", "CrashLooping"), unreachable, contested=1),
                Reading("team-a", "keys", status("Unknown", "Progressing", "RotatingKeys"), unreachable, manager="x/y"),
            ],
            denied=lambda: {("pods", "team-a"): "denied", ("secrets", ""): "denied"},
        )
        self.coordinator = CollectorRegistry()
        self.lost = Counter("megatron_coordinator_engines_lost", "", registry=self.coordinator)
        self.queued = Gauge("megatron_coordinator_queued_requests", "", registry=self.coordinator)
        self.queued.set(200)
        Gauge("megatron_coordinator_engine_serving", "", ["engine"], registry=self.coordinator).labels("e").set(0)

    def grow(self) -> None:
        self.lost.inc(5)
        self.queued.inc(10)
        self.operator.passes.labels(outcome="error").inc(10)
        self.operator.verb_seconds.labels(verb="PAUSE", phase="Confirmed").observe(100)


@contextmanager
def served(registry: CollectorRegistry) -> Iterator[str]:
    """Serve metrics; yield the address."""
    server, thread = start_http_server(0, addr="127.0.0.1", registry=registry)
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def scrape_config(monitor: dict[str, Any], address: str, **target: str) -> dict[str, Any]:
    """Return what the Prometheus operator makes of a monitor for one pod, with the labels that it gives the target."""
    spec = monitor["spec"]
    (endpoint,) = spec.get("endpoints") or spec["podMetricsEndpoints"]
    labels = {name: target[name] for name in ("namespace", "pod")}
    for name in spec.get("podTargetLabels", ()):
        if name in target:
            labels[name.replace(".", "_").replace("/", "_")] = target[name]
    return {
        "job_name": f"{monitor['kind']}/{monitor['metadata']['name']}",
        "honor_labels": endpoint.get("honorLabels", False),
        "static_configs": [{"targets": [address], "labels": labels}],
    }


@pytest.fixture(scope="module")
def objects() -> dict[str, dict[str, Any]]:
    """The monitoring objects of the chart, by kind."""
    program = programs.ensure(["helm"], Steps()) / "helm"
    values = [part for name in ("scrape", "alerts", "dashboard") for part in ("--set", f"monitoring.{name}=true")]
    command = [program, "template", "megatron", installation.CHART, "-n", "home", "--kube-version", "1.34.0", *values]
    documents = yaml.safe_load_all(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return {each["kind"]: each for each in documents if each}


def ask(port: int, path: str) -> Any:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/{path}", timeout=scaled(10)) as answer:
            return json.loads(answer.read())["data"]
    except OSError:  # it has just begun
        return {}


def test_alerts_name_the_resource_and_its_namespace(objects: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    process = Process()
    rules = tmp_path / "rules.yaml"
    rules.write_text(yaml.safe_dump(objects["PrometheusRule"]["spec"]))
    (port,) = free_ports(1)
    with served(process.operator.registry) as operator, served(process.coordinator) as coordinator:
        pod = {
            "namespace": "team-b",
            "pod": "chat-coordinator-0",
            "app.kubernetes.io/instance": "chat",
            "app.kubernetes.io/component": "coordinator",
        }
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(rules)],
            "scrape_configs": [
                scrape_config(objects["ServiceMonitor"], operator, namespace="home", pod="megatron-operator-0"),
                scrape_config(objects["PodMonitor"], coordinator, **pod),
            ],
        }
        (tmp_path / "prometheus.yaml").write_text(yaml.safe_dump(config))
        program = prometheus()
        version = subprocess.run([program, "--version"], check=True, capture_output=True, text=True)
        used("Prometheus", (version.stdout + version.stderr).split()[2])
        arguments = (
            f"--config.file={tmp_path / 'prometheus.yaml'}",
            f"--storage.tsdb.path={tmp_path / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
            "--log.level=error",
        )
        running = subprocess.Popen([program, *arguments])
        try:
            deadline = time.monotonic() + scaled(60)
            found: list[dict[str, Any]] = []
            while {each["labels"]["alertname"] for each in found} < {alert["alert"] for alert in ALERTS}:
                assert time.monotonic() < deadline, [each["labels"]["alertname"] for each in found]
                process.grow()
                time.sleep(0.5)
                found = ask(port, "alerts").get("alerts", [])
        finally:
            running.terminate()
            running.wait()
    summaries = {(each["labels"]["alertname"], each["annotations"]["summary"]) for each in found}
    resources = {(name, summary.partition(": ")[0]) for name, summary in summaries if name in OF_A_RESOURCE}
    chat = {"MegatronNoEngineServes", "MegatronEnginesLost", "MegatronQueueGrows"}
    keys = {"MegatronManagedElsewhere", "MegatronKeyRotationStuck", "MegatronStateUnknown"}
    assert resources == {
        (name, "team-b/chat" if name in chat else "team-a/keys" if name in keys else "team-a/demo")
        for name in OF_A_RESOURCE
    }
    assert ("MegatronResourceDegraded", "team-a/demo: CrashLooping.") in summaries
    denied = {summary.partition(". ")[0] for name, summary in summaries if name == "MegatronWatchDenied"}
    assert denied == {
        "The operator cannot watch pods in namespace team-a",
        "The operator cannot watch secrets in namespace *",
    }
    named = {each["labels"]["namespace"] for each in found if each["labels"]["alertname"] in OF_A_RESOURCE}
    assert named == {"team-a", "team-b"}


def test_variables_of_the_dashboard_choose_namespace_and_resource(objects: dict[str, dict[str, Any]]) -> None:
    dashboard = json.loads(objects["ConfigMap"]["data"]["megatron-inference.json"])
    variables = {each["name"]: each for each in dashboard["templating"]["list"]}
    assert list(variables) == ["datasource", "namespace", "resource"]
    assert "$namespace" in variables["resource"]["query"]["query"]
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            text = target["expr"]
            is_global = "megatron_operator_" in text and "resource_state" not in text
            assert ("$namespace" in text, "$resource" in text) == ((not is_global,) * 2), text
