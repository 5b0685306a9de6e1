"""megatron-operator: run the controller, and everything that can be asked of it without a cluster.

Exit codes: 0 done, 1 a resource or cluster is wrong, 2 the command line is.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Literal

import click
import yaml

from megatron_operator import __version__
from megatron_operator.install import install_manifests
from megatron_operator.manifest_file import ResourceFile, ResourceFileError, read_resource, resource_of
from megatron_operator.model.crd import custom_resource_definition
from megatron_operator.model.settings import Settings
from megatron_operator.render.children import all_children
from megatron_operator.render.compare import preview
from megatron_operator.render.context import InvalidPodTemplate
from megatron_operator.render.prefetch import NothingToPrefetch, claim_source, prefetch_job

LOG_LEVELS = ["debug", "info", "warning", "error"]
DEFAULT_RUNTIME_IMAGE = f"megatron-runtime:{__version__}"

runtime_image = click.option(
    "--runtime-image",
    envvar="MEGATRON_RUNTIME_IMAGE",
    default=DEFAULT_RUNTIME_IMAGE,
    show_default=True,
    help="Image of coordinator, server and engines where a resource names none.",
)
operator_namespace = click.option(
    "--operator-namespace",
    envvar="POD_NAMESPACE",
    default="megatron-system",
    show_default=True,
    help="Namespace of the operator's own pods: its Lease and admin key live there.",
)
image_pull_policy = click.option(
    "--image-pull-policy",
    type=click.Choice(["Always", "IfNotPresent", "Never"]),
    envvar="MEGATRON_IMAGE_PULL_POLICY",
    default="IfNotPresent",
    show_default=True,
    help="Pull policy of the runtime image.",
)
resource_file = click.option(
    "-f",
    "--file",
    "path",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    required=True,
    help="YAML file with one MegatronInference.",
)


def _dump(documents: list[dict[str, Any]], *, form: str) -> str:
    if form == "json":
        return json.dumps(documents[0] if len(documents) == 1 else documents, indent=2) + "\n"
    return yaml.safe_dump_all(documents, sort_keys=False, width=120, allow_unicode=True)


def _fail(error: Exception) -> None:
    raise click.ClickException(str(error)) from error


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def main() -> None:
    """Run large language models on Kubernetes: the operator and its offline tools."""


@main.command()
@runtime_image
@operator_namespace
@image_pull_policy
@click.option("--namespace", "namespaces", multiple=True, help="Serve this namespace only; may repeat. Default: all.")
@click.option("--kubeconfig", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Not in a pod only.")
@click.option("--context", help="Context of the kubeconfig.")
@click.option("--health-port", type=click.IntRange(0, 65535), default=8080, show_default=True)
@click.option("--lease-name", default="megatron-operator", show_default=True, help="One for each set of namespaces.")
@click.option(
    "--lease-seconds",
    type=click.FloatRange(1, 600),
    default=10.0,
    show_default=True,
    help="A dead leader is replaced after so long.",
)
@click.option(
    "--resync-seconds",
    type=click.FloatRange(min=1),
    default=300.0,
    show_default=True,
    help="How often the objects of each resource are listed afresh.",
)
@click.option(
    "--watch-seconds",
    type=click.FloatRange(min=1),
    default=40.0,
    show_default=True,
    help="How long a watch lasts before it is asked for anew: one that fell silent is found in that time.",
)
@click.option(
    "--coordinator-address",
    help="Template of a coordinator's admin address with {name} and {namespace}. Default: its Service's cluster IP.",
)
@click.option("--security/--no-security", default=True, show_default=True, help="CURVE on every socket.")
@click.option("--log-format", type=click.Choice(["json", "text"]), default="json", show_default=True)
@click.option("--log-level", type=click.Choice(LOG_LEVELS), default="info", show_default=True)
def run(
    *,
    runtime_image: str,
    operator_namespace: str,
    image_pull_policy: str,
    security: bool,
    coordinator_address: str | None,
    log_format: Literal["json", "text"],
    log_level: str,
    **options: Any,
) -> None:
    """Run the controller until it is told to stop or loses its leadership."""
    from megatron_operator.controller import main as controller
    from megatron_operator.controller.log import configure
    from megatron_operator.controller.options import RunOptions

    configure(style=log_format, level=log_level)
    settings = Settings(
        runtime_image=runtime_image,
        operator_namespace=operator_namespace,
        image_pull_policy=image_pull_policy,
        security=security,
    )
    try:
        code = controller.run(
            RunOptions(settings=settings, coordinator_address_template=coordinator_address, **options)
        )
    except controller.OperatorStartError as error:
        raise click.ClickException(str(error)) from error
    sys.exit(code)


@main.command()
@click.option("-o", "--output", type=click.Choice(["yaml", "json"]), default="yaml", show_default=True)
def crd(output: str) -> None:
    """Print the CustomResourceDefinition."""
    click.echo(_dump([custom_resource_definition()], form=output), nl=False)


@main.command()
@operator_namespace
@runtime_image
@click.option("--image", default=f"megatron-operator:{__version__}", show_default=True, help="Image of the operator.")
def install(operator_namespace: str, runtime_image: str, image: str) -> None:
    """Print the manifests that install the operator without Helm, for `kubectl apply --server-side -f -`."""
    manifests = install_manifests(namespace=operator_namespace, image=image, runtime_image=runtime_image)
    click.echo(_dump(manifests, form="yaml"), nl=False)


@main.command()
@resource_file
@runtime_image
@operator_namespace
@image_pull_policy
@click.option("-o", "--output", type=click.Choice(["yaml", "json"]), default="yaml", show_default=True)
def render(path: Path, output: str, **settings: Any) -> None:
    """Print the children that a resource would get. The keys Secret is made in the cluster and not printed."""
    try:
        children = all_children(read_resource(path).context(Settings(**settings)))
    except (ResourceFileError, InvalidPodTemplate) as error:
        _fail(error)
    click.echo(_dump(children, form=output), nl=False)


def _present(new: ResourceFile, against: str | None, *, context: str | None) -> ResourceFile | None:
    """The resource that `--against` names; None when there is none yet."""
    if against is None:
        return None
    if against != "cluster":
        return read_resource(Path(against))
    from megatron_operator.resource_client import ClusterError, ResourceClient

    try:
        found = ResourceClient(namespace=new.namespace, context=context).find(new.name)
    except ClusterError as error:
        raise ResourceFileError(str(error)) from error
    return None if found is None else resource_of(found, origin=f"{new.namespace}/{new.name} in the cluster")


@main.command()
@resource_file
@click.option("--against", help="The resource as it is now: a file, or `cluster`. Absent: nothing exists yet.")
@click.option("--context", help="Context of the kubeconfig, for `--against cluster`.")
@runtime_image
@operator_namespace
@image_pull_policy
def plan(path: Path, against: str | None, context: str | None, **settings: Any) -> None:
    """Say what applying FILE would change, why, and which engines restart."""
    fixed = Settings(**settings)
    try:
        new = read_resource(path)
        old = _present(new, against, context=context)
        if old is not None and (old.name, old.namespace) != (new.name, new.namespace):
            raise ResourceFileError(f"{against}: is {old.namespace}/{old.name}, not {new.namespace}/{new.name}")
        found = preview(old.context(fixed) if old else None, new.context(fixed))
    except (ResourceFileError, InvalidPodTemplate) as error:
        _fail(error)
    if not found.changes and not found.steps:
        click.echo("nothing changes")
        return
    for change in found.changes:
        note = "  [restarts its pods]" if change.restarts else ""
        click.echo(f"{change.verb:7} {change.child}{f'  {change.field}' if change.field else ''}{note}")
    for number, step in enumerate(found.steps, start=1):
        click.echo(f"step {number}: {step}")
    restarted = [change.child for change in found.changes if change.restarts and "StatefulSet" in change.child]
    click.echo(f"engines that restart: {', '.join(name.split()[-1] for name in restarted) or 'none'}")


@main.command()
@resource_file
@click.option("--claim", required=True, help="PersistentVolumeClaim in the resource's namespace that gets the files.")
@runtime_image
@image_pull_policy
def prefetch(path: Path, claim: str, **settings: Any) -> None:
    """Print a Job that fetches a resource's Hugging Face repository into a claim, and how to use it from there."""
    try:
        context = read_resource(path).context(Settings(**settings))
        job, source = prefetch_job(context, claim), claim_source(context, claim)
    except (ResourceFileError, NothingToPrefetch) as error:
        _fail(error)
    click.echo("# Once this Job is complete, the resource may say:")
    for line in _dump([{"spec": source}], form="yaml").splitlines():
        click.echo(f"#   {line}")
    click.echo(_dump([job], form="yaml"), nl=False)


@main.command()
@click.argument("name")
@click.option("-n", "--namespace", help="Default: the context's.")
@click.option("--context", help="Context of the kubeconfig.")
def explain(name: str, namespace: str | None, context: str | None) -> None:
    """Say what holds resource NAME up, from the resource down to the pod, the scheduler or the rank."""
    from megatron_operator.explain import causes
    from megatron_operator.resource_client import ClusterError, ResourceClient

    try:
        client = ResourceClient(namespace=namespace, context=context)
        text = causes(client.get(name), client.pods(name))
    except ClusterError as error:
        _fail(error)
    click.echo(text)


if __name__ == "__main__":
    main()
