"""Converts a coordinator's answers to the snapshot that decisions use.

A coordinator may run any image. Its texts are therefore shortened, and unprintable characters are escaped, before the
texts reach a status, a log or a terminal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from datetime import UTC, datetime

from megatron_operator.decision.coordinator_snapshot import (
    AdapterReport,
    CanaryReport,
    CoordinatorSnapshot,
    EngineReport,
    FailedRequestReport,
    FormatsReport,
    KeysInUse,
    OperationReport,
)
from megatron_operator.resource.states import CoordinatorState, OperationOutcome
from megatron_runtime.protocol.headers import ErrorCode
from megatron_runtime.protocol.messages import (
    AdapterStatus,
    AnswerFormats,
    ControlAck,
    EngineStatus,
    FailedRequest,
    Operation,
    StatusReply,
)
from megatron_runtime.protocol.text import printable as escaped

NAME_CHARACTERS = 128
MESSAGE_CHARACTERS = 1024
MAX_NAMES = 8


def snapshot_of(
    reply: StatusReply,
    *,
    rejections: Mapping[str, OperationReport],
    canaries: Mapping[str, CanaryReport] | None = None,
    idle_seconds: float = 0.0,
    unknown_seconds: float = 0.0,
) -> CoordinatorSnapshot:
    """Return the snapshot that a STATUS_REPLY describes.

    rejections: signals that the coordinator rejected immediately and may not remember. If `reply` has the same
                operation, `reply` takes precedence.
    canaries, idle_seconds, unknown_seconds: values that the link measures, for the fields of the same names.
    """
    operations = dict(rejections)
    operations.update({operation.operation_id: _operation(operation) for operation in reply.operations})
    return CoordinatorSnapshot(
        reachable=True,
        incarnation=f"{reply.incarnation:016x}",
        state=reply.state,
        epoch=reply.epoch,
        fence=reply.fence,
        operations=operations,
        engines=tuple(map(_engine, sorted(reply.engines, key=lambda engine: engine.name))),
        queue_length=reply.queued,
        canaries=dict(canaries or {}),
        idle_seconds=idle_seconds,
        unknown_seconds=unknown_seconds,
        keys=_keys(reply),
        drained_all=reply.drained_all,
        failed_requests=tuple(map(_failed_request, reply.failed_requests or ())),
        adapters=None if reply.adapters is None else tuple(map(_adapter, reply.adapters)),
        formats=None if reply.formats is None else _formats(reply.formats),
    )


def printable(text: str, maximum: int) -> str:
    """Return the first `maximum` characters of `text`, with unprintable characters escaped."""
    return escaped(text[:maximum])[:maximum]


def without_traffic(snapshot: CoordinatorSnapshot) -> CoordinatorSnapshot:
    """Return the part of a snapshot whose change wakes a task.

    The result has no counts that change with every request. It shows whether a request waits while the engines are
    suspended.
    """
    engines = tuple(replace(engine, in_flight=0) for engine in snapshot.engines)
    waits = snapshot.queue_length > 0 and snapshot.state is CoordinatorState.SUSPENDED
    return replace(snapshot, queue_length=int(waits), idle_seconds=0.0, unknown_seconds=0.0, engines=engines)


def rejection_of(ack: ControlAck) -> OperationReport:
    """Return the report of a signal that the coordinator answered with `ok: false`."""
    return OperationReport(
        outcome=OperationOutcome.FAILED,
        message=_words(ack.code, ack.error),
        code=ack.code or 0,
        confirmed_ranks=ack.ranks,
        total_ranks=ack.total_ranks,
        adapter_errors=_adapter_errors(ack),
    )


def _engine(engine: EngineStatus) -> EngineReport:
    values = {each.name: getattr(engine, each.name) for each in fields(EngineReport)}
    texts = {name: printable(values[name], NAME_CHARACTERS) for name in ("name", "revision", "digest")}
    for name in ("weights_unavailable", "recomputes"):
        if values[name] is not None:
            texts[name] = printable(values[name], MESSAGE_CHARACTERS)
    return EngineReport(**{**values, **texts})


def _operation(operation: Operation) -> OperationReport:
    message = _words(operation.code, operation.error)
    if operation.evicted:
        names = [printable(name, NAME_CHARACTERS) for name in operation.evicted[:MAX_NAMES]]
        more = f" and {len(operation.evicted) - MAX_NAMES} more" if len(operation.evicted) > MAX_NAMES else ""
        message = f"{message}; removed: {', '.join(names)}{more}".removeprefix("; ")
    return OperationReport(
        outcome=OperationOutcome(operation.phase),
        message=message,
        code=operation.code or 0,
        confirmed_ranks=operation.ranks,
        total_ranks=operation.total_ranks,
        adapter_errors=_adapter_errors(operation),
    )


def _adapter_errors(failed: Operation | ControlAck) -> dict[str, str]:
    found = (failed.adapter_errors or {}).items()
    return {printable(name, NAME_CHARACTERS): printable(error, MESSAGE_CHARACTERS) for name, error in found}


def _failed_request(failed: FailedRequest) -> FailedRequestReport:
    engines = tuple("".join(c if c.isprintable() else "?" for c in name) for name in failed.engines)
    return FailedRequestReport(failed.uid, engines, datetime.fromtimestamp(failed.at, UTC))


def _adapter(adapter: AdapterStatus) -> AdapterReport:
    name, error = printable(adapter.name, NAME_CHARACTERS), printable(adapter.error or "", MESSAGE_CHARACTERS)
    return AdapterReport(name, adapter.source, adapter.engines, error)


def _formats(formats: AnswerFormats) -> FormatsReport:
    return FormatsReport(printable(formats.tool_calls, NAME_CHARACTERS), printable(formats.reasoning, NAME_CHARACTERS))


def _keys(reply: StatusReply) -> KeysInUse | None:
    found = reply.keys
    if found is None:
        return None
    return KeysInUse(found.server, frozenset(found.admitted), frozenset(found.connected))


def _words(code: int | None, error: str | None) -> str:
    error = printable(error or "", MESSAGE_CHARACTERS)
    if code is None:
        return error
    try:
        name = ErrorCode(code).name
    except ValueError:
        name = str(code)
    return f"{name}: {error}" if error else name
