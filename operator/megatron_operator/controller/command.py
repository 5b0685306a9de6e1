"""`megatron-operator run`: flags and environment to one frozen RunOptions."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Literal

import click

SERVICE_ACCOUNT_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
FALLBACK_NAMESPACE = "megatron-system"


def own_namespace() -> str:
    """The namespace of the pod this process runs in; outside of a cluster the chart's default."""
    try:
        return SERVICE_ACCOUNT_NAMESPACE.read_text().strip() or FALLBACK_NAMESPACE
    except OSError:
        return FALLBACK_NAMESPACE


@click.command("run", context_settings={"auto_envvar_prefix": "MEGATRON_OPERATOR"})
@click.option("--runtime-image", required=True, help="Image of coordinators, servers and engines.")
@click.option(
    "--image-pull-policy",
    type=click.Choice(["IfNotPresent", "Always", "Never"]),
    default="IfNotPresent",
    show_default=True,
    help="Of that image.",
)
@click.option(
    "--namespace",
    "namespaces",
    multiple=True,
    help="Serve only this namespace; may be repeated. Without it all namespaces, which needs a ClusterRole.",
)
@click.option(
    "--operator-namespace",
    default=own_namespace,
    show_default="the pod's own, else megatron-system",
    help="Where the Lease and the admin key are.",
)
@click.option(
    "--insecure", is_flag=True, help="No CURVE on the sockets between operator, coordinators, engines and servers."
)
@click.option("--kubeconfig", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Outside of a pod.")
@click.option("--context", help="Context of the kubeconfig.")
@click.option("--lease-name", default="megatron-operator", show_default=True)
@click.option(
    "--lease-seconds",
    type=click.FloatRange(min=1, max=600),
    default=15.0,
    show_default=True,
    help="A dead leader is replaced after so long.",
)
@click.option(
    "--coordinator-address-template",
    help="Admin address of coordinators, with {name} and {namespace}. Default: the cluster IP of their Service.",
)
@click.option("--health-host", default="0.0.0.0", show_default=True)
@click.option(
    "--health-port",
    type=click.IntRange(0, 65535),
    default=8080,
    show_default=True,
    help="/healthz, /readyz and /metrics.",
)
@click.option(
    "--resync-seconds",
    type=click.FloatRange(min=1),
    default=300.0,
    show_default=True,
    help="How often everything is listed afresh.",
)
@click.option("--log-format", type=click.Choice(["json", "text"]), default="json", show_default=True)
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"], case_sensitive=False),
    default="info",
    show_default=True,
)
def command(
    *,
    runtime_image: str,
    image_pull_policy: str,
    operator_namespace: str,
    insecure: bool,
    log_format: Literal["json", "text"],
    log_level: str,
    **options: Any,
) -> None:
    """Run the operator until SIGTERM.

    Every flag may be given as MEGATRON_OPERATOR_RUN_FLAG. In a pod, give POD_NAME and POD_UID by the downward API: then
    a restarted container takes its own lease over at once.
    """
    from megatron_operator.controller import log
    from megatron_operator.controller.main import OperatorStartError, run
    from megatron_operator.controller.options import RunOptions
    from megatron_operator.model.settings import Settings

    log.configure(style=log_format, level=log_level)
    settings = Settings(
        runtime_image=runtime_image,
        operator_namespace=operator_namespace,
        image_pull_policy=image_pull_policy,
        security=not insecure,
    )
    try:
        sys.exit(run(RunOptions(settings=settings, **options)))
    except OperatorStartError as error:
        raise click.ClickException(str(error)) from error
