"""A Job that downloads a custom resource's Hugging Face repository to a PersistentVolumeClaim.

The user applies the Job, and later sets the claim as the source of the model. Engines then start without a download
and share one copy. A new revision can be downloaded while another revision is in use.
"""

from __future__ import annotations

from typing import Any

from megatron_operator.render.context import Manifest, RenderContext, digest, literal_args
from megatron_operator.render.guards import dns_egress, hub_egress
from megatron_operator.render.model_source import model_env
from megatron_operator.render.pod import CONTAINER_SECURITY, MODEL_DIR, pod_security
from megatron_operator.resource.names import APP_NAME, LABEL_INSTANCE, LABEL_NAME

FETCH = "prefetch"
_TRIES = 10
_KEPT_SECONDS = 24 * 3600
_FINAL_EXIT_CODES = [1, 2]
"""Exit codes of `megatron fetch` after a permanent error. After any other code, the next pod continues the download."""


class NothingToPrefetch(ValueError):
    """The model's source is not a Hugging Face repository at a fixed revision, so there is nothing to download.

    The message names the field and the remedy.
    """


def claim_source(ctx: RenderContext, claim: str) -> dict[str, Any]:
    """Return `spec.model.source` and `spec.weights` of a resource that loads its model from the claim."""
    repository, revision = _pinned(ctx)
    return {
        "model": {
            "source": {"persistentVolumeClaim": {"claimName": claim, "path": f"/{_folder(repository)}/{{revision}}"}}
        },
        "weights": {"revision": revision},
    }


def prefetch_job(ctx: RenderContext, claim: str) -> Manifest:
    """Return the Job that downloads the repository to `claim`, in a directory for the repository's revision.

    Raises NothingToPrefetch if the spec does not name a Hugging Face repository and a revision.
    """
    repository, revision = _pinned(ctx)
    target = f"{MODEL_DIR}/{_folder(repository)}/{revision}"
    container = {
        "name": FETCH,
        "image": ctx.settings.runtime_image,
        "imagePullPolicy": ctx.settings.image_pull_policy,
        "args": literal_args(["fetch", f"{repository}@{revision}", target]),
        "env": [{"name": "HOME", "value": "/tmp"}, *model_env(ctx)],
        "resources": {"requests": {"cpu": "500m", "memory": "256Mi"}, "limits": {"memory": "2Gi"}},
        "securityContext": CONTAINER_SECURITY,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}, {"name": "model", "mountPath": MODEL_DIR}],
    }
    secrets = [{"name": name} for name in ctx.settings.image_pull_secrets]
    pod = {
        "restartPolicy": "Never",
        **({"imagePullSecrets": secrets} if secrets else {}),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": pod_security(ctx),
        "containers": [container],
        "volumes": [
            {"name": "tmp", "emptyDir": {}},
            {"name": "model", "persistentVolumeClaim": {"claimName": claim}},
        ],
    }
    labels = _labels(ctx)
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": f"{ctx.name}-{FETCH}-{digest([pod, claim])}",
            "namespace": ctx.namespace,
            "labels": labels,
        },
        "spec": {
            "backoffLimit": _TRIES,
            "ttlSecondsAfterFinished": _KEPT_SECONDS,
            "podFailurePolicy": {
                "rules": [
                    {
                        "action": "FailJob",
                        "onExitCodes": {"containerName": FETCH, "operator": "In", "values": _FINAL_EXIT_CODES},
                    }
                ]
            },
            "template": {"metadata": {"labels": dict(labels)}, "spec": pod},
        },
    }


def prefetch_policy(ctx: RenderContext) -> Manifest:
    """Return a NetworkPolicy for the Job's pods. It allows no ingress, and egress only to DNS and the hub."""
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": f"{ctx.name}-{FETCH}", "namespace": ctx.namespace, "labels": _labels(ctx)},
        "spec": {
            "podSelector": {"matchLabels": _labels(ctx)},
            "policyTypes": ["Ingress", "Egress"],
            "egress": [dns_egress(), hub_egress()],
        },
    }


def _labels(ctx: RenderContext) -> dict[str, str]:
    """Return labels for the Job's pods that the selectors of engines and servers do not match."""
    return {LABEL_NAME: f"{APP_NAME}-{FETCH}", LABEL_INSTANCE: ctx.name}


def _pinned(ctx: RenderContext) -> tuple[str, str]:
    source = ctx.spec.model.source.hugging_face
    if source is None:
        raise NothingToPrefetch("spec.model.source: is not a huggingFace repository; prefetch supports only those")
    revision = source.revision or ctx.spec.weights_revision
    if not revision:
        raise NothingToPrefetch(
            "spec.model.source.huggingFace.revision: is not set; name a commit, so that the files in the claim never "
            "change under an engine"
        )
    if "/" in revision:
        raise NothingToPrefetch(
            f"spec.model.source.huggingFace.revision: is {revision!r}; it names the directory of the files, so name a "
            "commit, or a tag without /"
        )
    return source.repo, revision


def _folder(repository: str) -> str:
    return repository.replace("/", "--")
