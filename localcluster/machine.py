"""The changes that nodes make to the machine outside the state folder, and the record for undoing them.

The record is in /run. Like the changes, the record does not survive a reboot, but it survives the removal of the state
folder. The record also ensures that only one cluster has nodes, because kube-proxy's chains have fixed names.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass, field
from pathlib import Path

from localcluster import cgroups, network, packages
from localcluster.errors import ClusterError
from localcluster.render import Machine
from localcluster.settings import Layout, Settings
from megatron_runtime.protocol import strict_json as json

RECORD = Path("/run/megatron-localcluster/node.json")
CAP_SYS_RESOURCE = 24

# Kernel parameters that the launcher, the kubelet and kube-proxy write.
SYSCTLS = (
    "kernel/keys/root_maxbytes",
    "kernel/keys/root_maxkeys",
    "kernel/panic",
    "kernel/panic_on_oops",
    "net/ipv4/conf/all/route_localnet",
    "net/ipv4/ip_forward",
    "net/netfilter/nf_conntrack_max",
    "net/netfilter/nf_conntrack_tcp_be_liberal",
    "net/netfilter/nf_conntrack_tcp_timeout_close_wait",
    "net/netfilter/nf_conntrack_tcp_timeout_established",
    "vm/overcommit_memory",
    "vm/panic_on_oom",
)


@dataclass(frozen=True)
class Footprint:
    """The record of the changes that a cluster's nodes make to the machine.

    Attributes:
        state:      state folder of the cluster.
        sysctls:    values of sysctls before the changes, by name.
        chains:     iptables chains that existed before the changes, by address family and table.
        cgroups:    the cgroup for pods of each node.
        namespaces: network namespaces of all nodes except the first.
    """

    state: str
    bridge: str
    cni_network: str
    cgroups: list[str]
    namespaces: list[str]
    sysctls: dict[str, str] = field(default_factory=dict)
    chains: dict[str, dict[str, list[str]]] = field(default_factory=dict)


def facts() -> Machine:
    status = Path("/proc/self/status").read_text()
    capabilities = int(next(line.split()[1] for line in status.splitlines() if line.startswith("CapEff:")), 16)
    return Machine(
        may_lower_oom_score=bool(capabilities >> CAP_SYS_RESOURCE & 1),
        cni_folder=packages.cni_folder(),
    )


def recorded() -> Footprint | None:
    """Return the recorded changes to this machine by the cluster that has nodes.

    Returns None if no cluster has nodes.
    """
    try:
        return Footprint(**json.loads(RECORD.read_text()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise ClusterError(f"{RECORD} is not readable ({error}); remove it if no node runs on this machine") from error


def claim(settings: Settings, layout: Layout) -> None:
    """Record that this cluster has nodes. Also record the current settings of the machine, to restore them later.

    Call this function before any change to the machine. Raises ClusterError if another cluster has nodes on the
    machine.
    """
    owner = recorded()
    if owner is not None:
        if owner.state != str(layout.state):
            state = Path(owner.state)
            raise ClusterError(
                f"the node of this machine belongs to the cluster in {state}: stop that one first with "
                f"`python -m localcluster down --root {state.parent} --name {state.name}`"
            )
        return
    saved = network.saved_rules()
    chains = {family: network.chains(text) for family, text in saved.items()}
    if any("KUBE-SERVICES" in names for tables in chains.values() for names in tables.values()):
        raise ClusterError(
            "another Kubernetes has its iptables chains on this machine (KUBE-SERVICES): use it with CLUSTER=current, "
            "or remove them with `kube-proxy --cleanup`"
        )
    footprint = Footprint(
        state=str(layout.state),
        bridge=settings.bridge,
        cni_network=settings.cni_network,
        cgroups=[node.cgroup for node in settings.possible_nodes],
        namespaces=[node.namespace for node in settings.possible_nodes if node.namespace is not None],
        sysctls={name: _sysctl(name).read_text().strip() for name in SYSCTLS if _sysctl(name).exists()},
        chains=chains,
    )
    RECORD.parent.mkdir(parents=True, exist_ok=True)
    partial = RECORD.with_suffix(".partial")
    partial.write_text(json.dumps(dataclasses.asdict(footprint)))
    partial.replace(RECORD)


def prepare(settings: Settings) -> None:
    """Create the bridge, network namespaces and cgroups, and set up forwarding and the firewall."""
    network.create_bridge(settings)
    _sysctl("net/ipv4/ip_forward").write_text("1")
    network.admit(settings)
    network.keep_service_traffic(settings)
    first, *further = settings.nodes
    for node in further:
        network.join(settings, node)
    for cgroup in (cgroups.of_node(first.cgroup), *(node.cgroup for node in settings.nodes)):
        cgroups.create(cgroup)
        cgroups.weigh(cgroup, len(os.sched_getaffinity(0)))


def restore_sysctls(footprint: Footprint) -> None:
    for name, value in footprint.sysctls.items():
        path = _sysctl(name)
        if path.exists() and path.read_text().strip() != value:
            path.write_text(value)


def release() -> None:
    RECORD.unlink(missing_ok=True)
    if RECORD.parent.exists() and not any(RECORD.parent.iterdir()):
        RECORD.parent.rmdir()


def _sysctl(name: str) -> Path:
    return Path("/proc/sys") / name
