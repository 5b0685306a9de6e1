"""What an installation of the operator fixes for every resource."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_operator.model.pod_policy import PodPolicy, in_repositories


@dataclass(frozen=True, slots=True)
class Settings:
    """Installation-wide inputs of rendering and deciding."""

    runtime_image: str
    """Image of coordinator, server and engines where the resource names none."""
    operator_namespace: str = "megatron-system"
    """Where the operator's own pods run; its admin key lives here and NetworkPolicies admit it."""
    image_pull_policy: str = "IfNotPresent"
    security: bool = True
    """CURVE on every socket: keys are created, mounted and named on the command lines."""
    pod_policy: PodPolicy | None = field(default_factory=PodPolicy)
    """What pod templates may contain. None: no check, for templates that were accepted when they were recorded."""
    quoted_repositories: tuple[str, ...] = ()
    """Repositories, besides that of the runtime image, whose termination messages and errors the status quotes."""
    egress_policies: bool = True
    """NetworkPolicies limit what the pods of a resource may connect to."""

    def quotes(self, image: str) -> bool:
        """Whether the status may quote what a container of this image says."""
        return in_repositories(image, (self.runtime_image, *self.quoted_repositories))
