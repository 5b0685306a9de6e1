"""Requests whose prompt one engine computes and another one continues: the stages, and what moves a request.

An import is a prefix hit: the decode engine pins the blocks in its prefix cache, and then gets an ordinary DISPATCH. So
whatever is lost on the way is a cache miss, and the request is computed as one that is not split.
"""

from __future__ import annotations

import logging
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
_NOT_SPLIT = ("PROMPT_LOG_PROBS", "HIDDEN_STATES", "pooling")
"""Needs of requests whose answer has something of the prompt's forward pass."""
_RECENT = 0.2
"""Weight of the last import in the measured bandwidth."""


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
    if exporter.kv is None or importer.kv is None:
        return "no KV port"
    pairs = {
        "KV layout": (exporter.kv.layout, importer.kv.layout),
        "block size": (exporter.block_size_tokens, importer.block_size_tokens),
        "revision": (exporter.revision, importer.revision),
        "epoch": (exporter.epoch, importer.epoch),
        "digest of the weights": (exporter.digest, importer.digest),
    }
    return next((f"another {name}" for name, (one, other) in pairs.items() if one != other), "")


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

    def move(self, entry: Entry, stage: RequestStage) -> None:
        """Set the stage of a request."""
        entry.stage = stage
        if stage is _P or stage is _E or entry.promised:
            promised = self._blocks(entry) if stage is _P or stage is _E else 0
            self._promised += promised - entry.promised
            entry.promised = promised
        if stage is _P:
            self._context.counters.split_requests += 1

    def _blocks(self, entry: Entry) -> int:
        """Return the blocks that the whole request has, in blocks of the smallest size."""
        return -(-entry.num_tokens // max(1, min(self._engines.block_sizes, default=1)))

    # --- the choice of the stage ----------------------------------------------------------------------------------

    def choose(self, entry: Entry, among: Among) -> tuple[Engine, RequestStage] | None:
        """Return the engine for a request and the stage that it begins there; None: it has to wait.

        Roles are preferences: without a decode engine, prefill engines decode.
        """
        is_exported = entry.export is not None
        decoder = among(
            entry, lambda engine: engine.role != PREFILL and (not is_exported or self._may_import(engine, entry))
        )
        if decoder is None:
            if any(engine.role != PREFILL for engine in self._engines.available()):
                return None  # they are busy
            engine = among(entry, lambda _: True)
            return None if engine is None else (engine, RequestStage.DECODING)
        if is_exported:
            return decoder, self.stage_at(decoder, entry)
        if self._is_splittable(entry):
            chosen = decoder
            prefiller = among(entry, lambda engine: engine.role == PREFILL and not mismatch(engine, chosen))
            if prefiller is not None and self._is_cheaper(entry, prefiller, decoder):
                return prefiller, RequestStage.PREFILLING
        return decoder, RequestStage.DECODING

    def stage_at(self, engine: Engine, entry: Entry) -> RequestStage:
        """Return the stage that a request begins at an engine that decodes."""
        export = entry.export
        can_import = export is not None and not export.engine.suspect and not mismatch(export.engine, engine)
        return RequestStage.IMPORTING if can_import else RequestStage.DECODING

    def _may_import(self, engine: Engine, entry: Entry) -> bool:
        """Whether an engine can accept an exported request now. An engine that cannot import blocks recomputes them."""
        return self.stage_at(engine, entry) is RequestStage.DECODING or (
            engine.free_blocks is None or engine.free_blocks >= entry.promised
        )

    @staticmethod
    def _is_splittable(entry: Entry) -> bool:
        """Whether a request may be prefilled on a separate engine. A suspect may not: it runs alone on one engine."""
        needs = entry.meta.needs.split()
        return (
            entry.splits
            and not entry.crashes
            and not (entry.meta.text or entry.meta.adapter)
            and entry.media is None
            and entry.num_tokens > CHUNK_TOKENS
            and not any(need in _NOT_SPLIT for need in needs)
        )

    def _is_cheaper(self, entry: Entry, prefiller: Engine, decoder: Engine) -> bool:
        """Compare the seconds until the prompt is computed. At the decode engine it also delays every request there."""
        uncached = self._router.uncached(decoder, entry.hashes or {}, entry.num_tokens)
        if uncached <= CHUNK_TOKENS:
            return False
        if not self._has_blocks(decoder, self._promised + self._blocks(entry)):
            return False
        if not decoder.prefill_cost:
            return True
        assert decoder.kv is not None
        size = uncached // max(1, decoder.block_size_tokens) * decoder.kv.block_bytes
        transfer = size / self._bytes_per_second if self._bytes_per_second else 0.0
        computed = self._router.uncached(prefiller, entry.hashes or {}, entry.num_tokens)
        split = (prefiller.queued + computed) * prefiller.prefill_cost + transfer
        return split < (decoder.queued + uncached * (1 + len(decoder.in_flight))) * decoder.prefill_cost

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
        if len(self._exported) == 1:
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
        if waiting:
            self._context.set_timer("exports", max(min(waiting), now + 1.0), self._expire)

    # --- imports --------------------------------------------------------------------------------------------------

    def begin(self, entry: Entry, engine: Engine) -> int:
        """Have `engine` import the blocks of a request, under its current dispatch id. Return their tokens."""
        export = entry.export
        assert export is not None
        assert export.engine.kv is not None
        ticket = self._context.randbits(8 * limits.TICKET_BYTES).to_bytes(limits.TICKET_BYTES, "big")
        transfer = Transfer(
            export_id=export.id,
            dispatch_id=entry.dispatch_id,
            ticket=ticket,
            digests=export.digests,
            weights=export.weights,
            key=engine.key.decode(),
            seconds=IMPORT_SECONDS,
        )
        self._context.send(export.engine.peer, transfer)
        source = export.engine.key.decode(), export.engine.kv.address
        self._context.send(engine.peer, transfer._replace(key=source[0], address=source[1]))
        if engine.free_blocks is not None:
            engine.free_blocks = max(0, engine.free_blocks - self._blocks(entry))
        return len(export.digests) // DIGEST_BYTES * engine.block_size_tokens

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
            measured, before = message.received_bytes / message.seconds, self._bytes_per_second
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
