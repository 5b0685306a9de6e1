"""What engines produce, on its way to clients: partials in order and once, finals, and catch-up for slow readers."""

from __future__ import annotations

from megatron_runtime.data_parallel_inference_coordinator import plain
from megatron_runtime.data_parallel_inference_coordinator.clients import Client, ClientRegistry
from megatron_runtime.data_parallel_inference_coordinator.counters import Counters
from megatron_runtime.data_parallel_inference_coordinator.dispatching import Dispatcher
from megatron_runtime.data_parallel_inference_coordinator.engines import Engine
from megatron_runtime.data_parallel_inference_coordinator.journal import TOKEN_BYTES, Entry
from megatron_runtime.wire.messages import Final, Frames, Partial, PartialEntry


class Replies:
    """A token reaches the journal only from the current dispatch and only as the next one, so none doubles."""

    def __init__(self, dispatcher: Dispatcher, clients: ClientRegistry, counters: Counters) -> None:
        self._dispatcher = dispatcher
        self._clients = clients
        self._counters = counters

    def partial(self, engine: Engine, message: Partial, frames: Frames) -> None:
        """Take new tokens; forward `frames` as they came where all of them are wanted by one client."""
        self._counters.partials += 1
        client = self._clients.routed(message.route)
        accepted: list[Entry] = []
        position = 0
        whole = client is not None and not client.blocked and not client.plain
        for item in message.entries:
            tokens = message.tokens[position : position + item.count * TOKEN_BYTES]
            position += len(tokens)
            entry = self._dispatcher.current(item.dispatch_id, item.uid, engine)
            if entry is None or item.offset != entry.tokens_so_far or not entry.meta.streaming:
                self._counters.stale += 1
                whole = False
                continue
            whole = whole and entry.client is client and entry.forwarded == item.offset
            self._dispatcher.journal.append(entry, tokens)
            accepted.append(entry)
        if whole and client is not None and self._clients.try_send(client, frames):
            for entry in accepted:
                entry.forwarded = entry.tokens_so_far
            return
        for entry in accepted:
            entry.client.behind = True
        for owner in {id(entry.client): entry.client for entry in accepted}.values():
            self.catch_up(owner)

    def final(self, engine: Engine, message: Final, frames: Frames) -> None:
        entry = self._dispatcher.current(message.dispatch_id, message.uid, engine)
        if entry is None:
            self._counters.stale += 1
            return
        client = entry.client
        if client.plain:
            frames = plain.reply_frames(entry.plain_id or 0, message)
        self._counters.completed += 1
        self._dispatcher.forget(entry)
        if not client.reachable:
            # What went out last may have been lost with the connection, and nobody can ask for it after the final.
            entry.forwarded = entry.held
        if entry.meta.streaming and entry.forwarded < entry.tokens_so_far:
            self._clients.send(client, self._owed(entry))
        self._clients.send(client, frames, answers=entry.uid)
        self._dispatcher.pump()

    def catch_up(self, client: Client) -> None:
        """Send what `client` is owed, as few messages as possible. Stops without loss where the buffer is full."""
        if not client.reachable or not self._clients.flush(client):
            return
        for entry in list(client.open.values()):
            if entry.meta.streaming and entry.forwarded < entry.tokens_so_far:
                if not self._clients.try_send(client, self._owed(entry)):
                    client.behind = True
                    return
                entry.forwarded = entry.tokens_so_far
        client.behind = False

    @staticmethod
    def _owed(entry: Entry) -> Frames:
        tokens = bytes(entry.generated[entry.forwarded * TOKEN_BYTES :])
        if entry.plain_id is not None:
            return plain.partial_frames(entry.plain_id, tokens)
        item = PartialEntry(entry.uid, entry.dispatch_id, entry.forwarded, len(tokens) // TOKEN_BYTES)
        return Partial(entry.client.route, [item], tokens).to_frames()
