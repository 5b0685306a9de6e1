"""The result of a decision: a sequence of actions, and the status to write.

Every action is idempotent. The outcome of an action is part of the next World.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_operator.decision.world import OBJECT_SECONDS, ChildRef, Manifest, manifest_hash
from megatron_operator.resource.states import KeyStage, SignalKind
from megatron_runtime.protocol.adapters import Adapter


@dataclass(frozen=True, slots=True)
class CreateKeys:
    """An action that creates the Secret `NAME-keys` with new CURVE pairs, or replaces keys that cannot be read.

    See `render.keys.keys_secret`.
    """

    name: str
    generation: int = 1


@dataclass(frozen=True, slots=True)
class AdoptKeys:
    """An action that makes the resource the owner of the Secret `NAME-keys`.

    The operator created this Secret for an earlier resource of the same name.
    """

    name: str


@dataclass(frozen=True, slots=True)
class RotateKeys:
    """An action that moves the Secret `NAME-keys` to `stage` of the rotation to `generation`.

    The Secret must be at the previous stage. The action also makes this operator's admin key the only accepted admin
    key and, with `has_trainer`, adds a key pair for a trainer. It does nothing if the Secret is already in this state.
    """

    name: str
    generation: int
    stage: KeyStage
    has_trainer: bool = False


@dataclass(frozen=True, slots=True)
class OnManifest:
    """Base class of the actions that have the manifest of a child."""

    manifest: Manifest

    @property
    def ref(self) -> ChildRef:
        return ChildRef.of(self.manifest)

    @property
    def hash(self) -> str:
        """The manifest's hash annotation.

        An `ApplyRejection` records the hash if the API server rejects the manifest.
        """
        return manifest_hash(self.manifest)


class ApplyChild(OnManifest):
    """An action that applies a manifest server-side.

    The apply is never forced on an object that lacks the resource's owner UID.
    """


class VetChild(OnManifest):
    """An action that applies a manifest in a dry run.

    The operator does this before it drains an engine, so that no engine is drained for a template that the API server
    rejects. The next World has the answer in `vetted` or `rejections`.
    """


class CreatePod(OnManifest):
    """An action that creates a pod, unless an object already has its name."""


@dataclass(frozen=True, slots=True)
class DeleteChild:
    """An action that deletes a child with background propagation. The child's UID is a precondition."""

    ref: ChildRef
    uid: str
    reason: str


@dataclass(frozen=True, slots=True)
class DeletePods:
    """An action that deletes several pods at the same time.

    Each pod's UID is a precondition. The StatefulSet or Deployment of the pods creates them again.
    """

    owner: str
    """Name of the StatefulSet or Deployment; empty for a pod that checks a revision."""
    pods: tuple[tuple[str, str], ...]
    """Name and UID of each pod."""
    reason: str
    force: bool = False
    """Delete the pods without waiting for their kubelets, which are lost."""


@dataclass(frozen=True, slots=True)
class Signal:
    """An action that sends one control signal.

    A coordinator executes each operation id once, so the signal can safely be sent again. If this process has sent the
    signal and is waiting for the answer, the action does nothing.
    """

    kind: SignalKind
    operation_id: str
    fence: int
    expected_engines: int
    """Number of engines that were registered at the decision. The coordinator rejects the signal if it has fewer
    engines.
    """
    engine: str | None = None
    """Name of the engine (DRAIN only); None means all."""
    source: str | None = None
    """UPDATE_WEIGHTS: source of the weights."""
    epoch: int | None = None
    """UPDATE_WEIGHTS: epoch of the weights, an absolute number."""
    adapters: tuple[Adapter, ...] | None = None
    """SET_ADAPTERS: all adapters."""
    deadline_seconds: float | None = None
    """Deadline of the coordinator; None means its default."""


@dataclass(frozen=True, slots=True)
class AskCanary:
    """An action that sends a canary completion to one engine and checks its answer.

    While the canary is unanswered, a repeated action does nothing. The action is therefore idempotent.
    """

    engine: str
    revision: str
    model: str
    """`--model` of the engine. For a builtin model the expected answer is known."""


@dataclass(frozen=True, slots=True)
class EmitEvent:
    """An action that writes a Kubernetes Event on the custom resource."""

    type: str
    """`Normal` or `Warning`."""
    reason: str
    message: str


OnChildren = CreateKeys | AdoptKeys | RotateKeys | ApplyChild | VetChild | CreatePod | DeleteChild | DeletePods
Action = OnChildren | Signal | AskCanary | EmitEvent


@dataclass(frozen=True, slots=True)
class Decision:
    """The actions to execute and the status to write. The status has the reason and message of the deciding policy."""

    policy: str
    """Name of the first policy that applied."""
    reason: str
    """Reason in CamelCase, a value of `resource.conditions.Reason`."""
    message: str
    status: Manifest
    """The `.status` to persist if it differs from the stored one. A timestamp changes only with its fact."""
    actions: tuple[Action, ...] = ()
    healing: tuple[Action, ...] = ()
    """The actions that are allowed while the status cannot be written. They replace missing and lost objects."""
    objects: frozenset[ChildRef] = frozenset()
    """The objects that pods need and that the operator does not create. If the World lacks one, the caller reads it and
    decides again."""
    object_seconds: float = OBJECT_SECONDS
    """Interval at which these objects are read again."""
    attentive: bool = False
    """Whether to poll the coordinator faster, because it is the first to report the awaited change."""
    requeue_after: float | None = None
    """Seconds after which the decision may change without an event; None if only an event can change it."""
