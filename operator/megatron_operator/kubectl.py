"""kubectl megatron: the verbs as commands, and the dashboard. kubectl finds `kubectl-megatron` on PATH. It only patches
the resource."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import click

from megatron_operator import __version__
from megatron_operator.explain import causes, explanation
from megatron_operator.model.resource import VERSION
from megatron_operator.model.states import DesiredState
from megatron_operator.plan.clock import stamp
from megatron_operator.render.context import ANNOTATION_RESTARTED, ANNOTATION_UPDATE
from megatron_operator.resource_client import ClusterError, ResourceClient, current_context
from megatron_operator.storage_migration import migrate as migrate_storage
from megatron_operator.terminal import fail, say, say_lines

VERBS: dict[str, tuple[DesiredState, str]] = {
    "pause": (DesiredState.PAUSED, "Pause generation; new requests wait."),
    "resume": (DesiredState.RUNNING, "Run, from any state."),
    "suspend": (DesiredState.SUSPENDED, "Pause generation and release memory."),
    "stop": (DesiredState.STOPPED, "Drain, then remove the engines."),
}


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def main() -> None:
    """Show and control MegatronInference resources."""


def _options(command: Callable[..., None]) -> Callable[..., None]:
    command = click.argument("name")(command)
    command = click.option("-n", "--namespace", help="Default: the namespace of the context.")(command)
    return click.option("--context", help="Context of the kubeconfig.")(command)


@main.command()
@_options
def status(name: str, namespace: str | None, context: str | None) -> None:
    """Show the status of NAME, and what it waits for."""
    try:
        client = ResourceClient(namespace=namespace, context=context)
        lines = explanation(client.get(name), client.operator_problem())
    except ClusterError as error:
        fail(error)
    say_lines(lines)


@main.command()
@_options
def explain(name: str, namespace: str | None, context: str | None) -> None:
    """Show what NAME waits for, down to the pod, the scheduler or the rank."""
    try:
        client = ResourceClient(namespace=namespace, context=context)
        resource = client.get(name)
        lines = causes(resource, client.pods(name), client.operator_problem())
    except ClusterError as error:
        fail(error)
    say_lines(lines)


@main.command()
@_options
def restart(name: str, namespace: str | None, context: str | None) -> None:
    """Start engines of NAME again that have used up their restart budget. Engines that serve stay as they are."""
    try:
        now = stamp(datetime.now(UTC))
        ResourceClient(namespace=namespace, context=context).annotate(name, {ANNOTATION_RESTARTED: now})
    except ClusterError as error:
        fail(error)
    say(f"{name}: restart budgets are reset")


@main.command()
@_options
def update(name: str, namespace: str | None, context: str | None) -> None:
    """Update NAME to the release of the operator. Its coordinator, servers and engines are replaced."""
    try:
        client = ResourceClient(namespace=namespace, context=context)
        found = client.get(name).get("status", {}).get("update")
        if found is not None:
            client.annotate(name, {ANNOTATION_UPDATE: found["id"]})
    except ClusterError as error:
        fail(error)
    say(f"{name}: update requested" if found is not None else f"{name}: is up to date")


@main.command()
@click.option("-n", "--namespace", help="Namespace that is shown first. Default: that of the context.")
@click.option("-A", "--all-namespaces", is_flag=True, help="Show the resources of all namespaces first.")
@click.option("--context", help="Context of the kubeconfig.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=0, show_default=True, help="Port on 127.0.0.1; 0: any free port."
)
@click.option("--browser/--no-browser", default=True, show_default=True, help="Open the page in the browser.")
def dashboard(*, namespace: str | None, all_namespaces: bool, context: str | None, port: int, browser: bool) -> None:
    """Serve a web page on this machine that shows and controls resources, until it is interrupted."""
    try:
        from megatron_operator.dashboard.app import serve
    except ModuleNotFoundError as error:
        fail(ClusterError(f"{error}: install the dashboard with pip install 'megatron-inference[dashboard]'"))
    from megatron_operator.cluster.auth import LoginError

    try:
        shown, active = current_context(context)
        first = "" if all_namespaces else namespace or active
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(
                serve(namespace=first, context=context, shown_context=shown, port=port, opens_browser=browser, say=say)
            )
    except (ClusterError, LoginError, OSError) as error:
        fail(error)


@main.command()
@click.option("--context", help="Context of the kubeconfig.")
def migrate(context: str | None) -> None:
    """Rewrite all resources of the cluster in the storage version of the API. Nothing restarts."""
    try:
        found = migrate_storage(context=context)
    except ClusterError as error:
        fail(error)
    if found.needed:
        say(f"stored versions were {', '.join(found.before)}; {found.rewritten} resources rewritten in {VERSION}")
    else:
        say(f"nothing to migrate: the only stored version is {VERSION}")


def _verb(verb: str) -> None:
    desired, summary = VERBS[verb]

    @main.command(name=verb, help=summary)
    @_options
    @click.option("--wait/--no-wait", default=True, show_default=True, help="Wait until every rank has confirmed.")
    @click.option("--timeout", type=click.FloatRange(min=0), default=300.0, show_default=True, help="Seconds to wait.")
    def command(name: str, namespace: str | None, context: str | None, **options: Any) -> None:
        try:
            client = ResourceClient(namespace=namespace, context=context)
            client.patch_spec(name, desiredState=desired.value)
            if options["wait"]:
                client.wait_state(name, desired.value, timeout_seconds=options["timeout"])
        except ClusterError as error:
            fail(error)
        say(f"{name}: {desired.value}" if options["wait"] else f"{name}: {desired.value} requested")


for _name in VERBS:
    _verb(_name)

if __name__ == "__main__":
    main()
