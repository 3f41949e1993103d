"""A target's own MTP module: its drafts are those of transformers, and several modules where one is expected are
refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers.generation.candidate_generator as candidates
from safetensors.torch import load_file, save_file
from torch import Tensor

from baton.engine.config import SpeculativeConfig
from baton.errors import CheckpointError
from baton.sampling_params import SamplingParams
from testkit.checkpoints.drafters_layers import make_mtp_checkpoint, mtp
from testkit.checkpoints.moe import make_moe_checkpoint
from testkit.engines import note_drafts, random_prompt, stepped
from tests.drafters.reference import Generated, generate
from tests.drafters.test_drafters import edit
from tests.engine.models.test_transformers_equality import assert_drafts, load_reference

pytestmark = pytest.mark.usefixtures("one_thread")
NUM_TOKENS = 8
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)


def generated(path: Path, prompt: list[int], monkeypatch: pytest.MonkeyPatch) -> Generated:
    model = load_reference(path)
    with monkeypatch.context() as patch:
        # It identifies a module by the number of its layer in the published checkpoint.
        first = model.config.num_hidden_layers
        behind = rf"model\.layers\.({'|'.join(str(first + i) for i in range(9))})\..*"
        patch.setattr(model, "_keys_to_ignore_on_load_unexpected", {behind})
        return generate(model, prompt, NUM_TOKENS, candidates.MTPCandidateGenerator, patch, use_mtp=True)


def drafts_of_the_engine(
    path: Path, prompt: list[int], num: int, monkeypatch: pytest.MonkeyPatch, **settings: Any
) -> tuple[list[int], dict[int, list[int]]]:
    spec = SpeculativeConfig.parse(json.dumps(mtp(num)))
    with monkeypatch.context() as patch:
        found = note_drafts(patch)
        with stepped(model=str(path), speculative_config=spec, dtype="float32", **settings) as one:
            return one.run("r", prompt, GREEDY).token_ids, found


@pytest.mark.parametrize("shape", ["deepseek_v3", "deepseek_v3-odd", "glm4_moe"])
def test_drafts_are_those_of_transformers(shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_mtp_checkpoint(tmp_path, shape, seed=3)
    runs: list[tuple[int, dict[str, int]]] = [(1, {}), (1, {"max_num_batched_tokens": 10}), (3, {})]
    for length in (1, 33):
        prompt = [3 + (7 * i + i * i) % 200 for i in range(length)]
        theirs = generated(path, prompt, monkeypatch)
        for num, settings in runs:
            got, ours = drafts_of_the_engine(path, prompt, num, monkeypatch, **settings)
            theirs.assert_tokens(got)
            # The last tokens of a request need no drafts, but transformers makes them. Its module makes one in a round.
            assert theirs.assert_rounds(got, ours) > NUM_TOKENS // 2


def alone(path: Path, folder: Path) -> tuple[Any, dict[str, Tensor]]:
    """A module's layer, norm and head as a model of transformers, and its other tensors."""
    raw, stored = json.loads((path / "config.json").read_text()), load_file(path / "model.safetensors")
    prefix = f"model.layers.{raw['num_hidden_layers']}."
    own = {name.removeprefix(prefix): tensor for name, tensor in stored.items() if name.startswith(prefix)}
    parts = {name: own.pop(f"{name}.weight") for name in ("enorm", "hnorm", "eh_proj")}
    outer = {
        "lm_head.weight": own.pop("shared_head.head.weight"),
        "model.embed_tokens.weight": own.pop("embed_tokens.weight"),
        "model.norm.weight": own.pop("shared_head.norm.weight"),
    }
    folder.mkdir()
    weights = {**outer, **{f"model.layers.0.{name}": tensor for name, tensor in own.items()}}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    one = {"num_hidden_layers": 1, "first_k_dense_replace": 0, "index_topk_pattern": "F", "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps({**raw, **one}))
    return load_reference(folder), parts


def drafts_of_layer(
    model: Any, module: Any, known_ids: list[int], embedding_norm: Tensor, hidden_norm: Tensor, projection: Tensor
) -> Tensor:
    """Logits of the draft after each row, by a model of transformers of the target and one of the module's layer."""
    known, eps = torch.tensor([known_ids]), model.config.rms_norm_eps
    with torch.inference_mode():
        hidden, embeds = model.model(known).last_hidden_state[:, :-1], model.model.embed_tokens(known[:, 1:])
        pairs = (embeds, embedding_norm), (hidden, hidden_norm)
        x = torch.cat([F.rms_norm(x, x.shape[-1:], weight, eps) for x, weight in pairs], dim=-1) @ projection.T
        found: Tensor = module(inputs_embeds=x).logits[0]
    return found


@pytest.mark.parametrize("shape", ["deepseek_v32", "deepseek_v32-odd", "glm_moe_dsa"])
def test_drafts_of_sparse_modules_are_those_of_their_layer_alone(
    shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers' `use_mtp` does not know these types. Indexers of fewer heads score many tokens with exactly 0, of
    which transformers may choose others."""
    path, prompt = make_mtp_checkpoint(tmp_path / "target", shape, seed=3, index_n_heads=8), random_prompt(33)
    tokens, drafts = drafts_of_the_engine(path, prompt, 1, monkeypatch, max_num_batched_tokens=10)
    module, parts = alone(path, tmp_path / "module")
    expected = drafts_of_layer(load_reference(path), module, prompt + tokens, *parts.values())
    assert len(drafts) > NUM_TOKENS // 2
    assert_drafts(drafts, expected)


@pytest.mark.parametrize(("shape", "num"), [("deepseek_v3", 2), ("deepseek_v3-odd", 3), ("glm4_moe", 3)])
def test_several_modules_draft_as_those_of_transformers(
    shape: str, num: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after the other, with any chunks; after them the last module is repeated."""
    path = make_mtp_checkpoint(tmp_path, shape, seed=3, num=num)
    runs: dict[int, list[tuple[int, dict[str, int]]]] = {
        5: [(num, {})],
        33: [(num, {"max_num_batched_tokens": num + 1}), (1, {}), (num + 2, {})],
    }
    for length, settings_of_runs in runs.items():
        prompt = [3 + (7 * i + i * i) % 200 for i in range(length)]
        theirs = generated(path, prompt, monkeypatch)
        for count, settings in settings_of_runs:
            got, ours = drafts_of_the_engine(path, prompt, count, monkeypatch, **settings)
            theirs.assert_tokens(got)
            assert theirs.assert_rounds(got, ours) > NUM_TOKENS // 2 - 1


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"num_nextn_predict_layers": 2}, "missing tensor"),
        ({"num_nextn_predict_layers": 17}, "num_nextn_predict_layers is 17"),
        ({"num_nextn_predict_layers": 0}, "num_nextn_predict_layers is 0"),
        ({"mtp_hidden_states_first": True}, "mtp_hidden_states_first is not supported"),
    ],
)
def test_other_modules_are_refused_by_name(fields: dict[str, Any], why: str, tmp_path: Path) -> None:
    path = make_mtp_checkpoint(tmp_path, "deepseek_v3")
    edit(path, fields)
    spec = SpeculativeConfig.parse(json.dumps(mtp()))
    with pytest.raises(CheckpointError, match=why), stepped(model=str(path), speculative_config=spec):
        pass


def test_targets_without_a_module_are_refused(tmp_path: Path, checkpoint: Any) -> None:
    spec = SpeculativeConfig.parse(json.dumps(mtp()))
    why, llama = (
        "mtp is for targets of type deepseek_v3, .*qwen3_5_.*, this is 'llama'",
        str(checkpoint("llama")),
    )
    with pytest.raises(CheckpointError, match=why), stepped(model=llama, speculative_config=spec):
        pass
    path = make_moe_checkpoint(tmp_path, "glm4_moe", num_nextn_predict_layers=1)
    with pytest.raises(CheckpointError, match="missing tensor"), stepped(model=str(path), speculative_config=spec):
        pass
