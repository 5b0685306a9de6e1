"""Requests whose prompt one engine computes and another one continues: the stages, and what moves a request.

An import is a prefix hit: the decode engine pins the blocks in its prefix cache, and then gets an ordinary DISPATCH. So
whatever is lost on the way is a cache miss, and the request is computed as one that is not split.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from megatron_runtime.coordinator.core.context import Context
from megatron_runtime.coordinator.core.records import Engine, Entry, Export, RequestStage
from megatron_runtime.coordinator.core.routing import EngineRouter
from megatron_runtime.protocol import limits
from megatron_runtime.protocol.messages import DIGEST_BYTES, Exported, Imported, ReleaseBlocks, Transfer

logger = logging.getLogger(__name__)

PREFILL = "prefill"
EXPORTED_SECONDS = 10.0
"""Time that a request waits for a decode engine with room. Its blocks are released afterwards."""
IMPORT_SECONDS = 30.0
"""Lifetime of a ticket. The importing engine gives up earlier if nothing arrives."""
CHUNK_TOKENS = 256
"""A prompt with at most this many tokens to compute is one chunk of a decode engine's step, and is not split."""
KEEPS_BLOCKS = "KV_TRANSFER"
"""The need of a request whose blocks its engine keeps after the answer; see handoffs.py."""
MAX_COMPARED = 16
"""Prefill engines that are compared for a prompt, the least loaded first."""
MIN_LEFT_TOKENS = 2
"""Tokens of a prompt that its decode engine computes in any case."""
_NOT_SPLIT = ("PROMPT_LOG_PROBS", "HIDDEN_STATES", "pooling")
"""Needs of requests whose answer has something of the prompt's forward pass."""
_RECENT = 0.2
"""Weight of the last import in the measured bandwidth."""
MEASURED_SECONDS = 30.0
"""Time after the last import for which its bandwidth is used. Without this limit, one slow import could make all later
prompts too expensive to transfer, and nothing would be measured again."""


class StageChange(StrEnum):
    """An event that moves a request out of the order of its stages."""

    PREFILL_LOST = "the prefill engine is lost"
    DECODE_LOST = "the decode engine is lost"
    NO_ROOM = "the decode engine has no free blocks"
    FAILED = "the export or import failed"
    EXPIRED = "no decode engine had capacity in time"
    VERB = "a verb cancels transfers"
    ENDED = "the request ends"
    COORDINATOR_LOST = "the coordinator is lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What a change does to a request.

    to:       its next stage; None: it is not open any more, or is submitted again by its client.
    releases: the engine that is sent the end of a transfer: ABORT_REQUEST while it works, RELEASE for kept blocks.
    accuses:  the engine whose requests a crash counts against.
    """

    to: RequestStage | None
    releases: str = ""
    accuses: str = ""


_Q, _P, _E, _I, _D = RequestStage  # in the order of the class
TABLE: dict[tuple[RequestStage, StageChange], Row] = {
    (_P, StageChange.PREFILL_LOST): Row(to=_Q, accuses="prefill"),
    (_P, StageChange.FAILED): Row(to=_Q),
    (_P, StageChange.VERB): Row(to=_Q, releases="prefill"),
    (_P, StageChange.ENDED): Row(to=None, releases="prefill"),
    (_P, StageChange.COORDINATOR_LOST): Row(to=None, releases="prefill"),
    (_E, StageChange.PREFILL_LOST): Row(to=_Q),
    (_E, StageChange.EXPIRED): Row(to=_Q, releases="prefill"),
    (_E, StageChange.VERB): Row(to=_Q, releases="prefill"),
    (_E, StageChange.ENDED): Row(to=None, releases="prefill"),
    (_E, StageChange.COORDINATOR_LOST): Row(to=None, releases="prefill"),
    (_I, StageChange.PREFILL_LOST): Row(to=_I),
    (_I, StageChange.DECODE_LOST): Row(to=_E, accuses="decode"),
    (_I, StageChange.NO_ROOM): Row(to=_E),
    (_I, StageChange.FAILED): Row(to=_D, releases="prefill"),
    (_I, StageChange.VERB): Row(to=_Q, releases="prefill and decode"),
    (_I, StageChange.ENDED): Row(to=None, releases="prefill and decode"),
    (_I, StageChange.COORDINATOR_LOST): Row(to=None, releases="prefill and decode"),
    (_D, StageChange.PREFILL_LOST): Row(to=_D),
    (_D, StageChange.DECODE_LOST): Row(to=_Q, accuses="decode"),
    (_D, StageChange.VERB): Row(to=_D),
    (_D, StageChange.ENDED): Row(to=None, releases="decode"),
    (_D, StageChange.COORDINATOR_LOST): Row(to=None, releases="decode"),
}
"""By stage and change. A pair that is absent cannot occur. An answer with the dispatch id of another stage than the
present one moves nothing: its engine is sent RELEASE.

