"""Settings of an operator installation, which apply to every resource."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_operator import __version__
from megatron_operator.resource.pod_policy import PodPolicy, in_repositories

IMAGE_REGISTRY = "ghcr.io/megatron-inference"
"""Registry to which releases publish the images and the chart. values.yaml of the chart has the same names."""
DEFAULT_OPERATOR_IMAGE = f"{IMAGE_REGISTRY}/megatron-operator:{__version__}"
DEFAULT_COORDINATOR_IMAGE = DEFAULT_OPERATOR_IMAGE
DEFAULT_RUNTIME_IMAGE = f"{IMAGE_REGISTRY}/megatron-runtime:{__version__}"
DEFAULT_VLLM_RUNTIME_IMAGE = f"{IMAGE_REGISTRY}/megatron-runtime-vllm:{__version__}"

MONITORING_NAMESPACE: Mapping[str, Any] = {
    "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}
}
"""The pods of the namespace `monitoring`."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of an operator installation that affect decisions and the rendering of children."""

    runtime_image: str
    """Image of servers and native engines, unless the resource sets one."""
    vllm_runtime_image: str = DEFAULT_VLLM_RUNTIME_IMAGE
    """Image of vLLM engines, unless the resource sets one."""
    coordinator_image: str = DEFAULT_COORDINATOR_IMAGE
    """Image of coordinators. It is small, so that a node that lacks it starts a coordinator in seconds."""
    operator_namespace: str = "megatron-system"
    """Namespace of the operator's pods and its admin key; NetworkPolicies allow connections from it."""
    version: str = __version__
    """Version of the operator, or of the resource's release while an update is held."""
    oldest_secure_version: str = ""
    """Oldest release without a known vulnerability. The update of an older release is a security update."""
    image_pull_policy: str = "IfNotPresent"
    image_pull_secrets: tuple[str, ...] = ()
    """Names of Secrets in the resources' namespaces, with which kubelets pull images unless a podTemplate sets
    others.
    """
    runtime_log_format: str = "text"
    """Format of the logs of coordinators, servers and engines: "text" or "json"."""
    openshift: bool | None = None
    """Whether the cluster assigns user and group IDs to pods and rejects fixed IDs, as OpenShift's restricted-v2 does.
    None means unknown, and `megatron-operator run` detects it.
    """
    security: bool = True
    """Whether every socket uses CURVE. If so, keys are created, mounted and passed on the command lines."""
    pod_policy: PodPolicy | None = field(default_factory=PodPolicy)
    """Allowed fields of pod templates. None disables the check, for recorded templates that were accepted earlier."""
    quoted_repositories: tuple[str, ...] = ()
    """Repositories of images whose termination messages and errors the status quotes, in addition to
    `runtime_images`.
    """
    egress_policies: bool = True
    """Whether to create NetworkPolicies that limit the outgoing connections of the pods of a resource."""
    monitoring_peers: tuple[Mapping[str, Any], ...] = (MONITORING_NAMESPACE,)
    """NetworkPolicy peers that may read probes and metrics, in addition to the operator's namespace."""
    api_server_ranges: tuple[str, ...] = ()
    """Address ranges (CIDR) from which the API server connects to pods: its proxy reads metrics for kubectl."""

    installed_images: tuple[str, ...] = ()
    """Images of the installation, if the images above belong to the release of a resource. The repositories of a
    recorded release are not trusted, because users may be able to write a status.
    """

    @property
    def runtime_images(self) -> tuple[str, ...]:
        """The images that the operator uses for the pods of resources.

        The pod policy allows the repositories of these images.
        """
        return self.installed_images or (self.runtime_image, self.vllm_runtime_image, self.coordinator_image)

    def quotes(self, image: str) -> bool:
        """Return whether the status may quote messages of containers that run the image `image`."""
        return in_repositories(image, (*self.runtime_images, *self.quoted_repositories))
