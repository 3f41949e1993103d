"""Public names of `src/baton`, each with its module and the first sentence of its docstring.

`python -m tools.prose.names WORD ...` prints those that contain a word; `make docs` makes a page of all.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src/baton"
SENTENCE = re.compile(r".+?\.(?=\s|$)", re.DOTALL)


@dataclass(frozen=True)
class PublicName:
    """`text`: from its own docstring, or else, in brackets, from its module's."""

    name: str
    module: str
    text: str


def first_sentence(docstring: str | None) -> str:
    text = " ".join((docstring or "").split("\n\n")[0].split())
    found = SENTENCE.match(text)
    return found[0] if found else text


def public_names(source: Path = SOURCE) -> Iterator[PublicName]:
    """Functions and classes at the top of each module, in the order of modules."""
    for path in sorted(source.rglob("*.py")):
        tree = ast.parse(path.read_text("utf-8"))
        about = first_sentence(ast.get_docstring(tree))
        for node in tree.body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name[0] != "_":
                own = first_sentence(ast.get_docstring(node))
                # A sentence on errors alone does not say what a function is for.
                text = own if own and not own.startswith("Raise") else f"{own} ({about})".strip()
                yield PublicName(node.name, str(path.relative_to(source)), text)


def page(names: Sequence[PublicName]) -> str:
    """A page in Markdown, by module."""
    about = (
        "Public functions and classes, each with the first sentence of its docstring, or (in brackets) of its module's."
    )
    lines = ["# Names", "", about]
    module = ""
    for one in names:
        if one.module != module:
            module = one.module
            lines += ["", f"## {module}", "", "| name | |", "|---|---|"]
        lines.append(f"| `{one.name}` | {one.text.replace('|', '&#124;')} |")
    return "\n".join(lines) + "\n"


def main(words: Sequence[str]) -> int:
    """Returns 1 if no name contains a word."""
    found = [one for one in public_names() if any(word.lower() in one.name.lower() for word in words)]
    for one in found:
        print(f"{one.name}  {one.module}\n    {one.text}")
    return int(not found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
