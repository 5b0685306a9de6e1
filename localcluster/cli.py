"""The command line of the cluster: `python -m localcluster`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from localcluster import images, processes
from localcluster.cluster import LocalCluster
from localcluster.errors import ClusterError
from localcluster.settings import MAX_NODES, Options


class _Group(click.Group):
    """A command group that shows a `ClusterError` as a message instead of a traceback."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except ClusterError as error:
            raise click.ClickException(str(error)) from error


def _cluster_options(command: click.decorators.FC) -> click.decorators.FC:
    command = click.option(
        "--name", default="cluster", show_default=True, help="Name of the cluster. Its state is in build/NAME."
    )(command)
    path = click.Path(file_okay=False, path_type=Path)
    return click.option("--root", type=path, help="Folder that contains the state folders, instead of build/.")(command)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """A real Kubernetes on this machine, for demos and tests."""


@main.command()
@_cluster_options
@click.option(
    "--control-plane-only",
    is_flag=True,
    help="Start only etcd, the API server and the controller manager. No pods run.",
)
@click.option("--with-images", is_flag=True, help="Also build helm and the project's images, and load the images.")
@click.option(
    "--api-port", type=click.IntRange(1, 65535), help="Port of the API server [default: 6443, or a free one]."
)
@click.option("--nodes", type=click.IntRange(1, MAX_NODES), help="Number of nodes [default: 1].")
@click.option("--pod-subnet", help="IPv4 range for nodes and pods [default: 10.88.0.0/16, or a free one].")
@click.option("--service-subnet", help="IPv4 range for Services [default: 10.96.0.0/16, or a free one].")
def up(
    name: str,
    root: Path | None,
    control_plane_only: bool,
    with_images: bool,
    api_port: int | None,
    nodes: int | None,
    pod_subnet: str | None,
    service_subnet: str | None,
) -> None:
    """Start the cluster, or repair it. Running components are not restarted."""
    options = Options(api_port, pod_subnet, service_subnet, nodes)
    LocalCluster(name=name, control_plane_only=control_plane_only, options=options, root=root).up(
        with_images=with_images
    )


@main.command()
@_cluster_options
@click.option("--purge", is_flag=True, help="Remove images, logs and the state folder too.")
def down(name: str, root: Path | None, purge: bool) -> None:
    """Stop the cluster and remove its processes, mounts, bridge and iptables rules."""
    LocalCluster(name=name, root=root).down(purge=purge)


@main.command()
@_cluster_options
def status(name: str, root: Path | None) -> None:
    """Show the components. The exit code is 1 unless all components are ready."""
    cluster = LocalCluster(name=name, root=root)
    components = cluster.status()
    table = Table("COMPONENT", "PID", "READY", box=None)
    for component in components:
        table.add_row(component.name, str(component.pid or "-"), "yes" if component.ready else "no")
    Console().print(table if components else f"cluster {name!r} is down")
    if components:
        click.echo(f"export KUBECONFIG={cluster.kubeconfig}")
    if not components or not all(component.ready for component in components):
        raise SystemExit(1)


@main.command()
@_cluster_options
@click.argument("component", required=False)
@click.option("--follow", "-f", is_flag=True, help="Print new lines as they arrive.")
def logs(name: str, root: Path | None, component: str | None, follow: bool) -> None:
    """Print the log of COMPONENT. Without COMPONENT, list the existing logs."""
    layout = LocalCluster(name=name, root=root).layout
    if component is None:
        for log in sorted(layout.logs.glob("*.log")):
            click.echo(f"{log.stem:32} {log}")
        return
    path = processes.log_path(component, layout)
    if not path.exists():
        raise ClusterError(f"no log of {component!r}; `python -m localcluster logs` lists them")
    sys.exit(subprocess.call(["tail", "-n", "200", *(["-F"] if follow else []), str(path)]))


@main.command("build-images")
@_cluster_options
@click.argument("targets", nargs=-1, type=click.Choice(list(images.TARGETS)))
def build_images(name: str, root: Path | None, targets: tuple[str, ...]) -> None:
    """Build the project's images if their inputs have changed, and load them into the running nodes.

    Without TARGETS, build operator and runtime.
    """
    LocalCluster(name=name, root=root).build_images(targets or images.DEFAULT_TARGETS)


@main.command("load-image")
@_cluster_options
@click.argument("reference")
def load_image(name: str, root: Path | None, reference: str) -> None:
    """Load the image REFERENCE from the store of `build-images` into the nodes, so that pods can use it."""
    LocalCluster(name=name, root=root).load_image(reference)


@main.command("program")
@_cluster_options
@click.argument("program")
def program_(name: str, root: Path | None, program: str) -> None:
    """Print the path of PROGRAM (kubectl or helm). The program is built first if it does not exist."""
    click.echo(LocalCluster(name=name, root=root).program(program))
