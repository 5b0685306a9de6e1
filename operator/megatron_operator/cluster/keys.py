"""Creates, reads and rotates CURVE keys: the operator's admin pair, and the pairs of each custom resource.

The secret half of the admin pair is only in the operator's namespace. The operator reads the keys Secret of a custom
resource by its name, and never lists or watches Secrets.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import logging
from collections.abc import Mapping

from megatron_operator.cluster.api import KubeApi, KubeApiError, Object
from megatron_operator.cluster.kinds import SECRET
from megatron_operator.cluster.writer import Writer
from megatron_operator.decision.actions import RotateKeys
from megatron_operator.decision.world import KeysView
from megatron_operator.render.context import Manifest, RenderContext, owner_reference
from megatron_operator.render.keys import (
    ADMIN_SECRET,
    AFTER,
    ANNOTATION_GENERATION,
    ANNOTATION_SEAL,
    ANNOTATION_SERVER,
    ANNOTATION_SINCE,
    ANNOTATION_STAGE,
    KEY_NAMES,
    PEERS,
    TRAINER_KEY_NAMES,
    encode,
    keys_secret,
    next_files,
    stage_annotations,
)
from megatron_operator.resource.names import LABEL_MANAGED_BY, LABEL_NAME
from megatron_operator.resource.states import KeyStage
from megatron_runtime.protocol import strict_json as json
from megatron_runtime.transport.security import TRAINER, KeyPair, PeerKeys, generate_key_files

logger = logging.getLogger(__name__)

_MANAGED_BY = "megatron-operator"
KEY_CHARACTERS = 40
"""Length of a CURVE key in Z85."""


class KeyFormatError(ValueError):
    """A Secret lacks a valid entry. The message names the Secret, the entry and the remedy."""


async def ensure_admin_keys(api: KubeApi, writer: Writer, *, namespace: str, name: str = ADMIN_SECRET) -> KeyPair:
    """Return the operator's admin key pair. If the Secret `name` does not exist, create it with a new pair."""
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
        except KubeApiError as error:
            if not error.conflict:
                raise
            secret = await api.get(SECRET, namespace, name)
            if secret is None:
                raise
    return KeyPair(public=_entry(secret, "admin.pub"), secret=_entry(secret, "admin.key"))


def new_resource_keys(admin: KeyPair, *, has_trainer: bool = False) -> dict[str, str]:
    """Return the data of a new Secret `NAME-keys`: three key pairs and the public admin key.

    With `has_trainer`, the data also has the key pair of a trainer.
    """
    files = generate_key_files(roles=("server", "engine", "client", *((TRAINER,) if has_trainer else ())))
    return {**files, "admin.pub": admin.public.decode()}


def new_keys_secret(ctx: RenderContext, admin: KeyPair, *, generation: int, since: str) -> Manifest:
    """Return a new Secret `NAME-keys` with its seal (see seal()).

    generation: generation of the keys.
    since:      time at which the keys are created.
    """
    files = new_resource_keys(admin, has_trainer=ctx.spec.has_trainer)
    manifest = keys_secret(ctx, files, generation=generation, since=since)
    metadata = manifest["metadata"]
    metadata["annotations"][ANNOTATION_SEAL] = seal(metadata, manifest["data"], admin)
    return manifest


def repair_patch(secret: Object, ctx: RenderContext, admin: KeyPair, *, generation: int, since: str) -> Object | None:
    """Return the merge patch, with preconditions, that replaces invalid keys with new keys.

    Returns None if keys_view() can read the keys.
    """
    try:
        keys_view(secret, admin)
    except KeyFormatError:
        made = new_keys_secret(ctx, admin, generation=generation, since=since)
        annotations = made["metadata"]["annotations"]
        data = {**dict.fromkeys(secret.get("data") or {}), **made["data"]}  # the seal covers the remaining data
        return {"metadata": {**_preconditions(secret), "annotations": annotations}, "data": data}
    return None


def adoption_patch(secret: Object, ctx: RenderContext) -> Object:
    """Return the merge patch, with preconditions, that makes the custom resource the owner of a Secret without an
    owner.
    """
    return {"metadata": {**_preconditions(secret), "ownerReferences": [owner_reference(ctx)]}}


def seal(metadata: Object, data: Object, admin: KeyPair) -> str:
    """Return the annotation that proves that this operator wrote the data of `NAME-keys`.

    The annotation is a keyed hash of the data and the Secret's name. Without this proof, a user who may create Secrets
    could create the keys of a future resource in advance and pose as its coordinator.
    """
    text = json.dumps([metadata["namespace"], metadata["name"], sorted(data.items())])
    return hmac.new(admin.secret, text.encode(), hashlib.sha256).hexdigest()


def is_sealed(secret: Object, admin: KeyPair) -> bool:
    """Return whether this operator wrote the data of a keys Secret, as its seal proves."""
    metadata = secret["metadata"]
    stored = (metadata.get("annotations") or {}).get(ANNOTATION_SEAL, "")
    return hmac.compare_digest(stored.encode(), seal(metadata, secret.get("data") or {}, admin).encode())


