"""spec.model.adapters: the list that the engines get without a restart, and the errors that the status shows."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from in_memory_cluster import START, Cluster
from pydantic import ValidationError

from megatron_operator.decision.actions import Signal
from megatron_operator.decision.decide import NOT_QUOTED, decide
from megatron_operator.explain import causes, explanation
from megatron_operator.render.children import all_children
from megatron_operator.render.context import RenderContext
from megatron_operator.render.guards import hub_egress
from megatron_operator.render.model_source import model_adapters
from megatron_operator.render.revision import revision_child
from megatron_operator.resource.base import require
from megatron_operator.resource.settings import Settings
from megatron_operator.resource.spec import ADAPTER_NAME_RULE, parse_spec
from megatron_runtime.protocol.adapters import Adapter

CLAIM = {"persistentVolumeClaim": {"claimName": "models", "path": "/base"}}
HUB = {"huggingFace": {"repo": "org/base", "tokenSecretRef": {"name": "hub", "key": "token"}}}
SQL = {"name": "sql", "source": {"path": "/adapters/sql"}}
CHAT = {"name": "chat", "source": {"huggingFace": {"repo": "org/chat", "revision": "5d8f"}}}
LOADED = {
    "sql": Adapter("sql", "/model/adapters/sql"),
    "chat": Adapter("chat", "hf:org/chat@5d8f"),
}


@pytest.fixture
def cluster(make_cluster: Any) -> Cluster:
    made: Cluster = make_cluster(model={"source": CLAIM}, replicas=2)
    made.settle()
    return made


def _spec(*adapters: dict[str, Any], source: dict[str, Any] = CLAIM, **model: Any) -> dict[str, Any]:
    return {"model": {"source": source, "adapters": list(adapters), **model}}


# --- the spec -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (_spec(SQL, SQL), "'sql' is listed twice; give each adapter"),
        (_spec(SQL, name="sql"), "an adapter has the name of the model; give it another one"),
        (_spec(SQL, source=HUB), "source.path is in the volume of the model, .* use source.huggingFace"),
        (_spec({"name": "sql", "source": {}}), "exactly one of huggingFace and path"),
        (_spec({"name": "sql", "source": {**SQL["source"], **CHAT["source"]}}), "exactly one of huggingFace and path"),
        (_spec({"name": "a b", "source": SQL["source"]}), "adapters.0.name"),
        (_spec({"name": "a" * 129, "source": SQL["source"]}), "adapters.0.name"),
        (_spec({"name": "sql", "source": {"path": "/a/../b"}}), "adapters.0.source.path"),
        (_spec({"name": "sql", "source": {"path": "a"}}), "adapters.0.source.path"),
        (_spec(*({**SQL, "name": f"a{index}"} for index in range(65))), "adapters"),
    ],
)
def test_a_wrong_list_is_rejected_with_field_and_remedy(spec: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        parse_spec(spec)


def test_an_adapter_with_the_name_of_the_resource_is_rejected_unless_the_model_has_another() -> None:
    with pytest.raises(ValueError, match=r"has the same name as the resource.*is 'sql'"):
        require([ADAPTER_NAME_RULE], ("sql", parse_spec(_spec(SQL))))
    require([ADAPTER_NAME_RULE], ("sql", parse_spec(_spec(SQL, name="base"))))
    require([ADAPTER_NAME_RULE], ("demo", parse_spec(_spec(SQL))))


def test_engines_get_the_path_in_their_pods_or_the_pinned_repository() -> None:
    branch = {"name": "branch", "source": {"huggingFace": {"repo": "org/x"}}}
    assert model_adapters(parse_spec(_spec(SQL, CHAT, branch))) == (
        Adapter("branch", "hf:org/x"),
        LOADED["chat"],
        LOADED["sql"],
    )


def test_adapters_are_in_no_manifest_and_open_the_hub_to_engines_only() -> None:
    plain, loaded = (
        RenderContext("demo", "ns", "uid", parse_spec(spec), Settings(runtime_image="r"))
        for spec in ({"model": {"source": CLAIM}}, _spec(SQL, CHAT))
    )
    assert revision_child(plain) == revision_child(loaded)
    before, after = all_children(plain), all_children(loaded)
    changed = [new for old, new in zip(before, after, strict=True) if old != new]
    assert [(each["kind"], each["metadata"]["name"]) for each in changed] == [("NetworkPolicy", "demo-engines")]
    assert hub_egress() in changed[0]["spec"]["egress"]


# --- decisions ------------------------------------------------------------------------------------------------------


def test_the_list_is_set_without_a_restart_and_only_when_it_differs(cluster: Cluster) -> None:
    assert "adapters" not in cluster.status
    pods = cluster.engine_pods(), dict(cluster.pods)
    for adapters, names in (((SQL, CHAT), ["chat", "sql"]), ((CHAT, SQL), []), ((CHAT,), ["chat"]), ((), [])):
        before = len(cluster.coordinator.begun)
        cluster.change(model={"adapters": list(adapters)})
        sent = cluster.coordinator.begun[before:]
        assert [signal.kind.value for signal in sent] == (["SET_ADAPTERS"] if names or not adapters else []), (
            "another order is the same list"
        )
        if names:
            assert sent[0].adapters == tuple(LOADED[name] for name in names)
            assert sent[0].expected_engines == 2
        assert cluster.coordinator.adapters == tuple(LOADED[name] for name in sorted(each["name"] for each in adapters))
        assert (cluster.state, cluster.condition("Degraded")["status"]) == ("Running", "False")
    assert (cluster.engine_pods(), dict(cluster.pods)) == pods
    assert "adapters" not in cluster.status
    writes = cluster.status_writes
    for _ in range(5):
        cluster.tick()
        cluster.step()
    assert cluster.status_writes == writes


def test_the_status_shows_each_adapter_with_its_engines(cluster: Cluster) -> None:
    cluster.change(model={"adapters": [SQL, CHAT]})
    assert cluster.status["adapters"] == [
        {"name": "chat", "source": "hf:org/chat@5d8f", "engines": 2},
        {"name": "sql", "source": "/model/adapters/sql", "engines": 2},
    ]
    assert cluster.status["lifecycle"]["signal"] == "SET_ADAPTERS"
    resource = {"metadata": {"name": "demo"}, "spec": cluster.spec, "status": cluster.status}
    assert "  sql                      on 2 engines" in explanation(resource)


def test_a_failure_is_shown_with_cause_and_remedy_blocks_nothing_and_is_tried_again(cluster: Cluster) -> None:
    cluster.coordinator.bad_sources.add("/model/adapters/sql")
    cluster.patch(model={"adapters": [SQL]})
    cluster.play_until(lambda: cluster.status.get("adapters", [{}])[0].get("error"))
    [entry] = cluster.status["adapters"]
    assert (entry["engines"], entry["reason"]) == (0, "AdapterFailed")
    assert "adapter 'sql' from /model/adapters/sql: no such file" in entry["error"]
    degraded, ready = cluster.condition("Degraded"), cluster.condition("Ready")
    assert (degraded["status"], degraded["reason"]) == ("True", "AdapterFailed")
    assert degraded["message"].startswith("spec.model.adapters: sql: demo-engine-0: adapter 'sql'")
    assert (ready["status"], ready["reason"], cluster.state) == ("True", "AdapterFailed", "Running")
    assert [event.reason for event in cluster.events if event.type == "Warning"] == ["AdapterFailed"]
    resource = {"metadata": {"name": "demo"}, "spec": cluster.spec, "status": cluster.status}
    assert any("Correct the source of the adapter" in line for line in causes(resource, []))

    cluster.patch(replicas=3)
    cluster.play_until(lambda: cluster.status["ready"] == "3/3", limit=20)
    assert cluster.signals().count("SET_ADAPTERS") == 1, "it waits before it tries again"
    cluster.coordinator.bad_sources.clear()
    decision = cluster.step()
    assert decision.requeue_after is not None
    assert 0 < decision.requeue_after <= 30
    cluster.now += timedelta(seconds=30)
    cluster.settle()
    assert cluster.signals().count("SET_ADAPTERS") == 2
    assert cluster.status["adapters"] == [{"name": "sql", "source": "/model/adapters/sql", "engines": 3}]
    assert cluster.condition("Degraded")["status"] == "False"


def test_an_adapter_that_cannot_be_loaded_does_not_keep_the_others_from_being_loaded(cluster: Cluster) -> None:
    cluster.coordinator.bad_sources |= {"/model/adapters/sql", "/model/adapters/lost"}
    lost = {"name": "lost", "source": {"path": "/adapters/lost"}}
    cluster.patch(model={"adapters": [SQL, CHAT, lost]})
    cluster.play_until(lambda: cluster.coordinator.adapters == (LOADED["chat"],), limit=12)
    cluster.step()
    shown = {entry["name"]: (entry["engines"], entry.get("error", "")) for entry in cluster.status["adapters"]}
    assert shown == {
        "chat": (2, ""),
        "lost": (0, "demo-engine-0: adapter 'lost' from /model/adapters/lost: no such file"),
        "sql": (0, "demo-engine-0: adapter 'sql' from /model/adapters/sql: no such file"),
    }
    assert cluster.condition("Degraded")["reason"] == "AdapterFailed"
    writes = cluster.status_writes
    cluster.play(15)
    assert cluster.signals() == ["SET_ADAPTERS", "SET_ADAPTERS"]
    assert cluster.status_writes == writes
    cluster.coordinator.bad_sources.discard("/model/adapters/sql")
    cluster.play_until(lambda: LOADED["sql"] in cluster.coordinator.adapters, limit=40)
    assert cluster.coordinator.adapters == (LOADED["chat"], LOADED["sql"])


def test_an_adapter_keeps_its_source_until_the_new_one_can_be_loaded(cluster: Cluster) -> None:
    cluster.change(model={"adapters": [SQL, CHAT]})
    cluster.coordinator.bad_sources.add("/model/adapters/sql-2")
    cluster.patch(model={"adapters": [{"name": "sql", "source": {"path": "/adapters/sql-2"}}]})
    cluster.play_until(lambda: cluster.coordinator.adapters == (LOADED["sql"],), limit=12)
    cluster.coordinator.bad_sources.clear()
    cluster.play_until(lambda: cluster.coordinator.adapters == (Adapter("sql", "/model/adapters/sql-2"),))


def test_engines_that_do_not_name_the_adapters_still_unload_those_that_are_removed(cluster: Cluster) -> None:
    cluster.change(model={"adapters": [CHAT]})
    cluster.coordinator.reports_adapter_errors = False
    cluster.coordinator.bad_sources.add("/model/adapters/sql")
    cluster.patch(model={"adapters": [SQL]})
    cluster.play_until(lambda: cluster.coordinator.adapters == (), limit=12)
    assert "no such file" in cluster.status["adapters"][0]["error"]


def test_a_list_that_cannot_even_be_reduced_blocks_nothing(cluster: Cluster) -> None:
    cluster.change(model={"adapters": [CHAT]})
    cluster.coordinator.bad_sources |= {"/model/adapters/sql", LOADED["chat"].source}
    third = {"name": "third", "source": {"path": "/adapters/third"}}
    cluster.patch(replicas=3, model={"adapters": [SQL, CHAT, third]})
    cluster.play_until(lambda: cluster.status["ready"] == "3/3" and len(cluster.signals()) > 2)
    sent = len(cluster.signals())
    cluster.play(10)
    assert len(cluster.signals()) - sent <= 1


def test_a_repeated_failure_waits_again(cluster: Cluster) -> None:
    cluster.coordinator.bad_sources.add("/model/adapters/sql")
    cluster.patch(model={"adapters": [SQL]})
    cluster.play_until(lambda: cluster.now - START > timedelta(seconds=120), limit=200)
    assert 3 <= cluster.signals().count("SET_ADAPTERS") <= 5


def test_a_corrected_list_is_set_at_once(cluster: Cluster) -> None:
    cluster.coordinator.bad_sources.add("/model/adapters/sql")
    cluster.patch(model={"adapters": [SQL]})
    cluster.play_until(lambda: "error" in cluster.status.get("adapters", [{}])[0])
    failed = cluster.now
    cluster.patch(model={"adapters": [{"name": "sql", "source": {"path": "/adapters/sql-2"}}]})
    cluster.play_until(lambda: cluster.status["adapters"][0]["engines"] == 2)
    assert cluster.now - failed < timedelta(seconds=12)
    assert cluster.coordinator.adapters == (Adapter("sql", "/model/adapters/sql-2"),)


def test_a_backend_without_adapters_is_named(cluster: Cluster) -> None:
    cluster.patch(model={"adapters": [SQL]})
    cluster.step()
    cluster.step()
    cause = "SET_ADAPTERS needs LoRA adapters, which backend 'native' does not have"
    cluster.coordinator.fail(f"UNSUPPORTED: demo-engine-0: {cause}", code=501)
    cluster.step()
    cluster.step()
    degraded = cluster.condition("Degraded")
    assert degraded["reason"] == "UnsupportedByBackend"
    assert cause in degraded["message"]
    cluster.coordinator.operations.clear()
    cluster.step()
    assert cluster.condition("Degraded")["reason"] == "UnsupportedByBackend"


def test_an_engine_that_joins_without_an_adapter_gets_the_list_again(cluster: Cluster) -> None:
    cluster.change(model={"adapters": [SQL, CHAT]})
    cluster.coordinator.adapter_errors["sql"] = "demo-engine-1: no such file"
    cluster.step()
    sql = cluster.status["adapters"][1]
    assert (sql["engines"], sql["error"]) == (1, "demo-engine-1: no such file")
    assert cluster.condition("Degraded")["reason"] == "AdapterFailed"
    cluster.now += timedelta(seconds=30)
    cluster.settle()
    assert cluster.signals().count("SET_ADAPTERS") == 2
    assert cluster.condition("Degraded")["status"] == "False"


@pytest.mark.parametrize("state", ["Suspended", "Stopped"])
def test_a_change_waits_while_no_engine_can_load_it(cluster: Cluster, state: str) -> None:
    cluster.change(desiredState=state)
    cluster.change(model={"adapters": [SQL]})
    assert "SET_ADAPTERS" not in cluster.signals()
    cluster.change(desiredState="Running")
    assert cluster.signals()[-1] == "SET_ADAPTERS"
    assert cluster.coordinator.adapters == (LOADED["sql"],)


def test_the_list_is_set_while_paused(cluster: Cluster) -> None:
    cluster.change(desiredState="Paused", model={"adapters": [SQL]})
    assert (cluster.state, cluster.signals()) == ("Paused", ["PAUSE", "SET_ADAPTERS"])


@pytest.mark.parametrize("crash_at", range(6))
def test_the_list_is_set_once_if_the_operator_dies_at_any_action(cluster: Cluster, crash_at: int) -> None:
    cluster.patch(model={"adapters": [SQL]})
    for number in range(4):
        cluster.step(crash_after=0 if number == crash_at else None)
        cluster.tick()
    cluster.settle()
    assert cluster.signals() == ["SET_ADAPTERS"]


def test_a_list_that_changes_before_its_signal_is_sent_is_sent_as_it_is_now(cluster: Cluster) -> None:
    cluster.patch(model={"adapters": [SQL]})
    cluster.step()
    assert cluster.status["lifecycle"]["phase"] == "Pending"
    cluster.change(model={"adapters": [CHAT]})
    assert [signal.adapters for signal in cluster.coordinator.begun] == [(LOADED["chat"],)]


def test_a_lost_signal_is_sent_again_only_while_the_spec_has_its_list(cluster: Cluster) -> None:
    cluster.patch(model={"adapters": [SQL]})
    cluster.step()
    cluster.step()
    operation = cluster.status["lifecycle"]["operationId"]
    cluster.coordinator.open = None
    cluster.coordinator.operations.clear()
    (again,) = (action for action in decide(cluster.world()).actions if isinstance(action, Signal))
    assert (again.operation_id, again.adapters) == (operation, (LOADED["sql"],))
    cluster.change(model={"adapters": [CHAT]})
    assert cluster.coordinator.adapters == (LOADED["chat"],)
    assert cluster.coordinator.begun[-1].operation_id != operation


def test_a_coordinator_of_a_release_without_adapters_gets_no_signal(cluster: Cluster) -> None:
    cluster.coordinator.adapters = None
    cluster.change(model={"adapters": [SQL]})
    assert cluster.signals() == []


def test_the_error_of_a_foreign_image_is_not_quoted(cluster: Cluster) -> None:
    cluster.change(model={"adapters": [SQL]})
    cluster.coordinator.adapter_errors["sql"] = "demo-engine-1: secret"
    world = cluster.world()
    engine = world.resource.spec.engine.model_copy(update={"image": "foreign:1"})
    spec = world.resource.spec.model_copy(update={"engine": engine})
    world = replace(world, resource=replace(world.resource, spec=spec))
    status = decide(world).status
    assert "secret" not in str(status)
    assert status["adapters"][0]["error"] == NOT_QUOTED
