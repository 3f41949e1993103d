"""The DeepSeek-type demo target: a small `DeepseekV3ForCausalLM` of `transformers`, trained with its MTP module."""

import json
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, GenerationConfig, LlamaConfig

from .experts import Balance, separate_experts
from .mtp import MtpModule
from .target import MAX_POSITION, TokenStream, descend, make_optimizers, set_rate
from .vocabulary import BOS_ID, EOS_ID, PAD_ID, VOCAB_SIZE, write_json

MTP_WEIGHT = 0.3  # as DeepSeek-V3 for most of its training
BALANCE_RATE = 5e-3  # at the first step; it falls with the learning rate
DECAY_FROM = 0.5  # of the run
SAVE_SECONDS = 120


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
    return LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=512,
        num_hidden_layers=1,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=1e-5,
        pad_token_id=config.pad_token_id,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
    )


def make_models(config: DeepseekV3Config) -> nn.ModuleDict:
    """`target` and `mtp`, randomly initialised, with the parameter names of a checkpoint."""
    config._attn_implementation = "sdpa"  # causal without a mask; a lone module's default is not
    models = nn.ModuleDict({"target": DeepseekV3ForCausalLM(config), "mtp": MtpModule(config)})
    separate_experts(models, config)
    for name, parameter in models.named_parameters():
        if parameter.dim() == 2 and not name.startswith("target.model.embed_tokens"):
            nn.init.normal_(parameter, std=config.initializer_range)
    return models


def joint_loss(models: nn.ModuleDict, ids_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropies in nats per token: the target's of the next token, the MTP module's of the one after it."""
    target, mtp = models["target"], models["mtp"]
    hidden = target.model(input_ids=ids_BT, use_cache=False).last_hidden_state
    head = target.lm_head.weight
    next_logits = F.linear(hidden[:, :-1], head).float()
    later = mtp.whole(target.model.embed_tokens(ids_BT[:, 1:-1]), hidden[:, :-2])
    later_logits = mtp.logits(later, head).float()
    return (
        F.cross_entropy(next_logits.flatten(0, 1), ids_BT[:, 1:].flatten()),
        F.cross_entropy(later_logits.flatten(0, 1), ids_BT[:, 2:].flatten()),
    )


def stable_rate(done: float, step: int, warmup: int = 30) -> float:
    """Share of the peak rate: a linear warm-up over `warmup` steps, then constant, then from `DECAY_FROM` linearly down
    to 2 %.

    While it is constant, an interrupted run may continue with another length.
    """
    falling = 1 - 0.98 * max(0.0, done - DECAY_FROM) / (1 - DECAY_FROM)
    return min(1.0, (step + 1) / warmup) * falling


def train_deepseek(
    stream: TokenStream, steps: int, max_seconds: float, seed: int, state: Path, peak_rate: float = 3e-3
) -> tuple[nn.ModuleDict, int, float]:
    """Train from scratch, or continue from the file `state`, for `steps` steps of 2,048 tokens or `max_seconds`.

    Weights and optimizer state are fp32, matrix products bf16. Returns the models, the number of steps and the CPU
    seconds.
    """
    torch.manual_seed(seed)
    models = make_models(deepseek_config())
    optimizers = make_optimizers(models)
    first, spent = 0, 0.0
    if state.exists():
        stored = torch.load(state, weights_only=True)
        models.load_state_dict(stored["models"])
        for optimizer, values in zip(optimizers, stored["optimizers"], strict=True):
            optimizer.load_state_dict(values)
        first, spent = stored["step"], stored["seconds"]
        if stored["finished"]:
            return models.eval(), first, spent
    balance = Balance([models])
    began, cpu, saved = time.monotonic(), time.process_time(), time.monotonic()
    step = first
    while step < steps:
        elapsed = time.monotonic() - began
        # The clock decides how many of this process's steps fit.
        done = max(step / steps, (first / steps) + (1 - first / steps) * elapsed / max_seconds)
        if done >= 1:
            break
        share = stable_rate(done, step)
        set_rate(optimizers, peak_rate * share)
        rows, length = (2, 1024) if step % 8 == 7 else (8, 256)
        batch = stream.batch(np.random.default_rng((seed, step)), rows, length)
        with torch.autocast("cpu", torch.bfloat16):
            main, later = joint_loss(models, batch)
        descend(models, optimizers, main + MTP_WEIGHT * later)
        if step % 20 == 0:
            print(
                f"target step {step}/{steps} {done:.3f} loss {main.item():.3f}, mtp {later.item():.3f}, "
                f"busiest expert {balance.busiest():.2f}, {spent + time.process_time() - cpu:.0f} s of CPU, "
                f"{elapsed:.0f} s",
                flush=True,
            )
        balance.step(BALANCE_RATE * share)
        step += 1
        if time.monotonic() - saved > SAVE_SECONDS:
            _save_state(state, models, optimizers, step, spent + time.process_time() - cpu, finished=False)
            saved = time.monotonic()
    spent += time.process_time() - cpu
    _save_state(state, models, optimizers, step, spent, finished=True)
    return models.eval(), step, spent


def _save_state(
    path: Path,
    models: nn.ModuleDict,
    optimizers: list[torch.optim.Optimizer],
    step: int,
    seconds: float,
    finished: bool,
) -> None:
    values = {"models": models.state_dict(), "optimizers": [o.state_dict() for o in optimizers]}
    torch.save({**values, "step": step, "seconds": seconds, "finished": finished}, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


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
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "model.safetensors").chmod(0o644)
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
    tensors = load_file(path) | stored_tensors(mtp, mtp_prefix(config))
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)


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
