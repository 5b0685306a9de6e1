"""What helm renders for unusual names and values, of several releases side by side. It needs helm, no control plane."""

from __future__ import annotations

import copy
import json
import random
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from soak import repeated, size

from localcluster import installation, programs
from localcluster.progress import Steps
from megatron_operator.install import install_manifests
from megatron_operator.terminal import as_yaml

CLUSTER_SCOPED = {"ClusterRole", "ClusterRoleBinding", "CustomResourceDefinition", "Namespace"}
TEXTS = {"name", "namespace", "image", "serviceAccountName", "key", "mountPath", "priorityClassName", "imagePullPolicy"}
"""Keys whose values are text in all kinds."""
LISTS_OF_TEXTS = {"args", "resourceNames", "matchNames"}
MAPS_OF_TEXTS = {"labels", "annotations", "matchLabels", "nodeSelector"}
OTHER_VALUES = [
    *("123", "1e3", "0x1f", "0o17", "0b1", "00", "0", "1-2", "2020-01-01", "1e-3"),
    *("y", "n", "yes", "no", "on", "off", "true", "false", "null", "nan", "inf"),
]
"""Names that YAML reads as other values than text, if they are not quoted."""
NAMES = [*OTHER_VALUES, "a", "team-a", "x" * 52]
RELEASES = [*NAMES, "operator", "1.5", "1.2.3", "a.b", "megatron-operator", f"{'x' * 51}.1", f"{'x' * 51}-2"]
NOT_NAMES = [
    "A",
    "a_b",
    "-a",
    "a-",
    "a b",
    "~",
    "a:b",
    '"',
    "a\nb: c",
    "{{ .Values }}",
    "x" * 300,
    7,
    1e3,
    True,
    None,
    {},
    [],
]
VALUES: dict[str, list[Any]] = {
    "global": [{"imageRegistry": "1e3", "imagePullSecrets": ["1e3", {"name": "no"}]}, {"of another chart": 7}, None],
    "global.imageRegistry": ["registry:5000/a", "", "a b", 7, None],
    "global.imagePullSecrets": [[{"name": name} for name in NAMES], [*NAMES], [7], [{}], [""], None],
    "nameOverride": [*NAMES, "A.b_c", *NOT_NAMES],
    "fullnameOverride": [*NAMES, *NOT_NAMES],
    "crd.keep": [True, False, None, "no"],
    "operator": [None, {}],
    "operator.replicas": [0, 2, 100, 3.0, 1e7, -1, "2", None],
    "operator.revisionHistoryLimit": [0, 3, 1e3, -1, "2", None],
    "operator.namespaces": [[name] for name in NAMES] + [["a", "1e3"], ["A"], [7], "a", None],
    "operator.logLevel": ["debug", "no", None],
    "operator.image": [None, {"repository": "123", "pullPolicy": "Always"}, {"repository": "1:20", "tag": "1"}],
    "operator.image.tag": [*NAMES, "v1.0_x", "a b", 7, None],
    "operator.image.repository": ["123", "registry:5000/a", "null", "", "a b", 7, None],
    "operator.podLabels": [{"team": name} for name in NAMES]
    + [{"no": "on"}, {"app.kubernetes.io/name": "other"}, {"a b": "c"}, {"a": 7}, {"a": None}, {"a": "b c"}, None],
    "operator.podAnnotations": [{"1e3": name} for name in NAMES] + [{"a": 7}, {"a": "b: c\n- d"}, None],
    "operator.extraEnv": [
        [{"name": "no", "value": "0x1f"}],
        [{"name": "A", "value": 7}],
        [{"value": "a"}],
        ["A=b"],
        None,
    ],
    "operator.extraVolumes": [[{"name": "1e3", "emptyDir": {}}], [{"name": 7}], None],
    "operator.extraVolumeMounts": [[{"name": "1e3", "mountPath": "/no"}], [{"name": "a"}], None],
    "operator.nodeSelector": [{"a": "1e3"}, {"a": 1e3}, None],
    "operator.tolerations": [[{"key": "no"}], ["a"], None],
    "operator.affinity": [{"nodeAffinity": {}}, None],
    "operator.topologySpreadConstraints": [
        [{"maxSkew": 1, "topologyKey": "1e3", "whenUnsatisfiable": "DoNotSchedule"}],
        [
            {"maxSkew": 2, "topologyKey": "no", "whenUnsatisfiable": "ScheduleAnyway", "matchLabelKeys": ["a"]},
            {
                "maxSkew": 1,
                "topologyKey": "a",
                "whenUnsatisfiable": "DoNotSchedule",
                "labelSelector": {"matchLabels": {"a": "1e3"}},
            },
        ],
        [{"maxSkew": 1, "topologyKey": "a"}],
        ["a"],
        None,
    ],
    "operator.priorityClassName": [*NAMES, *NOT_NAMES],
    "operator.extraArgs": [["--lease-seconds", "6"], ["1e3", "no"], [6], None],
    "operator.resources": [{}, {"limits": {"memory": "1e3"}}, None],
    "coordinator.image": [{"repository": "1e3", "tag": "1e3"}, {"tag": "a"}, None],
    "runtime.image.tag": [*NAMES, None],
    "runtime": [None, {}],
    "runtime.logFormat": ["json", None],
    "vllm": [None, {"image": {"repository": "0x1f"}}],
    "updates": [None, {"maxConcurrent": 1000000}, {"maxConcurrent": 100000, "oldestSecureVersion": "1e3"}],
    "security.enabled": [False, None, "no"],
    "security": [None],
    "openshift": ["auto", True, False, "true", "false", "no", 1, None],
    "rbac": [None, {"aggregateRoles": False}],
    "serviceAccount": [None, {"create": False}, {"create": True, "annotations": {"a": "1e3"}}],
    "serviceAccount.name": [*NAMES, *NOT_NAMES],
    "imagePullSecrets": [[{"name": name}] for name in NAMES] + [["a"], [{"name": 7}], [{}], None],
    "networkPolicy": [None, {"enabled": False}],
    "networkPolicy.monitoring": [
        [],
        [{"podSelector": {"matchLabels": {"a": "1e3"}}}],
        [{"podSelector": {"matchLabels": {"a": 1}}}],
        ["a"],
        None,
    ],
    "networkPolicy.apiServer": [["10.0.0.0/8"], ["no"], None],
    "monitoring": [None, {"scrape": True, "alerts": True, "dashboard": True}],
    "monitoring.labels": [{"release": "1e3"}, {"app.kubernetes.io/instance": "other"}, {"a": 7}, None],
    "podPolicy": [None, {"serviceAccounts": ["1e3"], "hostnames": ["*"], "sidecars": True}],
    "tests": [None, {"apiKeySecret": {"name": "1e3", "key": "no"}}, {"apiKeySecret": {"name": "a"}}],
    "tests.timeoutSeconds": [1, 86400, 1e6, 0, None],
}
"""Values by path, right and wrong ones."""
ACCEPTED = {path: values[0] for path, values in VALUES.items() if values[0] is not None}
"""The first value of each path. Helm accepts them together. It rejects a release without some of the sections."""


