"""The scripts of bench/ import each other by name."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3] / "bench"))
