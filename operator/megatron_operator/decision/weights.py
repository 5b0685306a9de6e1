"""Compares the weights that the engines serve with the weights of the spec."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from megatron_operator.decision.engine_view import EngineView
from megatron_operator.decision.engines import Engines
from megatron_operator.decision.operation import Operation
from megatron_operator.decision.world import World
from megatron_operator.render.context import RenderContext
from megatron_operator.render.model_source import model_argument, model_hash
from megatron_operator.resource.conditions import Finding, Reason
from megatron_operator.resource.states import LifecyclePhase, SignalKind
from megatron_operator.resource.text import seconds_since
from megatron_runtime.protocol.published_weights import is_published
from megatron_runtime.protocol.text import printable

WEIGHTS_REPORT_SECONDS = 30
"""Time within which engines report the weights of an update. A wrong report after this time leads to another update."""
_EQUAL_FILES = "make the files of the weights equal on all nodes"


@dataclass(frozen=True)
class ConfirmedWeights:
    """Model hash, revision and epoch of the last weight update that the engines confirmed.

    operation: the persisted operation with the progress that `world` shows; None if there is none.
    """

    world: World
    operation: Operation | None

    @cached_property
    def model_hash(self) -> str:
        """Hash of the model of the spec."""
        resource = self.world.resource
        ctx = RenderContext(resource.name, resource.namespace, resource.uid, resource.spec, self.world.settings)
        return model_hash(ctx)

    @property
    def _update(self) -> Operation | None:
        """The last operation, if it is a confirmed update of the weights."""
        last = self.operation
        updated = last is not None and last.weights is not None and last.phase is LifecyclePhase.CONFIRMED
        return last if updated else None

    @cached_property
    def revision(self) -> str | None:
        """Revision of the weights that engines serve.

        The value is None if the spec has a trainer. It is also None until the first engine has served. Until then, pods
        load the revision of the spec.
        """
        if self.world.resource.spec.has_trainer:
            return None
        if self._update is not None:
            return self._update.weights
        stored = self.world.resource.status.get("weights") or {}
        return stored.get("revision") if stored.get("model") == self.model_hash else None

    @cached_property
    def epoch(self) -> int:
        """Epoch of the last confirmed update of this model's weights.

        The value is 0 if there was no update, or if the spec has a trainer.
        """
        if self.world.resource.spec.has_trainer:
            return 0
        if self._update is not None:
            return self._update.epoch or 0
        stored = self.world.resource.status.get("weights") or {}
        return int(stored.get("epoch", 0)) if stored.get("model") == self.model_hash else 0


@dataclass(frozen=True)
class Weights:
    """The weights that the engines of a World serve, compared with the spec.

    ctx: render context with the confirmed weights.
    operation: the persisted operation with the progress that `world` shows; None if there is none.
    """

    world: World
    ctx: RenderContext
    operation: Operation | None
    confirmed: ConfirmedWeights
    engines: Engines

    def of(self, engine: EngineView) -> str | None:
        """Return the revision of an engine's weights. Returns None if the engine is not serving or the revision is
        unknown.

        Returns "" if the engine reports another source than the source of the spec. An engine that was not updated in
        place has the weights for which its pod was created. An engine also has these weights if its container restarts
        while no coordinator remembers the update.
        """
        report, revision = engine.report, self.confirmed.revision
        if report is None or not report.serving or revision is None:
            return None
        if report.source:
            return revision if report.source == model_argument(self.ctx) else ""
        if report.source is None and report.epoch >= self.confirmed.epoch:
            return revision
        return next((pod.weights for pod in engine.pods if not pod.deleting), None)

    @cached_property
    def wrong(self) -> tuple[EngineView, ...]:
        """Serving engines whose weights differ from the weights of the last confirmed update."""
        if self.engines.old_model:
            return ()
        right = (None, self.confirmed.revision)
        return tuple(engine for engine in self.engines.wanted if self.of(engine) not in right)

    @cached_property
    def mixed(self) -> tuple[str, ...]:
        """The different weights digests that engines of the same revision report; empty if their digests are equal.

        Engines with different digests have loaded different files. With a trainer, only engines of the same epoch are
        compared, because not all engines report an update at the same time.
        """
        has_trainer = self.world.resource.spec.has_trainer
        digests: dict[tuple[str, int], set[str]] = {}
        for engine in self.engines.serving:
            report = engine.report
            if report is not None and report.digest:
                epoch = report.epoch if has_trainer else 0
                digests.setdefault((report.revision, epoch), set()).add(report.digest)
        mixed = (group for group in digests.values() if len(group) > 1)
        return tuple(sorted(set().union(*mixed)))

    @cached_property
    def mixed_after_update(self) -> tuple[str, ...]:
        """Digests of weights that still differ after the weights were loaded again; empty if none differ."""
        last, stored = self.operation, (self.world.resource.status.get("weights") or {}).get("differentDigests")
        updated = last is not None and last.over(SignalKind.UPDATE_WEIGHTS)
        recent = updated and last is not None and seconds_since(last.since, self.world.now) < WEIGHTS_REPORT_SECONDS
        return self.mixed if recent or stored == list(self.mixed) else ()

    @cached_property
    def due(self) -> str | None:
        """Revision of the weights that engines should load in place. The value is None if no update is due.

        If engines report different digests of their weights, an update is due only if an earlier update has shown that
        the engines can update their weights.
        """
        wanted, revision = self.world.resource.spec.weights, self.confirmed.revision
        if wanted is None or revision is None:
            return None
        mixed = self.confirmed.epoch > 0 and self.mixed and not self.mixed_after_update
        return wanted.revision if revision != wanted.revision or self.wrong or mixed else None

    @cached_property
    def published(self) -> Mapping[str, Any]:
        """Source, epoch and digest of the trainer's weights that all serving engines have, or last had.

        The value is empty if the engines have had no such weights of this model.
        """
        reports = [engine.report for engine in self.engines.serving if engine.report is not None]
        found = {(report.source, report.epoch, report.digest) for report in reports}
        if len(found) == 1:
            source, epoch, digest = found.pop()
            if source and is_published(source) and digest:
                return {"source": printable(source), "epoch": epoch, "digest": digest}
        stored = self.world.resource.status.get("weights") or {}
        is_same = stored.get("model") == self.confirmed.model_hash
        return {name: stored[name] for name in ("source", "epoch", "digest") if is_same and name in stored}

    @cached_property
    def _lost(self) -> Finding | None:
        """The error if engines serve the weights of spec.model.source although a trainer has published weights.

        The value is None if no engine serves these weights, or if no trainer has published weights.
        """
        epoch = self.published.get("epoch", 0)
        reports = [engine.report for engine in self.engines.serving if engine.report is not None]
        names = ", ".join([report.name for report in reports if report.source == ""][:8])
        if not epoch or not names:
            return None
        return Reason.WRONG_WEIGHTS, (
            f"{names} serve the weights of spec.model.source, because no engine had the weights of epoch {epoch} when "
            "the coordinator started; publish the weights again"
        )

    @cached_property
    def finding(self) -> Finding | None:
        """The error of the weights that engines serve, or None.

        It is an error if engines serve other weights than requested, or if the weights of engines differ.
        """
        if self.world.resource.spec.has_trainer and self._lost is not None:
            return self._lost
        if self.wrong:
            names = ", ".join(engine.name for engine in self.wrong[:8])
            return Reason.WRONG_WEIGHTS, f"{names} serve other weights than revision {self.confirmed.revision}"
        if self.mixed:
            digests = ", ".join(digest[:12] for digest in self.mixed[:8])
            text = f"engines of one revision report different digests of their weights: {digests}"
            remedy = "publish the weights again" if self.world.resource.spec.has_trainer else _EQUAL_FILES
            return Reason.WRONG_WEIGHTS, f"{text}; {remedy}"
        return None
