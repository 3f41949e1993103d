"""EAGLE-3.1's norms and the `speculators` format against a forward written out here, and refused flags."""

from __future__ import annotations

import itertools
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from baton.drafters.eagle3 import aux_layer_ids
from baton.drafters.registry import load_drafter
from baton.errors import CheckpointError
from baton.models.base import CausalLM
from testkit.checkpoints.common import make_drafter
from tests.drafters.test_drafters import TOKENS, attention, edit, inputs, layer_weights, mlp, norm, run

pytestmark = pytest.mark.usefixtures("one_thread")
FLAGS = ("fc_norm", "norm_before_fc", "norm_output")


def speculators(path: Path, **outer: Any) -> None:
    """Convert the head's config to Red Hat's format."""
    raw = json.loads((path / "config.json").read_text())
    moved = ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids", *FLAGS)
    own = {name: raw.pop(name) for name in moved if name in raw}
    raw.pop("norm_before_residual", None)
    proposal = {"proposal_type": "greedy", "speculative_tokens": 3}
    whole = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "speculators_config": {"proposal_methods": [proposal], "verifier": {"name_or_path": "org/target"}},
        "transformer_layer_config": raw,
        "tie_word_embeddings": False,
        **own,
        **outer,
    }
    (path / "config.json").write_text(json.dumps(whole))


@pytest.mark.parametrize("format_", ["flat", "nested", "speculators"])
@pytest.mark.parametrize("flags", list(itertools.product([False, True], repeat=3)))
def test_eagle31_follows_its_equations(
    tmp_path: Path, target_path: Path, target: CausalLM, flags: tuple[bool, ...], format_: str
) -> None:
    given = dict(zip(FLAGS, flags, strict=True))
    path = make_drafter(tmp_path, "eagle3", target_path, draft_vocab_size=100, **given)
    if format_ == "nested":
        edit(path, {**dict.fromkeys(FLAGS), "eagle_config": given})
    if format_ == "speculators":
        speculators(path)
    weights = load_file(path / "model.safetensors")
    assert ("fc_norm.2.weight" in weights, "input_norm.weight" in weights) == flags[:2]
    drafter = load_drafter("eagle3", path, target)
    ids, features = inputs(192)
    layer = layer_weights(weights, "midlayer.")
    wide = norm(features, weights["input_norm.weight"]) if flags[1] else features
    if flags[0]:
        parts = wide.split(64, -1)
        wide = torch.cat([norm(part, weights[f"fc_norm.{i}.weight"]) for i, part in enumerate(parts)], -1)
    hidden = F.linear(wide, weights["fc.weight"])
    normed = norm(hidden, layer["hidden_norm.weight"])
    embeds = norm(target.model.embed_tokens(ids), layer["input_layernorm.weight"])
    # A speculators head normalizes the residual stream unless its config says otherwise.
    x = (normed if format_ == "speculators" else hidden) + attention(layer, torch.cat((embeds, normed), -1))
    x = x + mlp(layer, norm(x, layer["post_attention_layernorm.weight"]))
    expected = norm(x, weights["norm.weight"])
    for chunks in ([TOKENS], [7, 1, 32]):
        out, feedback = run(drafter, ids, features, chunks)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(feedback, expected if flags[2] else x, rtol=1e-4, atol=1e-4)


def test_layer_ids_of_every_format_are_read_and_logged(
    tmp_path: Path, target_path: Path, target: CausalLM, caplog: pytest.LogCaptureFixture
) -> None:
    path = make_drafter(tmp_path, "eagle3", target_path, eagle_aux_hidden_state_layer_ids=[0, 2, 3])
    speculators(path, eagle_aux_hidden_state_layer_ids=None, aux_hidden_state_layer_ids=[3, 0, 2])
    with caplog.at_level(logging.INFO, "baton.drafters.eagle3"):
        assert load_drafter("eagle3", path, target).aux_layers == (0, 2, 3)
    assert "the streams that enter layers 0, 2, 3 of the target's 3" in caplog.text


@pytest.mark.parametrize(
    "raw",
    [
        {"num_aux_hidden_states": 4},
        {"eagle_aux_hidden_state_layer_ids": [1, 2], "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3]}},
        {"eagle_aux_hidden_state_layer_ids": [True, 2]},
    ],
)
def test_layer_ids_that_do_not_agree_are_refused(raw: Any) -> None:
    with pytest.raises(CheckpointError, match="aux_hidden_state"):
        aux_layer_ids(raw, 32)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"fc_norm_type": True}, "the flag fc_norm_type is unknown"),
        ({"eagle_config": {"use_mtp_layernorm": True}}, "use_mtp_layernorm is True"),
        ({"eagle_config": {"use_last_layernorm": False}}, "use_last_layernorm is False"),
        ({"eagle_config": {"parallel_draft_step": 4}}, "parallel_draft_step is 4"),
        ({"mask_token_id": 7}, "mask_token_id is 7"),
        ({"logit_scale": 0.5}, "logit_scale is 0.5"),
        ({"fc_norm": True}, "missing tensor fc_norm"),
        ({"norm_before_fc": True}, "missing tensor input_norm"),
        ({"norm_output": "yes"}, "norm_output is 'yes'"),
        ({"speculators_model_type": "peagle"}, "speculators_model_type is 'peagle'"),
        ({"speculators_model_type": "eagle3"}, "transformer_layer_config is None"),
        (
            {"speculators_model_type": "eagle3", "transformer_layer_config": {}, "parallel": True},
            "the flag parallel is unknown",
        ),
        (
            {"eagle_config": {"use_aux_hidden_state": False}, "norm_before_fc": True},
            "norm_before_fc and fc_norm go with auxiliary",
        ),
        ({"norm_output": False, "eagle_config": {"norm_output": True}}, "norm_output is False, and in eagle_config"),
        ({"use_aux_hidden_state": True, "eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state is"),
    ],
)
def test_flags_that_would_change_a_head_unseen_are_refused(
    tmp_path: Path, target_path: Path, target: CausalLM, config: dict[str, Any], words: str
) -> None:
    path = make_drafter(tmp_path, "eagle3", target_path)
    edit(path, config)
    with pytest.raises(CheckpointError, match=words):
        load_drafter("eagle3", path, target)


@pytest.mark.parametrize(
    "config",
    [
        {"norm_output": True},
        {"eagle_config": {"fc_norm": True}},
        {"norm_before_residual": True},
        {"aux_hidden_state_layer_ids": [0, 1, 2]},
    ],
)
def test_an_eagle_head_with_a_flag_of_eagle3_is_refused(
    tmp_path: Path, target_path: Path, target: CausalLM, config: dict[str, Any]
) -> None:
    path = make_drafter(tmp_path, "eagle", target_path)
    load_drafter("eagle", path, target)
    edit(path, config)
    with pytest.raises(CheckpointError, match="is for method eagle3, not eagle"):
        load_drafter("eagle", path, target)
