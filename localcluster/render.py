"""Renders all configuration files of a cluster, with pure functions that convert settings to text."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from localcluster.settings import Layout, Node, Settings
from megatron_runtime.protocol import strict_json as json

PAUSE_IMAGE = "localhost/megatron-pause:1"


@dataclass(frozen=True)
class Machine:
    """Properties of the machine that affect the configuration.

    Attributes:
        may_lower_oom_score: whether the launcher has CAP_SYS_RESOURCE. Without CAP_SYS_RESOURCE, no process can set a
            value below its current oom_score_adj, so no pod sandbox starts.
        cni_folder: folder that contains the CNI plugins.
    """

    may_lower_oom_score: bool
    cni_folder: Path


def kubeconfig(settings: Settings, layout: Layout, *, identity: str, server: str | None = None) -> str:
    """Return a kubeconfig with embedded certificates, so that the file can be copied.

    server: URL of the API server; by default the URL for processes on this machine.
    """

    def embedded(name: str) -> str:
        return base64.b64encode((layout.pki / name).read_bytes()).decode()

    name = f"megatron-{settings.name}"
    return yaml.safe_dump(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [
                {
                    "name": name,
                    "cluster": {"server": server or settings.api_url, "certificate-authority-data": embedded("ca.crt")},
                }
            ],
            "users": [
                {
                    "name": identity,
                    "user": {
                        "client-certificate-data": embedded(f"{identity}.crt"),
                        "client-key-data": embedded(f"{identity}.key"),
                    },
                }
            ],
            "contexts": [{"name": name, "context": {"cluster": name, "user": identity}}],
            "current-context": name,
        },
        sort_keys=False,
    )


def audit_policy() -> str:
    """Return an audit policy that logs the metadata of service accounts' requests.

    Kubernetes' own accounts are not logged.
    """
    return yaml.safe_dump(
        {
            "apiVersion": "audit.k8s.io/v1",
            "kind": "Policy",
            "omitStages": ["RequestReceived"],
            "rules": [
                {"level": "None", "userGroups": ["system:serviceaccounts:kube-system"]},
                {"level": "Metadata", "userGroups": ["system:serviceaccounts"]},
                {"level": "None"},
            ],
        },
        sort_keys=False,
    )


def containerd(layout: Layout, machine: Machine) -> str:
    """Return containerd's configuration in TOML. Values are written as JSON, because JSON scalars are valid TOML."""
    cri = 'plugins."io.containerd.grpc.v1.cri"'
    runc = f"{cri}.containerd.runtimes.runc"
    sections: dict[str, dict[str, Any]] = {
        "": {
            "version": 2,
            "root": str(layout.containerd_root),
            "state": str(layout.containerd_state),
            "oom_score": 0,
            "disabled_plugins": [
                f"io.containerd.snapshotter.v1.{name}" for name in ("aufs", "btrfs", "devmapper", "native", "zfs")
            ],
        },
        "grpc": {"address": str(layout.containerd_socket)},
        cri: {
            "sandbox_image": PAUSE_IMAGE,
            "restrict_oom_score_adj": not machine.may_lower_oom_score,
            "netns_mounts_under_state_dir": True,
            "disable_apparmor": True,
        },
        f"{cri}.cni": {"bin_dir": str(machine.cni_folder), "conf_dir": str(layout.cni / "conf")},
        f"{cri}.containerd": {"snapshotter": "overlayfs", "default_runtime_name": "runc"},
        runc: {"runtime_type": "io.containerd.runc.v2"},
        f"{runc}.options": {"SystemdCgroup": False, "Root": str(layout.containerd_state / "runc")},
        'plugins."io.containerd.internal.v1.opt"': {"path": str(layout.containerd_root / "opt")},
    }
    lines: list[str] = []
    for section, values in sections.items():
        lines += [f"[{section}]"] if section else []
        lines += [f"{key} = {json.dumps(value)}" for key, value in values.items()]
    return "\n".join(lines) + "\n"


