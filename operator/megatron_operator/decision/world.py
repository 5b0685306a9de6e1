"""The input of a decision: one frozen snapshot of everything that was observed. It uses no I/O and no clock.

`decide` reads a `World` and returns a `Decision` (see actions.py). The caller proceeds in this order:

    world = observe()                 # one consistent snapshot
    decision = decide(world)
    persist(decision.status)          # only if it differs from world.resource.status; with the resourceVersion
                                      # if that fails, act(decision.healing) instead of what follows
    act(decision.actions)             # in order; stop at the first that fails; the outcome is the next observation

This order makes the intent of a verb durable before its signal is sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

from megatron_operator.decision.coordinator_snapshot import UNREACHABLE, CoordinatorSnapshot
from megatron_operator.resource.names import ANNOTATION_HASH, ENGINE
from megatron_operator.resource.states import CoordinatorState, KeyStage
from megatron_runtime.protocol.limits import MAX_FENCE

if TYPE_CHECKING:  # explain() runs without pydantic
    from megatron_operator.resource.settings import Settings
    from megatron_operator.resource.spec import MegatronInferenceSpec

MAX_FENCE_JUMP = 1_000_000
"""Maximum accepted amount by which a reported fence may exceed this leader's fence. A coordinator reports a higher
fence if leaders of an earlier, deleted Lease had higher terms.
"""

LOST_SECONDS = 4.0
"""Time after which an unregistered engine whose pods have started counts as lost. Within this time, a kubelet reports
the end of a container, and an engine registers with a restarted coordinator.
"""
UNKNOWN_SECONDS = 4.0
"""Time without a coordinator that knows its engines, after which the engines no longer keep their last state. A
restarted coordinator knows the engines earlier. A takeover by a standby takes longer, with 3 s of silence and 1.5 s of
recovery.
"""
POD_EVENTS = frozenset({"FailedMount", "FailedAttachVolume", "FailedMapVolume", "FailedCreatePodSandBox"})
"""Reasons of Events that explain why the containers of a pod are not created."""
UNCONFIGURED = "CreateContainerConfigError"
"""Reason of a container whose Secret or ConfigMap is missing."""
OPTIONAL_SECONDS = 10.0
"""Interval at which the HTTPRoute and InferencePool of a spec are read. They are not watched, because a cluster may
lack their kinds.
"""
EVENT_SECONDS = 5.0
"""Interval at which Events of pods and StatefulSets are read, while only an Event can explain why a pod is missing."""

OBJECT_SECONDS, MISSING_SECONDS = 60.0, 10.0
"""Intervals at which the objects that pods need are read: normally, and while an object may be missing."""
ANY_KEY = "*"
"""Stands for all keys. It is not a valid key of a Secret or ConfigMap."""

Manifest = dict[str, Any]
"""A Kubernetes object as plain data."""


def has_optional_children(spec: MegatronInferenceSpec) -> bool:
    """Return whether a spec has children of kinds that are not watched."""
    return spec.server.http_route is not None or spec.server.inference_pool is not None


def manifest_hash(manifest: Manifest) -> str:
    """Return the hash that `render.context.seal` wrote into a rendered manifest."""
    return str(manifest["metadata"]["annotations"][ANNOTATION_HASH])


@dataclass(frozen=True, slots=True)
class ResourceSnapshot:
    """The custom resource as last read."""

    name: str
    namespace: str
    uid: str
    generation: int
    spec: MegatronInferenceSpec
    """The fields of the spec that this version knows."""
    unknown_fields: tuple[str, ...] = ()
    """Paths of the fields that this version does not know, which belong to a later release."""
    status: Mapping[str, Any] = field(default_factory=dict)
    """`.status` as stored; empty before the first write."""
    deleting: bool = False
    changed_by: str = ""
    """Field manager that last wrote `spec.desiredState`, if known. It is shown in the history."""
    restarted_at: str = ""
    """Annotation `inference.megatron.dev/restarted-at`: time of the last `kubectl megatron restart`."""
    update_to: str = ""
    """Annotation `inference.megatron.dev/update-to`: id of the release of the last `kubectl megatron update`."""

    @property
    def lifecycle(self) -> Mapping[str, Any]:
        """The persisted `status.lifecycle`."""
        return self.status.get("lifecycle") or {}

    def engine_status(self, name: str) -> Mapping[str, Any]:
        """Return the persisted status of an engine. Returns an empty mapping if there is none."""
        return next((entry for entry in self.status.get("engines") or () if entry["name"] == name), {})


@dataclass(frozen=True, slots=True)
class ChildRef:
    """A reference to a child in the resource's namespace."""

    kind: str
    name: str
    api_version: str = "v1"

    @classmethod
    def of(cls, obj: Mapping[str, Any]) -> ChildRef:
        """Return the reference to an object or manifest."""
        return cls(obj["kind"], obj["metadata"]["name"], obj["apiVersion"])

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


