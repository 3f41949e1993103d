"""Conversations that a chat model holds with itself, all rows in lockstep, so that no row is padded.

A row begins with the chat template's system turn. The model writes the user's turns as well as its own (Magpie, Xu et
al., 2024, arXiv:2406.08464) until the row is full.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaForCausalLM


class Lockstep:
    """A Llama that continues B rows of equal length by one token per step, with a preallocated KV cache [L, 2, B, KV,
    T, D].
    """

    def __init__(self, model: LlamaForCausalLM, rows: int, length: int) -> None:
        config = model.config
        self._model, self._config = model, config
        self._embed = model.get_input_embeddings()
        shape = (config.num_hidden_layers, 2, rows, config.num_key_value_heads, length, config.head_dim)
        self._kv = torch.empty(shape, dtype=model.dtype, device=model.device)
        half = config.head_dim // 2
        theta = float(config.rope_parameters["rope_theta"])
        frequencies = theta ** (-torch.arange(half, dtype=torch.float32, device=model.device) / half)
        angles = torch.arange(length, device=model.device)[:, None] * frequencies
        self._cos, self._sin = angles.cos(), angles.sin()

    def _rotate(self, x_BHD: Tensor, position: int) -> Tensor:
        left, right = x_BHD.float().chunk(2, -1)
        cos, sin = self._cos[position], self._sin[position]
        return torch.cat([left * cos - right * sin, right * cos + left * sin], -1).to(x_BHD.dtype)

    @torch.inference_mode()
    def step(self, ids_B: Tensor, position: int) -> Tensor:
        """Logits [B, V] after the tokens `ids_B` at `position`. Positions must come one by one, from 0."""
        config, rows = self._config, len(ids_B)
        heads, kv_heads, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        x = self._embed(ids_B)
        for layer, (k_BHTD, v_BHTD) in zip(self._model.model.layers, self._kv, strict=True):
            attention, normed = layer.self_attn, layer.input_layernorm(x)
            q = self._rotate(attention.q_proj(normed).view(rows, heads, size), position)
            k_BHTD[:, :, position] = self._rotate(attention.k_proj(normed).view(rows, kv_heads, size), position)
            v_BHTD[:, :, position] = attention.v_proj(normed).view(rows, kv_heads, size)
            known = slice(0, position + 1)
            scores = q.view(rows, kv_heads, -1, size) @ k_BHTD[:, :, known].transpose(-1, -2) * size**-0.5
            attended = scores.softmax(-1, dtype=torch.float32).to(x.dtype) @ v_BHTD[:, :, known]
            x = x + attention.o_proj(attended.reshape(rows, -1))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return F.linear(self._model.model.norm(x), self._model.lm_head.weight)


@dataclass(frozen=True, slots=True)
class Turns:
    """Token ids of the chat template's fixed parts, and the longest turns."""

    system: tuple[int, ...]  # from the row's start to the user's first word
    answer: tuple[int, ...]  # after the user's end: the assistant's start
    ask: tuple[int, ...]  # after the assistant's end: the user's start
    end: int
    max_question: int = 120
    max_answer: int = 200


@torch.inference_mode()
def converse(
    model: LlamaForCausalLM,
    turns: Turns,
    rows: int,
    length: int,
    temperature: float,
    seed: int,
    questions: Sequence[Sequence[int]] = (),
) -> tuple[Tensor, Tensor]:
    """Returns conversations int64 [rows, length], and which tokens the assistant wrote, bool [rows, length].

    The last rows begin with `questions`, whose token ids end with `turns.end`; all other questions are sampled at
    temperature 1. Half of the answers are greedy, the others sampled at `temperature`.
    """
    device = model.device
    generator = torch.Generator(device).manual_seed(seed)
    lockstep = Lockstep(model, rows, length)
    width = max(len(turns.answer), len(turns.ask))

    def fixed(ids: tuple[int, ...]) -> Tensor:
        return torch.tensor([*ids, *[turns.end] * (width - len(ids))], device=device)

    parts = torch.stack([fixed(turns.answer), fixed(turns.ask)])
    sizes = torch.tensor([len(turns.answer), len(turns.ask)], device=device)
    limits = torch.tensor([turns.max_question, turns.max_answer], device=device)
    greedy = torch.arange(rows, device=device) % 2 == 0
    speaker = torch.zeros(rows, dtype=torch.int64, device=device)  # 0 the user, 1 the assistant
    spoken, forced = torch.zeros_like(speaker), torch.zeros_like(speaker)  # `forced`: fixed tokens yet to come
    ids = torch.empty(rows, length, dtype=torch.int64, device=device)
    answered = torch.zeros(rows, length, dtype=torch.bool, device=device)
    given = torch.full((rows, max([1, *map(len, questions)])), -1)
    for row, question in enumerate(questions, rows - len(questions)):
        given[row, : len(question)] = torch.tensor(question)
    given = given.to(device)
    ids[:, : len(turns.system)] = torch.tensor(turns.system, device=device)
    for position in range(length - 1):
        logits = lockstep.step(ids[:, position], position)
        if position + 1 < len(turns.system):
            continue
        exact = (greedy & (speaker == 1))[:, None]
        scale = torch.where(speaker == 1, temperature, 1.0)[:, None]
        noise = -torch.empty(logits.shape, device=device).exponential_(generator=generator).log()
        token = torch.where(exact, logits.float(), logits.float() / scale + noise).argmax(-1)
        token = torch.where(spoken >= limits[speaker], turns.end, token)
        asked = position + 1 - len(turns.system)
        if asked < given.shape[1]:
            token = torch.where(given[:, asked] >= 0, given[:, asked], token)
        # The fixed part after an end belongs to the turn that it opens; `speaker` is already that turn's.
        at = (sizes[1 - speaker] - forced).clamp(0, width - 1)
        token = torch.where(forced > 0, parts[1 - speaker, at], token)
        ids[:, position + 1] = token
        answered[:, position + 1] = (forced == 0) & (speaker == 1)
        ended = (forced == 0) & (token == turns.end)
        spoken = torch.where((forced > 0) | ended, 0, spoken + 1)
        speaker = torch.where(ended, 1 - speaker, speaker)
        forced = torch.where(ended, sizes[1 - speaker], (forced - 1).clamp(min=0))
    return ids, answered
