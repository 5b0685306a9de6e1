"""Keys are rotated in stages; a stage begins when the previous one is confirmed."""

from __future__ import annotations

import base64
import itertools
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import zmq
from in_memory_cluster import MINIMAL, Cluster

from megatron_operator.decision.actions import ApplyChild, RotateKeys
from megatron_operator.decision.decide import decide
from megatron_operator.decision.world import ApplyRejection, ChildRef
from megatron_operator.render.keys import AFTER, KEY_NAMES, next_files
from megatron_operator.resource.states import KeyStage
from megatron_runtime.transport.security import generate_key_files

PAIRS = ("server", "engine", "client")


def _running(**spec: Any) -> Cluster:
    cluster = Cluster({**MINIMAL, **spec}).settled()
    assert cluster.status["keys"]["generation"] == 1
    return cluster


def _files(cluster: Cluster) -> dict[str, list[str]]:
    data = cluster.objects[cluster.secret]["data"]
    return {name: base64.b64decode(text).decode().split() for name, text in data.items()}


def test_a_raised_generation_replaces_every_pair_and_restarts_the_coordinator_once() -> None:
    cluster = _running()
    before = _files(cluster)
    cluster.change(keys={"generation": 3})
    after = _files(cluster)
    for name in (f"{role}.{half}" for role in PAIRS for half in ("key", "pub")):
        assert len(after[name]) == 1
        assert after[name] != before[name], name
    assert after["admin.pub"] == before["admin.pub"]
    assert cluster.status["keys"]["generation"] == 3
    assert cluster.status["keys"]["stage"] == "Settled"
    assert cluster.log.count("the coordinator is restarted") == 1
    assert cluster.state == "Running"
    assert [event.reason for event in cluster.events].count("KeysRotated") == 1
    assert cluster.deleted_pods == []


def test_the_same_generation_again_and_a_lower_one_do_nothing() -> None:
    cluster = _running(keys={"generation": 1})
    cluster.change(keys={"generation": 4})
    held = _files(cluster)
    cluster.change(keys={"generation": 2})
    assert _files(cluster) == held


def test_old_keys_are_removed_only_after_no_process_uses_them() -> None:
    cluster = _running()
    cluster.kubelet_brings_keys = False
    cluster.patch(keys={"generation": 2})
    cluster.play(30)
    assert cluster.status["keys"]["stage"] == "Admitting"
    assert "a kubelet updates" in cluster.status["plan"]["waitingOn"]
    assert cluster.condition("Ready")["status"] == "True"
    assert cluster.condition("Ready")["reason"] == "RotatingKeys"
    cluster.kubelet_brings_keys = True
    cluster.settle()
    assert cluster.status["keys"]["stage"] == "Settled"


def test_keys_are_rotated_at_their_maximum_age_once() -> None:
    cluster = _running(keys={"rotateAfterDays": 30})
    cluster.now += timedelta(days=29)
    cluster.settle()
    assert cluster.status["keys"]["generation"] == 1
    cluster.now += timedelta(days=2)
    cluster.settle()
    assert cluster.status["keys"]["generation"] == 2
    cluster.now += timedelta(days=20)
    cluster.settle()
    assert cluster.status["keys"]["generation"] == 2


def test_a_rotation_waits_while_paused_and_goes_on_when_it_runs() -> None:
    cluster = _running()
    cluster.change(desiredState="Paused")
    held = _files(cluster)
    cluster.change(keys={"generation": 2})
    assert _files(cluster) == held
    cluster.change(desiredState="Running")
    assert cluster.status["keys"]["generation"] == 2


def test_a_revision_whose_check_fails_delays_no_rotation() -> None:
    cluster = _running(replicas=2)
    cluster.check = lambda arguments: (1, '{"reason": "ModelSourceError", "message": "no such model"}')
    cluster.change(model={"source": {"builtin": "smollm2-153m"}})
    assert cluster.condition("Degraded")["reason"] == "WeightsMissing"
    cluster.change(keys={"generation": 2})
    assert (cluster.status["keys"]["generation"], cluster.status["keys"]["stage"]) == (2, "Settled")
    assert cluster.condition("Degraded")["reason"] == "WeightsMissing"
    assert (cluster.state, cluster.status["ready"], cluster.deleted_pods) == ("Running", "2/2", [])


