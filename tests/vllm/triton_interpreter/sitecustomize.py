"""Imported at the start of Python: vLLM finds an active Triton backend, which is Triton's interpreter on a CPU.

vLLM decides at its import whether Triton is usable. The CPU build of vLLM looks for a backend of the name "cpu".
"""

from triton.backends import Backend, backends


class InterpreterDriver:
    """Stands for the driver. Kernels run in the interpreter and never reach it."""

    @classmethod
    def is_active(cls) -> bool:
        return True


backends["cpu"] = Backend(compiler=None, driver=InterpreterDriver)
