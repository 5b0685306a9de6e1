"""Objects that protect the pods: ServiceAccount without token, PodDisruptionBudget, NetworkPolicies."""

from __future__ import annotations

from typing import Any

from megatron_operator.render.context import (
    CHECK,
    COORDINATOR,
    ENGINE,
    LABEL_COMPONENT,
    PORT_ADMIN,
    PORT_CLIENT,
    PORT_ENGINE,
    PORT_HEALTH,
    PORT_HTTP,
    PORT_HUB,
    PORTS_DNS,
    SERVER,
    Manifest,
    RenderContext,
    child,
    seal,
    selector,
)


def service_account(ctx: RenderContext) -> Manifest:
    return seal(child(ctx, "ServiceAccount", ctx.name, automountServiceAccountToken=False))


def disruption_budget(ctx: RenderContext) -> Manifest:
    """Return the budget: engines are evicted one pod at a time; pods that are not ready do not block a node drain."""
    spec = {
        "maxUnavailable": 1,
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": {"matchLabels": selector(ctx, ENGINE)},
    }
    return seal(
        child(ctx, "PodDisruptionBudget", ctx.engines_name, api_version="policy/v1", component=ENGINE, spec=spec)
    )


def _pods(ctx: RenderContext, component: str) -> dict[str, Any]:
    return {"podSelector": {"matchLabels": selector(ctx, component)}}


def _tcp(port: int) -> list[dict[str, Any]]:
    return [{"protocol": "TCP", "port": port}]


def _policy(
    ctx: RenderContext, name: str, component: str, ingress: list[dict[str, Any]], egress: list[dict[str, Any]]
) -> Manifest:
    matched = selector(ctx, component)
    pods: dict[str, Any] = {"matchLabels": matched}
    if component == ENGINE:
        # The pod that checks the settings of engines reads the same source.
        either = {"key": LABEL_COMPONENT, "operator": "In", "values": [CHECK, ENGINE]}
        others = {label: value for label, value in matched.items() if label != LABEL_COMPONENT}
        pods = {"matchLabels": others, "matchExpressions": [either]}
    spec: dict[str, Any] = {
        "podSelector": pods,
        "policyTypes": ["Ingress"],
        "ingress": ingress,
    }
    if ctx.settings.egress_policies:
        spec["policyTypes"] = ["Ingress", "Egress"]
        if egress:  # the API server drops an empty list, so the operator would write it again at each start
            spec["egress"] = egress
    return seal(child(ctx, "NetworkPolicy", name, api_version="networking.k8s.io/v1", component=component, spec=spec))


def dns_egress() -> dict[str, Any]:
    """Allow DNS to any address: DNS servers are pods, host processes or virtual addresses of the node."""
    return {"ports": [{"protocol": protocol, "port": port} for port in PORTS_DNS for protocol in ("UDP", "TCP")]}


def hub_egress() -> dict[str, Any]:
    """Allow the hub's port on any address, because a hub redirects to content delivery networks."""
    return {"ports": _tcp(PORT_HUB)}


def network_policies(ctx: RenderContext) -> list[Manifest]:
    """Return the policies of all components: allowed peers in both directions. Probes and metrics are open. The
    coordinator opens no connections. Engines and servers resolve names, and download if the model is on a hub."""
    operator = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": ctx.settings.operator_namespace}}}
    coordinator = [
        {"from": [_pods(ctx, SERVER)], "ports": _tcp(PORT_CLIENT)},
        {"from": [_pods(ctx, ENGINE)], "ports": _tcp(PORT_ENGINE)},
        {"from": [operator], "ports": _tcp(PORT_ADMIN)},
        {"ports": _tcp(PORT_HEALTH)},
    ]
    # Ranks of an engine connect to each other on arbitrary ports.
    engine = [{"from": [_pods(ctx, ENGINE)]}, {"ports": _tcp(PORT_HEALTH)}]
    server = [{"ports": _tcp(PORT_HTTP)}, {"ports": _tcp(PORT_HEALTH)}]
    source = [dns_egress(), *([hub_egress()] if ctx.spec.model.source.hugging_face is not None else [])]
    to_coordinator = {"to": [_pods(ctx, COORDINATOR)]}
    from_engine = [{**to_coordinator, "ports": _tcp(PORT_ENGINE)}, {"to": [_pods(ctx, ENGINE)]}, *source]
    from_server = [{**to_coordinator, "ports": _tcp(PORT_CLIENT)}, *source]
    return [
        _policy(ctx, ctx.coordinator_name, COORDINATOR, coordinator, []),
        _policy(ctx, ctx.engines_name, ENGINE, engine, from_engine),
        _policy(ctx, ctx.server_name, SERVER, server, from_server),
    ]
