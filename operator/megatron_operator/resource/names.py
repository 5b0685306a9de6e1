"""Names that other programs use: the API, labels and annotations, components and their ports. Imports no other
module.
"""

from __future__ import annotations

GROUP = "inference.megatron.dev"
VERSION = "v1beta1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "MegatronInference"
PLURAL = "megatroninferences"
CRD_NAME = f"{PLURAL}.{GROUP}"
FIELD_MANAGER = "megatron-operator"
APP_NAME = "megatron-inference"

LABEL_NAME = "app.kubernetes.io/name"
LABEL_INSTANCE = "app.kubernetes.io/instance"
LABEL_COMPONENT = "app.kubernetes.io/component"
LABEL_MANAGED_BY = "app.kubernetes.io/managed-by"
LABEL_ENGINE = f"{GROUP}/engine"
LABEL_REVISION = f"{GROUP}/revision"
LABEL_WEIGHTS = f"{GROUP}/weights"
LABEL_ROLE = f"{GROUP}/role"
LABEL_POD_INDEX = "apps.kubernetes.io/pod-index"
ANNOTATION_HASH = f"{GROUP}/hash"
ANNOTATION_RESTARTED = f"{GROUP}/restarted-at"
ANNOTATION_UPDATE = f"{GROUP}/update-to"
ANNOTATION_MODEL = f"{GROUP}/model"
ANNOTATION_RELEASE = f"{GROUP}/release"
ANNOTATION_INPUTS = f"{GROUP}/inputs"
ANNOTATION_SERVER_KEY = f"{GROUP}/server-key"
ANNOTATION_AVOIDED = f"{GROUP}/avoided-nodes"
TERM_ANNOTATION = f"{GROUP}/term"
NAMESPACES_ANNOTATION = f"{GROUP}/namespaces"
SUCCESSOR_ANNOTATION = f"{GROUP}/lease"
"""The last three names are annotations of Leases. The Lease of an operator has the operator's term and the namespaces
that the operator serves. FORMER_LEASE has the name of the Lease of the release that holds FORMER_LEASE.
"""
FORMER_LEASE = "megatron-operator"
"""Name of the Lease that early releases share. Each later release has a Lease of its own."""
REVISION_KIND = "ControllerRevision"

COORDINATOR, SERVER, ENGINE = "coordinator", "server", "engine"
DECODE, PREFILL = "decode", "prefill"
"""Roles of engines. Engines of a resource without roles are handled as decode engines, and spec.replicas counts
them.
"""
STANDBY = "standby"
"""The second coordinator of a pair. Either coordinator may be active."""
PREFLIGHT = "preflight"
CHECK = "check"
FETCH = "fetch"
"""Init container that downloads the model to spec.model.cache."""
CONTAINERS = {
    COORDINATOR: (COORDINATOR,),
    STANDBY: (COORDINATOR,),
    SERVER: (SERVER,),
    ENGINE: (ENGINE, FETCH, PREFLIGHT),
    CHECK: (ENGINE, FETCH),
}
"""The containers that the operator renders, by component of the pod. All other containers come from podTemplates and
webhooks.
"""

PORT_CLIENT, PORT_ENGINE, PORT_ADMIN, PORT_KV = 5555, 5556, 5557, 5558
PORT_WEIGHTS = 5560
"""Port on which the first rank of an engine pod offers the weights of a trainer to other engines. The port of each
further rank is higher by one."""
PORT_HTTP, PORT_HEALTH, PORT_RENDEZVOUS = 8000, 8080, 29500
