"""Continuous requests during every verb, rollout, eviction and kill of a resource, and during mistakes in its spec.

Every token is compared, and so is what the status claims with what the processes answer.
"""

import os
import platform as machine
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any

import pytest
import yaml
from machine import scaled
from soak import SOAK, part, size

from localcluster import installation
from localcluster.cluster import LocalCluster
from localcluster.kubectl import Kubectl
from localcluster.progress import Steps

from .conftest import SAMPLE, Deployed, Platform, deploy, on_first_node, scale
from .disturbances import (
    change,
    change_and_revert,
    drain_node,
    evict,
    evict_all,
    kill,
    lose,
    lose_behind_a_late_proxy,
    pods,
    reject_and_revert,
    settled,
    to_and_fro,
)
from .load_client import HEADING, LoadClient
from .status_watch import StatusWatch, heading

WORKERS, TOKENS = size(2, soak=3), 32
SPEC: dict[str, Any] = yaml.safe_load(SAMPLE.read_text())["spec"]
SPREAD = {
    "maxSkew": 1,
    "topologyKey": "kubernetes.io/hostname",
    "whenUnsatisfiable": "DoNotSchedule",
    "labelSelector": {"matchLabels": {"app.kubernetes.io/instance": "demo", "app.kubernetes.io/component": "engine"}},
}
POD_TEMPLATE = SPEC["engine"]["podTemplate"]
ENGINES_SPREAD = {"spec": {**POD_TEMPLATE["spec"], "topologySpreadConstraints": [SPREAD]}}
"""With two nodes, the engines are on different ones."""


@dataclass(frozen=True)
class Row:
    """One disturbance.

    act:       returns when the resource serves as before.
    degraded:  reasons that the condition Degraded and Warning Events may have; None: any. A planned departure has none.
    in_test:   part of `make test`, too.
    """

    what: str
    act: Callable[[Kubectl], None]
    degraded: frozenset[str] | None = frozenset()
    in_test: bool = False


def mistake(what: str, reason: str, *, to: dict[str, Any], back: dict[str, Any]) -> Row:
    return Row(what, partial(reject_and_revert, reason=reason, to=to, back=back), frozenset({reason}))


ROWS = (
    Row("rollout of a changed engine template", partial(change, engine={"batching": {"maxRequests": 12}})),
    Row("evict a pod of the engine", partial(lose, component="engine", how=evict)),
    Row("evict a pod of the coordinator", partial(lose, component="coordinator", how=evict)),
    Row("evict a pod of the server", partial(lose, component="server", how=evict)),
    Row("evict all pods at once", evict_all, in_test=True),
    Row(
        "evict a pod of the server, kube-proxy stopped for 6 s",
        partial(lose_behind_a_late_proxy, component="server"),
        in_test=True,
    ),
    # A killed server breaks its clients' connections.
    Row("kill a pod of the engine", partial(lose, component="engine", how=kill), degraded=None),
    Row("kill a pod of the coordinator", partial(lose, component="coordinator", how=kill), degraded=None),
    Row("Paused and Running again", partial(to_and_fro, state="Paused")),
    Row("Suspended and Running again", partial(to_and_fro, state="Suspended")),
    # With the node's pod, an engine waits for it: the constraint does not allow two engines on one node.
    Row("drain the node of the coordinator", drain_node, frozenset({"Unschedulable"})),
    Row(
        # The built-in model has three KV heads.
        "tensor parallel 1 to 3 and back, each rank in a pod",
        partial(change_and_revert, to={"parallelism": {"tensor": 3}}, back={"parallelism": {"tensor": 1}}),
    ),
    Row(
        "tensor parallel 1 to 3 and back, all ranks in one pod",
        partial(
            change_and_revert,
            to={"parallelism": {"tensor": 3}, "engine": {"ranksPerPod": 3}},
            back={"parallelism": {"tensor": 1}, "engine": {"ranksPerPod": 1}},
        ),
    ),
    mistake(
        "a model that does not exist",
        "WeightsMissing",
        to={"model": {"source": {"builtin": "smollm2-135n"}}},
        back={"model": {"source": {"builtin": "smollm2-135m"}}},
    ),
    mistake(
        "a Secret that does not exist",
        "ContainerConfigError",
        to={"server": {"apiKeysSecretRef": {"name": "absent", "key": "keys"}}},
        back={"server": {"apiKeysSecretRef": None}},
    ),
    mistake(
        "a malformed pod template",
        "InvalidPodTemplate",
        to={"engine": {"podTemplate": {"spec": {"tolerations": [{"tolerationSecond": 5}]}}}},
        back={"engine": {"podTemplate": {"spec": {"tolerations": None}}}},
    ),
)


STALL_SECONDS = 2.0
"""Longest wait for a token of a stream during a rollout with a surge engine."""


