"""The chart, rendered by helm."""

import json
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml

from localcluster import installation
from localcluster.kubectl import RESOURCE, Kubectl
from megatron_operator.install import install_manifests
from megatron_operator.resource.settings import (
    DEFAULT_OPERATOR_IMAGE,
    DEFAULT_RUNTIME_IMAGE,
    DEFAULT_VLLM_RUNTIME_IMAGE,
    IMAGE_REGISTRY,
    MONITORING_NAMESPACE,
)

from .conftest import Platform


def test_the_chart_installs_what_the_install_manifest_does(platform: Platform) -> None:
    command = [platform.helm, "template", "megatron", installation.CHART, "--kube-version", "1.34.0", "--skip-tests"]
    output = subprocess.run([*command, "-n", "megatron-system"], check=True, capture_output=True, text=True).stdout
    chart = {(doc["kind"], doc["metadata"]["name"]): doc for doc in yaml.safe_load_all(output) if doc}
    plain = install_manifests(
        namespace="megatron-system",
        image=DEFAULT_OPERATOR_IMAGE,
        runtime_image=DEFAULT_RUNTIME_IMAGE,
        vllm_runtime_image=DEFAULT_VLLM_RUNTIME_IMAGE,
    )
    for manifest in plain:
        key = (manifest["kind"], manifest["metadata"]["name"])
        if manifest["kind"] == "Namespace":
            continue
        found = chart.pop(key)
        assert found.get("rules") == manifest.get("rules")
        assert found.get("subjects") == manifest.get("subjects")
        if manifest["kind"] == "Deployment":
            assert found["spec"]["template"]["spec"] == manifest["spec"]["template"]["spec"]
        if manifest["kind"] == "CustomResourceDefinition":
            assert found["spec"] == manifest["spec"]
    assert chart == {}


GOLDEN = Path(__file__).parent / "golden"
VARIANTS: dict[str, list[str]] = {
    "namespaced": ["--set", "operator.namespaces={team-a,team-b}", "--set", "operator.replicas=2"],
    "monitored": ["--set", "monitoring.scrape=true", "--set", "monitoring.alerts=true"],
    "plain": ["--set", "security.enabled=false", "--set", "networkPolicy.enabled=false", "--set", "crd.keep=false"],
}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_of_the_chart_renders_to_its_golden_file(platform: Platform, name: str) -> None:
    """Compare all but the CRD, which the test above compares with the code."""
    command = [platform.helm, "template", "megatron", installation.CHART, "--kube-version", "1.34.0", "--skip-tests"]
    variant = [*VARIANTS[name], "--set", "crd.install=false", "-n", "megatron-system"]
    rendered = subprocess.run([*command, *variant], check=True, capture_output=True, text=True).stdout
    assert rendered == (GOLDEN / f"chart-{name}.yaml").read_text()


UNKNOWN = {
    "operator.replicas=-1": "at '/operator/replicas'",
    "operator.bogus=1": "'bogus' not allowed",
    "image=x": "'image' not allowed",
    "podPolicy.hostPaths={/dev/../etc}": "at '/podPolicy/hostPaths/0'",
    "podPolicy.hostPaths[1]=/": "at '/podPolicy/hostPaths/1'",
    "podPolicy.capabilities={ALL}": "at '/podPolicy/capabilities/0'",
    "podPolicy.privileged=true": "'privileged' not allowed",
}
"""Values of the chart that are unknown or would allow everything, and what helm's error says of each."""


def test_values_that_are_unknown_or_would_allow_everything_are_rejected_by_name(platform: Platform) -> None:
    command = [platform.helm, "template", "megatron", installation.CHART, "--kube-version", "1.34.0"]
    command += [part for value in UNKNOWN for part in ("--set", value)]
    rejected = subprocess.run(command, check=False, capture_output=True, text=True)
    assert rejected.returncode != 0
    assert [words for words in UNKNOWN.values() if words not in rejected.stderr] == []


