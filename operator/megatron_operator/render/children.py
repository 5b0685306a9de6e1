"""Builds all children of a resource. The children that all engines share are built in the order in which they are
applied.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from megatron_operator.render.context import Manifest, RenderContext, child, once, seal, selector
from megatron_operator.render.coordinator import PORTS, coordinator_deployment
from megatron_operator.render.engine import engine_statefulset
from megatron_operator.render.front_door import front_door
from megatron_operator.render.guards import disruption_budgets, engine_policy, network_policies, service_account
from megatron_operator.render.pod import config_map
from megatron_operator.render.revision import revision_child
from megatron_operator.render.server import server_deployment
from megatron_operator.resource.names import (
    COORDINATOR,
    ENGINE,
    LABEL_ENGINE,
    PORT_HEALTH,
    PORT_RENDEZVOUS,
    STANDBY,
)


@once
def plain_children(ctx: RenderContext) -> list[Manifest]:
    """Return the shared children that create no pods and can always be rendered.

    The keys Secret is left out.
    """
    standby = [coordinator_service(ctx, STANDBY)] if ctx.has_standby else []
    return [
        service_account(ctx),
        config_map(ctx),
        *network_policies(ctx),
        *disruption_budgets(ctx),
        coordinator_service(ctx),
        *standby,
    ]


def other_children(ctx: RenderContext) -> dict[str, Callable[[], Manifest]]:
    """Return functions that build the shared children that plain_children() omits, by name of the child.

    The functions raise RenderError.
    """
    standby = {ctx.standby_name: lambda: coordinator_deployment(ctx, STANDBY)} if ctx.has_standby else {}
    builds = {
        **front_door(ctx),
        ctx.coordinator_name: lambda: coordinator_deployment(ctx),
        **standby,
        ctx.server_name: lambda: server_deployment(ctx),
    }
    return {name: partial(ctx.cached, ("child", name), build) for name, build in builds.items()}


def engine_children(ctx: RenderContext, index: int, *, pods: int) -> list[Manifest]:
    return [engine_policy(ctx, index), engine_service(ctx, index), engine_statefulset(ctx, index, pods=pods)]


def all_children(ctx: RenderContext) -> list[Manifest]:
    """Return all children of a running resource, including all engines, except the keys Secret."""
    children = [*plain_children(ctx), *(build() for build in other_children(ctx).values()), revision_child(ctx)]
    for each in map(ctx.of_role, ctx.roles):
        for index in range(ctx.spec.engines_of(each.role)):
            children += engine_children(each, index, pods=ctx.spec.pods_per_engine)
    return children


def coordinator_service(ctx: RenderContext, component: str = COORDINATOR) -> Manifest:
    """Return the Service of the coordinator, or of its standby if `component` is STANDBY."""
    spec = {
        "selector": selector(ctx, component),
        "ports": [{"name": name, "port": port, "targetPort": port} for name, port in PORTS],
    }
    name = ctx.coordinator_name if component == COORDINATOR else ctx.standby_name
    return seal(child(ctx, "Service", name, component=component, spec=spec))


def engine_service(ctx: RenderContext, index: int) -> Manifest:
    """Return the headless Service of an engine's ranks.

    The ranks must resolve each other before any of them is ready.
    """
    name = ctx.engine_name(index)
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {**selector(ctx, ENGINE), LABEL_ENGINE: name},
        "ports": [
            {"name": "health", "port": PORT_HEALTH, "targetPort": PORT_HEALTH},
            {"name": "rendezvous", "port": PORT_RENDEZVOUS, "targetPort": PORT_RENDEZVOUS},
        ],
    }
    manifest = child(ctx, "Service", name, component=ENGINE, spec=spec)
    manifest["metadata"]["labels"] = {**manifest["metadata"]["labels"], LABEL_ENGINE: name}
    return seal(manifest)
