"""The front door: which objects a spec has, what they route, and that they go with their field of the spec."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from in_memory_cluster import MINIMAL, Cluster

from megatron_operator.decision.actions import ApplyChild, DeleteChild
from megatron_operator.decision.decide import decide
from megatron_operator.decision.world import ApplyRejection, ChildRef
from megatron_operator.render.context import NotAllowed, RenderContext
from megatron_operator.render.front_door import GATEWAY, INFERENCE, NETWORKING, front_door
from megatron_operator.render.server import server_deployment
from megatron_operator.resource.pod_policy import PodPolicy
from megatron_operator.resource.settings import Settings
from megatron_operator.resource.spec import parse_spec

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


NGINX = "nginx.ingress.kubernetes.io/"
CONTROLLERS = [
    *(f"{NGINX}{name}" for name in ("server-snippet", "auth-tls-secret", "server-alias", "proxy-ssl-secret")),
    *(f"{NGINX}{name}" for name in ("auth-url", "upstream-vhost", "permanent-redirect", "mirror-target", "canary")),
    *("external-dns.alpha.kubernetes.io/hostname", "cert-manager.io/cluster-issuer", "cert-manager.io/common-name"),
    *(
        "traefik.ingress.kubernetes.io/router.middlewares",
        "haproxy.org/auth-secret",
        "alb.ingress.kubernetes.io/actions.x",
    ),
    *(
        "service.beta.kubernetes.io/aws-load-balancer-ssl-cert",
        "metallb.universe.tf/address-pool",
        "konghq.com/plugins",
    ),
    *("networking.gke.io/load-balancer-type", "kubernetes.io/ingress.class", "example.com/a", "a"),
]


@pytest.mark.parametrize("field", ["service", "ingress"])
def test_annotations_that_configure_another_component_need_permission(field: str) -> None:
    open_door = PodPolicy(hostnames=("*",))

    def annotated(key: str, policy: PodPolicy | None, value: str = "x") -> dict[str, Any]:
        return rendered({field: {"annotations": {key: value}}}, policy=policy)

    for key in CONTROLLERS:
        with pytest.raises(NotAllowed, match=rf"spec.server.{field}.annotations\[{key}\].*podPolicy.metadata"):
            annotated(key, open_door)
        prefix = f"{key.rpartition('/')[0]}/"
        listed = prefix if "/" in key else key
        for policy in (replace(open_door, metadata=(listed,)), replace(open_door, profile="trusted"), None):
            assert annotated(key, policy)
    for policy in (open_door, replace(open_door, profile="trusted"), None):
        with pytest.raises(NotAllowed, match="sets this key itself"):
            annotated("inference.megatron.dev/hash", policy)
    assert annotated("prometheus.io/scrape", open_door, "true")


HOSTS = PodPolicy(
    hostnames=("a.example", "*.{namespace}.example", "{name}.b.example"), tls_secrets=("{name}-tls", "wild-*")
)


@pytest.mark.parametrize("profile", ["restricted", "trusted"])
@pytest.mark.parametrize(
    ("hosts", "allowed"),
    [
        (["a.example"], True),
        (["x.default.example", "y.x.default.example", "*.default.example"], True),
        (["demo.b.example"], True),
        (["default.example"], False),
        (["x.other.example"], False),
        (["other.b.example"], False),
        (["xdefault.example"], False),
        (["*.example"], False),
        (["a.example", "victim.example"], False),
        (None, False),
    ],
    ids=str,
)
def test_host_names_are_confined_to_what_the_chart_allows(profile: str, hosts: list[str] | None, allowed: bool) -> None:
    named: dict[str, Any] = {} if hosts is None else {"hosts": hosts}
    routed: dict[str, Any] = {**GATEWAYS, **({} if hosts is None else {"hostnames": hosts})}
    for server, field in (({"ingress": named}, "ingress.hosts"), ({"httpRoute": routed}, "httpRoute.hostnames")):
        if allowed:
            assert rendered(server, policy=replace(HOSTS, profile=profile))
        else:
            with pytest.raises(NotAllowed, match=rf"^spec.server.{field}: is .* are allowed; .*podPolicy.hostnames"):
                rendered(server, policy=replace(HOSTS, profile=profile))
        with pytest.raises(NotAllowed, match=r"host names are not allowed"):
            rendered(server, policy=PodPolicy(profile=profile))
        assert rendered(server, policy=PodPolicy(profile=profile, hostnames=("*",)))


@pytest.mark.parametrize("profile", ["restricted", "trusted"])
def test_tls_secrets_are_confined_to_what_the_chart_allows(profile: str) -> None:
    def ingress(secret: str, policy: PodPolicy) -> dict[str, Any]:
        server = {"ingress": {"hosts": ["a.example"], "tlsSecretName": secret}}
        return rendered(server, policy=replace(policy, profile=profile))

    assert ingress("demo-tls", HOSTS)
    assert ingress("wild-card", HOSTS)
    for secret in ("other-tls", "wild", "other/demo-tls"):
        with pytest.raises(NotAllowed, match=r"^spec.server.ingress.tlsSecretName: is .*podPolicy.tlsSecrets"):
            ingress(secret, HOSTS)
    with pytest.raises(NotAllowed, match="TLS Secrets are not allowed"):
        ingress("demo-tls", PodPolicy(hostnames=("*",)))


@pytest.mark.parametrize("name", ["", "*example", "A.example", "a.example/", "*."])
def test_an_invalid_host_name_of_the_chart_is_rejected_at_the_start(name: str) -> None:
    with pytest.raises(ValueError, match=r"podPolicy.hostnames \(--allow-hostname\): is"):
        PodPolicy(hostnames=(name,))


def test_a_front_door_that_a_new_policy_rejects_stays(make_cluster: Any) -> None:
    cluster: Cluster = make_cluster(server={"ingress": {"hosts": ["demo.example"]}})
    policy = cluster.settings
    cluster.settings = replace(policy, pod_policy=None)
    cluster.settle()
    before = cluster.objects[INGRESS]
    cluster.settings = policy
    cluster.unverified |= set(cluster.objects)
    cluster.settle()
    assert cluster.objects[INGRESS] == before
    assert cluster.condition("Degraded")["reason"] == "NotAllowed"
    assert "spec.server.ingress.hosts" in cluster.condition("Degraded")["message"]
    assert cluster.state == "Running"


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
    cluster.settings = replace(cluster.settings, pod_policy=PodPolicy(hostnames=("*",)))
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
    cluster.settings = replace(cluster.settings, pod_policy=PodPolicy(hostnames=("*",)))
    (apply,) = [
        action for action in decide(cluster.world()).actions if isinstance(action, ApplyChild) and action.ref == ref
    ]
    cluster.settle()
    del cluster.objects[ref]
    world = cluster.world()
    rejection = ApplyRejection(apply.hash, 404, "the server could not find the requested resource", world.now)
    decision = decide(replace(world, rejections={ref: rejection}))
    conditions = {entry["type"]: entry for entry in decision.status["conditions"]}
    assert conditions["Ready"]["status"] == "True"
    assert conditions["Degraded"]["reason"] == reason
    assert f"spec.server.{next(iter(server))}" in conditions["Degraded"]["message"]
    assert not [action for action in decision.actions if isinstance(action, ApplyChild)]
    later = replace(world, rejections={ref: replace(rejection, at=world.now - timedelta(seconds=15))})
    assert [action.ref for action in decide(later).actions if isinstance(action, ApplyChild)] == [ref]
