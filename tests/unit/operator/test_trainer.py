"""spec.weights.trainer: the keys and NetworkPolicies of a trainer, and the weights that the status shows."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from in_memory_cluster import MINIMAL, Cluster
from pydantic import ValidationError

from megatron_operator.cluster.keys import is_sealed, repair_patch
from megatron_operator.decision.actions import RotateKeys
from megatron_operator.decision.world import ChildRef
from megatron_operator.render.children import all_children
from megatron_operator.render.context import RenderContext
from megatron_operator.render.engine import revision_of
from megatron_operator.resource.settings import Settings
from megatron_operator.resource.spec import parse_spec

PODS = {"podSelector": {"matchLabels": {"app": "trainer"}}}
FAR = {"ipBlock": {"cidr": "10.9.0.0/16"}}
TRAINER = {"trainer": {"from": [PODS, FAR]}}
SOURCE = "trainer://10.1.2.3:7000/{}-" + "ab" * 32


def _trained(**fields: Any) -> dict[str, Any]:
    return {**MINIMAL, "weights": TRAINER, **fields}


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (_trained(weights={**TRAINER, "revision": "7"}), "spec.weights: set exactly one of revision and trainer"),
        (_trained(weights={}), "spec.weights: set exactly one of revision and trainer"),
        (_trained(weights={"trainer": {}}), "from"),
        (_trained(weights={"trainer": {"from": []}}), "at least 1 item"),
        (_trained(weights={"trainer": {"from": [{}]}}), "trainer.from: set ipBlock alone, or podSelector"),
        (_trained(weights={"trainer": {"from": [{**PODS, **FAR}]}}), "trainer.from: set ipBlock alone"),
        (
            _trained(
                engine={"backend": "VLLM", "ranksPerPod": 1, "vllm": {"allowPickleBetweenPods": True}},
                parallelism={"tensor": 2},
            ),
            "spec.weights.trainer: vLLM engines over several pods receive no weights from a trainer",
        ),
        (
            _trained(model={"source": {"persistentVolumeClaim": {"claimName": "c", "path": "/x/{revision}"}}}),
            "so spec.weights.revision must be set",
        ),
    ],
)
def test_a_wrong_spec_is_rejected_with_field_and_remedy(spec: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        parse_spec(spec)


def _children(**fields: Any) -> dict[tuple[str, str], Any]:
    spec = parse_spec({**MINIMAL, **fields})
    children = all_children(RenderContext("demo", "ns", "uid", spec, Settings(runtime_image="r")))
    return {(each["kind"], each["metadata"]["name"]): each for each in children}


def test_a_trainer_is_accepted_by_the_coordinator_and_engines_connect_to_it_and_to_each_other() -> None:
    before, after = _children(), _children(weights=TRAINER)
    added = {}
    for key, old in before.items():
        if key[0] != "NetworkPolicy" or old == after[key]:
            continue
        added[key[1]] = {
            way: [rule for rule in after[key]["spec"].get(way, ()) if rule not in old["spec"].get(way, ())]
            for way in ("ingress", "egress")
        }
        assert all(rule in after[key]["spec"][way] for way in added[key[1]] for rule in old["spec"].get(way, ()))
    peers, weights = [PODS, FAR], [{"protocol": "TCP", "port": 5560}]
    engines = after["NetworkPolicy", "demo-coordinator"]["spec"]["ingress"][1]["from"]
    assert added == {
        "demo-coordinator": {"ingress": [{"from": peers, "ports": [{"protocol": "TCP", "port": 5557}]}], "egress": []},
        "demo-engines": {
            "ingress": [{"from": engines, "ports": weights}],
            "egress": [{"to": peers, "ports": [{"protocol": "TCP", "port": 7000}]}, {"to": engines, "ports": weights}],
        },
    }
    args = after["StatefulSet", "demo-engine-0"]["spec"]["template"]["spec"]["containers"][0]["args"]
    assert args[args.index("--weights-port") + 1] == "5560"
    vllm = _children(weights=TRAINER, engine={"backend": "VLLM"})["StatefulSet", "demo-engine-0"]["spec"]["template"]
    assert "--weights-port" in vllm["spec"]["containers"][0]["args"]
    two = _children(
        weights={"trainer": {"from": [FAR], "port": 9}}, parallelism={"tensor": 2}, engine={"ranksPerPod": 2}
    )
    egress = two["NetworkPolicy", "demo-engines"]["spec"]["egress"]
    assert {"to": [FAR], "ports": [{"protocol": "TCP", "port": 9}]} in egress
    assert {"to": engines, "ports": [{"protocol": "TCP", "port": 5560, "endPort": 5561}]} in egress


def test_a_coordinator_and_engines_mount_the_trainers_public_key_and_servers_do_not_restart() -> None:
    before, after = _children(), _children(weights=TRAINER)

    def keys(children: dict[tuple[str, str], Any], kind: str, name: str) -> list[str]:
        volumes = children[kind, name]["spec"]["template"]["spec"]["volumes"]
        return [item["key"] for volume in volumes if volume["name"] == "keys" for item in volume["secret"]["items"]]

    for kind, name in (("Deployment", "demo-coordinator"), ("StatefulSet", "demo-engine-0")):
        assert keys(after, kind, name) == [*keys(before, kind, name), "trainer.pub"]
    assert before["Deployment", "demo-server"] == after["Deployment", "demo-server"]
    other = {"trainer": {"from": [FAR]}}
    contexts = (
        RenderContext("demo", "ns", "uid", parse_spec(_trained(weights=weights)), Settings(runtime_image="r"))
        for weights in (TRAINER, other)
    )
    assert len(set(map(revision_of, contexts))) == 1, "other peers restart no engine"


def _files(cluster: Cluster) -> dict[str, list[str]]:
    data = cluster.objects[cluster.secret]["data"]
    return {name: base64.b64decode(text).decode().split() for name, text in data.items()}


def test_a_trainer_gets_keys_when_the_field_is_set_and_they_are_rotated_with_the_others() -> None:
    cluster = Cluster(MINIMAL).settled()
    before = _files(cluster)
    assert "trainer.key" not in before
    cluster.change(weights=TRAINER)
    added = _files(cluster)
    assert added == {**before, "trainer.key": added["trainer.key"], "trainer.pub": added["trainer.pub"]}
    assert is_sealed(cluster.objects[cluster.secret], cluster.admin)
    cluster.change(keys={"generation": 2})
    rotated = _files(cluster)
    assert [len(rotated[name]) for name in ("trainer.key", "trainer.pub")] == [1, 1]
    assert rotated["trainer.pub"] != added["trainer.pub"]
    assert not any(isinstance(action, RotateKeys) for action in cluster.step().actions)
    assert Cluster(_trained()).settled().objects[ChildRef("Secret", "demo-keys")]["data"].keys() == rotated.keys()


def test_keys_that_are_replaced_leave_none_of_a_former_trainer() -> None:
    cluster = Cluster(_trained()).settled()
    secret = cluster.objects[cluster.secret]
    secret["data"]["server.pub"] = ""
    ctx = RenderContext("demo", "default", "uid", parse_spec(MINIMAL), cluster.settings)
    patch = repair_patch(secret, ctx, cluster.admin, generation=2, since="2026-01-01T00:00:00Z")
    assert patch is not None
    merged = {name: text for name, text in {**secret["data"], **patch["data"]}.items() if text is not None}
    metadata = {**secret["metadata"], "annotations": patch["metadata"]["annotations"]}
    assert "trainer.pub" not in merged
    assert is_sealed({"metadata": metadata, "data": merged}, cluster.admin)


def _publish(cluster: Cluster, epoch: int, *, digests: tuple[str, str] = ("feed", "feed")) -> None:
    assert cluster.coordinator is not None
    cluster.coordinator.epoch = epoch
    for engine, digest in zip(cluster.coordinator.engines.values(), digests, strict=True):
        engine.epoch, engine.source, engine.digest = epoch, SOURCE.format(epoch), digest
    cluster.settle()


def test_the_status_has_the_weights_that_all_engines_serve_and_the_operator_sends_no_update(make_cluster: Any) -> None:
    cluster: Cluster = make_cluster(replicas=2, weights=TRAINER).settled()
    assert "weights" not in cluster.status
    _publish(cluster, 3)
    published = {"source": SOURCE.format(3), "epoch": 3, "digest": "feed"}
    assert cluster.status["weights"] == {**cluster.status["weights"], **published}
    assert cluster.condition("Degraded")["status"] == "False"
    engine = cluster.coordinator.engines["demo-engine-0"]
    engine.epoch, engine.digest = 4, ""  # its commit is reported before that of the other engine
    cluster.settle()
    assert cluster.status["weights"]["epoch"] == 3
    assert cluster.condition("Degraded")["status"] == "False"
    _publish(cluster, 4, digests=("feed", "beef"))
    assert cluster.status["weights"]["epoch"] == 3
    assert cluster.condition("Degraded")["reason"] == "WrongWeights"
    assert "beef, feed; publish the weights again" in cluster.condition("Degraded")["message"]
    _publish(cluster, 5)
    assert (cluster.status["weights"]["epoch"], cluster.condition("Degraded")["status"]) == (5, "False")
    assert cluster.signals() == []


def test_engines_that_lost_the_weights_of_the_trainer_are_reported_until_it_publishes(make_cluster: Any) -> None:
    """All pods were lost at once, so the engines serve the model's own weights."""
    cluster: Cluster = make_cluster(replicas=2, weights=TRAINER).settled()
    _publish(cluster, 3)
    cluster.coordinator.epoch = 0
    for engine in cluster.coordinator.engines.values():
        engine.epoch, engine.source, engine.digest = 0, "", "base"
    cluster.settle()
    assert cluster.condition("Degraded")["reason"] == "WrongWeights"
    assert "no engine had the weights of epoch 3" in cluster.condition("Degraded")["message"]
    assert cluster.status["weights"]["epoch"] == 3
    assert cluster.signals() == []
    _publish(cluster, 1)
    assert (cluster.status["weights"]["epoch"], cluster.condition("Degraded")["status"]) == (1, "False")


