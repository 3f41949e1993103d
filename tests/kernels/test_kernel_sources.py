"""No address outlives its array.

The compiler frees an array after its last use as an array, and does not see that its address is still in use. So
compiled code may take addresses only of its arguments, which the caller holds until the call returns (if it is not
inlined), and Python code may not take the address of a temporary.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "baton"
COMPILED = {"jit", "jit_inline", "jit_contract", "_njit", "compiled"}
ADDRESSES = {"data_ptr", "ctypes"}


def faults(source: str) -> list[str]:
    """Each place that takes an address which the array may not outlive."""
    tree = ast.parse(source)
    kernels = {call.args[0].id for call in ast.walk(tree) if _makes_kernel(call)}
    compiled = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and _is_compiled(node, kernels)]
    inside = {id(node) for function in compiled for node in ast.walk(function)}
    found = [fault for function in compiled for fault in _of_function(function)]
    for node in ast.walk(tree):
        if (
            id(node) not in inside
            and isinstance(node, ast.Attribute)
            and node.attr in ADDRESSES
            and _is_made(node.value)
        ):
            found.append(f"line {node.lineno}: address of a temporary: {ast.unparse(node)}")
    return found


def _makes_kernel(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and ast.unparse(node.func).split("(")[0] in {"Kernel", "callback", "compiled", "numba.njit", "numba.cfunc"}
        and bool(node.args)
        and isinstance(node.args[0], ast.Name)
    )


def _is_compiled(function: ast.FunctionDef, kernels: set[str]) -> bool:
    return function.name in kernels or any(ast.unparse(d).split("(")[0] in COMPILED for d in function.decorator_list)


def _of_function(function: ast.FunctionDef) -> Iterator[str]:
    is_inlined = any(ast.unparse(d) == "jit_inline" for d in function.decorator_list)
    arguments = set() if is_inlined else {argument.arg for argument in function.args.args}
    assigned = {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute) and node.attr in {*ADDRESSES, "address"}:
            of = node.value
            if not (isinstance(of, ast.Name) and of.id in arguments - assigned):
                yield f"line {node.lineno}: address of what is no argument of {function.name}: {ast.unparse(node)}"


def _is_made(value: ast.expr) -> bool:
    """Whether only this expression holds the array. A tensor's storage lives as long as the tensor."""
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr == "untyped_storage":
        return _is_made(value.func.value)
    return not isinstance(value, ast.Name | ast.Attribute | ast.Subscript)


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_no_address_outlives_its_array(path: Path) -> None:
    assert faults(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "source",
    [
        "@jit\ndef f(n):\n    pairs = np.empty(n)\n    at = np.int64(pairs.ctypes.data)\n    return g(at)",
        "@jit\ndef f(a):\n    a = a.copy()\n    return g(a.ctypes.data)",
        "@jit_contract\ndef f(a):\n    return g(a[1:].ctypes.data)",
        "@jit_inline\ndef f(a):\n    return g(a.ctypes.data)",
        "def f(arguments):\n    a = carray(arguments, 3).copy()\n    g(a.ctypes.data)\nK = Kernel(f)",
        "def f(rows):\n    memmove(1, np.ascontiguousarray(rows).ctypes.data, 8)",
        "def f(x):\n    run((x + 1).data_ptr())",
        "def f(x):\n    run(x.contiguous().untyped_storage().data_ptr())",
    ],
)
def test_the_check_finds_what_it_is_for(source: str) -> None:
    assert len(faults(source)) == 1


def test_only_one_decorator_inlines() -> None:
    inlines = [path.name for path in SOURCE.rglob("*.py") if 'inline="always"' in path.read_text(encoding="utf-8")]
    assert inlines == ["jit_cache.py"]


def test_only_one_module_keeps_compiled_code() -> None:
    """Numba's own cache has no lock, and raises for damaged files and full disks."""
    keeps = [path.name for path in SOURCE.rglob("*.py") if re.search(r"cache=True|caching\(", path.read_text("utf-8"))]
    assert keeps == ["jit_cache.py"]
