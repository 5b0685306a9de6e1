"""All fuzz targets by name. A new one is added here: README.md."""

from __future__ import annotations

from collections.abc import Mapping

from tests.fuzz import input_targets, model_targets, transport_targets
from tests.fuzz.harness import Target

_ALL = (*model_targets.TARGETS, *input_targets.TARGETS, *transport_targets.TARGETS)
TARGETS: Mapping[str, Target] = {target.name: target for target in _ALL}
