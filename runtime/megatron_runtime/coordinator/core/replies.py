"""Sends the output of engines to clients: each token once and in order, final answers, and delayed output.

A client that reads slowly does not delay other clients. Its tokens stay in the journal until its connection accepts
them.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Iterable
from itertools import islice
from operator import itemgetter
from typing import Any

from megatron_runtime.coordinator.core.context import Context
from megatron_runtime.coordinator.core.dispatch import Dispatcher
from megatron_runtime.coordinator.core.records import TOKEN_BYTES, Client, Engine, Entry, PeerId
from megatron_runtime.process.logs import of_request
from megatron_runtime.protocol.epochs import add_epochs
from megatron_runtime.protocol.extras import Extras
from megatron_runtime.protocol.messages import (
    PLAIN,
    Error,
    Final,
    Frames,
    Heartbeat,
    HelloAck,
    MalformedMessageError,
    Outgoing,
    Partial,
    PartialEntry,
    decode,
    pack,
    unpack,
)

logger = logging.getLogger(__name__)

CATCH_UP_BYTES = 4 << 20
"""Maximum number of bytes sent in one event to a client that has fallen behind."""

_PER_TOKEN = ("log_probs", "top_n_logprobs")


class Replies:
    """The sender of engines' output to clients, which never duplicates a token.

    A token enters the journal only if it comes from the current dispatch and is the next token of the request.
    """

    def __init__(self, context: Context, dispatcher: Dispatcher) -> None:
        self._context = context
        self._dispatcher = dispatcher
        self._counters = context.counters

    def partial(self, engine: Engine, message: Partial, sent: Outgoing) -> None:
        """Record new tokens and send them to the clients.

        The message is forwarded unchanged if it is for one client that already has all earlier tokens.
        """
        self._counters.partials += 1
        if not message.route:
            self._dispatcher.quarantine.note_progress(engine, message)
            self._dispatcher.check_trial(engine)
            return
        client = self._context.clients.routed(message.route)
        accepted, are_all_next = self._accept(engine, message, client)
        if client is not None and not client.blocked and are_all_next:
            self._context.effects.append((client.peer, sent))
            for entry in accepted:
                entry.forwarded = len(entry.generated) // TOKEN_BYTES
        else:
            self._send_to_each(accepted)
        if engine.reserved:
            self._dispatcher.check_trial(engine)

    def _accept(self, engine: Engine, message: Partial, client: Client | None) -> tuple[list[Entry], bool]:
        """Add the new tokens to the journal.

        Return the requests that received tokens, and whether `client` can get the message unchanged.
        """
        accepted: list[Entry] = []
        are_all_next = True
        position = 0
        extras = message.extras
        share = len(extras) // max(1, len(message.entries))
        journal, in_flight = self._dispatcher.journal, engine.in_flight
        for uid, dispatch_id, offset, count in message.entries:
            begin = position
            position += count * TOKEN_BYTES
            entry = in_flight.get(dispatch_id)
            # This repeats Entry.tokens_so_far inline, because it runs for every partial.
            if (
                entry is None
                or entry.uid != uid
                or len(entry.generated) != offset * TOKEN_BYTES
                or not entry.meta.streaming
            ):
                self._counters.stale += 1
                are_all_next = False
                continue
            if entry.client is not client or entry.forwarded != offset:
                are_all_next = False
            if not entry.model:
                entry.model = engine.model
            if entry.uncached:
                self._dispatcher.begun(entry, engine)
            journal.append(
                entry,
                message.tokens[begin:position],
                epochs=message.epochs,
                first=begin // TOKEN_BYTES,
                details=extras,
                details_cost=share,
            )
            accepted.append(entry)
        return accepted, are_all_next

    def _send_to_each(self, accepted: Iterable[Entry]) -> None:
        """Send the new tokens of each request to its client.

        If a client reads slowly, leave its tokens in the journal.
        """
        for entry in accepted:
            if entry.client.blocked:
                entry.client.behind = True
                self.catch_up(entry.client)
        unsent = [entry for entry in accepted if not entry.client.blocked and entry.forwarded < entry.tokens_so_far]
        _index_details(unsent)
        for entry in unsent:
            self._send_owed(entry)

    def final(self, engine: Engine, message: Final, sent: Outgoing) -> None:
        entry = engine.in_flight.get(message.dispatch_id)
        if entry is not None and entry.uid == message.uid:
            self._end(entry, sent)
        elif not self.late_final(engine.peer, message, sent):
            self._counters.stale += 1

    def late_final(self, peer: PeerId, message: Final, sent: Outgoing) -> bool:
        """Handle an answer from an engine whose requests were requeued, because the engine was removed or silent.

        If the answer begins with the tokens that the client already has, deliver the answer and end the request at its
        current engine. Return False if the answer belongs to no open request or does not begin with these tokens.
        """
        entry = self._dispatcher.former(message.dispatch_id, peer)
        if entry is None or entry.uid != message.uid:
            return False
        if not message.tokens.startswith(bytes(entry.generated)):
            return False
        if _read_map(message.reply, "a late reply").get("status") != "COMPLETED":
            return False
        extra = of_request(entry.meta.request_id)
        logger.warning("a removed or silent engine answered a request; its answer is delivered", extra=extra)
        self._counters.late += 1
        self._dispatcher.withdraw(entry)
        self._end(entry, sent)
        return True

    def _end(self, entry: Entry, answer: Outgoing) -> None:
        """Send the final answer of a request."""
        client = entry.client
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("request %s answered", entry.uid.hex(), extra=of_request(entry.meta.request_id))
        self._counters.completed += 1
        if entry.meta.needs and (offer := self._dispatcher.handoffs.offer(entry)) is not None:
            answer = _with_handoff(answer, offer)
        self._dispatcher.forget(entry)
        if not client.reachable:
            # The last tokens may have been lost with the connection, and the client cannot request them after the
            # final answer.
            entry.forwarded = entry.held
        if entry.meta.streaming and entry.forwarded < entry.tokens_so_far:
            if entry.num_indexed < len(entry.details):
                _index_details([entry, *client.open.values()])
            self._context.answer(client, _owed(entry))
        self._context.answer(client, answer, uid=entry.uid)

    # --- clients that read slowly -------------------------------------------------------------------------------

    def catch_up(self, client: Client) -> None:
        """Send a client the messages in its outbox, and then the tokens that it lacks, in one message per request.

        Stop if the connection is full, or after CATCH_UP_BYTES. The rest is sent when has_room() is called.
        """
        if client.stuck_since is not None or not client.reachable:
            return
        room = CATCH_UP_BYTES
        while client.outbox and room > 0:
            uid, message, size = client.take_kept()
            self._context.answer_now(client, message, uid=uid)
            room -= size
        if not client.outbox:
            _index_details(client.open.values())
            for entry in list(client.open.values()):
                if entry.meta.streaming and entry.forwarded < entry.tokens_so_far:
                    if room <= 0:
                        break
                    room -= self._send_owed(entry)
            else:
                client.behind = False
                return
        client.stuck_since = self._context.now
        self._context.report_room(client.peer)

    def has_room(self, client: Client) -> None:
        """Continue to send to a client whose connection accepts messages again."""
        client.stuck_since = None
        if client.blocked:
            self.catch_up(client)

    def _send_owed(self, entry: Entry) -> int:
        """Send the client all tokens of the request that the client lacks. Return the size of the message in bytes."""
        frames = _owed(entry)
        self._context.answer_now(entry.client, frames)
        entry.forwarded = entry.tokens_so_far
        return sum(map(len, frames))

    def not_sent(self, client: Client, sent: Outgoing, *, is_gone: bool) -> None:
        """Handle a message that the connection did not accept.

        If a connection rejected several messages, call this for the last message first.

        The tokens of a partial are sent again from the journal. Heartbeats and HELLO_ACK are dropped. Other messages
        wait in the client's outbox.

        is_gone: whether the connection is closed. If not, the connection is full, and has_room() is called when the
                 connection accepts messages again.
        """
        if is_gone:
            client.reachable = False
        message = decode(sent) if isinstance(sent, list) else sent
        if isinstance(message, Heartbeat | HelloAck):
            return
        if isinstance(message, Error) and message.uid is None and message.incarnation is not None:
            return  # answers a frame that was dropped
        if client.stuck_since is None and not is_gone:
            client.stuck_since = self._context.now
        is_open = False
        for uid, _, offset, _ in message.entries if isinstance(message, Partial) else ():
            if (entry := client.open.get(uid)) is not None:
                entry.forwarded = min(entry.forwarded, offset)
                client.behind = is_open = True
        if not is_open:
            answered = message.uid if isinstance(message, Final | Error) else None
            if answered is not None:
                client.answered.pop(answered, None)
            client.keep(answered, sent, first=True)


def _read_map(raw: bytes | dict[str, Any], what: str) -> dict[Any, Any]:
    """Return the map that an engine packed as `raw`. The result is empty if `raw` cannot be read.

    what: name of the map, for the log message.
    """
    if isinstance(raw, dict):
        return raw
    try:
        value = unpack(raw, PLAIN)
    except MalformedMessageError as error:
        logger.warning("%s cannot be read: %s", what, error)
        return {}
    return value if isinstance(value, dict) else {}


def _with_handoff(answer: Outgoing, offer: dict[str, Any]) -> Outgoing:
    """Return the FINAL `answer` with `offer` added to its reply as `disaggregated_params`."""
    final = decode(answer) if isinstance(answer, list) else answer
    assert isinstance(final, Final)
    reply = {**_read_map(final.reply, "a reply"), "disaggregated_params": offer}
    return final._replace(reply=pack(reply)).to_frames()


def _owed(entry: Entry) -> Frames:
    """Return one PARTIAL with all tokens that were not yet sent to the client, and their log-probabilities."""
    tokens = bytes(entry.generated[entry.forwarded * TOKEN_BYTES :])
    details = _details_from(entry, entry.forwarded)
    item = PartialEntry(entry.uid, entry.dispatch_id, entry.forwarded, len(tokens) // TOKEN_BYTES)
    extras = pack({entry.uid: details}) if details else b""
    epochs: list[tuple[int, int]] = []
    add_epochs(epochs, entry.epochs, first=item.offset, count=item.count, at=0)
    return Partial(entry.client.route, [item], tokens, extras, epochs).to_frames()


def _index_details(entries: Iterable[Entry]) -> None:
    """Parse the log-probabilities (`Entry.details`) of these entries, which are raw bytes until then.

    Entries whose tokens came in the same message share one Extras object.
    """
    shared: dict[int, Extras] = {}
    for entry in entries:
        details = entry.details
        for position in range(entry.num_indexed, len(details)):
            offset, raw = details[position]
            if isinstance(raw, bytes):
                extras = shared.get(id(raw)) or shared.setdefault(id(raw), Extras(raw))
                details[position] = offset, extras
        entry.num_indexed = len(details)


def _details_from(entry: Entry, first: int) -> dict[str, Any]:
    """Return `entry.details` from the token with index `first` on, merged into one map."""
    merged: dict[str, Any] = {}
    begin = bisect.bisect_right(entry.details, first, key=itemgetter(0))
    for offset, extras in islice(entry.details, max(0, begin - 1), None):
        assert isinstance(extras, Extras)
        raw = extras.of(entry.uid)
        details = _read_map(raw, "the extras of a partial") if raw else {}
        for key, value in details.items():
            if key in _PER_TOKEN and isinstance(value, list):
                merged.setdefault(key, []).extend(value[max(0, first - offset) :])
            elif offset >= first:
                merged[key] = value
    return merged
