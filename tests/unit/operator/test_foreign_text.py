"""Text from pods, coordinators and resources: what of it a status quotes, and that it is escaped on every way out."""

from __future__ import annotations

import ast
import json
import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from in_memory_cluster import MINIMAL, Cluster
from prometheus_client import generate_latest

import megatron_operator
from megatron_operator.cli import main
from megatron_operator.cluster.writer import Recorder
from megatron_operator.controller.metrics import Metrics, Reading
from megatron_operator.decision.actions import EmitEvent
from megatron_operator.decision.coordinator_snapshot import CanaryReport, CoordinatorSnapshot, OperationReport
from megatron_operator.decision.decide import NOT_QUOTED, decide, reject_spec
from megatron_operator.decision.world import ApplyRejection, ChildRef
from megatron_operator.explain import causes, explanation
from megatron_operator.resource.states import OperationOutcome
from megatron_operator.resource.text import printable, printable_data
from megatron_runtime.process.logs import JsonFormatter, TextFormatter

HOSTILE = "a\x1b[2J\x1b]0;owned\x07\r\nforged: line\u2028\u202etxt.exe\u200b\x9b31m\x7f\ud800 b"
IN_JSON = HOSTILE.replace("\ud800", "")
"""The API server takes no half of a surrogate pair; a process may write one into a termination message."""
SECRET = "hunter2"


def unprintable(value: Any, *, lines: bool = False) -> list[str]:
    """Every string of plain data that holds a character that a terminal would act upon."""
    if isinstance(value, str):
        return [] if value.replace("\n" if lines else "", "").isprintable() else [value]
    if isinstance(value, dict):
        return [found for each in (*value, *value.values()) for found in unprintable(each)]
    return [found for each in value for found in unprintable(each)] if isinstance(value, list | tuple) else []


@given(st.text())
def test_escaped_text_is_printable_and_stays_as_it_is(text: str) -> None:
    once = printable(text)
    assert once.isprintable()
    assert printable(once) == once
    assert printable(text, lines=True).replace("\n", "").isprintable()
    data = printable_data({"a": [text]}, limit=50)
    assert len(data["a"][0]) <= 50
    assert printable_data(data, limit=50) == data


# --- Into the status, Events and decisions --------------------------------------------------------------------------


def _broken(cluster: Cluster) -> dict[str, Any]:
    cluster.broken_engines.add("demo-engine-0")
    cluster.settle()
    return cluster.pods["demo-engine-0-0"]["status"]


def termination_message(cluster: Cluster) -> None:
    _broken(cluster)["containerStatuses"][0]["lastState"]["terminated"]["message"] = HOSTILE


def termination_message_of_a_rank(cluster: Cluster) -> None:
    said = json.dumps({"reason": HOSTILE, "message": HOSTILE, "remedy": HOSTILE, "rank": 1})
    _broken(cluster)["containerStatuses"][0]["lastState"]["terminated"]["message"] = said


def message_of_the_kubelet(cluster: Cluster) -> None:
    waiting = {"waiting": {"reason": "CreateContainerConfigError", "message": HOSTILE}}
    _broken(cluster)["containerStatuses"] = [{"name": "engine", "state": waiting}]


def name_of_a_pod(cluster: Cluster) -> None:
    _broken(cluster)
    cluster.pods["demo-engine-0-0"]["metadata"]["name"] = HOSTILE


def error_of_a_signal(cluster: Cluster) -> None:
    cluster.settle()
    cluster.patch(desiredState="Paused")
    cluster.step()
    cluster.step()
    assert cluster.coordinator is not None
    cluster.coordinator.fail(HOSTILE)


def digest_of_an_engine(cluster: Cluster) -> None:
    cluster.settle()
    seen = cluster.coordinator.snapshot  # type: ignore[union-attr]

    def snapshot() -> CoordinatorSnapshot:
        found = seen()
        return replace(found, engines=tuple(replace(engine, digest=HOSTILE) for engine in found.engines))

    cluster.coordinator.snapshot = snapshot  # type: ignore[union-attr, method-assign]


