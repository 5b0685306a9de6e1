"""The processes of a cluster, with their names, command lines and readiness checks."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from localcluster.render import Machine
from localcluster.settings import Layout, Node, Settings


@dataclass(frozen=True)
class Component:
    """One process of a cluster.

    Attributes:
        name:      name of the process, its log and its record.
        argv:      whole command line. It always contains a path below the state folder. By this path, the launcher
                   recognises a process of the cluster even if the record of the process is lost.
        ready_url: URL that answers with status 200 when the component is ready. With TLS, the launcher authenticates
            with the admin's certificate.
        files:     configuration files. If one changes, the process must be restarted.
        namespace: network namespace of the process; None: the machine's namespace.
    """

    name: str
    argv: tuple[str, ...]
    ready_url: str | None = None
    files: tuple[Path, ...] = ()
    namespace: str | None = None


# The programs that the cluster may run. The launcher terminates processes of no other program.
PROGRAM_NAMES = frozenset(
    {
        "etcd",
        "kube-apiserver",
        "kube-controller-manager",
        "kube-scheduler",
        "kubelet",
        "kube-proxy",
        "coredns",
        "containerd",
        "containerd-shim-runc-v2",
        "runc",
    }
)


CONTROLLERS = (
    "clusterrole-aggregation-controller",
    "deployment-controller",
    "garbage-collector-controller",
    "horizontal-pod-autoscaler-controller",
    "namespace-controller",
    "node-lifecycle-controller",
    "persistentvolumeclaim-protection-controller",
    "replicaset-controller",
    "resourceclaim-controller",
    "resourcequota-controller",
    "serviceaccount-controller",
    "statefulset-controller",
)
"""The controllers of a control plane without nodes.

The others act on kinds that the operator does not create, or maintain EndpointSlices, volumes, certificates and the
statuses of PodDisruptionBudgets, which only nodes and evictions use.
"""


def etcd(settings: Settings, layout: Layout) -> Component:
    """Return the component etcd. It runs without fsync, because a test cluster need not survive power failures."""
    client = f"http://127.0.0.1:{settings.ports['etcd']}"
    peer = f"http://127.0.0.1:{settings.ports['etcd-peer']}"
    argv = (
        shutil.which("etcd") or "etcd",
        f"--name={settings.name}",
        f"--data-dir={layout.etcd}",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster={settings.name}={peer}",
        "--unsafe-no-fsync",
        "--quota-backend-bytes=4294967296",
    )
    return Component("etcd", argv, ready_url=f"{client}/health")


def apiserver(settings: Settings, layout: Layout, programs: Path) -> Component:
    alone = settings.control_plane_only
    pki = layout.pki
    argv: tuple[str, ...] = (
        str(programs / "kube-apiserver"),
        f"--etcd-servers=http://127.0.0.1:{settings.ports['etcd']}",
        f"--bind-address={'127.0.0.1' if alone else '0.0.0.0'}",
        f"--advertise-address={settings.node_ip}",
        f"--secure-port={settings.ports['apiserver']}",
        f"--tls-cert-file={pki / 'apiserver.crt'}",
        f"--tls-private-key-file={pki / 'apiserver.key'}",
        f"--client-ca-file={pki / 'ca.crt'}",
        f"--cert-dir={pki}",
        "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
        f"--service-account-key-file={pki / 'service-account.crt'}",
        f"--service-account-signing-key-file={pki / 'service-account.key'}",
        f"--service-cluster-ip-range={settings.service_subnet}",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        "--allow-privileged=true",
        f"--requestheader-client-ca-file={pki / 'ca.crt'}",
        "--requestheader-allowed-names=front-proxy-client",
        "--requestheader-username-headers=X-Remote-User",
        "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        f"--proxy-client-cert-file={pki / 'front-proxy-client.crt'}",
        f"--proxy-client-key-file={pki / 'front-proxy-client.key'}",
        f"--kubelet-certificate-authority={pki / 'ca.crt'}",
        f"--kubelet-client-certificate={pki / 'apiserver-kubelet-client.crt'}",
        f"--kubelet-client-key={pki / 'apiserver-kubelet-client.key'}",
        "--kubelet-preferred-address-types=InternalIP",
        f"--endpoint-reconciler-type={'none' if alone else 'lease'}",
    )
    policy = audit_policy(layout)
    if alone:
        # A few clients on one machine need no queues.
        argv += ("--enable-priority-and-fairness=false",)
        argv += (f"--audit-policy-file={policy}", f"--audit-log-path={layout.audit_log}")
    files = (policy,) if alone else ()
    return Component("kube-apiserver", argv, ready_url=f"{settings.api_url}/readyz", files=files)


def audit_policy(layout: Layout) -> Path:
    """Return the path of the audit policy of a control plane's API server."""
    return layout.config / "audit-policy.yaml"


