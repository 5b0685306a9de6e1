"""What an installation of the operator fixes for every resource."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Settings:
    """Installation-wide inputs of rendering and deciding."""

    runtime_image: str
    """Image of coordinator, server and engines where the resource names none."""
    operator_namespace: str = "megatron-system"
    """Where the operator's own pods run; its admin key lives here and NetworkPolicies admit it."""
    image_pull_policy: str = "IfNotPresent"
    security: bool = True
    """CURVE on every socket: keys are created, mounted and named on the command lines."""
