"""Objects that protect the pods: a ServiceAccount without token, PodDisruptionBudgets and NetworkPolicies."""

from __future__ import annotations

from typing import Any

from megatron_operator.render.context import (
    PORT_HUB,
    PORT_PLAIN_HTTP,
    PORTS_DNS,
    Manifest,
    RenderContext,
    child,
    coordinator_pods,
    decode_pods,
    pods_of,
    seal,
    selector,
)
from megatron_operator.render.vllm import uses_nixl
from megatron_operator.resource.names import (
    CHECK,
    COORDINATOR,
    ENGINE,
    LABEL_ENGINE,
    LABEL_ROLE,
    PORT_ADMIN,
    PORT_CLIENT,
    PORT_ENGINE,
    PORT_HEALTH,
    PORT_HTTP,
    PORT_KV,
    PORT_WEIGHTS,
    PREFILL,
    SERVER,
)
from megatron_operator.resource.source import DEFAULT_TRAINER_PORT, TrainerSpec


def service_account(ctx: RenderContext) -> Manifest:
    """Return the service account of all pods.

    The pull secrets are fields of the service account and not of the pods, so that a change of them restarts no pod.
    """
    account = child(ctx, "ServiceAccount", ctx.name, automountServiceAccountToken=False)
    secrets = [{"name": name} for name in ctx.settings.image_pull_secrets]
    return seal({**account, "imagePullSecrets": secrets} if secrets else account)


def disruption_budgets(ctx: RenderContext) -> list[Manifest]:
    """Return the PodDisruptionBudgets of engines (one per role), servers, and coordinators of a pair.

    In each group, one pod may be evicted at a time. Pods that are not ready do not block the drain of a node. A single
    coordinator has no budget.
    """
    budgets = [
        _disruption_budget(ctx, ctx.engines_name, ENGINE, pods=decode_pods(ctx)),
        _disruption_budget(ctx, ctx.server_name, SERVER),
    ]
    if PREFILL in ctx.roles:
        pods = {"matchLabels": {**selector(ctx, ENGINE), LABEL_ROLE: PREFILL}}
        budgets.append(_disruption_budget(ctx, ctx.prefill_name, ENGINE, pods=pods))
    if ctx.has_standby:
        budgets.append(_disruption_budget(ctx, ctx.coordinator_name, COORDINATOR, pods=coordinator_pods(ctx)))
    return budgets


def _disruption_budget(
    ctx: RenderContext, name: str, component: str, *, pods: dict[str, Any] | None = None
) -> Manifest:
    spec = {
        "maxUnavailable": 1,
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": pods or {"matchLabels": selector(ctx, component)},
    }
    return seal(child(ctx, "PodDisruptionBudget", name, api_version="policy/v1", component=component, spec=spec))


def _pods(ctx: RenderContext, component: str, extra_labels: dict[str, str] | None = None) -> dict[str, Any]:
    return {"podSelector": {"matchLabels": {**selector(ctx, component), **(extra_labels or {})}}}


def _coordinators(ctx: RenderContext) -> dict[str, Any]:
    return {"podSelector": coordinator_pods(ctx)}


def _engines_and_check(ctx: RenderContext) -> dict[str, Any]:
    """Return the selector of the pods that read the source of the model.

    These are the engines' pods and the pod that checks a revision.
    """
    return {"podSelector": pods_of(ctx, CHECK, ENGINE)}


