"""The training code of the DeepSeek-type demo: `transformers` reads its files, and its module drafts as there."""

import json

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import DeepseekV3ForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from tests.tools.plain_loop import plain_loop
from tools.demo_training import deepseek, joint
from tools.demo_training.corpus import topic_documents
from tools.demo_training.deepseek import (
    deepseek_config,
    load_deepseek,
    load_mtp,
    make_models,
    save_deepseek,
    save_mtp,
    train_deepseek,
)
from tools.demo_training.experts import Balance
from tools.demo_training.heads import look, unroll
from tools.demo_training.joint import Schedule, joint_loss, stable_rate
from tools.demo_training.target import TokenStream
from tools.demo_training.vocabulary import train_tokenizer


def small_config():
    config = deepseek_config()
    config.vocab_size, config.hidden_size, config.intermediate_size = 400, 32, 48
    config.num_attention_heads = config.num_key_value_heads = 2
    config.q_lora_rank, config.kv_lora_rank, config.moe_intermediate_size = 12, 16, 16
    config.num_hidden_layers = 3
    return config


@pytest.fixture(scope="module")
def models():
    torch.manual_seed(1)
    made = make_models(small_config())
    for name, parameter in made.named_parameters():  # the default initialisation gives nearly uniform logits
        parameter.data.mul_(1 if "norm" in name else 4)
    for gate in (m for m in made.modules() if hasattr(m, "e_score_correction_bias")):
        gate.e_score_correction_bias.normal_(std=0.05)
    # As stored: other roundings would choose other experts.
    for parameter in made.parameters():
        parameter.data = parameter.data.bfloat16().float()
    return made.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def saved(models, tmp_path_factory):
    directory = tmp_path_factory.mktemp("deepseek")
    save_deepseek(models, directory)
    return directory


def test_the_file_is_what_transformers_reads(models, saved, ids):
    loaded, info = DeepseekV3ForCausalLM.from_pretrained(saved, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"]
    assert all(name.startswith("model.layers.3.") for name in info["unexpected_keys"])
    torch.testing.assert_close(loaded.eval()(ids).logits, models["target"](ids).logits, atol=1e-5, rtol=1e-4)
    tensors = load_file(saved / "model.safetensors")
    assert tensors["model.layers.1.mlp.gate.e_score_correction_bias"].dtype == torch.float32
    assert tensors["model.layers.3.mlp.experts.7.down_proj.weight"].shape == (32, 16)
    config = json.loads((saved / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == 1
    assert config["architectures"] == ["DeepseekV3ForCausalLM"]


def test_the_module_drafts_as_that_of_transformers(models, saved, ids, monkeypatch):
    # transformers knows only the layer number of the one published model.
    monkeypatch.setattr(DeepseekV3ForCausalLM, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.3.*"])
    target = load_deepseek(saved)
    theirs, ours = MtpModel.from_pretrained(target).eval(), load_mtp(saved)
    hidden = target.model(ids[:1]).last_hidden_state[:, :-1]
    positions = torch.arange(1, ids.shape[1])[None]
    cache = MtpCache(config=target.config.get_mtp_config())
    with torch.no_grad():
        wanted = theirs.forward_layer(0, hidden, positions, cache, input_ids=ids[:1, 1:])
        embeds = target.model.embed_tokens(ids[:1, 1:])
        torch.testing.assert_close(unroll(ours, embeds, hidden, 1)[0], wanted, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(models["mtp"].whole(embeds, hidden), wanted, atol=1e-5, rtol=1e-4)


def test_unrolled_steps_of_the_module_equal_the_plain_loop(models, ids):
    mtp = models["mtp"]
    view = look(models["target"], ids[:1], ())
    embeds, features = view.embeds[:, 1:], view.features[:, :-1]
    unrolled = unroll(mtp, embeds, features, 3)
    for known in (1, 5, 15):
        for step, state in enumerate(plain_loop(mtp, embeds, features[:, :known], 3)):
            torch.testing.assert_close(state, unrolled[step][0, known - 1 + step], atol=1e-5, rtol=1e-4)


def test_losses_are_of_the_next_token_and_the_one_after_it(models, ids):
    target, mtp = models["target"], models["mtp"]
    main, later = joint_loss(models, ids)
    assert main.item() == pytest.approx(target(ids, labels=ids).loss.item(), rel=1e-5)
    view = look(target, ids, ())
    states = unroll(mtp, view.embeds[:, 1:], view.features[:, :-1], 1)[0]
    logits = mtp.logits(states, target.lm_head.weight)
    # Entry p has seen the token of position p + 1.
    wanted = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 2:].flatten())
    assert later.item() == pytest.approx(wanted.item(), rel=1e-5)


def test_another_module_takes_the_place_of_the_stored_one(models, saved, tmp_path):
    save_deepseek(models, tmp_path)
    torch.manual_seed(7)
    other = make_models(small_config())["mtp"].bfloat16().float()
    save_mtp(other, tmp_path)
    before, after = load_file(saved / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert set(before) == set(after)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert all(name.startswith("model.layers.3.") for name in changed)
    kept = load_mtp(tmp_path).state_dict()
    assert all(torch.equal(kept[name], value) for name, value in other.state_dict().items())


def test_balance_helps_the_experts_that_got_little(ids):
    torch.manual_seed(2)
    models = make_models(small_config())
    balance = Balance([models])
    joint_loss(models, ids)
    gate = models["target"].model.layers[1].mlp.gate
    counts = balance._counts[0]
    assert counts.sum() == ids.numel() * 2
    wanted = 0.01 * torch.sign(counts.mean() - counts)
    assert balance.busiest() > 1
    balance.step(0.01)
    assert torch.equal(gate.e_score_correction_bias, wanted)
    assert counts.sum() == 0


def test_rate_is_constant_before_it_falls():
    rates = [stable_rate(step / 100, step, warmup=10) for step in range(101)]
    assert rates[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    assert set(rates[9:51]) == {1.0}
    assert rates[50:] == sorted(rates[50:], reverse=True)
    assert rates[-1] == pytest.approx(0.02)


def test_a_run_that_was_cut_off_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(deepseek, "deepseek_config", small_config)
    documents = tuple(topic_documents()[:4])
    stream = TokenStream(documents, train_tokenizer([d.text for d in documents], vocab_size=400), chat=True)
    monkeypatch.setattr(TokenStream, "batch", _short_batch(TokenStream.batch))
    whole, steps, _ = train_deepseek(stream, Schedule(4), tmp_path / "whole.pt")
    assert steps == 4
    monkeypatch.setattr(joint, "SAVE_SECONDS", 0)
    with monkeypatch.context() as patch:
        patch.setattr(joint, "descend", _until(joint.descend, 2))
        with pytest.raises(KeyboardInterrupt):
            train_deepseek(stream, Schedule(4), tmp_path / "cut.pt")
    resumed, steps, _ = train_deepseek(stream, Schedule(4), tmp_path / "cut.pt")
    assert steps == 4
    for name, value in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name


def _short_batch(batch):
    return lambda self, rng, rows, length: batch(self, rng, 2, 32)


def _until(descend, steps):
    left = [steps]

    def step(*arguments):
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        descend(*arguments)

    return step
