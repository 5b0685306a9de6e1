"""Split requests. One engine computes the prompt, another engine generates. This module moves requests between stages.

The decode engine imports the KV blocks of the prompt into its prefix cache, and then receives an ordinary DISPATCH. A
block that is lost in the transfer is therefore a cache miss, and the decode engine computes it as for any other
request.
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
"""Maximum time that an exported request waits for a decode engine with capacity. Its blocks are then released."""
IMPORT_SECONDS = 30.0
"""Lifetime of the ticket that permits an import. The importing engine stops earlier if no data arrives."""
CHUNK_TOKENS = 256
"""Maximum number of uncached tokens of a prompt that is not split. A decode engine computes such a prompt within one
step.
"""
KEEPS_BLOCKS = "KV_TRANSFER"
"""Required feature of a request for which the engine keeps the prompt's KV blocks after the answer. See handoffs.py."""
MAX_COMPARED = 16
"""Maximum number of prefill engines whose costs are compared for a prompt. The engines with the lowest load are
compared.
"""
MIN_LEFT_TOKENS = 2
"""Number of tokens at the end of a prompt that are never imported, because the decode engine always computes them."""
_NOT_SPLIT = ("PROMPT_LOG_PROBS", "HIDDEN_STATES", "pooling")
"""Required features whose results come from the forward pass of the prompt. Requests with these features cannot be
split.
"""
_RECENT = 0.2
"""Weight of the newest import in the exponential moving average of the bandwidth."""
MEASURED_SECONDS = 30.0
"""Time after the last import for which its measured bandwidth is used. Without this limit, one slow import could make
all later prompts too expensive to transfer, so that the bandwidth would never be measured again.
"""


class StageChange(StrEnum):
    """An event that interrupts the usual order of the stages of a split request."""

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
    """The effect of a StageChange on a request.

    to:       the next stage of the request; None if the request has ended, or if its client submits it again.
    releases: the engines that are notified of the transfer's end: "prefill", "decode", "prefill and decode", or "" for
              none. An engine that computes or imports gets ABORT_REQUEST. An engine that keeps exported blocks gets
              RELEASE.
    accuses: the engine whose crash counts against the request: "prefill", "decode", or "" for none (see quarantine.py).
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
"""Effect of each change in each stage. A pair that is absent cannot occur.

