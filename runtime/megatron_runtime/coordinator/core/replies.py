"""What engines produce, on its way to clients: partials in order and once, finals, and catch-up for slow readers."""

from __future__ import annotations

import logging
from typing import Any

from megatron_runtime.coordinator.core import plain
from megatron_runtime.coordinator.core.clients import ClientRegistry
from megatron_runtime.coordinator.core.counters import Counters
from megatron_runtime.coordinator.core.dispatching import Dispatcher
from megatron_runtime.coordinator.core.records import TOKEN_BYTES, Client, Engine, Entry
from megatron_runtime.coordinator.transport import PeerId
from megatron_runtime.protocol.messages import (
    PLAIN,
    Final,
    Frames,
    MalformedMessageError,
    Partial,
    PartialEntry,
    pack,
    unpack,
)

logger = logging.getLogger(__name__)

_PER_TOKEN = ("log_probs", "top_n_logprobs")


class Replies:
    """A token reaches the journal only from the current dispatch and only as the next one, so none doubles."""

    def __init__(
        self, dispatcher: Dispatcher, clients: ClientRegistry, counters: Counters, *, detokenizer: plain.Detokenize
    ) -> None:
        self._dispatcher = dispatcher
        self._clients = clients
        self._counters = counters
        self._detokenize = detokenizer

    def partial(self, engine: Engine, message: Partial, frames: Frames) -> None:
        """Take new tokens; forward `frames` as they came where all of them are wanted by one client."""
        self._counters.partials += 1
        if not message.route:
            self._dispatcher.quarantine.note_progress(engine, message)
            return
        client = self._clients.routed(message.route)
        accepted: list[Entry] = []
        position = 0
        whole = client is not None and not client.blocked and not client.plain
        extras = message.extras
        share = len(extras) // max(1, len(message.entries))
        journal, in_flight = self._dispatcher.journal, engine.in_flight
        for uid, dispatch_id, offset, count in message.entries:
            begin = position
            position += count * TOKEN_BYTES
            entry = in_flight.get(dispatch_id)
            if entry is None or entry.uid != uid or offset != entry.tokens_so_far or not entry.meta.streaming:
                self._counters.stale += 1
                whole = False
                continue
            if entry.client is not client or entry.forwarded != offset:
                whole = False
            if not entry.model:
                entry.model = engine.model
            journal.append(entry, message.tokens[begin:position], details=extras, details_cost=share)
            accepted.append(entry)
        if whole and client is not None and self._clients.try_send(client, frames):
            for entry in accepted:
                entry.forwarded = entry.tokens_so_far
        else:
            for entry in accepted:
                entry.client.behind = True
            for owner in {id(entry.client): entry.client for entry in accepted}.values():
                self.catch_up(owner)
        if engine.reserved:
            self._dispatcher.quarantine.advanced(engine)

    def final(self, engine: Engine, message: Final, frames: Frames) -> None:
        entry = engine.in_flight.get(message.dispatch_id)
        if entry is not None and entry.uid == message.uid:
            self._deliver(entry, message, frames)
        elif not self.late_final(engine.peer, message, frames):
            self._counters.stale += 1

    def late_final(self, peer: PeerId, message: Final, frames: Frames) -> bool:
        """An engine that lost its requests, by removal or silence, answers one after all. Its answer counts where it
        goes on from what the client was sent, and ends the request wherever it is now. False when it is nobody's, or
        differs.
        """
        former = self._dispatcher.former(message.dispatch_id, peer)
        if former is None or former.entry.uid != message.uid:
            return False
        entry = former.entry
        if not message.tokens.startswith(bytes(entry.generated)) or not _completed(message):
            return False
        logger.warning("an engine that was given up answered a request after all; its answer is delivered")
        self._counters.late += 1
        self._dispatcher.withdraw(entry)
        self._deliver(entry, message, frames)
        return True

    def _deliver(self, entry: Entry, message: Final, frames: Frames) -> None:
        client = entry.client
        if client.plain:
            frames = plain.reply_frames(entry.plain_id or 0, message, detokenize=self._detokenize)
        self._counters.completed += 1
        self._dispatcher.forget(entry)
        if not client.reachable:
            # What went out last may have been lost with the connection, and nobody can ask for it after the final.
            entry.forwarded = entry.held
        if entry.meta.streaming and entry.forwarded < entry.tokens_so_far:
            self._clients.send(client, _owed(entry))
        self._clients.send(client, frames, answers=entry.uid)
        self._dispatcher.pump()

    def catch_up(self, client: Client) -> None:
        """Send what `client` is owed, as few messages as possible. Stops without loss where the buffer is full."""
        if not client.reachable or not self._clients.flush(client):
            return
        for entry in list(client.open.values()):
            if entry.meta.streaming and entry.forwarded < entry.tokens_so_far:
                if not self._clients.try_send(client, _owed(entry)):
                    client.behind = True
                    return
                entry.forwarded = entry.tokens_so_far
        client.behind = False


def _completed(message: Final) -> bool:
    try:
        reply = unpack(message.reply, PLAIN)
    except MalformedMessageError as error:
        logger.warning("a late reply cannot be read: %s", error)
        return False
    return isinstance(reply, dict) and reply.get("status") == "COMPLETED"


def _owed(entry: Entry) -> Frames:
    """All tokens that the client was not sent, with their details, as one partial."""
    tokens = bytes(entry.generated[entry.forwarded * TOKEN_BYTES :])
    details = _details_from(entry, entry.forwarded)
    if entry.plain_id is not None:
        return plain.partial_frames(entry.plain_id, tokens, details)
    item = PartialEntry(entry.uid, entry.dispatch_id, entry.forwarded, len(tokens) // TOKEN_BYTES)
    extras = pack({entry.uid: details}) if details else b""
    return Partial(entry.client.route, [item], tokens, extras).to_frames()


def _details_from(entry: Entry, first: int) -> dict[str, Any]:
    """What came with the tokens from number `first` on, put together."""
    merged: dict[str, Any] = {}
    for position, (offset, raw) in enumerate(entry.details):
        end = entry.details[position + 1][0] if position + 1 < len(entry.details) else entry.tokens_so_far
        if end <= first:
            continue
        details = _read_details(raw, entry.uid)
        for key, value in details.items():
            if key in _PER_TOKEN and isinstance(value, list):
                merged.setdefault(key, []).extend(value[max(0, first - offset) :])
            elif offset >= first:
                merged[key] = value
    return merged


def _read_details(raw: bytes, uid: bytes) -> dict[str, Any]:
    try:
        extras = unpack(raw, PLAIN)
    except MalformedMessageError as error:
        logger.warning("the extras of a partial cannot be read: %s", error)
        return {}
    details = extras.get(uid) if isinstance(extras, dict) else None
    return details if isinstance(details, dict) else {}