class KubernetesLoader(yaml.CSafeLoader):
    """Reads YAML as helm and kubectl do: with numbers such as 1e3, booleans such as y, and no key twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"a key is there twice: {Counter(keys).most_common(1)}"
        return super().construct_mapping(node, deep)


_NUMBER = re.compile(r"[-+]?(0o[0-7]+|(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?)$")
KubernetesLoader.add_implicit_resolver("!other", _NUMBER, list("-+.0123456789"))
KubernetesLoader.add_implicit_resolver("!other", re.compile("[yYnN]$"), list("yYnN"))
KubernetesLoader.add_constructor("!other", lambda loader, node: float(len(node.value)))


@pytest.fixture(scope="session")
def helm_program() -> Path:
    return programs.ensure(["helm"], Steps()) / "helm"


def rendered(
    program: Path, release: str, namespace: str, values: dict[str, Any], *arguments: str
) -> list[dict[str, Any]] | str:
    """Return the documents, or why helm rejects the values."""
    command = [program, "template", release, installation.CHART, "-n", namespace, "--kube-version", "1.34.0", "-f", "-"]
    command += arguments
    done = subprocess.run(command, input=json.dumps(values), check=False, capture_output=True, text=True)
    if done.returncode:
        return done.stderr
    return [document for document in yaml.load_all(done.stdout, KubernetesLoader) if document]


def not_texts(value: Any, where: str = "") -> Iterator[str]:
    """Yield the places at which text is expected and another value is found."""
    if isinstance(value, list):
        for index, each in enumerate(value):
            yield from not_texts(each, f"{where}[{index}]")
    elif isinstance(value, dict):
        for key, each in value.items():
            here = f"{where}.{key}"
            if not isinstance(key, str) or (key in TEXTS and not isinstance(each, str)):
                yield f"{here}: {each!r}"
            elif key in LISTS_OF_TEXTS:
                yield from (f"{here}: {entry!r}" for entry in each if not isinstance(entry, str))
            elif key in MAPS_OF_TEXTS:
                yield from (
                    f"{here}: {pair!r}" for pair in (each or {}).items() if not all(type(x) is str for x in pair)
                )
            else:
                yield from not_texts(each, here)


def problems(documents: list[dict[str, Any]]) -> list[str]:
    """Return what is wrong with the objects of a release."""
    found = [f"{each['kind']}: {place}" for each in documents if each["kind"] != CRD for place in not_texts(each)]
    for each in documents:
        template = each.get("spec", {}).get("template")
        if each["kind"] == "Deployment" and template:
            selector = each["spec"]["selector"]["matchLabels"].items()
            found += [] if selector <= template["metadata"]["labels"].items() else ["the selector does not match"]
        if each["kind"] == "Service" and not re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", each["metadata"]["name"]):
            found.append(f"Service: the name {each['metadata']['name']!r}")
    return found


CRD = "CustomResourceDefinition"


def identities(documents: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return kind, namespace and name of each object but the CRD, which one release installs."""
    found = []
    for each in documents:
        if each["kind"] != CRD:
            namespace = "" if each["kind"] in CLUSTER_SCOPED else each["metadata"]["namespace"]
            found.append((each["kind"], namespace, each["metadata"]["name"]))
    return found


