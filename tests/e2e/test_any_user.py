"""The images in containerd as a user without an entry in /etc/passwd and in group 0, as OpenShift runs them.

A webhook imitates OpenShift's admission in the namespaces of the operator and of the test.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest
from eventually import LONG_SECONDS, eventually
from openshift import API_VERSION, CRD, FIRST_ID, NAMESPACE_ANNOTATIONS, admission
from soak import SOAK

from localcluster import installation
from localcluster.kubectl import CommandError, Kubectl
from localcluster.progress import Steps
from localcluster.walkthrough import QUESTION, reachable

from .conftest import Platform, deploy

pytestmark = pytest.mark.skipif(not SOAK, reason="installs the operator twice; `make soak` runs it")

IDENTITY = "id -u; id -g; grep -c :$(id -u): /etc/passwd || true"


@pytest.fixture
async def openshift(platform: Platform, kube: Kubectl, tmp_path: Path) -> AsyncIterator[None]:
    """OpenShift's security API and admission, and the operator, installed again, which detects them."""
    namespaces = (installation.OPERATOR_NAMESPACE, kube.namespace)
    annotations = [f"{key}={value}" for key, value in NAMESPACE_ANNOTATIONS.items()]
    for namespace in namespaces:
        platform.kube("annotate", "namespace", namespace, "--overwrite", *annotations)
    crd = CRD["metadata"]["name"]

    async def is_served() -> bool:
        return API_VERSION in platform.kube("api-versions").split()

    with admission(namespaces, folder=tmp_path) as webhook:
        try:
            platform.kube.apply(json.dumps(CRD))
            await eventually(is_served, what="the API server serves OpenShift's API")
            platform.kube.apply(webhook)
            installation.install_operator(platform.kube, platform.helm, Steps())
            yield
        finally:
            name = webhook["metadata"]["name"]
            platform.kube("delete", "mutatingwebhookconfiguration", name, "--ignore-not-found")
            platform.kube("delete", "crd", crd, "--ignore-not-found")
            for namespace in namespaces:
                platform.kube("annotate", "namespace", namespace, *(f"{key}-" for key in NAMESPACE_ANNOTATIONS))
            installation.install_operator(platform.kube, platform.helm, Steps())


def pods(kube: Kubectl, *selector: str) -> list[str]:
    """Return the names of the pods that are not being deleted."""
    return [
        pod["metadata"]["name"]
        for pod in kube.json("pods", *selector)["items"]
        if "deletionTimestamp" not in pod["metadata"]
    ]


async def restarted(kube: Kubectl, pod: str) -> None:
    """End the process of a container, and wait until the kubelet has started it again in the same pod."""

    async def is_ready() -> bool:
        (status,) = kube.json("pod", pod)["status"]["containerStatuses"]
        return bool(status["restartCount"] >= 1 and status["ready"])

    with suppress(CommandError):  # the container may end before kubectl has its answer
        kube("exec", pod, "--", "sh", "-c", "kill 1")
    await eventually(is_ready, seconds=LONG_SECONDS, what=f"{pod} is ready again")


async def test_all_containers_start_serve_and_restart(platform: Platform, openshift: None, kube: Kubectl) -> None:
    system = platform.kube.in_namespace(installation.OPERATOR_NAMESPACE)
    deployed = deploy(kube)
    answer = deployed.chat.ask(QUESTION)
    operators = pods(system, "-l", f"app.kubernetes.io/instance={installation.RELEASE}")
    every = [*((system, pod) for pod in operators), *((kube, pod) for pod in pods(kube))]
    for where, pod in every:
        identity = where("exec", pod, "--", "sh", "-c", IDENTITY).split()
        print(f"{pod}: {identity}")
        assert identity == [str(FIRST_ID), "0", "0"], pod
    assert len(every) >= 4, "operator, coordinator, server and engine"
    for where, pod in every:
        await restarted(where, pod)
    assert {pod for where, pod in every if where is kube} == {*pods(kube)}
    reachable(deployed.chat.url)
    assert deployed.chat.ask(QUESTION) == answer
