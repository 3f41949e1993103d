"""Small random checkpoints of architectures other than the demo models'."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from testkit.vllm.servers import MODEL

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
# The same kernel on all CPUs: with AMX vLLM would take AMX_MLA, for bfloat16 only.
MLA = "CPU_MLA"
MTP = {"method": "mtp", "num_speculative_tokens": 3, "attention_backend": MLA}  # of `deepseek`
LOUD = slice(3, 9)  # tokens between which these models choose, so that a guessing drafter is sometimes right
COMMON: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def gemma3(folder: Path) -> None:
    """Windows of 64 tokens, every third layer without."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    layers = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    sizes = {"num_hidden_layers": 6, "num_key_value_heads": 2, "head_dim": 32, "query_pre_attn_scalar": 32}
    config = Gemma3TextConfig(**COMMON, **sizes, sliding_window=64, layer_types=layers)
    save_random(Gemma3ForCausalLM(config), folder)


def mamba2(folder: Path, num_experts: int = 0, layers: Sequence[str] = ("mamba", "attention") * 2) -> None:
    """Mamba-2 and attention, with experts if there are any."""
    from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

    sizes = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_n_groups": 1, "mamba_d_state": 32, "mamba_chunk_size": 64}
    config = GraniteMoeHybridConfig(
        **COMMON,
        **sizes,
        num_hidden_layers=len(layers),
        num_key_value_heads=2,
        layer_types=list(layers),
        shared_intermediate_size=256,
        num_local_experts=num_experts,
        num_experts_per_tok=min(num_experts, 2),
        mamba_d_conv=4,
        mamba_expand=2,
        position_embedding_type="rope",
        attention_multiplier=0.18,
    )
    save_random(GraniteMoeHybridForCausalLM(config), folder)


DELTA_NETS: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",  # which vLLM's CPU kernel needs
}


def qwen3_next(folder: Path, experts_per_token: int = 2) -> None:
    """Gated delta nets and attention in turns, with experts, and an MTP module. With one expert per token, ranks that
    each have some of the experts compute the bits of one too.
    """
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    experts = {"num_experts": 4, "num_experts_per_tok": experts_per_token, "moe_intermediate_size": 64}
    config = Qwen3NextConfig(**COMMON, **DELTA_NETS, **experts, shared_expert_intermediate_size=64)
    _save_with_mtp(Qwen3NextForCausalLM(config), folder)


