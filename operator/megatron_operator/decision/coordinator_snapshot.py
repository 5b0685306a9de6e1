"""The coordinator's answer to STATUS, in the form that decisions read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from megatron_operator.resource.states import CoordinatorState, EngineState, OperationOutcome
from megatron_runtime.protocol.lifecycle import STEADY_ENGINE_STATES


@dataclass(frozen=True, slots=True)
class EngineReport:
    """One registered engine, as the coordinator reports it. Engines whose connections are dead are not reported."""

    name: str
    """`NAME-engine-I`, from the engine's command line."""
    state: EngineState
    revision: str = ""
    epoch: int = 0
    ranks: int = 1
    digest: str = ""
    """Digest of the engine's weights; empty if unknown."""
    source: str | None = None
    """Source of the engine's weights, if they were updated in place; empty if they were not, None if unknown."""
    weights_unavailable: str | None = None
    """Why the engine waits for the weights of a trainer; None if it does not wait."""
    in_flight: int = 0
    serving: bool = True
    """Whether the engine sent HELLO with `serving: true`. Before that, it loads weights and gets neither requests nor
    signals.
    """
    suspect: bool = False
    """Whether the engine sends no heartbeats. The coordinator then moves its requests to other engines, and removes it
    soon.
    """
    draining: bool = False
    max_requests: int | None = None
    max_sequence_length: int | None = None
    max_tokens: int | None = None
    kv_cache_bytes: int | None = None
    """Size of the engine's KV cache. This and the other limits are None if the engine does not report them."""
    recomputes: str | None = None
    """Why the engine recomputes prompts that a prefill engine has computed; None if it does not recompute them."""


@dataclass(frozen=True, slots=True)
class OperationReport:
    """State of one operation, as the coordinator reports it."""

    outcome: OperationOutcome
    message: str = ""
    """The error of a failed operation, with engines and ranks."""
    code: int = 0
    """Error code of the operation if it was rejected or missed its deadline (504); otherwise 0. Rejections: 409
    illegal, 412 stale fence, 423 another in progress, 424 engines missing.
    """
    confirmed_ranks: int = 0
    total_ranks: int = 0
    adapter_errors: Mapping[str, str] = field(default_factory=dict)
    """For a failed SET_ADAPTERS, why each adapter could not be loaded, by name. Empty if the engines do not report
    it.
    """


@dataclass(frozen=True, slots=True)
class CanaryReport:
    """Result of a canary completion that this process sent to one engine."""

    revision: str
    """Revision of the engine that answered the canary."""
    ok: bool
    message: str = ""
    supported: bool = True
    """False if the coordinator cannot pin a request to an engine, so that there is no verdict."""


@dataclass(frozen=True, slots=True)
class KeysInUse:
    """Public keys that a coordinator reports."""

    server: str
    admitted: frozenset[str]
    connected: frozenset[str]


@dataclass(frozen=True, slots=True)
class FailedRequestReport:
    """A request that the coordinator failed because the request crashes engines."""

    id: str
    """Uid of the request, in hexadecimal digits."""
    engines: tuple[str, ...]
    """Names of the engines that the request crashed, in order."""
    time: datetime
    """Time when the request was failed, by the coordinator's clock."""


@dataclass(frozen=True, slots=True)
class AdapterReport:
    """One adapter, as the coordinator reports it."""

    name: str
    source: str
    """Source of the adapter as received. It is compared but never shown."""
    engines: int = 0
    """Number of serving engines that have loaded the adapter."""
    error: str = ""
    """Why an engine did not load the adapter, with the engine's name."""


@dataclass(frozen=True, slots=True)
class FormatsReport:
    """The names of the formats of tool calls and reasoning that the OpenAI servers parse.

    An empty name means that the format is unknown or that there is no format.
    """

    tool_calls: str = ""
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class CoordinatorSnapshot:
    """The coordinator's answer to STATUS, or a snapshot of an unreachable coordinator."""

    reachable: bool = False
    error: str = ""
    """Why the coordinator is unreachable, in one phrase; empty if it is reachable."""
    lost_seconds: float | None = None
    """Time since this process lost its connection to the coordinator; None if it is reachable or was never reached."""
    unknown_seconds: float = 0.0
    """Time since this process last had a report from a coordinator that knew its engines; 0 while it knows them."""
    incarnation: str = ""
    state: CoordinatorState = CoordinatorState.RECOVERING
    epoch: int = 0
    fence: int = 0
    """The highest fence that the coordinator reports. It is accepted only within MAX_FENCE_JUMP."""
    operations: Mapping[str, OperationReport] = field(default_factory=dict)
    engines: tuple[EngineReport, ...] = ()
    queue_length: int = 0
    idle_seconds: float = 0.0
    """Time for which this process has observed no queued or in-flight request."""
    canaries: Mapping[str, CanaryReport] = field(default_factory=dict)
    """The result of the last canary of each engine, by name. Only this process knows the results."""
    keys: KeysInUse | None = None
    """The keys that the coordinator reports; None if unknown, or without encryption."""
    drained_all: bool = False
    """Whether a DRAIN of all engines is in effect. Engines that register then get no requests until UNPAUSE."""
    failed_requests: tuple[FailedRequestReport, ...] = ()
    """The last requests that the coordinator failed because they crash engines, oldest first."""

    adapters: tuple[AdapterReport, ...] | None = None
    """The adapters of the coordinator's engines; None if its release does not support adapters."""

    formats: FormatsReport | None = None
    """The formats of answers that the servers parse; None if no server reports them."""

    @property
    def steady(self) -> CoordinatorState | None:
        """The coordinator's state if every serving engine has the same state.

        The value is None if the states differ, or if the coordinator is unreachable or is changing its state.
        """
        if not self.reachable or self.state not in STEADY_ENGINE_STATES:
            return None
        agreeing = STEADY_ENGINE_STATES[self.state]
        return self.state if all(engine.state in agreeing for engine in self.engines if engine.serving) else None


UNREACHABLE = CoordinatorSnapshot()
