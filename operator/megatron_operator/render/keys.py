"""Secret `NAME-keys`, which has the CURVE key pairs of one resource. During a rotation, it has two generations of keys.

A file has one key per line. A port admits a peer whose key is in the `.pub` file of the peer's role. A process uses the
first line of its own `.key`, and tries the lines of `server.pub` in order. A rotation therefore writes the Secret in
stages. Each stage is compatible with processes that still have the previous stage (see `resource.states.KeyStage`). In
this table, A is the old generation and B the new one, in the order of the lines:

    stage        engine.key, client.key,  their .pub   server.key   server.pub
                 trainer.key
    Settled      A                        A            A            A
    Admitting    A B                      A B          A B          A B
    Switching    B                        A B          A B          A B
    Restarting   B                        A B          B            B A
    Settled      B                        B            B            B
"""

from __future__ import annotations

import base64
from collections.abc import Mapping

from megatron_operator.render.context import Manifest, RenderContext, child
from megatron_operator.resource.names import GROUP
from megatron_operator.resource.states import KeyStage

KEY_NAMES = ("server.key", "server.pub", "engine.key", "engine.pub", "client.key", "client.pub", "admin.pub")
TRAINER_KEY_NAMES = ("trainer.key", "trainer.pub")
"""Entries for a resource with spec.weights.trainer. They stay in the Secret when the field is removed."""
PEERS = ("engine", "client")
ADMIN_SECRET = "megatron-operator-admin"
"""Secret of the admin pair, in the operator's namespace."""
ANNOTATION_GENERATION = f"{GROUP}/keys-generation"
ANNOTATION_STAGE = f"{GROUP}/keys-stage"
ANNOTATION_SINCE = f"{GROUP}/keys-since"
ANNOTATION_SERVER = f"{GROUP}/keys-server"
ANNOTATION_SEAL = f"{GROUP}/keys-seal"

_STAGES = tuple(KeyStage)
AFTER = dict(zip(_STAGES, (*_STAGES[1:], KeyStage.SETTLED), strict=True))
"""The stage that follows each stage."""

Files = Mapping[str, str]
"""Z85 text by entry name, one key per line."""


def keys_secret(ctx: RenderContext, data: Files, *, generation: int = 1, since: str = "") -> Manifest:
    """Return a new Secret `NAME-keys`.

    data:  files for all KEY_NAMES, and for TRAINER_KEY_NAMES if there is a trainer.
    since: time at which the keys were created; empty if unknown.
    """
    manifest = child(ctx, "Secret", ctx.keys_name, type="Opaque", data=encode(data))
    manifest["metadata"]["annotations"] = stage_annotations(
        generation, KeyStage.SETTLED, server=generation, since=since
    )
    return manifest


def encode(data: Files) -> dict[str, str]:
    """Return the files as the base64 `data` of a Secret."""
    return {name: base64.b64encode(text.encode()).decode() for name, text in data.items()}


def stage_annotations(generation: int, stage: KeyStage, *, server: int, since: str) -> dict[str, str]:
    """Return the annotations of the keys Secret at `stage`.

    server: generation of the coordinator's own key.
    since:  time at which the keys of `generation` were created.
    """
    return {
        ANNOTATION_GENERATION: str(generation),
        ANNOTATION_STAGE: stage.value,
        ANNOTATION_SERVER: str(server),
        ANNOTATION_SINCE: since,
    }


def next_files(files: Files, stage: KeyStage, *, fresh: Files) -> dict[str, str]:
    """Return the files that the keys Secret has in `stage` of a rotation.

    Args:
        files: the files of the previous stage.
        fresh: the key pairs of the new generation, which only the stage ADMITTING uses.
    """
    peers = (*PEERS, "trainer") if TRAINER_KEY_NAMES[0] in files else PEERS
    pairs = [f"{role}.{half}" for role in ("server", *peers) for half in ("key", "pub")]
    lines = {name: files[name].split() for name in pairs}
    if stage is KeyStage.ADMITTING:
        lines = {name: [found[0], fresh[name].strip()] for name, found in lines.items()}
    elif stage is KeyStage.SWITCHING:
        lines |= {f"{role}.key": lines[f"{role}.key"][-1:] for role in peers}
    elif stage is KeyStage.RESTARTING:
        lines |= {"server.key": lines["server.key"][-1:], "server.pub": lines["server.pub"][::-1]}
    else:
        lines |= {f"{role}.pub": lines[f"{role}.pub"][-1:] for role in peers}
        lines["server.pub"] = lines["server.pub"][:1]
    return {**files, **{name: "\n".join(found) for name, found in lines.items()}}
