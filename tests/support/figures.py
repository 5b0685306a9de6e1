"""What tests print of the times they took."""

from __future__ import annotations

import math
from collections.abc import Sequence


def percentile_ms(seconds: Sequence[float], share: float) -> int:
    """The smallest of the times that at least this share of them does not exceed, in milliseconds."""
    return round(1000 * sorted(seconds)[max(0, math.ceil(share * len(seconds)) - 1)])
