"""Reads the manifest, configuration and layers of images in buildah's store (containers-storage, overlay driver)."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localcluster.errors import ClusterError
from localcluster.settings import cache_root
from megatron_runtime.protocol import strict_json as json


@dataclass(frozen=True)
class Layer:
    """A layer of an image. folder: the layer's unpacked files, in the form that overlayfs uses, including whiteouts."""

    digest: str
    folder: Path


@dataclass(frozen=True)
class Image:
    """An image: the original bytes of the manifest and of the configuration, and the layers, lowest layer first."""

    reference: str
    manifest: bytes
    config: bytes
    layers: tuple[Layer, ...]

    @property
    def digest(self) -> str:
        return "sha256:" + hashlib.sha256(self.manifest).hexdigest()


def root() -> Path:
    return cache_root() / "containers"


def buildah(*arguments: str) -> list[str]:
    """Return a buildah command line that uses the launcher's store instead of the user's."""
    own = ["--root", str(root() / "storage"), "--runroot", str(root() / "run"), "--storage-driver", "overlay"]
    return ["buildah", *own, *arguments]


def find(reference: str, *, storage: Path | None = None) -> Image | None:
    """Return the image with the name `reference`, or None if the store has no such image."""
    storage = storage or root() / "storage"
    entry = next(
        (image for image in _table(storage / "overlay-images" / "images.json") if _named(image, reference)), None
    )
    if entry is None:
        return None
    layers = {layer["id"]: layer for layer in _table(storage / "overlay-layers" / "layers.json")}
    chain: list[Layer] = []
    current: str | None = entry["layer"]
    while current:
        layer = layers[current]
        chain.append(Layer(layer["diff-digest"], storage / "overlay" / current / "diff"))
        current = layer.get("parent")
    manifest = _data(storage, entry["id"], "manifest")
    config = _data(storage, entry["id"], json.loads(manifest)["config"]["digest"])
    image = Image(reference, manifest, config, tuple(reversed(chain)))
    wanted = json.loads(config)["rootfs"]["diff_ids"]
    if [layer.digest for layer in image.layers] != wanted:
        raise ClusterError(f"image {reference}: the store at {storage} is inconsistent; remove it and build again")
    return image


def _table(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text()) if path.exists() else []


def _named(image: dict[str, Any], reference: str) -> bool:
    return reference in image.get("names", [])


def _data(storage: Path, image: str, key: str) -> bytes:
    """Return the content of an image's file `key`.

    If the key has characters other than letters and digits, the file's name contains the key in base64.
    """
    folder = storage / "overlay-images" / image
    plain = folder / key
    return (plain if plain.exists() else folder / ("=" + base64.b64encode(key.encode()).decode())).read_bytes()
