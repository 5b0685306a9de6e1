"""A World, divided into the topics that policies read. Each topic is a frozen object with a class in its own module."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from megatron_operator.decision.adapters import AdapterView
from megatron_operator.decision.blockers import Blockers
from megatron_operator.decision.desired import Desired, Keys
from megatron_operator.decision.diagnosis import References, references
from megatron_operator.decision.engines import Engines, Observed
from megatron_operator.decision.losses import Losses
from megatron_operator.decision.rendered import Rendered, former_downloads, former_scheme
from megatron_operator.decision.restarts import Restarts, count_restarts
from megatron_operator.decision.revisions import RevisionCheck, Rollout
from megatron_operator.decision.update import Update
from megatron_operator.decision.weights import ConfirmedWeights, Weights
from megatron_operator.decision.world import World
from megatron_operator.render.context import RenderContext, recent


@dataclass(frozen=True)
class Scene:
    """The topics of a World.

    Each topic is computed when it is first read, and depends only on topics that are defined above it.
    """

    world: World

    @cached_property
    def desired(self) -> Desired:
        return Desired(self.world)

    @cached_property
    def keys(self) -> Keys:
        return Keys(self.world)

    @cached_property
    def adapters(self) -> AdapterView:
        return AdapterView(self.world, self.desired.operation)

    @cached_property
    def restarts(self) -> list[Restarts]:
        """The container restarts of each component."""
        return count_restarts(self.world.resource.status.get("restarts") or (), self.world.pods, self.world.now)

    @cached_property
    def references(self) -> References:
        """The Secrets and claims that the spec names."""
        return references(self.world.resource.spec.model_dump(mode="json"))

    @cached_property
    def update(self) -> Update:
        return Update(self.world, self.desired.state)

    @cached_property
    def _confirmed_weights(self) -> ConfirmedWeights:
        return ConfirmedWeights(self.world, self.desired.operation)

    @cached_property
    def ctx(self) -> RenderContext:
        """The render context.

        Its spec has the current weights of the engines instead of the desired weights. Its settings are the settings of
        the installation, with the release of the resource.
        """
        resource = self.world.resource
        spec, revision = resource.spec, self._confirmed_weights.revision
        if revision is not None and spec.weights is not None and spec.weights.revision is not None:
            spec = spec.model_copy(update={"weights": spec.weights.model_copy(update={"revision": revision})})
        settings = self.update.release.settings(self.world.settings)
        context = RenderContext(
            name=resource.name,
            namespace=resource.namespace,
            uid=resource.uid,
            spec=spec,
            settings=settings,
            server_key=self.keys.server_generation,
            former_scheme=former_scheme(self.world),
            former_downloads=former_downloads(self.world),
        )
        return recent(context)

    @cached_property
    def rendered(self) -> Rendered:
        return Rendered(self.world, self.ctx, self._confirmed_weights.model_hash, self.references)

    @cached_property
    def engines(self) -> Engines:
        return Engines(self.world, self.ctx, self.desired, self.update, self.rendered)

    @cached_property
    def weights(self) -> Weights:
        return Weights(self.world, self.ctx, self.desired.operation, self._confirmed_weights, self.engines)

    @cached_property
    def observed(self) -> Observed:
        return Observed(self.world, self.desired, self.engines)

    @cached_property
    def losses(self) -> Losses:
        return Losses(self.world, self.desired, self.engines)

    @cached_property
    def blockers(self) -> Blockers:
        return Blockers(self.world, self.ctx, self.references, self.rendered, self.engines, self.losses)

    @cached_property
    def rollout(self) -> Rollout:
        return Rollout(self.world, self.desired, self.rendered, self.engines)

    @cached_property
    def check(self) -> RevisionCheck:
        return RevisionCheck(self.world, self.ctx, self.references, self.rollout)

    def read_by(self, policy: Callable[..., Any]) -> Any:
        """Call a policy with the topics that its parameters name, and return its result."""
        return policy(**{name: getattr(self, name) for name in topics(policy)})


@cache
def topics(policy: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of the topics that a policy reads, which are its parameter names."""
    return tuple(inspect.signature(policy).parameters)
