"""The committed checkpoints: files, names, shapes, and the claims of their cards."""

import json

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from tools.demo_training.blocks import DFLASH, load_block_head
from tools.demo_training.corpus import load_corpus
from tools.demo_training.deepseek import eagle3_config, load_deepseek, load_mtp
from tools.demo_training.heads import EAGLE, EAGLE3
from tools.demo_training.hybrid import load_hybrid, load_hybrid_mtp
from tools.demo_training.measure import acceptance, held_out_prompts, load_head
from tools.demo_training.mtp import MTP
from tools.demo_training.target import load_target
from tools.demo_training.vocabulary import ASSISTANT_ID, BOS_ID, USER_ID

E, FFN, Q, KV, V, DRAFT_V = 256, 704, 256, 128, 2048, 1024


@pytest.fixture(scope="module")
def prompts(models):
    """Held-out prompts; all demo targets have the same tokenizer."""
    tokenizer = Tokenizer.from_file(str(models / "baton-demo-llama" / "tokenizer.json"))
    return held_out_prompts(load_corpus().held_out, tokenizer, 60)


def layer_shapes(prefix: str, input_size: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.self_attn.q_proj.weight": (Q, input_size),
        f"{prefix}.self_attn.k_proj.weight": (KV, input_size),
        f"{prefix}.self_attn.v_proj.weight": (KV, input_size),
        f"{prefix}.self_attn.o_proj.weight": (E, Q),
        f"{prefix}.mlp.gate_proj.weight": (FFN, E),
        f"{prefix}.mlp.up_proj.weight": (FFN, E),
        f"{prefix}.mlp.down_proj.weight": (E, FFN),
        f"{prefix}.post_attention_layernorm.weight": (E,),
    }


def test_names_and_shapes_are_those_vllm_loads(models):
    eagle3 = load_file(models / "baton-demo-eagle3" / "model.safetensors")
    assert {name: tuple(value.shape) for name, value in eagle3.items()} == {
        **layer_shapes("midlayer", 2 * E),
        "midlayer.input_layernorm.weight": (E,),
        "midlayer.hidden_norm.weight": (E,),
        "norm.weight": (E,),
        "fc.weight": (E, 3 * E),
        "lm_head.weight": (DRAFT_V, E),
        "d2t": (DRAFT_V,),
        "t2d": (V,),
    }
    eagle = load_file(models / "baton-demo-eagle" / "model.safetensors")
    assert {name: tuple(value.shape) for name, value in eagle.items()} == {
        **layer_shapes("layers.0", E),
        "fc.weight": (E, 2 * E),
    }
    kinds = {value.dtype for name, value in (eagle3 | eagle).items() if name not in ("d2t", "t2d")}
    assert kinds == {torch.bfloat16}


def test_draft_vocabulary_maps_agree(models):
    tensors = load_file(models / "baton-demo-eagle3" / "model.safetensors")
    assert tensors["d2t"].dtype == torch.int64
    assert tensors["t2d"].dtype == torch.bool
    ids = torch.arange(DRAFT_V) + tensors["d2t"]
    assert torch.equal(tensors["t2d"].nonzero().flatten(), ids)


