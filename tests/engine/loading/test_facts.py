"""Two engines that promise the same bits but compute others do not hand over to each other."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from baton.comparison import PROCESSOR, token_identity
from baton.engine.build import build_engine
from baton.engine.config import EngineConfig
from baton.engine.loading import engine_facts
from baton.engine.request_checks import make_request
from baton.errors import IncompatiblePeerError, RequestError
from baton.models.base import CausalLM
from baton.sampling_params import SamplingParams
from baton.wire import GenerateRequest
from testkit.engines import TARGET, pair


def facts_of(**settings: Any) -> dict[str, str]:
    told: list[str] = []
    engine = build_engine(EngineConfig(model=TARGET, **settings), lambda *chunk: None, progress=told.append)
    try:
        found: dict[str, str] = json.loads(engine.info.fingerprint)
        assert told[-1].startswith("probing numerics") == ("numerics.probe" in found)
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


def test_an_engine_that_promises_no_bits_names_its_processor() -> None:
    own = facts_of()
    assert "numerics.probe" not in own
    assert PROCESSOR not in facts_of(batch_invariant=True)
    assert f" {torch.backends.cpu.get_cpu_capability()}" in own[PROCESSOR]


def test_a_processor_is_another_without_its_bfloat16_products() -> None:
    """A hypervisor may hide them: LLVM's name of the CPU stays."""
    products = [{}, {"avx512bf16": True}, {"avx512bf16": True, "amx-bf16": True}, {"amx-bf16": True}]
    found = {engine_facts.cpu_fact("sapphirerapids", "AVX512", {"rtm": True, **own}, {}) for own in products}
    assert len(found) == len(products)


def test_a_processor_is_another_with_limits_on_its_kernels() -> None:
    limits = [
        {},
        {"ONEDNN_MAX_CPU_ISA": "AVX2"},
        {"MKL_ENABLE_INSTRUCTIONS": "AVX2"},
        {"ONEDNN_MAX_CPU_ISA": "avx2", "OMP_NUM_THREADS": "2"},
    ]
    found = [engine_facts.cpu_fact("znver4", "AVX512", {}, each) for each in limits]
    assert found[0] == "znver4 AVX512"
    assert found[1] == found[3] == "znver4 AVX512 ONEDNN_MAX_CPU_ISA=AVX2"
    assert len(set(found)) == 3


def test_the_probe_sees_the_last_bit_of_logits_and_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [facts_of(batch_invariant=True)["numerics.probe"]]
    logits, noise = CausalLM.compute_logits, engine_facts.gumbel
    with monkeypatch.context() as other:
        other.setattr(CausalLM, "compute_logits", lambda self, x: torch.nextafter(logits(self, x), torch.tensor(9e9)))
        found.append(facts_of(batch_invariant=True)["numerics.probe"])
    with monkeypatch.context() as other:
        other.setattr(
            engine_facts, "gumbel", lambda *a: noise(*a) * np.where(np.arange(a[-1]) == 50_000, 1 + 2**-52, 1)
        )
        found.append(facts_of(batch_invariant=True)["numerics.probe"])
    assert len(set(found)) == 3


def test_engines_that_compute_other_bits_are_incompatible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probes = iter(["of one machine", "of another"])
    monkeypatch.setattr(engine_facts, "numeric_probe", lambda *a: next(probes))
    with pair(tmp_path) as engines:
        _, decoded = engines.legs("r", [1, 2, 3], SamplingParams(max_tokens=4, temperature=0.0), "push")
        engines.step_until(lambda: decoded.ended)
        assert decoded.error is not None
        assert decoded.error.startswith("incompatible_peer: ")
        assert "numerics.probe: here 'of another', peer 'of one machine'" in decoded.error


def test_end_tokens_and_the_grammar_library_are_facts(tmp_path: Path) -> None:
    """They decide where an output ends, and which tokens it may have."""
    model = tmp_path / "model"
    shutil.copytree(TARGET, model)
    (model / "generation_config.json").write_text('{"eos_token_id": [5, 3]}')
    engine = build_engine(EngineConfig(model=str(model)), lambda *chunk: None)
    try:
        found, mine = json.loads(engine.info.fingerprint), facts_of()
        assert found["output.eos_token_ids"] == repr(sorted(engine.info.eos_token_ids))
        assert {name for name in found if found[name] != mine[name]} == {"output.eos_token_ids"}
        assert found["output.grammars"].startswith("llguidance ")
    finally:
        engine.close()


def test_an_engine_refuses_what_was_planned_for_another() -> None:
    engine = build_engine(EngineConfig(model=TARGET, max_model_len=64), lambda *chunk: None)
    try:
        own = token_identity(engine.info.fingerprint)

        def ask(identity: str | None, max_tokens: int = 8, adapter: str | None = None) -> None:
            params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
            asked = GenerateRequest(
                request_id="r", prompt_token_ids=[1, 2], sampling_params=params, identity=identity, adapter=adapter
            )
            make_request(engine, asked)

        ask(own)
        with pytest.raises(RequestError, match="no LoRA adapters"):
            ask(own, adapter="a@0123")
        ask(None, 80)  # without an identity this engine's own end tokens count
        with pytest.raises(IncompatiblePeerError, match="identity"):
            ask("0" * 32)
        ask(own, 62)
        with pytest.raises(IncompatiblePeerError, match="max_model_len: here 64, peer 'at least 65'"):
            ask(own, 63)
    finally:
        engine.close()
