"""Generates the CustomResourceDefinition from the typed models.

Structural schemas (https://kubernetes.io/docs/tasks/extend-kubernetes/custom-resources/custom-resource-definitions/) do
not allow references and unions. They do not allow `additionalProperties` in an object with `properties`.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from megatron_operator.resource.base import FIELD
from megatron_operator.resource.names import CRD_NAME, GROUP, KIND, PLURAL, VERSION
from megatron_operator.resource.spec import ADAPTER_NAME_RULE, NAME_RULES, SHORT_NAME, MegatronInferenceSpec
from megatron_operator.resource.status import MegatronInferenceStatus

Schema = dict[str, Any]

_DROPPED = ("title", "$defs")

COLUMNS: tuple[tuple[str, str, str, int], ...] = (
    ("State", "string", ".status.state", 0),
    ("Ready", "string", ".status.ready", 0),
    ("Model", "string", ".status.model", 0),
    ("Reason", "string", '.status.conditions[?(@.type=="Ready")].reason', 0),
    ("Backend", "string", ".spec.engine.backend", 1),
    ("Epoch", "integer", ".status.epoch", 1),
    ("Revision", "string", ".status.revision", 1),
    ("Endpoint", "string", ".status.endpoint", 1),
    ("Age", "date", ".metadata.creationTimestamp", 0),
)
"""Print columns: name, type, path, priority (1: only with `-o wide`)."""

SELECTABLE_FIELDS = (".spec.desiredState", ".spec.engine.backend", ".status.model", ".status.state")
"""Fields of `kubectl get --field-selector`, on Kubernetes 1.31 or newer. A field without a value equals ""."""


def structural_schema(model: type[BaseModel], path: str) -> Schema:
    """Return the OpenAPI v3 structural schema of a model. path: path of the model's object in the resource."""
    document = model.model_json_schema(by_alias=True, mode="validation")
    return _structural(document, document.get("$defs", {}), path)


def _structural(node: Schema, definitions: dict[str, Schema], path: str) -> Schema:
    if "$ref" in node:
        target = definitions[node["$ref"].rsplit("/", 1)[-1]]
        siblings = {key: value for key, value in node.items() if key != "$ref"}
        return _structural({**target, **siblings}, definitions, path)
    if "anyOf" in node:
        (option,) = [entry for entry in node["anyOf"] if entry.get("type") != "null"]
        siblings = {key: value for key, value in node.items() if key != "anyOf"}
        return _structural({**option, **siblings}, definitions, path)
    found = {key: value for key, value in node.items() if key not in _DROPPED}
    if found.get("additionalProperties") is False:
        del found["additionalProperties"]
    if found.get("default", ...) is None:
        del found["default"]
    if "properties" in found:
        found["properties"] = {
            name: _structural(value, definitions, f"{path}.{name}")
            for name, value in sorted(found["properties"].items())
        }
    if "items" in found:
        found["items"] = _structural(found["items"], definitions, f"{path}[]")
    if "x-kubernetes-validations" in found:
        field = path.removesuffix("[]")
        found["x-kubernetes-validations"] = [
            {key: text.replace(FIELD, field) for key, text in rule.items()}
            for rule in found["x-kubernetes-validations"]
        ]
    return dict(sorted(found.items()))


def custom_resource_definition() -> dict[str, Any]:
    """Return the CRD. It has one version."""
    schema = {
        "type": "object",
        "description": "A language model served by data-parallel engines, a coordinator and OpenAI servers.",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            # The length limits the estimated cost of the rules below, which have better messages.
            "metadata": {"type": "object", "properties": {"name": {"type": "string", "maxLength": 253}}},
            "spec": structural_schema(MegatronInferenceSpec, "spec"),
            "status": structural_schema(MegatronInferenceStatus, "status"),
        },
        "x-kubernetes-validations": [rule.schema() for rule in (*NAME_RULES, ADAPTER_NAME_RULE)],
    }
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": schema},
        "subresources": {
            "status": {},
            "scale": {
                "specReplicasPath": ".spec.replicas",
                "statusReplicasPath": ".status.replicas",
                "labelSelectorPath": ".status.selector",
            },
        },
        "selectableFields": [{"jsonPath": path} for path in SELECTABLE_FIELDS],
        "additionalPrinterColumns": [
            {"name": name, "type": kind, "jsonPath": path, **({"priority": priority} if priority else {})}
            for name, kind, path, priority in COLUMNS
        ],
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": CRD_NAME},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": KIND.lower(),
                "shortNames": [SHORT_NAME],
            },
            "versions": [version],
        },
    }
