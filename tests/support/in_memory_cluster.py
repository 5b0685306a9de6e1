"""A fake cluster in memory: an API server, pods and a coordinator as plain data.

`Cluster.step()` is one pass of the operator; `Cluster.tick()` advances everything else by one step. An illegal signal
fails the test with an AssertionError, so no test needs to check for it.
"""

from __future__ import annotations

import base64
import itertools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Self

import zmq

from megatron_operator.cluster.keys import keys_view, new_keys_secret, rotation_patch
from megatron_operator.decision.actions import (
    ApplyChild,
    AskCanary,
    CreateKeys,
    CreatePod,
    Decision,
    DeleteChild,
    DeletePods,
    EmitEvent,
    RotateKeys,
    Signal,
    VetChild,
)
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
from megatron_operator.decision.decide import decide
from megatron_operator.decision.reduce import lost_since, reduce_child, reduce_pod
from megatron_operator.decision.world import ApplyRejection, ChildRef, ChildView, KeysView, ResourceSnapshot, World
from megatron_operator.render.context import RenderContext
from megatron_operator.resource.names import ANNOTATION_SERVER_KEY
from megatron_operator.resource.pod_policy import PodPolicy
from megatron_operator.resource.settings import Settings
from megatron_operator.resource.spec import parse_stored_spec
from megatron_operator.resource.states import (
    LEGAL_SIGNALS,
    SIGNAL_TARGET,
    CoordinatorState,
    EngineState,
    OperationOutcome,
    SignalKind,
)
from megatron_operator.resource.status import MegatronInferenceStatus
from megatron_operator.resource.text import stamp_seconds
from megatron_runtime.protocol.adapters import Adapter
from megatron_runtime.transport.security import KeyPair

START = datetime(2026, 1, 1, tzinfo=UTC)
OWNER_UID = "owner-uid"
GRACE_SECONDS = 30
LANDS: dict[SignalKind, EngineState] = {
    SignalKind.PAUSE: EngineState.PAUSED,
    SignalKind.UNPAUSE: EngineState.RUNNING,
    SignalKind.SUSPEND: EngineState.SUSPENDED,
    SignalKind.RESUME: EngineState.PAUSED,
}
JOINS: dict[CoordinatorState, EngineState] = {
    CoordinatorState.RUNNING: EngineState.RUNNING,
    CoordinatorState.PAUSED: EngineState.PAUSED,
    CoordinatorState.SUSPENDED: EngineState.SUSPENDED,
}


@dataclass
class FakeEngine:
    state: EngineState
    revision: str
    uid: str
    draining: bool = False
    serving: bool = True
    suspect: bool = False
    in_flight: int = 0
    epoch: int = 0
    source: str | None = ""
    digest: str = ""
    weights_unavailable: str | None = None