def _operator(ctx: RenderContext) -> dict[str, Any]:
    return {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": ctx.settings.operator_namespace}}}


def _peers(trainer: TrainerSpec) -> list[dict[str, Any]]:
    return [peer.model_dump(mode="json", by_alias=True, exclude_none=True) for peer in trainer.peers]


def _tcp(port: int, *, last: int | None = None) -> list[dict[str, Any]]:
    """Return the TCP ports of a NetworkPolicy rule.

    The result has the port `port`, or all ports from `port` to `last` if `last` is given.
    """
    return [{"protocol": "TCP", "port": port, **({} if last in (None, port) else {"endPort": last})}]


def _policy(
    ctx: RenderContext,
    name: str,
    component: str,
    ingress: list[dict[str, Any]],
    egress: list[dict[str, Any]],
    *,
    pods: dict[str, Any] | None = None,
) -> Manifest:
    spec: dict[str, Any] = {
        **(pods or _pods(ctx, component)),
        "policyTypes": ["Ingress"],
        "ingress": ingress,
    }
    if ctx.settings.egress_policies:
        spec["policyTypes"] = ["Ingress", "Egress"]
        if egress:  # the API server drops an empty list, so the operator would write it again at each start
            spec["egress"] = egress
    return seal(child(ctx, "NetworkPolicy", name, api_version="networking.k8s.io/v1", component=component, spec=spec))


def dns_egress() -> dict[str, Any]:
    """Return the rule that allows DNS to any address. DNS servers can be pods, host processes or virtual addresses."""
    return {"ports": [{"protocol": protocol, "port": port} for port in PORTS_DNS for protocol in ("UDP", "TCP")]}


def hub_egress() -> dict[str, Any]:
    """Return the rule that allows connections to the HTTPS port of any address.

    A hub redirects to content delivery networks, and object stores have many addresses.
    """
    return {"ports": _tcp(PORT_HUB)}


def media_egress() -> dict[str, Any]:
    """Return the rule that allows connections to the HTTP and HTTPS ports of any address.

    A NetworkPolicy cannot contain host names, so the OpenAI server checks the host of each URL.
    """
    return {"ports": [*_tcp(PORT_PLAIN_HTTP), *_tcp(PORT_HUB)]}


def network_policies(ctx: RenderContext) -> list[Manifest]:
    """Return the NetworkPolicies of all components. They define the allowed peers in both directions.

    - The operator's namespace, monitoring and the API server may connect to the health port. A node can always connect
      to the health port of its own pods.
    - A coordinator may open connections only to the other coordinator of its pair.
    - Engines with roles may connect to each other on the port for KV. vLLM engines may do so on all ports, because NIXL
      listens on arbitrary ports.
    - A trainer may connect to the admin port. Engines may connect to the trainer's port, and to the ports on which
      other engines offer the trainer's weights.
    - Engines and servers may resolve names. They may download if the model, the model of an earlier revision, or an
      adapter is downloaded.

    `engine_policy` adds the connections within an engine.
    """
    api_server = [{"ipBlock": {"cidr": cidr}} for cidr in ctx.settings.api_server_ranges]
    health: dict[str, Any] = {
        "from": [_operator(ctx), *ctx.settings.monitoring_peers, *api_server],
        "ports": _tcp(PORT_HEALTH),
    }
    coordinator = [
        {"from": [_pods(ctx, SERVER)], "ports": _tcp(PORT_CLIENT)},
        {"from": [_pods(ctx, ENGINE)], "ports": _tcp(PORT_ENGINE)},
        {"from": [_operator(ctx)], "ports": _tcp(PORT_ADMIN)},
        health,
    ]
    engine = [health]
    server = [{"ports": _tcp(PORT_HTTP)}, health]
    model = ctx.spec.model
    downloads = model.source.downloads or ctx.former_downloads
    source = [dns_egress(), *([hub_egress()] if downloads else [])]
    has_hub_adapter = any(adapter.source.hugging_face is not None for adapter in model.adapters or ())
    adapters = [hub_egress()] if has_hub_adapter and not downloads else []
    to_coordinator = {"to": [_coordinators(ctx)]}
    from_engine = [{**to_coordinator, "ports": _tcp(PORT_ENGINE)}, *source, *adapters]
    media = [media_egress()] if ctx.spec.server.allowed_media_hosts else []
    from_server = [{**to_coordinator, "ports": _tcp(PORT_CLIENT)}, *source, *media]
    from_coordinator = []
    if PREFILL in ctx.roles:
        ports = {} if uses_nixl(ctx) else {"ports": _tcp(PORT_KV)}
        engine.append({"from": [_pods(ctx, ENGINE)], **ports})
        from_engine.append({"to": [_pods(ctx, ENGINE)], **ports})
    if ctx.spec.weights is not None and (trainer := ctx.spec.weights.trainer) is not None:
        weights = _tcp(PORT_WEIGHTS, last=PORT_WEIGHTS + ctx.spec.ranks_per_pod - 1)
        coordinator.append({"from": _peers(trainer), "ports": _tcp(PORT_ADMIN)})
        engine.append({"from": [_pods(ctx, ENGINE)], "ports": weights})
        from_engine += [
            {"to": _peers(trainer), "ports": _tcp(trainer.port or DEFAULT_TRAINER_PORT)},
            {"to": [_pods(ctx, ENGINE)], "ports": weights},
        ]
    if ctx.has_standby:
        coordinator.append({"from": [_coordinators(ctx)], "ports": _tcp(PORT_ADMIN)})
        from_coordinator = [{"to": [_coordinators(ctx)], "ports": _tcp(PORT_ADMIN)}, dns_egress()]
    return [
        _policy(ctx, ctx.coordinator_name, COORDINATOR, coordinator, from_coordinator, pods=_coordinators(ctx)),
        _policy(ctx, ctx.engines_name, ENGINE, engine, from_engine, pods=_engines_and_check(ctx)),
        _policy(ctx, ctx.server_name, SERVER, server, from_server),
    ]


def engine_policy(ctx: RenderContext, index: int) -> Manifest:
    """Return the NetworkPolicy that lets the pods of one engine connect to each other, on all ports.

    Ranks listen on arbitrary ports. torch's rendezvous store, the collectives and vLLM's channels, which unpickle data,
    do not authenticate peers. Therefore no other pod may connect.
    """
    name = ctx.engine_name(index)
    own = _pods(ctx, ENGINE, {LABEL_ENGINE: name})
    return _policy(ctx, name, ENGINE, [{"from": [own]}], [{"to": [own]}], pods=own)
