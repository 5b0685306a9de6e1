"""`spec.coordinator`: routing and replicas of the coordinator."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from megatron_operator.resource.base import ApiModel, Matches, Name, PodTemplate, section

Alpha = Annotated[
    str,
    Matches(
        r"^(0(\.[0-9]+)?|1(\.0+)?)$",
        "a decimal number from 0 to 1, such as 0.5",
    ),
]


class RoutingPolicy(StrEnum):
    LOAD_BALANCED = "LoadBalanced"
    ROUND_ROBIN = "RoundRobin"
    FIRST_PREFIX_BLOCK = "FirstPrefixBlock"
    LONGEST_PREFIX = "LongestPrefix"
    LEAST_COST = "LeastCost"


class Routing(ApiModel):
    policy: RoutingPolicy | None = Field(
        default=None,
        description="Policy that chooses an engine for each request. Default: LeastCost, which suits most loads.",
    )
    alpha: Alpha = Field(
        default="0.5",
        description="Weight of a cached prefix relative to free capacity, as a decimal string from 0 to 1. Only the "
        "policies FirstPrefixBlock and LongestPrefix use it. Lower it if the load of the engines is uneven.",
        max_length=20,
    )


class CoordinatorSpec(ApiModel):
    routing: Routing = section(Routing, "Settings for routing requests to engines.")
    replicas: int = Field(
        default=1,
        ge=1,
        le=2,
        description="Number of coordinators. 2 adds a standby on another node, which takes over within seconds if "
        "the active coordinator fails.",
    )
    priority_class_name: Name | None = Field(
        default=None,
        description="PriorityClass of the coordinator's pod. Set one with a high priority so that the scheduler "
        "preempts other pods if no node has space. Names that begin with system- are not allowed.",
    )
    pod_template: PodTemplate | None = Field(
        default=None,
        description="Pod fields that the operator merges into the coordinator's pod, such as resources and "
        "tolerations. The container is called coordinator. The operator rejects fields that its pod policy does not "
        "allow.",
    )
