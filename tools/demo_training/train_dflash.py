"""Train a DFlash head for baton-demo-llama, which `tools.train_demo_models` makes.

    python -m tools.demo_training.train_dflash [--output models] [--work build/demo-dflash] [--device cuda]

The defaults take ten minutes on one core.
"""

import argparse
import math
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer

from tools.demo_training.blocks import (
    BLOCK,
    BlockHead,
    block_agreement,
    block_config,
    block_loss,
    load_block_head,
    save_block_head,
)
from tools.demo_training.cards import REPRODUCE
from tools.demo_training.corpus import load_corpus
from tools.demo_training.distil import generate_corpus, saving, train_head
from tools.demo_training.measure import acceptance, held_out_prompts
from tools.demo_training.runs import note_run, noted_run, parser_of, run_parts, training_text
from tools.demo_training.target import TokenStream, load_target
from tools.train_demo_models import NEW_TOKENS, PROMPTS, parameters

NAME, TARGET = "baton-demo-dflash", "baton-demo-llama"

CARD = """---
license: apache-2.0
base_model: {target}
---
# {name}

A DFlash head (`DFlashDraftModel`): two layers that draft a block of up to {drafts} tokens in one forward. Its context
is the output of the target's layers {layers}; mask token {mask}, embedding and output projection are the target's.

| | |
|---|---|
| parameters | {parameters:,} |
| training | {steps:,} steps of {rows} rows, {seconds:.0f} s, {where}, seed {seed} |
| text | {generated:,} tokens of the target's own continuations of training prompts, and training text |
| made with | {made} |
| stored as | bf16 |

Trained on blocks of all lengths up to {block} at random places, half of them of that length.

Acceptance, greedy, {prompts} held-out prompts, up to {new_tokens} new tokens each, with 3 drafts ({three.rounds:,}
rounds, {tokens_three:.2f} tokens per round) and with {drafts} ({all.rounds:,} rounds, {tokens_all:.2f} tokens per
round). A position counts as accepted only if all before it are. Beside it, how often the draft equals the target's
argmax when both read held-out text instead of the target's own.

| position | acceptance with 3 | acceptance with {drafts} | agreement on held-out text |
|---|---|---|---|
{table}
{reproduce}"""


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, Path("build/demo-dflash"))
    parser.add_argument("--target", type=Path, default=Path("models") / TARGET)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--seconds", type=float, default=math.inf, help="end the training by the clock")
    parser.add_argument("--rows", type=int, default=16, help="windows of one step")
    parser.add_argument("--generated-batches", type=int, default=10, help="batches of the target's text")
    return parser.parse_args()


def train(args: argparse.Namespace, directory: Path) -> None:
    """Write the head, and in WORK/run.json how it was made."""
    stream = training_text(args.target / "tokenizer.json", args.text)
    target = load_target(args.target).to(args.device)
    generated = generate_corpus(target, stream, args.generated_batches, args.seed, args.generated_rows)
    torch.manual_seed(args.seed)
    head = BlockHead(block_config(target.config))
    head.norm.load_state_dict(target.model.norm.state_dict())
    head.to(args.device)
    began = time.monotonic()
    steps = train_head(
        head,
        target,
        stream,
        generated,
        args.steps,
        args.seed,
        peak_rate=3e-3,
        max_seconds=args.seconds,
        rows=args.rows,
        loss_of=saving(block_loss, lambda head: save_block_head(head, directory)),
    )
    save_block_head(head, directory)
    note_run(
        args,
        steps=steps,
        seconds=time.monotonic() - began,
        generated=generated.numel(),
        parameters=parameters(head),
    )


def measure(args: argparse.Namespace, directory: Path) -> None:
    """Write the card."""
    run = noted_run(args)
    target = load_target(args.target)
    head = load_block_head(directory, target.config)
    corpus, tokenizer = load_corpus(), Tokenizer.from_file(str(args.target / "tokenizer.json"))
    prompts = held_out_prompts(corpus.held_out, tokenizer, PROMPTS)
    three, whole = (acceptance(head, target, prompts, NEW_TOKENS, count) for count in (3, BLOCK - 1))
    windows = TokenStream(corpus.held_out, tokenizer, chat=False).windows(256)
    on_text = block_agreement(head, target, windows, BLOCK - 1)
    rows = [
        f"| {i + 1} | {f'{three.rates[i]:.3f}' if i < 3 else ''} | {whole.rates[i]:.3f} | {on_text[i]:.3f} |\n"
        for i in range(BLOCK - 1)
    ]
    print(f"dflash: {three}, {three.rates}; {whole}, {whole.rates}; on held-out text {on_text}", flush=True)
    card = CARD.format(
        **run,
        name=NAME,
        target=TARGET,
        drafts=BLOCK - 1,
        block=BLOCK,
        layers=" and ".join(str(layer - 1) for layer in head.aux_layers),
        mask="`<|pad|>`",
        prompts=len(prompts),
        new_tokens=NEW_TOKENS,
        three=three,
        all=whole,
        tokens_three=1 + sum(three.rates),
        tokens_all=1 + sum(whole.rates),
        table="".join(rows),
        reproduce=REPRODUCE.format(script="demo_training/train_dflash"),
    )
    (directory / "README.md").write_text(card, encoding="utf-8")


def main() -> None:
    run_parts(arguments(), NAME, train, measure)


if __name__ == "__main__":
    main()
