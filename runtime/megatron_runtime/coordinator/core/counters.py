"""Counts of the coordinator's events. Each field declares its metric."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from megatron_runtime.process.metrics import counter

LOSSES = "Replays and engines lost"
"""Title of the dashboard's panel about losses."""


@dataclass(slots=True)
class Counters:
    """Event counts for metrics. The counts are plain integers, because these cost little on the request path."""

    rejected: Counter[str] = field(default_factory=Counter)
    """Number of dropped frames by reason: malformed, wrong_role, unknown_peer, unexpected."""
    replays: int = counter("replays", "Requests dispatched again because their engine was lost.", panel=LOSSES)
    moved: int = counter("moved_requests", "Requests returned from an engine to the queue in favour of another tenant.")
    stale: int = counter(
        "stale_answers", "Messages of engines that the coordinator dropped because they were no longer expected."
    )
    late: int = counter("late_answers", "Final answers that arrived from removed engines and were delivered.")
    evicted_blocks: int = counter("evicted_blocks", "Prefix blocks that engines reported as evicted.")
    completed: int = counter("completed_requests", "Requests that got their final answer from an engine.")
    error_answers: int = counter("refused_requests", "Requests that the coordinator answered with an error.")
    aborted: int = counter("aborted_requests", "Requests aborted by the client, or because the client left.")
    over_limit: int = counter("over_limit_requests", "Requests rejected because of the limits of their API key.")
    partials: int = counter("partials", "Partial answers received from engines.")
    engines_lost: int = counter(
        "engines_lost", "Engines removed because they left, failed or sent no heartbeat.", panel=LOSSES
    )
    engine_crashes: int = counter("engine_crashes", "Engines that crashed while they had requests.")
    suspects: int = counter("suspect_requests", "Requests in flight at two crashes, held back to run alone.")
    acquitted: int = counter("acquitted_requests", "Suspect requests that ran alone past their last crash.")
    split_requests: int = counter("split_requests", "Requests whose prompt was sent to a prefill engine.")
    imports: int = counter("kv_imports", "Requests whose prompt an engine imported from a prefill engine.")
    failed_imports: int = counter("failed_kv_imports", "Requests whose prompt was computed again after its prefill.")
    imported_bytes: int = counter("kv_imported_bytes", "Bytes of KV that engines imported.")
    poison_requests: int = counter("poison_requests", "Requests failed because they crash engines.")
