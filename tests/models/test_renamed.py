"""Models whose checkpoints name or join tensors in other ways than Llama's, written by transformers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models.test_against_transformers import assert_logits_match

pytest.importorskip("transformers")
from testkit.checkpoints.written import WRITTEN, make_written

pytestmark = pytest.mark.usefixtures("one_thread")
_KINDS = ("mixtral", "phi3", "minimax_m2")


@pytest.mark.parametrize("name", [name for name in WRITTEN if name.startswith(_KINDS)])
def test_logits_match(name: str, tmp_path: Path) -> None:
    best = assert_logits_match(make_written(tmp_path, name, seed=4)).topk(2).values
    assert (best[:, 0] - best[:, 1]).median() > 0.05
