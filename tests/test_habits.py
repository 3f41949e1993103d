"""How tests are written: counts that may fall and must not rise."""

from __future__ import annotations

import ast
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = [path for folder in ("tests", "testkit") for path in sorted((ROOT / folder).rglob("*.py"))]
CPU_CLOCKS = {"process_time", "process_time_ns", "thread_time", "thread_time_ns", "cpu_times"}
SLEEPS = {"time.sleep", "asyncio.sleep"}
Found = Iterator[int]
# All of a file: one walk for all habits.
Nodes = Sequence[ast.AST]


def sleeps_before_an_assertion(nodes: Nodes) -> Found:
    """A test that sleeps and then asserts that nothing happened passes on a slow machine, whatever the code does."""
    for node in nodes:
        for block in (getattr(node, name, None) for name in ("body", "orelse", "finalbody")):
            for first, second in itertools.pairwise(block) if isinstance(block, list) else ():
                call = first.value if isinstance(first, ast.Expr) else None
                call = call.value if isinstance(call, ast.Await) else call
                if isinstance(second, ast.Assert) and isinstance(call, ast.Call) and ast.unparse(call.func) in SLEEPS:
                    acts = any(isinstance(node, ast.Await) for node in ast.walk(second))
                    # 0 is a turn of the event loop.
                    yield from [first.lineno] * (ast.unparse(call.args[0]) != "0" and not acts)


def cpu_time(nodes: Nodes) -> Found:
    for node in nodes:
        if isinstance(node, ast.Attribute) and node.attr in CPU_CLOCKS:
            yield node.lineno


def private_accesses(nodes: Nodes) -> Found:
    """`x._name`. `testkit.inside` has accessors for the common ones."""
    for node in nodes:
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            owner = ast.unparse(node.value)
            if owner not in {"self", "cls", "super()"}:
                yield node.lineno


def patches(nodes: Nodes) -> Found:
    for node in nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "setattr":
            yield node.lineno


def loops_of_cases(nodes: Nodes) -> Found:
    """A test that asserts in a loop over a list of cases: the first failure hides the others. Parametrize it."""
    for test in nodes:
        if isinstance(test, ast.FunctionDef | ast.AsyncFunctionDef) and test.name.startswith("test_"):
            for loop in test.body:
                if isinstance(loop, ast.For) and isinstance(loop.iter, ast.Tuple | ast.List):
                    inside = [*ast.walk(loop)]
                    raises = any(
                        "pytest.raises" in ast.unparse(node) for node in inside if isinstance(node, ast.withitem)
                    )
                    if raises or any(isinstance(node, ast.Assert) for node in inside):
                        yield loop.lineno


# Lower a number when you can.
CEILINGS: dict[Callable[[Nodes], Found], int] = {
    sleeps_before_an_assertion: 0,
    cpu_time: 0,
    private_accesses: 168,
    patches: 247,
    loops_of_cases: 136,
}


@functools.cache
def places() -> dict[Callable[[Nodes], Found], list[str]]:
    found = {habit: list[str]() for habit in CEILINGS}
    for path in FILES:
        nodes = [*ast.walk(ast.parse(path.read_text("utf-8")))]
        for habit, lines in found.items():
            lines += [f"{path.relative_to(ROOT)}:{line}" for line in habit(nodes)]
    return found


@pytest.mark.parametrize("habit", CEILINGS, ids=lambda habit: str(habit.__name__))
def test_a_bad_habit_does_not_spread(habit: Callable[[Nodes], Found]) -> None:
    found = places()[habit]
    assert len(found) <= CEILINGS[habit], f"{len(found)}: {' '.join(found)}"
