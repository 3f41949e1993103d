"""Distillation of a draft head from the frozen target, and its files."""

import math
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, PreTrainedModel

from .heads import EAGLE, EAGLE3, Head, draft_ids, look, unroll
from .target import TokenStream, cosine_rate, descend, generate_rows, make_optimizers, set_rate
from .vocabulary import write_json

DRAFT_STEPS = 3
STEP_DECAY = 0.8  # a later draft counts only where the earlier ones were accepted
HARD_WEIGHT = 0.5  # share of the target's argmax in the loss, the rest is its distribution
FEATURE_WEIGHT = 0.2  # EAGLE-1 only: its output is meant to be the target's next feature
GENERATED_LENGTH = 256


def generate_corpus(target: PreTrainedModel, stream: TokenStream, batches: int, seed: int) -> Tensor:
    """Text of the target's own, which is what a head has to predict: int64 [96 * batches, 256].

    Prompts are the first 8 to 64 tokens of training documents and chats; half of the rows are greedy, the
    others sampled at temperature 0.8 or 1.
    """
    rng = np.random.default_rng(seed)
    # A start needs a whole row behind it; nearly all have one.
    starts = stream.starts[stream.starts < len(stream.ids) - GENERATED_LENGTH]
    temperatures = torch.tensor([0.0, 0.8, 0.0, 1.0]).repeat(24)
    rows = []
    began = time.monotonic()
    for batch in range(batches):
        length = (8, 16, 32, 64)[batch % 4]
        chosen = starts[rng.integers(0, len(starts), 96)]
        prompts = torch.from_numpy(stream.ids[chosen[:, None] + np.arange(length)])
        rows.append(generate_rows(target, prompts, GENERATED_LENGTH - length, temperatures, seed + batch))
        print(f"generated {batch + 1}/{batches} {time.monotonic() - began:.0f} s", flush=True)
    return torch.cat(rows)


def frequent_ids(generated: Tensor, stream: TokenStream, vocab_size: int, size: int) -> Tensor:
    """The `size` most frequent token ids of generated and training text, sorted, int64."""
    counts = np.bincount(generated.flatten().numpy(), minlength=vocab_size) + np.bincount(
        stream.ids, minlength=vocab_size
    )
    return torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:size]).astype(np.int64))


def head_loss(head: Head, target: PreTrainedModel, ids_BT: Tensor, unrolled: int = DRAFT_STEPS) -> Tensor:
    """Loss of all unrolled steps against the target's next-token distributions: a scalar, nats per token."""
    view = look(target, ids_BT, head.aux_layers)
    next_embeds, features = view.embeds[:, 1:], view.features[:, :-1]
    ids = draft_ids(head, target.config.vocab_size)
    inverse = torch.full((target.config.vocab_size,), -1, device=ids.device)
    inverse[ids] = torch.arange(len(ids), device=ids.device)
    # Row p of a head is compared with row p + 1 of the target: both speak of token p + 2.
    wanted = view.logits[:, 1:]
    hard = inverse[wanted.argmax(-1)]
    soft = wanted.softmax(-1)[..., ids]
    total = torch.zeros((), device=ids.device)
    for step, hidden in enumerate(unroll(head, next_embeds, features, unrolled)):
        logp = head.logits(hidden, target.lm_head.weight)[:, step:].float().log_softmax(-1)
        distilled = -(soft[:, step:] * logp).sum(-1).mean()
        # An argmax outside the draft vocabulary cannot be learnt.
        exact = F.nll_loss(logp.flatten(0, 1), hard[:, step:].flatten(), ignore_index=-1)
        loss = HARD_WEIGHT * exact + (1 - HARD_WEIGHT) * distilled
        if head.kind == EAGLE:
            loss = loss + FEATURE_WEIGHT * F.smooth_l1_loss(hidden[:, step:].float(), view.features[:, 1:][:, step:])
        total = total + STEP_DECAY**step * loss
    return total


def train_head(
    head: Head,
    target: PreTrainedModel,
    stream: TokenStream,
    generated: Tensor,
    steps: int,
    seed: int,
    peak_rate: float = 2e-3,
    max_seconds: float = math.inf,
    rows: int = 16,
) -> int:
    """Train in place for `steps` steps of `rows` rows, a quarter of them of the corpus, the rest of the target's text.

    `max_seconds` ends the run by the clock. Every twelfth step takes corpus rows of 1,024 tokens instead, so that the
    head knows long contexts. Returns how many steps it made.
    """
    rng = np.random.default_rng(seed)
    target.requires_grad_(False)
    optimizers = make_optimizers(head)
    began = time.monotonic()
    for step in range(steps):
        done = max(step, int(steps * (time.monotonic() - began) / max_seconds))
        if done >= steps:
            break
        set_rate(optimizers, cosine_rate(done, steps, peak_rate, warmup=min(30, steps)))
        if step % 12 == 11:
            batch = stream.batch(rng, max(1, rows * 3 // 16), 1024)
        else:
            own = generated[torch.from_numpy(rng.integers(0, len(generated), rows - rows // 4))]
            batch = torch.cat([own, stream.batch(rng, rows // 4, GENERATED_LENGTH)])
        with torch.autocast("cpu", torch.bfloat16):
            loss = head_loss(head, target, batch)
        descend(head, optimizers, loss)
        if step % 50 == 0 or step == steps - 1:
            print(
                f"{head.kind} step {step}/{steps} loss {loss.item():.3f} {time.monotonic() - began:.0f} s",
                flush=True,
            )
    head.eval()
    return step + 1 if done < steps else step


def head_config(head: Head, config: LlamaConfig) -> dict[str, object]:
    """config.json of a head for a target with `config`."""
    common: dict[str, object] = {
        "architectures": ["LlamaForCausalLMEagle3" if head.kind == EAGLE3 else "EagleLlamaForCausalLM"],
        "attention_bias": False,
        "bos_token_id": config.bos_token_id,
        "dtype": "bfloat16",
        "eos_token_id": config.eos_token_id,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_position_embeddings,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": config.num_attention_heads,
        "num_hidden_layers": 1,
        "num_key_value_heads": config.num_key_value_heads,
        "pad_token_id": config.pad_token_id,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": float(config.rope_parameters["rope_theta"]),
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": config.vocab_size,
    }
    if head.kind == EAGLE3:
        common |= {
            "draft_vocab_size": len(draft_ids(head, config.vocab_size)),
            "eagle_aux_hidden_state_layer_ids": list(head.aux_layers),
            "norm_before_residual": False,
        }
    return dict(sorted(common.items()))


def save_head(head: Head, config: LlamaConfig, directory: Path) -> None:
    """Write config.json and model.safetensors: floats in bf16, `d2t` int64, `t2d` bool."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: (value.to(torch.bfloat16) if value.is_floating_point() else value).contiguous()
        for name, value in head.state_dict().items()
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "model.safetensors").chmod(0o644)
    write_json(directory / "config.json", head_config(head, config))
