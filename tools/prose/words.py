"""Words of docstrings and comments, per package: `python -m tools.prose.words [FOLDER ...]`."""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

WORD = re.compile(r"\b[A-Za-z][A-Za-z'-]+\b")
CODE = re.compile(r"`[^`]*`")
PRAGMA = re.compile(r"#\s*(?:noqa|type:|fmt:|pragma|ruff:)")


def words_of(source: str) -> int:
    """Words of two letters or more, outside of code spans, in string statements and in comments other than pragmas."""
    prose = [
        node.value.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not PRAGMA.match(token.string):
            prose.append(token.string)
    return sum(len(WORD.findall(CODE.sub("", text))) for text in prose)


def words_by_package(folder: Path) -> Counter[str]:
    """Words per direct subfolder of `folder`; those of its own modules under `.`."""
    found: Counter[str] = Counter()
    for path in folder.rglob("*.py"):
        parts = path.relative_to(folder).parts
        found[parts[0] if len(parts) > 1 else "."] += words_of(path.read_text("utf-8"))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 if the folders have more words than `--most`, else 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="*", type=Path, default=[Path(__file__).parents[2] / "src/baton"])
    parser.add_argument("--most", type=int, help="print nothing, and fail above this many words")
    options = parser.parse_args(arguments)
    counts = {folder: words_by_package(folder) for folder in options.folders}
    if options.most is not None:
        total = sum(found.total() for found in counts.values())
        if total > options.most:
            print(f"{total:,} words of docstrings and comments, at most {options.most:,}: delete what the code says")
        return int(total > options.most)
    for folder, found in counts.items():
        for name, count in found.most_common():
            print(f"{count:7,}  {folder.name}/{name}")
        print(f"{found.total():7,}  {folder.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
