"""The node's side of the cluster: scheduler, container runtime, kubelet, Services and DNS."""

from __future__ import annotations

import json
from pathlib import Path

from localcluster import components, machine, probe, render, runtime
from localcluster.components import Component
from localcluster.controlplane import start, write
from localcluster.progress import Steps
from localcluster.render import Machine
from localcluster.settings import Layout, Settings
from localcluster.shell import run


def expected(settings: Settings, layout: Layout, programs: Path, facts: Machine) -> list[Component]:
    """The components of a node, in the order of their start."""
    return [
        components.scheduler(settings, layout, programs),
        components.containerd(layout),
        components.kubelet(settings, layout, programs),
        components.proxy(settings, layout, facts, programs),
        components.coredns(settings, layout, programs),
    ]


def up(settings: Settings, layout: Layout, programs: Path, steps: Steps) -> None:
    """Brings the node to Ready; the control plane is up and the machine is claimed."""
    facts = machine.facts()
    configure(settings, layout, facts)
    scheduler, containerd, kubelet, proxy, coredns = expected(settings, layout, programs, facts)
    start(scheduler, layout, steps)
    start(containerd, layout, steps, ready=lambda: runtime.is_up(layout))
    runtime.import_pause(layout, programs / "pause")
    start(kubelet, layout, steps, ready=lambda: is_ready(settings, layout))
    start(proxy, layout, steps)
    permissions = json.dumps({"apiVersion": "v1", "kind": "List", "items": render.coredns_permissions()})
    apply = ["apply", "--server-side", "--force-conflicts", "-f", "-"]
    run([programs / "kubectl", "--kubeconfig", layout.kubeconfig, *apply], stdin=permissions)
    start(coredns, layout, steps)


def configure(settings: Settings, layout: Layout, facts: Machine) -> None:
    write(layout.config / "containerd.toml", render.containerd(layout, facts))
    write(layout.config / "kubelet.yaml", render.kubelet(settings, layout, facts))
    write(layout.config / "resolv.conf", render.resolv_conf(settings), mode=0o644)
    write(layout.config / "Corefile", render.corefile(settings, layout))
    write(layout.cni / "conf" / "10-bridge.conflist", render.cni(settings, layout))


def is_ready(settings: Settings, layout: Layout) -> bool:
    """Whether the API server knows the node as Ready and the kubelet itself is healthy."""
    if not probe.answers(f"http://127.0.0.1:{settings.ports['kubelet-healthz']}/healthz", layout.pki):
        return False
    node = probe.fetch(f"{settings.api_url}/api/v1/nodes/{settings.node_name}", layout.pki)
    conditions = json.loads(node)["status"].get("conditions", []) if node is not None else []
    return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)