def canary_of_an_engine(cluster: Cluster) -> None:
    cluster.settle()
    cluster.patch(engine={"batching": {"maxRequests": 7}})
    cluster.wrong_engines.add("demo-engine-0")
    cluster.settle()
    assert cluster.coordinator is not None
    (canary,) = cluster.coordinator.canaries.values()
    cluster.coordinator.canaries["demo-engine-0"] = CanaryReport(canary.revision, ok=False, message=HOSTILE)
    cluster.status["engines"][0]["canary"] = "Pending"


def rejection_of_the_api_server(cluster: Cluster) -> None:
    cluster.settle()
    ref = ChildRef("Deployment", "demo-server", "apps/v1")
    hashed = cluster.objects[ref]["metadata"]["annotations"]["inference.megatron.dev/hash"]
    cluster.rejections[ref] = ApplyRejection(hashed, 422, HOSTILE, cluster.now)


def pods_that_cannot_be_made(cluster: Cluster) -> None:
    cluster.step()
    cluster.failed_creations["demo-engine-0"] = HOSTILE


def value_of_a_pod_template(cluster: Cluster) -> None:
    cluster.patch(engine={"podTemplate": {"spec": {IN_JSON: IN_JSON}, "metadata": {"labels": {IN_JSON: IN_JSON}}}})


def shape_of_a_pod_template(cluster: Cluster) -> None:
    cluster.patch(engine={"podTemplate": {IN_JSON: IN_JSON}})


SOURCES: tuple[Callable[[Cluster], None], ...] = (
    termination_message,
    termination_message_of_a_rank,
    message_of_the_kubelet,
    name_of_a_pod,
    error_of_a_signal,
    digest_of_an_engine,
    canary_of_an_engine,
    rejection_of_the_api_server,
    pods_that_cannot_be_made,
    value_of_a_pod_template,
    shape_of_a_pod_template,
)


@pytest.mark.parametrize("plant", SOURCES, ids=lambda plant: plant.__name__)
def test_foreign_text_reaches_status_and_events_escaped(plant: Callable[[Cluster], None]) -> None:
    cluster = Cluster({**MINIMAL})
    plant(cluster)
    decision = cluster.step()
    assert "[2J" in json.dumps(cluster.status), "the text did not arrive, so that this says nothing about it"
    assert unprintable([cluster.status, decision.message]) == []
    bodies = [Recorder(None, instance="i")._body(event, name="n", namespace="s", uid="u") for event in cluster.events]  # type: ignore[arg-type]
    assert unprintable(bodies) == []


def test_a_field_manager_and_a_link_are_escaped() -> None:
    world = Cluster({**MINIMAL}).world()
    hostile = replace(
        world,
        resource=replace(world.resource, changed_by=HOSTILE),
        coordinator=CoordinatorSnapshot(error=HOSTILE),
        pods=(),
    )
    assert unprintable(decide(hostile).status) == []


def test_a_spec_that_cannot_be_parsed_is_escaped(make_cluster: Any) -> None:
    decision = reject_spec(status={}, generation=1, error=HOSTILE, now=make_cluster().now)
    assert unprintable([decision.status, decision.message, [event.message for event in decision.actions]]) == []


def test_every_event_is_escaped() -> None:
    recorder = Recorder(None, instance="i")  # type: ignore[arg-type]
    body = recorder._body(EmitEvent("Normal", "R", HOSTILE), name="n", namespace="s", uid="u")
    assert unprintable(body) == []
    assert "forged" in body["note"]


