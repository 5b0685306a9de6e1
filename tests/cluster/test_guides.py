"""The commands of the guides that install, upgrade or change something have the effect that the page describes."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from eventually import eventually
from guide_blocks import PAGES, ROOT, blocks

from localcluster import LocalCluster
from megatron_operator.cluster.kinds import SECRET, ObjectKind, kind_of
from megatron_operator.decision.references import pod_references
from megatron_operator.render.children import all_children
from megatron_operator.render.context import RenderContext
from megatron_operator.resource.settings import Settings
from megatron_operator.resource.spec import parse_spec

from .conftest import wait_until_served

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

SYSTEM = "megatron-system"
REVIEWS = ObjectKind("SubjectAccessReview", "authorization.k8s.io", "v1", "subjectaccessreviews")
MONITORING = ("ServiceMonitor", "PodMonitor", "PrometheusRule")
CHANGES = re.compile(r"kubectl (patch|scale) mi demo |kubectl create secret ")
Run = Callable[[str], str]


def commands(page: Path, pattern: re.Pattern[str]) -> list[str]:
    """Return the commands of a page that match, in order."""
    found = (command for block in blocks(page) if block.language == "sh" for command in block.commands)
    return [command for command in found if pattern.match(command)]


@pytest.fixture
def run(control_plane: LocalCluster, namespace: str, tmp_path: Path) -> Run:
    """Run a command of a page in the test's namespace, and return its output. A failure fails the test."""
    config = yaml.safe_load(control_plane.kubeconfig.read_text())
    config["contexts"][0]["context"]["namespace"] = namespace
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(yaml.safe_dump(config))
    (tmp_path / "charts").symlink_to(ROOT / "charts")
    programs = (control_plane.kubectl, control_plane.program("helm"))
    path = os.pathsep.join([*(str(program.parent) for program in programs), os.environ["PATH"]])
    variables = {"KUBECONFIG": str(kubeconfig), "PATH": path, "REGISTRY": "registry.example", "HF_TOKEN": "hf_x"}

    def call(command: str) -> str:
        environment = {**os.environ, **variables}
        done = subprocess.run(
            ["bash", "-euc", command], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        return done.stdout

    return call


def merged(old: Any, new: Any) -> Any:
    """Return a JSON merge patch applied to a value."""
    if not isinstance(old, dict) or not isinstance(new, dict):
        return copy.deepcopy(new)
    return {**old, **{key: merged(old.get(key), value) for key, value in new.items()}}


# --- helm -------------------------------------------------------------------------------------------------------------


def values_of(command: str) -> dict[str, Any]:
    """Return the values that the options --set of a command set."""
    words = shlex.split(command.replace("$REGISTRY", "registry.example"))
    found: dict[str, Any] = {}
    for option, setting in pairwise(words):
        if option == "--set":
            path, _, text = setting.partition("=")
            value: Any = text[1:-1].split(",") if text.startswith("{") else yaml.safe_load(text)
            for name in reversed(path.split(".")):
                value = {name: value}
            found = merged(found, value)
    return found


@pytest.fixture
def release(run: Run, control_plane: LocalCluster, reinstall_crd: Any) -> Iterator[None]:
    """What the chart needs of a cluster; the release of the guides is removed at the end."""
    crds, kinds = [], []
    for kind in MONITORING:
        names = {"kind": kind, "plural": f"{kind.lower()}s", "singular": kind.lower()}
        schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
        version = {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
        spec = {"group": "monitoring.coreos.com", "names": names, "scope": "Namespaced", "versions": [version]}
        body = {"metadata": {"name": f"{names['plural']}.monitoring.coreos.com"}, "spec": spec}
        crds.append({"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition", **body})
        kinds.append(ObjectKind(kind, spec["group"], version["name"], names["plural"]))
    listed = {"apiVersion": "v1", "kind": "List", "items": crds}
    control_plane.run_kubectl("apply", "--server-side", "-f", "-", stdin=json.dumps(listed))
    for kind in kinds:
        wait_until_served(control_plane, kind)
    yield
    run(f"helm uninstall megatron --namespace {SYSTEM} --ignore-not-found")
    removed = " ".join(f"crd/{kind.plural}.{kind.group}" for kind in kinds)
    run(f"kubectl delete {removed} namespace/{SYSTEM} --ignore-not-found --wait=false")


async def test_helm_keeps_what_was_set_and_sets_what_the_page_says(
    run: Run, release: None, api: Any, namespace: str
) -> None:
    helm = re.compile(r"helm (install|upgrade) megatron ")
    documented = [command for page in PAGES for command in commands(page, helm)]
    installs = [command for command in documented if command.startswith("helm install")]
    upgrades = [command for command in documented if command not in installs]
    assert installs
    assert len(upgrades) >= 4
    for name in ("team-a", "team-b"):
        run(f"kubectl create namespace {name} --dry-run=client -o yaml | kubectl apply -f -")
    own = f"--reset-then-reuse-values --set 'operator.namespaces={{{namespace}}}' --set updates.maxConcurrent=3"
    expected: dict[str, Any] = {}
    sequence = [
        # The CRD is there already.
        f"{installs[0]} --take-ownership",
        f"helm upgrade megatron charts/megatron-inference --namespace {SYSTEM} {own}",
        *upgrades,
    ]
    for command in sequence:
        await asyncio.to_thread(run, command)
        expected = merged(expected, values_of(command))
        stored = json.loads(run(f"helm get values megatron --namespace {SYSTEM} --output json"))
        assert stored == expected, command
        account = run(
            f"kubectl get deployment --namespace {SYSTEM} -l app.kubernetes.io/instance=megatron "
            "-o jsonpath='{.items[0].spec.template.spec.serviceAccountName}'"
        )
        served = expected.get("operator", {}).get("namespaces")
        for where in (namespace, "team-a", "team-b", "kube-system"):
            review = {
                "user": f"system:serviceaccount:{SYSTEM}:{account}",
                "resourceAttributes": {"namespace": where, "verb": "get", "resource": "secrets"},
            }

            async def is_granted(
                review: dict[str, Any] = review, granted: bool = served is None or where in served
            ) -> bool:
                answer = await api.request("POST", REVIEWS.path(None), body={"spec": review})
                return bool(answer["status"]["allowed"] == granted)

            # The API server reads changed roles by a watch.
            await eventually(is_granted, what=f"after {command}: {review}")


# --- kubectl ----------------------------------------------------------------------------------------------------------

PATCH = re.compile(r"-p '(?P<patch>.*)'$")
CHANGING = [page for page in PAGES if commands(page, CHANGES)]


def change_of(command: str) -> dict[str, Any]:
    """Return the merge patch of the spec that a command makes, by its text."""
    if command.startswith("kubectl scale"):
        words = shlex.split(command)
        return {"replicas": int(words[words.index("--replicas") + 1])}
    found = PATCH.search(command)
    assert found is not None, command
    patch: dict[str, Any] = json.loads(found["patch"])
    assert set(patch) == {"spec"}
    return patch["spec"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("guide", [pytest.param(guide, id=guide.stem) for guide in CHANGING])
async def test_kubectl_changes_what_the_page_says_and_nothing_else(
    guide: Path, run: Run, resource: Any, api: Any, namespace: str
) -> None:
    await resource.create(model={"source": {"huggingFace": {"repo": "org/model"}}})
    run("openssl req -x509 -newkey rsa:2048 -nodes -keyout tls.key -out tls.crt -days 2 -subj /CN=demo 2>&1")
    for command in commands(guide, CHANGES):
        before = (await resource.get())["spec"]
        await asyncio.to_thread(run, command)
        after = (await resource.get())["spec"]
        if "create secret" not in command:
            assert after == merged(before, change_of(command)), command
            assert after != before, f"{command}: changes nothing"
            continue
        words = shlex.split(command)
        secret = await api.get(SECRET, namespace, words[4])
        literals = {word.partition("=")[2].partition("=")[0] for word in words if word.startswith("--from-literal=")}
        assert set(secret["data"]) == (literals or {"tls.crt", "tls.key"}), command
        assert all(secret["data"].values()), command
        assert after == before
    await every_reference_exists(resource, api, namespace)


async def every_reference_exists(resource: Any, api: Any, namespace: str) -> None:
    """Compare the names in the resource with what the commands of the page have created."""
    found = await resource.get()
    settings = Settings(runtime_image="runtime:1", pod_policy=None)
    ctx = RenderContext("demo", namespace, found["metadata"]["uid"], parse_spec(found["spec"]), settings)
    for manifest in all_children(ctx):
        for reference in pod_references(ctx, manifest) if manifest["kind"] in ("Deployment", "StatefulSet") else ():
            obj = await api.get(kind_of(reference.ref.api_version, reference.ref.kind), namespace, reference.ref.name)
            assert obj is not None, f"{reference.ref} is named and not created"
            assert reference.key in ("", *obj["data"]), f"{reference.ref} has no key {reference.key}"
