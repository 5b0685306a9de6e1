"""The control plane of a cluster: etcd, the API server and the controller manager."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from localcluster import components, pki, probe, processes, render
from localcluster.components import Component
from localcluster.progress import Steps
from localcluster.settings import Layout, Settings

CLIENTS = ("controller-manager", "scheduler", "coredns")
START_SECONDS = 300.0


def write(path: Path, text: str, *, mode: int = 0o600) -> None:
    """Write a file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.touch(mode=mode)
    partial.chmod(mode)
    partial.write_text(text)
    partial.replace(path)


def configure(settings: Settings, layout: Layout) -> None:
    """Write the certificates and client configurations of the control plane."""
    pki.ensure(settings, layout)
    for identity in CLIENTS:
        write(layout.client_config(identity), render.kubeconfig(settings, layout, identity=identity))
    write(layout.kubeconfig, render.kubeconfig(settings, layout, identity="admin"))
    write(components.audit_policy(layout), render.audit_policy())


def start(component: Component, layout: Layout, steps: Steps, *, ready: Callable[[], bool] | None = None) -> None:
    """Start a component unless it runs, and wait until it is ready."""

    def answers() -> bool:
        if ready is not None:
            return ready()
        return component.ready_url is None or probe.answers(component.ready_url, layout.pki)

    with steps.step(component.name) as step:
        started = processes.ensure(component, layout)
        processes.wait_ready(component, layout, answers, seconds=START_SECONDS)
        step.note("ready" if started else "was running")


def up(settings: Settings, layout: Layout, programs: Path, steps: Steps) -> None:
    """Start the control plane and wait until a pod can be created."""
    start(components.etcd(settings, layout), layout, steps)
    start(components.apiserver(settings, layout, programs), layout, steps)
    manager = components.controller_manager(settings, layout, programs)
    start(manager, layout, steps)
    account = f"{settings.api_url}/api/v1/namespaces/default/serviceaccounts/default"
    processes.wait_ready(manager, layout, lambda: probe.answers(account, layout.pki), seconds=START_SECONDS)


def expected(settings: Settings, layout: Layout, programs: Path) -> list[Component]:
    """Return the components of a control plane, in the order of their start."""
    return [
        components.etcd(settings, layout),
        components.apiserver(settings, layout, programs),
        components.controller_manager(settings, layout, programs),
    ]
