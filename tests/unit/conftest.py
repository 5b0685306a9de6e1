"""No test here needs a GPU. Triton is an interpreter or a compiler from its first import on, and other packages import
it too: the choice is made before any test module is."""

from __future__ import annotations

import os
import sys

if "triton" not in sys.modules:
    os.environ["TRITON_INTERPRET"] = "1"
