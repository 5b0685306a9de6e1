"""Manifests: golden files for every sample, and the promises that hold for all of them."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_operator.manifest_file import ResourceFileError, read_resource
from megatron_operator.render.check import check_pod
from megatron_operator.render.children import all_children
from megatron_operator.render.compare import preview
from megatron_operator.render.context import RECENT_CONTEXTS, InvalidPodTemplate, RenderContext, recent
from megatron_operator.render.coordinator import NODE_TAINTS
from megatron_operator.render.engine import engine_revision, engine_statefulset
from megatron_operator.render.pod import merge_template
from megatron_operator.render.server import server_args
from megatron_operator.resource.engine import Batching
from megatron_operator.resource.names import LABEL_ENGINE
from megatron_operator.resource.pod_policy import PodPolicy
from megatron_operator.resource.settings import Settings
from megatron_operator.resource.spec import parse_spec
from megatron_runtime.cli.containers import engine as engine_command
from megatron_runtime.engine.settings import EngineSettings

ROOT = Path(__file__).parents[3]
SAMPLES = sorted((ROOT / "manifests/samples").glob("*.yaml"))
SETTINGS = Settings(
    runtime_image="registry.example/runtime:1",
    vllm_runtime_image="registry.example/vllm:1",
    coordinator_image="registry.example/operator:1",
    pod_policy=PodPolicy(hostnames=("models.example.com",), tls_secrets=("models-certificate",)),
)


def _context(**fields: Any) -> RenderContext:
    spec = {"model": {"source": {"builtin": "smollm2-135m"}}, **fields}
    return RenderContext("demo", "default", "uid", parse_spec(spec), SETTINGS)


def test_a_context_is_reused_only_for_the_same_manifests() -> None:
    def with_value(value: Any, **fields: Any) -> RenderContext:
        ctx = _context(engine={"podTemplate": {"spec": {"hostNetwork": value}}})
        return replace(ctx, uid="reused", **fields)

    first = recent(with_value(1))
    assert recent(with_value(1)) is first
    for other in (with_value(True), with_value(1.0), with_value(2), with_value(2, server_key=2)):
        assert recent(other) is other
    assert recent(with_value(1, settings=replace(SETTINGS, runtime_image="other"))) is not first
    kept = recent(with_value(1))
    for number in range(RECENT_CONTEXTS):
        recent(replace(_context(), uid=str(number)))
    assert recent(with_value(1)) is not kept


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_a_file_of_any_editor_is_read(tmp_path: Path, encoding: str) -> None:
    file = tmp_path / "resource.yaml"
    file.write_bytes(SAMPLES[0].read_text().replace("\n", "\r\n").encode(encoding))
    assert read_resource(file) == read_resource(SAMPLES[0])


def test_a_file_in_another_encoding_is_named(tmp_path: Path) -> None:
    file = tmp_path / "resource.yaml"
    file.write_bytes("kind: Größe".encode("latin-1"))
    with pytest.raises(ResourceFileError, match=r"resource\.yaml: cannot be read as YAML: (?s:.*)invalid"):
        read_resource(file)


def _pods(ctx: RenderContext) -> dict[str, dict[str, Any]]:
    return {
        manifest["metadata"]["name"]: manifest["spec"]["template"]["spec"]
        for manifest in all_children(ctx)
        if manifest["kind"] in ("Deployment", "StatefulSet")
    }


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda path: path.stem)
def test_samples_render_to_their_golden_files(sample: Path) -> None:
    golden = Path(__file__).parent / "golden" / sample.name
    rendered = all_children(read_resource(sample).context(SETTINGS))
    assert rendered == list(yaml.safe_load_all(golden.read_text())), (
        f"megatron-operator render -f {sample} --runtime-image {SETTINGS.runtime_image} "
        f"--vllm-runtime-image {SETTINGS.vllm_runtime_image} "
        f"--coordinator-image {SETTINGS.coordinator_image} --allow-hostname models.example.com "
        f"--allow-tls-secret models-certificate > {golden}"
    )


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda path: path.stem)
def test_every_container_of_a_sample_has_a_memory_limit(sample: Path) -> None:
    for name, pod in _pods(read_resource(sample).context(SETTINGS)).items():
        for container in (*pod.get("initContainers", ()), *pod["containers"]):
            assert "memory" in container["resources"]["limits"], f"{name}: {container['name']}"


def test_the_two_coordinators_of_a_pair_differ_in_name_and_know_each_other() -> None:
    pods = _pods(_context(coordinator={"replicas": 2}))
    first, second = pods["demo-coordinator"], pods["demo-standby"]
    for pod, other in ((first, "demo-standby"), (second, "demo-coordinator")):
        args = pod["containers"][0]["args"]
        assert args[args.index("--other-host") + 1] == f"{other}.default.svc"
        own, apart = pod["affinity"]["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
        assert apart["podAffinityTerm"]["labelSelector"]["matchLabels"][COMPONENT] == other.removeprefix("demo-")
        assert apart["weight"] > own["weight"], "a terminating pod of its own must not drive it to the other one's node"
    args = [[each for each in pod["containers"][0]["args"] if "demo-" not in each] for pod in (first, second)]
    assert args[0] == args[1]
    assert "--other-host" not in _pods(_context())["demo-coordinator"]["containers"][0]["args"]


def test_a_standby_changes_neither_engines_nor_servers() -> None:
    with_standby, without = _pods(_context(coordinator={"replicas": 2})), _pods(_context())
    changed = {name for name, pod in with_standby.items() if pod != without.get(name)}
    assert changed == {"demo-coordinator", "demo-standby"}


def test_the_coordinators_of_a_pair_reach_each_other_on_the_admin_port() -> None:
    pair = [("coordinator", {5557}), ("standby", {5557})]
    egress = _egress(_context(coordinator={"replicas": 2}))
    assert egress["coordinator"] == egress["standby"] == [*pair, ("any", {53, 5353})]
    assert egress["engine"][:2] == [("coordinator", {5556}), ("standby", {5556})]
    assert egress["server"][:2] == [("coordinator", {5555}), ("standby", {5555})]
    policy = next(each for each in all_children(_context(coordinator={"replicas": 2})) if "5557" in str(each))
    admins = [rule["from"] for rule in policy["spec"]["ingress"] if rule["ports"][0]["port"] == 5557]
    assert [_selected({"spec": peer}) for (peer,) in admins if "podSelector" in peer] == [["coordinator", "standby"]]


@pytest.mark.parametrize(
    ("native", "options"),
    [
        ({}, []),
        ({"kvCacheMode": "Recompute", "prefixEviction": "LRU", "stepTimeoutSeconds": 60}, []),
        ({"kvCacheMode": "Offload"}, ["--kv-cache-mode", "offload"]),
        ({"prefixEviction": "RefZero"}, ["--prefix-eviction", "ref_zero"]),
        ({"stepTimeoutSeconds": 300}, ["--step-timeout-seconds", "300"]),
    ],
    ids=str,
)
def test_settings_of_native_engines_are_options_unless_they_are_the_defaults(
    native: dict[str, Any], options: list[str]
) -> None:
    def args(**engine: Any) -> list[str]:
        containers = _pods(_context(engine=engine))["demo-engine-0"]["containers"]
        return [each for each in containers[0]["args"] if "revision" not in each][:-1]

    before, after = args(), args(native=native)
    assert after[: len(before)] == before
    assert after[len(before) :] == options


def test_tolerations_of_the_pod_template_are_kept_and_take_precedence() -> None:
    own = [
        {"key": "spot", "operator": "Exists"},
        {"key": NODE_TAINTS[0], "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 60},
    ]
    pod = _pods(_context(coordinator={"podTemplate": {"spec": {"tolerations": own}}}))["demo-coordinator"]
    assert pod["tolerations"][:2] == own
    assert [entry["key"] for entry in pod["tolerations"][2:]] == [NODE_TAINTS[1]]


def test_a_coordinator_runs_the_small_image_with_the_priority_of_the_spec() -> None:
    pod = _pods(_context(coordinator={"priorityClassName": "serving"}))["demo-coordinator"]
    assert pod["priorityClassName"] == "serving"
    container = pod["containers"][0]
    assert (container["image"], container["command"]) == (SETTINGS.coordinator_image, ["megatron"])
    assert "priorityClassName" not in _pods(_context())["demo-coordinator"]


def test_each_component_mounts_only_its_own_keys() -> None:
    mounted = {
        name: {
            item["key"] for volume in pod["volumes"] if volume["name"] == "keys" for item in volume["secret"]["items"]
        }
        for name, pod in _pods(_context()).items()
    }
    assert mounted == {
        "demo-coordinator": {"server.key", "server.pub", "engine.pub", "client.pub", "admin.pub"},
        "demo-server": {"client.key", "client.pub", "server.pub"},
        "demo-engine-0": {"engine.key", "engine.pub", "server.pub"},
    }


def test_without_security_nothing_asks_for_keys() -> None:
    ctx = _context()
    plain = RenderContext(ctx.name, ctx.namespace, ctx.uid, ctx.spec, Settings(runtime_image="r", security=False))
    assert "keys" not in yaml.safe_dump([pod for pod in _pods(plain).values()])


@pytest.mark.parametrize("change", [{"desiredState": "Suspended"}, {"replicas": 5}])
def test_verbs_and_scaling_are_in_no_pod_template(change: dict[str, Any]) -> None:
    before, after = _pods(_context()), _pods(_context(**change))
    assert {name: after[name] for name in before} == before


@pytest.mark.parametrize(
    "change",
    [
        {"engine": {"batching": {"maxRequests": 3}}},
        {"engine": {"podTemplate": {"spec": {"priorityClassName": "high"}}}},
        {"parallelism": {"tensor": 2}},
        {"model": {"source": {"builtin": "other"}}},
        {"model": {"source": {"builtin": "smollm2-135m"}, "dtype": "Float32"}},
    ],
)
def test_what_an_engine_runs_is_in_its_revision(change: dict[str, Any]) -> None:
    before, after = (engine_statefulset(ctx, 0, pods=1) for ctx in (_context(), _context(**change)))
    assert engine_revision(before) != engine_revision(after)


def test_all_engines_of_a_spec_share_one_revision_and_announce_it() -> None:
    engines = [engine_statefulset(_context(replicas=3), index, pods=1) for index in range(3)]
    assert len({engine_revision(engine) for engine in engines}) == 1
    args = engines[2]["spec"]["template"]["spec"]["containers"][0]["args"]
    assert args[-2:] == ["--revision", engine_revision(engines[2])]
    assert args[args.index("--name") + 1] == "demo-engine-2"


def test_the_engine_reads_its_parallel_sizes_from_the_environment_of_its_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    ctx = _context(parallelism={"tensor": 2, "pipeline": 3, "expert": 4})
    container = engine_statefulset(ctx, 0, pods=1)["spec"]["template"]["spec"]["containers"][0]
    for entry in container["env"]:
        if "value" in entry:
            monkeypatch.setenv(entry["name"], entry["value"])
    context = engine_command.make_context("engine", [], resilient_parsing=True)
    sizes = {name: context.params[f"{name}_parallel"] for name in ("tensor", "pipeline", "expert")}
    assert sizes == {"tensor": 2, "pipeline": 3, "expert": 4}


HUB = {"huggingFace": {"repo": "org/name"}}


def _selected(policy: dict[str, Any]) -> list[str]:
    """Return the components whose pods a policy selects, or the engine."""
    pods = policy["spec"]["podSelector"]
    labels, expressions = pods["matchLabels"], pods.get("matchExpressions")
    if expressions is None:
        return [labels.get(LABEL_ENGINE, labels[COMPONENT])]
    (either,) = expressions
    assert (either["key"], either["operator"]) == (COMPONENT, "In")
    return list(either["values"])


def _egress(ctx: RenderContext) -> dict[str, list[tuple[str, set[int]]]]:
    """Of each component, and of engine 0: to which component or engine, and to which ports."""
    found: dict[str, list[tuple[str, set[int]]]] = {}
    for policy in (each for each in all_children(ctx) if each["kind"] == "NetworkPolicy"):
        rules = []
        for rule in policy["spec"].get("egress", ()):
            (peer,) = rule.get("to", [{"podSelector": {"matchLabels": {COMPONENT: "any"}}}])
            reached = _selected({"spec": peer})
            assert reached == ["any"] or peer["podSelector"]["matchLabels"]["app.kubernetes.io/instance"] == "demo"
            rules += [(each, {port["port"] for port in rule.get("ports", ())}) for each in reached]
        for selected in _selected(policy):
            found[selected] = rules
        assert ("Egress" in policy["spec"]["policyTypes"]) is ctx.settings.egress_policies
    return found


COMPONENT = "app.kubernetes.io/component"


@pytest.mark.parametrize("source", [{"builtin": "x"}, {"persistentVolumeClaim": {"claimName": "c"}}, HUB])
def test_pods_reach_what_they_need_and_nothing_else(source: dict[str, Any]) -> None:
    dns, hub = ("any", {53, 5353}), [("any", {443})] if source is HUB else []
    engine = [("coordinator", {5556}), dns, *hub]
    assert _egress(_context(model={"source": source})) == {
        "check": engine,
        "coordinator": [],
        "engine": engine,
        "demo-engine-0": [("demo-engine-0", set())],
        "server": [("coordinator", {5555}), dns, *hub],
    }


def test_egress_policies_can_be_switched_off() -> None:
    ctx = _context(model={"source": HUB})
    plain = RenderContext(ctx.name, ctx.namespace, ctx.uid, ctx.spec, replace(SETTINGS, egress_policies=False))
    assert _egress(plain) == {"check": [], "coordinator": [], "engine": [], "demo-engine-0": [], "server": []}


def test_only_pods_of_the_same_engine_may_connect_to_an_engine() -> None:
    policies = [each for each in all_children(_context(replicas=2)) if each["kind"] == "NetworkPolicy"]
    peers: dict[str, list[Any]] = {}
    for policy in policies:
        peers |= dict.fromkeys(_selected(policy), policy["spec"]["ingress"])
    assert peers.keys() == {"check", "coordinator", "engine", "server", "demo-engine-0", "demo-engine-1"}
    assert peers["check"] == peers["engine"]
    assert {
        name: [rule["from"][0]["podSelector"]["matchLabels"] for rule in rules]
        for name, rules in peers.items()
        if name.startswith("demo-")
    } == {
        name: [
            {
                "app.kubernetes.io/name": "megatron-inference",
                "app.kubernetes.io/instance": "demo",
                COMPONENT: "engine",
                LABEL_ENGINE: name,
            }
        ]
        for name in ("demo-engine-0", "demo-engine-1")
    }


def test_the_health_port_is_open_to_operator_monitoring_and_api_server_only() -> None:
    ctx = _context(replicas=2)

    def peers(settings: Settings) -> list[Any]:
        """The peers of port 8080 of each component that other pods than those of its engine reach."""
        policies = all_children(RenderContext(ctx.name, ctx.namespace, ctx.uid, ctx.spec, settings))
        rules = [rule for each in policies if each["kind"] == "NetworkPolicy" for rule in each["spec"]["ingress"]]
        return [rule.get("from") for rule in rules if {"protocol": "TCP", "port": 8080} in rule.get("ports", ())]

    def namespace(name: str) -> dict[str, Any]:
        return {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}}

    assert peers(SETTINGS) == [[namespace("megatron-system"), namespace("monitoring")]] * 3
    scraper = {"namespaceSelector": {}, "podSelector": {"matchLabels": {"app": "prometheus"}}}
    settings = replace(SETTINGS, monitoring_peers=(scraper,), api_server_ranges=("10.0.0.0/28", "fd00::/64"))
    ranges = [{"ipBlock": {"cidr": "10.0.0.0/28"}}, {"ipBlock": {"cidr": "fd00::/64"}}]
    assert peers(settings) == [[namespace("megatron-system"), scraper, *ranges]] * 3


def test_policies_restart_no_pod() -> None:
    ctx = _context(model={"source": HUB})
    plain = RenderContext(ctx.name, ctx.namespace, ctx.uid, ctx.spec, replace(SETTINGS, egress_policies=False))
    assert _pods(plain) == _pods(ctx)


# --- podTemplate ----------------------------------------------------------------------------------------------------

BASE: dict[str, Any] = {
    "metadata": {"labels": {"a": "1"}},
    "spec": {
        "containers": [{"name": "engine", "image": "x", "env": [{"name": "A", "value": "1"}], "args": ["a"]}],
        "tolerations": [{"key": "old"}],
    },
}


CLAIM = {"persistentVolumeClaim": {"claimName": "compiled"}}


@pytest.mark.parametrize(
    ("entry", "source"),
    [
        (CLAIM, CLAIM),
        ({"emptyDir": None, **CLAIM}, CLAIM),
        ({"emptyDir": {"sizeLimit": "8Gi"}}, {"emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}}),
    ],
)
def test_a_volume_of_a_template_has_one_source(entry: dict[str, Any], source: dict[str, Any]) -> None:
    rendered = {"name": "cache", "emptyDir": {"medium": "Memory"}}
    overlay = {"spec": {"volumes": [{"name": "cache", **entry}]}}
    merged = merge_template({"spec": {"volumes": [rendered, {"name": "tmp"}]}}, overlay, field="f")
    assert merged["spec"]["volumes"] == [{"name": "cache", **source}, {"name": "tmp"}]


@pytest.mark.parametrize("backend", ["Native", "VLLM"])
def test_compiled_code_of_an_engine_is_on_the_claim_of_its_cache_volume(backend: str) -> None:
    template = {"spec": {"volumes": [{"name": "cache", **CLAIM}]}}
    children = all_children(_context(engine={"backend": backend, "podTemplate": template, "gpusPerPod": 1}))
    (engine,) = (each for each in children if each["kind"] == "StatefulSet")
    pod = engine["spec"]["template"]["spec"]
    assert {"name": "cache", **CLAIM} in pod["volumes"]
    (container,) = pod["containers"]
    assert {"name": "cache", "mountPath": "/cache"} in container["volumeMounts"]
    variables = {each["name"]: each.get("value", "") for each in container.get("env", ())}
    for each in children:
        variables |= each["data"] if each["kind"] == "ConfigMap" else {}
    names = {"XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"}
    names |= {"VLLM_CACHE_ROOT", "FLASHINFER_WORKSPACE_BASE"} if backend == "VLLM" else set()
    assert [name for name in names if not f"{variables[name]}/".startswith("/cache/")] == []


def test_a_template_merges_containers_and_variables_by_name_and_replaces_other_lists() -> None:
    overlay = {
        "metadata": {"annotations": {"n": "1"}},
        "spec": {
            "containers": [
                {"name": "engine", "env": [{"name": "B", "value": "2"}, {"name": "A", "value": "3"}]},
                {"name": "sidecar", "image": "y"},
            ],
            "tolerations": [{"key": "new"}],
        },
    }
    before = copy.deepcopy((BASE, overlay))
    merged = merge_template(BASE, overlay, field="f")
    engine, sidecar = merged["spec"]["containers"]
    assert engine["image"] == "x"
    assert engine["env"] == [{"name": "A", "value": "3"}, {"name": "B", "value": "2"}]
    assert sidecar == {"name": "sidecar", "image": "y"}
    assert merged["spec"]["tolerations"] == [{"key": "new"}]
    assert merged["metadata"] == {"labels": {"a": "1"}, "annotations": {"n": "1"}}
    assert (BASE, overlay) == before


def test_null_removes_a_field() -> None:
    assert "tolerations" not in merge_template(BASE, {"spec": {"tolerations": None}}, field="f")["spec"]


@pytest.mark.parametrize(
    ("overlay", "where"),
    [
        ({"spce": {}}, "f: unknown field 'spce'"),
        ({"spec": 3}, "f.spec: is 3"),
        ({"spec": {"containers": {}}}, "f.spec.containers: is {}"),
        ({"spec": {"containers": [{"image": "x"}]}}, r"f.spec.containers\[0\]: has no 'name'"),
    ],
)
def test_a_template_of_the_wrong_shape_is_rejected_by_path(overlay: dict[str, Any], where: str) -> None:
    with pytest.raises(InvalidPodTemplate, match=where):
        merge_template(BASE, overlay, field="f")


def test_a_template_cannot_take_a_pod_from_its_owner() -> None:
    overlay = {"metadata": {"labels": {"app.kubernetes.io/instance": "other", "team": "x"}}}
    ctx = _context(engine={"podTemplate": overlay})
    unchecked = replace(ctx, settings=replace(SETTINGS, pod_policy=None))
    engine = engine_statefulset(unchecked, 0, pods=1)
    labels = engine["spec"]["template"]["metadata"]["labels"]
    assert labels.items() >= engine["spec"]["selector"]["matchLabels"].items()
    assert labels["team"] == "x"


# --- Preview --------------------------------------------------------------------------------------------------------


def test_a_preview_names_the_first_field_and_the_engines_that_restart() -> None:
    found = preview(_context(replicas=2), _context(replicas=2, engine={"batching": {"maxRequests": 9}}))
    assert [(change.child, change.restarts) for change in found.changes] == [
        ("StatefulSet demo-engine-0", True),
        ("StatefulSet demo-engine-1", True),
    ]
    assert found.changes[0].field.endswith("args --max-requests: absent -> '9'")
    assert found.steps == (
        "check the model and the settings in a pod without GPUs; until it succeeds, nothing is drained",
        "drain and replace demo-engine-1, then verify it by a canary completion (at most 1 at a time)",
        "drain and replace demo-engine-0, then verify it by a canary completion (at most 1 at a time)",
        "lowest capacity meanwhile: 1 of 2 engines",
    )


def test_a_preview_of_another_model_swaps_all_at_once() -> None:
    found = preview(_context(replicas=2), _context(replicas=2, model={"source": {"builtin": "other"}}))
    assert {change.child for change in found.changes} == {
        "Deployment demo-server",
        "StatefulSet demo-engine-0",
        "StatefulSet demo-engine-1",
    }
    assert len(found.steps) == 2
    assert "another model" in found.steps[1]


def test_a_preview_of_verbs_and_scaling_restarts_nothing() -> None:
    found = preview(_context(replicas=2), _context(replicas=1, desiredState="Paused"))
    assert not any(change.restarts for change in found.changes)
    assert found.steps == ("Running -> Paused, confirmed by every rank", "drain and remove demo-engine-1")


def test_a_preview_of_no_change_is_empty() -> None:
    assert preview(_context(), _context()).changes == ()


def test_a_preview_of_other_weights_restarts_nothing() -> None:
    source = {"persistentVolumeClaim": {"claimName": "models", "path": "/x/{revision}"}}
    old, new = (_context(model={"source": source}, weights={"revision": revision}) for revision in ("6", "7"))
    found = preview(old, new)
    assert found.changes == ()
    assert found.steps == ("load weights 7 into every engine in place, with the next epoch",)


def test_tls_moves_the_front_door_and_its_address_to_https() -> None:
    ctx = _context(server={"tls": {"secretName": "front-cert"}})
    by_name = {(child["kind"], child["metadata"]["name"]): child for child in all_children(ctx)}
    (port,) = by_name["Service", "demo"]["spec"]["ports"]
    assert (port["name"], port["port"], port["appProtocol"]) == ("https", 443, "https")
    pod = by_name["Deployment", "demo-server"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["ports"][0] == {"name": "https", "containerPort": 8000}
    args = container["args"]
    assert args[args.index("--tls-certificate-file") + 1] == "/etc/megatron/tls/tls.crt"
    items = [{"key": name, "path": name} for name in ("tls.crt", "tls.key")]
    secret = {"secretName": "front-cert", "defaultMode": 0o440, "items": items}
    assert {"name": "tls", "secret": secret} in pod["volumes"]
    assert {"name": "tls", "mountPath": "/etc/megatron/tls", "readOnly": True} in container["volumeMounts"]
    assert ctx.endpoint == "https://demo.default.svc/v1"


def _resources(pod: dict[str, Any], container: str) -> dict[str, Any]:
    entries = [*pod.get("initContainers", []), *pod["containers"]]
    return next(entry["resources"] for entry in entries if entry["name"] == container)


def test_every_container_but_an_engines_has_a_memory_limit() -> None:
    """How much an engine takes is the model's to say: a limit of ours would end engines that fit their node."""
    pods = _pods(_context(parallelism={"tensor": 2}, engine={"ranksPerPod": 1}))
    assert _resources(pods["demo-coordinator"], "coordinator")["limits"] == {"memory": "4Gi"}
    assert _resources(pods["demo-server"], "server")["limits"] == {"memory": "4Gi"}
    assert _resources(pods["demo-engine-0"], "preflight")["limits"] == {"memory": "256Mi"}
    assert "limits" not in _resources(pods["demo-engine-0"], "engine")


