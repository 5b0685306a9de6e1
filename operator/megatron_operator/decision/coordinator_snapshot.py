"""The coordinator's answer to STATUS, in the form that decisions read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from megatron_operator.resource.states import CoordinatorState, EngineState, OperationOutcome
from megatron_runtime.protocol.lifecycle import STEADY_ENGINE_STATES


@dataclass(frozen=True, slots=True)
class EngineReport:
    """One engine in the coordinator's list. The list has no engines whose connection is dead."""

    name: str
    """`NAME-engine-I`, from the engine's command line."""
    state: EngineState
    revision: str = ""
    epoch: int = 0
    ranks: int = 1
    digest: str = ""
    """Digest of its weights; empty if unknown."""
    source: str | None = None
    """Source of its weights, if they were updated in place; empty if they were not, None if unknown."""
    weights_unavailable: str | None = None
    """Why it waits for the weights of a trainer; None if it does not."""
    in_flight: int = 0
    serving: bool = True
    """It sent HELLO with `serving: true`; before that it loads weights and gets neither requests nor signals."""
    suspect: bool = False
    """It sends no heartbeats: the coordinator gives its requests to other engines, and removes it soon."""
    draining: bool = False
    max_requests: int | None = None
    max_sequence_length: int | None = None
    max_tokens: int | None = None
    kv_cache_bytes: int | None = None
    """Its limits; None: it does not report them."""
    recomputes: str | None = None
    """Why it computes prompts that a prefill engine has computed; None if it does not."""


@dataclass(frozen=True, slots=True)
class OperationReport:
    """State of an operation id in the coordinator."""

    outcome: OperationOutcome
    message: str = ""
    """The error of a failed operation, with engines and ranks."""
    code: int = 0
    """Its code if it was rejected (409 illegal, 412 stale fence, 423 another in progress, 424 engines missing) or
    missed its deadline (504); otherwise 0."""
    confirmed_ranks: int = 0
    total_ranks: int = 0
    adapter_errors: Mapping[str, str] = field(default_factory=dict)
    """A failed SET_ADAPTERS: by name, why an adapter could not be loaded. Empty: the engines do not report it."""


@dataclass(frozen=True, slots=True)
class CanaryReport:
    """Result of a canary completion that this process sent to one engine."""

    revision: str
    """Revision of the engine."""
    ok: bool
    message: str = ""
    supported: bool = True
    """False if the coordinator cannot pin a request to an engine, so there is no verdict."""


@dataclass(frozen=True, slots=True)
class KeysInUse:
    """Public keys that a coordinator reports."""

    server: str
    admitted: frozenset[str]
    connected: frozenset[str]


@dataclass(frozen=True, slots=True)
class FailedRequestReport:
    """A request that the coordinator failed because it crashes engines."""

    id: str
    """Its uid, in hexadecimal digits."""
    engines: tuple[str, ...]
    """Engines that it crashed, in order."""
    time: datetime
    """Time of its failure, by the coordinator's clock."""


@dataclass(frozen=True, slots=True)
class AdapterReport:
    """One adapter in the coordinator's list."""

    name: str
    source: str
    """As received; it is compared and never shown."""
    engines: int = 0
    """Serving engines that have loaded it."""
    error: str = ""
    """Why an engine did not load it, with the engine's name."""


@dataclass(frozen=True, slots=True)
class FormatsReport:
    """The formats of tool calls and reasoning that the OpenAI servers parse, by name. An empty name means that the
    format is unknown or that there is none.
    """

    tool_calls: str = ""
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class CoordinatorSnapshot:
    """The coordinator's answer to STATUS, or the fact that the coordinator does not answer."""

    reachable: bool = False
    error: str = ""
    """Why it is unreachable, in one phrase; empty if reachable."""
    lost_seconds: float | None = None
    """Time since this process lost its connection; None if it is reachable or was never reached."""
    unknown_seconds: float = 0.0
    """Time since this process last heard of a coordinator that knew its engines; 0 while it knows them."""
    incarnation: str = ""
    state: CoordinatorState = CoordinatorState.RECOVERING
    epoch: int = 0
    fence: int = 0
    """The highest fence that it reports. Accepted only within MAX_FENCE_JUMP."""
    operations: Mapping[str, OperationReport] = field(default_factory=dict)
    engines: tuple[EngineReport, ...] = ()
    queue_length: int = 0
    idle_seconds: float = 0.0
    """Time for which this process has observed no queued or in-flight request."""
    canaries: Mapping[str, CanaryReport] = field(default_factory=dict)
    """The last canary of each engine, by name; known to this process only."""
    keys: KeysInUse | None = None
    """None if unknown, or without encryption."""
    drained_all: bool = False
    """A DRAIN of all engines is in effect: engines that register get no requests until UNPAUSE."""
    failed_requests: tuple[FailedRequestReport, ...] = ()
    """The last requests that it failed because they crash engines, oldest first."""

    adapters: tuple[AdapterReport, ...] | None = None
    """The adapters of its engines; None if its release has none."""

    formats: FormatsReport | None = None
    """The formats of answers that the servers read; None if none reports them."""

    @property
    def steady(self) -> CoordinatorState | None:
        """The coordinator's state if it is settled and every serving engine has the same state; otherwise None."""
        if not self.reachable or self.state not in STEADY_ENGINE_STATES:
            return None
        agreeing = STEADY_ENGINE_STATES[self.state]
        return self.state if all(engine.state in agreeing for engine in self.engines if engine.serving) else None


UNREACHABLE = CoordinatorSnapshot()
