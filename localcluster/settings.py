"""The folders, addresses and ports of a cluster, which do not change after its first `up`.

A cluster writes only to `Layout.state` and `cache_root()`. The cache contains the data that clusters share: built
programs, the base system and image layers. All functions except `load` and `save` are pure.
"""

from __future__ import annotations

import dataclasses
import hashlib
import ipaddress
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from localcluster.errors import ClusterError
from megatron_runtime.protocol import strict_json as json

REPOSITORY = Path(__file__).resolve().parent.parent

# The path of a Unix socket has at most 107 bytes. The longest one is in the kubelet's folder of a node.
MAX_STATE_PATH = 63
MAX_NODES = 4

PORT_NAMES = (
    "apiserver",
    "etcd",
    "etcd-peer",
    "controller-manager",
    "scheduler",
    "kubelet",
    "kubelet-healthz",
    "proxy-healthz",
    "proxy-metrics",
    "coredns-ready",
)
PREFERRED_PORTS = {"apiserver": 6443, "kubelet": 10250}


def cache_root() -> Path:
    """Return the folder of the cache that all clusters share: `$XDG_CACHE_HOME/megatron-localcluster`."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "megatron-localcluster"


@dataclass(frozen=True)
class Options:
    """Options of the caller for a cluster. If an option is None, the launcher chooses the value.

    Attributes:
        api_port: port of the API server; by default a free port. An explicit port that is in use is an error.
        pod_subnet: IPv4 network of nodes and pods. Its first address is the address of the first node.
        service_subnet: IPv4 network of the ClusterIPs of Services.
        nodes: number of nodes, 1 to `MAX_NODES`; 1 by default.
    """

    api_port: int | None = None
    pod_subnet: str | None = None
    service_subnet: str | None = None
    nodes: int | None = None


@dataclass(frozen=True)
class Node:
    """One node of a cluster.

    Attributes:
        index:     number of the node. Node 1 is the machine itself, which also runs the control plane.
        ip:        address of the node's bridge. The kubelet uses this address, which is also the gateway of the node's
                   pods.
        pod_ips:   first and last address for the node's pods.
        cgroup:    the cgroup of the node's pods.
        namespace: network namespace of the node's processes, and the name of the veth interface that connects it to the
                   bridge of node 1; None for node 1.
    """

    index: int
    name: str
    ip: str
    pod_ips: tuple[str, str]
    cgroup: str
    namespace: str | None

    @property
    def suffix(self) -> str:
        """Suffix of the names of this node's components and certificates; "" for node 1."""
        return "" if self.index == 1 else f"-{self.index}"


@dataclass(frozen=True)
class Settings:
    """The settings of a cluster. They do not change while the cluster exists.

    The first `up` writes the settings to `cluster.json`, and `down` removes them.
    """

    name: str
    control_plane_only: bool
    ports: Mapping[str, int]
    pod_subnet: str = "10.88.0.0/16"
    service_subnet: str = "10.96.0.0/16"
    node_count: int = 1

    @property
    def nodes(self) -> list[Node]:
        return self.possible_nodes[: self.node_count]

    @property
    def possible_nodes(self) -> list[Node]:
        """The nodes that the cluster can have.

        Each node has an equal part of the pod subnet. The node has the first address of this part. The pods of the node
        have later addresses.
        """
        parts = ipaddress.IPv4Network(self.pod_subnet).subnets(prefixlen_diff=(MAX_NODES - 1).bit_length())
        return [self._node(index, part) for index, part in zip(range(1, MAX_NODES + 1), parts, strict=True)]

    def _node(self, index: int, part: ipaddress.IPv4Network) -> Node:
        suffix = "" if index == 1 else f"-{index}"
        return Node(
            index=index,
            name=f"{self.name}-node{suffix}",
            ip=str(part[1]),
            pod_ips=(str(part[2]), str(part[-2])),
            cgroup=f"/megatron-{self.name}{suffix}",
            namespace=f"{self.bridge}{suffix}" if index > 1 else None,
        )

    @property
    def node_ip(self) -> str:
        """The address of node 1, on which the control plane and the cluster's DNS server listen."""
        return self.nodes[0].ip

    def bridge_address(self, node: Node) -> str:
        """Return the address of a node's bridge with a prefix length, in the form ADDRESS/LENGTH.

        The prefix length is the same for all nodes.
        """
        return f"{node.ip}/{ipaddress.ip_network(self.pod_subnet).prefixlen}"

    @property
    def kubernetes_service_ip(self) -> str:
        return str(next(ipaddress.ip_network(self.service_subnet).hosts()))

    @property
    def bridge(self) -> str:
        """The name of the bridge.

        The name contains a digest of the cluster's name instead of the name itself, because interface names have at
        most 15 bytes.
        """
        return "mlc" + hashlib.sha256(self.name.encode()).hexdigest()[:8]

    @property
    def cni_network(self) -> str:
        return f"megatron-{self.name}"

    @property
    def api_url(self) -> str:
        return f"https://127.0.0.1:{self.ports['apiserver']}"

    def api_url_for(self, node: Node) -> str:
        """Return the API server's URL for processes in the network namespace of a node."""
        return self.api_url if node.namespace is None else f"https://{self.node_ip}:{self.ports['apiserver']}"