@pytest.mark.parametrize("component", ["coordinator", "server"])
@pytest.mark.parametrize(
    ("given", "rendered"),
    [
        ({"limits": {"memory": "1Gi"}}, {"limits": {"memory": "1Gi"}, "requests": {"cpu": "50m"}}),
        (
            {"requests": {"memory": "192Mi"}},
            {"requests": {"cpu": "50m", "memory": "192Mi"}, "limits": {"memory": "4Gi"}},
        ),
        ({"requests": {"memory": "8Gi"}}, {"requests": {"cpu": "50m", "memory": "8Gi"}}),
        ({"limits": {"memory": None}}, {"requests": {"cpu": "50m"}, "limits": {}}),
        ({"limits": {"cpu": "2"}}, {"limits": {"cpu": "2", "memory": "4Gi"}, "requests": {"cpu": "50m"}}),
    ],
)
def test_a_pod_template_overrides_the_memory_limit(
    component: str, given: dict[str, Any], rendered: dict[str, Any]
) -> None:
    overlay = {"spec": {"containers": [{"name": component, "resources": given}]}}
    pod = _pods(_context(**{component: {"podTemplate": overlay}}))[f"demo-{component}"]
    found = _resources(pod, component)
    if "memory" not in given.get("requests", {}):
        assert found["requests"].pop("memory") in ("128Mi", "256Mi")
    assert {"limits": {}, **found} == {"limits": {}, **rendered}