def test_configs_name_their_architectures(models):
    def config(name):
        return json.loads((models / f"baton-demo-{name}" / "config.json").read_text())

    target, eagle3, eagle = config("llama"), config("eagle3"), config("eagle")
    assert target["architectures"] == ["LlamaForCausalLM"]
    assert eagle3["architectures"] == ["LlamaForCausalLMEagle3"]
    assert eagle["architectures"] == ["EagleLlamaForCausalLM"]
    assert eagle3["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    assert eagle3["draft_vocab_size"] == DRAFT_V
    shared = (
        "hidden_size",
        "head_dim",
        "vocab_size",
        "rope_theta",
        "max_position_embeddings",
        "eos_token_id",
    )
    for head in (eagle3, eagle):
        assert [head[key] for key in shared] == [target[key] for key in shared]


def test_small_enough_to_commit_and_described(models):
    files = [path for path in models.rglob("*") if path.is_file()]
    sizes = {path.name: 0 for path in models.iterdir()}
    for path in files:
        sizes[path.relative_to(models).parts[0]] += path.stat().st_size
    assert {path.parent.name for path in files if path.name == "README.md"} == set(sizes)
    demos = {"llama", "eagle3", "eagle", "dflash", "deepseek", "deepseek-eagle3", "hybrid"}
    assert set(sizes) == {*(f"baton-demo-{name}" for name in demos), "baton-smollm2-eagle3"}
    assert max(sizes.values()) < 16e6
    assert sizes["baton-demo-deepseek"] + sizes["baton-demo-deepseek-eagle3"] < 11e6
    assert sum(sizes.values()) < 40e6


def test_chat_template_renders_and_encodes_with_one_bos(models):
    tokenizer = AutoTokenizer.from_pretrained(models / "baton-demo-llama")
    messages = [
        {"role": "user", "content": "Explain yield."},
        {"role": "assistant", "content": "It yields."},
        {"role": "user", "content": "More."},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == ("<|bos|><|user|>Explain yield.<|assistant|>It yields.<|eos|><|user|>More.<|assistant|>")
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert ids[:2] == [BOS_ID, USER_ID]
    assert ids[-1] == ASSISTANT_ID
    assert ids.count(BOS_ID) == 1
    assert tokenizer("plain")["input_ids"][0] == BOS_ID


@pytest.mark.parametrize(("kind", "least"), [(EAGLE3, 0.55), (EAGLE, 0.4)])
def test_drafts_are_accepted_on_held_out_prompts(models, prompts, kind, least):
    target = load_target(models / "baton-demo-llama")
    head = load_head(models / f"baton-demo-{kind}", kind, target.config)
    measured = acceptance(head, target, prompts[::6], 48)
    assert measured.rounds > 100
    assert measured.rates[0] >= least
    assert list(measured.rates) == sorted(measured.rates, reverse=True)


def deepseek_layer(index: int, experts: int) -> dict[str, tuple[int, ...]]:
    """A layer of the DeepSeek-type target: 6 heads of 32 + 16 and 32, latents of 64 + 16; dense without experts."""
    prefix, size = f"model.layers.{index}", 192
    shapes = {
        "input_layernorm": (size,),
        "post_attention_layernorm": (size,),
        "self_attn.q_a_proj": (96, size),
        "self_attn.q_a_layernorm": (96,),
        "self_attn.q_b_proj": (6 * 48, 96),
        "self_attn.kv_a_proj_with_mqa": (80, size),
        "self_attn.kv_a_layernorm": (64,),
        "self_attn.kv_b_proj": (6 * 64, 64),
        "self_attn.o_proj": (size, 6 * 32),
    }
    mlps = [f"mlp.experts.{i}" for i in range(experts)] + (["mlp.shared_experts"] if experts else ["mlp"])
    for mlp in mlps:
        width = 128 if experts else 512
        shapes |= {
            f"{mlp}.gate_proj": (width, size),
            f"{mlp}.up_proj": (width, size),
            f"{mlp}.down_proj": (size, width),
        }
    if experts:
        shapes["mlp.gate"] = (experts, size)
    named = {f"{prefix}.{name}.weight": shape for name, shape in shapes.items()}
    return named | ({f"{prefix}.mlp.gate.e_score_correction_bias": (experts,)} if experts else {})


def test_the_deepseek_files_have_the_names_of_published_ones(models):
    tensors = load_file(models / "baton-demo-deepseek" / "model.safetensors")
    wanted = {"model.embed_tokens.weight": (V, 192), "lm_head.weight": (V, 192), "model.norm.weight": (192,)}
    wanted |= {f"model.layers.4.{name}.weight": (192,) for name in ("enorm", "hnorm", "shared_head.norm")}
    wanted |= {"model.layers.4.eh_proj.weight": (192, 384)}
    for layer in range(5):
        wanted |= deepseek_layer(layer, 8 if layer else 0)
    assert {name: tuple(value.shape) for name, value in tensors.items()} == wanted
    biases = {name for name, value in tensors.items() if value.dtype == torch.float32}
    assert biases == {f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in range(1, 5)}
    config = json.loads((models / "baton-demo-deepseek" / "config.json").read_text())
    head = json.loads((models / "baton-demo-deepseek-eagle3" / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == 1
    assert [config["n_group"], config["topk_group"], config["num_experts_per_tok"]] == [4, 2, 2]
    assert head["architectures"] == ["LlamaForCausalLMEagle3"]
    shared = ("hidden_size", "vocab_size", "eos_token_id")
    assert [head[key] for key in shared] == [config[key] for key in shared]


@pytest.mark.parametrize("kind", [MTP, EAGLE3])
def test_drafts_for_the_deepseek_target_are_accepted(models, prompts, kind):
    directory = models / "baton-demo-deepseek"
    target = load_deepseek(directory)
    head = (
        load_mtp(directory)
        if kind == MTP
        else load_head(models / "baton-demo-deepseek-eagle3", kind, eagle3_config(target.config))
    )
    same = [(models / f"baton-demo-{name}" / "tokenizer.json").read_bytes() for name in ("deepseek", "llama")]
    assert same[0] == same[1]
    measured = acceptance(head, target, prompts[::4], 48)
    assert measured.rounds > 80
    assert measured.rates[0] >= 0.5


@pytest.mark.parametrize(("kind", "least"), [(MTP, 0.5), (DFLASH, 0.4)])
def test_drafts_of_the_hybrid_and_of_blocks_are_accepted(models, prompts, kind, least):
    if kind == MTP:
        directory = models / "baton-demo-hybrid"
        target, head = load_hybrid(directory), load_hybrid_mtp(directory)
        same = [(models / f"baton-demo-{name}" / "tokenizer.json").read_bytes() for name in ("hybrid", "llama")]
        assert same[0] == same[1]
    else:
        target = load_target(models / "baton-demo-llama")
        head = load_block_head(models / "baton-demo-dflash", target.config)
    measured = acceptance(head, target, prompts[::5], 32)
    assert measured.rounds > 50
    assert measured.rates[0] >= least


def test_the_new_files_have_the_names_of_published_ones(models):
    hybrid = load_file(models / "baton-demo-hybrid" / "model.safetensors")
    layers = {name.split(".")[2] for name in hybrid if name.startswith("model.layers.")}
    assert layers == {"0", "1", "2", "3"}
    assert {name for name in hybrid if name.startswith("model.layers.0.linear_attn.")} == {
        f"model.layers.0.linear_attn.{part}"
        for part in (
            *("in_proj_qkv.weight", "in_proj_z.weight", "in_proj_b.weight", "in_proj_a.weight", "conv1d.weight"),
            *("dt_bias", "A_log", "norm.weight", "out_proj.weight"),
        )
    }
    own = {"mtp.fc.weight", "mtp.norm.weight", "mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight"}
    assert {name for name in hybrid if name.startswith("mtp.") and ".layers." not in name} == own
    assert hybrid["mtp.layers.0.self_attn.q_proj.weight"].shape == (2 * 4 * 32, 96)
    blocks = load_file(models / "baton-demo-dflash" / "model.safetensors")
    assert {name for name in blocks if not name.startswith("layers.")} == {
        "fc.weight",
        "hidden_norm.weight",
        "norm.weight",
    }
    assert {value.dtype for value in (*hybrid.values(), *blocks.values())} == {torch.bfloat16}
