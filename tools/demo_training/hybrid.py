"""The hybrid demo target: a small `Qwen3_5ForCausalLM` of `transformers`, three gated delta nets and a layer of gated
attention, trained with its MTP module.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import GenerationConfig
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM

from .gated_mtp import GatedMtpModule
from .joint import Schedule, train_joint
from .target import MAX_POSITION, TokenStream
from .vocabulary import BOS_ID, EOS_ID, PAD_ID, VOCAB_SIZE, write_json, write_tensors

MTP_PREFIX = "mtp."


def hybrid_config() -> Qwen3_5TextConfig:
    """0.65 million parameters with the MTP module: 4 layers of width 96, of which the last attends."""
    return Qwen3_5TextConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=96,
        intermediate_size=128,
        num_hidden_layers=4,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        linear_conv_kernel_dim=4,
        max_position_embeddings=MAX_POSITION,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        tie_word_embeddings=True,
        pad_token_id=PAD_ID,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
    )


def make_hybrid(config: Qwen3_5TextConfig) -> nn.ModuleDict:
    """`target` and `mtp`, randomly initialised, with the parameter names of a checkpoint."""
    config._attn_implementation = "sdpa"  # causal without a mask; a lone module's default is not
    return nn.ModuleDict({"target": Qwen3_5ForCausalLM(config), "mtp": GatedMtpModule(config)})


def train_hybrid(
    stream: TokenStream, schedule: Schedule, state: Path, device: str = "cpu"
) -> tuple[nn.ModuleDict, int, float]:
    """Train from scratch, or continue from the file `state`. Returns the models, the number of steps and the CPU
    seconds.
    """
    torch.manual_seed(schedule.seed)
    models = make_hybrid(hybrid_config()).to(device)
    steps, seconds = train_joint(models, stream, schedule, state)
    return models, steps, seconds


def _stored(module: nn.Module, prefix: str = "") -> dict[str, Tensor]:
    """Tensors as stored, bf16. The output projection is the embedding."""
    tensors = {name: value for name, value in module.state_dict().items() if name != "lm_head.weight"}
    return {prefix + name: value.to("cpu", torch.bfloat16).contiguous() for name, value in tensors.items()}


def save_hybrid(models: nn.ModuleDict, directory: Path) -> None:
    """Save config, safetensors and generation defaults.

    The config also gets the names that other programs read (`torch_dtype`, `rope_theta`, `mtp_num_hidden_layers`).
    """
    directory.mkdir(parents=True, exist_ok=True)
    config = models["target"].config
    tensors = _stored(models["target"]) | _stored(models["mtp"], MTP_PREFIX)
    write_tensors(directory / "model.safetensors", tensors)
    defaults = GenerationConfig(bos_token_id=BOS_ID, eos_token_id=EOS_ID, pad_token_id=PAD_ID, do_sample=False)
    defaults.save_pretrained(directory)
    rope = config.rope_parameters
    written = json.loads(config.to_json_string()) | {
        "architectures": ["Qwen3_5ForCausalLM"],
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "mtp_num_hidden_layers": 1,
        "full_attention_interval": 4,
        "partial_rotary_factor": rope["partial_rotary_factor"],
        "rope_theta": rope["rope_theta"],
    }
    write_json(directory / "config.json", dict(sorted(written.items())))


def save_hybrid_mtp(mtp: GatedMtpModule, directory: Path) -> None:
    """Replace the MTP tensors in a saved target's file by those of `mtp`."""
    path = directory / "model.safetensors"
    write_tensors(path, load_file(path) | _stored(mtp, MTP_PREFIX))


def load_hybrid(directory: Path) -> Qwen3_5ForCausalLM:
    """The stored target as `transformers` loads it, computing in fp32."""
    return Qwen3_5ForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def load_hybrid_mtp(directory: Path) -> GatedMtpModule:
    config = Qwen3_5TextConfig.from_pretrained(directory)
    config._attn_implementation = "sdpa"
    mtp, tensors = GatedMtpModule(config), load_file(directory / "model.safetensors")
    mtp.load_state_dict({n.removeprefix(MTP_PREFIX): t for n, t in tensors.items() if n.startswith(MTP_PREFIX)})
    return mtp.float().eval()
