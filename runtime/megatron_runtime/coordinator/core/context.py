"""The data that all components of the core share: settings, registered peers, counters, the time of the current event,
and its effects.

The core does not read a clock and does not send messages. The shell (service.py) sets `now` before each event and
performs `effects`, in order, after the event. The shell calls run_timers() no later than `next_timer`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator
from itertools import count
from typing import TypeAlias

from megatron_runtime.coordinator.core.counters import Counters
from megatron_runtime.coordinator.core.records import Client, Ended, Engine, Entry, PeerId
from megatron_runtime.coordinator.core.routing import EnginesByLoad, load_by
from megatron_runtime.coordinator.core.settings import CoordinatorSettings
from megatron_runtime.protocol import limits
from megatron_runtime.protocol.headers import ErrorCode, Role
from megatron_runtime.protocol.messages import Error, Outgoing

SHARED_PORT = 3
"""Port number in the single-port mode. The other port numbers are the values of Role."""
REMEMBERED_ANSWERS = 4096
SIMILAR_RATES = 1.25
"""An engine whose rate differs from the median by less than this factor is treated as having the median rate."""
RATE_SECONDS = 60.0
"""Time after an engine's last new request for which its own rates are used. Without this limit, an engine that was slow
for a while would get no requests, and so would never measure its rates again.
"""

Effect: TypeAlias = tuple[PeerId, Outgoing | None]
"""A pair (peer, message): send the message to the peer. If the message is None, close the connection after all earlier
messages have been sent. If the message has no frames, call CoordinatorCore.has_room() when the connection accepts
messages again.
"""


class ClientRegistry:
    """The registered clients and administrators."""

    def __init__(self) -> None:
        self._by_name: dict[tuple[Role, str], Client] = {}
        self._by_peer: dict[PeerId, Client] = {}
        self._by_route: dict[int, Client] = {}
        # Every token calls these functions, so they are directly the methods of the maps.
        self.at: Callable[[PeerId], Client | None] = self._by_peer.get
        self.routed: Callable[[int], Client | None] = self._by_route.get
        self.routes = count(1)
        """Generator of route numbers for future clients."""

    def __iter__(self) -> Iterator[Client]:
        return iter(list(self._by_name.values()))

    def __len__(self) -> int:
        return len(self._by_name)

    def named(self, role: Role, name: str) -> Client | None:
        return self._by_name.get((role, name))

    def add(self, client: Client) -> None:
        self._by_name[client.role, client.name] = self._by_peer[client.peer] = self._by_route[client.route] = client

    def move(self, client: Client, peer: PeerId, *, incarnation: int, key: bytes = b"") -> None:
        """Move a client to its new connection.

        On the new connection, the core sends all data that the client has not received.
        """
        self._by_peer.pop(client.peer, None)
        client.peer, client.key, client.incarnation = peer, key, incarnation
        client.answered.clear()
        client.reachable, client.stuck_since = True, None
        self._by_peer[peer] = client
        for entry in client.open.values():
            # Tokens sent on the old connection may not have arrived. The client drops tokens that it already has.
            entry.forwarded = entry.held
            client.behind = client.behind or entry.meta.streaming

    def remove(self, client: Client) -> None:
        if self._by_name.get((client.role, client.name)) is client:
            del self._by_name[client.role, client.name]
        if self._by_peer.get(client.peer) is client:
            del self._by_peer[client.peer]
        self._by_route.pop(client.route, None)
        client.outbox.clear()
        client.outbox_bytes = 0


class EngineRegistry:
    """The registered engines.

    stopped:     whether STOP was sent to all engines and no engine has registered since. If so, the coordinator rejects
                 new requests.
    block_sizes: the block sizes of the engines' prefix caches; several sizes while a rollout changes the size.
    has_roles:   whether at least one engine has the role "prefill" or "decode".
    has_pooling: whether at least one engine has a pooling model. If so, not every engine can answer a request that
                 needs no special feature.
    min_prefill_cost: prefill cost of the fastest engine, in seconds per prompt token. If it is 0, the cost of an engine
        is the number of its requests.
    """

    def __init__(self, load: Callable[[Engine], float]) -> None:
        self._by_name: dict[str, Engine] = {}
        self._by_peer: dict[PeerId, Engine] = {}
        self.at: Callable[[PeerId], Engine | None] = self._by_peer.get
        self.by_load = EnginesByLoad(load)
        self.indices = count()
        """Generator of index numbers for future registrations."""
        self.stopped = False
        self.block_sizes: frozenset[int] = frozenset()
        self.has_pooling = False
        self.has_roles = False
        self.min_prefill_cost = 0.0

    def __iter__(self) -> Iterator[Engine]:
        return iter(list(self._by_name.values()))

    def __len__(self) -> int:
        return len(self._by_name)

    @property
    def tasks(self) -> tuple[str, ...]:
        """The tasks of the serving engines, such as "generate"."""
        return tuple(sorted({engine.does for engine in self.serving()})[: limits.MAX_TASKS])

    def named(self, name: str) -> Engine | None:
        return self._by_name.get(name)

    def is_registered(self, engine: Engine) -> bool:
        return self._by_name.get(engine.name) is engine

    def serving(self) -> list[Engine]:
        return [engine for engine in self._by_name.values() if engine.serving]

    def with_room(self) -> Iterator[Engine]:
        """Yield the engines that can accept one more request now, lowest load first."""
        return filter(Engine.has_room, self.by_load)

    def load_changed(self, engine: Engine) -> None:
        """Update the position of an engine in the order by load.

        Call after every change of `engine.max_requests` or of a value that Engine.cost() reads.
        """
        if self.is_registered(engine):
            self.by_load.changed[engine.index] = engine

    def update_costs(self, now: float) -> None:
        """Update the costs of all engines from the rates in their last heartbeats.

        An engine gets the median rate if it reports no rate, or if it has received no request for RATE_SECONDS. The
        median also replaces a rate within a factor of SIMILAR_RATES of the median. Noise therefore does not affect the
        order of engines with equal speed. If no engine reports a prefill rate, or no engine reports a decode rate, the
        cost of an engine is the number of its requests.
        """
        reports = [engine.heartbeat for engine in self._by_name.values()]
        prefill_rates = sorted(report.prefill_rate for report in reports if report.prefill_rate)
        decode_rates = sorted(report.decode_rate for report in reports if report.decode_rate)
        is_known = bool(prefill_rates and decode_rates)
        for engine in self._by_name.values():
            costs, report = (0.0, 0.0), engine.heartbeat
            if report.last_dispatch is None or report.last_dispatch != engine.last_work[0]:
                engine.last_work = report.last_dispatch, now
            if is_known:
                is_recent = now - engine.last_work[1] < RATE_SECONDS
                costs = (
                    _cost_of(report.prefill_rate if is_recent else None, prefill_rates[len(prefill_rates) // 2]),
                    _cost_of(report.decode_rate if is_recent else None, decode_rates[len(decode_rates) // 2]),
                )
            if costs != (engine.prefill_cost, engine.held_cost):
                engine.prefill_cost, engine.held_cost = costs
                self.load_changed(engine)
        self.min_prefill_cost = min((engine.prefill_cost for engine in self._by_name.values()), default=0.0)

    def announced(self, engine: Engine) -> None:
        """Update the block sizes, roles and tasks of this registry.

        Call this method after the core has read HELLO of a registered engine.
        """
        self.load_changed(engine)
        self.has_pooling = self.has_pooling or bool(engine.task)
        self.has_roles = self.has_roles or bool(engine.role)
        if engine.block_size_tokens not in self.block_sizes:
            self._collect_block_sizes()

    def _collect_block_sizes(self) -> None:
        self.block_sizes = frozenset(engine.block_size_tokens for engine in self._by_name.values())

    def available(self) -> list[Engine]:
        """Return the engines to which requests may be dispatched, including engines at capacity."""
        return [engine for engine in self._by_name.values() if engine.available() and not engine.reserved]

    def dispatched(self) -> Iterator[tuple[int, Entry]]:
        """Yield every request that is dispatched to an engine, with its dispatch id."""
        for engine in self:
            yield from list(engine.in_flight.items())

    def in_flight(self) -> int:
        return sum(len(engine.in_flight) for engine in self._by_name.values())

    def add(self, engine: Engine) -> None:
        self.stopped = False
        self._by_name[engine.name] = self._by_peer[engine.peer] = engine
        self.by_load.put(engine)

    def remove(self, engine: Engine) -> None:
        self.by_load.changed.pop(engine.index, None)
        self.by_load.remove(engine)
        if self._by_name.get(engine.name) is engine:
            del self._by_name[engine.name]
        if self._by_peer.get(engine.peer) is engine:
            del self._by_peer[engine.peer]
        engine.serving = False
        if engine.task:
            self.has_pooling = any(other.task for other in self._by_name.values())
        if engine.role:
            self.has_roles = any(other.role for other in self._by_name.values())
        if len(self.block_sizes) > 1:
            self._collect_block_sizes()


def _cost_of(rate: float | None, median: float) -> float:
    """Return the seconds per token of an engine.

    rate: tokens per second that the engine reports. If `rate` is missing or close to `median`, `median` is used.
    """
    if not rate or median / SIMILAR_RATES < rate < median * SIMILAR_RATES:
        rate = median
    return 1 / rate


class Context:
    """The data that all components of the core share. All times are in seconds.

    now:         time of the event, on a monotonic clock.
    wall_offset: value to add to `now` to get Unix time.
    next_timer:  time at which the earliest timer is due; infinite if no timer is set.
    randbits:    returns an integer with the given number of random bits.
    needs_pump:  whether the core must try to dispatch waiting requests before the event ends.
    incarnation: the random number by which peers detect a restart of the coordinator.
    translated:  the plain peers, each of which has a translator.
    ended:       traced requests that have ended since service.py last read this list; None if service.py records no
                 spans.
    term:        the term in which this coordinator of a pair is active; 0 while it is on standby; None if it is the
                 only coordinator.
    """

    def __init__(self, settings: CoordinatorSettings, *, now: float, randbits: Callable[[int], int]) -> None:
        self.settings = settings
        self.now = now
        self.wall_offset = 0.0
        self.randbits = randbits
        self.incarnation = randbits(64)
        self.term: int | None = None if settings.other_host is None else 0
        self.engines = EngineRegistry(load_by(settings.routing_policy, alpha=settings.alpha))
        self.clients = ClientRegistry()
        self.counters = Counters()
        self.translated: Container[PeerId] = ()
        self.effects: list[Effect] = []
        self.ended: list[Ended] | None = None
        self.needs_pump = False
        self.next_timer = math.inf
        self._timers: dict[str, tuple[float, Callable[[], None]]] = {}

    @property
    def active(self) -> bool:
        """Whether this coordinator is active, not on standby."""
        return self.term != 0

    def send(self, peer: PeerId, message: Outgoing) -> None:
        self.effects.append((peer, message))

    def close(self, peer: PeerId) -> None:
        self.effects.append((peer, None))

    def reject(self, peer: PeerId, code: ErrorCode, message: str) -> None:
        """Count a message that the core drops, and send an error to its sender."""
        self.counters.rejected[code.name.lower()] += 1
        self.send(peer, Error(code=code, message=message[:1000], incarnation=self.incarnation).to_frames())

    def answer(self, client: Client, message: Outgoing, *, uid: bytes | None = None) -> None:
        """Send a message to a client. If its connection is full, store the message in its outbox.

        uid: uid of the request that this message ends; None if the message ends no request.
        """
        if client.outbox or client.stuck_since is not None or not client.reachable:
            client.keep(uid, message)
        else:
            self.answer_now(client, message, uid=uid)

    def report_room(self, peer: PeerId) -> None:
        """Request a call of CoordinatorCore.has_room() when the peer's connection accepts messages again."""
        self.effects.append((peer, []))

    def answer_now(self, client: Client, message: Outgoing, *, uid: bytes | None = None) -> None:
        self.effects.append((client.peer, message))
        if uid is not None:
            client.answered[uid] = None
            if len(client.answered) > REMEMBERED_ANSWERS:
                client.answered.popitem(last=False)

    def set_timer(self, name: str, when: float, callback: Callable[[], None]) -> None:
        """Call `callback` at the time `when`. Replaces an earlier timer of this name."""
        self._timers[name] = when, callback
        self.next_timer = min(when for when, _ in self._timers.values())

    def cancel_timer(self, name: str) -> None:
        if self._timers.pop(name, None) is not None:
            self.next_timer = min((when for when, _ in self._timers.values()), default=math.inf)

    def pop_due_timer(self) -> Callable[[], None] | None:
        """Remove the earliest timer that is due, and return its callback. Return None if no timer is due."""
        if self.next_timer > self.now:
            return None
        name = min(self._timers, key=lambda name: self._timers[name][0])
        callback = self._timers[name][1]
        self.cancel_timer(name)
        return callback
