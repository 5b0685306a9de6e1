"""Small changes of a module's source, one at a time, each of which a test should detect.

Texts, annotations, decorators, log lines and assertions are not changed, because no test should depend on them.
`check_integrity` is not changed because it is itself a test.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
}
_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
_SIMPLE = (ast.Continue, ast.Break, ast.Raise, ast.Delete, ast.AugAssign)


@dataclass(frozen=True)
class Mutant:
    """`path` with lines `first` to `last` changed. `begins`: first line of the changed statement."""

    path: str
    begins: int
    first: int
    last: int
    before: str
    after: str
    source: str


def mutants_of(path: str, source: str) -> Iterator[Mutant]:
    """Yield every mutant of a module that compiles, in the order of its lines."""
    lines = [line.encode() for line in source.splitlines(keepends=True)]
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    raw = b"".join(lines)
    for begins, node, after in _edits(ast.parse(source)):
        first, last = node.lineno, node.end_lineno or node.lineno
        begin = starts[first - 1] + node.col_offset
        end = starts[last - 1] + (node.end_col_offset or 0)
        changed = (raw[:begin] + after.encode() + raw[end:]).decode()
        try:
            compile(changed, path, "exec")
        except SyntaxError:
            continue
        before = " ".join(raw[begin:end].decode().split())
        yield Mutant(path, begins, first, last, before, after, changed)


Edit = tuple[int, ast.stmt | ast.expr, str]
"""The first line of the statement, what is replaced, and by what."""


def _edits(tree: ast.Module) -> Iterator[Edit]:
    for statement, node in _nodes(tree, tree):
        for after in _changes(node):
            yield statement.lineno, node, after


def _nodes(node: ast.AST, statement: ast.AST) -> Iterator[tuple[ast.stmt, ast.stmt | ast.expr]]:
    """Yield the nodes that may be changed, each with its statement."""
    if isinstance(node, ast.stmt):
        statement = node
    if isinstance(node, ast.stmt | ast.expr) and isinstance(statement, ast.stmt):
        yield statement, node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not _is_left_alone(child):
                yield from _nodes(child, statement)


def _is_left_alone(node: ast.AST) -> bool:
    match node:
        case ast.JoinedStr() | ast.Assert() | ast.Import() | ast.ImportFrom():
            return True
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id="logger")))):
            return True
        case ast.FunctionDef(name="check_integrity"):
            return True
    return False


def _changes(node: ast.stmt | ast.expr) -> Iterator[str]:
    """Yield the sources that may replace `node`."""
    match node:
        case ast.Compare(ops=[op], comparators=[right]):
            yield _text(ast.Compare(node.left, [_COMPARISONS[type(op)]()], [right]))
        case ast.BoolOp(op=op, values=values):
            yield _text(ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values))
            for index in range(len(values)):
                rest = values[:index] + values[index + 1 :]
                yield _text(rest[0] if len(rest) == 1 else ast.BoolOp(op, rest))
        case ast.UnaryOp(op=ast.Not()):
            yield _text(node.operand)
        case ast.BinOp(op=op) if type(op) in _ARITHMETIC:
            yield _text(ast.BinOp(node.left, _ARITHMETIC[type(op)](), node.right))
        case ast.IfExp(body=body, orelse=orelse):
            yield _text(body)
            yield _text(orelse)
        case ast.Constant(value=bool() as value):
            yield repr(not value)
        case ast.Constant(value=int() | float() as value):
            yield repr(value + 1)
        case ast.Name(id=name) if name in _NAMES:
            yield _NAMES[name]
        case ast.Call(keywords=keywords):
            for index, keyword in enumerate(keywords):
                if keyword.arg is not None:
                    yield _text(ast.Call(node.func, node.args, keywords[:index] + keywords[index + 1 :]))
        case ast.Dict(keys=keys, values=values):
            for index in range(len(keys)):
                fewer = keys[:index] + keys[index + 1 :], values[:index] + values[index + 1 :]
                yield _text(ast.Dict(*fewer))
        case ast.Set(elts=elements) if len(elements) > 1:
            for index in range(len(elements)):
                yield _text(ast.Set(elements[:index] + elements[index + 1 :]))
        case ast.If(body=[ast.Return() | ast.Continue() | ast.Raise()], orelse=[]):
            yield "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "pass"
        case ast.Expr(value=ast.Call() | ast.Await()):
            yield "pass"
        case _ if isinstance(node, _SIMPLE):
            yield "pass"


def _text(node: ast.expr) -> str:
    return f"({ast.unparse(ast.fix_missing_locations(node))})"
