"""What a decision is made from and what it is made of.

`World` is one snapshot: everything `decide` may look at, read before it is called. `Decision` is everything it may
say. Both are plain frozen data; no clock, no I/O, no client. The caller's contract, in order, is

    world = observe()                 # one consistent snapshot
    decision = decide(world)
    persist(decision.status)          # only if it differs from world.resource.status; with the resourceVersion
    act(decision.actions)             # in order; stop at the first that fails; the outcome is the next observation

so that the intent of a verb is durable before its signal leaves. Every action may be repeated without harm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from megatron_operator.model.resource import MegatronInferenceSpec
from megatron_operator.model.settings import Settings
from megatron_operator.model.states import CoordinatorState, EngineState, KeyStage, OperationOutcome, SignalKind
from megatron_runtime.protocol.limits import MAX_FENCE

MAX_FENCE_JUMP = 1_000_000
"""A fence that a coordinator reports is followed so far above this leader's: leaders of an earlier Lease sent it."""

Manifest = dict[str, Any]
"""A Kubernetes object as plain data."""


@dataclass(frozen=True, slots=True)
class ResourceView:
    """The custom resource as last read."""

    name: str
    namespace: str
    uid: str
    generation: int
    spec: MegatronInferenceSpec
    status: Mapping[str, Any] = field(default_factory=dict)
    """`.status` exactly as stored; empty when nothing was ever written."""
    deleting: bool = False
    changed_by: str = ""
    """Field manager that last wrote `spec.desiredState`, when known; goes into the history."""


@dataclass(frozen=True, slots=True)
class ChildRef:
    """Names one child in the resource's namespace."""

    kind: str
    name: str
    api_version: str = "v1"

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


@dataclass(frozen=True, slots=True)
class ChildView:
    """A child object as observed, reduced to what decisions need (see `plan.reduce.reduce_child`)."""

    ref: ChildRef
    uid: str
    owned: bool = True
    """It carries an owner reference with the UID of this resource. One that does not is never written or deleted."""
    deleting: bool = False
    hash: str = ""
    """Annotation `inference.megatron.dev/hash`: the manifest last applied, without `spec.replicas` of engines."""
    revision: str = ""
    """Label `inference.megatron.dev/revision` of the pod template; engines only."""
    model_hash: str = ""
    """Annotation `inference.megatron.dev/model`: what is served; engines and the server only."""
    replicas: int = 0
    """`spec.replicas` of a Deployment or StatefulSet."""
    ready_replicas: int = 0
    data: Mapping[str, Any] | None = None
    """`data` of a ControllerRevision: what engines of that revision are rendered from."""
    verified: bool = True
    """This process has applied this very object since it started and nobody changed it since. While false, the child
    is applied again even when its hash is current."""


@dataclass(frozen=True, slots=True)
class PodView:
    """A pod of the resource, reduced (see `plan.reduce.reduce_pod`)."""

    name: str
    uid: str
    component: str
    """`coordinator`, `server` or `engine`."""
    engine: str = ""
    """Name of the engine (of its StatefulSet); empty for the other components."""
    index: int = 0
    """Ordinal within the engine."""
    phase: str = "Pending"
    """`Pending`, `Running`, `Succeeded`, `Failed` or `Unknown`, as the kubelet says."""
    ready: bool = False
    deleting: bool = False
    revision: str = ""
    weights: str = ""
    """Revision of the weights that it started with; empty when the spec names none."""
    restarts: int = 0
    reason: str = ""
    """The kubelet's or scheduler's own word: `ImagePullBackOff`, `Unschedulable`, `CrashLoopBackOff`, … or empty."""
    message: str = ""
    ended: str = ""
    """Name of the container that ended last; empty when none did."""
    image: str = ""
    """Image of the container that ended last, as the pod names it; empty when none did."""
    exit_code: int | None = None
    """Exit code of the last container that ended; None when none did."""
    exit_reason: str = ""
    """Why it ended: `OOMKilled`, `Error`, `Completed`; empty when none did."""
    last_message: str = ""
    """Its termination message."""
    created_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class EngineReport:
    """One engine as its coordinator lists it. An engine whose connection is dead is not listed."""

    name: str
    """`NAME-engine-I`, given on the engine's command line."""
    identity: str
    state: EngineState
    revision: str = ""
    epoch: int = 0
    ranks: int = 1
    digest: str = ""
    """Of its weights; empty when it does not say."""
    in_flight: int = 0
    serving: bool = True
    """It said HELLO with `serving: true`; before that it loads and takes part in nothing."""
    draining: bool = False
    incarnation: str = ""


