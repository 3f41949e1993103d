"""The training code of the hybrid demo: `transformers` and Baton read its files, and its module drafts as there."""

import json

import pytest
import torch
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM

from baton.engine.config import SpeculativeConfig
from baton.sampling_params import SamplingParams
from testkit.engines import note_drafts, stepped
from tests.tools.plain_loop import plain_loop
from tools.demo_training import measure
from tools.demo_training.gated_mtp import GatedMtpModule
from tools.demo_training.heads import look, unroll
from tools.demo_training.hybrid import (
    hybrid_config,
    load_hybrid,
    load_hybrid_mtp,
    make_hybrid,
    save_hybrid,
    save_hybrid_mtp,
)
from tools.demo_training.joint import joint_loss
from tools.demo_training.target import generate_rows


def small_config():
    config = hybrid_config()
    config.vocab_size, config.hidden_size, config.intermediate_size = 400, 32, 48
    config.num_attention_heads, config.num_key_value_heads, config.head_dim = 4, 2, 16
    config.linear_key_head_dim, config.linear_value_head_dim = 12, 10
    return config


@pytest.fixture(scope="module")
def models():
    torch.manual_seed(1)
    made = make_hybrid(small_config())
    for parameter in made.parameters():  # the default initialisation gives nearly uniform logits
        parameter.data.mul_(4) if parameter.dim() > 1 else parameter.data.add_(torch.randn(parameter.shape) * 0.2)
        parameter.data = parameter.data.bfloat16().float()
    made["target"].tie_weights()
    return made.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def saved(models, tmp_path_factory):
    directory = tmp_path_factory.mktemp("hybrid")
    save_hybrid(models, directory)
    return directory


def test_the_file_is_what_transformers_reads(models, saved, ids):
    loaded, info = Qwen3_5ForCausalLM.from_pretrained(saved, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"] or all(name.startswith("mtp.") for name in info["unexpected_keys"])
    torch.testing.assert_close(loaded.eval()(ids).logits, models["target"](ids).logits, atol=1e-5, rtol=1e-4)
    config = json.loads((saved / "config.json").read_text())
    assert config["architectures"] == ["Qwen3_5ForCausalLM"]
    assert config["model_type"] == "qwen3_5_text"


def test_features_are_the_final_states(models, ids):
    view = look(models["target"], ids, ())
    torch.testing.assert_close(models["target"].lm_head(view.features), view.logits)


def test_unrolled_steps_of_the_module_equal_the_plain_loop(models, ids):
    mtp = models["mtp"]
    view = look(models["target"], ids[:1], ())
    embeds, features = view.embeds[:, 1:], view.features[:, :-1]
    unrolled = unroll(mtp, embeds, features, 3)
    torch.testing.assert_close(mtp.whole(embeds, features), unrolled[0], atol=1e-5, rtol=1e-4)
    for known in (1, 5, 15):
        for step, state in enumerate(plain_loop(mtp, embeds, features[:, :known], 3)):
            torch.testing.assert_close(state, unrolled[step][0, known - 1 + step], atol=1e-5, rtol=1e-4)


def test_losses_are_of_the_next_token_and_the_one_after_it(models, ids):
    main, later = joint_loss(models, ids)
    assert main.item() == pytest.approx(models["target"](ids, labels=ids).loss.item(), rel=1e-5)
    view = look(models["target"], ids, ())
    states = unroll(models["mtp"], view.embeds[:, 1:], view.features[:, :-1], 1)[0]
    logits = models["mtp"].logits(states, models["target"].lm_head.weight)[:, :-1]
    wanted = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 2:].flatten())
    assert later.item() == pytest.approx(wanted.item(), rel=1e-5)


def test_baton_drafts_as_the_training_code(saved, ids, monkeypatch):
    target, mtp, prompt = load_hybrid(saved), load_hybrid_mtp(saved), ids[0].tolist()
    spec = SpeculativeConfig.parse({"method": "mtp", "num_speculative_tokens": 3})
    settings = {"model": str(saved), "dtype": "float32", "skip_tokenizer_init": True, "speculative_config": spec}
    drafts = note_drafts(monkeypatch)
    with stepped(**settings) as one:
        tokens = one.run("r", prompt, SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)).token_ids
    said = generate_rows(target, ids[:1], 8, torch.zeros(1), 0)
    assert said[0, len(prompt) :].tolist() == tokens
    assert len(drafts) > 3
    features = look(target, said, ()).features
    for known, made in drafts.items():
        wanted = measure.draft(mtp, target, said[0, :known].tolist(), features[:, : known - 1], len(made))
        assert made == wanted, known


def test_another_module_takes_the_place_of_the_stored_one(models, tmp_path):
    save_hybrid(models, tmp_path)
    torch.manual_seed(7)
    other = GatedMtpModule(small_config()).bfloat16().float()
    save_hybrid_mtp(other, tmp_path)
    kept = load_hybrid_mtp(tmp_path).state_dict()
    assert all(torch.equal(kept[name], value) for name, value in other.state_dict().items())
    before, after = models["target"].state_dict(), load_hybrid(tmp_path).state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
