"""Build hook of the wheel. If the build machine has g++, the wheel contains the compiled library of the CPU kernels."""

from __future__ import annotations

import importlib.util
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_KERNELS = "kernels/megatron_kernels/cpu/build.py"


class KernelsHook(BuildHookInterface):
    """Adds the compiled CPU kernels to the wheel if g++ is available.

    Without g++, the wheel is the same for all platforms, and the first start compiles the library.
    """

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        # By its path: the package is not installed in the build environment.
        spec = importlib.util.spec_from_file_location("kernels_build", Path(self.root, _KERNELS))
        assert spec is not None
        assert spec.loader is not None
        build = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(build)
        try:
            library = build.library()
        except build.BuildError as error:
            self.app.display_warning(f"the wheel has no library of the CPU kernels: {error}")
            return
        build_data["force_include"][str(library)] = f"megatron_kernels/cpu/{library.name}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
