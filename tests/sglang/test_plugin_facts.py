"""Facts by which the plug-ins' servers know that they have the same model."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from baton.models.loading.checkpoint_digests import fingerprint, tokenizer_hash
from baton.plugin_base.model_facts import override_facts, tokenizer_fact, weights_fact

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


def test_what_an_operator_overrides_in_a_checkpoint_is_a_fact(tmp_path: Path) -> None:
    assert override_facts({}) == {}
    assert override_facts({"b": 1, "a": 2}) == override_facts({"a": 2, "b": 1}) != override_facts({"a": 2})
    assert override_facts(weights_fact) == {"model.overrides": "baton.plugin_base.model_facts.weights_fact"}
    config, known = tmp_path / "config.json", set()
    for text in ("{}", '{"rms_norm_eps": 1e-3}'):
        config.write_text(text)
        known.add(override_facts({}, str(tmp_path))["model.config"])
    assert len(known) == 2
    assert override_facts({}, "org/config") == {"model.config": "org/config"}
