"""Folders, modules and functions stay small enough to be read. An exception names its reason, and ends with it."""

from __future__ import annotations

import ast
import functools
import subprocess
from collections import Counter
from pathlib import Path

import baton

ROOT = Path(__file__).parents[1]
SOURCE = Path(baton.__file__).parent
MOST_FILES, MOST_LINES, MOST_FUNCTION_LINES, MOST_PARAMETERS = 20, 350, 60, 8

# Kernels take scalars and addresses: Numba's and Triton's calls have no structs.
KERNELS = "kernels/"


@functools.cache
def functions() -> list[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    return [
        (f"{path.relative_to(SOURCE)}:{node.name}", node)
        for path in sorted(SOURCE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def num_parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The number of parameters without `self` and `cls`."""
    names = [one.arg for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def test_folders_have_few_files() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    paths = [Path(name) for name in listed if name] or [path.relative_to(ROOT) for path in SOURCE.rglob("*.py")]
    found = Counter(str(path.parent) for path in paths)
    assert {name: count for name, count in found.items() if count > MOST_FILES} == {}


def test_modules_are_short() -> None:
    paths = SOURCE.rglob("*.py")
    lengths = {str(path.relative_to(SOURCE)): len(path.read_text().splitlines()) for path in paths}
    assert {name: length for name, length in lengths.items() if length > MOST_LINES} == {}


def test_functions_are_short() -> None:
    lengths = {name: (node.end_lineno or 0) - node.lineno + 1 for name, node in functions()}
    assert {name for name, length in lengths.items() if length > MOST_FUNCTION_LINES} == set()


def test_functions_have_few_parameters() -> None:
    many = {name for name, node in functions() if num_parameters(node) > MOST_PARAMETERS}
    assert {name for name in many if not name.startswith(KERNELS)} == set()
