"""What conditions promise, in every pass after a change of every field, in every state.

Progressing is False only if every child is as the spec renders it and rolled out; STATE, READY and REASON, which the
list of resources shows, agree with Ready and Degraded.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
from in_memory_cluster import Cluster
from soak import SOAK
from spec_changes import BASES, SpecChange, changes, is_valid, leaves, owner_of

from megatron_operator.decision.reduce import reduce_child, reduce_pod
from megatron_operator.decision.world import ChildRef, manifest_hash
from megatron_operator.render.children import all_children
from megatron_operator.render.context import RenderContext
from megatron_operator.render.engine import engine_revision
from megatron_operator.render.revision import KIND as REVISION_KIND
from megatron_operator.render.server import server_deployment
from megatron_operator.resource.spec import parse_spec

DEPLOYMENT = ChildRef("Deployment", "demo-server", "apps/v1")
PASSES = 40
STATES: dict[str, dict[str, Any]] = {
    "Running": {},
    "Paused": {"desiredState": "Paused"},
    "Suspended": {"desiredState": "Suspended"},
    "Released": {"desiredState": "Suspended", "lifecycle": {"suspend": {"level": "ReleasePods"}}},
    "Zero": {"replicas": 0},
    "Stopped": {"desiredState": "Stopped"},
}
WELL = {"Serving", "Paused", "Suspended", "Stopped"}


def test_the_changes_cover_every_field() -> None:
    assert {path for path in leaves() if any(owner_of(base, path) is not None for base in BASES.values())} == {
        *leaves()
    }
    assert {change.field for change in changes()} == {*leaves()}
    assert all(is_valid(change.new) for change in changes())


def _in_state(spec: dict[str, Any], state: str) -> dict[str, Any]:
    found = {**copy.deepcopy(spec), **STATES[state]}
    lifecycle = {**spec.get("lifecycle", {}), **STATES[state].get("lifecycle", {})}
    return {**found, "lifecycle": lifecycle}


def _sequences() -> list[Any]:
    """Return base, state and changes. Of every change, `make test` tries one state besides Running."""
    quiet = [state for state in STATES if state != "Running"]
    sequences = []
    for base in BASES:
        found = list(enumerate(change for change in changes(removals=SOAK) if change.base == base))
        for state in STATES:
            chosen = [each for number, each in found if SOAK or state in ("Running", quiet[number % len(quiet)])]
            if chosen:
                sequences.append(pytest.param(base, state, chosen, id=f"{base}-{state}"))
    return sequences


def unfinished(cluster: Cluster, objects: dict[ChildRef, dict[str, Any]]) -> list[str]:
    """Return the children that are not as the spec renders them, or not rolled out."""
    world = cluster.world()
    key = world.keys.server_generation if world.keys is not None else 1
    ctx = RenderContext("demo", "default", "owner-uid", world.resource.spec, cluster.settings, key)
    found = []
    for manifest in all_children(ctx):
        ref, obj = ChildRef.of(manifest), objects.get(ChildRef.of(manifest))
        if ref.kind == REVISION_KIND:
            continue  # a record, which never changes
        view = None if obj is None else reduce_child(obj, owner_uid="owner-uid")
        if ref.kind == "StatefulSet":
            pods = [reduce_pod(pod) for pod in cluster.pods.values()]
            pods = [pod for pod in pods if pod.engine == ref.name]
            revision = engine_revision(manifest)
            same = view is not None and view.revision == revision and len(pods) == view.replicas
            if not same or any(pod.revision != revision or not pod.ready for pod in pods):
                found.append(str(ref))
        elif (
            view is None
            or view.hash not in _renderings(ctx, manifest)
            or (ref.kind == "Deployment" and not view.rolled_out)
        ):
            found.append(str(ref))
    return found


def _renderings(ctx: RenderContext, manifest: dict[str, Any]) -> set[str]:
    """Return the hashes that a child may have: servers are not replaced for other weights of their model."""
    if ChildRef.of(manifest) != DEPLOYMENT or ctx.spec.weights is None or ctx.spec.has_trainer:
        return {manifest_hash(manifest)}
    weights = [ctx.spec.weights.model_copy(update={"revision": revision}) for revision in ("1", "12")]
    specs = [ctx.spec.model_copy(update={"weights": each}) for each in weights]
    return {manifest_hash(server_deployment(replace(ctx, spec=spec))) for spec in specs}


def promise_is_kept(cluster: Cluster) -> None:
    """Make a pass, and compare the conditions that it writes with what it has seen."""
    seen = dict(cluster.objects)
    cluster.step()
    status = cluster.status
    ready, degraded, progressing = map(cluster.condition, ("Ready", "Degraded", "Progressing"))
    assert progressing["observedGeneration"] == cluster.generation
    if progressing["status"] == "False":
        assert unfinished(cluster, seen) == []
    spec = parse_spec(cluster.spec)
    desired = "Suspended" if spec.num_engines == 0 and spec.desired_state == "Running" else spec.desired_state.value
    assert (ready["status"] == "True") == (status["state"] == desired), (ready, status["state"])
    if degraded["status"] == "True" or ready["status"] != "True":
        assert ready["reason"] not in WELL, (ready, degraded)
    serves = any(pod.ready for pod in map(reduce_pod, cluster.pods.values()) if pod.component == "server")
    assert serves or status["ready"].startswith("0/")


def apply(cluster: Cluster, spec: dict[str, Any]) -> None:
    cluster.spec = copy.deepcopy(spec)
    cluster.generation += 1


def until_done(cluster: Cluster) -> None:
    for _ in range(PASSES):
        promise_is_kept(cluster)
        if cluster.condition("Progressing")["status"] != "True":
            return
        ready = cluster.condition("Ready")
        assert ready["observedGeneration"] < cluster.generation, "kubectl wait would take the change for done"
        cluster.tick()
    raise AssertionError(cluster.condition("Progressing"))


@pytest.mark.parametrize(("base", "state", "sequence"), _sequences())
def test_progressing_ends_when_every_child_is_rolled_out(base: str, state: str, sequence: list[SpecChange]) -> None:
    cluster = Cluster(BASES[base])
    cluster.settings = replace(cluster.settings, pod_policy=None)
    cluster.settle()
    apply(cluster, _in_state(BASES[base], state))
    cluster.settle()
    for change in sequence:
        apply(cluster, _in_state(change.new, state))
        until_done(cluster)


# --- Servers that do not become ready ---------------------------------------------------------------------------------


@pytest.mark.parametrize("state", STATES)
def test_a_crash_looping_server_is_shown_in_every_column(make_cluster: Any, state: str) -> None:
    cluster: Cluster = make_cluster(**STATES[state]).settled()
    cluster.broken_servers = True
    server = next(name for name in cluster.pods if name.startswith("demo-server-"))
    waiting = {"name": "server", "restartCount": 5, "state": {"waiting": {"reason": "CrashLoopBackOff"}}}
    waiting["lastState"] = {"terminated": {"exitCode": 1, "reason": "Error", "message": "bad flag", "finishedAt": "x"}}
    conditions = [{"type": "Ready", "status": "False"}]
    cluster.pods[server]["status"] = {
        "phase": "Running",
        "conditions": conditions,
        "containerStatuses": [waiting],
    }
    for _ in range(3):
        cluster.tick()
        promise_is_kept(cluster)
    statuses = {kind: cluster.condition(kind)["status"] for kind in ("Ready", "Degraded", "Progressing")}
    assert statuses == {"Ready": "False", "Degraded": "True", "Progressing": "True"}
    assert (cluster.state, cluster.condition("Ready")["reason"]) == ("Pending", "CrashLooping")
    assert cluster.status["ready"].startswith("0/")
    assert "bad flag" in cluster.condition("Ready")["message"]


def test_an_engine_without_pods_for_its_crashes_is_no_finished_change(make_cluster: Any) -> None:
    cluster: Cluster = make_cluster(replicas=2, lifecycle={"restartBudget": {"restarts": 0}}).settled()
    cluster.change(desiredState="Paused")
    cluster.broken_engines.add("demo-engine-1")
    del cluster.pods["demo-engine-1-0"]
    for _ in range(6):
        cluster.tick()
        promise_is_kept(cluster)
    assert cluster.engine_pods() == ["demo-engine-0-0"]
    assert cluster.condition("Progressing")["status"] == cluster.condition("Degraded")["status"] == "True"


# --- The front door ---------------------------------------------------------------------------------------------------

SERVICE = ChildRef("Service", "demo")
SECRET = ChildRef("Secret", "certificate")
CERTIFICATE = frozenset({"tls.crt", "tls.key"})
TLS: dict[str, Any] = {"tls": {"secretName": "certificate"}}
DOORS: dict[str, Any] = {"ingress": {}, "httpRoute": {"parentRefs": [{"name": "g"}], "modelHeader": "x-model"}}


def _schemes(cluster: Cluster) -> set[str]:
    """Return the schemes with which a client reaches a ready server."""
    pods = [pod for name, pod in cluster.pods.items() if name.startswith("demo-server-") and reduce_pod(pod).ready]
    named = {port["name"] for pod in pods for port in pod["spec"]["containers"][0]["ports"]}
    return {port["name"] for port in cluster.objects[SERVICE]["spec"]["ports"] if port["targetPort"] in named}


def _doors(cluster: Cluster) -> dict[ChildRef, Any]:
    """Return the objects that lead clients to the servers."""
    kinds = ("Service", "Ingress", "HTTPRoute", "InferencePool")
    return {ref: obj["spec"] for ref, obj in cluster.objects.items() if ref.name == "demo" and ref.kind in kinds}


@pytest.fixture
def front(make_cluster: Any) -> Cluster:
    cluster: Cluster = make_cluster(server=DOORS)
    cluster.settings = replace(cluster.settings, pod_policy=None)
    cluster.named[SECRET] = CERTIFICATE
    cluster.settle()
    return cluster


@pytest.mark.parametrize("replicas", [1, 3])
def test_clients_reach_a_server_at_every_moment_of_a_switch_to_tls_and_back(front: Cluster, replicas: int) -> None:
    front.change(server={"replicas": replicas})
    for server, scheme, port in ((TLS, "https", 443), ({"tls": None}, "http", 80)):
        front.patch(server=server)
        for _ in range(PASSES):
            promise_is_kept(front)
            assert _schemes(front)
            front.tick()
            assert _schemes(front)
            if front.condition("Progressing")["status"] == "False":
                break
        front.settle()
        assert [entry["port"] for entry in front.objects[SERVICE]["spec"]["ports"]] == [port]
        assert front.status["endpoint"].startswith(f"{scheme}://")
        assert f"'number': {port}" in str(_doors(front))


WRONG: dict[str, Any] = {
    "no Secret": None,
    "no certificate": frozenset({"tls.key"}),
    "an empty key": frozenset({"tls.crt"}),
}


@pytest.mark.parametrize("keys", WRONG.values(), ids=WRONG)
def test_with_a_wrong_secret_servers_and_front_door_stay(front: Cluster, keys: frozenset[str] | None) -> None:
    before, pods, endpoint = copy.deepcopy(_doors(front)), set(front.pods), front.status["endpoint"]
    template = front.objects[DEPLOYMENT]["spec"]["template"]
    front.named[SECRET] = keys
    front.patch(server={**TLS, "ingress": None, "service": {"annotations": {"prometheus.io/scrape": "true"}}})
    for _ in range(6):
        promise_is_kept(front)
        front.tick()
    assert (_doors(front), set(front.pods), front.status["endpoint"]) == (before, pods, endpoint)
    assert front.objects[DEPLOYMENT]["spec"]["template"] == template
    statuses = {kind: front.condition(kind)["status"] for kind in ("Ready", "Degraded", "Progressing")}
    assert statuses == {"Ready": "True", "Degraded": "True", "Progressing": "True"}
    for kind in ("Ready", "Degraded", "Progressing"):
        assert "spec.server.tls.secretName: Secret certificate" in front.condition(kind)["message"]
    assert "or correct spec.server.tls.secretName" in front.condition("Degraded")["message"]
    front.named[SECRET] = CERTIFICATE
    front.settle()
    assert front.condition("Degraded")["status"] == "False"
    assert (_schemes(front), front.condition("Ready")["reason"]) == ({"https"}, "Serving")


@pytest.mark.parametrize("change", [{"server": TLS}, {"model": {"name": "another"}}], ids=["TLS", "name"])
def test_the_front_door_stays_while_no_server_is_as_the_spec(front: Cluster, change: dict[str, Any]) -> None:
    before = copy.deepcopy(_doors(front))
    front.broken_servers = True
    front.patch(**change)
    for _ in range(6):
        promise_is_kept(front)
        front.tick()
        assert _doors(front) == before
        assert _schemes(front) == {"http"}
    front.broken_servers = False
    front.settle()
    assert _doors(front) != before
    assert front.condition("Progressing")["status"] == "False"


def test_a_deleted_service_is_created_again_while_the_front_door_waits(front: Cluster) -> None:
    front.broken_servers = True
    front.patch(server=TLS)
    front.play(3)
    del front.objects[SERVICE]
    front.step()
    assert _schemes(front) == {"http"}


def _may_download(cluster: Cluster, component: str) -> bool:
    policy = cluster.objects[ChildRef("NetworkPolicy", f"demo-{component}", "networking.k8s.io/v1")]
    return any({"protocol": "TCP", "port": 443} in rule.get("ports", ()) for rule in policy["spec"]["egress"])


def test_engines_may_download_their_model_until_the_last_one_is_replaced(make_cluster: Any) -> None:
    """One that restarts before its rollout needs the source of its own revision."""
    cluster: Cluster = make_cluster(model={"source": {"huggingFace": {"repo": "org/model"}}}, replicas=2).settled()
    cluster.check = lambda arguments: None
    cluster.patch(model={"source": {"persistentVolumeClaim": {"claimName": "models"}}})
    for _ in range(4):
        cluster.play(1)
        assert _may_download(cluster, "engines")
        assert _may_download(cluster, "server")
    cluster.check = lambda arguments: (0, "")
    cluster.settle()
    assert not _may_download(cluster, "engines")
    assert not _may_download(cluster, "server")
    assert cluster.condition("Progressing")["status"] == "False"