@pytest.mark.parametrize("tls", [None, {"secretName": "front-cert"}])
def test_servers_have_probes_and_metrics_on_a_port_of_their_own(tls: dict[str, str] | None) -> None:
    ctx = _context(server={} if tls is None else {"tls": tls})
    by_name = {(child["kind"], child["metadata"]["name"]): child for child in all_children(ctx)}
    (container,) = by_name["Deployment", "demo-server"]["spec"]["template"]["spec"]["containers"]
    assert {"name": "health", "containerPort": 8080} in container["ports"]
    assert container["args"][container["args"].index("--health-port") + 1] == "8080"
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["port"] == 8080
        assert "scheme" not in container[probe]["httpGet"]
    # No Service leads there, so metrics leave the cluster only where its operator lets them.
    ports = [
        port["targetPort"]
        for (kind, _), child in by_name.items()
        if kind == "Service"
        for port in child["spec"]["ports"]
    ]
    assert container["ports"][0] == {"name": ctx.scheme, "containerPort": 8000}
    assert ctx.scheme in ports
    assert "health" not in ports
    allowed = [rule["ports"][0]["port"] for rule in by_name["NetworkPolicy", "demo-server"]["spec"]["ingress"]]
    assert allowed == [8000, 8080]


def test_shares_and_priorities_are_arguments_of_the_server_only() -> None:
    plain = _pods(_context())
    changed = _pods(_context(server={"sharePrefixCache": True, "allowPriority": True, "reserveTokens": 512}))
    assert [name for name, pod in plain.items() if changed[name] != pod] == ["demo-server"]
    args = changed["demo-server"]["containers"][0]["args"]
    added = [argument for argument in args if argument not in plain["demo-server"]["containers"][0]["args"]]
    assert added == ["--share-prefix-cache", "--allow-priority", "--reserve-tokens", "512"]
    assert _pods(_context(server={"sharePrefixCache": False, "allowPriority": False})) == plain


