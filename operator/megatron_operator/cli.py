"""The program megatron-operator: the controller and its offline tools.

The exit code is 0 for success, 1 for an error of a resource or the cluster, and 2 for an error of the command line.
"""

from __future__ import annotations

import asyncio
import ipaddress
import sys
from collections.abc import Callable, Collection
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal

import click
from click.core import ParameterSource

from megatron_operator import __version__
from megatron_operator.install import install_manifests
from megatron_operator.manifest_file import ResourceFile, ResourceFileError, read_resource, resource_of
from megatron_operator.render.children import all_children
from megatron_operator.render.compare import Preview, preview
from megatron_operator.render.context import NotAllowed, RenderError
from megatron_operator.render.prefetch import NothingToPrefetch, claim_source, prefetch_job, prefetch_policy
from megatron_operator.resource.crd import custom_resource_definition
from megatron_operator.resource.pod_policy import PROFILES, RESTRICTED, PodPolicy, Switch
from megatron_operator.resource.release import Release
from megatron_operator.resource.settings import (
    DEFAULT_COORDINATOR_IMAGE,
    DEFAULT_OPERATOR_IMAGE,
    DEFAULT_RUNTIME_IMAGE,
    DEFAULT_VLLM_RUNTIME_IMAGE,
    MONITORING_NAMESPACE,
    Settings,
)
from megatron_operator.terminal import ReadableGroup, as_json, as_yaml, document, fail, say, say_lines
from megatron_runtime.process.environment import prepare_process
from megatron_runtime.process.logs import configure
from megatron_runtime.process.options import API_KEY, FiniteRange, environment_option
from megatron_runtime.protocol import strict_json as json

LOG_LEVELS = ["debug", "info", "warning", "error"]
_GIVEN = (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT)

runtime_image = environment_option(
    "--runtime-image",
    envvar="MEGATRON_RUNTIME_IMAGE",
    default=DEFAULT_RUNTIME_IMAGE,
    show_default=True,
    help="Default image of servers and native engines. A resource can set another one.",
)
vllm_runtime_image = environment_option(
    "--vllm-runtime-image",
    envvar="MEGATRON_VLLM_RUNTIME_IMAGE",
    default=DEFAULT_VLLM_RUNTIME_IMAGE,
    show_default=True,
    help="Default image of vLLM engines. A resource can set another one.",
)
coordinator_image = environment_option(
    "--coordinator-image",
    envvar="MEGATRON_COORDINATOR_IMAGE",
    default=DEFAULT_COORDINATOR_IMAGE,
    show_default=True,
    help="Image of coordinators. Coordinators can run in the operator's image, which is the default.",
)
operator_namespace = environment_option(
    "--operator-namespace",
    envvar="POD_NAMESPACE",
    default="megatron-system",
    show_default=True,
    help="Namespace in which the operator runs. It contains the operator's pods, Lease and admin key.",
)
image_pull_policy = environment_option(
    "--image-pull-policy",
    type=click.Choice(["Always", "IfNotPresent", "Never"]),
    envvar="MEGATRON_IMAGE_PULL_POLICY",
    default="IfNotPresent",
    show_default=True,
    help="Pull policy of the images of coordinators, servers and engines.",
)
image_pull_secrets = click.option(
    "--image-pull-secret",
    "image_pull_secrets",
    multiple=True,
    metavar="NAME",
    help="Name of a Secret for pulling images. The Secret must exist in the namespace of each resource. Repeatable.",
)
runtime_log_format = click.option(
    "--runtime-log-format",
    type=click.Choice(["json", "text"]),
    default="text",
    show_default=True,
    help="Format of the log lines of coordinators, servers and engines. json prints one object per line, for log "
    "collectors. A change restarts their pods.",
)
openshift = click.option(
    "--openshift",
    type=click.Choice(["auto", "true", "false"]),
    callback=lambda _, __, value: {"true": True, "false": False}.get(value),
    default="auto",
    show_default=True,
    help="Let the cluster assign the user and group IDs of pods, as OpenShift's restricted-v2 requires. With auto, "
    "`run` checks whether the cluster has OpenShift's API; other commands assume that it has not. A change "
    "restarts pods.",
)
resource_file = click.option(
    "-f",
    "--file",
    "path",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    required=True,
    help="YAML file with one MegatronInference resource.",
)
kubeconfig = click.option(
    "--kubeconfig",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Kubeconfig file. Default: the service account if the command runs in a pod, otherwise $KUBECONFIG or "
    "~/.kube/config.",
)
kube_context = click.option("--context", help="Kubeconfig context to use. Default: the current context.")
egress_policies = click.option(
    "--egress-policies/--no-egress-policies",
    default=True,
    show_default=True,
    help="Create NetworkPolicies that limit the outgoing connections of the pods of a resource.",
)

