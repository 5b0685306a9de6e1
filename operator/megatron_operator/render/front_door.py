"""Objects by which clients reach the OpenAI servers.

They are the Service `NAME` and, if the spec requests them, an Ingress, an HTTPRoute and an InferencePool. Servers name
their port by its scheme, and each port of the Service leads to the servers whose port has the same name. While servers
with TLS replace servers without TLS, or the reverse, the Service has both ports.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from megatron_operator.render.context import Manifest, RenderContext, child, seal, selector
from megatron_operator.render.pod_policy import require_annotations, require_hosts, require_tls_secret
from megatron_operator.resource.names import PORT_HTTP, SERVER
from megatron_operator.resource.server import HttpRouteSpec, InferencePoolSpec, IngressSpec, ServiceType

NETWORKING = "networking.k8s.io/v1"
GATEWAY = "gateway.networking.k8s.io/v1"
HTTP_ROUTE = "HTTPRoute"
INFERENCE_GROUP = "inference.networking.k8s.io"
INFERENCE = f"{INFERENCE_GROUP}/v1"
INFERENCE_POOL = "InferencePool"
FRONT_DOOR = ("Service", "Ingress", HTTP_ROUTE, INFERENCE_POOL)
"""Kinds of the objects, all of which have the name of the resource."""
SERVICE_PORTS = {"http": 80, "https": 443}
"""Ports of the Service by the scheme of the servers."""
MATCHES_PER_RULE = 64
"""Maximum number of matches per rule in the Gateway API."""


def front_door(ctx: RenderContext) -> dict[str, Callable[[], Manifest]]:
    """Return functions that build the Service of the servers, and the Ingress, HTTPRoute and InferencePool of the spec.

    The keys are kind and name. The functions raise NotAllowed if the pod policy does not allow a field.
    """
    server = ctx.spec.server
    optional: tuple[tuple[str, Any, Callable[[RenderContext, Any], Manifest]], ...] = (
        ("Ingress", server.ingress, ingress),
        (HTTP_ROUTE, server.http_route, http_route),
        (INFERENCE_POOL, server.inference_pool, inference_pool),
    )
    return {
        f"Service {ctx.name}": partial(front_service, ctx),
        **{f"{kind} {ctx.name}": partial(build, ctx, wanted) for kind, wanted, build in optional if wanted is not None},
    }


def front_service(ctx: RenderContext) -> Manifest:
    service = ctx.spec.server.service
    schemes = [ctx.scheme, *([ctx.former_scheme] if ctx.former_scheme else [])]
    spec: dict[str, Any] = {
        "selector": selector(ctx, SERVER),
        "ports": [
            {"name": scheme, "port": SERVICE_PORTS[scheme], "targetPort": scheme, "appProtocol": scheme}
            for scheme in schemes
        ],
    }
    if service.type is not ServiceType.CLUSTER_IP:
        spec["type"] = service.type.value
    if service.load_balancer_class is not None:
        spec["loadBalancerClass"] = service.load_balancer_class
    manifest = child(ctx, "Service", ctx.name, component=SERVER, spec=spec)
    return seal(_annotated(ctx, manifest, service.annotations, "spec.server.service.annotations"))


def ingress(ctx: RenderContext, wanted: IngressSpec) -> Manifest:
    """Return the Ingress, which routes all paths of its hosts to the servers.

    Raises:
        NotAllowed: the pod policy does not allow a host, the TLS Secret or an annotation.
    """
    require_hosts(ctx, wanted.hosts, "spec.server.ingress.hosts")
    require_tls_secret(ctx, wanted.tls_secret_name, "spec.server.ingress.tlsSecretName")
    backend = {"service": {"name": ctx.name, "port": {"number": SERVICE_PORTS[ctx.scheme]}}}
    http = {"paths": [{"path": "/", "pathType": "Prefix", "backend": backend}]}
    spec: dict[str, Any] = {"rules": [{"host": host, "http": http} for host in wanted.hosts or ()] or [{"http": http}]}
    if wanted.class_name is not None:
        spec["ingressClassName"] = wanted.class_name
    if wanted.tls_secret_name is not None:
        hosts = {"hosts": list(wanted.hosts)} if wanted.hosts else {}
        spec["tls"] = [{**hosts, "secretName": wanted.tls_secret_name}]
    manifest = child(ctx, "Ingress", ctx.name, api_version=NETWORKING, component=SERVER, spec=spec)
    return seal(_annotated(ctx, manifest, wanted.annotations, "spec.server.ingress.annotations"))


def http_route(ctx: RenderContext, wanted: HttpRouteSpec) -> Manifest:
    """Return the HTTPRoute to the Service, or to the InferencePool if the spec defines one.

    With `modelHeader`, the route matches the names of the model and its adapters.

    Raises:
        NotAllowed: the pod policy does not allow a host.
    """
    require_hosts(ctx, wanted.hostnames, "spec.server.httpRoute.hostnames")
    path = {"path": {"type": "PathPrefix", "value": wanted.path_prefix or "/"}}
    matches: list[dict[str, Any]] = [path]
    if wanted.model_header is not None:
        names = [ctx.model_name, *(adapter.name for adapter in ctx.spec.model.adapters or ())]
        header = {"type": "Exact", "name": wanted.model_header}
        matches = [{**path, "headers": [{**header, "value": name}]} for name in names]
    backend: dict[str, Any] = {"name": ctx.name, "port": SERVICE_PORTS[ctx.scheme]}
    if ctx.spec.server.inference_pool is not None:
        backend = {"group": INFERENCE_GROUP, "kind": INFERENCE_POOL, "name": ctx.name}
    rule: dict[str, Any] = {"backendRefs": [backend]}
    if wanted.path_prefix is not None:
        rewrite = {"path": {"type": "ReplacePrefixMatch", "replacePrefixMatch": "/"}}
        rule["filters"] = [{"type": "URLRewrite", "urlRewrite": rewrite}]
    groups = (matches[start : start + MATCHES_PER_RULE] for start in range(0, len(matches), MATCHES_PER_RULE))
    spec: dict[str, Any] = {
        "parentRefs": [ref.model_dump(mode="json", exclude_none=True) for ref in wanted.parent_refs],
        "rules": [{**rule, "matches": group} for group in groups],
    }
    if wanted.hostnames is not None:
        spec["hostnames"] = list(wanted.hostnames)
    return seal(child(ctx, HTTP_ROUTE, ctx.name, api_version=GATEWAY, component=SERVER, spec=spec))


def inference_pool(ctx: RenderContext, wanted: InferencePoolSpec) -> Manifest:
    """Return the InferencePool, whose endpoints are the pods of the servers."""
    picker = wanted.endpoint_picker_ref
    spec = {
        "selector": {"matchLabels": selector(ctx, SERVER)},
        "targetPorts": [{"number": PORT_HTTP}],
        "endpointPickerRef": {
            "group": "",
            "kind": "Service",
            "name": picker.name,
            "port": {"number": picker.port},
            "failureMode": picker.failure_mode.value,
        },
    }
    return seal(child(ctx, INFERENCE_POOL, ctx.name, api_version=INFERENCE, component=SERVER, spec=spec))


def _annotated(ctx: RenderContext, manifest: Manifest, wanted: Mapping[str, str] | None, field: str) -> Manifest:
    """Return the manifest with the annotations `wanted`.

    field: path of the annotations in the spec, for messages.

    Raises:
        NotAllowed: the pod policy does not allow an annotation.
    """
    require_annotations(ctx, wanted, field)
    if wanted:
        manifest["metadata"]["annotations"] = dict(wanted)
    return manifest