@dataclass(frozen=True, slots=True)
class ChildView:
    """A child as observed, reduced to the fields that decisions read (see `decision.reduce.reduce_child`)."""

    ref: ChildRef
    uid: str
    owned: bool = True
    """Whether the child has an owner reference with this resource's UID, or is an orphan that the operator adopts.
    Other objects are never written or deleted.
    """
    orphan: bool = False
    """Whether the child has no owner but has the operator's label. Either the resource was deleted without the child,
    or the child was restored from a backup.
    """
    deleting: bool = False
    hash: str = ""
    """Annotation `inference.megatron.dev/hash`: hash of the last applied manifest, without `spec.replicas` of
    engines.
    """
    revision: str = ""
    """Label `inference.megatron.dev/revision` of the pod template; engines only."""
    model_hash: str = ""
    """Annotation `inference.megatron.dev/model`: hash of the model; engines and the server only."""
    replicas: int = 0
    """`spec.replicas` of a Deployment or StatefulSet."""
    ready_replicas: int = 0
    release: str = ""
    """Annotation `inference.megatron.dev/release` of a Deployment: the release with which it was rendered."""
    inputs: str = ""
    """Annotation `inference.megatron.dev/inputs` of a Deployment: digest of the spec fields that its template uses."""
    rolled_out: bool = True
    """Whether all pods of a StatefulSet are ready, or all pods of a Deployment are ready and have its current
    template.
    """
    unobserved: bool = False
    """Whether `rolled_out` was true for an earlier generation, and the workload's controller has not yet seen the
    current one.
    """
    stuck: str = ""
    """Why the rollout of a Deployment makes no progress: the message of its condition Progressing."""
    creation_error: str = ""
    """Why the pods of a Deployment cannot be created: the message of its condition ReplicaFailure."""
    offer: tuple[str, str] = ("", "")
    """Scheme and model name in the template of the servers' Deployment (see `decision.reduce.offer`)."""
    data: Mapping[str, Any] | None = None
    """`data` of a ControllerRevision, which has the inputs of that revision's engines."""
    owned_fields: str = ""
    """The fields that this operator's last apply owns, as JSON (`fieldsV1`). A program that changes one of these fields
    becomes its owner.
    """
    verified: bool = True
    """Whether this process has applied this object since its start and still owns the same fields. Otherwise the child
    is applied again even if its hash is current, unless `owned_fields` has every field of the manifest.
    """


DOWNLOAD_SECONDS = 10.0
"""Interval at which the progress of a download is read and written."""


@dataclass(frozen=True, slots=True)
class Download:
    """Progress of a download to spec.model.cache, as the init container `fetch` of a pod reports it."""

    pod: str
    bytes: int
    """Number of bytes in the cache, including earlier downloads."""
    total_bytes: int
    bytes_per_second: int
    """Average rate of the last 30 seconds; 0 if unknown."""


@dataclass(frozen=True, slots=True)
class Loading:
    """Progress of an engine that loads its weights, as its probes report it. A value of None is unknown."""

    pod: str
    stage: str
    """Download, Verify, Load, Compile or Capture."""
    bytes: int | None = None
    total_bytes: int | None = None
    seconds_left: int | None = None


