"""The demo target: a small `LlamaForCausalLM`, trained with the implementation of `transformers`."""

import json
import math
import time
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from .corpus import Document
from .vocabulary import ASSISTANT_ID, BOS_ID, EOS_ID, PAD_ID, USER_ID, write_json

MAX_POSITION = 4096
CHAT_ANSWER_TOKENS = 192


def target_config() -> LlamaConfig:
    """3.5 million parameters: 4 layers of width 256, 8 query and 4 KV heads of 32, tied embeddings."""
    return LlamaConfig(
        vocab_size=2048,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=MAX_POSITION,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        pad_token_id=PAD_ID,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
    )


class TokenStream:
    """Documents as one token array, each as plain text and some also as a chat.

    A sample starts either anywhere or, for half of the rows, at a document's BOS: prompts start with one.
    """

    def __init__(self, documents: tuple[Document, ...], tokenizer: Tokenizer, chat: bool) -> None:
        ids: list[int] = []
        starts: list[int] = []
        for index, document in enumerate(documents):
            body = tokenizer.encode(document.text, add_special_tokens=False).ids
            starts.append(len(ids))
            ids += [BOS_ID, *body, EOS_ID]
            if chat:
                question = document.questions[index % len(document.questions)]
                turn = tokenizer.encode(question, add_special_tokens=False).ids
                starts.append(len(ids))
                ids += [BOS_ID, USER_ID, *turn, ASSISTANT_ID, *body[:CHAT_ANSWER_TOKENS]]
                # A truncated answer gets no EOS: the model should not learn to stop in the middle of a sentence.
                ids += [EOS_ID] if len(body) <= CHAT_ANSWER_TOKENS else []
        self.ids = np.asarray(ids, dtype=np.int64)
        self.starts = np.asarray(starts, dtype=np.int64)

    @classmethod
    def of(cls, ids: np.ndarray, starts: np.ndarray) -> "TokenStream":
        """A stream of tokens that were encoded before."""
        stream = cls.__new__(cls)
        stream.ids, stream.starts = ids.astype(np.int64), starts.astype(np.int64)
        return stream

    def batch(self, rng: np.random.Generator, rows: int, length: int) -> Tensor:
        """Sample `rows` windows of `length` tokens, int64 [rows, length]."""
        last = len(self.ids) - length
        anywhere = rng.integers(0, last, rows)
        at_start = self.starts[rng.integers(0, len(self.starts), rows)].clip(max=last)
        offsets = np.where(np.arange(rows) % 2 == 0, anywhere, at_start)
        return torch.from_numpy(self.ids[offsets[:, None] + np.arange(length)])

    def windows(self, length: int) -> Tensor:
        """The stream cut into consecutive windows, int64 [n, length]; the remainder is dropped."""
        count = len(self.ids) // length
        return torch.from_numpy(self.ids[: count * length].reshape(count, length))


def cosine_rate(step: int, steps: int, peak: float, warmup: int) -> float:
    """Learning rate of `step`: linear warm-up, then a cosine down to 2 % of `peak`."""
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))


def make_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Muon for the matrices between the layers; AdamW for embeddings, output projections, norms and expert routers.

    On this little text Muon reaches a loss in about half of the steps that AdamW alone takes.
    """
    named = ("embed", "lm_head", "mlp.gate.")
    outer = {id(p) for n, p in model.named_parameters() if p.dim() != 2 or any(part in n for part in named)}
    matrices = [p for p in model.parameters() if id(p) not in outer]
    others = [p for p in model.parameters() if id(p) in outer]
    return [
        torch.optim.Muon(matrices, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.01),
    ]


def set_rate(optimizers: list[torch.optim.Optimizer], rate: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate


def fast_products(device: torch.device) -> torch.autocast:
    """bf16, or fp32 on a CPU without fast products of bf16."""
    is_fast = device.type != "cpu" or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.autocast(device.type, torch.bfloat16, enabled=is_fast)


def descend(model: nn.Module, optimizers: list[torch.optim.Optimizer], loss: Tensor) -> None:
    """One optimizer step along the clipped gradient of `loss`."""
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()


def train_target(stream: TokenStream, steps: int, seed: int, peak_rate: float = 3e-3) -> LlamaForCausalLM:
    """Train from scratch for `steps` steps of 4,096 tokens: 16 rows of 256, every eighth step 4 of 1,024.

    Weights and optimizer state are fp32; products: `fast_products`.
    """
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    model = LlamaForCausalLM(target_config())
    optimizers = make_optimizers(model)
    began = time.monotonic()
    for step in range(steps):
        set_rate(optimizers, cosine_rate(step, steps, peak_rate, warmup=min(30, steps)))
        rows, length = (4, 1024) if step % 8 == 7 else (16, 256)
        batch = stream.batch(rng, rows, length)
        with fast_products(model.device):
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        descend(model, optimizers, loss)
        if step % 50 == 0 or step == steps - 1:
            print(
                f"target step {step}/{steps} loss {loss.item():.3f} {time.monotonic() - began:.0f} s",
                flush=True,
            )
    return model.eval()


@torch.inference_mode()
def held_out_loss(model: PreTrainedModel, stream: TokenStream, length: int = 256, every: int = 1) -> float:
    """Mean cross-entropy in nats per token over each `every`-th of the stream's windows."""
    windows = stream.windows(length)[::every]
    losses = [model(input_ids=rows, labels=rows, use_cache=False).loss.item() for rows in windows.split(16)]
    return float(np.mean(losses))


def save_target(model: LlamaForCausalLM, directory: Path) -> None:
    """Save config, bf16 safetensors and generation defaults.

    The config also gets the names that `transformers` before version 5 reads (`torch_dtype`, `rope_theta`).
    """
    stored = LlamaForCausalLM(model.config).to(torch.bfloat16)
    stored.load_state_dict(model.state_dict())
    stored.generation_config = GenerationConfig(
        bos_token_id=BOS_ID, eos_token_id=EOS_ID, pad_token_id=PAD_ID, do_sample=False
    )
    stored.save_pretrained(directory)
    (directory / "model.safetensors").chmod(0o644)
    path = directory / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config |= {"torch_dtype": config["dtype"], "rope_theta": config["rope_parameters"]["rope_theta"]}
    write_json(path, dict(sorted(config.items())))


def load_target(directory: Path) -> LlamaForCausalLM:
    """The stored (bf16-rounded) weights, computing in fp32."""
    return LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


@torch.inference_mode()
def generate_rows(model: PreTrainedModel, prompts: Tensor, new_tokens: int, temperatures: Tensor, seed: int) -> Tensor:
    """Continue equally long prompts.

    Args:
        prompts: int64 [B, P].
        new_tokens: number of tokens for each row; rows go on past EOS.
        temperatures: float [B]; 0 takes the argmax.
        seed: of the sampling noise.

    Returns:
        int64 [B, P + new_tokens].
    """
    generator = torch.Generator(prompts.device).manual_seed(seed)
    greedy = temperatures == 0
    scale = torch.where(greedy, torch.ones_like(temperatures), temperatures)[:, None]
    rows, step_input, cache = prompts, prompts, None
    for _ in range(new_tokens):
        out = model(input_ids=step_input, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache, logits = out.past_key_values, out.logits[:, -1]
        noise = -torch.empty_like(logits).exponential_(generator=generator).log()
        step_input = torch.where(greedy[:, None], logits, logits / scale + noise).argmax(-1, keepdim=True)
        rows = torch.cat([rows, step_input], 1)
    return rows
