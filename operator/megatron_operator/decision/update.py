"""The update of a custom resource to the release of its operator (see `resource.release`).

An upgrade of the operator restarts nothing. While the resource has an earlier release, its pods are rendered with the
images of that release. If this operator renders a Deployment or an engine differently, the child stays unchanged until
its part of the spec changes. An update begins when it is requested, or automatically with `spec.rollout.autoUpdate`.
The operator limits how many resources are updated at the same time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from megatron_operator.decision.world import ChildView, Manifest, World, manifest_hash
from megatron_operator.render.context import digest
from megatron_operator.resource.conditions import Reason
from megatron_operator.resource.names import ANNOTATION_INPUTS, ENGINE
from megatron_operator.resource.release import Release, is_older
from megatron_operator.resource.states import DesiredState, UpdatePhase

BEGUN = frozenset({UpdatePhase.RUNNING.value, UpdatePhase.DEFERRED.value})


@dataclass(frozen=True)
class Update:
    """The update of a custom resource to the operator's release.

    desired: the effective desired state of the resource.
    """

    world: World
    desired: DesiredState

    @cached_property
    def offered(self) -> Release:
        """The release of the operator."""
        return Release.of(self.world.settings, self.world.resource.spec.engine.backend)

    @cached_property
    def recorded(self) -> Release | None:
        """The release of the resource, from its status or, if the status has no release, from a Deployment.

        The value is None for a new resource.
        """
        backend = self.world.resource.spec.engine.backend
        deployments = (view for view in self.world.children.values() if view.owned and view.release)
        found = Release.from_status(self.world.resource.status.get("release"))
        for view in sorted(deployments, key=lambda view: view.ref.name):
            found = found or Release.from_annotation(view.release)
        return None if found is None else found.for_backend(backend, self.world.settings.vllm_runtime_image)

    @cached_property
    def id(self) -> str:
        """Id of the offered release.

        A request for an update contains this id, so it never applies to a later release.
        """
        return digest(self.offered.to_status())

    @cached_property
    def requested(self) -> bool:
        resource = self.world.resource
        return resource.spec.rollout.auto_update or resource.update_to == self.id

    @cached_property
    def deferred(self) -> bool:
        """Whether engines cannot be replaced now.

        This is the case if the rollout is paused, or if the resource is paused or suspended and has engine pods.
        """
        quiet = self.desired in (DesiredState.PAUSED, DesiredState.SUSPENDED)
        pods = any(pod.component == ENGINE for pod in self.world.pods)
        return self.world.resource.spec.rollout.paused or (quiet and pods)

    @cached_property
    def begins(self) -> bool:
        """Whether this decision begins the update."""
        differs = self.recorded is not None and self.recorded != self.offered
        return differs and self.requested and not self.deferred and self.world.may_update

    @cached_property
    def release(self) -> Release:
        """The release with which children are rendered."""
        return self.offered if self.recorded is None or self.begins else self.recorded

    @cached_property
    def available(self) -> bool:
        """Whether the operator has another release than the resource, and no update to this release has begun."""
        return self.release != self.offered

    @cached_property
    def begun(self) -> bool:
        """Whether an update begins now, or has begun and is not yet complete."""
        return self.begins or (self.world.resource.status.get("update") or {}).get("phase") in BEGUN

    def holds(self, manifest: Manifest, view: ChildView | None) -> bool:
        """Return whether the Deployment with this manifest must wait for the update.

        It must wait if its part of the spec has not changed, but this operator renders it differently than the operator
        that applied it.
        """
        if not self.available or view is None or manifest["kind"] != "Deployment":
            return False
        same_inputs = view.inputs == manifest["metadata"]["annotations"][ANNOTATION_INPUTS]
        return same_inputs and view.hash != manifest_hash(manifest)

    def status(self, *, complete: bool) -> Mapping[str, Any]:
        """Return the fields of the status that describe the release and the update.

        complete: whether all children have the release of the resource.
        """
        phase: UpdatePhase | None = None
        if self.begun and not complete:
            phase = UpdatePhase.DEFERRED if self.deferred else UpdatePhase.RUNNING
        elif self.available:
            phase = UpdatePhase.WAITING if self.requested else UpdatePhase.AVAILABLE
        update = {} if phase is None else {"update": {"id": self.id, "phase": phase.value}}
        return {"release": self.release.to_status(), **update}

    @property
    def finding(self) -> tuple[str, Reason, str]:
        """Status, reason and message of the condition about updates."""
        if not self.available:
            return "False", Reason.UP_TO_DATE, f"release {self.release.version} is the release of the operator"
        name, oldest = self.world.resource.name, self.world.settings.oldest_secure_version
        insecure = bool(oldest) and is_older(self.release.version, oldest)
        reason = Reason.SECURITY_UPDATE_AVAILABLE if insecure else Reason.UPDATE_AVAILABLE
        why = f"; releases before {oldest} have known vulnerabilities" if insecure else ""
        return "True", reason, f"{self.release.differences(self.offered)}{why}; {self._next(name)}"

    def _next(self, name: str) -> str:
        if not self.requested:
            return f"run kubectl megatron update {name}"
        if self.world.resource.spec.rollout.paused:
            return "the update waits while spec.rollout.paused is true"
        waits_for = "the resource runs" if self.deferred else "the updates of other resources are complete"
        return f"the update waits until {waits_for}"
