"""The list of public names with their first sentences."""

from __future__ import annotations

from pathlib import Path

from tools.prose.names import PublicName, page, public_names

SOURCE = '''"""What a module is for. More."""

class Shown:
    """One | two. Three."""

    def method(self): ...

async def bare(): ...

def _hidden(): ...
'''


def test_public_names_have_a_sentence_of_their_own_or_of_their_module(tmp_path: Path) -> None:
    (tmp_path / "part").mkdir()
    (tmp_path / "part/module.py").write_text(SOURCE)
    found = list(public_names(tmp_path))
    assert found == [
        PublicName("Shown", "part/module.py", "One | two."),
        PublicName("bare", "part/module.py", "(What a module is for.)"),
    ]
    assert page(found).splitlines()[-4:] == [
        "| name | |",
        "|---|---|",
        "| `Shown` | One &#124; two. |",
        "| `bare` | (What a module is for.) |",
    ]