def test_only_a_server_that_answers_every_name_has_the_option() -> None:
    plain = _pods(_context())
    assert _pods(_context(server={"anyModelName": False})) == plain
    args = _pods(_context(server={"anyModelName": True}))["demo-server"]["containers"][0]["args"]
    assert [arg for arg in args if arg not in plain["demo-server"]["containers"][0]["args"]] == ["--any-model-name"]


def test_lists_of_the_server_become_repeated_options() -> None:
    arguments = server_args(
        _context(
            server={
                "modelAliases": ["gpt-3.5-turbo", "org/name"],
                "allowedOrigins": ["https://chat.example.com", "http://[::1]:3000"],
                "allowedMediaHosts": ["images.example.com", "::1"],
                "generationConfig": "none",
            }
        )
    )
    values = list(pairwise(arguments))
    assert [value for flag, value in values if flag == "--allowed-media-host"] == ["images.example.com", "::1"]
    assert [value for flag, value in values if flag == "--model-name"][1:] == ["gpt-3.5-turbo", "org/name"]
    origins = [value for flag, value in values if flag == "--allowed-origin"]
    assert origins == ["https://chat.example.com", "http://[::1]:3000"]
    assert ("--generation-config", "none") in values


@pytest.mark.parametrize("host", ["https://images.example.com", "images.example.com:80", "a/b", "*", ""])
def test_what_is_no_host_of_media_is_rejected(host: str) -> None:
    with pytest.raises(ValueError, match="a host of URLs without a port"):
        _context(server={"allowedMediaHosts": [host]})