def assign(values: dict[str, Any], path: str, value: Any) -> None:
    """Set a value by its path, unless its section is removed."""
    first, _, rest = path.partition(".")
    if not rest:
        values[first] = value
    elif isinstance(values.setdefault(first, {}), dict):
        assign(values[first], rest, value)


@repeated()
def test_every_rendering_is_right_or_rejected_with_a_reason(helm_program: Path, seed: int) -> None:
    rng = random.Random(seed)
    accepted = 0
    for _ in range(size(2, soak=100)):
        namespaces = rng.choices(NAMES, k=2)
        releases = {(rng.choice(namespaces), release) for release in rng.sample(RELEASES, 2)}
        releases |= {(namespaces[0], "megatron"), (namespaces[1], "megatron")}
        found: list[tuple[str, ...]] = []
        for namespace, release in sorted(releases):
            values: dict[str, Any] = {"crd": {"install": False}}
            for path in rng.sample(sorted(VALUES), rng.randrange(3)):
                assign(values, path, rng.choice(VALUES[path]))
            documents = rendered(helm_program, release, namespace, values)
            about = f"release {release} in {namespace} with {values}"
            if isinstance(documents, str):
                assert "don't meet the specifications of the schema" in documents, f"{about}: {documents}"
            else:
                accepted += 1
                assert problems(documents) == [], about
                own = identities(documents)
                assert len(own) == len(set(own)), about
                found += [each for each in own if not each[1]]
        assert len(found) == len(set(found)), f"{sorted(releases)}: {Counter(found).most_common(1)}"
    assert accepted


