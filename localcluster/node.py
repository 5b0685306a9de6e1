"""Starts the scheduler and the DNS server, and the container runtime, kubelet and kube-proxy of each node."""

from __future__ import annotations

from pathlib import Path

from localcluster import components, machine, probe, render, runtime
from localcluster.components import Component
from localcluster.controlplane import start, write
from localcluster.progress import Steps
from localcluster.render import Machine
from localcluster.settings import Layout, Node, Settings
from localcluster.shell import run
from megatron_runtime.protocol import strict_json as json


def expected(settings: Settings, layout: Layout, programs: Path, facts: Machine) -> list[Component]:
    """Return the components of all nodes, in the order of their start."""
    first, *further = [_of_node(settings, node, layout, programs, facts) for node in settings.nodes]
    return [
        components.scheduler(settings, layout, programs),
        *first,
        components.coredns(settings, layout, programs),
        *(component for node in further for component in node),
    ]


def _of_node(settings: Settings, node: Node, layout: Layout, programs: Path, facts: Machine) -> list[Component]:
    own = layout.of_node(node.index)
    return [
        components.containerd(node, own),
        components.kubelet(settings, node, own, programs),
        components.proxy(settings, node, own, facts, programs),
    ]


def up(settings: Settings, layout: Layout, programs: Path, steps: Steps) -> None:
    """Start the nodes, and wait until they are Ready.

    Before this call, start the control plane and call machine.claim().
    """
    facts = machine.facts()
    write(layout.config / "Corefile", render.corefile(settings, layout))
    start(components.scheduler(settings, layout, programs), layout, steps)
    for node in settings.nodes:
        _start_node(settings, node, layout, programs, facts, steps)
        if node.index == 1:
            permissions = json.dumps({"apiVersion": "v1", "kind": "List", "items": render.coredns_permissions()})
            apply = ["apply", "--server-side", "--force-conflicts", "-f", "-"]
            run([programs / "kubectl", "--kubeconfig", layout.kubeconfig, *apply], stdin=permissions)
            start(components.coredns(settings, layout, programs), layout, steps)


def _start_node(settings: Settings, node: Node, layout: Layout, programs: Path, facts: Machine, steps: Steps) -> None:
    own = layout.of_node(node.index)
    configure(settings, node, layout, facts)
    containerd, kubelet, proxy = _of_node(settings, node, layout, programs, facts)
    start(containerd, layout, steps, ready=lambda: runtime.is_up(own))
    runtime.import_pause(own, programs / "pause")
    start(kubelet, layout, steps, ready=lambda: is_ready(settings, node, layout))
    start(proxy, layout, steps)


def configure(settings: Settings, node: Node, layout: Layout, facts: Machine) -> None:
    """Write the configuration files of a node. layout: the paths of the cluster."""
    own = layout.of_node(node.index)
    own.run.mkdir(parents=True, exist_ok=True)
    server = settings.api_url_for(node)
    for client, identity in (("kubelet", f"kubelet{node.suffix}"), ("proxy", "proxy")):
        write(own.client_config(client), render.kubeconfig(settings, layout, identity=identity, server=server))
    write(own.config / "containerd.toml", render.containerd(own, facts))
    write(own.config / "kubelet.yaml", render.kubelet(settings, node, own, facts, pki=layout.pki))
    write(own.config / "resolv.conf", render.resolv_conf(settings), mode=0o644)
    write(own.cni / "conf" / "10-bridge.conflist", render.cni(settings, node, own))


def is_ready(settings: Settings, node: Node, layout: Layout) -> bool:
    """Return whether the API server reports the node as Ready and the kubelet itself is healthy."""
    if not probe.answers(components.kubelet_health(settings, node), layout.pki):
        return False
    body = probe.fetch(f"{settings.api_url}/api/v1/nodes/{node.name}", layout.pki)
    conditions = json.loads(body)["status"].get("conditions", []) if body is not None else []
    return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)
