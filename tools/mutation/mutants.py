"""Finds and makes mutants: copies of a module that differ in one operator, constant, condition or statement."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

_OPERATORS: dict[type[ast.AST], type[ast.AST]] = {
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
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}
_LOG = {"debug", "info", "warning", "error", "exception"}
Change = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Mutant:
    """The `index`th change that is possible in `path`; `line` and `what` describe it."""

    path: Path
    index: int
    line: int
    what: str

    def source(self) -> str:
        """The changed module."""
        tree = ast.parse(self.path.read_text(encoding="utf-8"))
        for index, (_, _, change) in enumerate(_changes(tree)):
            if index == self.index:
                change()
                return ast.unparse(ast.fix_missing_locations(tree))
        raise IndexError(self.index)

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {self.what}"


def mutants(path: Path) -> list[Mutant]:
    """All mutants of a file, in the order of its syntax tree."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [Mutant(path, index, line, what) for index, (line, what, _) in enumerate(_changes(tree))]


def _changes(tree: ast.Module) -> Iterator[tuple[int, str, Change]]:
    """(line, description, what carries it out). Types, docstrings and logging are left alone."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for node in (*function.args.defaults, *filter(None, function.args.kw_defaults)):
                yield from _of_tree(node)
            for statement in function.body:
                if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    yield from _of_tree(statement)


def _of_tree(node: ast.AST) -> Iterator[tuple[int, str, Change]]:
    if _is_quiet(node):
        return
    yield from _of_node(node)
    for name, value in ast.iter_fields(node):
        if name not in {"annotation", "returns", "pattern", "msg", "exc"}:
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield from _of_tree(child)


def _is_quiet(node: ast.AST) -> bool:
    if not isinstance(node, ast.Expr):
        return False
    call = node.value
    if isinstance(call, ast.Constant):
        return True
    return isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in _LOG


def _of_node(node: ast.AST) -> Iterator[tuple[int, str, Change]]:
    match node:
        case ast.Compare(ops=ops):
            for number, op in enumerate(ops):
                if (other := _OPERATORS.get(type(op))) is not None:
                    yield _change(node, op, other, _setter(ops, number, other()))
        case ast.BoolOp(op=op) | ast.BinOp(op=op) | ast.AugAssign(op=op):
            if (other := _OPERATORS.get(type(op))) is not None:
                yield _change(node, op, other, _attribute(node, "op", other()))
        case ast.UnaryOp(op=ast.Not()):
            yield node.lineno, "not x -> x", _attribute(node, "op", ast.UAdd(), bool_of=node)
        case ast.Constant(value=bool(value)):
            yield node.lineno, f"{value} -> {not value}", _attribute(node, "value", not value)
        case ast.Constant(value=int(value)):
            yield node.lineno, f"{value} -> {value + 1}", _attribute(node, "value", value + 1)
        case ast.If(test=test) | ast.IfExp(test=test):
            for value in (True, False):
                what = f"if {ast.unparse(test)} -> if {value}"
                yield node.lineno, what, _attribute(node, "test", ast.Constant(value))
    for name in ("body", "orelse", "finalbody"):
        block = getattr(node, name, None)
        if isinstance(block, list):
            yield from _of_block(block)


def _of_block(block: list[ast.stmt]) -> Iterator[tuple[int, str, Change]]:
    for number, statement in enumerate(block):
        calls = isinstance(statement, ast.Expr) and not _is_quiet(statement)
        if calls or isinstance(statement, ast.AugAssign | ast.Continue | ast.Break | ast.Delete):
            text = ast.unparse(statement).splitlines()[0]
            yield statement.lineno, f"without {text}", _setter(block, number, ast.Pass())


def _change(node: ast.expr | ast.stmt, old: ast.AST, new: type[ast.AST], change: Change) -> tuple[int, str, Change]:
    return node.lineno, f"{type(old).__name__} -> {new.__name__} in {ast.unparse(node)}", change


def _setter(items: list, number: int, value: ast.AST) -> Change:  # type: ignore[type-arg]
    return lambda: items.__setitem__(number, value)


def _attribute(node: ast.AST, name: str, value: object, bool_of: ast.UnaryOp | None = None) -> Change:
    def change() -> None:
        if bool_of is not None:
            # `not x` -> `not not x`, which keeps the type.
            bool_of.operand = ast.UnaryOp(ast.Not(), bool_of.operand)
        else:
            setattr(node, name, value)

    return change
