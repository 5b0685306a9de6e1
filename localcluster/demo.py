"""The program of `make demo`: creates a Kubernetes cluster and takes a custom resource through its lifecycle."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import click

from localcluster import installation
from localcluster.cluster import LocalCluster
from localcluster.errors import ClusterError
from localcluster.kubectl import CommandError, Kubectl
from localcluster.progress import Steps
from localcluster.settings import REPOSITORY
from localcluster.walkthrough import CheckError, Walkthrough

SAMPLE = REPOSITORY / "manifests" / "samples" / "cpu-demo.yaml"
NAME = "demo"
CRD = "megatroninferences.inference.megatron.dev"


@dataclass(frozen=True)
class Target:
    """A cluster for the demo, and the method to reach its Services from this machine."""

    kube: Kubectl
    helm: Path | str
    values: tuple[str, ...] = ()
    forwards_ports: bool = False

    def reach(self, service: str) -> str:
        return f"http://{self.kube.cluster_ip(service)}"


@contextmanager
def _forwarded(target: Target, service: str) -> Iterator[str]:
    """Run `kubectl port-forward` for a Service, and yield the local URL.

    This is for clusters whose Services this machine cannot reach directly.
    """
    command = target.kube.command("port-forward", f"service/{service}", ":80")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        match = re.search(r"127\.0\.0\.1:(\d+)", line)
        if match is None:
            raise ClusterError(f"kubectl port-forward printed {line!r}: check that the Service {service} exists")
        yield f"http://127.0.0.1:{match[1]}"
    finally:
        process.terminate()
        process.wait(10)


def _embedded(steps: Steps) -> Target:
    cluster = LocalCluster(steps=steps)
    helm = installation.prepare(cluster, steps)
    return Target(Kubectl(str(cluster.kubectl), cluster.kubeconfig), helm)


def _current() -> Target:
    """Return the user's current cluster as the target.

    The operator must be installed in this cluster, and the cluster's nodes must be able to pull images from a registry.
    """
    kube = Kubectl()
    try:
        kube("get", "crd", CRD)
    except CommandError as error:
        install = (
            f"helm install {installation.RELEASE} charts/megatron-inference "
            f"--namespace {installation.OPERATOR_NAMESPACE} --create-namespace "
            "--set operator.image.repository=… --set runtime.image.repository=…"
        )
        raise ClusterError(
            f"{error}\nIf the cluster answers, it has no operator yet: push both images of the Dockerfile to where its "
            f"nodes can pull them, then {install}"
        ) from error
    return Target(kube, "helm", forwards_ports=True)


def _walk(target: Target, steps: Steps) -> None:
    def walkthrough(url: str | None = None) -> Walkthrough:
        return Walkthrough(target.kube, steps, SAMPLE, NAME, target.reach if url is None else lambda _service: url)

    if not target.forwards_ports:
        walkthrough().run()
        return
    target.kube("apply", "-f", str(SAMPLE))
    target.kube.wait(f"mi/{NAME}", "condition=Ready")
    with _forwarded(target, NAME) as url:
        walkthrough(url).run()


def _farewell(target: Target) -> str:
    if target.kube.kubeconfig is None:
        return f"The resource {NAME} is still there: kubectl delete mi {NAME}; helm uninstall {installation.RELEASE}"
    return f"""
The cluster is up, and the model serves:

  export KUBECONFIG={target.kube.kubeconfig}
  {target.kube.executable} get mi,pods
  curl {target.reach(NAME)}/v1/models
  {target.kube.executable} patch mi {NAME} --type merge -p '{{"spec":{{"desiredState":"Paused"}}}}'

make cluster-down removes it."""


@click.command()
@click.option(
    "--cluster",
    type=click.Choice(["embedded", "current"]),
    default="embedded",
    help="Cluster to use: an embedded one-node cluster, or the cluster of the current kubeconfig context.",
)
def main(cluster: str) -> None:
    """Run the whole demo, and check every step. cluster: "embedded" or "current"."""
    steps = Steps()
    try:
        if cluster == "embedded":
            target = _embedded(steps)
            installation.install_operator(target.kube, target.helm, steps)
        else:
            target = _current()
        _walk(target, steps)
    except (ClusterError, CheckError, CommandError) as error:
        click.echo(f"\nThe demo stopped: {error}", err=True)
        click.echo("Inspect it: kubectl get mi,pods; kubectl describe mi demo; python -m localcluster logs", err=True)
        sys.exit(1)
    click.echo(_farewell(target))


if __name__ == "__main__":
    main()
