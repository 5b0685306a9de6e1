"""Prefill and decode engines: their manifests, and their numbers, rollouts and status on the small cluster."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

import pytest
from in_memory_cluster import Cluster
from pydantic import ValidationError
from soak import size

from megatron_operator.decision.reduce import reduce_pod
from megatron_operator.explain import explanation
from megatron_operator.render.children import all_children
from megatron_operator.render.context import NotAllowed, RenderContext, scale_selector
from megatron_operator.render.engine import revision_of
from megatron_operator.render.revision import context_of, has_inputs, revision_child
from megatron_operator.resource.names import DECODE, PREFILL
from megatron_operator.resource.pod_policy import PodPolicy
from megatron_operator.resource.settings import Settings
from megatron_operator.resource.spec import parse_spec

ROLE = "inference.megatron.dev/role"
CHANGE = {"batching": {"maxRequests": 7}}
VLLM = {"backend": "VLLM", "vllm": {"allowNixlBetweenPods": True}}
SETTINGS = Settings(runtime_image="runtime:1", pod_policy=PodPolicy())
Spec = dict[str, Any]


def context(
    prefill: Spec | None = None,
    *,
    decode: Spec | None = None,
    replicas: int = 2,
    parallelism: Spec | None = None,
    **engine: Any,
) -> RenderContext:
    roles = {"prefill": prefill or {}, **({"decode": decode} if decode is not None else {})}
    spec = {
        "model": {"source": {"builtin": "smollm2-135m"}},
        "replicas": replicas,
        "engine": {"roles": roles, **engine},
        "parallelism": parallelism or {},
    }
    return RenderContext("demo", "default", "uid", parse_spec(spec), SETTINGS)


def by_name(ctx: RenderContext, kind: str) -> dict[str, dict[str, Any]]:
    return {each["metadata"]["name"]: each for each in all_children(ctx) if each["kind"] == kind}


def engine_container(manifest: Spec) -> Spec:
    found: Spec = manifest["spec"]["template"]["spec"]["containers"][0]
    return found


def option(manifest: Spec, flag: str) -> str | None:
    args = engine_container(manifest)["args"]
    return args[args.index(flag) + 1] if flag in args else None


# --- Manifests --------------------------------------------------------------------------------------------------


def test_engines_of_both_roles_have_their_role_and_the_port_for_kv() -> None:
    engines = by_name(context({"replicas": 1}), "StatefulSet")
    roles = {name: option(manifest, "--role") for name, manifest in engines.items()}
    assert roles == {"demo-engine-0": "decode", "demo-engine-1": "decode", "demo-prefill-0": "prefill"}
    for name, manifest in engines.items():
        assert option(manifest, "--kv-port") == "5558"
        assert option(manifest, "--name") == name
        assert {"name": "kv", "containerPort": 5558} in engine_container(manifest)["ports"]
        for labels in (manifest["metadata"]["labels"], manifest["spec"]["template"]["metadata"]["labels"]):
            assert labels[ROLE] == roles[name]
        assert ROLE not in manifest["spec"]["selector"]["matchLabels"], "selectors cannot change when a spec gets roles"
    assert set(by_name(context({"replicas": 1}), "Service")) >= set(engines)


def test_engines_of_all_roles_have_one_revision_which_their_numbers_do_not_change() -> None:
    """Engines exchange KV only within a revision."""
    labels = {
        manifest["spec"]["template"]["metadata"]["labels"]["inference.megatron.dev/revision"]
        for manifest in by_name(context(), "StatefulSet").values()
    }
    assert labels == {revision_of(context({"replicas": 5}, replicas=3))} == {revision_of(context({"perDecode": 0.5}))}
    other = context(decode={"batching": {"maxRequests": 3}})
    assert revision_of(other) not in labels
    assert revision_of(other.of_role(PREFILL)) == revision_of(other.of_role(DECODE)) == revision_of(other)


def test_a_recorded_revision_renders_both_roles_again_and_has_no_numbers() -> None:
    ctx = context({"replicas": 3, "batching": {"maxTokens": 4096}}, decode={"batching": {"maxRequests": 3}})
    record = revision_child(ctx)
    stored = context_of(context(), record["data"], revision=revision_of(ctx))
    assert stored is not None
    prefill, decode = (stored.of_role(role).spec.engine.batching for role in (PREFILL, DECODE))
    assert (prefill.max_tokens, prefill.max_requests, decode.max_requests) == (4096, None, 3)
    scaled = context({"perDecode": 2, "batching": {"maxTokens": 4096}}, decode={"batching": {"maxRequests": 3}})
    assert has_inputs(scaled, record["data"])
    assert not has_inputs(context(), record["data"])


def test_the_settings_of_a_role_replace_those_of_all_engines() -> None:
    def with_memory(memory: str) -> Spec:
        return {"spec": {"containers": [{"name": "engine", "resources": {"limits": {"memory": memory}}}]}}

    prefill = {"batching": {"maxTokens": 8192, "kvCacheMemory": "1Gi"}, "podTemplate": with_memory("3Gi")}
    decode = {"batching": {"maxPrefillTokens": 128}}
    common = {"batching": {"maxTokens": 512, "blockSizeTokens": 64}, "podTemplate": with_memory("9Gi")}
    engines = by_name(context(prefill, decode=decode, **common), "StatefulSet")

    def settings(name: str) -> list[Any]:
        flags = ("--max-tokens", "--kv-cache-memory", "--max-prefill-tokens", "--block-size-tokens")
        memory = engine_container(engines[name])["resources"]["limits"]["memory"]
        return [*(option(engines[name], flag) for flag in flags), memory]

    assert settings("demo-prefill-0") == ["8192", "1Gi", None, "64", "3Gi"]
    assert settings("demo-engine-0") == ["512", "2Gi", "128", "64", "9Gi"]


def test_engines_of_several_pods_can_have_roles() -> None:
    engines = by_name(context({"replicas": 1}, parallelism={"tensor": 2}, ranksPerPod=1), "StatefulSet")
    assert {name: manifest["spec"]["replicas"] for name, manifest in engines.items()} == dict.fromkeys(
        ("demo-engine-0", "demo-engine-1", "demo-prefill-0"), 2
    )
    assert option(engines["demo-prefill-0"], "--role") == "prefill"


def test_the_pod_policy_names_the_field_of_the_role() -> None:
    template = {"spec": {"containers": [{"name": "engine", "command": ["sh"]}]}}
    with pytest.raises(NotAllowed, match=r"^spec\.engine\.roles\.prefill\.podTemplate\.spec\.containers\[0\]\.command"):
        all_children(context({"podTemplate": template}))
    with pytest.raises(NotAllowed, match=r"^spec\.engine\.podTemplate\.spec"):
        all_children(context(podTemplate=template))


def test_only_engines_of_the_resource_reach_the_port_for_kv_of_engines() -> None:
    policies = by_name(context(), "NetworkPolicy")
    kv = {"protocol": "TCP", "port": 5558}
    rules = {name: policy for name, policy in policies.items() if kv["port"] in _ports(policy["spec"])}
    assert set(rules) == {"demo-engines"}
    engines = {"app.kubernetes.io/name": "megatron-inference", "app.kubernetes.io/instance": "demo"}
    engines["app.kubernetes.io/component"] = "engine"
    peer = [{"podSelector": {"matchLabels": engines}}]
    assert {"from": peer, "ports": [kv]} in rules["demo-engines"]["spec"]["ingress"]
    assert {"to": peer, "ports": [kv]} in rules["demo-engines"]["spec"]["egress"]


def _ports(value: Any) -> Iterator[int]:
    if isinstance(value, dict):
        for key, each in value.items():
            yield from [each] if key == "port" else _ports(each)
    elif isinstance(value, list):
        for each in value:
            yield from _ports(each)


def test_each_role_has_a_disruption_budget_and_autoscalers_see_decode_engines_only() -> None:
    budgets = by_name(context(), "PodDisruptionBudget")
    assert set(budgets) == {"demo-engines", "demo-prefill", "demo-server"}
    assert budgets["demo-prefill"]["spec"]["selector"]["matchLabels"][ROLE] == "prefill"
    # An engine from before the roles has no label, and generates.
    (rule,) = budgets["demo-engines"]["spec"]["selector"]["matchExpressions"]
    assert rule == {"key": ROLE, "operator": "NotIn", "values": ["prefill"]}
    assert scale_selector(context()).endswith(f",{ROLE} notin (prefill)")


@pytest.mark.parametrize(
    ("prefill", "replicas", "count"),
    [
        ({}, 2, 1),
        ({"replicas": 0}, 2, 0),
        ({"replicas": 3}, 0, 3),
        ({"perDecode": 0.5}, 3, 2),
        ({"perDecode": 0.1}, 30, 3),
        ({"perDecode": 1.5}, 2, 3),
        ({"perDecode": 2}, 0, 0),
        ({"perDecode": 64}, 1024, 1024),
    ],
    ids=str,
)
def test_the_number_of_prefill_engines(prefill: Spec, replicas: int, count: int) -> None:
    assert context(prefill, replicas=replicas).spec.engines_of(PREFILL) == count


@pytest.mark.parametrize(
    ("engine", "more", "message"),
    [
        (
            {"roles": {"prefill": {"replicas": 1, "perDecode": 1}}},
            {},
            r"spec\.engine\.roles\.prefill\.perDecode: not allowed together with .*\.replicas; remove one of the two",
        ),
        (
            {"roles": {"prefill": {}}, "backend": "VLLM", "gpusPerPod": 1},
            {},
            r"spec\.engine\.vllm\.allowNixlBetweenPods: .* without authentication; set it to true",
        ),
        (
            {"roles": {"prefill": {}}, "batching": {"prefixCaching": False}},
            {},
            r"spec\.engine\.batching\.prefixCaching: is false, .*set it to true, or remove spec\.engine\.roles",
        ),
        *(
            (
                {"roles": {"prefill": {}}, "ranksPerPod": per_pod, **VLLM},
                {"parallelism": sizes},
                r"spec\.engine\.roles: vLLM engines exchange KV only if an engine fits in one pod",
            )
            for sizes, per_pod in (({"tensor": 2}, 1), ({"pipeline": 2}, 2), ({"data": 2}, 2))
        ),
        (
            {"roles": {"prefill": {}, "decode": {"batching": {"maxTokens": 4}}}, "batching": {"maxRequests": 8}},
            {},
            r"spec\.engine\.roles\.decode\.batching: maxTokens must be at least maxRequests",
        ),
        (
            {"roles": {"prefill": {"batching": {"maxRequests": 9}}}, "batching": {"maxTokens": 8}},
            {},
            r"spec\.engine\.roles\.prefill\.batching: maxTokens must be at least maxRequests",
        ),
        (
            {
                "roles": {"prefill": {}, "decode": {"batching": {"maxPrefillTokens": 64}}},
                "batching": {"chunkedPrefill": False},
            },
            {},
            r"spec\.engine\.roles\.decode\.batching\.maxPrefillTokens: not allowed without .*chunkedPrefill; enable",
        ),
    ],
)
def test_what_engines_with_roles_cannot_have_is_rejected(engine: Spec, more: Spec, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        parse_spec({"model": {"source": {"builtin": "smollm2-135m"}}, "engine": engine, **more})


def test_vllm_engines_of_several_ranks_in_one_pod_may_have_roles() -> None:
    engine = {"roles": {"prefill": {}}, "ranksPerPod": 4, **VLLM}
    parallelism = {"tensor": 2, "expert": 2}
    parse_spec({"model": {"source": {"builtin": "smollm2-135m"}}, "engine": engine, "parallelism": parallelism})


# --- On the small cluster ----------------------------------------------------------------------------------------


def roles_of(prefill: Spec) -> Spec:
    return {"roles": {"prefill": prefill}}


@pytest.fixture
def cluster(make_cluster: Any) -> Cluster:
    found: Cluster = make_cluster(replicas=2, engine=roles_of({"replicas": 1})).settled()
    return found


def counts(cluster: Cluster) -> dict[str, tuple[int, int, int]]:
    """Return desired, ready and updated engines by role."""
    return {each["name"]: (each["desired"], each["ready"], each["updated"]) for each in cluster.status["roles"]}


def missing(cluster: Cluster) -> tuple[str, str]:
    found = cluster.condition("RoleMissing")
    return found["status"], found["reason"]


def engines(cluster: Cluster) -> list[str]:
    return sorted(entry["name"] for entry in cluster.status["engines"])


def test_a_resource_without_roles_has_no_status_of_roles(make_cluster: Any) -> None:
    plain = make_cluster(replicas=2).settled()
    assert "roles" not in plain.status
    assert not any("role" in entry for entry in plain.status["engines"])
    assert "RoleMissing" not in [entry["type"] for entry in plain.status["conditions"]]


def test_the_status_counts_engines_by_role_and_scale_counts_decode_engines(cluster: Cluster) -> None:
    status = cluster.status
    assert counts(cluster) == {"decode": (2, 2, 2), "prefill": (1, 1, 1)}
    assert (status["ready"], status["replicas"], status["readyReplicas"], status["updatedReplicas"]) == ("3/3", 2, 2, 2)
    assert [(entry["name"], entry["role"]) for entry in status["engines"]] == [
        ("demo-engine-0", "decode"),
        ("demo-engine-1", "decode"),
        ("demo-prefill-0", "prefill"),
    ]
    assert missing(cluster) == ("False", "AllWell")
    lines = explanation({"metadata": {"name": "demo"}, "spec": cluster.spec, "status": status})
    assert any(line.lstrip().startswith("engines 0-1 ") for line in lines)
    assert any(line.lstrip().startswith("demo-prefill-0 ") for line in lines)


def test_decode_engines_are_scaled_to_zero_and_back_while_prefill_engines_serve(cluster: Cluster) -> None:
    cluster.change(replicas=0)
    assert cluster.state == "Running"
    assert engines(cluster) == ["demo-prefill-0"]
    assert missing(cluster) == ("True", "NoDecodeEngine")
    assert cluster.condition("RoleMissing")["message"] == (
        "no decode engine serves, so prefill engines generate; raise spec.replicas"
    )
    assert [cluster.condition(kind)["status"] for kind in ("Ready", "EnginesReady", "Degraded")] == [
        "True",
        "True",
        "False",
    ]
    assert cluster.signals() == ["DRAIN demo-engine-1", "DRAIN demo-engine-0"]
    cluster.change(replicas=1)
    assert engines(cluster) == ["demo-engine-0", "demo-prefill-0"]
    assert missing(cluster) == ("False", "AllWell")


def test_prefill_engines_are_scaled_to_zero_and_back_while_decode_engines_serve(cluster: Cluster) -> None:
    pods = {name: pod["metadata"]["uid"] for name, pod in cluster.pods.items() if "engine" in name}
    cluster.change(engine=roles_of({"replicas": 0}))
    assert cluster.signals() == ["DRAIN demo-prefill-0"]
    assert engines(cluster) == ["demo-engine-0", "demo-engine-1"]
    assert missing(cluster) == ("True", "NoPrefillEngine")
    assert cluster.condition("RoleMissing")["message"].endswith("; raise spec.engine.roles.prefill.replicas")
    assert not [ref for ref in cluster.objects if ref.name == "demo-prefill-0"], "no child of it is left"
    cluster.change(engine=roles_of({"replicas": 2}))
    assert counts(cluster)["prefill"] == (2, 2, 2)
    assert pods == {name: pod["metadata"]["uid"] for name, pod in cluster.pods.items() if "engine" in name}


def test_the_resource_is_suspended_if_neither_role_has_an_engine(cluster: Cluster) -> None:
    cluster.patch(engine=roles_of({"replicas": 0}))
    cluster.change(replicas=0)
    assert cluster.state == "Suspended"
    assert missing(cluster) == ("False", "Suspended")
    assert "because spec.replicas and spec.engine.roles.prefill.replicas are 0" in cluster.condition("Ready")["message"]
    cluster.change(engine=roles_of({"replicas": 1}))
    assert (cluster.state, engines(cluster)) == ("Running", ["demo-prefill-0"])


def test_the_ratio_follows_the_number_of_decode_engines(make_cluster: Any) -> None:
    cluster = make_cluster(replicas=1, engine=roles_of({"perDecode": 0.5})).settled()
    assert counts(cluster) == {"decode": (1, 1, 1), "prefill": (1, 1, 1)}
    cluster.change(replicas=4)
    assert counts(cluster) == {"decode": (4, 4, 4), "prefill": (2, 2, 2)}
    cluster.change(replicas=2)
    assert counts(cluster) == {"decode": (2, 2, 2), "prefill": (1, 1, 1)}
    cluster.change(replicas=0)
    assert (cluster.state, cluster.engine_pods()) == ("Suspended", [])


def unavailable(cluster: Cluster, role: str, wanted: int) -> int:
    assert cluster.coordinator is not None
    kind = {PREFILL: "-prefill-", DECODE: "-engine-"}[role]
    serving = (name for name, each in cluster.coordinator.engines.items() if each.serving and not each.draining)
    return wanted - sum(kind in name for name in serving)


def test_a_rollout_replaces_prefill_engines_then_decode_engines_one_at_a_time(make_cluster: Any) -> None:
    cluster = make_cluster(replicas=2, engine=roles_of({"replicas": 2})).settled()
    cluster.patch(engine=CHANGE)
    for _ in range(60):
        cluster.play(1)
        assert unavailable(cluster, PREFILL, 2) + unavailable(cluster, DECODE, 2) <= 1
    names = ["demo-prefill-1", "demo-prefill-0", "demo-engine-1", "demo-engine-0"]
    assert cluster.signals() == [f"DRAIN {name}" for name in names]
    assert cluster.asked == names
    assert len(set(cluster.checked)) == len(cluster.checked) == 1
    assert counts(cluster) == {"decode": (2, 2, 2), "prefill": (2, 2, 2)}
    cluster.settle()


def test_a_change_of_one_role_is_a_new_revision_of_both(cluster: Cluster) -> None:
    before = cluster.status["revision"]
    cluster.change(engine=roles_of({"replicas": 1, "batching": {"maxRequests": 3}}))
    assert {entry["revision"] for entry in cluster.status["engines"]} == {cluster.status["revision"]} != {before}


def test_a_wrong_revision_stops_at_the_first_prefill_engine(cluster: Cluster) -> None:
    cluster.wrong_engines.add("demo-prefill-0")
    cluster.patch(engine=CHANGE)
    cluster.play(40)
    assert cluster.condition("Degraded")["reason"] == "CanaryFailed"
    assert not any("demo-engine" in name for name in cluster.deleted_pods)
    assert unavailable(cluster, DECODE, 2) == 0


def test_a_surge_engine_has_the_role_of_the_engine_that_it_replaces(make_cluster: Any) -> None:
    cluster = make_cluster(replicas=1, engine=roles_of({"replicas": 1}), rollout={"maxSurge": 1}).settled()
    cluster.patch(engine=CHANGE)
    added = set()
    for _ in range(80):
        cluster.play(1)
        added |= set(cluster.engine_pods())
        assert unavailable(cluster, PREFILL, 1) <= 0
        assert unavailable(cluster, DECODE, 1) <= 0
        assert cluster.status["ready"] == "2/2"
    assert added == {f"demo-{kind}-{index}-0" for kind in ("engine", "prefill") for index in (0, 1)}
    assert engines(cluster) == ["demo-engine-0", "demo-prefill-0"]
    cluster.settle()


@pytest.mark.parametrize("state", ["Paused", "Suspended", "Stopped"])
def test_verbs_include_engines_of_both_roles(cluster: Cluster, state: str) -> None:
    cluster.change(desiredState=state)
    assert cluster.state == state
    assert len(cluster.engine_pods()) == (0 if state == "Stopped" else 3)
    cluster.change(desiredState="Running")
    assert counts(cluster) == {"decode": (2, 2, 2), "prefill": (1, 1, 1)}


def test_pods_of_both_roles_are_released_and_return(cluster: Cluster) -> None:
    cluster.change(desiredState="Suspended", lifecycle={"suspend": {"level": "ReleasePods"}})
    assert (cluster.state, cluster.engine_pods(), missing(cluster)) == ("Suspended", [], ("False", "Suspended"))
    cluster.change(desiredState="Running")
    assert missing(cluster) == ("False", "AllWell")


def test_a_prefill_engine_that_cannot_start_is_named_and_the_decode_engines_serve(make_cluster: Any) -> None:
    cluster = make_cluster(replicas=1, engine=roles_of({"replicas": 1}))
    cluster.broken_engines.add("demo-prefill-0")
    cluster.play(12)
    assert (cluster.state, cluster.condition("Ready")["status"]) == ("Running", "True")
    assert missing(cluster) == ("True", "NoPrefillEngine")
    assert "waiting for engine demo-prefill-0: " in cluster.condition("RoleMissing")["message"]
    assert cluster.condition("EnginesReady")["message"].startswith("1 of 2 engines are registered")
    assert cluster.condition("Degraded")["status"] == "True"


def test_a_prefill_engine_on_a_lost_node_is_deleted_by_force_and_returns(cluster: Cluster) -> None:
    cluster.lose_node("demo-prefill-0")
    cluster.play_until(lambda: missing(cluster) == ("True", "NoPrefillEngine"))
    assert cluster.condition("Ready")["status"] == "True"
    cluster.play_until(lambda: missing(cluster) == ("False", "AllWell"), limit=400)
    assert any(event.reason == "PodForceDeleted" for event in cluster.events)


def test_a_resource_gets_roles_and_loses_them_without_an_outage(make_cluster: Any) -> None:
    cluster = make_cluster(replicas=2).settled()

    def play() -> None:
        for _ in range(60):
            cluster.play(1)
            assert unavailable(cluster, DECODE, 2) <= 1
        cluster.settle()

    cluster.patch(engine=roles_of({"replicas": 1}))
    play()
    assert counts(cluster) == {"decode": (2, 2, 2), "prefill": (1, 1, 1)}
    labels = {name: pod["metadata"]["labels"].get(ROLE) for name, pod in cluster.pods.items() if reduce_pod(pod).engine}
    assert labels == {"demo-engine-0-0": "decode", "demo-engine-1-0": "decode", "demo-prefill-0-0": "prefill"}
    cluster.patch(engine={"roles": None})
    cluster.spec["engine"].pop("roles")
    play()
    assert engines(cluster) == ["demo-engine-0", "demo-engine-1"]
    assert "roles" not in cluster.status
    assert not [ref for ref in cluster.objects if "prefill" in ref.name]


def test_changes_in_any_order_end_as_the_last_spec_asks_for(make_cluster: Any) -> None:
    """At every moment an engine serves, unless the spec asks for none or another state."""
    rng = random.Random(7)
    for _ in range(size(12, soak=600)):
        cluster = make_cluster(replicas=2, engine=roles_of({"replicas": 2})).settled()
        steps = [
            {"replicas": rng.randrange(1, 4)},
            {"engine": roles_of({"replicas": rng.randrange(3)})},
            {"engine": roles_of({"perDecode": rng.choice((0.5, 1, 2))})},
            {"engine": {"batching": {"maxRequests": rng.randrange(5, 8)}}},
            {"rollout": {"maxSurge": rng.randrange(2), "paused": False}},
        ]
        for fields in rng.sample(steps, 3):
            cluster.patch(**copy.deepcopy(fields))
            for _ in range(rng.randrange(1, 25)):
                cluster.step(crash_after=rng.choice((None, None, 0, 1)))
                cluster.tick()
                serving = [each for each in cluster.coordinator.engines.values() if each.serving and not each.draining]
                assert serving, (fields, cluster.log[-5:])
        cluster.settle(limit=200)
        spec = parse_spec(cluster.spec)
        wanted = {role: (spec.engines_of(role),) * 3 for role in (DECODE, PREFILL)}
        assert counts(cluster) == wanted, (steps, cluster.log[-3:])
        assert cluster.condition("Progressing")["status"] == "False"
