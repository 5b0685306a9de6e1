"""Counts what the text operations of a module cost, so that a test can compare short and long answers without a clock.

The source of the module is compiled again with its calls, subscripts, additions, comparisons and literals replaced by
counting ones. An operation costs 1, plus the characters, bytes and items that it reads and writes, as CPython does it:
a search costs what it looks at, a slice and a sum cost what they copy.
"""

from __future__ import annotations

import ast
import builtins
import importlib.util
import re
import sys
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from types import BuiltinFunctionType, ModuleType
from typing import Any

_SEQUENCES = (str, bytes, bytearray, list, tuple, deque)
_CONSTANT = {
    len,
    isinstance,
    issubclass,
    id,
    type,
    hash,
    iter,
    next,
    callable,
    getattr,
    setattr,
    hasattr,
    super,
    range,
    zip,
}
"""Builtins that look at no items of their arguments."""
_COPYING = {str, bytes, list, tuple, set, frozenset, dict, deque}
_APPENDING = {
    "append",
    "appendleft",
    "pop",
    "popleft",
    "clear",
    "extend",
    "get",
    "setdefault",
    "items",
    "values",
    "keys",
}
"""Methods of lists, deques and dicts that do not look at the items that are there already."""


class Operations:
    """The cost so far, and the number of calls, which is what the counting itself takes."""

    def __init__(self) -> None:
        self.cost = self.calls = 0

    def call(self, function: Any, /, *arguments: Any, **options: Any) -> Any:
        self.cost += 1
        self.calls += 1
        result = function(*arguments, **options)
        owner = getattr(function, "__self__", None)
        if isinstance(owner, re.Pattern):
            self.cost += _searched(owner, getattr(function, "__name__", ""), result, *arguments, **options)
        elif isinstance(function, BuiltinFunctionType) and function not in _CONSTANT:
            self.cost += _looked_at(owner, function.__name__, result, arguments)
        elif (isinstance(function, type) and function in _COPYING) or getattr(function, "__module__", "") in (
            "json",
            "ast",
        ):
            self.cost += _sizes(arguments)
        return result

    def item(self, container: Any, key: Any, /) -> Any:
        result = container[key]
        self.cost += 1 + (_size(result) if isinstance(key, slice) else 0)
        return result

    def add(self, left: Any, right: Any, /) -> Any:
        result = left + right
        self.cost += 1 + _size(result)
        return result

    def add_in_place(self, left: Any, right: Any, /) -> Any:
        if isinstance(left, list | bytearray | deque):
            self.cost += 1 + _size(right)
            left += right
            return left
        return self.add(left, right)

    def is_in(self, item: Any, container: Any, /) -> bool:
        self.cost += 1 + _size(container)
        return item in container

    def made(self, value: Any, /) -> Any:
        """A literal with the items of other sequences, or a formatted text."""
        self.cost += 1 + _size(value)
        return value


def _size(value: Any) -> int:
    return len(value) if isinstance(value, _SEQUENCES) else 0


def _sizes(values: Sequence[Any]) -> int:
    """Of sequences and of the texts in them."""
    return sum(
        _size(value) + (sum(map(_size, value)) if isinstance(value, list | tuple | deque) else 0) for value in values
    )


def _searched(pattern: re.Pattern[str], name: str, result: Any, text: str, start: int = 0, *_: Any, **__: Any) -> int:
    if isinstance(result, re.Match):
        return result.end() - start
    if name == "search":
        return len(text) - start
    # A match that fails has looked at as much as the pattern allows, at most.
    return min(len(text) - start, _max_width(pattern))


@cache
def _max_width(pattern: re.Pattern[str]) -> int:
    parsed = re._parser.parse(pattern.pattern, pattern.flags & ~re.UNICODE)  # type: ignore[attr-defined]
    return int(parsed.getwidth()[1])


def _looked_at(owner: Any, name: str, result: Any, arguments: Sequence[Any]) -> int:
    if isinstance(owner, str | bytes | bytearray):
        if name in ("startswith", "endswith"):
            return max(map(len, arguments[0])) if isinstance(arguments[0], tuple) else len(arguments[0])
        if name in ("find", "index"):
            start = arguments[1] if len(arguments) > 1 else 0
            end = min(arguments[2], len(owner)) if len(arguments) > 2 else len(owner)
            return int(max(0, (result if result >= 0 else end) - start)) + len(arguments[0])
        return len(owner) + _sizes(arguments) + _size(result)
    if name in _APPENDING:
        return _sizes(arguments) if name == "extend" else 0
    return _size(owner) + _sizes(arguments)