def test_servers_that_fetch_media_reach_the_ports_of_http() -> None:
    reached = _egress(_context(server={"allowedMediaHosts": ["images.example.com"]}))
    assert reached["server"][-1] == ("any", {80, 443})
    assert reached["engine"] == _egress(_context())["engine"]


@pytest.mark.parametrize("origin", ["chat.example.com", "https://a.example/path", "https://", "null"])
def test_what_is_no_origin_is_rejected(origin: str) -> None:
    with pytest.raises(ValueError, match="origin of a web page"):
        _context(server={"allowedOrigins": [origin]})


@pytest.mark.parametrize(("server", "replicas"), [({}, None), ({"replicas": 1}, 1), ({"replicas": 3}, 3)])
def test_the_number_of_servers_is_rendered_only_if_the_spec_has_it(
    server: dict[str, Any], replicas: int | None
) -> None:
    (deployment,) = [
        manifest
        for manifest in all_children(_context(server=server))
        if (manifest["kind"], manifest["metadata"]["name"]) == ("Deployment", "demo-server")
    ]
    assert deployment["spec"].get("replicas") == replicas


def test_absent_limits_of_a_batch_are_the_engines_defaults() -> None:
    """The descriptions of the fields name them."""
    defaults = EngineSettings(coordinator="", name="").inference_config
    fields = Batching.model_fields
    assert f"Default: {defaults.max_requests};" in str(fields["max_requests"].description)
    assert f"Default: {defaults.max_tokens};" in str(fields["max_tokens"].description)
    assert EngineSettings(coordinator="", name="", max_tokens=1).inference_config.max_tokens == defaults.max_requests