def cni(settings: Settings, node: Node, layout: Layout) -> str:
    """Return the CNI configuration of a node, which connects pods to a bridge and gives them host-local addresses.

    There is no masquerading, so pods can reach only the node and each other.
    """
    first, last = node.pod_ips
    ipam = {
        "type": "host-local",
        "dataDir": str(layout.cni / "addresses"),
        "ranges": [[{"subnet": settings.pod_subnet, "rangeStart": first, "rangeEnd": last, "gateway": node.ip}]],
        "routes": [{"dst": "0.0.0.0/0"}],
    }
    bridge = {"type": "bridge", "bridge": settings.bridge, "isGateway": True, "hairpinMode": True, "ipam": ipam}
    plugins = [bridge, {"type": "portmap", "capabilities": {"portMappings": True}}]
    return json.dumps({"cniVersion": "0.4.0", "name": settings.cni_network, "plugins": plugins}, indent=2) + "\n"


def kubelet(settings: Settings, node: Node, layout: Layout, machine: Machine, *, pki: Path) -> str:
    """Return the kubelet's configuration.

    Eviction and garbage collection of images are off, because the machine's disks may be nearly full.

    layout: the paths of the node.
    pki:    the folder of the cluster's certificates.
    """
    return yaml.safe_dump(
        {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": node.ip,
            "port": settings.ports["kubelet"],
            "healthzBindAddress": node.ip,
            "healthzPort": settings.ports["kubelet-healthz"],
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": str(pki / "ca.crt")},
            },
            "authorization": {"mode": "Webhook"},
            "tlsCertFile": str(pki / f"kubelet{node.suffix}.crt"),
            "tlsPrivateKeyFile": str(pki / f"kubelet{node.suffix}.key"),
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": node.cgroup,
            "failCgroupV1": False,
            "failSwapOn": False,
            "oomScoreAdj": -999 if machine.may_lower_oom_score else 0,
            "containerRuntimeEndpoint": f"unix://{layout.containerd_socket}",
            "clusterDomain": "cluster.local",
            "clusterDNS": [settings.node_ip],
            "resolvConf": str(layout.config / "resolv.conf"),
            "podLogsDir": str(layout.state / "pod-logs"),
            "volumePluginDir": str(layout.kubelet / "volume-plugins"),
            "evictionHard": {
                signal: "0%"
                for signal in ("memory.available", "nodefs.available", "nodefs.inodesFree", "imagefs.available")
            },
            "imageGCHighThresholdPercent": 100,
            "imageMinimumGCAge": "24h",
            "nodeStatusUpdateFrequency": "5s",
            "shutdownGracePeriod": "0s",
        },
        sort_keys=False,
    )


def resolv_conf(settings: Settings) -> str:
    """Return a resolv.conf that names the cluster's DNS server. It has none of the machine's search domains.

    Pods cannot reach the machine's resolver.
    """
    return f"nameserver {settings.node_ip}\n"


def corefile(settings: Settings, layout: Layout) -> str:
    """Return the Corefile. Only names in the cluster's domain are resolved.

    All other names get NXDOMAIN, because pods cannot reach other hosts.
    """
    return f"""\
cluster.local:53 in-addr.arpa:53 {{
  bind {settings.node_ip}
  errors
  ready 127.0.0.1:{settings.ports["coredns-ready"]}
  kubernetes cluster.local in-addr.arpa {{
    kubeconfig {layout.client_config("coredns")}
    pods insecure
    ttl 5
  }}
}}
.:53 {{
  bind {settings.node_ip}
  errors
  template ANY ANY {{
    rcode NXDOMAIN
  }}
}}
"""


def coredns_permissions() -> list[dict[str, Any]]:
    """Return CoreDNS's RBAC role, and its binding to the user in CoreDNS's certificate."""
    metadata = {"name": "system:coredns"}
    rules = [
        {"apiGroups": [""], "resources": ["services", "pods", "namespaces"], "verbs": ["list", "watch"]},
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]},
    ]
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "system:coredns"}
    user = {"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "system:coredns"}
    version = "rbac.authorization.k8s.io/v1"
    return [
        {"apiVersion": version, "kind": "ClusterRole", "metadata": metadata, "rules": rules},
        {
            "apiVersion": version,
            "kind": "ClusterRoleBinding",
            "metadata": metadata,
            "roleRef": role,
            "subjects": [user],
        },
    ]
