"""KV that a client hands from one request to the next: the names of Megatron-Core for a split that the client directs.

A request with `do_kv_handoff` is answered as any other. Its engine then keeps the blocks of the prompt, and the answer
has `disaggregated_params`. A later request with their `kv_meta` begins as a split request whose prefill has ended. If
the blocks are gone, or the client may not use them, the prompt is computed.
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
    """Blocks that an engine keeps for a later request of a client. until: end of its lifetime."""

    engine: Engine
    exported: Exported
    client: Client
    until: float


class Handoffs:
    """The blocks that clients may use for a later request.

    A token names an export. It is signed with a random secret of this coordinator over client, tenant, epoch and
    expiry, so it is worthless to any other client, for another tenant and after new weights.
    """

    def __init__(self, context: Context, release: Callable[[Engine, int], None]) -> None:
        self._context = context
        self._release = release
        self._secret = context.randbits(256).to_bytes(32, "big")
        self._kept: dict[int, Handoff] = {}
        """By the id of the export, in the order of `until`."""
        self._is_timed = False

    def keep(self, entry: Entry, engine: Engine, message: Exported) -> None:
        """`engine` keeps the blocks of a request that it is about to answer."""
        until = self._context.now + HANDOFF_SECONDS
        self._kept[message.dispatch_id] = Handoff(engine, message, entry.client, until)
        if not self._is_timed:
            self._is_timed = True
            self._context.set_timer("handoffs", until, self._expire)

    def offer(self, entry: Entry) -> dict[str, Any] | None:
        """Return `disaggregated_params` for the answer of a request; None if its engine keeps no blocks."""
        kept = self._kept.get(entry.dispatch_id)
        if kept is None:
            return None
        return {
            "request_id": entry.dispatch_id,
            "block_ids": list(range(len(kept.exported.digests) // DIGEST_BYTES)),
            "kv_meta": {"handoff": base64.b64encode(self._token(kept, entry)).decode()},
        }

    def _token(self, kept: Handoff, entry: Entry) -> bytes:
        """Return the token of a handoff for the client and the tenant of a request."""
        number, client = kept.exported.dispatch_id, entry.client
        bound = pack((number, client.name, client.key, entry.tenant.key, kept.engine.epoch, kept.until))
        return number.to_bytes(_ID_BYTES, "big") + hmac.digest(self._secret, bound, "sha256")

    def take(self, entry: Entry, token: bytes) -> Handoff | None:
        """Remove the handoff that a request may use, and return it; None if it may not, or if it is gone."""
        kept = self._kept.get(int.from_bytes(token[:_ID_BYTES], "big"))
        if kept is None or not hmac.compare_digest(self._token(kept, entry), token):
            return None
        return self._kept.pop(kept.exported.dispatch_id)

    def release(self, client: Client, number: int) -> None:
        """Release a handoff of a client. An unknown number is ignored."""
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
        """Release all handoffs, because a verb is about to change weights or caches."""
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
