"""The operator's own manifests, for an installation without Helm (`manifests/install.yaml`).

The rules of the operator's roles are defined here. The Helm chart reads them from the generated `files/rules.yaml`.
"""

from __future__ import annotations

from typing import Any

from megatron_operator.render.coordinator import lost_node_tolerations
from megatron_operator.render.keys import ADMIN_SECRET
from megatron_operator.render.pod import CONTAINER_SECURITY, USER, http_probe
from megatron_operator.resource.crd import custom_resource_definition
from megatron_operator.resource.names import GROUP, PLURAL, PORT_HEALTH
from megatron_operator.resource.settings import MONITORING_NAMESPACE
from megatron_runtime.protocol import strict_json as json

Manifest = dict[str, Any]
Rule = dict[str, list[str]]

NAME = "megatron-operator"
LABELS = {"app.kubernetes.io/name": NAME, "app.kubernetes.io/instance": "megatron"}
READ = ["get", "list", "watch"]
APPLY = [*READ, "create", "patch"]
"""Verbs for server-side apply and the reads that it needs. The garbage collector deletes shared children with their
resource.
"""
OWN = [*APPLY, "delete"]


def _rule(group: str, resources: list[str], verbs: list[str], *, names: list[str] | None = None) -> Rule:
    rule = {"apiGroups": [group], "resources": resources, "verbs": verbs}
    return {**rule, "resourceNames": names} if names else rule


RESOURCE_RULES: list[Rule] = [
    _rule(GROUP, [PLURAL], READ),
    _rule(GROUP, [f"{PLURAL}/status"], ["patch"]),
    _rule("apps", ["deployments", "statefulsets", "controllerrevisions"], OWN),
    _rule("", ["services", "configmaps"], OWN),
    _rule("", ["serviceaccounts"], APPLY),
    _rule("policy", ["poddisruptionbudgets"], OWN),
    _rule("networking.k8s.io", ["networkpolicies", "ingresses"], OWN),
    _rule("gateway.networking.k8s.io", ["httproutes"], ["get", "create", "patch", "delete"]),
    _rule("inference.networking.k8s.io", ["inferencepools"], ["get", "create", "patch", "delete"]),
    _rule("", ["pods"], ["list", "watch", "create", "delete"]),
    _rule("", ["secrets"], ["get", "create", "patch"]),
    _rule("", ["persistentvolumeclaims"], ["get"]),
    _rule("resource.k8s.io", ["resourceclaims", "resourceclaimtemplates"], ["get"]),
    _rule("events.k8s.io", ["events"], ["get", "list", "create", "patch"]),
]
"""Permissions in the namespaces of resources. Secrets are read, created and rotated by name, never listed. RBAC cannot
limit this to the names NAME-keys, because it supports neither patterns nor names in create rules.
"""

NODE_RULES: list[Rule] = [
    _rule("", ["nodes"], ["get"]),
    _rule("scheduling.k8s.io", ["priorityclasses"], ["get"]),
    _rule("node.k8s.io", ["runtimeclasses"], ["get"]),
]
"""Permissions in the whole cluster. Before the operator force-deletes a pod, it verifies that the node of the pod is
lost. Before it replaces pods, it verifies that the objects which the pods name exist.
"""

VIEW_RULES: list[Rule] = [_rule(GROUP, [PLURAL, f"{PLURAL}/status", f"{PLURAL}/scale"], READ)]
EDIT_RULES: list[Rule] = [
    _rule(GROUP, [PLURAL], ["create", "update", "patch", "delete", "deletecollection"]),
    _rule(GROUP, [f"{PLURAL}/scale"], ["update", "patch"]),
]
"""Permissions of users, which Kubernetes aggregates to its ClusterRoles view, edit and admin."""
AGGREGATED = {"view": (VIEW_RULES, ("view",)), "edit": (EDIT_RULES, ("edit", "admin"))}

HOME_RULES: list[Rule] = [
    _rule("coordination.k8s.io", ["leases"], ["get", "create", "update"]),
    _rule("", ["secrets"], ["create"]),
    _rule("", ["secrets"], ["get"], names=[ADMIN_SECRET]),
]
"""Permissions in the operator's own namespace, for its Lease and its admin key."""


LEASE_RULES: list[Rule] = [_rule("coordination.k8s.io", ["leases"], ["get"], names=[NAME])]
"""Permission of all service accounts, so that another operator can detect whether this one manages a resource."""


def rules_file() -> dict[str, list[Rule]]:
    """Return the content of the chart's `files/rules.yaml`, which has the rules of the operator's roles."""
    return {"resource": RESOURCE_RULES, "node": NODE_RULES, "home": HOME_RULES, "view": VIEW_RULES, "edit": EDIT_RULES}


def _meta(name: str, namespace: str | None = None) -> dict[str, Any]:
    return {"name": name, **({"namespace": namespace} if namespace else {}), "labels": dict(LABELS)}


