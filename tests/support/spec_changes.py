"""A change of every field of the spec, found by walking its schema: another value, and the field removed and added.

BASES are valid specs that have every field together; `test_resource_model.py` compares them with the schema.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from megatron_operator.resource.crd import structural_schema
from megatron_operator.resource.spec import MegatronInferenceSpec, parse_spec

Spec = dict[str, Any]
SCHEMA = structural_schema(MegatronInferenceSpec, "spec")


def _template(container: str, value: str = "1") -> Spec:
    return {"spec": {"containers": [{"name": container, "env": [{"name": "OMP_NUM_THREADS", "value": value}]}]}}


_ADAPTER: Spec = {"name": "sql", "source": {"huggingFace": {"repo": "org/adapter", "revision": "abc"}}}
NATIVE: Spec = {
    "desiredState": "Running",
    "replicas": 2,
    "model": {
        "name": "org/model",
        "source": {
            "huggingFace": {
                "repo": "org/model",
                "revision": "abc",
                "tokenSecretRef": {"name": "hub", "key": "token"},
            }
        },
        "cache": {"persistentVolumeClaim": "cache"},
        "format": "SafeTensors",
        "dtype": "BFloat16",
        "maxSequenceLength": 1024,
        "adapters": [_ADAPTER],
    },
    "parallelism": {"tensor": 2, "pipeline": 1, "expert": 1},
    "engine": {
        "backend": "Native",
        "native": {"kvCacheMode": "Recompute", "prefixEviction": "LRU", "stepTimeoutSeconds": 60},
        "image": "runtime:1",
        "ranksPerPod": 1,
        "gpusPerPod": 0,
        "batching": {
            "maxRequests": 8,
            "maxTokens": 512,
            "blockSizeTokens": 256,
            "kvCacheMemory": "1Gi",
            "prefixCaching": True,
            "chunkedPrefill": True,
        },
        "startupSeconds": 600,
        "topology": {"packBy": "topology.kubernetes.io/zone"},
        "podTemplate": _template("engine"),
    },
    "coordinator": {
        "routing": {"policy": "LoadBalanced", "alpha": "0.5"},
        "replicas": 2,
        "priorityClassName": "high",
        "podTemplate": _template("coordinator"),
    },
    "server": {
        "replicas": 2,
        "tls": {"secretName": "certificate"},
        "service": {
            "type": "LoadBalancer",
            "annotations": {"prometheus.io/scrape": "true"},
            "loadBalancerClass": "example.com/lb",
        },
        "ingress": {
            "className": "nginx",
            "hosts": ["a.example"],
            "tlsSecretName": "front",
            "annotations": {"prometheus.io/scrape": "true"},
        },
        "httpRoute": {
            "parentRefs": [{"name": "gateway", "namespace": "infra", "sectionName": "https"}],
            "hostnames": ["a.example"],
            "pathPrefix": "/a",
            "modelHeader": "x-model",
        },
        "inferencePool": {"endpointPickerRef": {"name": "picker", "port": 9002, "failureMode": "FailClose"}},
        "apiKeysSecretRef": {"name": "keys", "key": "keys"},
        "sharePrefixCache": False,
        "allowPriority": False,
        "reserveTokens": 16,
        "toolCallParser": "auto",
        "reasoningParser": "auto",
        "generationConfig": "auto",
        "modelAliases": ["alias"],
        "anyModelName": False,
        "allowedOrigins": ["https://a.example"],
        "allowedMediaHosts": ["a.example"],
        "podTemplate": _template("server"),
    },
    "lifecycle": {
        "pause": {"mode": "Hold", "maxQueued": 10, "maxWaitSeconds": 10},
        "suspend": {"level": "Offload", "wakeOnRequest": False, "idleSeconds": 60, "escalateAfterSeconds": 600},
        "drainSeconds": 30,
        "lostNodeSeconds": 60,
        "restartBudget": {"restarts": 5, "windowSeconds": 600},
    },
    "keys": {"generation": 1, "rotateAfterDays": 30},
    "rollout": {"maxUnavailable": 1, "maxSurge": 1, "paused": False, "autoUpdate": False},
}
VLLM: Spec = {
    "model": {
        "source": {"objectStore": {"url": "s3://bucket/{revision}", "credentialsSecretRef": {"name": "store"}}},
        "cache": {"hostPath": "/var/cache"},
    },
    "weights": {"revision": "1"},
    "parallelism": {"tensor": 2, "data": 2},
    "engine": {
        "backend": "VLLM",
        "gpusPerPod": 4,
        "accelerator": {"resource": "amd.com/gpu"},
        "vllm": {
            "image": "vllm:1",
            "args": {"seed": 1},
            "allowPickleBetweenPods": False,
            "allowNixlBetweenPods": False,
            "sleepLevel": "HostMemory",
        },
        "kvOffload": {"cpuMemory": "1Gi"},
        "quantization": "fp8",
        "speculative": {"method": "Eagle", "tokens": 2, "model": "hf:org/draft"},
    },
}
CLAIM: Spec = {
    "model": {
        "source": {"persistentVolumeClaim": {"claimName": "models", "path": "/a"}},
        "adapters": [{"name": "sql", "source": {"path": "/sql"}}],
    },
    "weights": {
        "trainer": {
            "from": [
                {
                    "podSelector": {"matchLabels": {"app": "trainer"}},
                    "namespaceSelector": {"matchLabels": {"team": "rl"}},
                }
            ],
            "port": 7100,
        }
    },
    "engine": {
        "gpusPerPod": 1,
        "batching": {"maxPrefillTokens": 512},
        "accelerator": {"claims": [{"name": "gpu", "resourceClaimTemplateName": "gpu", "request": "gpu"}]},
    },
}
IMAGE: Spec = {
    "model": {"source": {"image": {"reference": "runtime:weights", "path": "/a"}}},
    "weights": {"trainer": {"from": [{"ipBlock": {"cidr": "10.9.0.0/16"}}]}},
    "engine": {"gpusPerPod": 1, "accelerator": {"claims": [{"name": "gpu", "resourceClaimName": "gpu"}]}},
}
BUILTIN: Spec = {
    "model": {"source": {"builtin": "smollm2-135m"}},
    "engine": {"backend": "Native"},
    "server": {"service": {"type": "ClusterIP"}},
}
ROLES: Spec = {
    "replicas": 2,
    "model": {"source": {"builtin": "smollm2-135m"}},
    "engine": {
        "roles": {
            "prefill": {
                "replicas": 1,
                "batching": {
                    "maxRequests": 8,
                    "maxTokens": 4096,
                    "maxPrefillTokens": 2048,
                    "kvCacheMemory": "1Gi",
                },
                "podTemplate": _template("engine"),
            },
            "decode": {
                "batching": {
                    "maxRequests": 32,
                    "maxTokens": 512,
                    "maxPrefillTokens": 128,
                    "kvCacheMemory": "2Gi",
                },
                "podTemplate": _template("engine"),
            },
        }
    },
}
RATIO: Spec = {**ROLES, "engine": {"roles": {"prefill": {"perDecode": 0.5}}}}
BASES: dict[str, Spec] = {
    "builtin": BUILTIN,
    "native": NATIVE,
    "vllm": VLLM,
    "claim": CLAIM,
    "image": IMAGE,
    "roles": ROLES,
    "ratio": RATIO,
}

_OTHER: dict[str, Any] = {
    "model.source.builtin": "gemma3-270m",
    "model.source.objectStore.url": "s3://other/{revision}",
    "parallelism.data": 4,
    "parallelism.tensor": 4,
    "parallelism.pipeline": 2,
    "parallelism.expert": 2,
    "engine.gpusPerPod": 2,
    "engine.ranksPerPod": 2,
    "engine.accelerator.resource": "gpu.intel.com/xe",
    "engine.image": "runtime:2",
    "engine.vllm.image": "vllm:2",
    "engine.vllm.args": {"seed": 2},
    "engine.podTemplate": _template("engine", "2"),
    "engine.batching.kvCacheMemory": "2Gi",
    "engine.kvOffload.cpuMemory": "2Gi",
    "engine.roles.prefill.podTemplate": _template("engine", "2"),
    "engine.roles.prefill.batching.kvCacheMemory": "3Gi",
    "engine.roles.prefill.perDecode": 1.5,
    "engine.roles.decode.podTemplate": _template("engine", "2"),
    "engine.roles.decode.batching.kvCacheMemory": "3Gi",
    "engine.quantization": "awq",
    "engine.speculative.method": "DraftModel",
    "coordinator.replicas": 1,
    "coordinator.routing.alpha": "0.25",
    "coordinator.routing.policy": "LeastCost",
    "coordinator.podTemplate": _template("coordinator", "2"),
    "server.podTemplate": _template("server", "2"),
    "server.service.annotations": {"prometheus.io/scrape": "false"},
    "server.ingress.annotations": {"prometheus.io/scrape": "false"},
    "server.ingress.hosts": ["b.example"],
    "server.httpRoute.hostnames": ["b.example"],
    "server.modelAliases": ["alias", "another"],
    "server.allowedOrigins": ["https://a.example", "https://b.example"],
    "server.allowedMediaHosts": ["a.example", "b.example"],
    "server.toolCallParser": "hermes",
    "server.reasoningParser": "none",
    "rollout.maxUnavailable": 2,
    "weights.trainer.from[].podSelector": {"matchLabels": {"app": "other"}},
    "weights.trainer.from[].namespaceSelector": {"matchLabels": {"team": "other"}},
    "weights.trainer.from[].ipBlock": {"cidr": "10.8.0.0/16"},
}
"""Other values of fields that cannot be derived."""
_ALSO: dict[str, tuple[str, Any]] = {"parallelism.data": ("engine.gpusPerPod", 8)}
"""Another field that must change with a field, and its value."""


@dataclass(frozen=True)
class SpecChange:
    """fields: the path of the changed field, without indexes of lists."""

    base: str
    field: str
    kind: str
    old: Spec
    new: Spec

    def __str__(self) -> str:
        return f"{self.base}-{self.kind}-{self.field}"


def leaves(schema: Spec = SCHEMA, path: str = "") -> Iterator[str]:
    """Return the path of each field that has no fields of its own."""
    if schema.get("type") == "array" and "properties" in schema["items"]:
        yield from leaves(schema["items"], f"{path}[]")
    elif "properties" in schema:
        for name, field in schema["properties"].items():
            yield from leaves(field, f"{path}.{name}" if path else name)
    else:
        yield path


def _schema_of(path: str) -> Spec:
    found = SCHEMA
    for part in path.split("."):
        found = found["properties"][part.removesuffix("[]")]
        found = found["items"] if part.endswith("[]") else found
    return found


def owner_of(spec: Spec, path: str) -> Spec | None:
    """Return the object that has the field at a path; None if the spec lacks it."""
    at: Any = spec
    *parents, name = path.split(".")
    for part in parents:
        at = at.get(part.removesuffix("[]"))
        if at is None:
            return None
        at = at[0] if part.endswith("[]") else at
    return at if name in at else None


def _value(spec: Spec, path: str) -> Any:
    owner = owner_of(spec, path)
    return None if owner is None else owner[path.rpartition(".")[2]]


def _other(path: str, value: Any) -> Any:
    schema = _schema_of(path)
    if path in _OTHER:
        return _OTHER[path]
    if "enum" in schema:
        return next(each for each in schema["enum"] if each != value)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    return f"{value}2"


def is_valid(spec: Spec) -> bool:
    try:
        parse_spec(spec)
    except ValidationError:
        return False
    return True


def changes(*, removals: bool = True) -> Iterator[SpecChange]:
    """Return a change of each field. removals: also each field that may be absent, removed and added."""
    seen: set[str] = set()
    for base, old in BASES.items():
        for path in leaves():
            if path in seen or owner_of(old, path) is None:
                continue
            seen.add(path)
            name = path.rpartition(".")[2]
            new, without = copy.deepcopy(old), copy.deepcopy(old)
            for changed, value in ((path, _other(path, _value(old, path))), *([_ALSO[path]] if path in _ALSO else [])):
                (owner_of(new, changed) or {})[changed.rpartition(".")[2]] = value
            yield SpecChange(base, path, "change", old, new)
            (owner_of(without, path) or {}).pop(name)
            if removals and is_valid(without) and parse_spec(without) != parse_spec(old):
                yield SpecChange(base, path, "remove", old, without)
                yield SpecChange(base, path, "add", without, old)