def test_an_engine_that_fails_its_canary_delays_no_rotation() -> None:
    cluster = _running(replicas=2)
    cluster.wrong_engines.add("demo-engine-1")
    cluster.change(engine={"batching": {"maxRequests": 7}})
    assert cluster.condition("Degraded")["reason"] == "CanaryFailed"
    cluster.change(keys={"generation": 2})
    assert (cluster.status["keys"]["generation"], cluster.status["keys"]["stage"]) == (2, "Settled")


def test_an_operator_that_dies_between_any_two_actions_ends_with_the_same_generation() -> None:
    cluster = _running()
    cluster.patch(keys={"generation": 2})
    for pass_number in range(40):
        cluster.step(crash_after=pass_number % 2)
        cluster.tick()
    cluster.settle()
    assert cluster.status["keys"] == {**cluster.status["keys"], "generation": 2, "stage": "Settled"}
    assert cluster.log.count("the coordinator is restarted") == 1


def test_a_lost_secret_is_re_created_as_another_generation() -> None:
    cluster = _running()
    del cluster.objects[cluster.secret]
    cluster.settle()
    assert cluster.status["keys"]["generation"] == 2
    assert cluster.log.count("the coordinator is restarted") == 1


def test_a_secret_that_cannot_be_read_restarts_nothing() -> None:
    cluster = _running()
    cluster.change(keys={"generation": 2})
    template = cluster.objects[ChildRef("Deployment", "demo-coordinator", "apps/v1")]["spec"]["template"]
    decision = decide(replace(cluster.world(), keys=None))
    applied = [action for action in decision.actions if isinstance(action, ApplyChild)]
    assert not [action for action in applied if action.manifest["spec"].get("template") != template]


def test_a_new_admin_key_is_accepted_and_the_old_one_rejected() -> None:
    cluster = _running()
    cluster.admin = type(cluster.admin).generate()
    cluster.settle()
    assert _files(cluster)["admin.pub"] == [cluster.admin.public.decode()]


def test_a_secret_that_cannot_be_written_is_named_and_retried_with_backoff() -> None:
    cluster = _running()
    cluster.patch(keys={"generation": 2})
    cluster.rejections[cluster.secret] = ApplyRejection(
        "", 422, "field is immutable when `immutable` is set", cluster.now
    )
    for _ in range(10):
        decision = cluster.step()
        assert not [action for action in decision.actions if isinstance(action, RotateKeys)]
        cluster.tick()
    assert cluster.condition("Ready")["reason"] == "ChildRefused"
    assert "field is immutable" in cluster.status["plan"]["waitingOn"]
    cluster.now += timedelta(minutes=1)
    cluster.settle()
    assert cluster.status["keys"]["generation"] == 2


def test_a_decision_made_from_an_older_secret_is_rejected() -> None:
    cluster = _running()
    with pytest.raises(ValueError, match="not the stage before Restarting"):
        cluster.act(RotateKeys("demo-keys", 2, KeyStage.RESTARTING))


def test_in_adjacent_rotation_stages_every_pair_of_processes_can_connect() -> None:
    files: dict[str, str] = generate_key_files()
    stage, seen = KeyStage.SETTLED, [files]
    for _ in AFTER:
        stage = AFTER[stage]
        files = next_files(files, stage, fresh=generate_key_files())
        assert set(files) >= set(KEY_NAMES)
        seen.append(files)
    for older, newer in itertools.pairwise(seen):
        for coordinator, peer in ((older, newer), (newer, older), (older, older), (newer, newer)):
            for role in ("engine", "client"):
                own = peer[f"{role}.key"].split()[0]
                admitted = coordinator[f"{role}.pub"].split()
                assert _public(own) in admitted
            assert _public(coordinator["server.key"].split()[0]) in peer["server.pub"].split()


def _public(secret: str) -> str:

    return zmq.curve_public(secret.encode()).decode()