tests/unit/coordinator/test_transfer_model.py checks the table against the core, with the events in any order.
"""
CHANGED_BY_VERBS = frozenset({_P, _E, _I})


def mismatch(exporter: Engine, importer: Engine) -> str:
    """Return why one engine cannot import blocks of another engine; empty if it can."""
    # A chain of comparisons: this runs several times for a split request.
    if exporter.kv is None or importer.kv is None:
        return "no KV port"
    if exporter.kv.layout != importer.kv.layout:
        return "another KV layout"
    if exporter.block_size_tokens != importer.block_size_tokens:
        return "another block size"
    if exporter.revision != importer.revision:
        return "another revision"
    if exporter.epoch != importer.epoch:
        return "another epoch"
    return "another digest of the weights" if exporter.digest != importer.digest else ""


def _decodes(engine: Engine) -> bool:
    return engine.role != PREFILL


def _blocks(entry: Entry, size: int) -> int:
    """Return the blocks of `size` tokens that the whole request has."""
    return -(-entry.num_tokens // max(1, size))


Among = Callable[[Entry, Callable[[Engine], bool]], Engine | None]
"""Returns the engine for a request among those with room for which the condition holds."""


class Transfers:
    """Chooses which prompts go to prefill engines, and owns the exports.

    requeue: puts an exported request back into the queue, after its export was dropped.
    """

    def __init__(self, context: Context, router: EngineRouter, *, requeue: Callable[[Entry], None]) -> None:
        self._context = context
        self._engines = context.engines
        self._router = router
        self._requeue = requeue
        self._exported: dict[int, Entry] = {}
        """By the id of the export, in the order of `until`."""
        self._promised = 0
        """Blocks of the requests in PREFILLING and EXPORTED."""
        self._bytes_per_second = 0.0
        """Measured; 0: not yet."""
        self._measured_until = 0.0
        """When the measured bandwidth is out of date."""
        self._is_timed = False
        """Whether the timer of exports is set."""

    def move(self, entry: Entry, stage: RequestStage) -> None:
        """Set the stage of a request."""
        entry.stage = stage
        if stage is _P:
            self._context.counters.split_requests += 1
        if stage is _P or stage is _E:
            if not entry.promised:
                entry.promised = _blocks(entry, min(self._engines.block_sizes))
                self._promised += entry.promised
        elif entry.promised:
            self._promised -= entry.promised
            entry.promised = 0

    def at_stage(self, stage: RequestStage, engine: Engine, dispatch_id: int) -> Entry | None:
        """Return the request that an engine reports about. If it is at another stage, have the engine drop its part."""
        entry = engine.in_flight.get(dispatch_id)
        if entry is not None and entry.stage is stage:
            return entry
        self._context.counters.stale += 1
        self.release(engine, dispatch_id)
        return None

    # --- the choice of the stage ----------------------------------------------------------------------------------

    def choose(self, entry: Entry, among: Among) -> tuple[Engine, RequestStage] | None:
        """Return the engine for a request and the stage that it begins there; None: it has to wait.

        Roles are preferences: without a decode engine, prefill engines decode.
        """
        if KEEPS_BLOCKS in entry.meta.needs:
            engine = among(entry, lambda engine: engine.role == PREFILL) or among(entry, lambda _: True)
            return None if engine is None else (engine, _D)
        decoder = among(entry, _decodes) if entry.export is None else self._importer(entry)
        if decoder is None:
            if any(engine.role != PREFILL for engine in self._engines.available()):
                return None  # they are busy
            engine = among(entry, lambda _: True)
            return None if engine is None else (engine, _D)
        if entry.export is not None:
            return decoder, self.stage_at(decoder, entry)
        prefiller = self._prefiller(entry, decoder) if self._is_splittable(entry) else None
        return (decoder, _D) if prefiller is None else (prefiller, _P)

    def stage_at(self, engine: Engine, entry: Entry) -> RequestStage:
        """Return the stage that a request begins at an engine that decodes."""
        export = entry.export
        can_import = export is not None and not export.engine.suspect and not mismatch(export.engine, engine)
        return RequestStage.IMPORTING if can_import else RequestStage.DECODING

    def _importer(self, entry: Entry) -> Engine | None:
        """Return the least loaded decode engine that can accept an exported request now. Its cached blocks do not
        matter, as it receives all. An engine that cannot import blocks recomputes them.
        """
        for engine in self._engines.with_room():
            if engine.role != PREFILL and engine.runs(entry):
                free = engine.free_blocks
                has_room = free is None or free >= entry.promised
                if has_room or self.stage_at(engine, entry) is _D:
                    return engine
        return None

    @staticmethod
    def _is_splittable(entry: Entry) -> bool:
        """Whether a request may be prefilled on a separate engine. A suspect may not: it runs alone on one engine."""
        meta = entry.meta
        return (
            entry.splits
            and not entry.crashes
            and not (meta.text or meta.adapter)
            and entry.media is None
            and entry.num_tokens > CHUNK_TOKENS
            and not (meta.needs and any(need in _NOT_SPLIT for need in meta.needs.split()))
        )

    def _prefiller(self, entry: Entry, decoder: Engine) -> Engine | None:
        """Return the prefill engine that computes a prompt at the least cost in seconds, see EngineRouter; None if the
        decode engine costs less. There the tokens count twice: they are computed in short steps, and delay its answers.
        """
        hashes, tokens, size = entry.hashes or {}, entry.num_tokens, decoder.block_size_tokens
        uncached = self._router.uncached(decoder, hashes, tokens)
        blocks = (uncached - MIN_LEFT_TOKENS) // size if size else 0
        if uncached <= CHUNK_TOKENS or not blocks or decoder.kv is None:
            return None
        if not self._has_blocks(decoder, self._promised + _blocks(entry, size)):
            return None
        best, limit, left = None, math.inf, MAX_COMPARED
        if decoder.prefill_cost:
            limit = decoder.cost_of(uncached) + uncached * decoder.prefill_cost
            if self._bytes_per_second and self._context.now < self._measured_until:
                limit -= blocks * decoder.kv.block_bytes / self._bytes_per_second
        for engine in self._engines.with_room():
            if engine.role == PREFILL and engine.runs(entry) and not mismatch(engine, decoder):
                cost = engine.cost_of(self._router.uncached(engine, hashes, tokens))
                if cost < limit:
                    best, limit = engine, cost
                left -= 1
                if not left:
                    break
        return best

    def _has_blocks(self, decoder: Engine, blocks: int) -> bool:
        """Whether one decode engine, or all decode engines together, have this many free blocks. True if a number is
        unknown.
        """
        if decoder.free_blocks is None or decoder.free_blocks >= blocks:
            return True
        free = [engine.free_blocks for engine in self._engines if engine.role != PREFILL]
        return None in free or sum(number or 0 for number in free) >= blocks

    # --- exports --------------------------------------------------------------------------------------------------

    def keep(self, entry: Entry, engine: Engine, message: Exported) -> None:
        """`engine` keeps the blocks of a request."""
        until = self._context.now + EXPORTED_SECONDS
        entry.export = Export(engine, message.dispatch_id, message.digests, message.weights, until)
        self._exported[message.dispatch_id] = entry
        if not self._is_timed:
            self._is_timed = True
            self._context.set_timer("exports", until, self._expire)

    def drop(self, entry: Entry) -> None:
        """Release the blocks of a request at its prefill engine, if there are any."""
        export, entry.export = entry.export, None
        if export is not None:
            del self._exported[export.id]
            self.release(export.engine, export.id)

    def release(self, engine: Engine, dispatch_id: int) -> None:
        """Have an engine drop an export or an import, or what a stale id stands for."""
        self._context.send(engine.peer, ReleaseBlocks(dispatch_id=dispatch_id))

    def engine_lost(self, engine: Engine) -> None:
        """Forget the exports of a lost engine. An import in progress reports its end."""
        for entry in [entry for entry in self._exported.values() if entry.export and entry.export.engine is engine]:
            assert entry.export is not None
            del self._exported[entry.export.id]
            entry.export = None
            if entry.stage is RequestStage.EXPORTED:
                self.move(entry, TABLE[entry.stage, StageChange.PREFILL_LOST].to or RequestStage.QUEUED)

    def _expire(self) -> None:
        """Give up the exports that waited for too long, and queue their requests as any others."""
        now = self._context.now
        for entry in [entry for entry in self._exported.values() if entry.export and entry.export.until <= now]:
            if entry.stage is RequestStage.EXPORTED:
                entry.splits = False
                self.drop(entry)
                self._requeue(entry)
        waiting = [e.export.until for e in self._exported.values() if e.export is not None]
        self._is_timed = bool(waiting)
        if waiting:
            self._context.set_timer("exports", max(min(waiting), now + 1.0), self._expire)

    # --- imports --------------------------------------------------------------------------------------------------

    def begin(self, entry: Entry, engine: Engine) -> int:
        """Have `engine` import the blocks of a request, under its current dispatch id. Return their tokens."""
        export = entry.export
        assert export is not None
        ticket = self._context.randbits(8 * limits.TICKET_BYTES).to_bytes(limits.TICKET_BYTES, "big")
        source, digests = export.engine, export.digests
        head = export.id, entry.dispatch_id, ticket, digests, export.weights
        self._context.send(source.peer, Transfer(*head, engine.key.decode(), IMPORT_SECONDS))
        assert source.kv is not None
        self._context.send(engine.peer, Transfer(*head, source.key.decode(), IMPORT_SECONDS, source.kv.address))
        if engine.free_blocks is not None:
            engine.free_blocks = max(0, engine.free_blocks - _blocks(entry, engine.block_size_tokens))
        return len(digests) // DIGEST_BYTES * engine.block_size_tokens

    def imported(self, entry: Entry, engine: Engine, message: Imported) -> None:
        """Handle the end of an import: the prefill engine need not keep the blocks any longer."""
        self.drop(entry)
        entry.splits = False
        counters = self._context.counters
        if not message.ok:
            counters.failed_imports += 1
            logger.warning("engine %s computes a prompt again: %s", engine.name, message.error)
            return
        counters.imports += 1
        counters.imported_bytes += message.received_bytes
        if message.seconds > 0 and message.received_bytes:
            now, measured = self._context.now, message.received_bytes / message.seconds
            before = self._bytes_per_second if now < self._measured_until else 0.0
            self._measured_until = now + MEASURED_SECONDS
            self._bytes_per_second = before + (measured - before) * _RECENT if before else measured

    def recomputes(self, engine: Engine) -> str | None:
        """Return EngineStatus.recomputes of an engine."""
        exporters = [other for other in self._engines.serving() if other.role == PREFILL]
        if engine.role == PREFILL or not engine.serving or not exporters:
            return None
        reasons = [(mismatch(other, engine), other) for other in exporters]
        if not all(reason for reason, _ in reasons):
            return None
        return "; ".join(f"{reason} than engine {other.name}" for reason, other in reasons[:4])
