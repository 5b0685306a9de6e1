"""The signature of a policy names what it reads: each parameter is a topic of the scene, of the topic's type."""

from __future__ import annotations

import typing

import pytest

from megatron_operator.decision.policies import POLICIES
from megatron_operator.decision.policies.verdict import Policy
from megatron_operator.decision.scene import Scene, topics
from megatron_operator.decision.world import World

TOPICS = {
    name: typing.get_type_hints(topic.func)["return"]
    for name, topic in vars(Scene).items()
    if hasattr(topic, "func") and not name.startswith("_")
} | {"world": World}


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.__name__)
def test_a_policy_reads_topics_of_the_scene_only(policy: Policy) -> None:
    hints = typing.get_type_hints(policy)
    assert topics(policy), "a policy reads something"
    assert {name: hints[name] for name in topics(policy)} == {name: TOPICS[name] for name in topics(policy)}