@dataclass(frozen=True, slots=True)
class OperationReport:
    """What the coordinator remembers of one operation id."""

    outcome: OperationOutcome
    signal: SignalKind | None = None
    message: str = ""
    """The error of a failed operation, naming engines and ranks."""
    code: int = 0
    """Its code when it was refused (409 illegal, 412 stale fence, 423 another in progress, 424 engines missing) or
    missed its deadline (504); 0 otherwise."""
    confirmed_ranks: int = 0
    total_ranks: int = 0


@dataclass(frozen=True, slots=True)
class CanaryReport:
    """What became of a completion that this process sent to one engine alone."""

    revision: str
    """Of the engine it was sent to."""
    ok: bool
    message: str = ""
    supported: bool = True
    """False: the coordinator cannot pin a request to an engine, so nothing was learned."""


@dataclass(frozen=True, slots=True)
class KeysInUse:
    """Public keys, as a coordinator reports them."""

    server: str
    admitted: frozenset[str]
    connected: frozenset[str]


@dataclass(frozen=True, slots=True)
class KeysView:
    """The Secret `NAME-keys`, without its secrets (see `render.keys` for its stages)."""

    generation: int
    stage: KeyStage
    server_generation: int
    """Of the coordinator's own key."""
    since: str | None
    """When the generation was made."""
    old: frozenset[str] = frozenset()
    """Public keys of engines and clients that a rotation takes out; empty when settled."""
    new: frozenset[str] = frozenset()
    """Those of the generation."""
    server: str = ""
    """Public half of the coordinator's own key, as it is or, at Restarting, as it is to be."""
    admin_admitted: bool = True
    """This operator's admin key opens the admin port."""


@dataclass(frozen=True, slots=True)
class FailedRequestReport:
    """A request that the coordinator failed because it ends engines."""

    id: str
    """Its uid, in hexadecimal digits."""
    engines: tuple[str, ...]
    """Those that it ended, the first first."""
    time: datetime
    """When it was failed, by the coordinator's clock."""


@dataclass(frozen=True, slots=True)
class CoordinatorSnapshot:
    """The coordinator's answer to STATUS, or the fact that there is none."""

    reachable: bool = False
    error: str = ""
    """Why it could not be reached, in one phrase; empty when reachable."""
    incarnation: str = ""
    state: CoordinatorState = CoordinatorState.RECOVERING
    epoch: int = 0
    fence: int = 0
    """The highest fence that it says it has seen. Believed within MAX_FENCE_JUMP only."""
    operations: Mapping[str, OperationReport] = field(default_factory=dict)
    engines: tuple[EngineReport, ...] = ()
    queue_length: int = 0
    idle_seconds: float = 0.0
    """How long this process has seen no request queued or in flight there."""
    canaries: Mapping[str, CanaryReport] = field(default_factory=dict)
    """The last canary of each engine, by name; kept by this process alone."""
    keys: KeysInUse | None = None
    """None: it does not say, or there is no encryption."""
    drained_all: bool = False
    """A DRAIN of all engines holds: whoever registers gets no work until UNPAUSE."""
    failed_requests: tuple[FailedRequestReport, ...] = ()
    """The last requests that it failed because they end engines, oldest first."""


UNREACHABLE = CoordinatorSnapshot()


@dataclass(frozen=True, slots=True)
class Refusal:
    """The API server's last answer to applying a child, when it was an error."""

    hash: str
    """Hash of the manifest that was refused (`ApplyChild.hash`)."""
    code: int
    """HTTP status."""
    message: str
    at: datetime


@dataclass(frozen=True, slots=True)
class World:
    """Everything a decision may depend on."""

    resource: ResourceView
    settings: Settings
    now: datetime
    """UTC, with a time zone. The only clock."""
    new_operation_id: str
    """A fresh random id, used if this decision starts an operation."""
    term: int = 1
    """This leader's: the number of the Lease's acquisition. The same for all resources."""
    children: Mapping[ChildRef, ChildView] = field(default_factory=dict)
    pods: tuple[PodView, ...] = ()
    coordinator: CoordinatorSnapshot = UNREACHABLE
    keys: KeysView | None = None
    """None: no security, or there is no such Secret (yet)."""
    refusals: Mapping[ChildRef, Refusal] = field(default_factory=dict)
    vetted: Mapping[ChildRef, str] = field(default_factory=dict)
    """Hash of the manifest of each child that the API server last accepted in a dry run asked for by this process."""
    failed_creations: Mapping[str, str] = field(default_factory=dict)
    """Why the pods of a StatefulSet cannot be made, in the words of its last Event; by its name."""

    @property
    def fence(self) -> int:
        """What this leader's signals to this resource carry: its term, and the offset of this resource alone.

        A later leader has a higher term, and the offset never falls: it is written with the status, on the version of
        the resource that it was read from, before a signal leaves. So leaders are ordered at each resource.
        """
        return self.term + self.fence_offset

    @property
    def fence_offset(self) -> int:
        """That of the status, raised where the coordinator has seen a higher fence, by MAX_FENCE_JUMP at most."""
        return self._stored_offset + self._jump if self.refused_fence is None else self._stored_offset

    @property
    def refused_fence(self) -> int | None:
        """The fence that the coordinator reports, where it is too far above this leader's to be followed."""
        fence = self.coordinator.fence
        return fence if self._jump > MAX_FENCE_JUMP or (self._jump and fence >= MAX_FENCE) else None

    @property
    def _jump(self) -> int:
        seen = self.coordinator.fence if self.coordinator.reachable else 0
        own = self.term + self._stored_offset
        return seen + 1 - own if seen > own else 0

    @property
    def _stored_offset(self) -> int:
        stored = (self.resource.status.get("lifecycle") or {}).get("fenceOffset", 0)
        return stored if isinstance(stored, int) and 0 <= stored <= MAX_FENCE - self.term else 0


