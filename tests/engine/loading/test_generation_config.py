"""Sampling defaults come from the same places as in vLLM."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import transformers

from baton import LLM
from baton.engine.config import EngineConfig
from baton.engine.loading.generation_config import sampling_defaults
from baton.errors import ConfigError
from baton.sampling_params import NO_DEFAULTS, SamplingDefaults, SamplingParams
from testkit.checkpoints.common import make_checkpoint

# A reasoning model's, with fields that mean nothing here.
FIELDS = {
    "bos_token_id": 1,
    "do_sample": True,
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "min_p": 0.05,
    "repetition_penalty": 1.05,
    "max_new_tokens": 30,
    "transformers_version": "4.51.0",
}
DEFAULTS = SamplingDefaults(temperature=0.6, top_p=0.95, top_k=20, min_p=0.05, repetition_penalty=1.05, max_tokens=30)


def write(directory: Path, **fields: Any) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "generation_config.json").write_text(json.dumps(fields))
    return directory


@pytest.mark.parametrize(
    "fields",
    [
        FIELDS,
        {},
        {"temperature": None, "top_p": 0.5},
        {"temperature": 0.0, "do_sample": False},
        {"presence_penalty": 1.5, "frequency_penalty": -0.5},
        {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "repetition_penalty": 1.0},
    ],
)
def test_they_are_those_that_transformers_reads(tmp_path: Path, fields: dict[str, Any]) -> None:
    """As `ModelConfig.get_diff_sampling_param` of vLLM takes them from there."""
    theirs = transformers.GenerationConfig.from_pretrained(write(tmp_path, **fields)).to_diff_dict()
    names = (
        *("repetition_penalty", "presence_penalty", "frequency_penalty"),
        *("temperature", "top_k", "top_p", "min_p", "max_new_tokens"),
    )
    expected = {name: theirs[name] for name in names if theirs.get(name) is not None}
    found = sampling_defaults(str(tmp_path), "auto", None)
    told = found.given() | ({} if found.max_tokens is None else {"max_new_tokens": found.max_tokens})
    assert told == expected
    assert found.limit is None


def test_sampling_defaults_come_from_the_model_a_directory_or_the_operator(tmp_path: Path) -> None:
    own, other = write(tmp_path / "own", **FIELDS), write(tmp_path / "other", top_k=7, max_new_tokens=9)
    assert sampling_defaults(str(own), "auto", None) == DEFAULTS
    assert sampling_defaults(str(own), "vllm", None) == NO_DEFAULTS
    assert sampling_defaults(str(tmp_path), "auto", None) == NO_DEFAULTS
    # The operator's own number of tokens is also a limit.
    assert sampling_defaults(str(own), str(other), None) == SamplingDefaults(top_k=7, max_tokens=9, limit=9)
    some = {"temperature": 0.1, "max_new_tokens": 5}
    assert sampling_defaults(str(own), "vllm", some) == SamplingDefaults(temperature=0.1, max_tokens=5, limit=5)
    mixed = sampling_defaults(str(own), "auto", some)
    assert (mixed.temperature, mixed.top_k, mixed.max_tokens, mixed.limit) == (0.1, 20, 5, 5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"top_p": 0}, "generation_config: top_p must be in"),
        ({"temperature": "hot"}, "generation_config: Expected `float | null`, got `str` - at `$.temperature`"),
        ({"temperature": True}, "generation_config: Expected `float | null`, got `bool` - at `$.temperature`"),
        ({"max_new_tokens": 0}, "generation_config: max_new_tokens must be between 1"),
        ({"presence_penalty": 3}, "generation_config: presence_penalty must be between"),
        ({"repetition_penalty": -1}, "generation_config: repetition_penalty must be between"),
    ],
)
def test_invalid_sampling_defaults_are_refused_at_the_start(
    tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    model = write(tmp_path, **fields)
    with pytest.raises(ConfigError) as caught:
        EngineConfig(model=str(model)).check().located()
    assert message in str(caught.value)
    assert "--generation-config vllm" in str(caught.value)
    EngineConfig(model=str(model), generation_config="vllm").check().located()


def test_files_and_settings_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"generation_config: must be auto, vllm or a directory, and .* is no file"):
        EngineConfig(model=str(tmp_path), generation_config="/nowhere").check().located()
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"generation_config: .*: not valid JSON: "):
        EngineConfig(model=str(tmp_path)).check().located()
    (tmp_path / "generation_config.json").write_text("[]")
    with pytest.raises(ConfigError, match="expected a JSON object, found list"):
        EngineConfig(model=str(tmp_path)).check().located()
    with pytest.raises(ConfigError, match=r"override_generation_config\.do_sample: is unknown; known: temperature, "):
        EngineConfig(model=str(tmp_path), override_generation_config={"do_sample": True}).check()


def test_the_python_api_uses_the_checkpoints_sampling_defaults(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "plain", "llama")
    write(Path(shutil.copytree(path, tmp_path / "m")), **{**FIELDS, "eos_token_id": 257})
    settings: dict[str, Any] = {"max_model_len": 64, "kv_cache_memory": 1 << 24, "seed": 3}
    with LLM(str(tmp_path / "m"), **settings) as llm:
        chosen = llm.get_default_sampling_params()
        assert chosen == SamplingParams(
            temperature=0.6, top_k=20, top_p=0.95, min_p=0.05, repetition_penalty=1.05, max_tokens=30
        )
        outputs = [llm.generate([[1, 2, 3]], params)[0].outputs[0].token_ids for params in (None, chosen)]
        assert outputs[0] == outputs[1]
        assert len(outputs[0]) > SamplingParams().max_tokens
    with LLM(str(tmp_path / "m"), generation_config="vllm", **settings) as llm:
        assert llm.get_default_sampling_params() == SamplingParams()
