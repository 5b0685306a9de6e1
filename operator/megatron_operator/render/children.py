"""Every child of a resource, in the order they are applied."""

from __future__ import annotations

from megatron_operator.render.config import config_map
from megatron_operator.render.context import Manifest, RenderContext
from megatron_operator.render.coordinator import coordinator_deployment
from megatron_operator.render.engine import engine_statefulset
from megatron_operator.render.guards import disruption_budget, network_policies, service_account
from megatron_operator.render.revision import revision_child
from megatron_operator.render.server import server_deployment
from megatron_operator.render.services import coordinator_service, engine_service, front_service


def shared_children(ctx: RenderContext, *, server: RenderContext | None = None) -> list[Manifest]:
    """What exists once, whatever the number of engines; all but the keys.

    Args:
        server: the context of the front end where it is another; it reads no weights and is not restarted for them.
    """
    return [
        service_account(ctx),
        config_map(ctx),
        *network_policies(ctx),
        disruption_budget(ctx),
        coordinator_service(ctx),
        front_service(ctx),
        coordinator_deployment(ctx),
        server_deployment(server or ctx),
    ]


def engine_children(ctx: RenderContext, index: int, *, pods: int) -> list[Manifest]:
    return [engine_service(ctx, index), engine_statefulset(ctx, index, pods=pods)]


def all_children(ctx: RenderContext) -> list[Manifest]:
    """Everything a running resource has, all engines at full size; all but the keys."""
    children = [*shared_children(ctx), revision_child(ctx)]
    for index in range(ctx.spec.replicas):
        children += engine_children(ctx, index, pods=ctx.spec.pods_per_engine)
    return children