# --- Actions -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CreateKeys:
    """Make the CURVE pairs of `NAME-keys` and create the Secret (`render.keys.keys_secret`), unless it exists."""

    name: str
    generation: int = 1


@dataclass(frozen=True, slots=True)
class RotateKeys:
    """Bring `NAME-keys` to this stage of this generation from the stage before it, and let it admit this operator's
    admin key alone. Does nothing where that is so already."""

    name: str
    generation: int
    stage: KeyStage


@dataclass(frozen=True, slots=True)
class ApplyChild:
    """Server-side apply of a whole manifest, never forced onto an object that lacks our owner UID."""

    manifest: Manifest
    hash: str
    """Equals the manifest's hash annotation; record it in a `Refusal` if the API server says no."""
    ref: ChildRef


@dataclass(frozen=True, slots=True)
class VetChild:
    """Apply a manifest in a dry run, so that a template that the API server refuses costs no engine. The answer is the
    next World's `vetted` or `refusals`."""

    manifest: Manifest
    hash: str
    ref: ChildRef


@dataclass(frozen=True, slots=True)
class DeleteChild:
    """Delete a child (background propagation), with its UID as a precondition."""

    ref: ChildRef
    uid: str
    reason: str


@dataclass(frozen=True, slots=True)
class DeletePods:
    """Delete pods together, each with its UID as a precondition; their StatefulSet makes them anew."""

    engine: str
    pods: tuple[tuple[str, str], ...]
    """(name, uid) of each."""
    reason: str


@dataclass(frozen=True, slots=True)
class Signal:
    """Send one control signal. The same operation id is never acted on twice by a coordinator, so resending is safe;
    while this process has the id in flight on its link, a repeated `Signal` is a no-op."""

    kind: SignalKind
    operation_id: str
    fence: int
    expected_engines: int
    """Engines registered when this was decided; the coordinator refuses if it knows fewer."""
    engine: str | None = None
    """Name of the one engine meant (DRAIN only); None means all."""
    source: str | None = None
    """UPDATE_WEIGHTS: where engines find the weights."""
    epoch: int | None = None
    """UPDATE_WEIGHTS: the epoch they become, absolute."""
    deadline_seconds: float | None = None
    """How long the coordinator may take; None means its own default."""


@dataclass(frozen=True, slots=True)
class AskCanary:
    """Send a short completion to one engine and look at its answer. Nothing depends on it being sent once; while one
    is unanswered a repeated `AskCanary` is a no-op."""

    engine: str
    revision: str
    model: str
    """`--model` of the engine: what a builtin model must answer is known."""


@dataclass(frozen=True, slots=True)
class EmitEvent:
    """A Kubernetes Event on the custom resource."""

    type: str
    """`Normal` or `Warning`."""
    reason: str
    message: str


OnChildren = CreateKeys | RotateKeys | ApplyChild | VetChild | DeleteChild | DeletePods
Action = OnChildren | Signal | AskCanary | EmitEvent


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do now, and why. The reason and message of the policy that decided *are* those of the status."""

    policy: str
    """Name of the first policy that applied."""
    reason: str
    """CamelCase, one of `model.conditions.Reason`."""
    message: str
    status: Manifest
    """The whole `.status` to persist if it differs from the stored one. Never contains the present time by itself:
    times change only together with the fact they belong to."""
    actions: tuple[Action, ...] = ()
    attentive: bool = False
    """The coordinator is to be asked often: it will be the first to know what is waited for."""
    requeue_after: float | None = None
    """Seconds after which time alone may change the decision; None when only an event can."""