def test_the_first_values_are_accepted_together(helm_program: Path) -> None:
    values: dict[str, Any] = {"crd": {"install": False}}
    for path in sorted(ACCEPTED):
        assign(values, path, copy.deepcopy(ACCEPTED[path]))
    documents = rendered(helm_program, "megatron", "1e3", values)
    assert not isinstance(documents, str), documents
    assert problems(documents) == []


@pytest.mark.parametrize("path", [path for path, values in VALUES.items() if len(values) > (path in ACCEPTED)])
def test_each_other_value_is_right_or_rejected_with_a_reason(helm_program: Path, path: str) -> None:
    others = VALUES[path][path in ACCEPTED :]
    for value in random.Random(path).sample(others, min(len(others), size(1, soak=len(others)))):
        values: dict[str, Any] = {"crd": {"install": False}}
        assign(values, path, value)
        documents = rendered(helm_program, "megatron", "1e3", values)
        if isinstance(documents, str):
            section = path.partition(".")[0]
            assert section in documents, documents
            assert "don't meet the specifications of the schema" in documents, f"{values}: {documents}"
        else:
            assert problems(documents) == [], values


@pytest.mark.parametrize(
    ("values", "api", "assigned", "argument"),
    [
        ({}, False, False, None),
        ({}, True, True, None),
        ({"openshift": "auto"}, True, True, None),
        ({"openshift": False}, True, False, "false"),
        ({"openshift": True}, False, True, "true"),
        ({"openshift": "true"}, False, True, "true"),
        ({"openshift": None}, True, True, None),
    ],
)
def test_pods_have_no_fixed_ids_on_openshift(
    helm_program: Path, values: dict[str, Any], api: bool, assigned: bool, argument: str | None
) -> None:
    arguments = ("--api-versions", "security.openshift.io/v1") if api else ()
    documents = rendered(helm_program, "megatron", "a", values, *arguments)
    assert not isinstance(documents, str)
    deployment = next(each["spec"]["template"]["spec"] for each in documents if each["kind"] == "Deployment")
    check = next(each["spec"] for each in documents if each["kind"] == "Pod")
    profile = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    ids = {} if assigned else {"runAsUser": 65532, "runAsGroup": 65532}
    assert deployment["securityContext"] == check["securityContext"] == profile | ids
    args = deployment["containers"][0]["args"]
    assert (args[args.index("--openshift") + 1] if "--openshift" in args else None) == argument


def of_kind(documents: list[dict[str, Any]] | str, kind: str) -> list[dict[str, Any]]:
    assert not isinstance(documents, str), documents
    return [each for each in documents if each["kind"] == kind]


def test_global_values_reach_the_operators_pods_and_its_arguments(helm_program: Path) -> None:
    """The registry replaces the host of each repository."""
    digest = f"sha256:{'0' * 64}"
    values = {
        "crd": {"install": False},
        "global": {"imageRegistry": "mirror.example:5000/a/", "imagePullSecrets": ["one", {"name": "two"}]},
        "imagePullSecrets": [{"name": "two"}, {"name": "three"}],
        "operator": {"image": {"repository": "ghcr.io/megatron-inference/operator", "tag": "v1"}},
        "runtime": {"image": {"repository": "registry:5000/runtime", "digest": digest, "tag": "v2"}},
        "vllm": {"image": {"repository": "localhost/vllm", "tag": "v3"}},
        "coordinator": {"image": {"repository": "team/coordinator", "tag": "v4"}},
    }
    documents = rendered(helm_program, "megatron", "a", values)
    (deployment,), (tested,) = of_kind(documents, "Deployment"), of_kind(documents, "Pod")
    names = ["one", "two", "three"]
    for pod in (deployment["spec"]["template"]["spec"], tested["spec"]):
        assert pod["containers"][0]["image"] == "mirror.example:5000/a/megatron-inference/operator:v1"
        assert pod["imagePullSecrets"] == [{"name": name} for name in names]
    arguments = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    following = list(pairwise(arguments))
    assert ("--runtime-image", f"mirror.example:5000/a/runtime@{digest}") in following
    assert ("--vllm-runtime-image", "mirror.example:5000/a/vllm:v3") in following
    assert ("--coordinator-image", "mirror.example:5000/a/team/coordinator:v4") in following
    assert [value for key, value in following if key == "--image-pull-secret"] == names
    values["coordinator"] = {"image": {"repository": "coordinator", "tag": "v4"}}
    (deployment,) = of_kind(rendered(helm_program, "megatron", "a", values), "Deployment")
    assert "mirror.example:5000/a/coordinator:v4" in deployment["spec"]["template"]["spec"]["containers"][0]["args"]


