"""Train a DFlash head for baton-demo-llama, which `tools.train_demo_models` makes.

    python -m tools.demo_training.train_dflash [--output models] [--work build/demo-dflash] [--device cuda]

The defaults take ten minutes on one core.
"""

import argparse
import json
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
from tools.demo_training.target import TokenStream, load_target
from tools.demo_training.text import training_text
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("models"), help="directory of the head")
    parser.add_argument("--target", type=Path, default=Path("models") / TARGET)
    parser.add_argument("--work", type=Path, default=Path("build/demo-dflash"), help="directory of notes on the run")
    parser.add_argument("--text", type=Path, help="file to keep the training text's tokens in, or to take them from")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--seconds", type=float, default=math.inf, help="end the training by the clock")
    parser.add_argument("--rows", type=int, default=16, help="windows of one step")
    parser.add_argument("--generated-batches", type=int, default=10, help="batches of the target's text")
    parser.add_argument("--generated-rows", type=int, default=96, help="rows of one such batch")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=("train", "measure"), help="train, or write the card of what was trained")
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
    gpu = args.device.startswith("cuda")
    run = {
        "steps": steps,
        "seconds": time.monotonic() - began,
        "rows": args.rows,
        "seed": args.seed,
        "generated": generated.numel(),
        "where": torch.cuda.get_device_name() if gpu else f"{args.threads} CPU thread(s)",
        "made": f"torch {torch.__version__}",
        "parameters": parameters(head),
    }
    (args.work / "run.json").write_text(json.dumps(run), encoding="utf-8")


def measure(args: argparse.Namespace, directory: Path) -> None:
    """Write the card."""
    run = json.loads((args.work / "run.json").read_text(encoding="utf-8"))
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
    args = arguments()
    torch.set_num_threads(args.threads)
    args.work.mkdir(parents=True, exist_ok=True)
    if args.only != "measure":
        train(args, args.output / NAME)
    if args.only != "train":
        measure(args, args.output / NAME)


if __name__ == "__main__":
    main()
