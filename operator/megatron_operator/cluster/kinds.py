"""Table of the API paths of the kinds that the operator uses. With this table, the operator needs no API discovery."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_operator.resource.names import (
    APP_NAME,
    FIELD_MANAGER,
    GROUP,
    KIND,
    LABEL_MANAGED_BY,
    LABEL_NAME,
    PLURAL,
    VERSION,
)


@dataclass(frozen=True, slots=True)
class ObjectKind:
    """One kind of the API, with its API version and its plural name."""

    kind: str
    group: str
    version: str
    plural: str

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str | None, name: str | None = None, *, subresource: str | None = None) -> str:
        """Return the URL path of a collection, an object or a subresource. `namespace=None` means all namespaces."""
        parts = ["apis", self.group, self.version] if self.group else ["api", self.version]
        if namespace is not None:
            parts += ["namespaces", namespace]
        parts.append(self.plural)
        if name is not None:
            parts.append(name)
        if subresource is not None:
            parts.append(subresource)
        return "/" + "/".join(parts)


RESOURCE = ObjectKind(KIND, GROUP, VERSION, PLURAL)
SECRET = ObjectKind("Secret", "", "v1", "secrets")
POD = ObjectKind("Pod", "", "v1", "pods")
NODE = ObjectKind("Node", "", "v1", "nodes")
CLUSTER_KINDS = (
    ObjectKind("PriorityClass", "scheduling.k8s.io", "v1", "priorityclasses"),
    ObjectKind("RuntimeClass", "node.k8s.io", "v1", "runtimeclasses"),
)
"""Cluster-scoped kinds of objects that pods name."""
CLAIM = ObjectKind("PersistentVolumeClaim", "", "v1", "persistentvolumeclaims")
RESOURCE_CLAIM = ObjectKind("ResourceClaim", "resource.k8s.io", "v1", "resourceclaims")
RESOURCE_CLAIM_TEMPLATE = ObjectKind("ResourceClaimTemplate", "resource.k8s.io", "v1", "resourceclaimtemplates")
SERVICE = ObjectKind("Service", "", "v1", "services")
DEVICE_CLAIM_KINDS = (RESOURCE_CLAIM, RESOURCE_CLAIM_TEMPLATE)
"""Kinds of Dynamic Resource Allocation. Kubernetes has served them in this version since 1.34."""
LEASE = ObjectKind("Lease", "coordination.k8s.io", "v1", "leases")
EVENT = ObjectKind("Event", "events.k8s.io", "v1", "events")
HTTP_ROUTE = ObjectKind("HTTPRoute", "gateway.networking.k8s.io", "v1", "httproutes")
INFERENCE_POOL = ObjectKind("InferencePool", "inference.networking.k8s.io", "v1", "inferencepools")
OPTIONAL_KINDS = (HTTP_ROUTE, INFERENCE_POOL)
"""Children that are read by name and not watched, because a cluster may not have their kind."""

CHILD_KINDS: tuple[ObjectKind, ...] = (
    ObjectKind("Deployment", "apps", "v1", "deployments"),
    ObjectKind("StatefulSet", "apps", "v1", "statefulsets"),
    ObjectKind("ControllerRevision", "apps", "v1", "controllerrevisions"),
    SERVICE,
    ObjectKind("ConfigMap", "", "v1", "configmaps"),
    ObjectKind("ServiceAccount", "", "v1", "serviceaccounts"),
    ObjectKind("PodDisruptionBudget", "policy", "v1", "poddisruptionbudgets"),
    ObjectKind("NetworkPolicy", "networking.k8s.io", "v1", "networkpolicies"),
    ObjectKind("Ingress", "networking.k8s.io", "v1", "ingresses"),
)
"""Kinds that the operator applies, watches (by label) and deletes. Secrets and OPTIONAL_KINDS are not watched but read
by name.
"""

METADATA_KINDS = frozenset(
    kind
    for kind in CHILD_KINDS
    if kind.plural in ("configmaps", "serviceaccounts", "poddisruptionbudgets", "networkpolicies", "ingresses")
)
"""Kinds whose metadata alone is read by decisions. The operator watches only the metadata of these kinds."""

OPENSHIFT_API = "security.openshift.io/v1"
"""API of the SecurityContextConstraints, which only OpenShift has."""

CHILD_SELECTOR = f"{LABEL_MANAGED_BY}={FIELD_MANAGER}"
POD_SELECTOR = f"{LABEL_NAME}={APP_NAME}"
"""A label in the selectors of all Deployments and StatefulSets. A pod that loses this label leaves its workload. Users
and webhooks may change other labels.
"""

_NAMED = (SECRET, CLAIM, *DEVICE_CLAIM_KINDS, *CLUSTER_KINDS)
_ALL = (*CHILD_KINDS, RESOURCE, *_NAMED, POD, LEASE, EVENT, *OPTIONAL_KINDS)
_BY_NAME = {(kind.api_version, kind.kind): kind for kind in _ALL}


def kind_of(api_version: str, kind: str) -> ObjectKind:
    """Return the ObjectKind of an API version and a kind. Raises KeyError if the operator does not use this kind."""
    return _BY_NAME[api_version, kind]
