"""Bad values from the schema are rejected with the field; valid ones that wedge a resource recover after a revert."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from bad_values import GOOD, WEDGES, BadValue, bad_values
from pydantic import ValidationError

from megatron_operator.manifest_file import describe
from megatron_operator.resource.pod_policy import PodPolicy
from megatron_operator.resource.spec import parse_spec

ALL = bad_values()


def test_there_are_two_hundred_bad_values() -> None:
    assert len(ALL) >= 200
    parse_spec(GOOD)


@pytest.mark.parametrize("bad", ALL, ids=lambda bad: f"{bad.field}: {bad.why}")
def test_the_offline_tools_reject_it_and_name_the_field(bad: BadValue) -> None:
    with pytest.raises(ValidationError) as rejected:
        parse_spec(bad.spec())
    assert bad.field in describe(rejected.value)


@pytest.mark.parametrize("wedge", WEDGES, ids=str)
def test_a_resource_recovers_when_a_bad_value_is_reverted(make_cluster: Any, wedge: dict[str, Any]) -> None:
    cluster = make_cluster(replicas=2)
    policy = PodPolicy(image_repositories=("registry.example/none",))
    cluster.settings = replace(cluster.settings, pod_policy=policy)
    cluster.settle()
    before = {name: cluster.spec.get(name) for name in wedge}
    cluster.broken_engines |= {"demo-engine-0", "demo-engine-1"}
    cluster.patch(**wedge)
    cluster.play(12)
    cluster.broken_engines.clear()
    cluster.patch()
    for name, value in before.items():
        if value is None:
            cluster.spec.pop(name)
        else:
            cluster.spec[name] = value
    cluster.settle()
    assert (cluster.state, cluster.status["ready"]) == ("Running", "2/2")
    assert cluster.condition("Degraded")["status"] == "False"
