"""The pictures that `tools.pictures` makes are those of the code, and each picture is in a document."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from tools.pictures import FOLDER, PICTURES

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_what_the_code_draws(name: str) -> None:
    made = PICTURES[name]()
    assert (FOLDER / f"{name}.svg").read_text() == made, "run python -m tools.pictures"
    ElementTree.fromstring(made)


def test_every_picture_is_in_a_document() -> None:
    text = "\n".join(path.read_text() for path in [ROOT / "README.md", *ROOT.glob("docs/*.md")])
    names = {path.name for path in FOLDER.iterdir()}
    assert {f"{name}.svg" for name in PICTURES} <= names
    assert [name for name in sorted(names) if f"pictures/{name})" not in text] == []
