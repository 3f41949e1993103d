"""Configs with a value of another type or size in one field: parsed, or refused in one line, and nothing else."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest

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


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3", *moe.SHAPES, *written.WRITTEN])
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