@dataclass(frozen=True, slots=True)
class PodView:
    """A pod of the resource, reduced to the fields that decisions read (see `decision.reduce.reduce_pod`)."""

    name: str
    uid: str
    component: str
    """`coordinator`, `server`, `engine` or `check`."""
    engine: str = ""
    """Name of the pod's engine and StatefulSet; empty for the other components."""
    index: int = 0
    """Ordinal of the pod within the engine."""
    phase: str = "Pending"
    """The kubelet's phase: `Pending`, `Running`, `Succeeded`, `Failed` or `Unknown`."""
    ready: bool = False
    started: bool = False
    """Whether the pod's containers run and have passed their startup probes, so that the pod has been ready."""
    deleting: bool = False
    revision: str = ""
    weights: str = ""
    """Revision of the weights with which the pod started; empty if the spec has none."""
    restarts: int = 0
    reason: str = ""
    """Reason of the kubelet or scheduler, such as `ImagePullBackOff`, `Unschedulable` or `CrashLoopBackOff`, or empty.
    If the pod's status has no reason, it is the reason of the last Event about a volume or the pod's sandbox, such as
    `FailedMount`.
    """
    message: str = ""
    ended: str = ""
    """Name of the container that terminated last; empty if none did."""
    image: str = ""
    """Image of the container that terminated last, from the pod's spec."""
    exit_code: int | None = None
    """Exit code of the container that terminated last."""
    exit_reason: str = ""
    """Reason of the last termination: `OOMKilled`, `Error`, `Completed`."""
    last_message: str = ""
    """Termination message of the container that terminated last."""
    ended_at: datetime | None = None
    """Time of the last termination, by the clock of the node."""
    ran_seconds: float = 0.0
    """Run time of the container that terminated last."""
    created_at: datetime | None = None
    owner: str = ""
    """UID of the resource that directly owns the pod; empty for the pods of a Deployment or StatefulSet."""
    controller: tuple[str, str] = ("", "")
    """Kind and name of the pod's Deployment, StatefulSet or other controller; both are empty without one."""
    node: str = ""
    """Name of the pod's node; empty before the pod is scheduled."""
    ends_at: datetime | None = None
    """End of the grace period of the pod's deletion; None if it is not being deleted, or was force-deleted."""
    fetching_at: str = ""
    """IP address of the pod while its init container `fetch` runs, otherwise empty."""
    loading_at: str = ""
    """IP address of the pod while its container `engine` runs and is not ready, otherwise empty."""
    offer: tuple[str, str] = ("", "")
    """Scheme and model name of a server's pod (see `decision.reduce.offer`)."""
    avoided: str = ""
    """Nodes that the pod must not use because a device failed there, separated by commas."""

    @property
    def unexplained(self) -> bool:
        """Whether the pod's containers are not created and only Events explain why, because the status has no
        reason.
        """
        return self.phase == "Pending" and not (self.ready or self.deleting) and self.reason in ("", *POD_EVENTS)


@dataclass(frozen=True, slots=True)
class KeysView:
    """The public part of the Secret `NAME-keys` (see `render.keys` for its stages)."""

    generation: int
    stage: KeyStage
    server_generation: int
    """Generation of the coordinator's own key."""
    since: str | None
    """Time at which the generation was created."""
    old: frozenset[str] = frozenset()
    """Public keys of engines and clients that a rotation removes; empty when settled."""
    new: frozenset[str] = frozenset()
    """Public keys of engines and clients in the current generation."""
    server: str = ""
    """Public half of the coordinator's own key. In stage Restarting, the public half of its next key."""
    admin_admitted: bool = True
    """Whether the admin port accepts this operator's admin key."""
    has_trainer: bool = False
    """Whether there is a key pair for a trainer."""


@dataclass(frozen=True, slots=True)
class ApplyRejection:
    """The API server's last rejection of an apply to a child."""

    hash: str
    """Hash of the rejected manifest (`ApplyChild.hash`)."""
    code: int
    """HTTP status of the rejection."""
    message: str
    at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """A conflict with another program over a child. The operator and the program overwrite each other's changes."""

    uid: str
    hash: str
    """Hash of the manifest that the operator applies."""
    replicas: int
    """Replicas in the manifest of a StatefulSet."""
    opponent: str
    """Field manager of the other program; empty if unknown."""
    retry_in: float
    """Seconds until the next apply."""

    def holds(self, manifest: Manifest, child: ChildView | None) -> bool:
        """Return whether the apply of `manifest` must wait, because the other program has reverted the same apply."""
        replicas = manifest["spec"]["replicas"] if manifest["kind"] == "StatefulSet" else 0
        same = (manifest_hash(manifest), replicas) == (self.hash, self.replicas)
        return self.retry_in > 0 and same and child is not None and child.uid == self.uid