def controller_manager(settings: Settings, layout: Layout, programs: Path) -> Component:
    port = settings.ports["controller-manager"]
    config = layout.client_config("controller-manager")
    argv: tuple[str, ...] = (
        str(programs / "kube-controller-manager"),
        f"--kubeconfig={config}",
        f"--authentication-kubeconfig={config}",
        f"--authorization-kubeconfig={config}",
        f"--service-account-private-key-file={layout.pki / 'service-account.key'}",
        f"--root-ca-file={layout.pki / 'ca.crt'}",
        f"--cert-dir={layout.pki}",
        f"--cluster-cidr={settings.pod_subnet}",
        "--use-service-account-credentials",
        "--leader-elect=false",
        "--bind-address=127.0.0.1",
        f"--secure-port={port}",
    )
    if settings.control_plane_only:
        argv += (f"--controllers={','.join(CONTROLLERS)}",)
    return Component("kube-controller-manager", argv, ready_url=f"https://127.0.0.1:{port}/healthz", files=(config,))


def scheduler(settings: Settings, layout: Layout, programs: Path) -> Component:
    port = settings.ports["scheduler"]
    config = layout.client_config("scheduler")
    argv = (
        str(programs / "kube-scheduler"),
        f"--kubeconfig={config}",
        f"--authentication-kubeconfig={config}",
        f"--authorization-kubeconfig={config}",
        f"--cert-dir={layout.pki}",
        "--leader-elect=false",
        "--bind-address=127.0.0.1",
        f"--secure-port={port}",
    )
    return Component("kube-scheduler", argv, ready_url=f"https://127.0.0.1:{port}/healthz", files=(config,))


def containerd(node: Node, layout: Layout) -> Component:
    config = layout.config / "containerd.toml"
    argv = (shutil.which("containerd") or "containerd", "--config", str(config))
    return Component(f"containerd{node.suffix}", argv, files=(config,), namespace=node.namespace)


def kubelet(settings: Settings, node: Node, layout: Layout, programs: Path) -> Component:
    config = layout.config / "kubelet.yaml"
    argv = (
        str(programs / "kubelet"),
        f"--config={config}",
        f"--kubeconfig={layout.client_config('kubelet')}",
        f"--root-dir={layout.kubelet}",
        f"--cert-dir={layout.kubelet / 'pki'}",
        f"--hostname-override={node.name}",
        f"--node-ip={node.ip}",
    )
    health = kubelet_health(settings, node)
    return Component(f"kubelet{node.suffix}", argv, ready_url=health, files=(config,), namespace=node.namespace)


def kubelet_health(settings: Settings, node: Node) -> str:
    return f"http://{node.ip}:{settings.ports['kubelet-healthz']}/healthz"


def proxy(settings: Settings, node: Node, layout: Layout, machine: Machine, programs: Path) -> Component:
    health = f"{node.ip}:{settings.ports['proxy-healthz']}"
    argv = (
        str(programs / "kube-proxy"),
        f"--kubeconfig={layout.client_config('proxy')}",
        "--proxy-mode=iptables",
        f"--cluster-cidr={settings.pod_subnet}",
        f"--hostname-override={node.name}",
        "--conntrack-max-per-core=0",
        "--conntrack-tcp-timeout-established=0",
        "--conntrack-tcp-timeout-close-wait=0",
        f"--oom-score-adj={-999 if machine.may_lower_oom_score else 0}",
        f"--healthz-bind-address={health}",
        f"--metrics-bind-address=127.0.0.1:{settings.ports['proxy-metrics']}",
    )
    url = f"http://{health}/healthz"
    return Component(f"kube-proxy{node.suffix}", argv, ready_url=url, namespace=node.namespace)


def coredns(settings: Settings, layout: Layout, programs: Path) -> Component:
    config = layout.config / "Corefile"
    health = f"http://127.0.0.1:{settings.ports['coredns-ready']}/ready"
    return Component("coredns", (str(programs / "coredns"), "-conf", str(config)), ready_url=health, files=(config,))
