"""Train the hybrid demo checkpoint: gated delta nets with a layer of attention, and an MTP module.

    python -m tools.demo_training.train_hybrid [--output models] [--work build/demo-hybrid] [--device cuda]

Text and tokenizer are those of baton-demo-llama, which `tools.train_demo_models` makes. The defaults take a quarter of
an hour on one core. An interrupted run continues from the files in WORK.
"""

import argparse
import math
import time
from pathlib import Path

from tokenizers import Tokenizer

from tools.demo_training.cards import REPRODUCE, acceptance_table
from tools.demo_training.corpus import load_corpus
from tools.demo_training.distil import generate_corpus, head_loss, saving, train_head
from tools.demo_training.hybrid import load_hybrid, load_hybrid_mtp, save_hybrid, save_hybrid_mtp, train_hybrid
from tools.demo_training.joint import Schedule
from tools.demo_training.measure import acceptance, agreement, held_out_prompts
from tools.demo_training.runs import note_run, noted_run, parser_of, run_parts, training_text
from tools.demo_training.target import TokenStream, held_out_loss
from tools.demo_training.vocabulary import copy_tokenizer
from tools.train_demo_models import NEW_TOKENS, PROMPTS, parameters

NAME, DONOR = "baton-demo-hybrid", "baton-demo-llama"

CARD = """---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
---
# {name}

A very small `Qwen3_5ForCausalLM` with a multi-token prediction (MTP) module, to show and test Baton with: three gated
delta nets, whose state is all that they keep of a prompt, and a layer of gated attention. It knows only some of
Python's manual and is no assistant; do not rely on what it says.

| | |
|---|---|
| architecture | 4 layers of width 96: three delta nets of 2 key and 4 value heads of 32, then attention |
| parameters | {parameters:,}, of which {own:,} are the module's; embedding and output projection are one |
| training | {steps:,} steps of {rows} rows, {seconds:.0f} s, {where}, seed {seed} |
| module alone | {mtp_steps:,} more steps, {mtp_seconds:.0f} s |
| text | that of baton-demo-llama, whose tokenizer it has (CPython's documentation, PSF licence) |
| made with | {made} |
| training loss | {losses[0]:.3f} nats per token (plain training text, every eighth window of 256) |
| held-out loss | {losses[1]:.3f} nats per token, perplexity {perplexity:.1f} (plain held-out text, windows of 256) |
| stored as | bf16 |

Target and module were trained together from scratch (the module's loss weighs 0.3), then the module alone, with three
unrolled draft steps, on {generated:,} tokens of the target's own continuations. Windows of 256 and, every eighth step,
1,024 tokens: positions beyond 1,024 work but were never seen. The module is stored under `mtp.`, as in published
checkpoints, and drafts all positions, each from its own last state.

{table}
{reproduce}"""


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, Path("build/demo-hybrid"))
    parser.add_argument("--donor", type=Path, default=Path("models") / DONOR, help="where the tokenizer is")
    parser.add_argument("--target-steps", type=int, default=900)
    parser.add_argument("--target-seconds", type=float, default=math.inf, help="end the target's training by the clock")
    parser.add_argument("--rows", type=int, default=8, help="windows of one step")
    parser.add_argument("--generated-batches", type=int, default=4, help="batches of the target's text")
    parser.add_argument("--mtp-steps", type=int, default=200)
    parser.add_argument("--mtp-seconds", type=float, default=math.inf, help="end the module's own training likewise")
    return parser.parse_args()


def train(args: argparse.Namespace, directory: Path) -> None:
    """Write the checkpoint, and in WORK/run.json how it was made."""
    stream = training_text(args.donor / "tokenizer.json", args.text)
    schedule = Schedule(args.target_steps, args.target_seconds, args.seed, args.rows)
    began = time.monotonic()
    models, steps, _ = train_hybrid(stream, schedule, args.work / "target.pt", args.device)
    seconds = time.monotonic() - began
    save_hybrid(models, directory)
    copy_tokenizer(args.donor, directory)

    # The module learns from the stored weights, beside which it will run.
    target = load_hybrid(directory).to(args.device)
    generated = generate_corpus(target, stream, args.generated_batches, args.seed, args.generated_rows)
    began = time.monotonic()
    mtp_steps = train_head(
        models["mtp"],
        target,
        stream,
        generated,
        args.mtp_steps,
        args.seed,
        peak_rate=1e-3,
        max_seconds=args.mtp_seconds,
        rows=args.rows,
        loss_of=saving(head_loss, lambda mtp: save_hybrid_mtp(mtp, directory)),
    )
    save_hybrid_mtp(models["mtp"], directory)
    note_run(
        args,
        steps=steps,
        seconds=seconds,
        mtp_steps=mtp_steps,
        mtp_seconds=time.monotonic() - began,
        generated=generated.numel(),
        parameters=parameters(models),
        own=parameters(models["mtp"]),
    )


def measure(args: argparse.Namespace, directory: Path) -> None:
    """Write the card."""
    run = noted_run(args)
    target, mtp = load_hybrid(directory), load_hybrid_mtp(directory)
    corpus, tokenizer = load_corpus(), Tokenizer.from_file(str(directory / "tokenizer.json"))
    held_out, plain = (TokenStream(part, tokenizer, chat=False) for part in (corpus.held_out, corpus.train))
    losses = held_out_loss(target, plain, every=8), held_out_loss(target, held_out)
    prompts = held_out_prompts(corpus.held_out, tokenizer, PROMPTS)
    measured = acceptance(mtp, target, prompts, NEW_TOKENS)
    on_text = agreement(mtp, target, held_out.windows(256)[::4])
    print(f"losses {losses}; mtp {measured}, {measured.rates}; on held-out text {on_text}", flush=True)
    card = CARD.format(
        **run,
        name=NAME,
        losses=losses,
        perplexity=math.exp(losses[1]),
        table=acceptance_table(measured, on_text, len(prompts), NEW_TOKENS),
        reproduce=REPRODUCE.format(script="demo_training/train_hybrid"),
    )
    (directory / "README.md").write_text(card, encoding="utf-8")


def main() -> None:
    run_parts(arguments(), NAME, train, measure)


if __name__ == "__main__":
    main()