# --- Into logs and terminals ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("formatter", [JsonFormatter(), TextFormatter()], ids=["json", "text"])
def test_a_log_record_is_one_line_and_an_exception_is_indented(formatter: logging.Formatter) -> None:
    record = logging.makeLogRecord({"msg": f"{HOSTILE} %s", "args": (HOSTILE,), "levelname": "INFO", "error": HOSTILE})
    text = formatter.format(record)
    assert unprintable(text) == []
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        record.exc_info = sys.exc_info()
    lines = formatter.format(record).split("\n")
    assert unprintable(lines) == []
    assert all(line.startswith("    ") for line in lines[1:])
    if isinstance(formatter, JsonFormatter):
        assert json.loads(lines[0])["error"] == HOSTILE


def test_texts_of_a_resource_are_shown_on_one_line(make_cluster: Any) -> None:
    cluster = make_cluster()
    termination_message(cluster)
    name_of_a_pod(cluster)
    cluster.step()
    metadata = {"name": HOSTILE, "namespace": "default", "generation": 1}
    status = {**cluster.status, "plan": {"step": HOSTILE, "waitingOn": HOSTILE, "since": "x"}}
    resource = {"metadata": metadata, "spec": {}, "status": status}
    pods = [{**pod, "spec": {"nodeName": HOSTILE}} for pod in cluster.pods.values()]
    for lines in (explanation(resource), causes(resource, pods)):
        assert any("forged" in line for line in lines)
        assert unprintable([printable(line) for line in lines]) == []


def _file(tmp_path: Path, spec: dict[str, Any]) -> str:
    manifest = {
        "apiVersion": "inference.megatron.dev/v1beta1",
        "kind": "MegatronInference",
        "metadata": {"name": "demo"},
        "spec": {**MINIMAL, **spec},
    }
    path = tmp_path / f"{len(list(tmp_path.iterdir()))}.json"
    path.write_text(json.dumps(manifest))
    return str(path)


LABELLED = {"engine": {"podTemplate": {"metadata": {"labels": {HOSTILE.replace("/", ""): HOSTILE}}}}}


@pytest.mark.parametrize(
    "spec",
    [
        {HOSTILE: 1},
        {"model": {"source": {"builtin": HOSTILE}}},
        {"engine": {"podTemplate": {HOSTILE: 1}}},
        {"engine": {"podTemplate": {"spec": {HOSTILE: 1}}}},
        {"engine": {"image": HOSTILE}},
        LABELLED,
    ],
    ids=["unknown field", "value", "template", "not allowed", "image", "accepted"],
)
@pytest.mark.parametrize("command", ["render", "render -o json", "plan"])
def test_commands_print_no_terminal_control_characters(tmp_path: Path, spec: dict[str, Any], command: str) -> None:
    against = ["--against", _file(tmp_path, {})] if command == "plan" else []
    name, *options = command.split()
    result = CliRunner().invoke(main, [name, "-f", _file(tmp_path, spec), *against, *options])
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert unprintable(result.output, lines=True) == []
    assert "forged: line" not in [line.strip() for line in result.output.split("\n")]


def test_metrics_name_the_engines_of_the_resource_and_no_others(make_cluster: Any) -> None:
    cluster = make_cluster().settled()
    seen = cluster.coordinator.snapshot()
    foreign = replace(seen.engines[0], name=SECRET)
    metrics = Metrics()
    coordinator = replace(seen, engines=(*seen.engines, foreign))
    metrics.show(lambda: [Reading("default", "demo", cluster.status, coordinator)])
    page = generate_latest(metrics.registry).decode()
    assert 'engine="demo-engine-0"' in page
    assert SECRET not in page


def test_commands_write_through_one_module() -> None:
    folder = Path(megatron_operator.__file__).parents[1]
    writers = {"echo", "secho", "ClickException", "print"}
    found = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                if name in writers:
                    found.add((path.relative_to(folder).as_posix(), name))
    terminal = "megatron_operator/terminal.py"
    assert found == {(terminal, "echo"), (terminal, "ClickException")}


# --- What is quoted -------------------------------------------------------------------------------------------------