def qwen3_5(folder: Path) -> None:
    """As it is published: gated delta nets and attention in turns, an MTP module, positions of three axes, and a model
    of images, which no prompt of tokens uses.
    """
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    text = COMMON | DELTA_NETS | {"mtp_num_hidden_layers": 1, "mamba_ssm_dtype": "float32"}
    text |= {"rope_parameters": rope | {"mrope_section": [3, 3, 2], "mrope_interleaved": True}}
    vision = {"depth": 1, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "out_hidden_size": 128}
    ids = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    config = Qwen3_5Config(
        text_config={name: value for name, value in text.items() if name != "tie_word_embeddings"},
        vision_config=vision | {"num_position_embeddings": 64},
        tie_word_embeddings=False,
        **{name: 2040 + index for index, name in enumerate(ids)},
    )
    config.dtype = "bfloat16"
    _save_with_mtp(Qwen3_5ForConditionalGeneration(config), folder, "model.language_model.")
    image = {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2, "processor_class": "Qwen3VLProcessor"}
    image |= {"size": {"longest_edge": 65536, "shortest_edge": 4096}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    kinds = {
        "preprocessor_config": {"image_processor_type": "Qwen2VLImageProcessorFast"},
        "video_preprocessor_config": {"video_processor_type": "Qwen3VLVideoProcessor"},
    }
    for name, kind in kinds.items():
        (folder / f"{name}.json").write_text(json.dumps(image | kind))


def _save_with_mtp(model: Any, folder: Path, prefix: str = "model.") -> None:
    """With a module whose layer is the last one of the model. Two tensor ranks compute the bits of one. `prefix`: of
    the weights of the model of text.
    """
    save_random(model.to(torch.bfloat16), folder)
    weights = load_file(folder / "model.safetensors")
    last, hidden = f"{prefix}layers.3.", COMMON["hidden_size"]
    for name in [name for name in weights if name.startswith(last)]:
        weights["mtp.layers.0." + name.removeprefix(last)] = weights[name].roll(1, 0)
    for name, weight in weights.items():
        if any(part in name for part in ("o_proj", "out_proj", "down_proj")):
            _cut_in_two(weight)
    zeros = torch.zeros(hidden, dtype=torch.bfloat16)  # its norms multiply by 1 + weight
    weights |= {f"mtp.{name}.weight": zeros.clone() for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
    weights["mtp.fc.weight"] = (torch.randn(hidden, 2 * hidden) * 0.08).to(torch.bfloat16)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _cut_in_two(weight: torch.Tensor) -> None:
    """Make outputs of a matrix depend on the inputs of one tensor rank of two: the other one adds zeros. Sums of two
    bfloat16 numbers would have other bits than one server's.
    """
    half_out, half_in = weight.shape[-2] // 2, weight.shape[-1] // 2
    weight[..., :half_out, half_in:] = 0
    weight[..., half_out:, :half_in] = 0


def deepseek_experts(folder: Path) -> None:
    """As `deepseek`, with experts in all layers but the first, and in the MTP module."""
    deepseek(folder, num_dense=1)


def deepseek(folder: Path, num_dense: int = 4) -> None:
    """MLA in the one size that vLLM's CPU kernel takes, and an MTP module. The first `num_dense` layers have no
    experts.
    """
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    rope = {"rope_type": "yarn", "factor": 40.0, "rope_theta": 10000.0, "original_max_position_embeddings": 4096}
    heads = {"qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "kv_lora_rank": 512}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    config = DeepseekV3Config(
        **COMMON,
        **heads,
        **experts,
        num_hidden_layers=3,
        num_key_value_heads=4,
        q_lora_rank=None,
        first_k_dense_replace=num_dense,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        moe_intermediate_size=64,
        n_shared_experts=1,
        rope_parameters=rope | {"mscale": 0.707, "mscale_all_dim": 0.707},
        num_nextn_predict_layers=1,
    )
    save_random(DeepseekV3ForCausalLM(config), folder)
    _add_mtp_modules(folder, config.num_hidden_layers, 1)


def glm4_moe(folder: Path, num_modules: int = 1) -> None:
    """Attention with heads, experts in all layers but the first, and MTP modules."""
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    config = Glm4MoeConfig(
        **COMMON,
        **experts,
        num_hidden_layers=3,
        num_key_value_heads=2,
        head_dim=32,
        first_k_dense_replace=1,
        num_nextn_predict_layers=num_modules,
        tie_word_embeddings=False,
    )
    save_random(Glm4MoeForCausalLM(config), folder)
    _add_mtp_modules(folder, config.num_hidden_layers, num_modules)


def _add_mtp_modules(folder: Path, num_layers: int, count: int) -> None:
    """Append `count` modules of DeepSeek's kind, with layers like the model's last one and its embedding and head."""
    weights, hidden = load_file(folder / "model.safetensors"), COMMON["hidden_size"]
    last = f"model.layers.{num_layers - 1}."
    layer = {name.removeprefix(last): weight for name, weight in weights.items() if name.startswith(last)}
    for number in range(count):
        module = f"model.layers.{num_layers + number}."
        weights |= {module + name: weight.roll(number + 1, 0) for name, weight in layer.items()}
        weights |= {f"{module}{name}.weight": torch.ones(hidden) for name in ("enorm", "hnorm", "shared_head.norm")}
        weights[f"{module}eh_proj.weight"] = torch.randn(hidden, 2 * hidden) * 0.08
        weights[f"{module}embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
        weights[f"{module}shared_head.head.weight"] = weights["lm_head.weight"].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def gpt_oss(folder: Path) -> None:
    """Windows of 64 tokens in every second layer, attention sinks, experts with biases; and in `eagle3` a draft head
    with another head size.
    """
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(
        **COMMON,
        num_hidden_layers=4,
        num_key_value_heads=2,
        head_dim=32,
        sliding_window=64,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    model = GptOssForCausalLM(config)
    save_random(model, folder)
    _eagle3(folder / "eagle3", model.lm_head.weight)


def windowed(folder: Path) -> None:
    """The demo model with windows of 64 tokens in every second layer: its drafters are still often right."""
    folder.mkdir(parents=True)
    config = json.loads((MODEL / "config.json").read_text())
    config |= {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"] * 2}
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("model.safetensors", *TOKENIZER):
        shutil.copy(MODEL / name, folder)


def scaled(folder: Path, each_head: bool = False) -> None:
    """The demo model with FP8 KV, whose scales are in the checkpoint: one of each layer, or one of each head."""
    folder.mkdir(parents=True)
    config = json.loads((MODEL / "config.json").read_text())
    scheme = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "dense",
        "quantization_status": "compressed",
        "config_groups": {},
        "kv_cache_scheme": scheme | {"strategy": "attn_head" if each_head else "tensor"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(MODEL / "model.safetensors")
    shape = (config["num_key_value_heads"], 1, 1) if each_head else (1,)
    generator = torch.Generator().manual_seed(0)
    for layer in range(config["num_hidden_layers"]):
        for name in ("k_scale", "v_scale"):
            scale = 0.02 + 0.1 * torch.rand(shape, generator=generator)
            weights[f"model.layers.{layer}.self_attn.{name}"] = scale
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    for name in TOKENIZER:
        shutil.copy(MODEL / name, folder)


def shallow(folder: Path, num_layers: int = 3, copies: int = 1) -> None:
    """The demo model's first layers: a draft model that is often right, but not always. With `copies` of each KV head
    it computes the same, and its cache has another shape.
    """
    config = json.loads((MODEL / "config.json").read_text())
    heads = config["num_key_value_heads"]
    left = tuple(f"model.layers.{number}." for number in range(num_layers, config["num_hidden_layers"]))
    config |= {"num_hidden_layers": num_layers, "num_key_value_heads": heads * copies}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(MODEL / "model.safetensors")
    kept = {name: weight for name, weight in weights.items() if not name.startswith(left)}
    for name in [name for name in kept if "k_proj" in name or "v_proj" in name]:
        kept[name] = kept[name].unflatten(0, (heads, -1)).repeat_interleave(copies, 0).flatten(0, 1).contiguous()
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    for name in TOKENIZER:
        shutil.copy(MODEL / name, folder)


def lora(folder: Path, seed: int, rank: int = 4) -> None:
    """A random LoRA adapter of the demo model's attention, which often changes its answers."""
    config = json.loads((MODEL / "config.json").read_text())
    hidden, dim = (
        config["hidden_size"],
        config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
    )
    widths = {"q_proj": config["num_attention_heads"] * dim, "v_proj": config["num_key_value_heads"] * dim}
    generator, weights = torch.Generator().manual_seed(seed), {}
    for layer in range(config["num_hidden_layers"]):
        for name, width in widths.items():
            module = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{module}.lora_A.weight"] = torch.randn(rank, hidden, generator=generator) * 0.1
            weights[f"{module}.lora_B.weight"] = torch.randn(width, rank, generator=generator) * 0.1
    folder.mkdir(parents=True)
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": [*widths], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def _eagle3(folder: Path, lm_head: torch.Tensor) -> None:
    """A random EAGLE-3 head of the Llama type, which chooses between the target's `LOUD` tokens."""
    hidden, inner, heads, kv_heads, dim = COMMON["hidden_size"], 256, 4, 4, 32
    shapes = {
        "fc": (hidden, 3 * hidden),
        "midlayer.self_attn.q_proj": (heads * dim, 2 * hidden),
        "midlayer.self_attn.k_proj": (kv_heads * dim, 2 * hidden),
        "midlayer.self_attn.v_proj": (kv_heads * dim, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, heads * dim),
        "midlayer.mlp.gate_proj": (inner, hidden),
        "midlayer.mlp.up_proj": (inner, hidden),
        "midlayer.mlp.down_proj": (hidden, inner),
    }
    weights = {f"{name}.weight": torch.randn(shape) * 0.08 for name, shape in shapes.items()}
    norms = ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm")
    weights |= {f"{name}.weight": torch.ones(hidden) for name in norms}
    weights["lm_head.weight"] = lm_head.detach().clone()
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "dtype": "float32",
        "draft_vocab_size": COMMON["vocab_size"],
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
        "num_hidden_layers": 1,
        "num_key_value_heads": kv_heads,
        "head_dim": dim,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(COMMON | config))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def save_random(model: Any, folder: Path) -> None:
    """With other weights. A head of its own chooses between `LOUD` tokens."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.08)
        if not model.config.tie_word_embeddings:
            model.lm_head.weight[LOUD] *= 30
    model.save_pretrained(folder)
    for name in TOKENIZER:
        shutil.copy(MODEL / name, folder)
