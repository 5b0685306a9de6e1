"""The commands of `kubectl megatron`, which show and control MegatronInference resources and their pods.

kubectl looks for the program `kubectl-megatron` on PATH. A module that only one command needs is imported inside the
function of this command, because program start accounts for most of a command's run time.
"""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import click

from megatron_kubectl.resource_client import ClusterError, ResourceClient, current_context
from megatron_kubectl.resource_view import age, rollout, summary, table
from megatron_operator import __version__
from megatron_operator.resource.names import ANNOTATION_RESTARTED, ANNOTATION_UPDATE, GROUP, KIND, PREFILL
from megatron_operator.resource.states import DesiredState
from megatron_operator.resource.text import stamp
from megatron_operator.terminal import ReadableGroup, clear, fail, say, say_candidates, say_json, say_lines
from megatron_runtime.process.environment import prepare_process
from megatron_runtime.process.options import FiniteRange

VERBS: dict[str, tuple[DesiredState, str]] = {
    "pause": (DesiredState.PAUSED, "Pause generation and keep all memory. Open streams pause, and new requests wait."),
    "resume": (DesiredState.RUNNING, "Continue generation, from any state."),
    "suspend": (DesiredState.SUSPENDED, "Pause generation and release the memory of the engines. Requests wait."),
    "stop": (DesiredState.STOPPED, "Finish the open requests, and then remove the engines."),
}


class EngineIndex(click.ParamType):
    """An option type for the index of an engine. It converts I to `engine-I`, and accepts `prefill-I` unchanged."""

    name = "engine"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if re.fullmatch(f"({PREFILL}-)?(0|[1-9][0-9]*)", value) is None:
            self.fail(f"is {value!r}; give an index such as 0, or {PREFILL}-0 for a prefill engine", param, ctx)
        return value if value.startswith(PREFILL) else f"engine-{value}"


