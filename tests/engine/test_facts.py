"""Two engines that promise the same bits, and compute others, do not hand over to each other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.engine import facts
from baton.engine.build import build_engine
from baton.engine.config import EngineConfig
from baton.models.base import CausalLM
from baton.wire import SamplingParams
from tests.engine.engines import TARGET, pair


def facts_of(**settings: Any) -> dict[str, str]:
    engine = build_engine(EngineConfig(model=TARGET, **settings), lambda *chunk: None)
    try:
        found: dict[str, str] = json.loads(engine.info.fingerprint)
        return found
    finally:
        engine.close()


def test_the_probe_depends_on_nothing_that_may_differ() -> None:
    expected = facts_of(batch_invariant=True)["numerics.probe"]
    assert facts_of(batch_invariant=True, block_size=7, max_num_seqs=1)["numerics.probe"] == expected
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3 - min(threads, 2))
        assert facts_of(batch_invariant=True)["numerics.probe"] == expected
    finally:
        torch.set_num_threads(threads)
    assert "numerics.probe" not in facts_of()  # these promise no bits


def test_the_probe_sees_the_last_bit_of_logits_and_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [facts_of(batch_invariant=True)["numerics.probe"]]
    logits, noise = CausalLM.compute_logits, facts.gumbel
    with monkeypatch.context() as other:
        other.setattr(CausalLM, "compute_logits", lambda self, x: torch.nextafter(logits(self, x), torch.tensor(9e9)))
        found.append(facts_of(batch_invariant=True)["numerics.probe"])
    with monkeypatch.context() as other:
        other.setattr(facts, "gumbel", lambda *a: noise(*a) * (1 + 2**-52))
        found.append(facts_of(batch_invariant=True)["numerics.probe"])
    assert len(set(found)) == 3


def test_engines_that_compute_other_bits_are_incompatible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probes = iter(["of one machine", "of another"])
    monkeypatch.setattr(facts, "numeric_probe", lambda *a: next(probes))
    with pair(tmp_path) as engines:
        _, decoded = engines.legs("r", [1, 2, 3], SamplingParams(max_tokens=4, temperature=0.0), "push")
        engines.step_until(lambda: decoded.ended)
        assert decoded.error is not None
        assert decoded.error.startswith("incompatible_peer: ")
        assert "numerics.probe: here 'of another', peer 'of one machine'" in decoded.error
