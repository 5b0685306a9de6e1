"""A client of a cluster's containerd, for images and containers. It runs `ctr` on the cluster's private socket."""

from __future__ import annotations

import hashlib
import io
import subprocess
import tarfile
from pathlib import Path

from localcluster.render import PAUSE_IMAGE
from localcluster.settings import Layout
from localcluster.shell import run
from megatron_runtime.protocol import strict_json as json

NAMESPACE = "k8s.io"


def ctr(layout: Layout, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    command = ["ctr", "--address", str(layout.containerd_socket), "--namespace", NAMESPACE]
    return run([*command, *arguments], check=check, timeout=300)


def is_up(layout: Layout) -> bool:
    return layout.containerd_socket.exists() and ctr(layout, "version", check=False).returncode == 0


def images(layout: Layout) -> set[str]:
    return set(ctr(layout, "images", "list", "--quiet").stdout.split())


def image_digest(layout: Layout, reference: str) -> str | None:
    """Return the manifest digest of the image with this name, or None if there is no such image."""
    table = ctr(layout, "images", "list", f"name=={reference}").stdout.splitlines()[1:]
    return next((line.split()[2] for line in table if line.split()[0] == reference), None)


def stale_ids(table: str) -> list[str]:
    """Return the names `sha256:…` of images that have no other name.

    table: the output of `ctr images list`.

    containerd's CRI plugin creates such a name when an image is imported for the first time. The name stays when the
    tag moves to another image, and would keep the old layers forever. The names can be removed, because running
    containers have separate references to their layers.
    """
    rows = [line.split() for line in table.splitlines()[1:]]
    named = {row[2] for row in rows if not row[0].startswith("sha256:")}
    return [row[0] for row in rows if row[0].startswith("sha256:") and row[2] not in named]


def remove_stale_ids(layout: Layout) -> None:
    stale = stale_ids(ctr(layout, "images", "list").stdout)
    if stale:
        ctr(layout, "images", "remove", *stale, check=False)


def snapshots(layout: Layout) -> set[str]:
    """Return the names of the committed snapshots in containerd's store."""
    rows = (line.split() for line in ctr(layout, "snapshots", "list").stdout.splitlines()[1:])
    return {row[0] for row in rows if row[-1] == "Committed"}


def remove_containers(layout: Layout) -> int:
    """Delete all containers, and return their number. The image store remains, for a later cluster."""
    containers = ctr(layout, "containers", "list", "--quiet").stdout.split()
    for container in containers:
        ctr(layout, "tasks", "delete", "--force", container, check=False)
    if containers:
        ctr(layout, "containers", "delete", *containers, check=False)
    return len(containers)


def import_pause(layout: Layout, program: Path) -> None:
    """Import the image of pod sandboxes, which contains one static program."""
    if PAUSE_IMAGE in images(layout):
        return
    archive = layout.run / "pause.tar"
    archive.write_bytes(pause_archive(program.read_bytes()))
    ctr(layout, "images", "import", str(archive))
    archive.unlink()


def pause_archive(program: bytes) -> bytes:
    """Return a docker-archive of an image that contains one file, `program`. The same program gives the same bytes."""
    layer = _tar({"pause": (program, 0o755)})
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Entrypoint": ["/pause"], "User": "65535:65535"},
        "rootfs": {"type": "layers", "diff_ids": ["sha256:" + hashlib.sha256(layer).hexdigest()]},
    }
    manifest = [{"Config": "config.json", "RepoTags": [PAUSE_IMAGE], "Layers": ["layer.tar"]}]
    files = {
        "layer.tar": layer,
        "config.json": json.dumps(config).encode(),
        "manifest.json": json.dumps(manifest).encode(),
    }
    return _tar({name: (content, 0o644) for name, content in files.items()})


def _tar(files: dict[str, tuple[bytes, int]]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, (content, mode) in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), mode
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()
