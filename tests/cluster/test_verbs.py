"""From apply to Running and through every verb, with a real coordinator and real engine processes."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.cluster


async def test_apply_then_every_verb(resource: Any, operator: Any, node: Any) -> None:
    await resource.create()
    await resource.settled("Running")
    for state in ("Paused", "Suspended", "Running", "Stopped", "Running"):
        await resource.patch(desiredState=state)
        await resource.settled(state)
    print(await resource.status(), await resource.events())
