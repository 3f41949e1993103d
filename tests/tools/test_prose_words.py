"""The count of words of docstrings and comments."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.prose import words

SOURCE = '''"""Three plain words, `not_this_name`."""

import os  # noqa: F401

# Two more.
LIMIT = 3  # of a kind
TEXT = "never counted"
"""Its meaning."""
'''


def test_words_are_those_of_docstrings_and_comments_outside_of_code_spans() -> None:
    assert words.words_of(SOURCE) == 9


@pytest.mark.parametrize(("most", "status"), [("9", 0), ("8", 1)])
def test_more_words_than_allowed_fail(
    most: str, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "module.py").write_text(SOURCE)
    assert words.main(["--most", most, str(tmp_path)]) == status
    assert ("9 words" in capsys.readouterr().out) == (status == 1)
