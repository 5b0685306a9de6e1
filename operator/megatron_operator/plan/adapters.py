"""The adapters of a resource: the list of the spec against that of the coordinator, and the errors of the status."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from megatron_operator.model.conditions import Reason
from megatron_operator.model.states import LifecyclePhase, SignalKind
from megatron_operator.plan.clock import seconds_since, stamp
from megatron_operator.plan.operation import Operation
from megatron_operator.plan.world import AdapterReport, World
from megatron_operator.render.model_source import adapters_digest, model_adapters
from megatron_runtime.protocol.adapters import Adapter
from megatron_runtime.protocol.headers import ErrorCode

_REASONS = {reason.value: reason for reason in (Reason.ADAPTER_FAILED, Reason.UNSUPPORTED_BY_BACKEND)}
RETRY_SECONDS = 30.0
"""Time after which a list that failed is set again, because a volume or a hub may be back."""


@dataclass(frozen=True)
class AdapterView:
    """Adapters of a World. operation: the resolved operation."""

    world: World
    operation: Operation | None

    @cached_property
    def wanted(self) -> tuple[Adapter, ...]:
        return model_adapters(self.world.resource.spec)

    @cached_property
    def entries(self) -> list[dict[str, Any]]:
        """`status.adapters`: each adapter of the spec, with the error that it has, or had until it is loaded."""
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
        elif failed is not None:
            reason, error = self._reason(failed, before=reason), failed.message
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
        """The last operation, if it failed to set the list of the spec."""
        last = self.operation
        if last is None or last.signal is not SignalKind.SET_ADAPTERS or last.phase is not LifecyclePhase.FAILED:
            return None
        return last if not last.rejected and last.adapters == adapters_digest(self.wanted) else None

    def _reason(self, failed: Operation, *, before: str | None) -> str:
        report = self.world.coordinator.operations.get(failed.id)
        if report is None:  # the coordinator has forgotten it: keep the recorded reason
            return before or Reason.ADAPTER_FAILED.value
        unsupported = report.code == ErrorCode.UNSUPPORTED
        return (Reason.UNSUPPORTED_BY_BACKEND if unsupported else Reason.ADAPTER_FAILED).value

    @cached_property
    def retry_in(self) -> float | None:
        """Seconds until a list that failed is set again; None if none failed, or it may be set now."""
        times = [entry["failedAt"] for entry in self.entries if "error" in entry]
        if not times:
            return None
        left = RETRY_SECONDS - seconds_since(max(times), self.world.now)
        return left if left > 0 else None

    @cached_property
    def are_due(self) -> bool:
        """Whether SET_ADAPTERS should be sent now."""
        coordinator = self.world.coordinator
        if coordinator.adapters is None or not any(engine.serving for engine in coordinator.engines):
            return False
        wanted = {(adapter.name, adapter.source) for adapter in self.wanted}
        is_complete = wanted == set(self._reports) and not any(report.error for report in self._reports.values())
        return not is_complete and self.retry_in is None

    @cached_property
    def finding(self) -> tuple[Reason, str] | None:
        """The first adapter with an error, as reason and message."""
        for entry in self.entries:
            if "error" in entry:
                return _REASONS[entry["reason"]], f"spec.model.adapters: {entry['name']}: {entry['error']}"
        return None