def _binding(kind: str, name: str, namespace: str | None, subject_namespace: str) -> Manifest:
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": f"{kind}Binding",
        "metadata": _meta(name, namespace),
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": NAME, "namespace": subject_namespace}],
    }


def _lease_binding(namespace: str) -> Manifest:
    group = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Group", "name": "system:serviceaccounts"}
    return {**_binding("Role", f"{NAME}:lease", namespace, namespace), "subjects": [group]}


def _role(kind: str, name: str, namespace: str | None, rules: list[Rule]) -> Manifest:
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": kind,
        "metadata": _meta(name, namespace),
        "rules": rules,
    }


def _cluster_name(namespace: str) -> str:
    """Return the name of the operator's cluster-scoped objects.

    The name contains the namespace, so that operators in different namespaces do not share objects.
    """
    return f"{NAME}:{namespace}:{LABELS['app.kubernetes.io/instance']}"


def _aggregated_role(name: str, namespace: str) -> Manifest:
    """Return a ClusterRole whose rules Kubernetes adds to built-in roles such as `view`.

    name: key of AGGREGATED.
    """
    rules, into = AGGREGATED[name]
    role = _role("ClusterRole", f"{_cluster_name(namespace)}:{name}", None, rules)
    role["metadata"]["labels"] |= {f"rbac.authorization.k8s.io/aggregate-to-{each}": "true" for each in into}
    return role


def _field(path: str) -> dict[str, Any]:
    return {"fieldRef": {"fieldPath": path}}


def _container(*, image: str, runtime_image: str, vllm_runtime_image: str) -> dict[str, Any]:
    return {
        "name": "operator",
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "args": [
            "run",
            *("--lease-name", NAME),
            *("--runtime-image", runtime_image),
            *("--vllm-runtime-image", vllm_runtime_image),
            *("--coordinator-image", image),
            *("--image-pull-policy", "IfNotPresent"),
            *("--monitoring-peers", json.dumps([MONITORING_NAMESPACE], separators=(",", ":"))),
        ],
        "env": [
            {"name": "POD_NAME", "valueFrom": _field("metadata.name")},
            {"name": "POD_UID", "valueFrom": _field("metadata.uid")},
            {"name": "POD_NAMESPACE", "valueFrom": _field("metadata.namespace")},
        ],
        "ports": [{"name": "health", "containerPort": PORT_HEALTH}],
        "startupProbe": http_probe("/healthz", periodSeconds=2, failureThreshold=150),
        "livenessProbe": http_probe("/healthz", periodSeconds=10, failureThreshold=6),
        "readinessProbe": http_probe("/readyz", periodSeconds=2),
        "resources": {"requests": {"cpu": "100m", "memory": "128Mi"}, "limits": {"memory": "256Mi"}},
        "securityContext": CONTAINER_SECURITY,
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
    }


def _deployment(namespace: str, *, container: dict[str, Any]) -> Manifest:
    pod = {
        "serviceAccountName": NAME,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 20,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": [{"name": "tmp", "emptyDir": {}}],
        "tolerations": lost_node_tolerations([]),
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": _meta(NAME, namespace),
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": dict(LABELS)},
            "template": {"metadata": {"labels": dict(LABELS)}, "spec": pod},
        },
    }


def _network_policy(namespace: str) -> Manifest:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": _meta(NAME, namespace),
        "spec": {
            "podSelector": {"matchLabels": dict(LABELS)},
            "policyTypes": ["Ingress"],
            "ingress": [{"ports": [{"protocol": "TCP", "port": PORT_HEALTH}]}],
        },
    }


def install_manifests(*, namespace: str, image: str, runtime_image: str, vllm_runtime_image: str) -> list[Manifest]:
    """Return the manifests of an operator that serves all namespaces, for `kubectl apply --server-side -f`."""
    restricted = {f"pod-security.kubernetes.io/{mode}": "restricted" for mode in ("enforce", "warn")}
    home = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace, "labels": restricted}}
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": _meta(NAME, namespace)}
    return [
        home,
        custom_resource_definition(),
        account,
        _role("ClusterRole", _cluster_name(namespace), None, [*RESOURCE_RULES, *NODE_RULES]),
        _binding("ClusterRole", _cluster_name(namespace), None, namespace),
        *(_aggregated_role(name, namespace) for name in AGGREGATED),
        _role("Role", NAME, namespace, HOME_RULES),
        _binding("Role", NAME, namespace, namespace),
        _role("Role", f"{NAME}:lease", namespace, LEASE_RULES),
        _lease_binding(namespace),
        _network_policy(namespace),
        _deployment(
            namespace,
            container=_container(image=image, runtime_image=runtime_image, vllm_runtime_image=vllm_runtime_image),
        ),
    ]
