"""The children of a resource, in the order of their application."""

from __future__ import annotations

from megatron_operator.render.config import config_map
from megatron_operator.render.context import STANDBY, Manifest, RenderContext
from megatron_operator.render.coordinator import coordinator_deployment
from megatron_operator.render.engine import engine_statefulset
from megatron_operator.render.front_door import front_door
from megatron_operator.render.guards import disruption_budgets, engine_policy, network_policies, service_account
from megatron_operator.render.revision import revision_child
from megatron_operator.render.server import server_deployment
from megatron_operator.render.services import coordinator_service, engine_service


def plain_children(ctx: RenderContext) -> list[Manifest]:
    """Return the shared children without pods that can always be rendered; without the keys."""
    standby = [coordinator_service(ctx, STANDBY)] if ctx.has_standby else []
    return [
        service_account(ctx),
        config_map(ctx),
        *network_policies(ctx),
        *disruption_budgets(ctx),
        coordinator_service(ctx),
        *standby,
    ]


def engine_children(ctx: RenderContext, index: int, *, pods: int) -> list[Manifest]:
    return [engine_policy(ctx, index), engine_service(ctx, index), engine_statefulset(ctx, index, pods=pods)]


def all_children(ctx: RenderContext) -> list[Manifest]:
    """Return the children of a running resource with all engines; without the keys."""
    children = [*plain_children(ctx), *(build() for build in front_door(ctx).values()), coordinator_deployment(ctx)]
    if ctx.has_standby:
        children.append(coordinator_deployment(ctx, STANDBY))
    children += [server_deployment(ctx), revision_child(ctx)]
    for index in range(ctx.spec.replicas):
        children += engine_children(ctx, index, pods=ctx.spec.pods_per_engine)
    return children