def test_an_engine_that_waits_for_the_trainer_is_reported_with_the_cause(make_cluster: Any) -> None:
    cluster: Cluster = make_cluster(replicas=2, weights=TRAINER).settled()
    _publish(cluster, 3)
    waiting = cluster.coordinator.engines["demo-engine-1"]
    waiting.serving, waiting.weights_unavailable = False, "no trainer answered at tcp://10.1.2.3:7000"
    cluster.step()
    assert cluster.condition("Degraded")["reason"] == "WeightsUnavailable"
    assert "engine demo-engine-1: no trainer answered" in cluster.condition("Degraded")["message"]
    assert cluster.status["weights"]["epoch"] == 3
    waiting.serving, waiting.weights_unavailable = True, None
    cluster.settle()
    assert cluster.condition("Degraded")["status"] == "False"


def test_a_rollout_of_such_engines_sends_no_update(make_cluster: Any) -> None:
    cluster: Cluster = make_cluster(replicas=2, weights=TRAINER).settled()
    _publish(cluster, 3)
    pods = set(cluster.deleted_pods)
    cluster.change(engine={"batching": {"maxRequests": 3}})
    assert set(cluster.deleted_pods) != pods
    assert "UPDATE_WEIGHTS" not in cluster.signals()
    assert cluster.status["updatedReplicas"] == 2
