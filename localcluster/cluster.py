"""`LocalCluster`: starts, stops and inspects a cluster.

All operations are idempotent. After an interruption at any point, an operation can be repeated.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from localcluster import (
    cgroups,
    components,
    controlplane,
    images,
    loading,
    machine,
    network,
    node,
    packages,
    ports,
    probe,
    processes,
    programs,
    runtime,
    store,
    sweep,
)
from localcluster import settings as config
from localcluster.errors import ClusterError
from localcluster.locking import locked
from localcluster.progress import Steps
from localcluster.settings import Layout, Node, Options, Settings
from localcluster.shell import run

POD_SUBNETS = ("10.88.0.0/16", "10.188.0.0/16", "172.30.0.0/16", "192.168.240.0/20")
SERVICE_SUBNETS = ("10.96.0.0/16", "10.196.0.0/16", "172.31.0.0/16", "192.168.224.0/20")


@dataclass(frozen=True)
class ComponentStatus:
    name: str
    pid: int | None
    ready: bool


class LocalCluster:
    """A real Kubernetes cluster on this machine. It has one node unless `options` request more nodes.

    Args:
        name:               name of the state folder `build/<name>`. Clusters with different names can run at the same
                            time. Only one of these clusters can have nodes, because node 1 uses the iptables rules of
                            the machine.
        control_plane_only: whether to start only etcd, API server and controller manager, without nodes. The API server
                            accepts pods, which never run. No root permissions are needed if etcd and openssl are
                            installed.
        options:            ports, networks and the number of nodes.
        root:               folder that contains the state folders, by default `build/` in the repository.
        steps:              reports the progress, by default to standard error.
    """

    def __init__(
        self,
        *,
        name: str = "cluster",
        control_plane_only: bool = False,
        options: Options | None = None,
        root: Path | None = None,
        steps: Steps | None = None,
    ) -> None:
        self.name = name
        self.control_plane_only = control_plane_only
        self.layout: Layout = config.layout_for(name, root=root)
        self._options = options or Options()
        self._steps = steps or Steps()

    @property
    def kubeconfig(self) -> Path:
        """Path of the admin's kubeconfig, which exists after `up`."""
        return self.layout.kubeconfig

    @property
    def kubectl(self) -> Path:
        """Path of a kubectl with the same version as the cluster. The file exists after `up`."""
        return self.layout.bin / "kubectl"

    @property
    def audit_log(self) -> Path:
        """Path of the audit log of service accounts, which exists only for a control plane without nodes."""
        return self.layout.audit_log

    @property
    def settings(self) -> Settings:
        """Addresses and ports of the cluster. Raises ClusterError before the first `up`."""
        settings = config.load(self.layout)
        if settings is None:
            raise ClusterError(f"cluster {self.name!r} is not up: run `python -m localcluster up --name {self.name}`")
        return settings

    def up(self, *, with_images: bool = False) -> None:
        """Start the cluster from any state: not installed, partly started, killed or running.

        Args:
            with_images: whether to also build helm and the project's images, in parallel with the other programs, and
                load the images.
        """
        if with_images and self.control_plane_only:
            raise ClusterError("a control plane runs no pods, so it takes no images: leave out one of the two options")
        steps = self._steps
        self._preflight()
        needed = packages.CONTROL_PLANE if self.control_plane_only else packages.NODE
        packages.ensure((*needed, *packages.IMAGES) if with_images else needed, steps)
        wanted = programs.CONTROL_PLANE if self.control_plane_only else programs.NODE
        with ThreadPoolExecutor(max_workers=1) as pool:
            # Build images in parallel, because they wait for downloads and disk while the compiler uses the CPU.
            building = pool.submit(images.build, images.DEFAULT_TARGETS, steps) if with_images else None
            built = programs.ensure((*wanted, "helm") if with_images else wanted, steps)
            self._start(built)
            for image in building.result() if building else []:
                self._load(image)
        if with_images:
            self._link(built, "helm")
        steps.say(f"cluster {self.name!r} is up: export KUBECONFIG={self.kubeconfig}")

    def _start(self, built: Path) -> None:
        steps = self._steps
        with self._locked():
            settings = self._settle()
            if not self.control_plane_only:
                with steps.step(f"bridge {settings.bridge} at {settings.bridge_address(settings.nodes[0])}"):
                    machine.claim(settings, self.layout)
                    machine.prepare(settings)
            with steps.step("certificates and configuration"):
                controlplane.configure(settings, self.layout)
                self._link(built, "kubectl")
            controlplane.up(settings, self.layout, built, steps)
            if not self.control_plane_only:
                node.up(settings, self.layout, built, steps)
                group = cgroups.of_node(settings.nodes[0].cgroup)
                cgroups.gather(group, processes.owned_pids(self.layout.state))

    def build_images(self, targets: Sequence[str] = images.DEFAULT_TARGETS) -> None:
        """Build the project's images if their inputs have changed, and load them into every running node."""
        for image in images.build(targets, self._steps):
            self._load(image)

    def load_image(self, reference: str) -> None:
        """Load the image `reference` from the store of build_images() into the nodes, so that pods can use the image.

        Raises ClusterError if the store does not contain the image, or if no node runs.
        """
        image = store.find(reference)
        if image is None:
            raise ClusterError(f"image {reference!r} is not in the store: run `python -m localcluster build-images`")
        if not self._load(image):
            raise ClusterError(f"cluster {self.name!r} has no running node to load into: run `up` first")

    def down(self, *, purge: bool = False) -> None:
        """Remove the cluster and its changes to the machine. purge: also remove its images and logs."""
        with self._locked():
            sweep.down(self.name, self.layout, self._steps, purge=purge)

    def freeze_node(self, index: int) -> None:
        """Suspend all processes of a node, including its containers, as if its machine did not respond.

        The kernel still accepts connections to the node. To simulate the loss of a node, also call `cut_network`.

        index: 2 or higher, because node 1 also runs the control plane.

        Raises ClusterError if the node does not exist.
        """
        node = self._further_node(index)
        # Suspend the node's processes first, otherwise the kubelet would report containers that do not answer.
        processes.send(processes.owned_pids(self.layout.of_node(index).state), signal.SIGSTOP)
        cgroups.freeze(node.cgroup, frozen=True)

    def thaw_node(self, index: int) -> None:
        """Let a frozen node continue. Do nothing if the node is not frozen. Raises the errors of `freeze_node`."""
        node = self._further_node(index)
        cgroups.freeze(node.cgroup, frozen=False)
        processes.send(processes.owned_pids(self.layout.of_node(index).state), signal.SIGCONT)

    def cut_network(self, index: int) -> None:
        """Drop all packets between a node and the other nodes. Raises the errors of `freeze_node`."""
        network.connect(self._further_node(index), up=False)

    def restore_network(self, index: int) -> None:
        """Undo `cut_network`. Raises the errors of `freeze_node`."""
        network.connect(self._further_node(index), up=True)

    def _further_node(self, index: int) -> Node:
        nodes = self.settings.nodes
        if not 2 <= index <= len(nodes):
            raise ClusterError(
                f"index={index}: cluster {self.name!r} has nodes 1 to {len(nodes)}, and node 1 runs the control plane. "
                "Give another index, or start the cluster with more nodes"
            )
        return nodes[index - 1]

    def _load(self, image: store.Image) -> bool:
        """Load an image into every node whose container runtime runs. Return whether there is such a node."""
        settings = config.load(self.layout)
        layouts = [self.layout.of_node(node.index) for node in settings.nodes] if settings is not None else []
        running = [layout for layout in layouts if runtime.is_up(layout)]
        for layout in running:
            loading.load(image, layout, self._steps)
        return bool(running)

    def status(self) -> list[ComponentStatus]:
        """Return the status of each component: whether the component runs and whether it is ready.

        The result is empty if the cluster is down.
        """
        settings = config.load(self.layout)
        if settings is None:
            return []
        built = Path()
        expected = controlplane.expected(settings, self.layout, built)
        if not settings.control_plane_only:
            expected += node.expected(settings, self.layout, built, machine.facts())
        return [self._component_status(component) for component in expected]

    def program(self, name: str) -> Path:
        """Return the path of a program (kubectl or helm) in the version that belongs to the cluster.

        The program is built if it does not exist. The path is a link in the state folder.
        """
        if name not in programs.PACKAGES:
            raise ClusterError(f"program {name!r} is unknown; there are {', '.join(programs.PACKAGES)}")
        return self._link(programs.ensure([name], self._steps), name)

    def run_kubectl(
        self, *arguments: str, stdin: str | None = None, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run kubectl on this cluster. check: whether to raise ClusterError with kubectl's output if kubectl fails."""
        return run([self.kubectl, "--kubeconfig", self.kubeconfig, *arguments], stdin=stdin, check=check)

    def _component_status(self, component: components.Component) -> ComponentStatus:
        record = processes.running(component.name, self.layout)
        ready = record is not None and (
            component.ready_url is None or probe.answers(component.ready_url, self.layout.pki)
        )
        return ComponentStatus(component.name, record.pid if record else None, ready)

    def _preflight(self) -> None:
        if sys.platform != "linux":
            raise ClusterError(f"the embedded cluster runs on Linux, not on {sys.platform}: use CLUSTER=current")
        if not self.control_plane_only and os.geteuid() != 0:
            raise ClusterError(
                "the embedded node needs root for containers, the bridge and iptables: run it with sudo, or use a "
                "cluster of your own with CLUSTER=current"
            )

    def _settle(self) -> Settings:
        """Return the settings of the cluster.

        The settings of an existing cluster are adapted to changes of the machine. A new cluster gets new settings.
        """
        settings = config.load(self.layout)
        if settings is not None:
            clashes = config.contradictions(settings, self._options, control_plane_only=self.control_plane_only)
            if clashes:
                raise ClusterError(f"cluster {self.name!r} exists, and its {'; its '.join(clashes)}: `down` it first")
            settings = replace(settings, node_count=self._check_count(self._options.nodes or settings.node_count))
            if not processes.owned_pids(self.layout.state) and not all(map(ports.take, settings.ports.values())):
                settings = replace(settings, ports=ports.allocate(self._options))
        else:
            sweep.end_processes(self.layout, self._steps)
            settings = self._new_settings()
        config.save(settings, self.layout)
        return settings

    def _check_count(self, count: int) -> int:
        if not 1 <= count <= config.MAX_NODES or (self.control_plane_only and count > 1):
            raise ClusterError(
                f"--nodes={count}: give 1 to {config.MAX_NODES}, and 1 for a control plane alone, which runs no pods"
            )
        return count

    def _new_settings(self) -> Settings:
        count = self._check_count(1 if self._options.nodes is None else self._options.nodes)
        base = Settings(self.name, self.control_plane_only, ports.allocate(self._options), node_count=count)
        if self.control_plane_only:
            pods = self._options.pod_subnet or POD_SUBNETS[0]
            services = self._options.service_subnet or SERVICE_SUBNETS[0]
        else:
            networks = ports.local_networks(ignore_device=base.bridge)
            pods = ports.choose_subnet("--pod-subnet", self._options.pod_subnet, POD_SUBNETS, networks)
            services = ports.choose_subnet("--service-subnet", self._options.service_subnet, SERVICE_SUBNETS, networks)
        return replace(
            base,
            pod_subnet=config.check_subnet("--pod-subnet", pods),
            service_subnet=config.check_subnet("--service-subnet", services),
        )

    def _link(self, built: Path, program: str) -> Path:
        self.layout.bin.mkdir(parents=True, exist_ok=True)
        link = self.layout.bin / program
        if not link.is_symlink() or link.readlink() != built / program:
            link.unlink(missing_ok=True)
            link.symlink_to(built / program)
        return link

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Return a context that holds the lock of the cluster, so that only one launcher at a time changes the cluster.

        The kernel releases the lock if the launcher is killed.
        """
        lock = self.layout.state.parent / f".{self.name}.lock"
        with locked(lock, self._steps, reason=f"another launcher of cluster {self.name!r}"):
            yield
