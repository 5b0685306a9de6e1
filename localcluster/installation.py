"""Installs the operator and its images on a cluster, for the demo and the end-to-end tests."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from localcluster import images, packages, programs
from localcluster.cluster import LocalCluster
from localcluster.kubectl import CommandError, Kubectl
from localcluster.progress import Steps
from localcluster.settings import REPOSITORY
from localcluster.shell import run

RELEASE = "megatron"
OPERATOR_NAMESPACE = "megatron-system"
CHART = REPOSITORY / "charts" / "megatron-inference"
_VALUES = {"operator": "operator", "runtime": "runtime", "vllm": "runtime-vllm"}
"""Build target of the image, for each image value of the chart."""


def prepare(cluster: LocalCluster, steps: Steps) -> Path:
    """Start the cluster, build the project's images, load the images, and return the path of helm.

    Programs and images are built in parallel.
    """
    packages.ensure([*packages.NODE, *packages.IMAGES], steps)
    with ThreadPoolExecutor(1) as pool:
        built = pool.submit(images.build, images.DEFAULT_TARGETS, steps)
        programs.ensure([*programs.NODE, "helm"], steps)
        cluster.up()
        built.result()
    cluster.build_images(images.DEFAULT_TARGETS)
    return cluster.program("helm")


def install_operator(kube: Kubectl, helm: Path | str, steps: Steps, *, values: Sequence[str] = ()) -> None:
    """Install or upgrade the chart with the images built here, and wait until the operator is ready.

    values: further assignments for helm's option `--set`, which take precedence.
    """
    with steps.step("helm upgrade --install: the operator is ready"):
        defaults = [
            f"{place}.image.{key}={value}"
            for place, target in _VALUES.items()
            for key, value in zip(("repository", "tag"), images.TARGETS[target].rsplit(":", 1), strict=True)
        ]
        kubeconfig = ["--kubeconfig", str(kube.kubeconfig)] if kube.kubeconfig else []
        chosen = [part for value in [*defaults, *values] for part in ("--set", value)]
        namespace = ["--namespace", OPERATOR_NAMESPACE, "--create-namespace"]
        run([helm, *kubeconfig, "upgrade", "--install", RELEASE, CHART, *namespace, *chosen])
        system = kube.in_namespace(OPERATOR_NAMESPACE)
        if not values:
            # Restart the pods, because the tag of a development image stays the same when its content changes.
            system("rollout", "restart", "deployment", "-l", f"app.kubernetes.io/instance={RELEASE}")
        try:
            system("rollout", "status", "deployment", "-l", f"app.kubernetes.io/instance={RELEASE}", "--timeout=300s")
        except CommandError as error:
            logs = system("logs", "-l", f"app.kubernetes.io/instance={RELEASE}", "--tail=40")
            raise CommandError(["helm", "upgrade"], 1, f"{error}\n{logs}") from error
