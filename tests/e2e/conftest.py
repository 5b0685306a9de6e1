"""One real node for all tests, with the operator installed by helm; a namespace for each test."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest
import yaml
from run_record import used

from localcluster import installation
from localcluster.cluster import LocalCluster
from localcluster.kubectl import CommandError, Kubectl
from localcluster.programs import KUBERNETES_VERSION
from localcluster.progress import Steps
from localcluster.settings import Options
from localcluster.walkthrough import Chat, reachable

SAMPLE = Path(__file__).parents[2] / "manifests" / "samples" / "cpu-demo.yaml"
SECOND = 2
"""Index of the second node."""
_numbers = count(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.e2e)
            item.add_marker(pytest.mark.timeout(3600))


@dataclass(frozen=True)
class Platform:
    cluster: LocalCluster
    helm: Path
    kube: Kubectl


@pytest.fixture(scope="session")
def platform() -> Iterator[Platform]:
    steps = Steps()
    cluster = LocalCluster(steps=steps)
    was_up = bool(cluster.status())
    helm = installation.prepare(cluster, steps)
    kube = Kubectl(str(cluster.kubectl), cluster.kubeconfig)
    installation.install_operator(kube, helm, steps)
    used("Kubernetes with kubelet, containerd, kube-proxy and CoreDNS", KUBERNETES_VERSION)
    used("nodes", 1)
    used("weights", "SmolLM2-135M")
    yield Platform(cluster, helm, kube)
    if not was_up:
        cluster.down()


@pytest.fixture
def cluster(platform: Platform) -> Iterator[LocalCluster]:
    """The cluster of all tests, grown to two nodes with the images, with the operator on the first. It keeps both."""
    grown = LocalCluster(options=Options(nodes=SECOND))
    grown.up()
    grown.build_images()
    installation.install_operator(platform.kube, platform.helm, Steps(), values=[on_first_node(grown)])
    used("nodes", SECOND)
    yield grown
    grown.restore_network(SECOND)
    grown.thaw_node(SECOND)


def on_first_node(cluster: LocalCluster) -> str:
    """Return the assignment of a chart value that places the operator on the first node."""
    return f"operator.nodeSelector.kubernetes\\.io/hostname={cluster.settings.nodes[0].name}"


@contextmanager
def own_namespace(platform: Platform) -> Iterator[Kubectl]:
    """kubectl in a new namespace, which is deleted at the end in the background."""
    namespace = f"test-{next(_numbers)}"
    platform.kube("create", "namespace", namespace)
    yield platform.kube.in_namespace(namespace)
    platform.kube("delete", "namespace", namespace, "--wait=false")


@contextmanager
def printed_when_failed(platform: Platform, kube: Kubectl, request: pytest.FixtureRequest) -> Iterator[None]:
    """Print the state of pods, resource, events and logs when the test fails."""
    failures_before = request.session.testsfailed
    yield
    if request.session.testsfailed > failures_before:
        _print_state(platform, kube)


@pytest.fixture
def kube(platform: Platform, request: pytest.FixtureRequest) -> Iterator[Kubectl]:
    """kubectl in a namespace of the test's own."""
    with own_namespace(platform) as kube, printed_when_failed(platform, kube, request):
        yield kube


@pytest.fixture(scope="session")
def shared(platform: Platform) -> Iterator[Deployed]:
    """A resource with one engine and two servers, for tests that change nothing but its number of engines and pods."""
    server = {**yaml.safe_load(SAMPLE.read_text())["spec"]["server"], "replicas": 2}
    with own_namespace(platform) as kube:
        yield deploy(kube, server=server, lifecycle={"drainSeconds": 60})


@pytest.fixture
def served(platform: Platform, shared: Deployed, request: pytest.FixtureRequest) -> Iterator[Deployed]:
    """The shared resource, whose state is printed when the test fails."""
    with printed_when_failed(platform, shared.kube, request):
        yield shared


@pytest.fixture
def claim(kube: Kubectl) -> Iterator[Callable[..., str]]:
    """claim(directory): create a PersistentVolumeClaim of a directory of this machine and return its name."""
    volumes: list[str] = []

    def make(directory: Path, *, mode: str = "ReadOnlyMany") -> str:
        name = f"{kube.namespace}-model"
        common = {"accessModes": [mode], "storageClassName": ""}
        kube.apply(
            {
                "apiVersion": "v1",
                "kind": "PersistentVolume",
                "metadata": {"name": name},
                "spec": {**common, "capacity": {"storage": "1Gi"}, "hostPath": {"path": str(directory)}},
            }
        )
        volumes.append(name)
        kube.apply(
            {
                "apiVersion": "v1",
                "kind": "PersistentVolumeClaim",
                "metadata": {"name": "model"},
                "spec": {**common, "volumeName": name, "resources": {"requests": {"storage": "1Gi"}}},
            }
        )
        return "model"

    yield make
    for name in volumes:
        kube("delete", "persistentvolume", name, "--wait=false")


@pytest.fixture
def small_model() -> Iterator[Path]:
    """A small random model with four heads and the built-in model's tokenizer, readable by pods."""
    # It imports torch, which the other tests here do not need.
    from random_checkpoint import write_speaking_model

    directory = Path(tempfile.mkdtemp(prefix="megatron-model-"))
    model = write_speaking_model(directory / "model")
    for path in (directory, *directory.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    yield model
    shutil.rmtree(directory)


def _print_state(platform: Platform, kube: Kubectl) -> None:
    system = platform.kube.in_namespace(installation.OPERATOR_NAMESPACE)
    for command in (
        lambda: kube("get", "mi,pods", "-o", "wide"),
        lambda: kube("get", "mi", "-o", "yaml"),
        lambda: kube("get", "events", "--sort-by=.metadata.creationTimestamp"),
        lambda: kube("logs", "-l", "app.kubernetes.io/managed-by=megatron-operator", "--tail=40", "--prefix"),
        lambda: system("logs", "-l", f"app.kubernetes.io/instance={installation.RELEASE}", "--tail=60"),
    ):
        try:
            print(command())
        except CommandError as error:
            print(error)


@dataclass(frozen=True)
class Deployed:
    """A resource that is Ready, and a client of its server."""

    kube: Kubectl
    name: str
    chat: Chat


def apply_sample(kube: Kubectl, *, name: str = "demo", **spec: object) -> None:
    """Apply the sample, changed by `spec`."""
    manifest = yaml.safe_load(SAMPLE.read_text())
    manifest["metadata"]["name"] = name
    manifest["spec"].update(spec)
    kube.apply(manifest)


def scale(kube: Kubectl, replicas: int) -> None:
    """Scale the resource `demo`, and wait until all engines are ready."""
    kube("scale", "mi", "demo", f"--replicas={replicas}")
    kube.wait("mi/demo", f"jsonpath={{.status.ready}}={replicas}/{replicas}")
    kube.wait("mi/demo", "condition=Ready")


def deploy(kube: Kubectl, *, name: str = "demo", **spec: object) -> Deployed:
    """Apply the sample, changed by `spec`, and wait until it is Ready."""
    apply_sample(kube, name=name, **spec)
    kube.wait(f"mi/{name}", "condition=Ready")
    model = kube.json("mi", name)["status"]["model"]
    return Deployed(kube, name, Chat(reachable(f"http://{kube.cluster_ip(name)}"), model))
