"""KV handoff as in Megatron-Core, by which a client lets a later request reuse the KV blocks of an earlier request.

A request with `do_kv_handoff` is answered like any other request. Its engine then keeps the KV blocks of the prompt,
and the answer contains `disaggregated_params`. A later request can contain `kv_meta` from these parameters. The
later request starts in the stage EXPORTED of transfers.py, so a decode engine imports the blocks. If the engine has
released the blocks, or if the client may not use them, an engine computes the prompt again.
"""

from __future__ import annotations

import base64
import hmac
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_runtime.coordinator.core.context import Context
from megatron_runtime.coordinator.core.records import Client, Engine, Entry
from megatron_runtime.protocol.messages import DIGEST_BYTES, Exported, pack

HANDOFF_SECONDS = 50.0
"""Lifetime of a handoff. Its engine keeps the blocks for a little longer."""
_ID_BYTES = 8


@dataclass(frozen=True, slots=True, eq=False)
class Handoff:
    """KV blocks that an engine keeps for a later request of a client.

    exported: the engine's message about the blocks, with export id, digests and weights.
    until:    time at which the coordinator releases the blocks, in seconds on the clock of Context.now.
    """

    engine: Engine
    exported: Exported
    client: Client
    until: float


class Handoffs:
    """The handoffs that clients have not yet used. For each handoff, an engine keeps KV blocks.

    The client refers to a handoff by a token, which consists of the id of the export and an HMAC. The HMAC uses a
    random secret of this coordinator process and covers client, tenant, weight epoch and expiry. take() therefore
    rejects the token if another client or tenant sends it, or after the weights have changed.

    release: called with an engine and an export id; makes the engine release the blocks of this export.
    """

    def __init__(self, context: Context, release: Callable[[Engine, int], None]) -> None:
        self._context = context
        self._release = release
        self._secret = context.randbits(256).to_bytes(32, "big")
        self._kept: dict[int, Handoff] = {}
        """Handoffs by export id, ordered by `until`."""
        self._is_timed = False

    def keep(self, entry: Entry, engine: Engine, message: Exported) -> None:
        """Record that `engine` keeps the blocks of a request.

        The engine sends the final answer of the request afterwards.
        """
        until = self._context.now + HANDOFF_SECONDS
        self._kept[message.dispatch_id] = Handoff(engine, message, entry.client, until)
        if not self._is_timed:
            self._is_timed = True
            self._context.set_timer("handoffs", until, self._expire)

    def offer(self, entry: Entry) -> dict[str, Any] | None:
        """Return `disaggregated_params` for the answer of a request, or None if no engine keeps its blocks."""
        kept = self._kept.get(entry.dispatch_id)
        if kept is None:
            return None
        return {
            "request_id": entry.dispatch_id,
            "block_ids": list(range(len(kept.exported.digests) // DIGEST_BYTES)),
            "kv_meta": {"handoff": base64.b64encode(self._token(kept, entry)).decode()},
        }

    def _token(self, kept: Handoff, entry: Entry) -> bytes:
        """Return the token with which only the client and the tenant of `entry` can use the kept blocks."""
        number, client = kept.exported.dispatch_id, entry.client
        bound = pack((number, client.name, client.key, entry.tenant.key, kept.engine.epoch, kept.until))
        return number.to_bytes(_ID_BYTES, "big") + hmac.digest(self._secret, bound, "sha256")

    def take(self, entry: Entry, token: bytes) -> Handoff | None:
        """Remove the handoff that `token` names, and return it.

        Return None if the handoff has expired or was used, or if the client or tenant of `entry` may not use it.
        """
        kept = self._kept.get(int.from_bytes(token[:_ID_BYTES], "big"))
        if kept is None or not hmac.compare_digest(self._token(kept, entry), token):
            return None
        return self._kept.pop(kept.exported.dispatch_id)

    def release(self, client: Client, number: int) -> None:
        """Make the engine release the blocks with the export id `number`.

        Ignore an unknown id, and an id of another client.
        """
        kept = self._kept.get(number)
        if kept is not None and kept.client is client:
            self._drop(kept)

    def client_lost(self, client: Client) -> None:
        for kept in [kept for kept in self._kept.values() if kept.client is client]:
            self._drop(kept)

    def engine_lost(self, engine: Engine) -> None:
        for number in [number for number, kept in self._kept.items() if kept.engine is engine]:
            del self._kept[number]

    def clear(self) -> None:
        """Make the engines release the blocks of all handoffs. Called before a verb changes weights or caches."""
        for kept in list(self._kept.values()):
            self._drop(kept)

    def _drop(self, kept: Handoff) -> None:
        number = kept.exported.dispatch_id
        del self._kept[number]
        self._release(kept.engine, number)

    def _expire(self) -> None:
        for kept in [kept for kept in self._kept.values() if kept.until <= self._context.now]:
            self._drop(kept)
        self._is_timed = bool(self._kept)
        if self._kept:
            self._context.set_timer("handoffs", next(iter(self._kept.values())).until, self._expire)
