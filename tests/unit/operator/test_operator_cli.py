"""The command line, run as a user runs it."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from docs.operator_pages import resource_page, troubleshooting_page
from megatron_operator.cli import main
from megatron_operator.explain import causes, explanation
from megatron_operator.install import HOME_RULES, install_manifests
from megatron_operator.operator_leases import operator_leases, operator_problem
from megatron_operator.render.keys import ADMIN_SECRET
from megatron_operator.resource.conditions import Reason
from megatron_operator.resource.remedies import REMEDIES, Symptom
from tools.generate import generated_files

ROOT = Path(__file__).parents[3]
DEMO = ROOT / "manifests/samples/cpu-demo.yaml"


def _run(*args: str) -> Any:
    return CliRunner().invoke(main, list(args))


def test_crd_prints_the_definition() -> None:
    result = _run("crd")
    assert result.exit_code == 0
    assert yaml.safe_load(result.output)["metadata"]["name"] == "megatroninferences.inference.megatron.dev"


def _rules(node: Any) -> Iterator[str]:
    """Yield the message of every rule in a part of the CRD, wherever it is."""
    if isinstance(node, dict):
        yield from (rule["message"] for rule in node.get("x-kubernetes-validations", ()))
    for part in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from _rules(part)


def test_the_page_of_the_resource_has_every_rule_of_the_crd() -> None:
    rules = list(_rules(yaml.safe_load(_run("crd").output)))
    page = " ".join(html.unescape(resource_page()).replace("\\|", "|").split())
    assert len(rules) > 30
    assert [rule for rule in rules if f"- {' '.join(rule.split())}" not in page] == []


def test_render_prints_the_children() -> None:
    result = _run("render", "-f", str(DEMO), "--runtime-image", "r:1")
    kinds = [document["kind"] for document in yaml.safe_load_all(result.output)]
    assert kinds.count("StatefulSet") == 1
    assert "Secret" not in kinds


def test_a_bad_file_is_rejected_with_every_field(tmp_path: Path) -> None:
    bad = yaml.safe_load(DEMO.read_text())
    bad["spec"]["replicas"] = -1
    bad["spec"]["model"]["source"] = {}
    path = tmp_path / "bad.yaml"
    path.write_text(yaml.safe_dump(bad))
    result = _run("render", "-f", str(path))
    assert result.exit_code == 1
    assert "spec.replicas: Input should be greater than or equal to 0 (is -1)" in result.output
    assert "spec.model.source: no source is set" in result.output


def test_plan_lists_what_restarts_and_why(tmp_path: Path) -> None:
    changed = tmp_path / "new.yaml"
    changed.write_text(DEMO.read_text().replace("maxRequests: 16", "maxRequests: 8"))
    result = _run("plan", "-f", str(changed), "--against", str(DEMO))
    assert result.exit_code == 0
    assert "--max-requests: '16' -> '8'  [restarts its pods]" in result.output
    assert "engines that restart: demo-engine-0" in result.output
    assert _run("plan", "-f", str(DEMO), "--against", str(DEMO)).output == "nothing changes\n"


def test_plan_rejects_two_different_resources(tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    other.write_text(DEMO.read_text().replace("name: demo", "name: other"))
    assert _run("plan", "-f", str(other), "--against", str(DEMO)).exit_code == 1


def test_explain_shows_the_chain_of_causes(make_cluster: Any) -> None:
    cluster = make_cluster(replicas=1)
    cluster.broken_engines.add("demo-engine-0")
    cluster.settle()
    metadata = {"name": "demo", "namespace": "default", "generation": 1}
    text = "\n".join(explanation({"metadata": metadata, "spec": cluster.spec, "status": cluster.status}))
    assert "default/demo: Pending, desired Running, 0/1 engines ready, backend Native" in text
    assert "waits for: engine demo-engine-0: pod demo-engine-0-0 (node rank 0 of demo-engine-0): " in text
    assert "its container ended with exit code 3" in text
    assert "error: CrashLooping" in text
    assert REMEDIES[Reason.CRASH_LOOPING].action in text
    spec = {**cluster.spec, "engine": {"backend": "VLLM"}}
    assert explanation({"metadata": metadata, "spec": spec, "status": cluster.status})[0].endswith("backend VLLM")


def test_every_reason_has_a_remedy_and_an_entry_of_the_troubleshooting_guide() -> None:
    assert set(REMEDIES) == set(Reason)
    assert {remedy.symptom for remedy in REMEDIES.values()} == set(Symptom)
    page = troubleshooting_page()
    assert re.findall(r"^(?:### |\| `)(\w+)\b", page, re.MULTILINE) == [reason.value for reason in REMEDIES]


def test_the_chain_goes_down_to_the_pod_the_scheduler_and_the_rank(make_cluster: Any) -> None:
    cluster = make_cluster(replicas=3)
    cluster.broken_engines.add("demo-engine-1")
    cluster.play(6)
    pod = cluster.pods["demo-engine-2-0"]
    scheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes: cpu"}
    pod["status"] = {"phase": "Pending", "conditions": [scheduled]}
    pod["spec"] = {"nodeName": None}
    cluster.pods["demo-engine-1-0"]["spec"] = {"nodeName": "node-a"}
    metadata = {"name": "demo", "namespace": "default", "generation": cluster.generation}
    resource = {"metadata": metadata, "spec": cluster.spec, "status": cluster.status}
    lines = causes(resource, list(cluster.pods.values()))
    below = lines[lines.index("  demo-engine-1 is Pending, 0 ranks registered") :]
    assert below[1].startswith("    pod demo-engine-1-0, Running, on node node-a: CrashLooping: ")
    assert "exit code 3" in below[1]
    assert below[2].startswith("  demo-engine-2 is ")
    assert below[3].startswith("    pod demo-engine-2-0, Pending, on no node: Unschedulable: ")
    assert "0/1 nodes: cpu" in below[3]
    assert not [line for line in lines if "demo-engine-0" in line]


def test_explain_names_the_check_that_a_rollout_waits_for(make_cluster: Any) -> None:
    cluster = make_cluster(replicas=1)
    cluster.check = lambda arguments: (1, '{"message": "model builtin:x does not exist"}')
    cluster.settle()
    cluster.change(model={"source": {"builtin": "x"}})
    metadata = {"name": "demo", "namespace": "default", "generation": cluster.generation}
    resource = {"metadata": metadata, "spec": cluster.spec, "status": cluster.status}
    revision = cluster.status["revision"]
    text = "\n".join(causes(resource, list(cluster.pods.values())))
    assert "because: replacing the model" in text
    assert f"waits for: a change of the spec; the check of revision {revision} failed, and no engine is" in text
    assert "error: WeightsMissing" in text
    assert f"    pod demo-check-{revision}, Failed, on no node: WeightsMissing: " in text
    cluster.check = lambda arguments: None
    cluster.change(model={"source": {"builtin": "gemma3-270m"}})
    resource = {"metadata": metadata, "spec": cluster.spec, "status": cluster.status}
    text = "\n".join(causes(resource, list(cluster.pods.values())))
    assert f"waits for: pod demo-check-{cluster.status['revision']} to check revision" in text


def test_engines_in_the_same_state_share_one_entry(make_cluster: Any) -> None:
    cluster = make_cluster(replicas=12)
    cluster.broken_engines |= {f"demo-engine-{index}" for index in (*range(8), 9, 10)}
    cluster.play(6)
    cluster.status["engines"][11] |= {"state": "Pending"}
    for number, pod in enumerate(cluster.pods.values()):
        pod["spec"]["nodeName"] = f"node-{number}"
    metadata = {"name": "demo", "namespace": "default", "generation": cluster.generation}
    resource = {"metadata": metadata, "spec": cluster.spec, "status": cluster.status}
    lines = causes(resource, [pod for name, pod in cluster.pods.items() if name != "demo-engine-11-0"])
    at = lines.index("  engines 0-7, 9-10 are Pending, 0 ranks registered, for example")
    assert lines[at + 1].startswith("    pod demo-engine-0-0, Running, on node ")
    assert "node rank 0 of demo-engine-0" in lines[at + 1]
    assert lines[at + 2 :] == ["  demo-engine-11: Pending, without pods"]
    rows = explanation(resource)
    rows = rows[rows.index("engines:") + 1 :]
    assert [row.strip().split("  ")[0] for row in rows[:3]] == ["engines 0-7, 9-10", "demo-engine-8", "demo-engine-11"]


NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)


def lease(name: str, *, holder: str = "operator-a", age: float = 2.0, namespaces: str = "") -> dict[str, Any]:
    annotations = {"inference.megatron.dev/term": "3"}
    if namespaces:
        annotations["inference.megatron.dev/namespaces"] = namespaces
    renewed = (NOW - timedelta(seconds=age)).isoformat().replace("+00:00", "Z")
    spec = {"holderIdentity": holder, "renewTime": renewed, "leaseDurationSeconds": 10}
    return {"metadata": {"namespace": "system", "name": name, "annotations": annotations}, "spec": spec}


FOREIGN = {"metadata": {"namespace": "kube-system", "name": "scheduler"}, "spec": {"holderIdentity": "other"}}


@pytest.mark.parametrize(
    ("items", "words"),
    [
        ([lease("a")], None),
        ([lease("a", age=19)], None),
        ([lease("a", holder="operator-b", namespaces="default,prod"), lease("b", namespaces="other")], None),
        ([lease("a", age=3600), lease("b")], None),
        ([], "no operator runs for namespace default: there is no Lease of one"),
        ([lease("a", namespaces="other")], "there is no Lease of one"),
        ([lease("a", age=3600)], "since 2026-01-01T11:00:00Z: Lease system/a is not held, operator-a does not renew"),
        (
            [lease("a", age=60, holder="")],
            "since 2026-01-01T11:59:00Z: Lease system/a is not held, its holder released",
        ),
        (
            [lease("a", age=60), lease("b", age=30), lease("c", namespaces="x")],
            "since 2026-01-01T11:59:30Z: Lease system/b",
        ),
        (
            [lease("a"), lease("b", holder="operator-b", namespaces="default")],
            "2 operators serve namespace default, stop all but one: Lease system/a is held by operator-a; "
            "Lease system/b is held by operator-b",
        ),
    ],
)
def test_the_leases_tell_which_operator_serves_a_namespace(items: list[dict[str, Any]], words: str | None) -> None:
    found = operator_problem(operator_leases([FOREIGN, *items]), "default", NOW)
    assert (found is None) == (words is None)
    assert words is None or (found is not None and words in found)


def test_without_an_operator_the_resource_does_not_wait_for_nothing(make_cluster: Any) -> None:
    cluster = make_cluster().settled()
    metadata = {"name": "demo", "namespace": "default", "generation": cluster.generation}
    resource = {"metadata": metadata, "spec": cluster.spec, "status": cluster.status}
    problem = operator_problem([], "default", NOW)
    for said in (explanation(resource, problem), causes(resource, [], problem)):
        assert f"  {problem}" in said
        assert not [line for line in said if "waits for nothing" in line]
    assert "  waits for nothing" in explanation(resource)
    assert "unknown whether an operator runs" in (operator_problem(None, "default", NOW) or "")


def test_a_resource_without_a_status_was_not_processed() -> None:
    problem = operator_problem([], "default", NOW)
    lines = explanation({"metadata": {"name": "x"}, "spec": {}}, problem)
    assert lines == ["default/x: desired Running; no status yet: no operator has processed it", f"  {problem}"]


def test_generated_files_are_current() -> None:
    old = [name for name, content in generated_files().items() if (ROOT / name).read_text() != content]
    assert not old, "run `make generate`"


def test_the_operator_has_no_permission_to_list_secrets_or_change_foreign_objects() -> None:
    rules = [
        rule
        for manifest in install_manifests(namespace="n", image="i", runtime_image="r", vllm_runtime_image="v")
        if not any("aggregate-to" in label for label in manifest["metadata"].get("labels", ()))  # roles of users
        for rule in manifest.get("rules", [])
    ]
    assert rules
    for rule in rules:
        assert "*" not in [*rule["apiGroups"], *rule["resources"], *rule["verbs"]]
        if "secrets" in rule["resources"]:
            assert set(rule["verbs"]) <= {"get", "create", "patch"}
        if "megatroninferences" in rule["resources"]:
            assert set(rule["verbs"]) == {"get", "list", "watch"}


def test_in_its_own_namespace_the_operator_reads_one_secret() -> None:
    reading = [rule for rule in HOME_RULES if "secrets" in rule["resources"] and rule["verbs"] != ["create"]]
    assert reading == [
        {"apiGroups": [""], "resources": ["secrets"], "verbs": ["get"], "resourceNames": [ADMIN_SECRET]},
    ]


@pytest.mark.parametrize("command", ["render", "plan"])
def test_commands_apply_the_pod_policy_and_take_its_switches(tmp_path: Path, command: str) -> None:
    resource = yaml.safe_load(DEMO.read_text())
    resource["spec"]["engine"]["podTemplate"]["spec"]["hostNetwork"] = True
    path = tmp_path / "host.yaml"
    path.write_text(yaml.safe_dump(resource))
    rejected = _run(command, "-f", str(path))
    assert rejected.exit_code == 1
    assert "Error: spec.engine.podTemplate.spec.hostNetwork: is True; false is allowed; " in rejected.output
    assert "podPolicy.hostNetwork in the operator's chart (--allow-host-network)" in rejected.output
    assert _run(command, "-f", str(path), "--allow-host-network").exit_code == 0
    bad = _run(command, "-f", str(path), "--allow-host-path", "/")
    assert (bad.exit_code, "podPolicy.hostPaths (--allow-host-path): is '/'" in bad.output) == (2, True)


def test_a_plan_that_corrects_a_resource_from_before_the_policy_can_be_made(tmp_path: Path) -> None:
    resource = yaml.safe_load(DEMO.read_text())
    resource["spec"]["engine"]["podTemplate"]["spec"]["hostPID"] = True
    path = tmp_path / "before.yaml"
    path.write_text(yaml.safe_dump(resource))
    result = _run("plan", "-f", str(DEMO), "--against", str(path))
    assert result.exit_code == 0, result.output
    assert "hostPID: True -> absent" in result.output


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("--monitoring-peers", value) for value in ("monitoring", "{}", "[{}]", '[{"namespace": "a"}]')),
        *(("--api-server-range", value) for value in ("10.0.0.1/8", "control-plane", "10.0.0.0/33")),
    ],
)
def test_peers_of_the_health_port_are_validated(option: str, value: str) -> None:
    rejected = _run("render", "-f", str(DEMO), option, value)
    assert rejected.exit_code == 2
    assert option in rejected.output
    assert repr(value) in rejected.output
