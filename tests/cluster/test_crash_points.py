"""The operator's task is killed at any point of a resource's lifecycle: same final state, no signal executed twice.

Real API server, one operator process, many resources at once: `p-0` is undisturbed; the task of `p-N` is killed at its
Nth point and replaced (killed_operator.py). `MEGATRON_SOAK=1` tries every point, or those of one `MEGATRON_PART`;
without it the test tries a few, and `MEGATRON_SEED` is the first of them.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from soak import FIRST_SEED, SOAK, part

from megatron_operator.cluster.api import KubeApi
from megatron_runtime.protocol.headers import Header

from .in_process_fleet import InProcessFleet
from .operator_process import OperatorProcess

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(3600)]

KILLED_OPERATOR = Path(__file__).with_name("killed_operator.py")
SAMPLE = 2
AT_ONCE = 12
STAGE_SECONDS = 240.0
LIFE: tuple[dict[str, Any], ...] = (
    {"desiredState": "Paused"},
    {"desiredState": "Suspended"},
    {"desiredState": "Running"},
    {"engine": {"batching": {"maxRequests": 7}}},
    {"replicas": 1},
    {"desiredState": "Stopped"},
    {"desiredState": "Running"},
)
VERBS = [Header.PAUSE, Header.SUSPEND, Header.RESUME, Header.UNPAUSE, Header.PAUSE, Header.STOP]


@pytest.fixture
def points_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "points.json"
    monkeypatch.setenv("POINTS_FILE", str(path))
    return path


async def live(resource: Any, fleet: InProcessFleet) -> tuple[Any, ...]:
    """Run one lifecycle. Return its final state without names, times and hashes."""
    fleet.coordinator(resource.name)
    await resource.create(replicas=2)
    await resource.settled("Running", seconds=STAGE_SECONDS)
    state = "Running"
    for change in LIFE:
        await resource.patch(**change)
        state = change.get("desiredState", state)
        await resource.until(
            lambda status, state=state: status["state"] == state and "plan" not in status, seconds=STAGE_SECONDS
        )
    status = await resource.status()
    engines = [(engine["state"], engine["revision"] == status["revision"]) for engine in status["engines"]]
    kinds = Counter(name.split()[0] for name in await resource.children())
    transitions = [(entry["from"], entry["to"]) for entry in status["history"]]
    return status["state"], status["ready"], status["updatedReplicas"], engines, kinds, transitions


def told(points_file: Path) -> dict[str, int]:
    """Return the number of points of each lifecycle, by resource."""
    return json.loads(points_file.read_text())


async def signals(fleet: InProcessFleet, name: str) -> list[Header]:
    """Return the signals that the coordinator executed, except DRAIN: a new task may repeat it under a new id."""
    operations = (await fleet.ask(name)).operations
    assert len({operation.operation_id for operation in operations}) == len(operations)
    assert {operation.phase for operation in operations} == {"Confirmed"}
    return [Header(operation.signal) for operation in operations if operation.signal != Header.DRAIN]


async def test_a_task_killed_at_any_point_reaches_the_same_final_state(
    api: KubeApi,
    namespace: str,
    fleet: InProcessFleet,
    make_operator: Callable[..., OperatorProcess],
    make_resource: Callable[[str], Any],
    points_file: Path,
) -> None:
    def start() -> OperatorProcess:
        flags = ("--no-security", "--coordinator-address", fleet.address_template)
        return make_operator(*flags, program=(str(KILLED_OPERATOR),))

    operator = start()
    await operator.start()
    reference = await live(make_resource("p-0"), fleet)
    assert await signals(fleet, "p-0") == VERBS
    assert operator.stop() == 0
    whole = told(points_file)["p-0"]

    points = part(range(1, whole + 1)) if SOAK else list(range(FIRST_SEED, whole + 1, whole // SAMPLE))[:SAMPLE]
    await operator.start()
    limit = asyncio.Semaphore(AT_ONCE)

    async def die_at(point: int) -> None:
        async with limit:
            name = f"p-{point}"
            assert await live(make_resource(name), fleet) == reference, f"killed at point {point}"
            assert await signals(fleet, name) == VERBS, f"killed at point {point}"
            await make_resource(name).delete()

    async with asyncio.TaskGroup() as lives:
        for point in points:
            lives.create_task(die_at(point))

    killed = {line["point"]: line["at"] for line in operator.lines("killed")}
    places = Counter(at.split("/")[0].rsplit(" ", 1)[0] for at in killed.values())
    print(f"\nkilled at {len(killed)} of {whole} points ({dict(places)}): same end, {len(VERBS)} verbs once each")
    # Lifecycles differ by a few requests, so some may not reach the last points.
    assert len(killed) >= 0.8 * len(points)
