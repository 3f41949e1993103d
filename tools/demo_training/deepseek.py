"""The DeepSeek-type demo target: a small `DeepseekV3ForCausalLM` of `transformers`, trained with its MTP module."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, GenerationConfig, LlamaConfig

from .experts import Balance, separate_experts
from .heads import head_config
from .joint import Schedule, train_joint
from .mtp import MtpModule
from .target import MAX_POSITION, TokenStream
from .vocabulary import BOS_ID, EOS_ID, PAD_ID, VOCAB_SIZE, write_json, write_tensors


def deepseek_config() -> DeepseekV3Config:
    """4.5 million parameters with the MTP module: 4 layers of width 192, of which the first is dense."""
    return DeepseekV3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=6,
        q_lora_rank=96,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        first_k_dense_replace=1,
        moe_layer_freq=1,
        moe_intermediate_size=128,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_shared_experts=1,
        n_group=4,
        topk_group=2,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        norm_topk_prob=True,
        routed_scaling_factor=1.5,
        num_nextn_predict_layers=1,
        max_position_embeddings=MAX_POSITION,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
        pad_token_id=PAD_ID,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
    )


def eagle3_config(config: DeepseekV3Config) -> LlamaConfig:
    """The config of a Llama-type head for this target: 6 query and 2 KV heads of 32."""
    return head_config(config, layers=1, heads=6, intermediate_size=512)


def make_models(config: DeepseekV3Config) -> nn.ModuleDict:
    """`target` and `mtp`, randomly initialised, with the parameter names of a checkpoint."""
    config._attn_implementation = "sdpa"  # causal without a mask; a lone module's default is not
    models = nn.ModuleDict({"target": DeepseekV3ForCausalLM(config), "mtp": MtpModule(config)})
    separate_experts(models, config)
    for name, parameter in models.named_parameters():
        if parameter.dim() == 2 and not name.startswith("target.model.embed_tokens"):
            nn.init.normal_(parameter, std=config.initializer_range)
    return models


def train_deepseek(stream: TokenStream, schedule: Schedule, state: Path) -> tuple[nn.ModuleDict, int, float]:
    """Train from scratch, or continue from the file `state`. Returns the models, the number of steps and the CPU
    seconds.
    """
    torch.manual_seed(schedule.seed)
    models = make_models(deepseek_config())
    steps, seconds = train_joint(models, stream, schedule, state, Balance([models]))
    return models, steps, seconds


def mtp_prefix(config: DeepseekV3Config) -> str:
    """Prefix of the names of the MTP module's tensors."""
    return f"model.layers.{config.num_hidden_layers}."


def stored_tensors(module: nn.Module, prefix: str = "") -> dict[str, Tensor]:
    """Tensors as stored in a checkpoint: bf16, except fp32 for the biases of the experts' choice."""
    return {
        prefix + name: value.contiguous() if name.endswith("e_score_correction_bias") else value.to(torch.bfloat16)
        for name, value in module.state_dict().items()
    }


def save_deepseek(models: nn.ModuleDict, directory: Path) -> None:
    """Save config, safetensors and generation defaults.

    The config also gets the names that `transformers` before version 5 reads (`torch_dtype`, `rope_theta`).
    """
    directory.mkdir(parents=True, exist_ok=True)
    config = models["target"].config
    tensors = stored_tensors(models["target"]) | stored_tensors(models["mtp"], mtp_prefix(config))
    write_tensors(directory / "model.safetensors", tensors)
    defaults = GenerationConfig(bos_token_id=BOS_ID, eos_token_id=EOS_ID, pad_token_id=PAD_ID, do_sample=False)
    defaults.save_pretrained(directory)
    written = json.loads(config.to_json_string()) | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "rope_theta": config.rope_parameters["rope_theta"],
    }
    write_json(directory / "config.json", dict(sorted(written.items())))


def save_mtp(mtp: MtpModule, directory: Path) -> None:
    """Replace the MTP tensors in a saved target's file by those of `mtp`."""
    path = directory / "model.safetensors"
    config = DeepseekV3Config.from_pretrained(directory)
    write_tensors(path, load_file(path) | stored_tensors(mtp, mtp_prefix(config)))


def load_deepseek(directory: Path) -> DeepseekV3ForCausalLM:
    """The stored target as `transformers` loads it, computing in fp32."""
    return DeepseekV3ForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def load_mtp(directory: Path) -> MtpModule:
    config = DeepseekV3Config.from_pretrained(directory)
    mtp, prefix = MtpModule(config), mtp_prefix(config)
    separate_experts(mtp, config)
    tensors = load_file(directory / "model.safetensors")
    mtp.load_state_dict({name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)})
    return mtp.float().eval()