@dataclass
class FakeCoordinator:
    state: CoordinatorState = CoordinatorState.RUNNING
    fence: int = 0
    engines: dict[str, FakeEngine] = field(default_factory=dict)
    operations: dict[str, OperationReport] = field(default_factory=dict)
    begun: list[Signal] = field(default_factory=list)
    """Every started operation, once."""
    open: Signal | None = None
    all_draining: bool = False
    queue: int = 0
    idle: float = 0.0
    epoch: int = 0
    sources: list[str] = field(default_factory=list)
    source_revisions: set[str] = field(default_factory=set)
    """Revisions of the engines that were updated in place; their successors adopt the last source."""
    bad_sources: set[str] = field(default_factory=set)
    canaries: dict[str, CanaryReport] = field(default_factory=dict)
    keys: KeysInUse | None = None
    failed_requests: list[FailedRequestReport] = field(default_factory=list)
    formats: FormatsReport | None = None
    adapters: tuple[Adapter, ...] | None = ()
    adapter_errors: dict[str, str] = field(default_factory=dict)
    """Why an engine has not loaded an adapter of the list, by name."""
    reports_adapter_errors: bool = True
    """Whether a failed SET_ADAPTERS names the adapters that cannot be loaded."""

    def receive(self, signal: Signal) -> None:
        if signal.operation_id in self.operations:
            return
        assert signal.fence >= self.fence, f"stale fence {signal.fence} < {self.fence}"
        assert self.open is None, f"{signal.kind} while {self.open} is under way"
        assert signal.kind in LEGAL_SIGNALS[self.state], f"illegal: {signal.kind} in {self.state}"
        assert signal.expected_engines <= len(self.engines), "expects engines that are not registered"
        self.fence = signal.fence
        self.begun.append(signal)
        self.open = signal
        self.operations[signal.operation_id] = OperationReport(OperationOutcome.IN_PROGRESS)
        if signal.kind is SignalKind.DRAIN:
            self.all_draining = signal.engine is None
            for name, engine in self.engines.items():
                engine.draining = engine.draining or signal.engine in (None, name)

    def finish(self) -> None:
        """Confirm the operation in progress on all ranks."""
        if self.open is None:
            return
        bad = [each for each in self.open.adapters or () if each.source in self.bad_sources]
        if bad:
            causes = {each.name: f"adapter {each.name!r} from {each.source}: no such file" for each in bad}
            errors = {name: f"demo-engine-0: {cause}" for name, cause in causes.items()}
            message = f"ENGINE_FAILED: demo-engine-0: {'; '.join(causes.values())}"
            self.fail(message, code=500, adapter_errors=errors if self.reports_adapter_errors else {})
            return
        if self.open.source in self.bad_sources:
            self.fail(f"rank 0: no weights at {self.open.source}")
            return
        signal, self.open = self.open, None
        if signal.adapters is not None:
            self.adapters = signal.adapters
            self.adapter_errors.clear()
        if signal.epoch is not None:
            self.epoch = signal.epoch
            self.sources.append(str(signal.source))
            self.source_revisions = {engine.revision for engine in self.engines.values()}
            for engine in self.engines.values():
                engine.epoch, engine.source = self.epoch, self.sources[-1]
        ranks = len(self.engines)
        self.operations[signal.operation_id] = OperationReport(
            OperationOutcome.CONFIRMED, confirmed_ranks=ranks, total_ranks=ranks
        )
        if signal.kind is SignalKind.STOP:
            self.engines.clear()
        for engine in self.engines.values():
            engine.state = LANDS.get(signal.kind, engine.state)
        if signal.kind in (SignalKind.UNPAUSE, SignalKind.STOP) and self.all_draining:
            self.all_draining = False
            for engine in self.engines.values():
                engine.draining = False
        moves = signal.kind is not SignalKind.PAUSE or self.state is CoordinatorState.RUNNING
        if moves and signal.kind in SIGNAL_TARGET:
            self.state = SIGNAL_TARGET[signal.kind]

    def fail(self, message: str, *, code: int = 0, adapter_errors: Mapping[str, str] | None = None) -> None:
        assert self.open is not None
        signal, self.open = self.open, None
        self.operations[signal.operation_id] = OperationReport(
            OperationOutcome.FAILED, message=message, code=code, adapter_errors=adapter_errors or {}
        )

    def snapshot(self) -> CoordinatorSnapshot:
        return CoordinatorSnapshot(
            reachable=True,
            incarnation="1",
            state=self.state,
            epoch=self.epoch,
            idle_seconds=self.idle,
            fence=self.fence,
            operations=dict(self.operations),
            engines=tuple(
                EngineReport(
                    name,
                    engine.state,
                    engine.revision,
                    epoch=engine.epoch,
                    digest=engine.digest,
                    source=engine.source,
                    in_flight=engine.in_flight,
                    serving=engine.serving,
                    suspect=engine.suspect,
                    draining=engine.draining,
                    weights_unavailable=engine.weights_unavailable,
                )
                for name, engine in sorted(self.engines.items())
            ),
            queue_length=self.queue,
            canaries=dict(self.canaries),
            keys=self.keys,
            drained_all=self.all_draining,
            failed_requests=tuple(self.failed_requests),
            formats=self.formats,
            adapters=None if self.adapters is None else tuple(map(self._adapter_report, self.adapters)),
        )

    def _adapter_report(self, adapter: Adapter) -> AdapterReport:
        error = self.adapter_errors.get(adapter.name, "")
        return AdapterReport(adapter.name, adapter.source, len(self.engines) - bool(error), error)


def as_stored(value: Any) -> Any:
    """Return a copy of an object in the form in which the API server would return it."""
    return json.loads(json.dumps(value))