output_format = click.option(
    "-o",
    "--output",
    type=click.Choice(["yaml", "json"]),
    default="yaml",
    show_default=True,
    help="Output format.",
)


def _peers(_: click.Context, __: click.Parameter, value: str) -> tuple[dict[str, Any], ...]:
    try:
        peers = json.loads(value)
    except ValueError:
        peers = None
    fields = {"namespaceSelector", "podSelector", "ipBlock"}
    if not isinstance(peers, list) or not all(isinstance(peer, dict) and set() < set(peer) <= fields for peer in peers):
        names = ", ".join(sorted(fields))
        raise click.BadParameter(f"{value!r} is not a JSON list of NetworkPolicy peers: give objects with {names}")
    return tuple(peers)


def _ranges(_: click.Context, __: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    for value in values:
        try:
            ipaddress.ip_network(value)
        except ValueError as error:
            raise click.BadParameter(f"{value!r} is not a CIDR range such as 10.0.0.0/28: {error}") from error
    return values


monitoring_peers = click.option(
    "--monitoring-peers",
    callback=_peers,
    default=json.dumps([MONITORING_NAMESPACE]),
    show_default=True,
    metavar="JSON",
    help="NetworkPolicy peers, as JSON, that may read the metrics of pods of resources (port 8080).",
)
api_server_ranges = click.option(
    "--api-server-range",
    "api_server_ranges",
    callback=_ranges,
    multiple=True,
    metavar="CIDR",
    help="CIDR range from which the API server connects to pods. Set it for `kubectl megatron top` and the "
    "dashboard, which read metrics (port 8080) through the API server's proxy. Repeatable.",
)


def pod_policy(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of the pod policy to a command. `_settings` converts their values to a PodPolicy."""
    for switch in reversed(Switch):
        kind: dict[str, Any] = {"is_flag": True, "help": switch.text}
        if switch is Switch.PROFILE:
            kind = {"type": click.Choice(PROFILES), "default": RESTRICTED, "show_default": True, "help": switch.text}
        elif switch.argument is not None:
            kind = {"multiple": True, "metavar": switch.argument, "help": f"{switch.text} Repeatable."}
        command = click.option(switch.option, switch.field, **kind)(command)
    return command


def installation(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that affect rendered children to a command. `_settings` converts their values to Settings."""
    for option in reversed(
        (
            *(runtime_image, vllm_runtime_image, coordinator_image, operator_namespace, image_pull_policy),
            *(image_pull_secrets, runtime_log_format, openshift, pod_policy, egress_policies, monitoring_peers),
            api_server_ranges,
        )
    ):
        command = option(command)
    return command


def _settings(**options: Any) -> tuple[Settings, dict[str, Any]]:
    """Return the Settings that some of the options describe, and the remaining options."""

    def of(kind: type[Settings | PodPolicy]) -> dict[str, Any]:
        return {field.name: options.pop(field.name) for field in fields(kind) if field.name in options}

    try:
        policy = PodPolicy(**of(PodPolicy))
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    return Settings(**of(Settings), pod_policy=policy), options


def _dump(documents: list[dict[str, Any]], *, form: str) -> str:
    return as_json(documents) if form == "json" else as_yaml(documents)


@click.group(cls=ReadableGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def main() -> None:
    """Operator for MegatronInference resources, and its offline tools."""
    prepare_process()


@main.command()
@installation
@click.option(
    "--namespace",
    "namespaces",
    multiple=True,
    help="Namespace whose resources the operator manages. Default: all namespaces. Repeatable.",
)
@kubeconfig
@kube_context
@click.option(
    "--health-port",
    type=click.IntRange(0, 65535),
    default=8080,
    show_default=True,
    help="Port for probes and metrics.",
)
@click.option(
    "--lease-name",
    default="megatron-operator",
    show_default=True,
    help="Name of the Lease that elects the leader. Operators that manage different namespaces need different Leases.",
)
@click.option(
    "--lease-seconds",
    type=FiniteRange(1, 600),
    default=10.0,
    show_default=True,
    help="Seconds without a renewal after which a standby replaces the leader. Lower it for a faster takeover, at "
    "the cost of more writes.",
)
@click.option(
    "--resync-seconds",
    type=FiniteRange(min=1),
    default=300.0,
    show_default=True,
    help="Seconds between two full checks of each resource. A full check detects changes that a watch has missed. "
    "Raise it to reduce the load of a cluster with many resources.",
)
@click.option(
    "--watch-seconds",
    type=FiniteRange(min=1),
    default=40.0,
    show_default=True,
    help="Seconds after which the operator renews a watch. A watch that has stopped silently is replaced after this "
    "time at the latest.",
)
@click.option(
    "--coordinator-address",
    help="Template of the coordinators' admin addresses, in which {name} and {namespace} stand for the resource. "
    "Set it if the operator runs outside the cluster. Default: the cluster IP of the Service.",
)
@click.option(
    "--security/--no-security",
    default=True,
    show_default=True,
    help="Encrypt and authenticate the connections of coordinators, engines and servers with CURVE keys. Disable it "
    "only for debugging.",
)
@click.option(
    "--quote-image-repository",
    "quoted_repositories",
    multiple=True,
    metavar="REPOSITORY",
    help="Image repository that is trusted not to write secrets to its messages. The status copies termination "
    "messages and errors only from containers whose image is in such a repository or in the repository of a runtime, "
    "vLLM or coordinator image. A value that ends in / includes every repository below it. Repeatable.",
)
@click.option(
    "--max-concurrent-updates",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Maximum number of resources that are updated to this operator's release at the same time. Raise it to "
    "update many resources faster.",
)
@click.option(
    "--oldest-secure-version",
    default="",
    metavar="VERSION",
    help="Oldest release of this project without a known vulnerability. The operator reports the update of a resource "
    "with an older release as a security update. Default: none.",
)
@click.option(
    "--log-format",
    type=click.Choice(["json", "text"]),
    default="json",
    show_default=True,
    help="Format of the operator's log lines. json prints one object per line, for log collectors.",
)
@click.option(
    "--log-level",
    type=click.Choice(LOG_LEVELS),
    default="info",
    show_default=True,
    help="Lowest severity of the messages that the operator logs.",
)
def run(
    *,
    coordinator_address: str | None,
    log_format: Literal["json", "text"],
    log_level: str,
    **options: Any,
) -> None:
    """Run the operator until SIGTERM or until it loses its leadership."""
    from megatron_operator.controller import main as controller
    from megatron_operator.controller.main import RunOptions

    configure(style=log_format, level=log_level, quiet=("kopf", "asyncio", "aiohttp.access"))
    settings, others = _settings(**options)
    try:
        code = controller.run(RunOptions(settings=settings, coordinator_address_template=coordinator_address, **others))
    except controller.OperatorStartError as error:
        fail(error)
    sys.exit(code)


@main.command()
@output_format
def crd(output: str) -> None:
    """Print the CustomResourceDefinition."""
    document(_dump([custom_resource_definition()], form=output))


@main.command()
@operator_namespace
@runtime_image
@vllm_runtime_image
@click.option("--image", default=DEFAULT_OPERATOR_IMAGE, show_default=True, help="Image of the operator.")
def install(operator_namespace: str, runtime_image: str, vllm_runtime_image: str, image: str) -> None:
    """Print manifests that install the operator without Helm. Pass them to `kubectl apply --server-side -f -`."""
    manifests = install_manifests(
        namespace=operator_namespace, image=image, runtime_image=runtime_image, vllm_runtime_image=vllm_runtime_image
    )
    document(as_yaml(manifests))


@main.command()
@resource_file
@installation
@output_format
def render(path: Path, output: str, **options: Any) -> None:
    """Print the objects that the operator would create for a resource. The Secret with the resource's keys is not
    printed."""
    try:
        children = all_children(read_resource(path).context(_settings(**options)[0]))
    except (ResourceFileError, RenderError) as error:
        fail(error, lines=isinstance(error, ResourceFileError))
    document(_dump(children, form=output))


def _present(new: ResourceFile, against: str | None, *, context: str | None) -> ResourceFile | None:
    """Return the resource that the option `--against` names. Returns None if this resource does not exist.

    new: the resource of the file, whose name and namespace `--against cluster` uses.
    """
    if against is None:
        return None
    if against != "cluster":
        return read_resource(Path(against))
    from megatron_operator.cluster.api import KubeApiError
    from megatron_operator.cluster.auth import LoginError
    from megatron_operator.cluster.read import find_resource

    try:
        manifest = asyncio.run(find_resource(new.name, namespace=new.namespace or None, context=context))
    except (LoginError, KubeApiError) as error:
        raise ResourceFileError(str(error)) from error
    return None if manifest is None else resource_of(manifest, origin=f"{new.name} in the cluster")


def _previewed(old: ResourceFile | None, new: ResourceFile, fixed: Settings, given: Collection[str]) -> Preview:
    """Return the changes that applying the resource `new` over the resource `old` would cause.

    If `old` is None, the preview shows the creation of `new`. Otherwise `new` keeps the images with which `old` runs,
    unless the command line names other images.

    If the pod policy of the command line rejects `old`, the operator in the cluster uses another policy. In this case,
    the preview ignores the pod policy.

    fixed: settings from the command line.
    given: names of the settings that the command line sets.
    """
    if old is None:
        return preview(None, new.context(fixed))
    new, open_to_all = new.applied_to(old), replace(fixed, pod_policy=None)
    kept = open_to_all if old.release is None else old.release.settings(open_to_all)
    kept = replace(kept, installed_images=(*replace(kept, installed_images=()).runtime_images, *fixed.runtime_images))
    wanted = replace(kept, **{name: getattr(fixed, name) for name in given})
    try:
        all_children(old.context(replace(kept, pod_policy=fixed.pod_policy)))
    except NotAllowed as error:
        if new.spec != old.spec:
            say(f"the pod policy is not previewed, because it rejects the current resource: {error}", err=True)
    else:
        wanted = replace(wanted, pod_policy=fixed.pod_policy)
    return preview(old.context(kept), new.context(wanted))


@main.command()
@resource_file
@click.option(
    "--against",
    help="Resource with which the command compares FILE: another file, or `cluster` for the resource in the "
    "cluster. By default, the command shows what creating the resource would do.",
)
@click.option("--context", help="Kubeconfig context for `--against cluster`. Default: the current context.")
@installation
@click.pass_context
def plan(command: click.Context, path: Path, against: str | None, context: str | None, **options: Any) -> None:
    """Show what applying a file would change and why, and which engines would restart."""
    given = {name for name in Release.model_fields if command.get_parameter_source(name) in _GIVEN}
    fixed, _ = _settings(**options)
    try:
        new = read_resource(path)
        effect = _previewed(_present(new, against, context=context), new, fixed, given)
    except (ResourceFileError, RenderError) as error:
        fail(error, lines=isinstance(error, ResourceFileError))
    if not (effect.fields or effect.changes or effect.steps):
        say("nothing changes")
        return
    say_lines([f"set     {field}" for field in effect.fields])
    for change in effect.changes:
        note = "  [restarts its pods]" if change.restarts else ""
        say(f"{change.verb:7} {change.child}{f'  {change.field}' if change.field else ''}{note}")
    for number, step in enumerate(effect.steps, start=1):
        say(f"step {number}: {step}")
    restarted = [change.child for change in effect.changes if change.restarts and "StatefulSet" in change.child]
    say(f"engines that restart: {', '.join(name.split()[-1] for name in restarted) or 'none'}")


@main.command()
@resource_file
@click.option(
    "--claim", required=True, help="PersistentVolumeClaim to which the Job downloads, in the namespace of the resource."
)
@runtime_image
@image_pull_policy
@image_pull_secrets
@egress_policies
def prefetch(path: Path, claim: str, **settings: Any) -> None:
    """Print a Job that downloads the Hugging Face repository of a resource to a claim. The command also prints the spec
    that uses the claim."""
    try:
        context = read_resource(path).context(_settings(**settings)[0])
        job, source = prefetch_job(context, claim), claim_source(context, claim)
    except (ResourceFileError, NothingToPrefetch) as error:
        fail(error, lines=isinstance(error, ResourceFileError))
    say("# When this Job is complete, set in the resource:")
    for line in as_yaml([{"spec": source}]).splitlines():
        say(f"#   {line}")
    policies = [prefetch_policy(context)] if context.settings.egress_policies else []
    document(as_yaml([*policies, job]))


@main.command()
@click.argument("name")
@click.option("-n", "--namespace", help="Namespace to use. Default: the namespace of the kubeconfig context.")
@kube_context
def explain(name: str, namespace: str | None, context: str | None) -> None:
    """Show what resource NAME is waiting for. The output names the pod, the scheduler's message or the rank."""
    from megatron_operator.cluster.api import KubeApiError
    from megatron_operator.cluster.auth import LoginError
    from megatron_operator.cluster.read import explain_resource

    try:
        lines = asyncio.run(explain_resource(name, namespace=namespace, context=context))
    except (LookupError, LoginError, KubeApiError) as error:
        fail(error)
    say_lines(lines)


@main.command()
@click.option(
    "--operator-url",
    metavar="URL",
    help="URL of the operator's probes. If it is not set, the command does not check the operator.",
)
@click.option(
    "--server-url",
    metavar="URL",
    help="URL of a resource's server. If it is not set, the command does not check a model.",
)
@environment_option(
    "--api-key", type=API_KEY, envvar="MEGATRON_API_KEY", help="API key to send to the server, if it requires a key."
)
@kubeconfig
@kube_context
@click.option(
    "--timeout",
    type=FiniteRange(min=0),
    default=60.0,
    show_default=True,
    help="Timeout in seconds for all checks together.",
)
def verify(timeout: float, **options: Any) -> None:
    """Check that the CRD, the operator and a model work. The CRD must be established, the operator ready, and the model
    must answer. `helm test` runs this command in a pod."""
    from megatron_operator import verify as verification

    try:
        asyncio.run(verification.verify(timeout_seconds=timeout, **options))
    except verification.VerificationError as error:
        fail(error)


if __name__ == "__main__":
    main()
