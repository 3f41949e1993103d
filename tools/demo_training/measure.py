"""Acceptance of a draft head on held-out prompts, by the simplest loop: no cache, one request at a time.

The loop shares only the layer with the unrolled training pass, so an error in that pass shows as low acceptance.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, PreTrainedModel

from .blocks import BlockHead, block_drafts
from .corpus import Document
from .heads import EAGLE3, Eagle3Head, EagleHead, Head, draft_ids, look, unroll
from .target import generate_rows
from .vocabulary import ASSISTANT_ID, BOS_ID, EOS_ID, USER_ID

MIN_PROMPT_TEXT = 150  # characters


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Counts over greedy decoding rounds. `accepted[i]`: rounds whose drafts 0..i were all accepted."""

    rounds: int
    accepted: tuple[int, ...]

    @property
    def rates(self) -> tuple[float, ...]:
        """Acceptance per draft position, over all rounds."""
        return tuple(count / max(1, self.rounds) for count in self.accepted)


def load_head(directory: Path, kind: str, config: LlamaConfig) -> Head:
    tensors = load_file(directory / "model.safetensors")
    head: Head
    if kind == EAGLE3:
        own = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        ids = torch.arange(len(tensors["d2t"])) + tensors["d2t"]
        head = Eagle3Head(config, ids, tuple(own["eagle_aux_hidden_state_layer_ids"]))
    else:
        head = EagleHead(config)
    head.load_state_dict(tensors)
    return head.eval()


def run_entries(head: Head, embeds: Tensor, hidden: Tensor) -> Tensor:
    """Residual streams [1, T, E] of entries under plain causal attention."""
    mixed, residual = head.mix(embeds, hidden)
    q, k, v = head.layer.self_attn.project(mixed, torch.arange(embeds.shape[1]))
    return head.layer.finish(residual, F.scaled_dot_product_attention(q, k, v, is_causal=True), mixed)


@torch.inference_mode()
def draft(
    head: Head | BlockHead, target: PreTrainedModel, ids: Sequence[int], features: Tensor, count: int
) -> list[int]:
    """Greedy drafts for the tokens after `ids`.

    Args:
        ids: all known tokens, at least two; the last one has no feature yet.
        features: [1, len(ids) - 1, F] of the positions before the last.
    """
    if isinstance(head, BlockHead):
        return block_drafts(head, target, ids, features, count)
    targets = draft_ids(head, target.config.vocab_size)
    embed = target.get_input_embeddings()
    embeds = embed(torch.tensor([list(ids[1:])]))
    hidden = head.combine(features)
    drafts: list[int] = []
    for _ in range(count):
        stream = run_entries(head, embeds, hidden)[:, -1:]
        drafts.append(int(targets[head.logits(stream, target.lm_head.weight).argmax()]))
        embeds = torch.cat([embeds, embed(torch.tensor([[drafts[-1]]]))], 1)
        hidden = torch.cat([hidden, stream], 1)
    return drafts


def greedy_texts(target: PreTrainedModel, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
    """Each prompt with its greedy continuation, up to EOS or `new_tokens`. Prompts of equal length are batched."""
    texts: dict[int, list[int]] = {}
    for length in sorted({len(prompt) for prompt in prompts}):
        chosen = [index for index, prompt in enumerate(prompts) if len(prompt) == length]
        starts = torch.tensor([list(prompts[index]) for index in chosen])
        rows = generate_rows(target, starts, new_tokens, torch.zeros(len(chosen)), seed=0)
        for index, ids in zip(chosen, rows.tolist(), strict=True):
            texts[index] = ids[: ids.index(EOS_ID, length) + 1] if EOS_ID in ids[length:] else ids
    return [texts[index] for index in range(len(prompts))]


@torch.inference_mode()
def acceptance(
    head: Head | BlockHead, target: PreTrainedModel, prompts: Sequence[Sequence[int]], new_tokens: int, count: int = 3
) -> Acceptance:
    """Speculate greedily over each prompt's greedy continuation, up to EOS or `new_tokens`."""
    rounds, accepted = 0, [0] * count
    for prompt, ids in zip(prompts, greedy_texts(target, prompts, new_tokens), strict=True):
        # Positions see only earlier tokens, so one forward gives the features of every round.
        features = look(target, torch.tensor([ids]), head.aux_layers).features
        known = len(prompt) + 1
        while known + count <= len(ids):
            drafts = draft(head, target, ids[:known], features[:, : known - 1], count)
            good = 0
            while good < count and drafts[good] == ids[known + good]:
                accepted[good] += 1
                good += 1
            rounds += 1
            known += good + 1
    return Acceptance(rounds, tuple(accepted))


def held_out_prompts(documents: Sequence[Document], tokenizer: Tokenizer, count: int) -> list[list[int]]:
    """`count` prompts, three of each of `count // 3` documents, evenly spread over the sufficiently long ones: its
    first 32 tokens, 32 from its middle, and a chat question.
    """
    long = [document for document in documents if len(document.text) >= MIN_PROMPT_TEXT]
    chosen = long[:: max(1, len(long) // (count // 3))][: count // 3]
    prompts = []
    for document in chosen:
        body = tokenizer.encode(document.text, add_special_tokens=False).ids
        middle = len(body) // 2
        turn = tokenizer.encode(document.questions[0], add_special_tokens=False).ids
        prompts += [
            [BOS_ID, *body[:32]],
            [BOS_ID, *body[middle : middle + 32]],
            [BOS_ID, USER_ID, *turn, ASSISTANT_ID],
        ]
    return prompts


@torch.inference_mode()
def agreement(head: Head, target: PreTrainedModel, windows: Tensor, count: int = 3) -> tuple[float, ...]:
    """Per draft step, how often its argmax equals the target's on given text, int64 [n, T]."""
    equal, seen = [0] * count, [0] * count
    targets = draft_ids(head, target.config.vocab_size)
    for rows in windows.split(8):
        view = look(target, rows, head.aux_layers)
        wanted = view.logits[:, 1:].argmax(-1)
        for step, hidden in enumerate(unroll(head, view.embeds[:, 1:], view.features[:, :-1], count)):
            drafts = targets[head.logits(hidden, target.lm_head.weight).argmax(-1)]
            equal[step] += int((drafts == wanted)[:, step:].sum())
            seen[step] += wanted[:, step:].numel()
    return tuple(e / s for e, s in zip(equal, seen, strict=True))