@click.group(cls=ReadableGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def main() -> None:
    """Show and control MegatronInference resources."""
    prepare_process()


def _connection(command: Callable[..., None]) -> Callable[..., None]:
    command = click.option(
        "-n", "--namespace", help="Namespace to use. Default: the namespace of the kubeconfig context."
    )(command)
    return click.option("--context", help="Kubeconfig context to use. Default: the current context.")(command)


def _names(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the names of resources for shell completion. Returns an empty list if the API server does not answer."""
    where = {key: context.params.get(key) for key in ("namespace", "context")}
    try:
        with ResourceClient(**where) as client:
            names = [each["metadata"]["name"] for each in client.resources(all_namespaces=False)]
    except (ClusterError, OSError):
        return []
    return [name for name in names if name.startswith(incomplete)]


def _options(command: Callable[..., None]) -> Callable[..., None]:
    return _connection(click.argument("name", shell_complete=_names)(command))


_output = click.option(
    "-o",
    "--output",
    type=click.Choice(["json"]),
    help="Output format. json prints machine-readable output. Default: text.",
)
_wait = click.option(
    "--wait/--no-wait", default=True, show_default=True, help="Wait until every rank has confirmed the new state."
)
_timeout = click.option(
    "--timeout",
    type=FiniteRange(min=0),
    default=300.0,
    show_default=True,
    help="Maximum number of seconds that the command waits. Then it fails. The requested change remains.",
)


@contextlib.contextmanager
def _client(namespace: str | None, context: str | None) -> Iterator[ResourceClient]:
    """Yield a client for the requests of one command.

    If the block raises ClusterError, print the error's message and exit.
    """
    try:
        with ResourceClient(namespace=namespace, context=context) as client:
            yield client
    except ClusterError as error:
        fail(error)


@main.command(name="list")
@_connection
@click.option("-A", "--all-namespaces", is_flag=True, help="Show the resources of all namespaces.")
@click.option(
    "-o",
    "--output",
    type=click.Choice(["wide", "json", "name"]),
    help="Output format. wide prints more columns, json prints machine-readable output, and name prints only names, "
    "as input for kubectl. Default: a table.",
)
def list_(*, namespace: str | None, context: str | None, all_namespaces: bool, output: str | None) -> None:
    """List resources and their state."""
    with _client(namespace, context) as client:
        resources = client.resources(all_namespaces=all_namespaces)
        where = "all namespaces" if all_namespaces else f"namespace {client.namespace}"
    resources.sort(key=lambda each: (each["metadata"]["namespace"], each["metadata"]["name"]))
    if output == "json":
        say_json([summary(each) for each in resources])
        return
    if output == "name":
        say_lines([f"{KIND.lower()}.{GROUP}/{each['metadata']['name']}" for each in resources])
        return
    if not resources:
        say(f"no resources in {where}", err=True)
        return
    say_lines(table(*_list_table(resources, wide=output == "wide", namespaces=all_namespaces)))


def _list_table(resources: list[dict[str, Any]], *, wide: bool, namespaces: bool) -> tuple[list[str], list[list[str]]]:
    """Return the headers and rows of the table of resources.

    wide:       add the columns of `-o wide`.
    namespaces: add the column of the namespace.
    """
    now = datetime.now(UTC)
    columns: dict[str, Callable[[dict[str, Any], dict[str, Any]], str]] = {
        **({"NAMESPACE": lambda _, view: view["namespace"]} if namespaces else {}),
        "NAME": lambda _, view: view["name"],
        "STATE": lambda _, view: view["state"],
        "READY": lambda _, view: view["ready"],
        "MODEL": lambda _, view: view["model"],
        "REASON": lambda _, view: view["reason"],
        "AGE": lambda each, _: age(each, now),
    }
    if wide:
        columns |= {
            "DESIRED": lambda _, view: view["desired"],
            "BACKEND": lambda each, _: (each["spec"].get("engine") or {}).get("backend", "Native"),
            "ENDPOINT": lambda each, _: (each.get("status") or {}).get("endpoint") or "",
            "WAITS FOR": lambda _, view: view["waitingOn"],
        }
    rows = [[show(each, summary(each)) for show in columns.values()] for each in resources]
    return list(columns), rows


@main.command()
@_options
@_output
def status(*, name: str, namespace: str | None, context: str | None, output: str | None) -> None:
    """Show the status of NAME and what it is waiting for."""
    from megatron_operator.explain import explanation

    with _client(namespace, context) as client:
        resource, problem = client.get(name), client.operator_problem()
    if output == "json":
        say_json({**summary(resource), "operatorProblem": problem, "status": resource.get("status") or {}})
    else:
        say_lines(explanation(resource, problem))


@main.command()
@_options
@_output
def explain(*, name: str, namespace: str | None, context: str | None, output: str | None) -> None:
    """Show what NAME is waiting for. The output names the pod, the scheduler's message or the rank, and says whether
    the load is uneven."""
    from megatron_kubectl.top import Sampler, imbalance
    from megatron_operator.explain import causes

    with _client(namespace, context) as client:
        resource = client.get(name)
        problem = client.operator_problem()
        lines = causes(resource, client.pods(name), problem) + imbalance(Sampler(client, name).take())
    if output == "json":
        say_json({**summary(resource), "operatorProblem": problem, "explanation": lines})
    else:
        say_lines(lines)


@main.command()
@_options
@click.option(
    "--component",
    type=click.Choice(["coordinator", "server", "engine"]),
    help="Show only the pods of this component. Default: all components.",
)
@click.option(
    "--engine",
    type=EngineIndex(),
    metavar="I",
    help="Show only the pods of one engine, by its index. prefill-I selects the prefill engine with index I. "
    "Default: all engines.",
)
@click.option(
    "-f",
    "--follow",
    is_flag=True,
    help="Print new log lines as they arrive, including the logs of containers that start later.",
)
@click.option(
    "--tail",
    type=click.IntRange(min=0),
    metavar="N",
    help="Number of most recent lines to print per pod. Default: all lines.",
)
@click.option("--previous", is_flag=True, help="Show the logs of the container before its last restart.")
@_output
def logs(
    *,
    name: str,
    namespace: str | None,
    context: str | None,
    component: str | None,
    engine: str | None,
    follow: bool,
    tail: int | None,
    previous: bool,
    output: str | None,
) -> None:
    """Show the logs of all pods of NAME in chronological order. Each line begins with the name of its pod."""
    from megatron_kubectl.pod_logs import LogFollower, Selection, merged, selected_pods

    if engine is not None and component not in (None, "engine"):
        raise click.UsageError(f"--engine: not allowed with --component {component}; remove one of the two")
    if follow and previous:
        raise click.UsageError(
            "--previous: not allowed with --follow, because that container has exited; remove one of the two"
        )
    only = "engine" if engine is not None else component
    selection = Selection(name, only, None if engine is None else f"{name}-{engine}")
    errors: list[str] = []
    with _client(namespace, context) as client, contextlib.suppress(KeyboardInterrupt):
        pods = selected_pods(client, selection)
        width = max(len(pod["metadata"]["name"]) for pod in pods)
        if follow:
            lines = LogFollower(client, selection, tail=tail).lines()
        else:
            lines = merged(client, pods, tail=tail, previous=previous, errors=errors)
        for line in lines:
            if output == "json":
                say_json({"at": line.at, "pod": line.pod, "text": line.text}, indent=None)
            else:
                say(f"{line.pod:{width}} | {line.text.expandtabs()}")
    if errors:
        fail(ClusterError("; ".join(errors)))


@main.command()
@_options
@click.option(
    "--interval",
    type=FiniteRange(min=0.5),
    default=2.0,
    show_default=True,
    help="Seconds between two updates of the table.",
)
@click.option(
    "--once", is_flag=True, help="Print the table once and exit. This is the default if the output is not a terminal."
)
@_output
def top(
    *, name: str, namespace: str | None, context: str | None, interval: float, once: bool, output: str | None
) -> None:
    """Show the load of the engines of NAME until you press Ctrl-C. Rates are averages over one interval."""
    from megatron_kubectl.top import Sampler, lines

    with _client(namespace, context) as client, contextlib.suppress(KeyboardInterrupt):
        sampler = Sampler(client, name)
        sampler.take()
        while True:
            time.sleep(interval)
            sample = sampler.take()
            if output == "json":
                say_json(sample)
                return
            if once or not sys.stdout.isatty():
                say_lines(lines(sample))
                return
            clear()
            say_lines(lines(sample))


@main.command()
@_options
@click.option(
    "--replicas",
    type=click.IntRange(min=0),
    required=True,
    help="Number of engines. 0 removes all engine pods; requests then wait.",
)
@click.option("--wait/--no-wait", default=True, show_default=True, help="Wait until all engines serve.")
@_timeout
def scale(*, name: str, namespace: str | None, context: str | None, replicas: int, wait: bool, timeout: float) -> None:
    """Change the number of engines of NAME (spec.replicas)."""
    with _client(namespace, context) as client:
        resource = client.patch_spec(name, replicas=replicas)
        if not wait:
            say(f"{name}: {replicas} engines requested")
            return
        wanted = (resource.get("spec") or {}).get("desiredState", "Running")
        if wanted != DesiredState.RUNNING:
            say(f"{name}: {replicas} engines as soon as it runs; it is {wanted} as requested")
            return
        _follow_rollout(client, name, timeout=timeout, quiet=False)


@main.group(name="rollout")
def rollout_group() -> None:
    """Show rollouts."""


@rollout_group.command(name="status")
@_options
@_timeout
@_output
def rollout_status(
    *, name: str, namespace: str | None, context: str | None, timeout: float, output: str | None
) -> None:
    """Show the progress of a rollout of NAME until it is complete. If the rollout fails, the exit code is 1."""
    with _client(namespace, context) as client:
        progress = _follow_rollout(client, name, timeout=timeout, quiet=output == "json")
    if output == "json":
        say_json(progress)


def _follow_rollout(client: ResourceClient, name: str, *, timeout: float, quiet: bool) -> dict[str, Any]:
    """Print the progress of a rollout until the rollout is complete. Return the result of resource_view.rollout().

    Raises ClusterError if the rollout fails or does not complete in time.
    """
    shown = ""
    for resource in client.versions(name, timeout_seconds=timeout):
        progress = rollout(resource)
        if progress["done"]:
            if not quiet:
                say(f"{name}: done, {progress['text']}")
            return progress
        if progress["failed"]:
            raise ClusterError(f"{name}: {progress['text']}; {progress['failed']}")
        if progress["text"] != shown and not quiet:
            say(f"{name}: {progress['text']}")
        shown = progress["text"]
    raise ClusterError(f"{name}: not done after {timeout:g} s: {shown}; see kubectl megatron explain {name}")


@main.command()
@_options
def restart(*, name: str, namespace: str | None, context: str | None) -> None:
    """Restart the engines of NAME that crashed too often. The operator does not restart such engines automatically.
    Serving engines are not affected."""
    with _client(namespace, context) as client:
        client.annotate(name, {ANNOTATION_RESTARTED: stamp(datetime.now(UTC))})
    say(f"{name}: restart budgets are reset")


@main.command()
@_options
def update(*, name: str, namespace: str | None, context: str | None) -> None:
    """Update NAME to the operator's release. This replaces its coordinator, servers and engines."""
    with _client(namespace, context) as client:
        available = (client.get(name).get("status") or {}).get("update")
        if available is not None:
            client.annotate(name, {ANNOTATION_UPDATE: available["id"]})
    say(f"{name}: update requested" if available is not None else f"{name}: is up to date")


@main.command()
@click.option(
    "-n",
    "--namespace",
    help="Namespace that the page shows when it opens. Default: the namespace of the kubeconfig context.",
)
@click.option("-A", "--all-namespaces", is_flag=True, help="Show the resources of all namespaces when the page opens.")
@click.option("--context", help="Kubeconfig context to use. Default: the current context.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=0,
    show_default=True,
    help="Port on 127.0.0.1 on which the page is served. 0 picks a free port. Set it if you bookmark the page.",
)
@click.option("--browser/--no-browser", default=True, show_default=True, help="Open the page in a browser.")
def dashboard(*, namespace: str | None, all_namespaces: bool, context: str | None, port: int, browser: bool) -> None:
    """Serve a web page that shows and controls resources. The page is available on this machine only, until you press
    Ctrl-C."""
    import asyncio

    try:
        from megatron_kubectl.dashboard.app import serve
    except ModuleNotFoundError as error:
        fail(ClusterError(f"{error}: install the dashboard with pip install 'megatron-inference[dashboard]'"))

    try:
        shown, active = current_context(context)
        first = "" if all_namespaces else namespace or active
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(
                serve(namespace=first, context=context, shown_context=shown, port=port, opens_browser=browser, say=say)
            )
    except (ClusterError, OSError) as error:
        fail(error)


def _verb(verb: str) -> None:
    desired, text = VERBS[verb]

    @main.command(name=verb, help=text)
    @_options
    @_wait
    @_timeout
    def command(*, name: str, namespace: str | None, context: str | None, wait: bool, timeout: float) -> None:
        with _client(namespace, context) as client:
            client.patch_spec(name, desiredState=desired.value)
            if wait:
                client.wait_state(name, desired.value, timeout_seconds=timeout)
        say(f"{name}: {desired.value}" if wait else f"{name}: {desired.value} requested")


for _name in VERBS:
    _verb(_name)


def complete() -> None:
    """Run the program `kubectl_complete-megatron`, which kubectl calls to complete the last argument of a command.

    The program writes one candidate per line, with its help after a tab. The last line disables the completion of file
    names.
    """
    from click.shell_completion import ShellComplete

    words = sys.argv[1:] or [""]
    completions = ShellComplete(main, {}, "kubectl megatron", "").get_completions(words[:-1], words[-1])
    say_candidates([(str(item.value), item.help or "") for item in completions])


if __name__ == "__main__":
    main()
