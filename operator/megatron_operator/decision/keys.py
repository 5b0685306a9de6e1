"""Generations of the CURVE keys."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property

from megatron_operator.decision.world import ChildRef, World
from megatron_operator.resource.text import parse


@dataclass(frozen=True)
class Keys:
    """Keys of a World."""

    world: World

    @cached_property
    def server_generation(self) -> int:
        """Generation of the coordinator's own key: from the Secret, or of the Secret that will be created."""
        if self.world.keys is not None:
            return self.world.keys.server_generation
        if ChildRef("Secret", f"{self.world.resource.name}-keys") in self.world.children:
            # The Secret exists and cannot be read: do not restart anything because of that.
            return int((self.world.resource.status.get("keys") or {}).get("generation", 1))
        return self.first_generation

    @cached_property
    def first_generation(self) -> int:
        """Generation of the keys of a new Secret: higher than any earlier one."""
        lost = (self.world.resource.status.get("keys") or {}).get("generation", 0)
        return max(int(lost) + 1, self.world.resource.spec.keys.generation)

    @cached_property
    def wanted_generation(self) -> int | None:
        """The desired generation by the spec or the age of the current one; never an earlier one. None without keys."""
        spec, keys = self.world.resource.spec.keys, self.world.keys
        if keys is None:
            return None
        made = parse(keys.since)
        if spec.rotate_after_days is not None and made is not None:
            aged = self.world.now - made >= timedelta(days=spec.rotate_after_days)
            return max(spec.generation, keys.generation + aged)
        return max(spec.generation, keys.generation)