def test_pull_secrets_of_the_installation_reach_all_pods_and_restart_none() -> None:
    plain = _context()
    secret = replace(plain, settings=replace(SETTINGS, image_pull_secrets=("registry",)))
    before, after = ({(m["kind"], m["metadata"]["name"]): m for m in all_children(ctx)} for ctx in (plain, secret))
    account = after["ServiceAccount", "demo"]
    assert account["imagePullSecrets"] == [{"name": "registry"}]
    assert "imagePullSecrets" not in before["ServiceAccount", "demo"]
    assert [key for key in after if after[key] != before[key]] == [("ServiceAccount", "demo")]
    assert {pod["serviceAccountName"] for pod in _pods(secret).values()} == {"demo"}


def test_the_log_format_of_the_installation_is_a_variable_of_all_pods() -> None:
    plain = _context()
    json_logs = replace(plain, settings=replace(SETTINGS, runtime_log_format="json"))
    found = []
    for ctx in (plain, json_logs):
        (config,) = (manifest for manifest in all_children(ctx) if manifest["kind"] == "ConfigMap")
        found.append(config["data"].get("MEGATRON_LOG_FORMAT"))
        for pod in _pods(ctx).values():
            assert pod["containers"][0]["envFrom"] == [{"configMapRef": {"name": config["metadata"]["name"]}}]
    assert found == [None, "json"], "the default restarts no pod of an earlier release"


