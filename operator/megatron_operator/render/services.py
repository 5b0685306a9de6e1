"""Services: `NAME-coordinator`, its standby's, and a headless one for the ranks of each engine."""

from __future__ import annotations

from megatron_operator.render.context import (
    COORDINATOR,
    ENGINE,
    LABEL_ENGINE,
    PORT_ADMIN,
    PORT_CLIENT,
    PORT_ENGINE,
    PORT_HEALTH,
    PORT_RENDEZVOUS,
    Manifest,
    RenderContext,
    child,
    seal,
    selector,
)


def coordinator_service(ctx: RenderContext, component: str = COORDINATOR) -> Manifest:
    """Return the Service of a coordinator; of the standby for the component STANDBY."""
    ports = [("client", PORT_CLIENT), ("engine", PORT_ENGINE), ("admin", PORT_ADMIN), ("health", PORT_HEALTH)]
    spec = {
        "selector": selector(ctx, component),
        "ports": [{"name": name, "port": port, "targetPort": port} for name, port in ports],
    }
    name = ctx.coordinator_name if component == COORDINATOR else ctx.standby_name
    return seal(child(ctx, "Service", name, component=component, spec=spec))


def engine_service(ctx: RenderContext, index: int) -> Manifest:
    """Return the headless Service of an engine's ranks, which must resolve each other before any of them is ready."""
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
