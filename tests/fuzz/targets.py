"""All fuzz targets by name. A new one is added here: README.md."""

from __future__ import annotations

from collections.abc import Mapping

from tests.fuzz import input_targets, model_targets
from tests.fuzz.harness import Target

TARGETS: Mapping[str, Target] = {target.name: target for target in (*model_targets.TARGETS, *input_targets.TARGETS)}