def keys_view(secret: Object, admin: KeyPair) -> KeysView:
    """Return the public part of a keys Secret, which decisions read.

    Raises:
        KeyFormatError: an entry is missing, or an entry or annotation is not a valid key, number or stage.
    """
    try:
        return _keys_view(secret, admin)
    except ValueError as error:
        raise KeyFormatError(str(error)) from error


def _keys_view(secret: Object, admin: KeyPair) -> KeysView:
    notes = secret["metadata"].get("annotations") or {}
    generation = int(notes.get(ANNOTATION_GENERATION) or 1)
    pairs = [_lines(secret, f"{role}.pub") for role in PEERS]
    rotating = all(len(lines) > 1 for lines in pairs)
    return KeysView(
        generation=generation,
        stage=KeyStage(notes.get(ANNOTATION_STAGE) or KeyStage.SETTLED),
        server_generation=int(notes.get(ANNOTATION_SERVER) or generation),
        since=notes.get(ANNOTATION_SINCE) or secret["metadata"].get("creationTimestamp"),
        old=frozenset(lines[0].decode() for lines in pairs) if rotating else frozenset(),
        new=frozenset(lines[-1].decode() for lines in pairs),
        server=_lines(secret, "server.pub")[0].decode(),
        admin_admitted=_lines(secret, "admin.pub") == [admin.public],
        has_trainer=all(name in (secret.get("data") or {}) for name in TRAINER_KEY_NAMES),
    )


def rotation_patch(secret: Object, action: RotateKeys, admin: KeyPair, *, now: str) -> Object | None:
    """Return the merge patch, with preconditions, that moves a keys Secret to the stage of `action`.

    Returns None if the Secret is already at this stage.

    Raises:
        KeyFormatError: an entry is missing.
        ValueError: the Secret is not at the previous stage, because the decision was based on an older version of the
            Secret.
    """
    view = keys_view(secret, admin)
    names = (*KEY_NAMES, *(TRAINER_KEY_NAMES if view.has_trainer else ()))
    files = {name: _entry(secret, name, whole=True).decode() for name in names}
    generation, stage, server, since = view.generation, view.stage, view.server_generation, view.since or now
    if (generation, stage) != (action.generation, action.stage):
        begins = action.stage is KeyStage.ADMITTING
        follows = action.generation > generation if begins else action.generation == generation
        if AFTER[stage] is not action.stage or not follows:
            current = f"{stage.value} of generation {generation}"
            wanted = f"{action.stage.value} of {action.generation}"
            raise ValueError(f"Secret {action.name}: is at {current}, which is not the stage before {wanted}")
        fresh = generate_key_files(roles=("server", *PEERS, TRAINER)) if begins else {}
        files = next_files(files, action.stage, fresh=fresh)
        generation, stage, since = action.generation, action.stage, now if begins else since
        server = generation if stage is KeyStage.RESTARTING else server
    elif view.admin_admitted and (view.has_trainer or not action.has_trainer):
        return None
    if action.has_trainer and not view.has_trainer:
        files |= generate_key_files(roles=(TRAINER,))
    files["admin.pub"] = admin.public.decode()
    data = encode(files)
    annotations = stage_annotations(generation, stage, server=server, since=since)
    annotations[ANNOTATION_SEAL] = seal(secret["metadata"], data, admin)
    return {"metadata": {**_preconditions(secret), "annotations": annotations}, "data": data}


def _preconditions(obj: Object) -> Object:
    return {field: obj["metadata"][field] for field in ("uid", "resourceVersion")}


def admin_peer_keys(secret: Object, admin: KeyPair) -> PeerKeys:
    """Return the keys for the connection to the coordinator of a custom resource, from its keys Secret.

    Raises:
        KeyFormatError: an entry is missing, or the Secret has the admin key of another operator.
    """
    if admin.public not in _lines(secret, "admin.pub"):
        name = secret["metadata"]["name"]
        raise KeyFormatError(
            f"Secret {name}: admin.pub is not this operator's admin key yet, so its coordinator would reject every verb"
        )
    first, *others = _lines(secret, "server.pub")
    return PeerKeys(own=admin, server_public=first, other_server_publics=tuple(others))


def _lines(secret: Object, entry: str) -> list[bytes]:
    return _entry(secret, entry, whole=True).split()


def _entry(secret: Object, entry: str, *, whole: bool = False) -> bytes:
    data: Mapping[str, str] = secret.get("data") or {}
    text = base64.b64decode(data.get(entry, ""))
    if not text.split() or any(len(line) != KEY_CHARACTERS for line in text.split()):
        name = secret["metadata"]["name"]
        raise KeyFormatError(
            f"Secret {name}: entry {entry} is missing or not a key; delete the Secret, and the operator re-creates it"
        )
    return text if whole else text.split()[0]
