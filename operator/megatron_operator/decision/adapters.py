"""The LoRA adapters of a resource. Compares the spec's list with the coordinator's list, and reports errors in the
status.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from megatron_operator.decision.coordinator_snapshot import AdapterReport
from megatron_operator.decision.operation import Operation, adapter_lists
from megatron_operator.decision.world import World
from megatron_operator.render.model_source import adapters_digest, model_adapters
from megatron_operator.resource.conditions import Reason
from megatron_operator.resource.states import LifecyclePhase, SignalKind
from megatron_operator.resource.text import seconds_since, stamp
from megatron_runtime.protocol.adapters import Adapter
from megatron_runtime.protocol.headers import ErrorCode

_REASONS = {reason.value: reason for reason in (Reason.ADAPTER_FAILED, Reason.UNSUPPORTED_BY_BACKEND)}
RETRY_SECONDS = 30.0
"""Time after which a failed list is set again, because a volume or a hub may be available again."""


@dataclass(frozen=True)
class AdapterView:
    """The adapters of a World, as policies see them.

    operation: the operation of `status.lifecycle`, updated from the World.
    """

    world: World
    operation: Operation | None

    @cached_property
    def wanted(self) -> tuple[Adapter, ...]:
        return model_adapters(self.world.resource.spec)

    @cached_property
    def entries(self) -> list[dict[str, Any]]:
        """The value of `status.adapters`. Each adapter of the spec keeps its last error until it is loaded."""
        before = {(entry["name"], entry["source"]): entry for entry in self._recorded}
        return [self._entry(adapter, before.get((adapter.name, adapter.source), {})) for adapter in self.wanted]

    @property
    def _recorded(self) -> list[Mapping[str, Any]]:
        return list(self.world.resource.status.get("adapters") or ())

    def _entry(self, adapter: Adapter, before: Mapping[str, Any]) -> dict[str, Any]:
        coordinator, failed = self.world.coordinator, self._failure
        report = self._reports.get((adapter.name, adapter.source))
        reason, error, failed_at = before.get("reason"), before.get("error"), before.get("failedAt")
        if report is not None and not report.error:
            error = None
        elif report is not None:
            reason = reason if error else Reason.ADAPTER_FAILED.value
            failed_at = failed_at if error else stamp(self.world.now)
            error = report.error
        elif adapter in self._causes:
            reason, error = self._reason(failed, before=reason), self._causes[adapter]
        if failed is not None and error:
            failed_at = max(failed_at or "", failed.since)
        engines = report.engines if report is not None else 0
        return {
            "name": adapter.name,
            "source": adapter.source,
            "engines": engines if coordinator.reachable else before.get("engines", 0),
            **({"reason": reason, "error": error, "failedAt": failed_at} if error else {}),
        }

    @cached_property
    def _reports(self) -> dict[tuple[str, str], AdapterReport]:
        return {(report.name, report.source): report for report in self.world.coordinator.adapters or ()}

    @cached_property
    def _failure(self) -> Operation | None:
        """The last operation if it set a list of adapters and failed; otherwise None."""
        last = self.operation
        if last is None or last.signal is not SignalKind.SET_ADAPTERS or last.phase is not LifecyclePhase.FAILED:
            return None
        return last if not last.rejected else None

    @cached_property
    def _causes(self) -> Mapping[Adapter, str | None]:
        """The errors of the adapters in the list that the last operation failed to set.

        The mapping is empty if the last operation succeeded or did not set a list. The value of an adapter without an
        error is None. If the engines reported no error for any adapter, each adapter that is not loaded has the error
        of the operation.
        """
        failed = self._failure
        tried = adapter_lists(self.world, self._recorded).get((failed and failed.adapters) or "")
        if failed is None or tried is None:
            return {}
        report = self.world.coordinator.operations.get(failed.id)
        errors = report.adapter_errors if report is not None else {}
        if errors:
            return {adapter: errors.get(adapter.name) for adapter in tried}
        return {adapter: failed.message for adapter in tried if (adapter.name, adapter.source) not in self._reports}

    def _reason(self, failed: Operation | None, *, before: str | None) -> str:
        report = self.world.coordinator.operations.get(failed.id) if failed is not None else None
        if report is None:  # the coordinator has forgotten the operation, so keep the recorded reason
            return before or Reason.ADAPTER_FAILED.value
        unsupported = report.code == ErrorCode.UNSUPPORTED
        return (Reason.UNSUPPORTED_BY_BACKEND if unsupported else Reason.ADAPTER_FAILED).value

    @cached_property
    def retry_in(self) -> float | None:
        """Seconds until a list of adapters that could not be set may be tried again.

        The value is None if there is no such list, or if the time has passed.
        """
        times = [entry["failedAt"] for entry in self.entries if "error" in entry]
        if not times:
            return None
        left = RETRY_SECONDS - seconds_since(max(times), self.world.now)
        return left if left > 0 else None

    @cached_property
    def due(self) -> str | None:
        """Digest of the list that SET_ADAPTERS should set now.

        The list is the spec's list, or the spec's list without the adapters that cannot be loaded. The value is None if
        this list is already set, has just failed, or cannot be set now.
        """
        coordinator, failed = self.world.coordinator, self._failure
        if coordinator.adapters is None or not any(engine.serving for engine in coordinator.engines):
            return None
        if self.retry_in is None:
            wanted = {(adapter.name, adapter.source) for adapter in self.wanted}
            is_complete = wanted == set(self._reports) and not any(report.error for report in self._reports.values())
            return None if is_complete else adapters_digest(self.wanted)
        *_, (digest, adapters) = adapter_lists(self.world, self.entries).items()
        is_set = {(adapter.name, adapter.source) for adapter in adapters} == set(self._reports)
        recent = failed is not None and seconds_since(failed.since, self.world.now) < RETRY_SECONDS
        return None if is_set or (recent and failed is not None and failed.adapters == digest) else digest

    @cached_property
    def finding(self) -> tuple[Reason, str] | None:
        """Reason and message of the first adapter with an error, or None if no adapter has one."""
        for entry in self.entries:
            if "error" in entry:
                return _REASONS[entry["reason"]], f"spec.model.adapters: {entry['name']}: {entry['error']}"
        return None