def test_the_kubelet_expands_no_variable_in_a_path_of_the_spec() -> None:
    source = {"persistentVolumeClaim": {"claimName": "c", "path": "/$(TOKEN)/$x"}}
    for name, pod in _pods(_context(model={"source": source})).items():
        args = pod["containers"][0].get("args", [])
        if "--model" in args:
            assert args[args.index("--model") + 1] == "/model/$$(TOKEN)/$$x", name


# --- The check of a new revision --------------------------------------------------------------------------------------

PLACED = {
    "metadata": {"labels": {"team": "a"}, "annotations": {"sidecar": "none"}},
    "spec": {
        "nodeSelector": {"gpu": "h100"},
        "tolerations": [{"operator": "Exists"}],
        "affinity": {"nodeAffinity": {"x": 1}, "podAntiAffinity": {"y": 1}},
        "initContainers": [{"name": "fetch", "image": "f"}],
        "containers": [
            {
                "name": "engine",
                "env": [{"name": "A", "value": "1"}],
                "resources": {"limits": {"memory": "200Gi", "cpu": "16"}, "requests": {"cpu": "16"}},
            },
            {"name": "sidecar", "image": "s"},
        ],
    },
}


def _check(**engine: Any) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return the pod that checks an engine, the container in it, and the pod template of the engine."""
    ctx = _context(engine=engine, parallelism={"tensor": 2}, model={"source": HUB})
    ctx = replace(ctx, settings=replace(SETTINGS, pod_policy=None))
    pod, template = check_pod(ctx), engine_statefulset(ctx, 0, pods=2)["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    return pod, container, template


def test_a_check_pod_has_what_an_engine_reads_and_not_what_an_engine_occupies() -> None:
    pod, container, template = _check(gpusPerPod=1, podTemplate=PLACED)
    engine = next(each for each in template["spec"]["containers"] if each["name"] == "engine")
    for field in ("image", "env", "envFrom", "volumeMounts", "securityContext"):
        assert container[field] == engine[field]
    assert container["args"] == [*engine["args"], "--check"]
    assert "--device" in engine["args"]
    assert container["resources"] == {
        "requests": {"cpu": "100m", "memory": "256Mi"},
        "limits": {"cpu": "16", "memory": "4Gi"},
    }
    assert not {"ports", "startupProbe", "livenessProbe", "readinessProbe"} & set(container)
    spec = pod["spec"]
    for field in ("volumes", "serviceAccountName", "nodeSelector", "tolerations", "securityContext"):
        assert spec[field] == template["spec"][field]
    assert spec["affinity"] == {"nodeAffinity": {"x": 1}}
    assert [each["name"] for each in spec["initContainers"]] == ["fetch"]
    assert (spec["restartPolicy"], "topologySpreadConstraints" in spec) == ("Never", False)


def test_no_selector_of_engines_matches_a_check_pod() -> None:
    pod, _, template = _check(podTemplate=PLACED)
    labels, revision = pod["metadata"]["labels"], template["metadata"]["labels"]["inference.megatron.dev/revision"]
    assert pod["metadata"]["name"] == f"demo-check-{revision}"
    assert labels["team"] == "a"
    assert pod["metadata"]["annotations"]["sidecar"] == "none"
    assert pod["metadata"]["ownerReferences"][0]["uid"] == "uid"
    ctx = _context(parallelism={"tensor": 2})
    for child in all_children(ctx):
        found = child.get("spec", {}).get("selector") if child["kind"] != "NetworkPolicy" else None
        wanted = None if found is None else found.get("matchLabels", found)
        assert wanted is None or not wanted.items() <= labels.items(), child["metadata"]["name"]


@pytest.mark.parametrize(
    ("resources", "memory", "device"),
    [
        ({}, ("256Mi", "4Gi"), False),
        ({"limits": {"memory": "1Gi"}}, ("256Mi", "1Gi"), False),
        ({"limits": {"memory": "128Mi"}}, ("128Mi", "128Mi"), False),
        ({"limits": {"nvidia.com/mig-1g.10gb": 1, "hugepages-2Mi": "1Gi"}}, ("256Mi", "4Gi"), True),
        ({"limits": {"ephemeral-storage": "1Gi", "hugepages-2Mi": "1Gi"}}, ("256Mi", "4Gi"), False),
    ],
)
def test_a_check_pod_takes_little_memory_and_no_device(
    resources: dict[str, Any], memory: tuple[str, str], device: bool
) -> None:
    _, container, _ = _check(podTemplate={"spec": {"containers": [{"name": "engine", "resources": resources}]}})
    found = container["resources"]
    assert (found["requests"]["memory"], found["limits"]["memory"]) == memory
    assert set(found["limits"]) == {"memory"}
    assert ("cuda" in container["args"]) is device