FOREIGN = "registry.example/other:1"


def _says(cluster: Cluster) -> None:
    ended = {"exitCode": 7, "reason": "Error", "message": f"CUDA out of memory {SECRET}", "finishedAt": "x"}
    _broken(cluster)["containerStatuses"][0]["lastState"]["terminated"] = ended


def _with(cluster: Cluster, **fields: Any) -> Cluster:
    cluster.settings = replace(cluster.settings, **fields)
    return cluster


def test_the_runtime_image_is_quoted(make_cluster: Any) -> None:
    cluster = make_cluster()
    _says(cluster)
    cluster.step()
    assert SECRET in cluster.condition("Degraded")["message"]
    assert cluster.condition("Degraded")["reason"] == "GpuOutOfMemory"


@pytest.mark.parametrize("listed", [False, True])
def test_a_foreign_image_is_quoted_where_the_chart_lists_it(make_cluster: Any, listed: bool) -> None:
    repositories = ("registry.example/other",) if listed else ()
    cluster = _with(make_cluster(engine={"image": FOREIGN}), pod_policy=None, quoted_repositories=repositories)
    _says(cluster)
    cluster.step()
    degraded = cluster.condition("Degraded")
    assert "exit code 7" in degraded["message"]
    assert (SECRET in json.dumps(cluster.status)) is listed
    assert degraded["reason"] == ("GpuOutOfMemory" if listed else "CrashLooping")
    assert ("podPolicy.quotedImageRepositories" in degraded["message"]) is not listed


def test_a_foreign_container_beside_ours_is_not_quoted(make_cluster: Any) -> None:
    cluster = make_cluster()
    _says(cluster)
    pod = cluster.pods["demo-engine-0-0"]
    pod["spec"] = {"containers": [*pod["spec"]["containers"], {"name": "log", "image": FOREIGN}]}
    pod["status"]["containerStatuses"][0]["name"] = "log"
    cluster.step()
    assert SECRET not in json.dumps(cluster.status)
    assert cluster.condition("Degraded")["reason"] == "AllWell", "only our containers count"


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("component", ["engine", "coordinator", "server"])
def test_texts_of_a_foreign_image_are_quoted_only_where_the_chart_lists_it(
    make_cluster: Any, component: str, listed: bool
) -> None:
    template = {"spec": {"containers": [{"name": component, "image": FOREIGN}]}}
    repositories = ("registry.example/",) if listed else ()
    cluster = _with(
        make_cluster(**{component: {"podTemplate": template}}), pod_policy=None, quoted_repositories=repositories
    )
    cluster.settle()
    world = cluster.world()
    operation = {"operationId": "o", "signal": "PAUSE", "goal": "Running", "phase": "Submitted", "fence": 1}
    failed = OperationReport(OperationOutcome.FAILED, message=SECRET)
    engines = tuple(replace(engine, digest=SECRET) for engine in world.coordinator.engines)
    canaries = {"demo-engine-0": CanaryReport(engines[0].revision, ok=False, message=SECRET)}
    coordinator = replace(world.coordinator, operations={"o": failed}, engines=engines, canaries=canaries)
    entries = [{**entry, "canary": "Pending"} for entry in cluster.status["engines"]]
    status = {**cluster.status, "engines": entries, "lifecycle": {**cluster.status["lifecycle"], **operation}}
    decision = decide(replace(world, coordinator=coordinator, resource=replace(world.resource, status=status)))
    assert (SECRET in repr(decision)) is listed
    (entry,) = decision.status["engines"]
    assert entry["canaryMessage"] == (SECRET if listed else NOT_QUOTED)
    status = {**cluster.status, "lifecycle": {**cluster.status["lifecycle"], **operation}}
    decision = decide(replace(world, coordinator=coordinator, resource=replace(world.resource, status=status)))
    assert decision.status["lifecycle"]["message"] == (SECRET if listed else NOT_QUOTED)
