"""The front door: which objects a spec has, what they route, and that they go with their field of the spec."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from in_memory_cluster import MINIMAL, Cluster

from megatron_operator.model.pod_policy import PodPolicy
from megatron_operator.model.resource import parse_spec
from megatron_operator.model.settings import Settings
from megatron_operator.plan.decide import decide
from megatron_operator.plan.world import ApplyChild, ChildRef, DeleteChild, Rejection
from megatron_operator.render.context import NotAllowed, RenderContext
from megatron_operator.render.front_door import GATEWAY, INFERENCE, NETWORKING, front_door
from megatron_operator.render.server import server_deployment

SERVICE = ChildRef("Service", "demo")
INGRESS, ROUTE = ChildRef("Ingress", "demo", NETWORKING), ChildRef("HTTPRoute", "demo", GATEWAY)
POOL = ChildRef("InferencePool", "demo", INFERENCE)
PICKER: dict[str, Any] = {"endpointPickerRef": {"name": "picker"}}
GATEWAYS: dict[str, Any] = {"parentRefs": [{"name": "gateway"}]}


def rendered(server: dict[str, Any], *, policy: PodPolicy | None = None, **fields: Any) -> dict[str, dict[str, Any]]:
    """Return the specs of the front door by kind."""
    spec = parse_spec({**MINIMAL, **fields, "server": server})
    ctx = RenderContext("demo", "default", "u", spec, Settings(runtime_image="runtime:1", pod_policy=policy))
    manifests = [build() for build in front_door(ctx).values()]
    return {manifest["kind"]: manifest["spec"] for manifest in manifests}


def test_without_fields_there_is_a_service_of_the_default_type() -> None:
    found = rendered({})
    assert set(found) == {"Service"}
    assert "type" not in found["Service"]


@pytest.mark.parametrize(
    ("server", "port"), [({}, 80), ({"tls": {"secretName": "certificate"}}, 443)], ids=["HTTP", "HTTPS"]
)
def test_ingress_and_route_use_the_port_of_the_service(server: dict[str, Any], port: int) -> None:
    found = rendered({**server, "ingress": {}, "httpRoute": GATEWAYS})
    assert found["Service"]["ports"][0]["port"] == port
    path = found["Ingress"]["rules"][0]["http"]["paths"][0]
    assert path["backend"]["service"] == {"name": "demo", "port": {"number": port}}
    assert found["HTTPRoute"]["rules"][0]["backendRefs"] == [{"name": "demo", "port": port}]


@pytest.mark.parametrize(
    ("ingress", "wanted"),
    [
        ({}, {"rules": [None]}),
        ({"hosts": ["a.example", "b.example"], "className": "c"}, {"rules": ["a.example", "b.example"], "class": "c"}),
        (
            {"hosts": ["a.example"], "tlsSecretName": "s"},
            {"rules": ["a.example"], "tls": [{"hosts": ["a.example"], "secretName": "s"}]},
        ),
    ],
)
def test_hosts_class_and_certificate_of_an_ingress(ingress: dict[str, Any], wanted: dict[str, Any]) -> None:
    spec = rendered({"ingress": ingress})["Ingress"]
    assert [rule.get("host") for rule in spec["rules"]] == wanted["rules"]
    assert (spec.get("ingressClassName"), spec.get("tls")) == (wanted.get("class"), wanted.get("tls"))


def test_a_route_with_a_header_matches_the_model_and_its_adapters_by_name() -> None:
    source = {"huggingFace": {"repo": "org/adapter"}}
    names = [f"adapter-{index}" for index in range(3)]
    model = {**MINIMAL["model"], "name": "org/base", "adapters": [{"name": name, "source": source} for name in names]}
    (rule,) = rendered({"httpRoute": {**GATEWAYS, "modelHeader": "x-model"}}, model=model)["HTTPRoute"]["rules"]
    assert [match["headers"][0]["value"] for match in rule["matches"]] == ["org/base", *names]
    assert "filters" not in rule


def test_a_route_with_a_path_prefix_removes_it() -> None:
    (rule,) = rendered({"httpRoute": {**GATEWAYS, "pathPrefix": "/a/b"}})["HTTPRoute"]["rules"]
    assert rule["matches"] == [{"path": {"type": "PathPrefix", "value": "/a/b"}}]
    assert rule["filters"][0]["urlRewrite"]["path"]["replacePrefixMatch"] == "/"


@pytest.mark.parametrize(
    ("key", "policy", "allowed"),
    [
        ("service.beta.kubernetes.io/internal", PodPolicy(), True),
        ("inference.megatron.dev/hash", None, False),
        ("nginx.ingress.kubernetes.io/server-snippet", PodPolicy(), False),
        ("nginx.ingress.kubernetes.io/server-snippet", PodPolicy(metadata=("nginx.ingress.kubernetes.io/",)), True),
    ],
)
@pytest.mark.parametrize("field", ["service", "ingress"])
def test_annotations_that_configure_a_controller_with_code_need_permission(
    field: str, key: str, policy: PodPolicy | None, allowed: bool
) -> None:
    server = {field: {"annotations": {key: "x"}}}
    if allowed:
        rendered(server, policy=policy)
        return
    with pytest.raises(NotAllowed, match=rf"spec.server.{field}.annotations\[{key}\]"):
        rendered(server, policy=policy)


def test_a_class_of_load_balancers_needs_the_type() -> None:
    with pytest.raises(ValueError, match=r"spec.server.service.loadBalancerClass"):
        rendered({"service": {"loadBalancerClass": "example.com/lb"}})


def test_a_pool_selects_the_pods_of_the_servers_and_the_route_refers_to_it() -> None:
    found = rendered({"inferencePool": PICKER, "httpRoute": GATEWAYS})
    pool = found["InferencePool"]
    assert pool["endpointPickerRef"] == {
        "group": "",
        "kind": "Service",
        "name": "picker",
        "port": {"number": 9002},
        "failureMode": "FailClose",
    }
    spec = parse_spec({**MINIMAL, "server": {}})
    pods = server_deployment(RenderContext("demo", "default", "u", spec, Settings(runtime_image="runtime:1")))
    template = pods["spec"]["template"]
    assert pool["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    ports = template["spec"]["containers"][0]["ports"]
    assert pool["targetPorts"] == [{"number": port["containerPort"]} for port in ports if port["name"] == "http"]
    (backend,) = found["HTTPRoute"]["rules"][0]["backendRefs"]
    assert backend == {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": "demo"}


def test_removed_fields_remove_their_objects(make_cluster: Any) -> None:
    cluster: Cluster = make_cluster(server={"ingress": {}, "httpRoute": GATEWAYS, "inferencePool": PICKER})
    cluster.settle()
    assert {INGRESS, ROUTE, POOL, SERVICE} <= set(cluster.objects)
    cluster.patch(server={"ingress": None, "httpRoute": None, "inferencePool": None})
    deleted = {action.ref for action in decide(cluster.world()).actions if isinstance(action, DeleteChild)}
    assert deleted == {INGRESS, ROUTE, POOL}


@pytest.mark.parametrize(
    ("server", "ref", "reason"),
    [
        ({"httpRoute": GATEWAYS}, ROUTE, "GatewayApiMissing"),
        ({"inferencePool": PICKER}, POOL, "InferenceExtensionMissing"),
    ],
)
def test_without_the_crd_the_status_reports_it_and_the_resource_serves(
    make_cluster: Any, server: dict[str, Any], ref: ChildRef, reason: str
) -> None:
    cluster: Cluster = make_cluster(server=server)
    (apply,) = [
        action for action in decide(cluster.world()).actions if isinstance(action, ApplyChild) and action.ref == ref
    ]
    cluster.settle()
    del cluster.objects[ref]
    world = cluster.world()
    rejection = Rejection(apply.hash, 404, "the server could not find the requested resource", world.now)
    decision = decide(replace(world, rejections={ref: rejection}))
    conditions = {entry["type"]: entry for entry in decision.status["conditions"]}
    assert conditions["Ready"]["status"] == "True"
    assert conditions["Degraded"]["reason"] == reason
    assert f"spec.server.{next(iter(server))}" in conditions["Degraded"]["message"]
    assert not [action for action in decision.actions if isinstance(action, ApplyChild)]
    later = replace(world, rejections={ref: replace(rejection, at=world.now - timedelta(seconds=15))})
    assert [action.ref for action in decide(later).actions if isinstance(action, ApplyChild)] == [ref]
