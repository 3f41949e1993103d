"""The training code of the DFlash head: its blocks are those of a plain form and of Baton."""

import json

import pytest
import torch
from torch.nn import functional as F
from transformers import LlamaForCausalLM

from baton.engine.config import SpeculativeConfig
from baton.sampling_params import SamplingParams
from testkit.engines import note_drafts, stepped
from tools.demo_training import measure
from tools.demo_training.blocks import (
    BLOCK,
    MASK_ID,
    BlockHead,
    block_agreement,
    block_config,
    block_drafts,
    block_loss,
    load_block_head,
    save_block_head,
)
from tools.demo_training.distil import saving
from tools.demo_training.heads import look
from tools.demo_training.target import descend, load_target, make_optimizers, save_target, set_rate


@pytest.fixture
def head(target):
    torch.manual_seed(2)
    made = BlockHead(block_config(target.config))
    for parameter in made.parameters():
        parameter.data = (parameter.data * 5 if parameter.dim() > 1 else parameter.data).bfloat16().float()
    return made


@pytest.fixture(scope="module")
def ids():
    return torch.randint(5, 400, (2, 40), generator=torch.Generator().manual_seed(3))


def plain_states(head: BlockHead, target: LlamaForCausalLM, features: torch.Tensor, block: list[int]) -> torch.Tensor:
    """States of one block after the context `features` [1, n, F], by ordinary attention over n + R rows."""
    x = target.get_input_embeddings()(torch.tensor([block]))
    context = head.hidden_norm(head.fc(features))
    known = torch.arange(features.shape[1])[None]
    places = features.shape[1] + torch.arange(len(block))[None]
    for layer in head.layers:
        normed, attention = layer.input_layernorm(x), layer.self_attn
        old, own = attention.keys_values(context, known), attention.keys_values(normed, places)
        k, v = (torch.cat(pair, 2) for pair in zip(old, own, strict=True))
        attended = F.scaled_dot_product_attention(attention.queries(normed, places), k, v, scale=1.0)
        x = x + attention.o_proj(attended.transpose(1, 2).flatten(2))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return head.norm(x)


def test_many_blocks_at_once_are_each_alone(head, target, ids):
    features = look(target, ids, head.aux_layers).features
    starts, lengths = torch.tensor([[1, 20, 7], [33, 2, 20]]), torch.tensor([[8, 3, 2], [5, 8, 4]])
    with torch.no_grad():
        states = head(target.get_input_embeddings(), features, ids.gather(1, starts), starts, lengths)
        for row, (places, sizes) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
            for block, (start, size) in enumerate(zip(places, sizes, strict=True)):
                given = [int(ids[row, start]), *[MASK_ID] * (size - 1)]
                wanted = plain_states(head, target, features[row : row + 1, :start], given)[0]
                torch.testing.assert_close(states[row, block, :size], wanted, atol=1e-5, rtol=1e-4)


def test_drafts_follow_the_last_known_token(head, target, ids):
    known = ids[0, :12].tolist()
    features = look(target, ids[:1, :11], head.aux_layers).features
    with torch.no_grad():
        states = plain_states(head, target, features, [known[-1], *[MASK_ID] * 3])[0, 1:]
    wanted = F.linear(states, target.lm_head.weight).argmax(-1).tolist()
    assert block_drafts(head, target, known, features, 3) == wanted
    assert measure.draft(head, target, known, features, 3) == wanted


def test_baton_drafts_as_the_training_code(head, target, ids, tmp_path, monkeypatch):
    save_target(target, tmp_path / "target")
    save_block_head(head, tmp_path / "head")
    stored, prompt = load_target(tmp_path / "target"), ids[0, :20].tolist()
    config = {"method": "dflash", "model": str(tmp_path / "head"), "num_speculative_tokens": 4}
    settings = {"model": str(tmp_path / "target"), "dtype": "float32", "skip_tokenizer_init": True}
    drafts = note_drafts(monkeypatch)
    with stepped(**settings, speculative_config=SpeculativeConfig.parse(config)) as one:
        tokens = one.run("r", prompt, SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)).token_ids
    said = torch.tensor([[*prompt, *tokens]])
    assert len(drafts) > 3
    features = look(stored, said, head.aux_layers).features
    for known, made in drafts.items():
        wanted = block_drafts(head, stored, said[0, :known].tolist(), features[:, : known - 1], len(made))
        assert made == wanted, known


def test_agreement_is_with_the_token_at_a_rows_place(head, target, ids):
    view = look(target, ids, head.aux_layers)
    equal = seen = 0
    for row, text in enumerate(ids.tolist()):
        for start in range(1, len(text) - 2, 4):
            drafts = block_drafts(head, target, text[: start + 1], view.features[row : row + 1, :start], 2)
            equal += drafts[1] == int(view.logits[row, start + 1].argmax())
            seen += 1
    assert block_agreement(head, target, ids, 2)[1] == pytest.approx(equal / seen)


def test_a_short_training_lowers_the_loss(head, target, ids):
    def loss() -> torch.Tensor:
        torch.manual_seed(4)
        return block_loss(head, target, ids)

    optimizers, first = make_optimizers(head), loss().item()
    set_rate(optimizers, 1e-2)
    for _ in range(12):
        descend(head, optimizers, loss())
    assert loss().item() < first - 0.25


def test_a_saved_head_comes_back(head, target, tmp_path):
    save_block_head(head, tmp_path)
    again = load_block_head(tmp_path, target.config)
    assert all(torch.equal(again.state_dict()[name], value) for name, value in head.state_dict().items())
    assert again.aux_layers == head.aux_layers
    assert json.loads((tmp_path / "config.json").read_text())["block_size"] == BLOCK


def test_a_head_is_saved_while_it_trains(monkeypatch):
    now, saved = [0.0], []
    monkeypatch.setattr("tools.demo_training.distil.time.monotonic", lambda: now[0])
    loss = saving(lambda head, target, ids: ids, saved.append, seconds=30)

    def at(seconds):
        now[0] = seconds
        return loss("head", "target", seconds)

    assert [at(10.0), at(31.0), at(40.0), at(62.0)] == [10.0, 31.0, 40.0, 62.0]
    assert saved == ["head", "head"]
