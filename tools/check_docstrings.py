"""Reports strings that document nothing: `python tools/check_docstrings.py [FILE ...]`.

A string statement at the beginning of a module, class or function documents this module, class or function. A string
statement after an assignment documents the assigned name. In all other places, a string statement documents no name.
The program prints `path:line: message` for each string statement in another place, and exits with status 1 if there is
one.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MESSAGE = "a string that documents nothing: put it after the assignment that it documents, or make it a comment"
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def orphaned(tree: ast.Module) -> Iterator[int]:
    """Yield the line of each string statement that documents nothing."""
    for node in ast.walk(tree):
        for _, block in ast.iter_fields(node):
            if isinstance(block, list):
                yield from _orphaned_in(block, begins=isinstance(node, _DOCUMENTED) and block is node.body)


def _orphaned_in(block: Sequence[ast.AST], *, begins: bool) -> Iterator[int]:
    """Yield the line of each string statement in `block` that documents nothing.

    begins: whether the first string in `block` is the docstring of a module, class or function.
    """
    before: ast.AST | None = None
    for index, statement in enumerate(block):
        if _is_string(statement) and not (index == 0 and begins) and not isinstance(before, ast.Assign | ast.AnnAssign):
            yield statement.lineno
        before = statement


def _is_string(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def main(arguments: list[str]) -> int:
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    names = [str(Path(name).resolve().relative_to(ROOT)) for name in arguments] or listed.splitlines()
    findings = 0
    for name in names:
        if not (ROOT / name).is_file():
            continue
        for line in orphaned(ast.parse((ROOT / name).read_text(), name)):
            print(f"{name}:{line}: {MESSAGE}")
            findings += 1
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
