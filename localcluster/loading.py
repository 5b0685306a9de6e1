"""Loads an image from buildah's store into containerd's store without copying its layers.

Both stores keep each layer as a folder that overlayfs mounts. For each layer that containerd lacks, this module creates
a snapshot whose files are hard links to buildah's files. This takes seconds and no disk space. No process writes to
these files, because a container's changes go to a separate upper folder. Afterwards, this module imports the manifest
and the configuration. The import needs no archives of the layers, because containerd unpacks only layers without a
snapshot.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import tarfile
from collections.abc import Iterable
from pathlib import Path

from localcluster import runtime
from localcluster.errors import ClusterError
from localcluster.progress import Steps
from localcluster.settings import Layout
from localcluster.shell import run
from localcluster.store import Image, Layer
from megatron_runtime.protocol import strict_json as json

GC_ROOT = "containerd.io/gc.root"
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"


def chain_ids(digests: Iterable[str]) -> list[str]:
    """Return the name of each layer's snapshot. digests: digests of the layers, lowest layer first.

    A name is a digest of the layer and all layers below the layer (ChainID of the OCI image format).
    """
    chain: list[str] = []
    for digest in digests:
        chained = f"{chain[-1]} {digest}" if chain else None
        chain.append("sha256:" + hashlib.sha256(chained.encode()).hexdigest() if chained else digest)
    return chain


def load(image: Image, layout: Layout, steps: Steps) -> None:
    """Load an image into containerd, so that pods can use the image. Layers that containerd already has are skipped."""
    with steps.step(f"load {image.reference}") as step:
        if runtime.image_digest(layout, image.reference) == image.digest:
            step.note("is there")
            return
        present = runtime.snapshots(layout)
        parent, added = "", 0
        for layer, snapshot in zip(image.layers, chain_ids(layer.digest for layer in image.layers), strict=True):
            if snapshot not in present:
                step.detail(f"layer {layer.digest[7:19]}")
                _link_layer(layer, snapshot, parent, layout)
                added += 1
            parent = snapshot
        archive = layout.run / "image.tar"
        archive.write_bytes(bare_archive(image))
        runtime.ctr(layout, "images", "import", str(archive))
        archive.unlink()
        # From now on the image references its snapshots, so containerd deletes them together with it.
        for snapshot in chain_ids(layer.digest for layer in image.layers):
            runtime.ctr(layout, "snapshots", "label", snapshot, f"{GC_ROOT}=")
        runtime.remove_stale_ids(layout)
        step.note(f"{added} of {len(image.layers)} layers were new")


def _link_layer(layer: Layer, snapshot: str, parent: str, layout: Layout) -> None:
    key = f"load-{snapshot}"
    # Remove files that an interrupted run has left.
    runtime.ctr(layout, "snapshots", "remove", key, check=False)
    runtime.ctr(layout, "snapshots", "prepare", key, *([parent] if parent else []))
    target = writable_folder(runtime.ctr(layout, "snapshots", "mounts", "/", key).stdout)
    run(copy_command(layer.folder, target, same_device=os.stat(layer.folder).st_dev == os.stat(target).st_dev))
    runtime.ctr(layout, "snapshots", "commit", snapshot, key)


def copy_command(source: Path, target: Path, *, same_device: bool) -> list[str]:
    """Return the command that copies a layer with all attributes.

    same_device: whether both folders are on one device, so that the command creates hard links.

    A running buildah mounts its overlay folder onto itself, and the kernel creates no links across mounts. The links
    are therefore created in a separate mount namespace without this mount.
    """
    if not same_device:
        return ["cp", "--archive", "--reflink=auto", f"{source}/.", f"{target}/"]
    overlay = source.parent.parent
    script = 'if mountpoint -q "$1"; then umount --lazy "$1"; fi; cp --archive --link "$2/." "$3/"'
    inside = ["sh", "-ec", script, "sh", str(overlay), str(source), str(target)]
    return ["unshare", "--mount", "--propagation", "private", *inside]


def writable_folder(mount_command: str) -> Path:
    """Return the upper folder of a prepared snapshot. mount_command: the command that `ctr` prints for the snapshot."""
    upper = re.search(r"upperdir=([^,\s]+)", mount_command)
    if upper:
        return Path(upper[1])
    bind = re.search(r"-t bind (\S+) ", mount_command)
    if bind:
        return Path(bind[1])
    raise ClusterError(f"the mount command of containerd's snapshot is not understood: {mount_command.strip()!r}")


def bare_archive(image: Image) -> bytes:
    """Return an archive in OCI layout with the manifest and the configuration of an image, but without its layers."""
    files: dict[str, bytes] = {}

    def blob(content: bytes) -> str:
        digest = hashlib.sha256(content).hexdigest()
        files[f"blobs/sha256/{digest}"] = content
        return f"sha256:{digest}"

    blob(image.config)
    descriptor = {
        "mediaType": json.loads(image.manifest).get("mediaType", MANIFEST_TYPE),
        "digest": blob(image.manifest),
        "size": len(image.manifest),
        "annotations": {"io.containerd.image.name": image.reference},
    }
    files["index.json"] = json.dumps({"schemaVersion": 2, "manifests": [descriptor]}).encode()
    files["oci-layout"] = json.dumps({"imageLayoutVersion": "1.0.0"}).encode()
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in sorted(files.items()):
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()
