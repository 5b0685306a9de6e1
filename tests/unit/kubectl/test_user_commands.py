"""The commands of people, against an API server that answers from a table: real requests of the real client."""

from __future__ import annotations

import dataclasses
import http.server
import json
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import fake_kubectl
import pytest
import yaml
from click.testing import CliRunner
from in_memory_cluster import MINIMAL, Cluster

from megatron_kubectl import cli as kubectl
from megatron_operator import cli
from megatron_operator.cluster.projection import project_resource
from megatron_operator.resource.names import API_VERSION, KIND
from megatron_operator.resource.text import parse

RESOURCES = "/apis/inference.megatron.dev/v1beta1/namespaces/default/megatroninferences"


LEASES = "/apis/coordination.k8s.io/v1/leases"


def _lease(*, age: float = 0.0) -> dict[str, Any]:
    renewed = (datetime.now(UTC) - timedelta(seconds=age)).isoformat().replace("+00:00", "Z")
    return {
        "metadata": {"name": "op", "namespace": "system", "annotations": {"inference.megatron.dev/term": "1"}},
        "spec": {"holderIdentity": "op-0", "renewTime": renewed, "leaseDurationSeconds": 600},
    }


@pytest.fixture
def answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Bodies by path; what is not there is 404."""
    table: dict[str, Any] = {LEASES: {"apiVersion": "coordination.k8s.io/v1", "kind": "LeaseList", "items": [_lease()]}}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = table.get(self.path.partition("?")[0])
            content = json.dumps(body or {"kind": "Status", "reason": "NotFound"}).encode()
            self.send_response(200 if body else 404)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def do_PATCH(self) -> None:
            """Merge the metadata of a patch."""
            patch = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert list(patch) == ["metadata"]
            table[self.path.partition("?")[0]]["metadata"] |= patch["metadata"]
            self.do_GET()

        def log_message(self, format: str, *args: Any) -> None:
            """Quiet."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}],
        "users": [{"name": "u", "user": {}}],
    }
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(config))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    # The client of megatron-operator reads the variable when it is imported.
    monkeypatch.setattr("kubernetes.aio.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "kubeconfig"))
    monkeypatch.setenv("PATH", fake_kubectl.install(tmp_path))
    yield table
    server.shutdown()
    server.server_close()


def resource(cluster: Cluster) -> dict[str, Any]:
    metadata = {"name": "demo", "namespace": "default", "generation": cluster.generation, "uid": "u"}
    body = {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata}
    return {**body, "spec": cluster.spec, "status": cluster.status}


@pytest.mark.parametrize("program", [cli.main, kubectl.main], ids=["megatron-operator", "kubectl-megatron"])
def test_explain_asks_for_the_resource_and_its_pods(answers: dict[str, Any], program: Any) -> None:
    cluster = Cluster({**MINIMAL, "replicas": 2})
    cluster.broken_engines.add("demo-engine-1")
    cluster.play(6)
    answers[f"{RESOURCES}/demo"] = resource(cluster)
    pods = [{**pod, "spec": {"nodeName": "node-a", "containers": []}} for pod in cluster.pods.values()]
    for pod in pods:
        for condition in pod["status"].get("containerStatuses", []):
            condition |= {"name": "engine", "image": "i", "imageID": "i", "ready": False}
            condition["lastState"]["terminated"]["finishedAt"] = "2026-01-01T00:00:00Z"
    answers["/api/v1/namespaces/default/pods"] = {"apiVersion": "v1", "kind": "PodList", "items": pods}
    result = CliRunner().invoke(program, ["explain", "demo"])
    assert result.exit_code == 0, result.output
    assert "pod demo-engine-1-0, Running, on node node-a: CrashLooping: " in result.output


@pytest.mark.parametrize("command", ["status", "explain"])
def test_a_resource_that_no_operator_serves_names_it(answers: dict[str, Any], command: str) -> None:
    cluster = Cluster({**MINIMAL}).settled()
    answers[f"{RESOURCES}/demo"] = resource(cluster)
    answers["/api/v1/namespaces/default/pods"] = {"apiVersion": "v1", "kind": "PodList", "items": []}
    assert "waits for nothing" in CliRunner().invoke(kubectl.main, [command, "demo"]).output
    answers[LEASES]["items"] = [_lease(age=3600)]
    result = CliRunner().invoke(kubectl.main, [command, "demo"])
    assert result.exit_code == 0, result.output
    assert "no operator runs for namespace default since " in result.output
    assert "Lease system/op is not held, op-0 does not renew it" in result.output
    assert "waits for nothing" not in result.output


def test_a_restart_command_changes_only_what_begins_new_restart_budgets(answers: dict[str, Any]) -> None:
    cluster = Cluster({**MINIMAL})
    answers[f"{RESOURCES}/demo"] = resource(cluster)
    result = CliRunner().invoke(kubectl.main, ["restart", "demo"])
    assert result.exit_code == 0, result.output
    seen = project_resource(answers[f"{RESOURCES}/demo"])
    assert parse(seen.restarted_at) is not None
    assert (seen.spec, seen.generation) == (cluster.spec, cluster.generation)


def test_an_update_command_requests_the_release_that_the_status_offers(answers: dict[str, Any]) -> None:
    cluster = Cluster({**MINIMAL}).settled()
    answers[f"{RESOURCES}/demo"] = resource(cluster)
    result = CliRunner().invoke(kubectl.main, ["update", "demo"])
    assert (result.exit_code, result.output) == (0, "demo: is up to date\n")
    assert project_resource(answers[f"{RESOURCES}/demo"]).update_to == ""
    cluster.settings = dataclasses.replace(cluster.settings, runtime_image="runtime:2")
    cluster.settle()
    answers[f"{RESOURCES}/demo"] = resource(cluster)
    result = CliRunner().invoke(kubectl.main, ["update", "demo"])
    assert (result.exit_code, result.output) == (0, "demo: update requested\n")
    assert project_resource(answers[f"{RESOURCES}/demo"]).update_to == cluster.status["update"]["id"]


HOSTILE = "\x1b[2Jgone\nforged: line\u202e"


@pytest.mark.parametrize("command", ["status", "explain"])
def test_text_of_a_cluster_is_escaped_on_its_way_to_the_terminal(answers: dict[str, Any], command: str) -> None:
    cluster = Cluster({**MINIMAL})
    cluster.broken_engines.add("demo-engine-0")
    cluster.settle()
    status = {**cluster.status, "plan": {"step": HOSTILE, "waitingOn": HOSTILE, "since": "x"}}
    answers[f"{RESOURCES}/demo"] = {**resource(cluster), "status": status}
    pods = [{**pod, "spec": {"nodeName": HOSTILE, "containers": []}} for pod in cluster.pods.values()]
    for pod in pods:
        pod["status"]["containerStatuses"] = []
        pod["status"]["conditions"][0]["status"] = "False"
    answers["/api/v1/namespaces/default/pods"] = {"apiVersion": "v1", "kind": "PodList", "items": pods}
    result = CliRunner().invoke(kubectl.main, [command, "demo"])
    assert result.exit_code == 0, result.output
    assert "\\x1b[2Jgone\\nforged: line\\u202e" in result.output
    assert result.output.replace("\n", "").isprintable()


def test_error_texts_of_an_api_server_are_escaped(answers: dict[str, Any]) -> None:
    result = CliRunner().invoke(kubectl.main, ["status", HOSTILE])
    assert result.exit_code == 1
    assert result.output.rstrip("\n").isprintable()


def test_a_resource_that_is_not_there_is_named(answers: dict[str, Any]) -> None:
    result = CliRunner().invoke(kubectl.main, ["status", "demo"])
    assert result.exit_code == 1
    assert "default/demo: no such resource" in result.output


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], "team/demo: no such resource"),
        (["-n", "other"], "other/demo: no such resource"),
        (["--context", "there"], "default/demo: no such resource"),
        (["--context", "nope"], "nope in "),
    ],
)
def test_the_operators_explain_reads_the_namespace_of_the_context(
    answers: dict[str, Any], tmp_path: Path, options: list[str], expected: str
) -> None:
    file = tmp_path / "kubeconfig"
    config = yaml.safe_load(file.read_text())
    config["contexts"].append({"name": "there", "context": {"cluster": "c", "user": "u"}})
    config["contexts"][0]["context"]["namespace"] = "team"
    file.write_text(yaml.safe_dump(config))
    result = CliRunner().invoke(cli.main, ["explain", "demo", *options])
    assert result.exit_code == 1
    assert expected in result.output


def test_a_plan_against_the_cluster(answers: dict[str, Any], tmp_path: Path) -> None:
    cluster = Cluster({**MINIMAL, "replicas": 1})
    changed = {**resource(cluster), "spec": {**MINIMAL, "replicas": 2}}
    (tmp_path / "new.yaml").write_text(yaml.safe_dump(changed))
    command = ["plan", "-f", str(tmp_path / "new.yaml"), "--against", "cluster"]
    fresh = CliRunner().invoke(cli.main, command)
    assert "create  StatefulSet demo-engine-0" in fresh.output
    answers[f"{RESOURCES}/demo"] = resource(cluster)
    result = CliRunner().invoke(cli.main, command)
    assert "create  StatefulSet demo-engine-1" in result.output
    assert "demo-engine-0" not in result.output
