"""Prompt lookup against its definition, written out, and its settings."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from baton.drafters.ngram import NGram, _follow
from baton.engine.config import SpeculativeConfig
from baton.errors import ConfigError
from baton.models.layers.linear import Build

BUILD = Build(torch.float32, torch.device("cpu"), False)


def by_definition(tokens: list[int], least: int, most: int) -> list[int]:
    for length in range(most, least - 1, -1):
        for start in range(len(tokens) - length):
            if tokens[start : start + length] == tokens[len(tokens) - length :]:
                return tokens[start + length :]
    return []


@pytest.mark.parametrize("vocab", [1, 2, 5, 50])
def test_the_first_occurrence_of_the_longest_ngram_is_continued(vocab: int) -> None:
    random = np.random.default_rng(vocab)
    for trial in range(400):
        tokens = random.integers(0, vocab, int(random.integers(1, 30)))
        least = int(random.integers(1, 4))
        most = least + int(random.integers(0, 4))
        found = _follow(tokens, least, most).tolist()
        assert found == by_definition(tokens.tolist(), least, most), (trial, tokens, least, most)


def test_lengths_that_are_not_given_are_vllms() -> None:
    # vllm/config/speculative.py: five for both, or the given one.
    lengths = {
        (None, None): (5, 5),
        (2, None): (2, 2),
        (None, 4): (4, 4),
        (2, 4): (2, 4),
    }
    for (least, most), expected in lengths.items():
        made = NGram.load("", None, BUILD, prompt_lookup_min=least, prompt_lookup_max=most)  # type: ignore[arg-type]
        assert (made._min_n, made._max_n) == expected
    with pytest.raises(ConfigError, match="prompt_lookup_min: is 5, prompt_lookup_max is 4"):
        NGram.load("", None, BUILD, prompt_lookup_min=5, prompt_lookup_max=4)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"method": "ngram", "prompt_lookup_max": 0}, "prompt_lookup_max: must be 1 to"),
        (
            {"method": "eagle", "model": "m", "prompt_lookup_max": 3},
            "prompt_lookup_max: is for method ngram, not eagle",
        ),
        ({"method": "draft_model"}, "model: is required"),
        ({"method": "eagle", "model": 3}, "model: is required and must be a string"),
        ({"method": "ngram", "model": "m"}, "model: is not for method ngram"),
        ({"method": "mtp", "model": "m"}, "model: is not for method mtp"),
        ({"method": "mtp", "revision": "main"}, "revision: is not for method mtp"),
        ({"method": "ngram", "draft_kv": "maybe"}, "draft_kv: must be require, prefer or drop, got 'maybe'"),
        ({"method": "ngram", "num_speculative_tokens": -1}, "num_speculative_tokens: must be 0 to 32"),
    ],
)
def test_settings_that_no_method_takes_are_refused(fields: dict[str, object], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        SpeculativeConfig.parse(json.dumps(fields))