class Cluster:
    """One resource and its environment."""

    def __init__(
        self,
        spec: dict[str, Any],
        *,
        name: str = "demo",
        image: str = "runtime:1",
        security: bool = True,
        pod_policy: PodPolicy | None = None,
    ) -> None:
        self.name = name
        self.spec = as_stored(spec)
        self.settings = Settings(runtime_image=image, security=security, pod_policy=pod_policy or PodPolicy())
        self.generation = 1
        self.restarted_at = ""
        self.update_to = ""
        self.may_update = True
        self.status: dict[str, Any] = {}
        self.objects: dict[ChildRef, dict[str, Any]] = {}
        self.unverified: set[ChildRef] = set()
        self.pods: dict[str, dict[str, Any]] = {}
        self.nodes: dict[str, dict[str, Any]] = {}
        """Nodes whose kubelet does not answer, by name; they may be ready. Pods on them are deleted only by force."""
        self.coordinator: FakeCoordinator | None = None
        self.rejections: dict[ChildRef, ApplyRejection] = {}
        self.reject: set[ChildRef] = set()
        self.vetted: dict[ChildRef, str] = {}
        self.failed_creations: dict[str, str] = {}
        self.missing_since: dict[str, datetime] = {}
        self.now = self.known_at = START
        self.term = 1
        self.ids = itertools.count(1)
        self.uids = itertools.count(1)
        self.events: list[EmitEvent] = []
        self.status_writes = 0
        self.broken_engines: set[str] = set()
        self.broken_servers = False
        """Whether servers that start from now on never become ready."""
        self.named: dict[ChildRef, frozenset[str] | None] = {}
        """Keys of objects that pods need and that the operator does not create; None: the object does not exist."""
        self.wrong_engines: set[str] = set()
        self.check: Callable[[list[str]], tuple[int, str] | None] = lambda arguments: (0, "")
        """Returns exit code and termination message of a check pod with these arguments; None: it runs on."""
        self.checked: list[str] = []
        self.asked: list[str] = []
        self.log: list[str] = []
        self.deleted_pods: list[str] = []
        """Pods that the operator deleted, without check pods."""
        self.admin = KeyPair.generate()
        self.kubelet_brings_keys = True

    # --- The user -----------------------------------------------------------------------------------------------

    def patch(self, **fields: Any) -> None:
        """Merge top-level spec fields."""
        for key, value in fields.items():
            current = self.spec.get(key)
            self.spec[key] = {**current, **value} if isinstance(value, dict) and isinstance(current, dict) else value
        self.generation += 1

    # --- The operator -------------------------------------------------------------------------------------------

    def world(self) -> World:
        views: dict[ChildRef, ChildView] = {}
        for ref, obj in self.objects.items():
            views[ref] = reduce_child(self.seen(obj), owner_uid=OWNER_UID, verified=ref not in self.unverified)
        spec, unknown_fields = parse_stored_spec(self.spec)
        return World(
            resource=ResourceSnapshot(
                name=self.name,
                namespace="default",
                uid=OWNER_UID,
                generation=self.generation,
                spec=spec,
                unknown_fields=unknown_fields,
                status=as_stored(self.status),
                restarted_at=self.restarted_at,
                update_to=self.update_to,
            ),
            settings=self.settings,
            now=self.now,
            new_operation_id=f"op-{next(self.ids)}",
            term=self.term,
            children=views,
            pods=tuple(reduce_pod(pod) for pod in self.pods.values()),
            coordinator=self._snapshot(),
            keys=self._keys_view(),
            rejections=dict(self.rejections),
            vetted=dict(self.vetted),
            failed_creations=dict(self.failed_creations),
            unregistered_seconds=self._unregistered(),
            lost_nodes={name: since for name, node in self.nodes.items() if (since := lost_since(node)) is not None},
            may_update=self.may_update,
            objects=dict(self.named),
        )

    def seen(self, obj: dict[str, Any]) -> dict[str, Any]:
        """Return an object as the API server shows it: a StatefulSet with the counts of its pods."""
        if obj["kind"] != "StatefulSet":
            return obj
        name = obj["metadata"]["name"]
        pods = [reduce_pod(pod) for key, pod in self.pods.items() if key.rpartition("-")[0] == name]
        ready = sum(pod.ready and not pod.deleting for pod in pods)
        return {"status": {"replicas": len(pods), "readyReplicas": ready}, **obj}

    def _snapshot(self) -> CoordinatorSnapshot:
        found = self.coordinator
        if found is not None and found.state is not CoordinatorState.RECOVERING:
            self.known_at = self.now
        snapshot = CoordinatorSnapshot(error="rejected") if found is None else found.snapshot()
        return replace(snapshot, unknown_seconds=(self.now - self.known_at).total_seconds())

    def _unregistered(self) -> dict[str, float]:
        coordinator = self.coordinator
        known = coordinator is not None and coordinator.state is not CoordinatorState.RECOVERING
        named = {pod["metadata"]["labels"].get("inference.megatron.dev/engine") for pod in self.pods.values()} - {None}
        missing = named - set(coordinator.engines) if coordinator is not None and known else set()
        self.missing_since = {name: self.missing_since.get(name, self.now) for name in missing}
        return {name: (self.now - since).total_seconds() for name, since in self.missing_since.items()}

    def _keys_view(self) -> KeysView | None:
        secret = self.objects.get(self.secret)
        if secret is None or not reduce_child(secret, owner_uid=OWNER_UID).owned:
            return None
        return keys_view(secret, self.admin)

    @property
    def secret(self) -> ChildRef:
        return ChildRef("Secret", f"{self.name}-keys")

    def step(self, *, crash_after: int | None = None) -> Decision:
        """Make one pass: decide, persist, act. Objects are replaced, not changed.

        crash_after: number of actions after which the operator is killed.
        """
        decision = decide(self.world())
        MegatronInferenceStatus.model_validate(decision.status)
        if decision.status != self.status:
            self.status = as_stored(decision.status)
            self.status_writes += 1
        self.log.append(f"{decision.policy}: {decision.message}")
        for number, action in enumerate(decision.actions):
            if crash_after is not None and number >= crash_after:
                break
            self.act(action)
        return decision

    def act(self, action: Any) -> None:
        if isinstance(action, CreateKeys):
            ctx = RenderContext(self.name, "default", OWNER_UID, parse_stored_spec(self.spec)[0], self.settings)
            now = stamp_seconds(self.now)
            self._store(new_keys_secret(ctx, self.admin, generation=action.generation, since=now))
        elif isinstance(action, RotateKeys):
            patch = rotation_patch(self.objects[self.secret], action, self.admin, now=stamp_seconds(self.now))
            if patch is not None:
                secret = self.objects[self.secret]
                metadata = secret["metadata"]
                annotations = metadata["annotations"] | patch["metadata"]["annotations"]
                self.objects[self.secret] = {
                    **secret,
                    "data": patch["data"],
                    "metadata": {**metadata, "annotations": annotations},
                }
        elif isinstance(action, ApplyChild | VetChild):
            if action.ref in self.reject:
                self.rejections[action.ref] = ApplyRejection(action.hash, 422, "spec.template is wrong", self.now)
                return
            self.rejections.pop(action.ref, None)
            if isinstance(action, VetChild):
                self.vetted[action.ref] = action.hash
                return
            self.unverified.discard(action.ref)
            self._store(action.manifest)
        elif isinstance(action, CreatePod):
            if action.ref in self.reject:
                self.rejections[action.ref] = ApplyRejection(action.hash, 403, "exceeded quota: none", self.now)
                return
            self.rejections.pop(action.ref, None)
            self.create_pod(action.manifest)
        elif isinstance(action, DeleteChild):
            assert self.objects[action.ref]["metadata"]["uid"] == action.uid
            del self.objects[action.ref]
        elif isinstance(action, DeletePods):
            for name, uid in action.pods:
                assert self.pods[name]["metadata"]["uid"] == uid
                self._delete_pod(name, force=action.force)
        elif isinstance(action, Signal):
            assert self.coordinator is not None
            assert (self.status["lifecycle"]["operationId"], self.status["lifecycle"]["phase"]) == (
                action.operation_id,
                "Submitted",
            ), "a signal must not leave before its intent is persisted"
            self.coordinator.receive(action)
        elif isinstance(action, AskCanary):
            assert self.coordinator is not None
            wrong = action.engine in self.wrong_engines
            report = CanaryReport(action.revision, ok=not wrong, message="log-prob nan" if wrong else "")
            self.coordinator.canaries[action.engine] = report
            self.asked.append(action.engine)
        else:
            self.events.append(action)

    def put(self, manifest: dict[str, Any]) -> None:
        """Store an applied object."""
        self._store(manifest)

    def create_pod(self, manifest: dict[str, Any]) -> dict[str, Any]:
        """Create a check pod: the only pods that the operator creates itself."""
        pod = as_stored(manifest)
        assert pod["metadata"]["name"] not in self.pods, "the pod exists"
        assert not any(_is_check(other) for other in self.pods.values()), "two checks at once"
        created = {"uid": f"uid-{next(self.uids)}", "creationTimestamp": stamp_seconds(self.now)}
        pod["metadata"] |= {**created, "resourceVersion": "2"}
        pod["status"] = {"phase": "Pending"}
        self.pods[pod["metadata"]["name"]] = pod
        self.checked.append(pod["metadata"]["labels"]["inference.megatron.dev/revision"])
        return pod

    def remove(self, kind: str, name: str, uid: str, *, force: bool = False) -> None:
        """Delete an object or pod if the uid matches."""
        if kind == "Pod":
            if self.pods[name]["metadata"]["uid"] == uid:
                self._delete_pod(name, force=force)
            return
        for ref, obj in list(self.objects.items()):
            if (ref.kind, ref.name) == (kind, name) and obj["metadata"]["uid"] == uid:
                del self.objects[ref]

    def _store(self, manifest: dict[str, Any]) -> None:
        obj = as_stored(manifest)
        ref = ChildRef(obj["kind"], obj["metadata"]["name"], obj["apiVersion"])
        known = self.objects.get(ref)
        obj["metadata"]["uid"] = known["metadata"]["uid"] if known else f"uid-{next(self.uids)}"
        obj["metadata"].setdefault("resourceVersion", "2")
        self.objects[ref] = obj

    def lose_node(self, engine: str, *, ready: str = "Unknown") -> None:
        """Lose the node of the pods of an engine, which Kubernetes then evicts. ready: status of its condition."""
        condition = {"type": "Ready", "status": ready, "lastTransitionTime": stamp_seconds(self.now)}
        self.nodes[f"node-of-{engine}"] = {"metadata": {}, "status": {"conditions": [condition]}}
        for name in self.engine_pods():
            if name.startswith(f"{engine}-"):
                self.pods[name]["spec"]["nodeName"] = f"node-of-{engine}"
                self._remove_pod(name)

    # --- Kubernetes, engines and the coordinator ----------------------------------------------------------------

    def tick(self, *, finish: bool = True) -> None:
        """Advance Kubernetes, engines and the coordinator by one step."""
        self.now += timedelta(seconds=1)
        self._reconcile_pods()
        if any(pod["metadata"]["labels"]["app.kubernetes.io/component"] == "coordinator" for pod in self.pods.values()):
            self.coordinator = self.coordinator or FakeCoordinator()
        if self.coordinator is not None:
            if finish:
                self.coordinator.finish()
            self._register()
            if self.kubelet_brings_keys:
                self._bring_keys(self.coordinator)

    def _bring_keys(self, coordinator: FakeCoordinator) -> None:
        """Update mounted Secrets. Engines and servers reload their keys at once, the coordinator only at its start."""
        secret = self.objects.get(self.secret)
        if secret is None:
            return
        files = {name: base64.b64decode(text).decode().split() for name, text in secret["data"].items()}
        own = zmq.curve_public(files["server.key"][0].encode()).decode()
        admitted = frozenset(key for name, keys in files.items() if name.endswith(".pub") for key in keys)
        pairs = (zmq.curve_public(files[f"{role}.key"][0].encode()).decode() for role in ("engine", "client"))
        server = own if coordinator.keys is None else coordinator.keys.server
        coordinator.keys = KeysInUse(server, admitted, frozenset(pairs))

    def _reconcile_pods(self) -> None:
        wanted: dict[str, dict[str, Any]] = {}
        for ref, obj in self.objects.items():
            if ref.name == f"{self.name}-server" and ref.kind == "Deployment":
                self._roll_out_servers(obj)
                wanted |= {name: pod for name, pod in self.pods.items() if name.startswith(f"{ref.name}-")}
                continue
            if ref.kind == "Deployment":
                count = obj["spec"].get("replicas", 1)
                obj["status"] = {"replicas": count, "updatedReplicas": count, "readyReplicas": count}
            if ref.kind in ("Deployment", "StatefulSet"):
                for index in range(obj["spec"].get("replicas", 1)):
                    wanted[f"{ref.name}-{index}"] = {"template": obj["spec"]["template"], "index": index}
        for pod in self.pods.values():
            if _is_check(pod):
                wanted[pod["metadata"]["name"]] = {"template": pod, "index": 0}
                self._run_check(pod)
        for name in set(self.pods) - set(wanted):
            if "deletionTimestamp" not in self.pods[name]["metadata"]:
                self._remove_pod(name)
        for name, made in wanted.items():
            server_key = (made["template"]["metadata"].get("annotations") or {}).get(ANNOTATION_SERVER_KEY)
            if name in self.pods and self.pods[name]["metadata"].get("server_key") != server_key:
                self.restart_coordinator(name)
            if name not in self.pods:
                self.pods[name] = self._pod(name, made["template"], made["index"])

    def _roll_out_servers(self, deployment: dict[str, Any]) -> None:
        """Replace servers one after another.

        A new server becomes ready in the tick after its creation, unless `broken_servers` is set. Then an old server is
        deleted.
        """
        name, template = deployment["metadata"]["name"], deployment["spec"]["template"]
        count = deployment["spec"].get("replicas", 1)
        pods = {key: pod for key, pod in self.pods.items() if key.startswith(f"{name}-")}
        new = {key for key, pod in pods.items() if pod["template"] == template}
        old = sorted(set(pods) - new)
        ready = {key for key, pod in pods.items() if reduce_pod(pod).ready}
        for key in sorted(new):
            if not self.broken_servers and pods[key].pop("starting", False):
                pods[key]["status"] = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
        for key in old[: max(0, len(old) + len(new & ready) - count)]:
            self._remove_pod(key)
        for key in sorted(new)[count:]:
            self._remove_pod(key)
        if len(new) < count and (not old or new <= ready):
            free = (f"{name}-{index}" for index in itertools.count() if f"{name}-{index}" not in pods)
            for key in itertools.islice(free, 1 if old else count - len(new)):
                self.pods[key] = {**self._pod(key, template, 0), "template": as_stored(template)}
                if old or self.broken_servers:
                    self.pods[key] |= {"starting": True, "status": {"phase": "Running"}}
        pods = {key: pod for key, pod in self.pods.items() if key.startswith(f"{name}-")}
        deployment["status"] = {
            "replicas": len(pods),
            "updatedReplicas": sum(pod["template"] == template for pod in pods.values()),
            "readyReplicas": sum(reduce_pod(pod).ready for pod in pods.values()),
        }

    def _run_check(self, pod: dict[str, Any]) -> None:
        (container,) = pod["spec"]["containers"]
        found = self.check(container["args"])
        if found is None and pod["status"] == {"phase": "Pending"}:
            pod["status"] = {"phase": "Running"}
        if found is None or pod["status"]["phase"] not in ("Pending", "Running"):
            return
        code, message = found
        ended = {"exitCode": code, "reason": "Error" if code else "Completed", "message": message, "finishedAt": "x"}
        state = {"name": container["name"], "restartCount": 0, "state": {"terminated": ended}}
        pod["status"] = {"phase": "Failed" if code else "Succeeded", "containerStatuses": [state]}

    def _pod(self, name: str, template: dict[str, Any], index: int) -> dict[str, Any]:
        labels = {**template["metadata"]["labels"], "apps.kubernetes.io/pod-index": str(index)}
        broken = labels.get("inference.megatron.dev/engine") in self.broken_engines
        ready = {"type": "Ready", "status": "False" if broken else "True"}
        status: dict[str, Any] = {"phase": "Running", "conditions": [ready]}
        if broken:
            waiting = {"waiting": {"reason": "CrashLoopBackOff"}}
            ended = {"exitCode": 3, "reason": "Error", "message": "no such weights", "finishedAt": "x"}
            status["containerStatuses"] = [{"restartCount": 3, "state": waiting, "lastState": {"terminated": ended}}]
            status["containerStatuses"][0]["name"] = template["spec"]["containers"][0]["name"]
        metadata = {"name": name, "uid": f"uid-{next(self.uids)}", "labels": labels}
        metadata["annotations"] = template["metadata"].get("annotations") or {}
        metadata["server_key"] = metadata["annotations"].get(ANNOTATION_SERVER_KEY)
        kept = ("affinity", "containers", "initContainers")
        spec = {key: template["spec"][key] for key in kept if key in template["spec"]}
        return {"metadata": metadata, "spec": spec, "status": status}

    def restart_coordinator(self, pod: str) -> None:
        """Restart the coordinator. It recovers its state from the engines and reads its key from the current files."""
        assert self.coordinator is not None
        self._remove_pod(pod)
        self.coordinator.keys = None
        self.log.append("the coordinator is restarted")

    def _delete_pod(self, name: str, *, force: bool = False) -> None:
        if not _is_check(self.pods[name]):
            self.deleted_pods.append(name)
        self._remove_pod(name, force=force)

    def _remove_pod(self, name: str, *, force: bool = False) -> None:
        pod = self.pods[name]
        if pod["spec"].get("nodeName") in self.nodes and not force:
            ends = stamp_seconds(self.now + timedelta(seconds=GRACE_SECONDS))
            pod["metadata"] |= {"deletionTimestamp": ends, "deletionGracePeriodSeconds": GRACE_SECONDS}
        else:
            del self.pods[name]
        engine = pod["metadata"]["labels"].get("inference.megatron.dev/engine")
        if engine and self.coordinator:
            self.coordinator.engines.pop(engine, None)

    def _register(self) -> None:
        assert self.coordinator is not None
        if self.coordinator.open is not None or self.coordinator.state not in JOINS:
            return
        for pod in self.pods.values():
            labels = pod["metadata"]["labels"]
            name = labels.get("inference.megatron.dev/engine")
            if pod["metadata"].get("deletionTimestamp"):
                continue
            if not name or name in self.broken_engines or labels["apps.kubernetes.io/pod-index"] != "0":
                continue
            others = (other["metadata"]["labels"] for other in self.pods.values())
            ranks = [other for other in others if other.get("inference.megatron.dev/engine") == name]
            if {each["inference.megatron.dev/revision"] for each in ranks} != {
                labels["inference.megatron.dev/revision"]
            }:
                continue  # pods of two revisions form no process group
            known = self.coordinator.engines.get(name)
            if known is None or known.uid != pod["metadata"]["uid"]:
                revision = labels["inference.megatron.dev/revision"]
                state = JOINS[self.coordinator.state]
                self.coordinator.engines[name] = FakeEngine(
                    state,
                    revision,
                    pod["metadata"]["uid"],
                    draining=self.coordinator.all_draining,
                    epoch=self.coordinator.epoch,
                    source=self.coordinator.sources[-1] if revision in self.coordinator.source_revisions else "",
                )

    def settle(self, *, limit: int = 80) -> Decision:
        """Make passes and ticks until nothing changes."""
        quiet = 0
        decision = self.step()
        for _ in range(limit):
            before = (self.status, len(self.objects), set(self.pods))
            self.tick()
            decision = self.step()
            acted = any(not isinstance(action, EmitEvent) for action in decision.actions)
            soon = decision.requeue_after is not None and decision.requeue_after < 10
            same = before == (self.status, len(self.objects), set(self.pods))
            quiet = quiet + 1 if same and not acted and not soon else 0
            if quiet == 3:
                return decision
        raise AssertionError("did not settle:\n" + "\n".join(self.log[-12:]))

    def play(self, passes: int) -> None:
        """Make passes, with a tick after each."""
        for _ in range(passes):
            self.step()
            self.tick()

    def play_until(self, done: Callable[[], object], *, limit: int = 40) -> None:
        """Make passes and ticks until `done` is true."""
        for _ in range(limit):
            if done():
                return
            self.play(1)
        raise AssertionError("\n".join(self.log[-8:]))

    def settled(self) -> Self:
        """Settle, and return this cluster."""
        self.settle()
        return self

    def change(self, **fields: Any) -> None:
        """Merge top-level spec fields, and settle."""
        self.patch(**fields)
        self.settle()

    # --- State for assertions -----------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        return str(self.status.get("state"))

    def condition(self, kind: str) -> dict[str, Any]:
        return next(entry for entry in self.status["conditions"] if entry["type"] == kind)

    def signals(self) -> list[str]:
        assert self.coordinator is not None
        return [
            f"{signal.kind.value} {signal.engine}" if signal.engine else signal.kind.value
            for signal in self.coordinator.begun
        ]

    def engine_pods(self) -> list[str]:
        return sorted(name for name, pod in self.pods.items() if reduce_pod(pod).component == "engine")


def _is_check(pod: dict[str, Any]) -> bool:
    found: bool = pod["metadata"]["labels"]["app.kubernetes.io/component"] == "check"
    return found


MINIMAL: dict[str, Any] = {"model": {"source": {"builtin": "smollm2-135m"}}}
