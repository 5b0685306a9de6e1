"""Removes a cluster from the machine, in any state in which a previous run has left the cluster."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Collection
from pathlib import Path

from localcluster import cgroups, machine, network, processes, runtime
from localcluster.errors import ClusterError
from localcluster.machine import Footprint
from localcluster.mounts import unmount_below
from localcluster.progress import Steps
from localcluster.settings import Layout

# Their data is removed right after, so a graceful shutdown, which can take a minute, has no benefit.
_NO_GRACE = frozenset(
    {
        "etcd",
        "kube-apiserver",
        "kube-controller-manager",
        "kube-scheduler",
        "coredns",
        "containerd-shim-runc-v2",
        "runc",
    }
)

# Paths that no option of the kubelet, containerd or the CNI library changes.
DEVICE_PLUGINS = Path("/var/lib/kubelet/device-plugins")
SHIM_SOCKETS = Path("/run/containerd/s")
CNI_RESULTS = Path("/var/lib/cni/results")
CONTAINER_LOGS = Path("/var/log/containers")
_STRAY_FOLDERS = (
    DEVICE_PLUGINS,
    DEVICE_PLUGINS.parent,
    SHIM_SOCKETS,
    SHIM_SOCKETS.parent,
    CNI_RESULTS,
    CNI_RESULTS.parent,
    CONTAINER_LOGS,
)


def down(name: str, layout: Layout, steps: Steps, *, purge: bool) -> None:
    """Terminate the cluster's processes, undo its changes to the machine, and remove its files."""
    footprint = machine.recorded()
    if footprint is not None and footprint.state == str(layout.state):
        _require_root(name)
        with steps.step("end pods") as step:
            step.note(f"{_end_pods(footprint, layout)} processes")
        end_processes(layout, steps)
        with steps.step("restore the machine") as step:
            step.note(_restore(footprint, layout))
        machine.release()
    else:
        end_processes(layout, steps)
    _remove_state(layout, purge=purge)
    steps.say(f"cluster {name!r} is down")


def end_processes(layout: Layout, steps: Steps) -> None:
    """Terminate all processes of the cluster, whether or not they have a record."""
    owned = processes.owned_pids(layout.state)
    if not owned:
        return
    with steps.step("end processes") as step:
        abrupt = {pid for pid, argv in owned.items() if _program(argv) in _NO_GRACE}
        processes.terminate(owned.keys() - abrupt)
        processes.terminate(abrupt, grace=0.0)
        step.note(str(len(owned)))


def _end_pods(footprint: Footprint, layout: Layout) -> int:
    for cgroup in footprint.cgroups:
        cgroups.freeze(cgroup, frozen=False)
    processes.send(processes.owned_pids(layout.state), signal.SIGCONT)
    # Terminate the kubelets first, because they would restart the pods.
    _terminate(layout, {"kubelet"})
    count = sum(cgroups.remove(cgroup) for cgroup in footprint.cgroups)
    for node in (layout, *layout.nested()):
        if runtime.is_up(node):
            runtime.remove_containers(node)
    _terminate(layout, {"containerd"})
    _terminate(layout, {"containerd-shim-runc-v2", "runc"}, grace=0.0)
    return count


def _terminate(layout: Layout, programs: Collection[str], *, grace: float = processes.GRACE_SECONDS) -> None:
    owned = processes.owned_pids(layout.state)
    processes.terminate((pid for pid, argv in owned.items() if _program(argv) in programs), grace=grace)


def _restore(footprint: Footprint, layout: Layout) -> str:
    """Undo the changes that the nodes have made to the machine, and return a summary as text.

    The order of the steps follows from the dependencies between the changes.
    """
    # Kill processes a second time, because a running shim may have started one after the first time.
    for cgroup in (*footprint.cgroups, cgroups.of_node(footprint.cgroups[0])):
        cgroups.remove(cgroup)
    unmounted = unmount_below(layout.state)
    bridge = network.remove_bridge(footprint.bridge)
    network.remove_namespaces(footprint.namespaces)
    rules = network.remove_rules(bridge=footprint.bridge, keep=footprint.chains)
    machine.restore_sysctls(footprint)
    _remove_strays(footprint, layout)
    return f"{unmounted} mounts, {'bridge, ' if bridge else ''}{rules} iptables lines"


def _remove_strays(footprint: Footprint, layout: Layout) -> None:
    """Remove files of containerd, the CNI library and the kubelet that are outside the state folder."""
    listening = Path("/proc/net/unix").read_text()
    for socket in SHIM_SOCKETS.glob("*"):
        if str(socket) not in listening:
            socket.unlink(missing_ok=True)
    for result in CNI_RESULTS.glob(f"{footprint.cni_network}-*-eth0"):
        sandbox = result.name.removeprefix(f"{footprint.cni_network}-").removesuffix("-eth0")
        (CNI_RESULTS / f"cni-loopback-{sandbox}-lo").unlink(missing_ok=True)
        result.unlink(missing_ok=True)
    for link in CONTAINER_LOGS.glob("*.log"):
        if link.is_symlink() and os.readlink(link).startswith(f"{layout.state}/"):
            link.unlink(missing_ok=True)
    for name in ("kubelet.sock", "kubelet_internal_checkpoint"):
        (DEVICE_PLUGINS / name).unlink(missing_ok=True)
    for folder in _STRAY_FOLDERS:
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def _remove_state(layout: Layout, *, purge: bool) -> None:
    if not layout.state.exists():
        return
    unmount_below(layout.state)
    nodes = layout.nested()
    for node in nodes:
        _clear(node.state, keep=set() if purge else {node.containerd_root})
    kept = {layout.containerd_root, layout.logs, *(node.state for node in nodes)}
    _clear(layout.state, keep=set() if purge else kept)


def _clear(folder: Path, *, keep: Collection[Path]) -> None:
    """Remove the contents of a folder except `keep`. If the folder is then empty, remove it."""
    for path in folder.iterdir():
        if path not in keep:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    if not any(folder.iterdir()):
        folder.rmdir()


def _program(argv: list[str]) -> str:
    return Path(argv[0]).name


def _require_root(name: str) -> None:
    if os.geteuid() != 0:
        raise ClusterError(f"cluster {name!r} has a node: `down` needs root to remove it; run it with sudo")
