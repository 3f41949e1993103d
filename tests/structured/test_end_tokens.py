"""Grammars do not depend on end tokens that the model cannot output."""

from __future__ import annotations

import json
from pathlib import Path

from baton import LLM, SamplingParams
from baton.sampling_params import StructuredOutputsParams
from testkit.checkpoints.common import make_checkpoint


def test_an_end_token_beyond_the_vocabulary_disables_no_grammar(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "m", "llama", eos_token_id=[257, 128009])
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [257, 128009]}))
    params = SamplingParams(max_tokens=30, temperature=0, structured_outputs=StructuredOutputsParams(regex="[ab]{3}"))
    with LLM(str(path), max_model_len=64, kv_cache_memory=1 << 24) as llm:
        output = llm.generate([[1, 2, 3]], params)[0].outputs[0]
    assert len(output.text) == 3
    assert set(output.text) <= {"a", "b"}
    assert output.finish_reason == "stop"
