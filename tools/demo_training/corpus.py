"""Training text: the language reference in `pydoc_data.topics` and every docstring of the standard library.

Both ship with every CPython (PSF licence), so training needs no download. Order and split are deterministic for one
Python version.
"""

import ast
import importlib
import inspect
import json
import subprocess
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

HELD_OUT_EVERY = 20
# Their docstrings are in C, so in no source file.
BUILT_IN_MODULES = (
    *("array", "binascii", "builtins", "cmath", "errno", "fcntl", "itertools", "marshal", "math", "mmap", "operator"),
    *("os", "posix", "pwd", "resource", "select", "sys", "termios", "time", "unicodedata", "zlib"),
)
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "pydoc_data"})
MIN_DOCSTRING, MAX_DOCSTRING = 40, 6000
TOPIC_QUESTIONS = ("What does Python say about {}?", "Explain {}.", "Tell me about {} in Python.")
NAME_QUESTIONS = ("What does {} do?", "Explain {}.", "What is {} for?")


@dataclass(frozen=True, slots=True)
class Document:
    """One text and the questions that it answers, as full user turns."""

    name: str
    text: str
    questions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Corpus:
    """`train` and `held_out` share no document; every 20th topic and every 20th docstring is held out."""

    train: tuple[Document, ...]
    held_out: tuple[Document, ...]


def topic_documents() -> list[Document]:
    return [
        Document(name, topics[name].strip(), tuple(q.format(name) for q in TOPIC_QUESTIONS)) for name in sorted(topics)
    ]


def _described(module_name: str) -> Iterator[tuple[str, str]]:
    module = importlib.import_module(module_name)
    yield module_name, inspect.getdoc(module) or ""
    for name in sorted(vars(module)):
        value = vars(module)[name]
        if name.startswith("_") or not (inspect.isroutine(value) or inspect.isclass(value)):
            continue
        yield f"{module_name}.{name}", inspect.getdoc(value) or ""
        if inspect.isclass(value):
            for attribute in sorted(vars(value)):
                doc = getattr(vars(value)[attribute], "__doc__", None)
                if not attribute.startswith("_") and isinstance(doc, str):
                    yield f"{module_name}.{name}.{attribute}", inspect.cleandoc(doc)


def _in_source(path: Path, prefix: str) -> Iterator[tuple[str, str]]:
    """(dotted name, docstring) of everything that a source file defines, in source order."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return

    def walk(node: ast.AST, name: str) -> Iterator[tuple[str, str]]:
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield name, ast.get_docstring(node) or ""
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):  # defines nothing
                continue
            own = getattr(child, "name", None)
            yield from walk(child, f"{name}.{own}" if isinstance(own, str) else name)

    yield from walk(tree, prefix)


def _all_described() -> Iterator[tuple[str, str]]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if not SKIPPED_FOLDERS.intersection(parts):
            yield from _in_source(path, ".".join(p for p in parts if p != "__init__"))
    for module_name in BUILT_IN_MODULES:
        try:
            yield from _described(module_name)
        except ImportError:  # this platform lacks the module
            continue


def docstring_documents() -> list[Document]:
    """Docstrings of modules, classes and functions of the standard library, each text once."""
    documents, seen = [], set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, doc in _all_described():
            text = doc.strip()[:MAX_DOCSTRING]
            if len(text) < MIN_DOCSTRING or text in seen:
                continue
            seen.add(text)
            documents.append(Document(name, text, tuple(q.format(name) for q in NAME_QUESTIONS)))
    return documents


def _pristine_docstrings() -> list[Document]:
    """`docstring_documents()` of an interpreter that has imported nothing else.

    Large packages patch the standard library (`transformers` adds methods to `logging.Logger`), so the text, and with
    it the split, would depend on earlier imports.
    """
    child = subprocess.run([sys.executable, "-I", __file__], check=True, capture_output=True, text=True)
    return [Document(name, text, tuple(questions)) for name, text, questions in json.loads(child.stdout)]


def load_corpus() -> Corpus:
    train: list[Document] = []
    held_out: list[Document] = []
    for documents in (topic_documents(), _pristine_docstrings()):
        for index, document in enumerate(documents):
            (held_out if index % HELD_OUT_EVERY == HELD_OUT_EVERY - 1 else train).append(document)
    return Corpus(tuple(train), tuple(held_out))


if __name__ == "__main__":
    print(json.dumps([(d.name, d.text, d.questions) for d in docstring_documents()]))
