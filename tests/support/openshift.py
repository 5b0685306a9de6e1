"""An imitation of OpenShift's admission of pods: the constraint restricted-v2, as a webhook.

Like the real plugin, it rejects fixed IDs outside of the namespace's range, and assigns IDs of the range to pods that
have none. It does not assign SELinux labels, because the test nodes do not have SELinux.
"""

from __future__ import annotations

import base64
import json
import ssl
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from threaded_server import serving

FIRST_ID, IDS = 1_000_660_000, 10_000
NAMESPACE_ANNOTATIONS = {
    "openshift.io/sa.scc.uid-range": f"{FIRST_ID}/{IDS}",
    "openshift.io/sa.scc.supplemental-groups": f"{FIRST_ID}/{IDS}",
}
CONSTRAINT = "restricted-v2"
API_VERSION = "security.openshift.io/v1"
"""The API by which a cluster is recognised as OpenShift. It is served some moments after its CRD is established."""
CRD: dict[str, Any] = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "securitycontextconstraints.security.openshift.io"},
    "spec": {
        "group": "security.openshift.io",
        "scope": "Cluster",
        "names": {
            "kind": "SecurityContextConstraints",
            "plural": "securitycontextconstraints",
            "singular": "securitycontextconstraints",
        },
        "versions": [
            {
                "name": "v1",
                "served": True,
                "storage": True,
                "schema": {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}},
            }
        ],
    },
}
_NAME_IN = {"key": "kubernetes.io/metadata.name", "operator": "In"}
_VOLUMES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
}


def problems(pod: dict[str, Any]) -> list[str]:
    """Return why restricted-v2 rejects a pod, in the words of OpenShift."""
    spec = pod["spec"]
    context = spec.get("securityContext") or {}
    found = [
        f".spec.volumes[{index}]: Invalid value: {kind!r}: {kind} volumes are not allowed to be used"
        for index, volume in enumerate(spec.get("volumes") or ())
        for kind in volume.keys() - {"name"}
        if kind not in _VOLUMES
    ]
    group = context.get("fsGroup", FIRST_ID)
    if group != FIRST_ID:
        found.append(f".spec.securityContext.fsGroup: Invalid value: [{group}]: {group} is not an allowed group")
    found += [
        f".spec.{name}: Invalid value: true: {name} is not allowed"
        for name in ("hostNetwork", "hostPID", "hostIPC")
        if spec.get(name)
    ]
    for field in ("initContainers", "containers"):
        for index, container in enumerate(spec.get(field) or ()):
            own = container.get("securityContext") or {}
            where = f".{field}[{index}]"
            user = own.get("runAsUser", context.get("runAsUser", FIRST_ID))
            if not FIRST_ID <= user < FIRST_ID + IDS:
                allowed = f"[{FIRST_ID}, {FIRST_ID + IDS - 1}]"
                found.append(f"{where}.runAsUser: Invalid value: {user}: must be in the ranges: {allowed}")
            if own.get("allowPrivilegeEscalation", True) or own.get("privileged"):
                found.append(f"{where}.allowPrivilegeEscalation: Invalid value: true: not allowed")
            if (own.get("capabilities") or {}).get("add"):
                found.append(f"{where}.capabilities.add: Invalid value: capability may not be added")
    return [f"provider {CONSTRAINT}: {problem}" for problem in found]


def patches(pod: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the JSON patch that assigns the IDs of the namespace to an admitted pod."""
    spec, metadata = pod["spec"], pod["metadata"]
    annotations = {**(metadata.get("annotations") or {}), "openshift.io/scc": CONSTRAINT}
    found: list[dict[str, Any]] = [
        {"op": "add", "path": "/metadata/annotations", "value": annotations},
        {
            "op": "add",
            "path": "/spec/securityContext",
            "value": {**(spec.get("securityContext") or {}), "fsGroup": FIRST_ID},
        },
    ]
    for field in ("initContainers", "containers"):
        for index, container in enumerate(spec.get(field) or ()):
            value = {**(container.get("securityContext") or {}), "runAsUser": FIRST_ID, "runAsNonRoot": True}
            found.append({"op": "add", "path": f"/spec/{field}/{index}/securityContext", "value": value})
    return found


class _Admission(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        review = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        pod, name = review["request"]["object"], review["request"].get("name") or ""
        found = problems(pod)
        answer: dict[str, Any] = {"uid": review["request"]["uid"], "allowed": not found}
        if found:
            message = f'pods "{name}" is forbidden: unable to validate against any security context constraint: ['
            answer["status"] = {"code": 403, "reason": "Forbidden", "message": f"{message}{', '.join(found)}]"}
        else:
            answer |= {"patchType": "JSONPatch", "patch": base64.b64encode(json.dumps(patches(pod)).encode()).decode()}
        body = json.dumps({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": answer}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def admission(namespaces: Sequence[str], *, folder: Path) -> Iterator[dict[str, Any]]:
    """Serve the webhook, and return its configuration for the pods of these namespaces."""
    key, certificate = folder / "webhook.key", folder / "webhook.crt"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=webhook"
    files = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*command.split(), *files], check=True, capture_output=True)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    with serving(_Admission, tls=tls) as server:
        yield {
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": "MutatingWebhookConfiguration",
            "metadata": {"name": f"openshift-{namespaces[0]}"},
            "webhooks": [
                {
                    "name": "scc.openshift.io",
                    "admissionReviewVersions": ["v1"],
                    "sideEffects": "None",
                    "clientConfig": {
                        "url": f"https://127.0.0.1:{server.server_address[1]}/",
                        "caBundle": base64.b64encode(certificate.read_bytes()).decode(),
                    },
                    "namespaceSelector": {"matchExpressions": [{**_NAME_IN, "values": list(namespaces)}]},
                    "rules": [
                        {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
                    ],
                }
            ],
        }