@pytest.mark.skipif(not SOAK, reason="one more rollout under load; `make soak` runs it")
def test_a_rollout_of_one_engine_with_a_surge_engine_stalls_no_stream(kube: Kubectl) -> None:
    deployed = deploy(kube, replicas=1, rollout={"maxSurge": 1}, lifecycle={"drainSeconds": 60})
    kube.wait("mi/demo", "condition=Progressing=False")
    before = {pod["metadata"]["uid"] for pod in pods(kube, "engine")}
    what = "rollout of the only engine with a surge engine"
    print(f"\n{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {os.cpu_count()} CPUs ({machine.machine()})\n{heading(HEADING)}")
    with (
        LoadClient(deployed.chat.url, deployed.chat.model, workers=2, tokens=TOKENS) as load,
        StatusWatch(kube, "demo", last_token=lambda: load.last_token) as watch,
        load.during(what) as done,
        watch.during() as record,
    ):
        change(kube, replicas=1, engine={"batching": {"maxRequests": 12}})
    print(f"{done.row()} {record.cells()}", flush=True)
    assert [pod["metadata"]["name"] for pod in pods(kube, "engine")] == ["demo-engine-0-0"]
    assert not before & {pod["metadata"]["uid"] for pod in pods(kube, "engine")}
    assert [*done.faults, *record.faults(degraded=frozenset())] == []
    assert done.stall <= scaled(STALL_SECONDS)


@pytest.fixture
def two_engines(request: pytest.FixtureRequest) -> Deployed:
    """A resource with two engines and two servers; in `make soak` with an engine on each of two nodes."""
    if not SOAK:
        served: Deployed = request.getfixturevalue("served")
        scale(served.kube, 2)
        return served
    request.getfixturevalue("cluster")
    return deploy(
        request.getfixturevalue("kube"),
        replicas=2,
        server={**SPEC["server"], "replicas": 2},
        engine={**SPEC["engine"], "podTemplate": ENGINES_SPREAD},
        lifecycle={"drainSeconds": 60},
    )


def test_no_request_fails_and_no_status_is_false(two_engines: Deployed) -> None:
    """In float32 an answer does not depend on its batch."""
    deployed, kube = two_engines, two_engines.kube
    settled(kube)
    where = f"{os.cpu_count()} CPUs ({machine.machine()})"
    print(f"\n{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {where}, {WORKERS} clients\n{heading(HEADING)}")
    faults: dict[str, Any] = {}
    with (
        LoadClient(deployed.chat.url, deployed.chat.model, workers=WORKERS, tokens=TOKENS) as load,
        StatusWatch(kube, "demo", last_token=lambda: load.last_token) as watch,
    ):
        for row in part([row for row in ROWS if SOAK or row.in_test]):
            with load.during(row.what) as done, watch.during() as record:
                row.act(kube)
            print(f"{done.row()} {record.cells()}", flush=True)
            for fault in (*done.faults, *record.faults(degraded=row.degraded)):
                print(fault)
                faults.setdefault(row.what, []).append(fault)
            assert done.answers
    assert faults == {}


def containers(kube: Kubectl, resource: str) -> dict[str, int]:
    """Return the number of restarts of each pod of a resource, by its UID."""
    found = kube.json("pods", "-l", f"app.kubernetes.io/instance={resource}")["items"]
    return {
        pod["metadata"]["uid"]: sum(status["restartCount"] for status in pod["status"].get("containerStatuses", ()))
        for pod in found
    }


@pytest.fixture
def upgrade(platform: Platform, cluster: LocalCluster) -> Iterator[Callable[..., None]]:
    """Upgrade the chart with further values; the values of all tests are restored at the end."""

    def upgrade(*values: str) -> None:
        chosen = [on_first_node(cluster), *values]
        installation.install_operator(platform.kube, platform.helm, Steps(), values=chosen)

    yield upgrade
    upgrade()


@pytest.mark.skipif(not SOAK, reason="takes four minutes; `make soak` runs it")
def test_a_chart_upgrade_restarts_no_resource_and_offers_its_image(upgrade: Callable[..., None], kube: Kubectl) -> None:
    """Two resources under load. The new default image of their engines and servers is offered, not used."""
    names = ("demo", "other")
    demo, other = (deploy(kube, name=name, replicas=1) for name in names)
    before = {name: containers(kube, name) for name in names}
    with (
        LoadClient(demo.chat.url, demo.chat.model, workers=2, tokens=TOKENS) as load,
        LoadClient(other.chat.url, other.chat.model, workers=2, tokens=TOKENS) as second_load,
        StatusWatch(kube, "demo", last_token=lambda: load.last_token) as watch,
        StatusWatch(kube, "other", last_token=lambda: second_load.last_token) as second_watch,
    ):
        with (
            load.during("upgrade of the chart, with two resources") as done,
            second_load.during("the same, at the other resource") as second,
            watch.during() as record,
            second_watch.during() as second_record,
        ):
            upgrade("runtime.image.tag=next")
            for name in names:
                kube.wait(f"mi/{name}", "condition=UpdateAvailable")
            load.answered(8)
            second_load.answered(8)
            status = {name: kube.json("mi", name)["status"] for name in names}
        rows = f"{done.row()} {record.cells()}\n{second.row()} {second_record.cells()}"
        print(f"\n{heading(HEADING)}\n{rows}", flush=True)
    watched = [fault for each in (record, second_record) for fault in each.faults(degraded=frozenset())]
    assert [*done.faults, *second.faults, *watched] == []
    for name in names:
        offered = next(entry for entry in status[name]["conditions"] if entry["type"] == "UpdateAvailable")
        assert (offered["reason"], ":next;" in offered["message"]) == ("UpdateAvailable", True), offered
        assert containers(kube, name) == before[name], f"{name} was restarted"
