"""What protects the pods: ServiceAccount without token, PodDisruptionBudget, ingress NetworkPolicies."""

from __future__ import annotations

from typing import Any

from megatron_operator.render.context import (
    COORDINATOR,
    ENGINE,
    PORT_ADMIN,
    PORT_CLIENT,
    PORT_ENGINE,
    PORT_HEALTH,
    PORT_HTTP,
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
    """Evictions take engines one pod at a time; one that is not ready anyway never holds up a node."""
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


def _policy(ctx: RenderContext, name: str, component: str, ingress: list[dict[str, Any]]) -> Manifest:
    spec = {
        "podSelector": {"matchLabels": selector(ctx, component)},
        "policyTypes": ["Ingress"],
        "ingress": ingress,
    }
    return seal(child(ctx, "NetworkPolicy", name, api_version="networking.k8s.io/v1", component=component, spec=spec))


def network_policies(ctx: RenderContext) -> list[Manifest]:
    """Who may connect to what. Probes and metrics are open; the rest is open to its one kind of peer."""
    operator = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": ctx.settings.operator_namespace}}}
    coordinator = [
        {"from": [_pods(ctx, SERVER)], "ports": _tcp(PORT_CLIENT)},
        {"from": [_pods(ctx, ENGINE)], "ports": _tcp(PORT_ENGINE)},
        {"from": [operator], "ports": _tcp(PORT_ADMIN)},
        {"ports": _tcp(PORT_HEALTH)},
    ]
    # Ranks of an engine open ports of their own choice to each other.
    engine = [{"from": [_pods(ctx, ENGINE)]}, {"ports": _tcp(PORT_HEALTH)}]
    server = [{"ports": _tcp(PORT_HTTP)}, {"ports": _tcp(PORT_HEALTH)}]
    return [
        _policy(ctx, ctx.coordinator_name, COORDINATOR, coordinator),
        _policy(ctx, ctx.engines_name, ENGINE, engine),
        _policy(ctx, ctx.server_name, SERVER, server),
    ]
