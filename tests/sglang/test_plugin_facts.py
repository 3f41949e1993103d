"""Facts by which the plug-ins' servers know that they have the same model."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from baton.models.loading.checkpoint_digests import fingerprint, tokenizer_hash
from baton.plugin_base.model_facts import tokenizer_fact, weights_fact

MODEL = Path(__file__).parents[2] / "models" / "baton-demo-eagle"


def test_weights_from_a_hub_are_told_apart_by_commit() -> None:
    """A branch moves, and two hosts may have downloaded it at different times."""

    def weights(commit: str | None) -> str:
        return weights_fact("org/model", SimpleNamespace(_commit_hash=commit), "main")

    assert weights("a1") == "org/model@a1"
    assert weights(None) == "org/model@main"


def test_local_files_are_told_apart_by_their_content() -> None:
    assert weights_fact(str(MODEL), SimpleNamespace(_commit_hash="a1"), "main") == fingerprint(MODEL)
    assert tokenizer_fact(str(MODEL), "main") == tokenizer_hash(MODEL)
    assert tokenizer_fact("org/model", "main") == "org/model@main"
