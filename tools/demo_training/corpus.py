"""Training text: the language reference in `pydoc_data.topics` and the docstrings of the standard library.

Both ship with every CPython (PSF licence), so training needs no download. Order and split are deterministic
for one Python version.
"""

import importlib
import inspect
import json
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pydoc_data.topics import topics

HELD_OUT_EVERY = 20
DOCSTRING_MODULES = (
    *("bisect", "collections", "contextlib", "copy", "csv", "dataclasses", "datetime", "enum", "fractions"),
    *(
        "functools",
        "glob",
        "heapq",
        "io",
        "itertools",
        "json",
        "logging",
        "math",
        "operator",
        "os",
        "os.path",
    ),
    *("pathlib", "random", "re", "shutil", "statistics", "string", "subprocess", "textwrap", "time"),
)
MIN_DOCSTRING, MAX_DOCSTRING = 40, 6000
TOPIC_QUESTIONS = ("What does Python say about {}?", "Explain {}.", "Tell me about {} in Python.")
NAME_QUESTIONS = ("What does {} do?", "Explain {}.", "What is {} for?")


@dataclass(frozen=True, slots=True)
class Document:
    """One text with what a user could ask to get it. `questions` are full user turns."""

    name: str
    text: str
    questions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Corpus:
    """`train` and `held_out` share no document; every 20th topic and every 20th docstring is held out."""

    train: tuple[Document, ...]
    held_out: tuple[Document, ...]


def topic_documents() -> list[Document]:
    """The reference manual's topics, by name."""
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


def docstring_documents(modules: Sequence[str] = DOCSTRING_MODULES) -> list[Document]:
    """Docstrings of public functions, classes and methods, each text once, in the order of `modules`.

    A module that this platform lacks is skipped.
    """
    documents, seen = [], set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module_name in modules:
            try:
                described = list(_described(module_name))
            except ImportError:
                continue
            for name, doc in described:
                text = doc.strip()[:MAX_DOCSTRING]
                if len(text) < MIN_DOCSTRING or text in seen:
                    continue
                seen.add(text)
                documents.append(Document(name, text, tuple(q.format(name) for q in NAME_QUESTIONS)))
    return documents


def _pristine_docstrings() -> list[Document]:
    """`docstring_documents()` of an interpreter that has imported nothing else.

    Large packages patch the standard library (`transformers` adds methods to `logging.Logger`), which would
    make the text, and with it the split, depend on what was imported before.
    """
    child = subprocess.run([sys.executable, "-I", __file__], check=True, capture_output=True, text=True)
    return [Document(name, text, tuple(questions)) for name, text, questions in json.loads(child.stdout)]


def load_corpus() -> Corpus:
    """All documents, split into training and held-out text."""
    train: list[Document] = []
    held_out: list[Document] = []
    for documents in (topic_documents(), _pristine_docstrings()):
        for index, document in enumerate(documents):
            (held_out if index % HELD_OUT_EVERY == HELD_OUT_EVERY - 1 else train).append(document)
    return Corpus(tuple(train), tuple(held_out))


if __name__ == "__main__":
    print(json.dumps([(d.name, d.text, d.questions) for d in docstring_documents()]))