If an engine reports with the dispatch id of an earlier stage, the stage does not change, and the engine is sent
RELEASE. tests/unit/coordinator/test_transfer_model.py compares the table with the core, for events in any order.
"""
CHANGED_BY_VERBS = frozenset({_P, _E, _I})


def mismatch(exporter: Engine, importer: Engine) -> str:
    """Return why `importer` cannot import KV blocks of `exporter`.

    Return an empty string if `importer` can import them.
    """
    # This is a chain of comparisons, because it runs several times for a split request.
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
    """Return the number of blocks of `size` tokens that hold prompt and answer of a request, rounded up."""
    return -(-entry.num_tokens // max(1, size))


Among = Callable[[Entry, Callable[[Engine], bool]], Engine | None]
"""A function that returns the best engine for a request among the engines that have capacity and fulfil a condition."""


class Transfers:
    """The transfers of split requests.

    This component decides which requests are split, and records the exports. An export consists of the KV blocks that a
    prefill engine keeps for a transfer.

    requeue: puts a request back in the queue after its export was released or lost. Aborts its import.
    """

    def __init__(self, context: Context, router: EngineRouter, *, requeue: Callable[[Entry], None]) -> None:
        self._context = context
        self._engines = context.engines
        self._router = router
        self._requeue = requeue
        self._exported: dict[int, Entry] = {}
        """Exported requests by export id, ordered by Export.until."""
        self._promised = 0
        """Number of blocks that decode engines will need for the requests in PREFILLING and EXPORTED."""
        self._bytes_per_second = 0.0
        """Measured bandwidth of imports; 0 before the first import."""
        self._measured_until = 0.0
        """Time after which the measured bandwidth is no longer used."""
        self._is_timed = False
        """Whether the timer that releases expired exports is set."""

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
        """Return the request with this dispatch id at `engine` if it is in `stage`.

        Otherwise return None, and make the engine release what it holds under this id.
        """
        entry = engine.in_flight.get(dispatch_id)
        if entry is not None and entry.stage is stage:
            return entry
        self._context.counters.stale += 1
        self.release(engine, dispatch_id)
        return None

    # --- the choice of the stage ----------------------------------------------------------------------------------

    def choose(self, entry: Entry, among: Among) -> tuple[Engine, RequestStage] | None:
        """Return the engine for a request, and the stage in which the request starts at this engine.

        Returns None if the request must wait.

        The role of an engine is a preference. If no decode engine can answer the request, prefill engines decode.
        """
        if KEEPS_BLOCKS in entry.meta.needs:
            engine = among(entry, lambda engine: engine.role == PREFILL) or among(entry, lambda _: True)
            return None if engine is None else (engine, _D)
        decoder = among(entry, _decodes) if entry.export is None else self._importer(entry)
        if decoder is None:
            if any(engine.role != PREFILL and engine.runs(entry) for engine in self._engines.available()):
                return None  # they are busy
            engine = among(entry, lambda _: True)
            return None if engine is None else (engine, _D)
        if entry.export is not None:
            return decoder, self.stage_at(decoder, entry)
        prefiller = self._prefiller(entry, decoder) if self._is_splittable(entry) else None
        return (decoder, _D) if prefiller is None else (prefiller, _P)

    def stage_at(self, engine: Engine, entry: Entry) -> RequestStage:
        """Return the stage in which a request starts at a decode engine.

        The stage is IMPORTING if the engine can import the exported blocks of the request, otherwise DECODING.
        """
        export = entry.export
        can_import = export is not None and not export.engine.suspect and not mismatch(export.engine, engine)
        return RequestStage.IMPORTING if can_import else RequestStage.DECODING

    def _importer(self, entry: Entry) -> Engine | None:
        """Return the decode engine with the lowest load that can now accept a request in the stage EXPORTED.

        Returns None if there is no such engine.

        Prefix hits are ignored, because the engine receives all blocks. If the chosen engine cannot import the blocks,
        it computes the prompt again.
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
        """Return whether a request may be split.

        A suspected poison request may not be split, because it runs alone on one engine.
        """
        meta = entry.meta
        return (
            entry.splits
            and not entry.crashes
            and not meta.text
            and entry.media is None
            and entry.num_tokens > CHUNK_TOKENS
            and not (meta.needs and any(need in _NOT_SPLIT for need in meta.needs.split()))
        )

    def _prefiller(self, entry: Entry, decoder: Engine) -> Engine | None:
        """Return the prefill engine with the lowest cost for a prompt.

        Return None if no prefill engine is suitable, or if `decoder` can compute the prompt at a lower cost.

        Costs are in seconds (see EngineRouter). At the decode engine, uncached tokens count twice, because a decode
        engine computes prompts in short steps, and because prompts delay its other answers. At a prefill engine, the
        duration of the transfer is added.
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
        """Return whether `decoder` alone, or all decode engines together, have at least `blocks` free blocks.

        Also return True if an engine has not reported its number of free blocks.
        """
        if decoder.free_blocks is None or decoder.free_blocks >= blocks:
            return True
        free = [engine.free_blocks for engine in self._engines if engine.role != PREFILL]
        return None in free or sum(number or 0 for number in free) >= blocks

    # --- exports --------------------------------------------------------------------------------------------------

    def keep(self, entry: Entry, engine: Engine, message: Exported) -> None:
        """Record that `engine` keeps the exported blocks of a request, and set the time at which they expire."""
        until = self._context.now + EXPORTED_SECONDS
        entry.export = Export(engine, *message, until)
        self._exported[message.dispatch_id] = entry
        if not self._is_timed:
            self._is_timed = True
            self._context.set_timer("exports", until, self._expire)

    def drop(self, entry: Entry) -> None:
        """Forget the export of a request, if it has one, and make the prefill engine release the blocks."""
        export, entry.export = entry.export, None
        if export is not None:
            del self._exported[export.id]
            self.release(export.engine, export.id)

    def interrupted(self, entry: Entry) -> None:
        """Drop the export of a request whose import has not ended, if its blocks can be read only once.

        vLLM frees the blocks of an export when an engine has read them. A second import would read other blocks.
        """
        if entry.export is not None and entry.export.handle:
            self.drop(entry)

    def release(self, engine: Engine, dispatch_id: int) -> None:
        """Make an engine release the export or import with this dispatch id.

        The engine ignores the message if it has already released the export or import.
        """
        self._context.send(engine.peer, ReleaseBlocks(dispatch_id=dispatch_id))

    def engine_lost(self, engine: Engine) -> None:
        """Forget the exports of a lost engine.

        A native engine that is importing them detects the loss itself. vLLM does not if the lost engine is frozen, so
        this method cancels its imports.
        """
        for entry in [entry for entry in self._exported.values() if entry.export and entry.export.engine is engine]:
            export, entry.export = entry.export, None
            assert export is not None
            del self._exported[export.id]
            if entry.stage is RequestStage.EXPORTED:
                self.move(entry, TABLE[entry.stage, StageChange.PREFILL_LOST].to or RequestStage.QUEUED)
            elif entry.stage is RequestStage.IMPORTING and export.handle:
                self._context.counters.failed_imports += 1
                entry.splits = False
                self._requeue(entry)

    def _expire(self) -> None:
        """Release the exports that have expired, and requeue their requests, which are not split again."""
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
        """Make `engine` import the blocks of a request under the request's current dispatch id.

        Return the number of tokens in these blocks.
        """
        export = entry.export
        assert export is not None
        ticket = self._context.randbits(8 * limits.TICKET_BYTES).to_bytes(limits.TICKET_BYTES, "big")
        source, digests = export.engine, export.digests
        head = export.id, entry.dispatch_id, ticket, digests, export.weights
        self._context.send(source.peer, Transfer(*head, engine.key.decode(), IMPORT_SECONDS))
        assert source.kv is not None
        origin = source.key.decode(), IMPORT_SECONDS, source.kv.address, export.handle
        self._context.send(engine.peer, Transfer(*head, *origin))
        if engine.free_blocks is not None:
            engine.free_blocks = max(0, engine.free_blocks - _blocks(entry, engine.block_size_tokens))
        return len(digests) // DIGEST_BYTES * engine.block_size_tokens

    def imported(self, entry: Entry, engine: Engine, message: Imported) -> None:
        """Handle the end of an import, successful or not.

        Releases the blocks at the prefill engine, and updates counters.
        """
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
        """Return why a decode engine computes all prompts itself, for EngineStatus.recomputes.

        Returns None if the engine can import from at least one prefill engine, if there is no prefill engine, or if it
        is itself a prefill engine.
        """
        exporters = [other for other in self._engines.serving() if other.role == PREFILL]
        if engine.role == PREFILL or not engine.serving or not exporters:
            return None
        reasons = [(mismatch(other, engine), other) for other in exporters]
        if not all(reason for reason, _ in reasons):
            return None
        return "; ".join(f"{reason} than engine {other.name}" for reason, other in reasons[:4])
