"""Restricts which container messages a status may quote: those of images whose repositories the installation lists.

A container of any other image can read Secrets and files and write them to its termination message, or send them to
its coordinator as an error. A user who may read the status could then read them without access to the pods' logs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megatron_operator.model.resource import MegatronInferenceSpec
from megatron_operator.plan.world import CoordinatorSnapshot, World

NOT_QUOTED = "(not quoted: the chart's podPolicy.quotedImageRepositories does not list the image)"


def quotable(world: World) -> World:
    """Return the World without the messages of containers whose images may not be quoted."""
    quotes = world.settings.quotes
    pods = tuple(
        pod if not pod.last_message or quotes(pod.image) else replace(pod, last_message=NOT_QUOTED)
        for pod in world.pods
    )
    foreign = not all(quotes(image) for image in _images(world.resource.spec))
    coordinator = _without_words(world.coordinator) if foreign else world.coordinator
    return replace(world, pods=pods, coordinator=coordinator)


def _images(spec: MegatronInferenceSpec) -> Iterator[str]:
    """Return every container image in the spec."""
    for image in (spec.engine.image, spec.engine.vllm.image if spec.engine.vllm else None):
        if image is not None:
            yield image
    for template in (spec.engine.pod_template, spec.coordinator.pod_template, spec.server.pod_template):
        pod = (template or {}).get("spec")
        for field in ("containers", "initContainers"):
            containers = pod.get(field) if isinstance(pod, dict) else None
            for container in containers if isinstance(containers, list) else ():
                if isinstance(container, dict) and "image" in container:
                    yield str(container["image"])


def _without_words(snapshot: CoordinatorSnapshot) -> CoordinatorSnapshot:
    """Remove texts. Numbers and states stay, because decisions depend on them."""
    operations = {
        name: replace(report, message=NOT_QUOTED if report.message else "")
        for name, report in snapshot.operations.items()
    }
    canaries = {
        name: replace(report, message=NOT_QUOTED if report.message else "")
        for name, report in snapshot.canaries.items()
    }
    engines = tuple(replace(engine, digest="") for engine in snapshot.engines)
    return replace(snapshot, operations=operations, canaries=canaries, engines=engines)
