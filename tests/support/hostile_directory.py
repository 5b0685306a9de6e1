"""A directory, such as a downloaded model's, with Python modules that record when a process imports them."""

from __future__ import annotations

import sys
from pathlib import Path

PACKAGES = ("click", "megatron_runtime", "msgpack", "numpy", "pydantic", "torch", "uvicorn", "uvloop", "zmq")
CUSTOM = ("sitecustomize", "usercustomize")


class HostileDirectory:
    """imported: names of the modules that processes have imported from it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "model"
        self.path.mkdir()
        self._mark = folder / "imported"
        code = f"with open({str(self._mark)!r}, 'a') as mark: mark.write(__name__ + ' ')\n"
        for name in (*sys.stdlib_module_names, *PACKAGES, *CUSTOM):
            (self.path / f"{name}.py").write_text(code)

    @property
    def imported(self) -> list[str]:
        return self._mark.read_text().split() if self._mark.exists() else []