def test_names_images_and_further_fields_of_the_pod_can_be_set(platform: Platform) -> None:
    digest = f"sha256:{'0' * 64}"
    values: dict[str, Any] = {
        "fullnameOverride": "full",
        "nameOverride": "short",
        "serviceAccount": {"create": False, "name": "existing"},
        "operator": {
            "image": {"repository": "operator", "digest": digest},
            "podLabels": {"team": "a", "app.kubernetes.io/name": "other", "app.kubernetes.io/instance": "other"},
            "podAnnotations": {"note": "b"},
            "extraEnv": [{"name": "HTTPS_PROXY", "value": "http://proxy"}],
            "extraVolumes": [{"name": "ca", "configMap": {"name": "ca"}}],
            "extraVolumeMounts": [{"name": "ca", "mountPath": "/etc/ca"}],
        },
        "rbac": {"aggregateRoles": False},
    }
    command = [platform.helm, "template", "megatron", installation.CHART, "--kube-version", "1.34.0", "-f", "-"]
    output = subprocess.run(command, input=yaml.safe_dump(values), check=True, capture_output=True, text=True).stdout
    documents = [doc for doc in yaml.safe_load_all(output) if doc]
    assert "ServiceAccount" not in {doc["kind"] for doc in documents}
    assert not [doc for doc in documents if doc["metadata"]["name"].endswith(("-view", "-edit"))]
    (deployment,) = [doc for doc in documents if doc["kind"] == "Deployment"]
    template = deployment["spec"]["template"]
    (container,) = template["spec"]["containers"]
    assert deployment["metadata"]["name"] == "full"
    assert deployment["spec"]["selector"]["matchLabels"]["app.kubernetes.io/name"] == "short"
    assert deployment["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    assert template["metadata"]["labels"]["team"] == "a"
    assert template["metadata"]["annotations"] == {"note": "b"}
    assert template["spec"]["serviceAccountName"] == "existing"
    assert container["image"] == f"operator@{digest}"
    assert values["operator"]["extraEnv"][0] in container["env"]
    assert values["operator"]["extraVolumes"][0] in template["spec"]["volumes"]
    assert values["operator"]["extraVolumeMounts"][0] in container["volumeMounts"]


READ, WRITE = {"get", "list", "watch"}, {"create", "patch", "delete"}


def test_roles_of_kubernetes_include_the_resource(kube: Kubectl) -> None:
    expected = {"view": READ, "edit": READ | WRITE}
    for role in expected:
        kube("create", "rolebinding", role, f"--clusterrole={role}", f"--user={role}er")
    resource, _, group = RESOURCE.partition(".")

    def review(role: str, verb: str) -> dict[str, Any]:
        what = {"verb": verb, "group": group, "resource": resource, "namespace": kube.namespace}
        spec = {"user": f"{role}er", "resourceAttributes": what}
        return {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": spec}

    questions = [(role, verb) for role in expected for verb in sorted(READ | WRITE)]
    reviews = yaml.safe_dump_all([review(*question) for question in questions])
    answers = kube("create", "-o", 'jsonpath={.status.allowed}{" "}', "-f", "-", stdin=reviews).split()
    allowed = {role: set[str]() for role in expected}
    for (role, verb), answer in zip(questions, answers, strict=True):
        if answer == "true":
            allowed[role].add(verb)
    assert allowed == expected


SWITCHES = {
    "podPolicy.hostPaths={/dev/infiniband}": ("--allow-host-path", "/dev/infiniband"),
    "podPolicy.modelCachePaths={/var/cache/models}": ("--allow-model-cache-path", "/var/cache/models"),
    "podPolicy.capabilities={IPC_LOCK}": ("--allow-capability", "IPC_LOCK"),
    "podPolicy.hostNetwork=true": ("--allow-host-network",),
    "podPolicy.sidecars=true": ("--allow-sidecars",),
    "podPolicy.serviceAccounts={trainer}": ("--allow-service-account", "trainer"),
    "podPolicy.imageRepositories={registry.example/}": ("--allow-image-repository", "registry.example/"),
    "podPolicy.environment={HF_ENDPOINT}": ("--allow-environment", "HF_ENDPOINT"),
    "podPolicy.profile=trusted": ("--pod-policy-profile", "trusted"),
    "podPolicy.secretEnvironment={A_TOKEN}": ("--allow-secret-environment", "A_TOKEN"),
    "podPolicy.metadata={example.org/a}": ("--allow-metadata", "example.org/a"),
    "podPolicy.hostnames={*.example.org}": ("--allow-hostname", "*.example.org"),
    "podPolicy.tlsSecrets={models-tls}": ("--allow-tls-secret", "models-tls"),
    "podPolicy.quotedImageRepositories={registry.example/a}": ("--quote-image-repository", "registry.example/a"),
    "networkPolicy.egress=false": ("--no-egress-policies",),
    "networkPolicy.apiServer={10.0.0.0/28}": ("--api-server-range", "10.0.0.0/28"),
    "vllm.allowCode=true": ("--allow-vllm-code",),
    "imagePullSecrets[0].name=registry": ("--image-pull-secret", "registry"),
    "runtime.logFormat=json": ("--runtime-log-format", "json"),
}
"""Values of the chart, and the options of the operator that they set."""
DEFAULTS = {
    ("--lease-name", "megatron-operator"),
    ("--runtime-image", DEFAULT_RUNTIME_IMAGE),
    ("--vllm-runtime-image", DEFAULT_VLLM_RUNTIME_IMAGE),
    ("--coordinator-image", DEFAULT_OPERATOR_IMAGE),
    ("--image-pull-policy", "IfNotPresent"),
}


def options_of_operator(platform: Platform, values: Iterable[str]) -> list[tuple[str, ...]]:
    """Render the chart with values, and return the options of the operator but the peers of monitoring."""
    command = [platform.helm, "template", "megatron", installation.CHART, "--kube-version", "1.34.0"]
    command += ["--show-only", "templates/deployment.yaml", *(part for value in values for part in ("--set", value))]
    rendered = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    (container,) = yaml.safe_load(rendered)["spec"]["template"]["spec"]["containers"]
    run, *arguments = container["args"]
    assert run == "run"
    starts = [index for index, argument in enumerate(arguments) if argument.startswith("--")]
    options = [tuple(arguments[start:end]) for start, end in zip(starts, [*starts[1:], None], strict=True)]
    (peers,) = [option for option in options if option[0] == "--monitoring-peers"]
    assert json.loads(peers[1]) == [MONITORING_NAMESPACE], "the defaults of operator and chart are equal"
    return [option for option in options if option != peers]


def test_every_switch_of_the_chart_reaches_the_operator_once(platform: Platform) -> None:
    assert sorted(options_of_operator(platform, SWITCHES)) == sorted([*DEFAULTS, *SWITCHES.values()])


@pytest.mark.parametrize(
    "values",
    [("podPolicy.profile=restricted", "runtime.logFormat=null", "networkPolicy.egress=null"), ("podPolicy=null",)],
)
def test_defaults_of_the_chart_and_removed_values_set_no_option(platform: Platform, values: tuple[str, ...]) -> None:
    assert sorted(options_of_operator(platform, values)) == sorted(DEFAULTS)


@pytest.mark.parametrize(
    ("values", "image"),
    [
        (["operator.image.repository=registry.example/operator"], "registry.example/operator:0.1.0"),
        (["coordinator=null", "operator.image.tag=v7"], f"{IMAGE_REGISTRY}/megatron-operator:v7"),
        (["coordinator.image.repository=registry.example/c", "coordinator.image.tag=v7"], "registry.example/c:v7"),
    ],
)
def test_coordinators_run_the_operators_image_unless_another_is_set(
    platform: Platform, values: list[str], image: str
) -> None:
    assert ("--coordinator-image", image) in options_of_operator(platform, values)


def test_values_of_a_chart_without_vllm_still_render(platform: Platform) -> None:
    options = options_of_operator(platform, ["vllm=null"])
    assert not [option for option in options if "vllm" in "".join(option)]