def test_replicas_are_spread_and_old_replica_sets_limited(helm_program: Path) -> None:
    constraint = {"maxSkew": 1, "topologyKey": "topology.kubernetes.io/zone", "whenUnsatisfiable": "DoNotSchedule"}
    other = {**constraint, "labelSelector": {"matchLabels": {"a": "b"}}}
    operator = {"revisionHistoryLimit": 0, "topologySpreadConstraints": [constraint, other]}
    (deployment,) = of_kind(rendered(helm_program, "megatron", "a", {"operator": operator}), "Deployment")
    assert deployment["spec"]["revisionHistoryLimit"] == 0
    own = {**constraint, "labelSelector": deployment["spec"]["selector"]}
    assert deployment["spec"]["template"]["spec"]["topologySpreadConstraints"] == [own, other]


def test_every_object_has_the_recommended_labels_and_no_selector_has_those_that_change(helm_program: Path) -> None:
    monitoring = {"scrape": True, "alerts": True, "dashboard": True}
    values = {"monitoring": monitoring, "operator": {"replicas": 2, "image": {"tag": "v7"}}}
    documents = rendered(helm_program, "release", "a", values)
    assert not isinstance(documents, str), documents
    for document in documents:
        labels = document["metadata"]["labels"]
        assert labels["app.kubernetes.io/part-of"] == "megatron-inference", document["kind"]
        assert labels["app.kubernetes.io/version"] == "0.1.0", "the version of the chart's application"
        assert labels["app.kubernetes.io/instance"] == "release"
    (deployment,) = of_kind(documents, "Deployment")
    # An upgrade cannot change the selector of a Deployment.
    selector = {"app.kubernetes.io/name": "megatron-operator", "app.kubernetes.io/instance": "release"}
    assert deployment["spec"]["selector"] == {"matchLabels": selector}


def test_named_templates_begin_with_the_name_of_the_chart() -> None:
    """Named templates of all charts of a release share one name space."""
    templates = (installation.CHART / "templates").rglob("*.*")
    names = [name for path in templates for name in re.findall(r'define "([^"]+)"', path.read_text())]
    assert names
    assert [name for name in names if not name.startswith("megatron-inference.")] == []


@pytest.mark.parametrize(("version", "is_known"), [("1.29.4-eks-1", False), ("1.30.0", True), ("1.34.0", True)])
def test_an_api_server_that_does_not_know_selectable_fields_gets_none(
    helm_program: Path, version: str, is_known: bool
) -> None:
    command = [helm_program, "template", "megatron", installation.CHART, "--kube-version", version]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    (crd,) = of_kind([each for each in yaml.load_all(output, KubernetesLoader) if each], CRD)
    assert ["selectableFields" in each for each in crd["spec"]["versions"]] == [is_known]


@pytest.mark.parametrize("namespace", NAMES)
def test_the_manifest_of_the_operator_keeps_every_name(namespace: str) -> None:
    manifests = install_manifests(namespace=namespace, image="1e3", runtime_image="0x1f", vllm_runtime_image="no")
    text = as_yaml([each for each in manifests if each["kind"] != CRD])
    assert problems([*yaml.load_all(text, KubernetesLoader)]) == []


def test_the_manifests_of_two_namespaces_have_different_objects() -> None:
    images = {"image": "a", "runtime_image": "b", "vllm_runtime_image": "c"}
    one, other = (set(identities(install_manifests(namespace=name, **images))) for name in ("a", "b"))
    assert one & other == set()
