"""Configs with a value of another type or size in one field: parsed, or refused in one line, and nothing else."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import StrictDataclassError

import baton.models
from baton.errors import CheckpointError
from baton.models.registry import MODELS, model_class
from testkit.checkpoints import common, moe, written

FIELDS = sorted(
    {
        name
        for path in Path(baton.models.__file__).parent.rglob("*.py")
        for name in re.findall(r'"([a-z][a-z0-9_]{3,40})"', path.read_text("utf-8"))
    }
)
NAMES = ["llama", "mistral", "qwen2", "qwen3", *moe.SHAPES, *written.WRITTEN]
_GROUPED = ("mixtral", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next")
ODD: list[Any] = [None, True, -1, 0, 3, 1.5, "x", [], {}, [[1]] * 4, [{}] * 3, 1 << 40, 1e308, float("nan")]
ODD += ["a" * 9000, "\n\x1b[31m", {"rope_type": []}, {"rope_type": "yarn", "factor": float("nan")}, {"main": []}]


def base(name: str) -> dict[str, Any]:
    if name in moe.SHAPES:
        model_type, fields = moe.SHAPES[name]
        return {**common.TINY, "model_type": model_type, **fields}
    if name not in written.WRITTEN:
        return {**common.TINY, "model_type": name}
    transformers = pytest.importorskip("transformers")
    cls, fields = written.WRITTEN[name]
    config: dict[str, Any] = getattr(transformers, f"{cls}Config")(**{**written.TINY, **fields}).to_dict()
    return config


@pytest.mark.parametrize("model_type", sorted(MODELS.keys() - {"deepseek_v2", "deepseek_v4", "gemma4_text"}))
def test_a_field_left_out_is_what_transformers_takes(model_type: str) -> None:
    mapping = pytest.importorskip("transformers").models.auto.configuration_auto.CONFIG_MAPPING
    parse, config = model_class(model_type).parse_config, mapping[model_type]
    sizes = {"vocab_size": 300, "hidden_size": 960, "intermediate_size": 90, "num_hidden_layers": 9}
    sizes["num_attention_heads"] = config().num_key_value_heads * 3 if model_type in _GROUPED else 12
    if model_type not in _GROUPED:
        sizes["num_key_value_heads"] = 12
    assert parse({**sizes, "model_type": model_type}) == parse({**config(**sizes).to_dict(), "model_type": model_type})


@pytest.mark.parametrize("name", NAMES)
def test_one_field_left_out_is_what_transformers_takes(name: str) -> None:
    """Or one of both refuses the rest."""
    mapping = pytest.importorskip("transformers").models.auto.configuration_auto.CONFIG_MAPPING
    raw, taken = base(name), 0
    parse, config = model_class(raw["model_type"]).parse_config, mapping[raw["model_type"]]
    for field in sorted(raw.keys() - {"model_type"}):
        rest = {key: value for key, value in raw.items() if key != field}
        try:
            ours, theirs = parse(rest), parse({**config.from_dict(rest).to_dict(), "model_type": raw["model_type"]})
        except (CheckpointError, StrictDataclassError):
            continue
        taken += 1
        assert ours == theirs, field
    assert taken > len(raw) // 2


_ROPES: dict[str, dict[str, Any]] = {
    "main": {"rope_type": "default", "rope_theta": 1e4},
    "compress": {"rope_type": "default", "rope_theta": 1e5},
}
_KINDS: dict[str, dict[str, Any]] = {
    "sliding_attention": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5},
    "full_attention": {"rope_type": "proportional", "rope_theta": 1e6},
}
_YARN = {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
_INSIDE = {**_ROPES, "main": {**_ROPES["main"], "partial_rotary_factor": 1.0}}


@pytest.mark.parametrize(
    ("name", "fields", "why"),
    [
        ("deepseek_v4", {"rope_scaling": _YARN, "rope_parameters": _ROPES}, "rope_parameters and rope_scaling differ"),
        ("deepseek_v4", {"rope_parameters": _INSIDE}, "is 1.0, which does not rotate 8 dimensions of 16"),
        ("gemma3_text", {"rope_scaling": _YARN}, "expected it with rope_type"),
        ("gemma4_text", {"rope_parameters": _KINDS}, "sliding_attention of rope_parameters is .*not supported"),
    ],
)
def test_ropes_that_transformers_reads_otherwise_are_refused(name: str, fields: dict[str, Any], why: str) -> None:
    """It scales nothing, scales by the other field, or rotates as many dimensions as an inner field says."""
    raw = {**base(name), "hidden_size_per_layer_input": 0}
    parse = model_class(raw["model_type"]).parse_config
    parse(raw)
    with pytest.raises(CheckpointError, match=why):
        parse({**raw, **fields})


@pytest.mark.parametrize(
    ("name", "field"),
    [
        *[(name, "norm_topk_prob") for name in ("deepseek_v3", "glm4_moe", "glm_moe_dsa", "nemotron_h")],
        ("deepseek_v3", "rope_interleave"),
        ("minimax_m2", "use_routing_bias"),
        ("gpt_oss", "attention_bias"),
    ],
)
def test_null_is_not_true(name: str, field: str) -> None:
    """For transformers it is false, and no tensor shows the difference."""
    raw = base(name)
    parse = model_class(raw["model_type"]).parse_config
    assert parse({**raw, field: True}) == parse({key: value for key, value in raw.items() if key != field})
    with pytest.raises(CheckpointError, match=f"{field} is None, expected true or false"):
        parse({**raw, field: None})


def test_a_rotated_part_of_null_is_the_whole_head() -> None:
    raw = {**base("glm4_moe"), "head_dim": 16}
    parse = model_class("glm4_moe").parse_config
    found = [parse({**raw, **more}).rotary_dim for more in ({}, {"partial_rotary_factor": None})]
    assert found == [8, 16]


@pytest.mark.parametrize("name", NAMES)
def test_an_odd_value_is_taken_or_refused_by_name(name: str) -> None:
    raw, rng = base(name), random.Random(name)
    parse = model_class(raw["model_type"]).parse_config
    parse(raw)
    told = []
    for field in [*raw, *rng.sample(FIELDS, 60)]:
        for odd in [*rng.sample(ODD, 4), [[1]] * 4, 1e308]:
            try:
                parse({**raw, field: odd})
            except CheckpointError as error:
                told.append(str(error))
    assert len(told) > 20
    assert [text for text in told if not text.isprintable() or len(text) > 2100] == []