@dataclass(frozen=True, slots=True)
class World:
    """The input of a decision: a snapshot of everything that the operator has observed about one custom resource."""

    resource: ResourceSnapshot
    settings: Settings
    now: datetime
    """Current time in UTC, with a time zone."""
    new_operation_id: str
    """A new random id, which is used if this decision starts an operation."""
    term: int = 1
    """Term of this leader, the number of the Lease's acquisition. All resources have the same term."""
    children: Mapping[ChildRef, ChildView] = field(default_factory=dict)
    pods: tuple[PodView, ...] = ()
    coordinator: CoordinatorSnapshot = UNREACHABLE
    keys: KeysView | None = None
    """The keys of the resource; None without security, or before the Secret exists."""
    rejections: Mapping[ChildRef, ApplyRejection] = field(default_factory=dict)
    vetted: Mapping[ChildRef, str] = field(default_factory=dict)
    """For each child, the hash of the manifest that the API server last accepted in a dry run of this process."""
    failed_creations: Mapping[str, str] = field(default_factory=dict)
    """For each StatefulSet, why its pods cannot be created, from the message of its last Event."""
    unregistered_seconds: Mapping[str, float] = field(default_factory=dict)
    """For each engine name, how long this process has observed that the engine is not registered with a coordinator
    that knows its engines.
    """
    lost_nodes: Mapping[str, datetime | None] = field(default_factory=dict)
    """Nodes with engines' pods whose deletion is overdue, if the node is not ready or does not exist. The value is the
    time since which it is not ready, or None if it does not exist.
    """
    download: Download | None = None
    """Progress of the download to spec.model.cache; None if none is in progress, or if the progress is unknown."""
    loading: Loading | None = None
    """Progress of the first engine that loads, while none serves; None if it is unknown."""
    objects: Mapping[ChildRef, frozenset[str] | None] = field(default_factory=dict)
    """For each object that pods need and that the operator does not create, its keys; None if it does not exist. The
    value ANY_KEY means that the operator may not read the object. An object that was not yet read is absent.
    """
    contests: Mapping[ChildRef, Contest] = field(default_factory=dict)
    """Children that another program changes back each time this operator applies them."""
    manager: str = ""
    """Namespace and name of this operator's Lease, which the resource's status names."""
    unwatched: Mapping[str, str] = field(default_factory=dict)
    """Kinds whose objects in the namespace the operator cannot watch, with the reasons. Also contains the keys' kind if
    the keys cannot be read.
    """
    isolated: bool = False
    """Whether this operator lost many coordinators at the same time, so that its own network is the likely cause."""
    waiting: tuple[str, str] = ("", "")
    """Step of the last decision of this process, and the condition that it waits for."""
    waiting_seconds: float = 0.0
    """Time for which `waiting` has not changed, by the monotonic clock of this process."""
    may_update: bool = True
    """Whether the operator's limit of concurrent updates allows this resource to begin an update."""

    def component_pods(self, *components: str) -> list[PodView]:
        return [pod for pod in self.pods if pod.component in components]

    @property
    def downloads(self) -> bool:
        """Whether an init container downloads the model, or waits for another pod that downloads it."""
        return any(pod.fetching_at and not pod.deleting for pod in self.pods)

    @property
    def loads(self) -> bool:
        """Whether no engine serves yet, and an engine may be loading its model and reporting progress."""
        engines = [pod for pod in self.component_pods(ENGINE) if not pod.deleting]
        return any(pod.loading_at for pod in engines) and not any(pod.ready for pod in engines)

    @property
    def membership_known(self) -> bool:
        """Whether the coordinator answers and knows its engines.

        A coordinator that recovers from a restart does not know its engines.
        """
        return self.coordinator.reachable and self.coordinator.state is not CoordinatorState.RECOVERING

    @property
    def fence(self) -> int:
        """Fence of this leader's signals to this resource, which is the leader term plus the resource's offset.

        A later leader has a higher term. The offset never decreases, because each leader writes it with the status
        before it sends a signal, and only on the version of the resource that it has read. The fences of successive
        leaders are therefore ordered for each resource.
        """
        return self.term + self.fence_offset

    @property
    def fence_offset(self) -> int:
        """The offset that is written to the status: the stored offset, or a higher offset.

        If the coordinator has received a higher fence than this leader's fence, the offset is raised by at most
        MAX_FENCE_JUMP.
        """
        return self._stored_offset + self._jump if self.rejected_fence is None else self._stored_offset

    @property
    def rejected_fence(self) -> int | None:
        """The fence that the coordinator reports, if it exceeds this leader's fence by too much.

        The value is None if the fence is acceptable.
        """
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
