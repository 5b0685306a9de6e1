"""CURVE keys: the operator's one admin pair, and the pairs of each resource.

The secret half of the admin key lives in the operator's namespace and nowhere else. A resource's Secret is read by
name; Secrets are never listed or watched.
"""

from __future__ import annotations

import base64
import logging
from collections.abc import Mapping

from megatron_operator.cluster.api import ApiError, KubeApi, Object
from megatron_operator.cluster.kinds import SECRET
from megatron_operator.cluster.writer import Writer
from megatron_operator.render.context import LABEL_MANAGED_BY, LABEL_NAME
from megatron_operator.render.keys import KEY_NAMES
from megatron_runtime.wire.security import KeyPair, PeerKeys, generate_key_files

logger = logging.getLogger(__name__)

ADMIN_SECRET = "megatron-operator-admin"
_MANAGED_BY = "megatron-operator"


class KeyFormatError(ValueError):
    """A Secret does not hold what it should. Names the Secret, the entry and the remedy."""


async def ensure_admin_keys(api: KubeApi, writer: Writer, *, namespace: str, name: str = ADMIN_SECRET) -> KeyPair:
    """The operator's admin pair, made on first use."""
    secret = await api.get(SECRET, namespace, name)
    if secret is None:
        files = generate_key_files(roles=("admin",))
        body = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {
                "name": name,
                "namespace": namespace,
                "labels": {LABEL_NAME: _MANAGED_BY, LABEL_MANAGED_BY: _MANAGED_BY},
            },
            "type": "Opaque",
            "data": {entry: base64.b64encode(text.encode()).decode() for entry, text in files.items()},
        }
        try:
            secret = await writer.create(body)
            logger.info("admin key created", extra={"secret": f"{namespace}/{name}"})
        except ApiError as error:
            if not error.conflict:
                raise
            secret = await api.get(SECRET, namespace, name)
            if secret is None:
                raise
    return KeyPair(public=_entry(secret, "admin.pub"), secret=_entry(secret, "admin.key"))


def new_resource_keys(admin: KeyPair) -> dict[str, str]:
    """Entries of a fresh `NAME-keys`: three pairs, and the public half of the admin key."""
    files = generate_key_files(roles=("server", "engine", "client"))
    files["admin.pub"] = admin.public.decode()
    return {name: files[name] for name in KEY_NAMES}


def admin_peer_keys(secret: Object, admin: KeyPair) -> PeerKeys:
    """What the link to a resource's coordinator needs, from its `NAME-keys`.

    Raises:
        KeyFormatError: when the Secret lacks an entry, or admits another operator's admin key.
    """
    admitted = _entry(secret, "admin.pub", whole=True).split()
    if admin.public not in admitted:
        name = secret["metadata"]["name"]
        raise KeyFormatError(
            f"Secret {name}: admin.pub is not this operator's admin key, so its coordinator would refuse every verb; "
            f"restore Secret {ADMIN_SECRET}, or delete Secret {name} and restart the resource's pods"
        )
    return PeerKeys(own=admin, server_public=_entry(secret, "server.pub"))


def _entry(secret: Object, entry: str, *, whole: bool = False) -> bytes:
    data: Mapping[str, str] = secret.get("data") or {}
    text = base64.b64decode(data.get(entry, ""))
    if not text.split():
        name = secret["metadata"]["name"]
        raise KeyFormatError(
            f"Secret {name}: entry {entry} is missing or empty; delete the Secret to have it made anew"
        )
    return text if whole else text.split()[0]
