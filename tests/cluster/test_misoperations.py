"""Specs that the schema accepts and no engine can run with: reverting the change is enough to recover."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from bad_values import WEDGES
from soak import size

from megatron_operator.resource.names import LABEL_INSTANCE, LABEL_REVISION

from .in_process_fleet import InProcessFleet
from .operator_process import OperatorProcess

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

CHANGES = size(WEDGES[::3], soak=WEDGES)
DWELL_SECONDS = size(1, soak=30)
"""How long a resource keeps the bad spec."""


async def test_reverting_a_bad_spec_recovers_the_resource(
    fleet: InProcessFleet, make_operator: Callable[..., OperatorProcess], make_resource: Callable[[str], Any]
) -> None:
    images = ("--allow-image-repository", "registry.example/none")
    operator = make_operator("--no-security", "--coordinator-address", fleet.address_template, *images)
    await operator.start()
    sound: dict[str, str] = {}

    def breaks(pod: Mapping[str, Any]) -> bool:
        labels = pod["metadata"]["labels"]
        wanted = sound.get(labels[LABEL_INSTANCE])
        return wanted is not None and labels[LABEL_REVISION] != wanted

    fleet.breaks = breaks

    async def misoperate(number: int, wedge: dict[str, Any]) -> float:
        resource = make_resource(f"w-{number}")
        fleet.coordinator(resource.name)
        await resource.create(replicas=2)
        before = await resource.settled("Running")
        sound[resource.name] = before["revision"]
        was = (await resource.get())["spec"]
        await resource.patch(**wedge)
        await resource.until(lambda status: True)  # the operator has read it
        await asyncio.sleep(DWELL_SECONDS)

        began = time.monotonic()
        # A merge patch only adds to a map: remove the maps first.
        await resource.patch(**dict.fromkeys(wedge.keys() - {"model", "replicas"}))
        await resource.patch(**{name: was.get(name) for name in wedge} | _without(wedge, was))
        await resource.until(
            lambda status: (status["state"], status["ready"]) == ("Running", "2/2") and "plan" not in status,
            seconds=180,
        )
        return time.monotonic() - began

    async with asyncio.TaskGroup() as all_at_once:
        tasks = [all_at_once.create_task(misoperate(number, wedge)) for number, wedge in enumerate(CHANGES)]
    seconds = sorted(task.result() for task in tasks)
    print(f"\n{len(CHANGES)} misoperations reverted: all resources serve again, the last after {seconds[-1]:.1f} s")


def _without(wedge: Mapping[str, Any], was: Mapping[str, Any]) -> dict[str, Any]:
    """Return a patch that restores the model of before and removes what `wedge` added."""
    if "model" not in wedge:
        return {}
    added = dict.fromkeys(wedge["model"].keys() - was["model"].keys())
    sources = {**dict.fromkeys(wedge["model"].get("source", {})), **was["model"]["source"]}
    return {"model": {**added, **was["model"], "source": sources}}
