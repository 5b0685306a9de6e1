"""The output of a decision: the actions to take, in order, and the status to write.

Every action is idempotent. The outcome of an action is part of the next World.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_operator.decision.world import OBJECT_SECONDS, ChildRef, Manifest, manifest_hash
from megatron_operator.resource.states import KeyStage, SignalKind
from megatron_runtime.protocol.adapters import Adapter


@dataclass(frozen=True, slots=True)
class CreateKeys:
    """Create the Secret `NAME-keys` with new CURVE pairs (`render.keys.keys_secret`), or replace its keys if they
    cannot be read."""

    name: str
    generation: int = 1


@dataclass(frozen=True, slots=True)
class AdoptKeys:
    """Make the resource the owner of `NAME-keys`, which the operator made for an earlier resource of this name."""

    name: str


@dataclass(frozen=True, slots=True)
class RotateKeys:
    """Bring `NAME-keys` from the previous stage to this stage of this generation, let it accept only this operator's
    admin key, and add a pair for a trainer with `has_trainer`. Does nothing if that is already so."""

    name: str
    generation: int
    stage: KeyStage
    has_trainer: bool = False


@dataclass(frozen=True, slots=True)
class OnManifest:
    """An action with the manifest of a child."""

    manifest: Manifest

    @property
    def ref(self) -> ChildRef:
        return ChildRef.of(self.manifest)

    @property
    def hash(self) -> str:
        """The manifest's hash annotation; recorded in an `ApplyRejection` if the API server rejects it."""
        return manifest_hash(self.manifest)


class ApplyChild(OnManifest):
    """Server-side apply of a manifest, never forced on an object without our owner UID."""


class VetChild(OnManifest):
    """Apply a manifest in a dry run, so that no engine is drained for a template that the API server rejects. The
    answer is in the next World's `vetted` or `rejections`."""


class CreatePod(OnManifest):
    """Create a pod, unless an object has its name."""


@dataclass(frozen=True, slots=True)
class DeleteChild:
    """Delete a child (background propagation), with its UID as a precondition."""

    ref: ChildRef
    uid: str
    reason: str


@dataclass(frozen=True, slots=True)
class DeletePods:
    """Delete pods together, each with its UID as a precondition; their StatefulSet or Deployment creates them again."""

    owner: str
    """Name of the StatefulSet or Deployment; empty for a pod that checks a revision."""
    pods: tuple[tuple[str, str], ...]
    """(name, uid) of each."""
    reason: str
    force: bool = False
    """Without waiting for their kubelets, which are lost."""


@dataclass(frozen=True, slots=True)
class Signal:
    """Send one control signal. A coordinator handles an operation id once, so sending it again is safe. While the id is
    unanswered on this process's link, a repeated `Signal` does nothing."""

    kind: SignalKind
    operation_id: str
    fence: int
    expected_engines: int
    """Number of engines registered at the decision; the coordinator rejects the signal if it has fewer."""
    engine: str | None = None
    """Name of the engine (DRAIN only); None means all."""
    source: str | None = None
    """UPDATE_WEIGHTS: source of the weights."""
    epoch: int | None = None
    """UPDATE_WEIGHTS: epoch of the weights, absolute."""
    adapters: tuple[Adapter, ...] | None = None
    """SET_ADAPTERS: all adapters."""
    deadline_seconds: float | None = None
    """Deadline of the coordinator; None means its default."""


@dataclass(frozen=True, slots=True)
class AskCanary:
    """Send a canary completion to one engine and check its answer. Idempotent: while one is unanswered, a repeated
    `AskCanary` does nothing."""

    engine: str
    revision: str
    model: str
    """`--model` of the engine: the expected answer of a builtin model is known."""


@dataclass(frozen=True, slots=True)
class EmitEvent:
    """A Kubernetes Event on the custom resource."""

    type: str
    """`Normal` or `Warning`."""
    reason: str
    message: str


OnChildren = CreateKeys | AdoptKeys | RotateKeys | ApplyChild | VetChild | CreatePod | DeleteChild | DeletePods
Action = OnChildren | Signal | AskCanary | EmitEvent


@dataclass(frozen=True, slots=True)
class Decision:
    """The actions and the status. The status has the reason and message of the deciding policy."""

    policy: str
    """Name of the first policy that applied."""
    reason: str
    """CamelCase, one of `resource.conditions.Reason`."""
    message: str
    status: Manifest
    """The `.status` to persist if it differs from the stored one. A timestamp changes only with its fact."""
    actions: tuple[Action, ...] = ()
    healing: tuple[Action, ...] = ()
    """The actions that are allowed while the status cannot be written: they replace missing and lost objects."""
    objects: frozenset[ChildRef] = frozenset()
    """The objects that pods need and that the operator does not create. If the World lacks one, the caller reads it and
    decides again."""
    object_seconds: float = OBJECT_SECONDS
    """Interval at which these objects are read again."""
    attentive: bool = False
    """Poll the coordinator faster: it reports the awaited change first."""
    requeue_after: float | None = None
    """Seconds after which the decision may change without an event; None if it needs an event."""