class _Counting(ast.NodeTransformer):
    def _counted(
        self, method: str, *arguments: ast.expr, keywords: Sequence[ast.keyword] = (), at: ast.AST
    ) -> ast.expr:
        operations = ast.Name("_operations", ast.Load())
        function = ast.Attribute(operations, method, ast.Load())
        return ast.copy_location(ast.Call(function, list(arguments), list(keywords)), at)

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id == "super":
            return node
        return self._counted("call", node.func, *node.args, keywords=node.keywords, at=node)

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        self.generic_visit(node)
        if not isinstance(node.ctx, ast.Load):
            return node
        key = node.slice
        if isinstance(key, ast.Slice):
            bounds = [bound or ast.Constant(None) for bound in (key.lower, key.upper, key.step)]
            key = ast.Call(ast.Name("slice", ast.Load()), bounds, [])
        return self._counted("item", node.value, key, at=node)

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        self.generic_visit(node)
        return self._counted("add", node.left, node.right, at=node) if isinstance(node.op, ast.Add) else node

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.stmt:
        self.generic_visit(node)
        if not isinstance(node.op, ast.Add):
            return node
        before = ast.parse(ast.unparse(node.target), mode="eval").body
        value = self._counted("add_in_place", before, node.value, at=node)
        return ast.copy_location(ast.Assign([node.target], value), node)

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        self.generic_visit(node)
        if len(node.ops) != 1 or not isinstance(node.ops[0], ast.In | ast.NotIn):
            return node
        found = self._counted("is_in", node.left, node.comparators[0], at=node)
        return found if isinstance(node.ops[0], ast.In) else ast.copy_location(ast.UnaryOp(ast.Not(), found), node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.expr:
        self.generic_visit(node)
        return self._counted("made", node, at=node)

    def visit_List(self, node: ast.List) -> ast.expr:
        self.generic_visit(node)
        return self._counted("made", node, at=node) if isinstance(node.ctx, ast.Load) else node

    visit_Tuple = visit_List

    def visit_FormattedValue(self, node: ast.FormattedValue) -> ast.expr:
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.stmt:
        if node.value is not None:
            node.value = self.visit(node.value)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.stmt:
        node.body = [self.visit(statement) for statement in node.body]
        return node

    visit_AsyncFunctionDef = visit_FunctionDef  # type: ignore[assignment]

    def visit_Match(self, node: ast.Match) -> ast.stmt:
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.stmt:
        node.body = [
            self.visit(one) if isinstance(one, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef) else one
            for one in node.body
        ]
        return node


class CountedModules:
    """Copies of modules whose operations are counted. They import each other, and everything else as it is.

    operations: of all of them.
    """

    def __init__(self, *names: str) -> None:
        self.operations = Operations()
        originals = {name: sys.modules.get(name) for name in names}
        self.modules: dict[str, Any] = {}
        try:
            for name in names:
                self.modules[name] = sys.modules[name] = self._load(name)
        finally:
            for name, module in originals.items():
                sys.modules.pop(name, None)
                if module is not None:
                    sys.modules[name] = module

    def _load(self, name: str) -> ModuleType:
        spec = importlib.util.find_spec(name) if name not in sys.modules else sys.modules[name].__spec__
        assert spec is not None
        assert spec.origin is not None
        with open(spec.origin, encoding="utf-8") as file:
            tree = ast.parse(file.read())
        tree.body = [
            _Counting().visit(one) if isinstance(one, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef) else one
            for one in tree.body
        ]
        module = ModuleType(name)
        module.__dict__.update(_operations=self.operations, __file__=spec.origin, __builtins__=builtins)
        sys.modules[name] = module
        exec(compile(ast.fix_missing_locations(tree), spec.origin, "exec"), module.__dict__)
        return module

    def cost_of(self, work: Callable[[], Any]) -> int:
        """Return what `work` costs."""
        before = self.operations.cost
        work()
        return self.operations.cost - before