@dataclass(frozen=True)
class Layout:
    """The paths of one cluster or node, all below `state`."""

    state: Path

    @property
    def settings(self) -> Path:
        return self.state / "cluster.json"

    @property
    def kubeconfig(self) -> Path:
        return self.state / "kubeconfig"

    @property
    def bin(self) -> Path:
        """Folder with links to the programs that users of the cluster need, kubectl and helm."""
        return self.state / "bin"

    @property
    def pki(self) -> Path:
        return self.state / "pki"

    @property
    def config(self) -> Path:
        return self.state / "config"

    @property
    def logs(self) -> Path:
        return self.state / "logs"

    @property
    def audit_log(self) -> Path:
        """Path of the audit log of a control plane's API server, with one JSON object per line."""
        return self.logs / "audit.log"

    @property
    def run(self) -> Path:
        """Folder of the process records and of the machine's previous settings."""
        return self.state / "run"

    @property
    def etcd(self) -> Path:
        return self.state / "etcd"

    @property
    def kubelet(self) -> Path:
        return self.state / "kubelet"

    @property
    def cni(self) -> Path:
        return self.state / "cni"

    @property
    def containerd_root(self) -> Path:
        """Folder of containerd's images and snapshots, the only folder that `down` keeps."""
        return self.state / "containerd"

    @property
    def containerd_state(self) -> Path:
        return self.state / "containerd-run"

    @property
    def containerd_socket(self) -> Path:
        return self.state / "containerd.sock"

    def client_config(self, identity: str) -> Path:
        return self.config / f"{identity}.kubeconfig"

    def of_node(self, index: int) -> Layout:
        """Return the paths of a node.

        Node 1 uses the cluster's folder, and each other node has a separate folder in it.
        """
        return self if index == 1 else Layout(self.state / f"node-{index}")

    def nested(self) -> list[Layout]:
        """Return the paths of each node that has a separate folder on disk. Node 1 has no separate folder."""
        return [Layout(folder) for folder in sorted(self.state.glob("node-[0-9]*"))]


def layout_for(name: str, *, root: Path | None = None) -> Layout:
    """Return the paths of the cluster `name`.

    Raises ClusterError if a name or path is too long for sockets or labels.
    """
    if not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,28}[a-z0-9])?", name):
        raise ClusterError(f"name={name!r}: use 1 to 30 lower-case letters, digits and inner hyphens")
    state = (root or REPOSITORY / "build").resolve() / name
    if len(str(state)) > MAX_STATE_PATH:
        raise ClusterError(
            f"the state folder {state} has {len(str(state))} characters; sockets below it allow {MAX_STATE_PATH}. "
            "Give a shorter --root, or move the repository"
        )
    return Layout(state)


def check_subnet(option: str, value: str) -> str:
    try:
        network = ipaddress.ip_network(value)
    except ValueError as error:
        raise ClusterError(f"{option}={value!r}: {error}; give an IPv4 network such as 10.88.0.0/16") from error
    if network.version != 4 or network.prefixlen > 24:
        raise ClusterError(f"{option}={value!r}: give an IPv4 network of /24 or larger, such as 10.88.0.0/16")
    return str(network)


def save(settings: Settings, layout: Layout) -> None:
    layout.state.mkdir(parents=True, exist_ok=True)
    partial = layout.settings.with_suffix(".partial")
    partial.write_text(json.dumps(dataclasses.asdict(settings), indent=2) + "\n")
    partial.replace(layout.settings)


def load(layout: Layout) -> Settings | None:
    """Return the recorded settings of a cluster.

    Return None if no settings are recorded, or if another version of the launcher recorded them.
    """
    try:
        fields = json.loads(layout.settings.read_text())
        return Settings(**fields) if set(fields["ports"]) == set(PORT_NAMES) else None
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return None


def contradictions(settings: Settings, options: Options, *, control_plane_only: bool) -> list[str]:
    """Return a message for each option that contradicts an existing cluster's settings.

    Adding nodes is not a contradiction.
    """
    wanted = {
        "--api-port": (options.api_port, settings.ports["apiserver"]),
        "--pod-subnet": (options.pod_subnet, settings.pod_subnet),
        "--service-subnet": (options.service_subnet, settings.service_subnet),
        "--control-plane-only": (control_plane_only, settings.control_plane_only),
        "--nodes": (min(options.nodes or settings.node_count, settings.node_count), settings.node_count),
    }
    return [f"{name} is {has}, not {want}" for name, (want, has) in wanted.items() if want is not None and want != has]
