"""Train the demo checkpoints: a Llama target, an EAGLE-3 head and an EAGLE-1 head for it.

    python -m tools.train_demo_models [--output models] [--skip-target]

The text comes with Python, so nothing is downloaded. It takes about 25 minutes on two cores.
"""

import argparse
import time
from pathlib import Path

import torch
from torch import nn

from tools.demo_training.cards import Run, write_head_card, write_target_card
from tools.demo_training.corpus import load_corpus
from tools.demo_training.distil import frequent_ids, generate_corpus, save_head, train_head
from tools.demo_training.heads import EAGLE, EAGLE3, Eagle3Head, EagleHead, Head, start_from_target
from tools.demo_training.measure import acceptance, agreement, held_out_prompts, load_head
from tools.demo_training.target import (
    MAX_POSITION,
    TokenStream,
    held_out_loss,
    load_target,
    save_target,
    train_target,
)
from tools.demo_training.vocabulary import save_tokenizer, train_tokenizer

DRAFT_VOCAB = 1024
PROMPTS, NEW_TOKENS = 60, 96


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("models"), help="directory of the three checkpoints")
    parser.add_argument("--target-steps", type=int, default=900)
    parser.add_argument("--head-steps", type=int, default=800)
    parser.add_argument("--generated-batches", type=int, default=10, help="batches of 96 rows of the target's text")
    parser.add_argument("--heads", nargs="*", choices=(EAGLE3, EAGLE), default=(EAGLE3, EAGLE))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--skip-target", action="store_true", help="keep the target that is there, train the heads")
    return parser.parse_args()


def parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    corpus = load_corpus()
    tokenizer = train_tokenizer(document.text for document in corpus.train)
    stream = TokenStream(corpus.train, tokenizer, chat=True)
    held_out = TokenStream(corpus.held_out, tokenizer, chat=False)
    directory = args.output / "baton-demo-llama"

    if not args.skip_target:
        began = time.monotonic()
        model = train_target(stream, args.target_steps, args.seed)
        run = Run(args.target_steps, time.monotonic() - began, parameters(model), args.threads, args.seed)
        save_target(model, directory)
        save_tokenizer(tokenizer, directory, MAX_POSITION)
        stored = load_target(directory)
        plain = TokenStream(corpus.train, tokenizer, chat=False)
        losses = held_out_loss(stored, plain), held_out_loss(stored, held_out)
        write_target_card(directory, run, *losses, tokens=len(stream.ids))
        print(f"target: training loss {losses[0]:.3f}, held-out loss {losses[1]:.3f}", flush=True)

    # The heads learn from the stored weights, beside which they will run.
    target = load_target(directory)
    generated = generate_corpus(target, stream, args.generated_batches, args.seed)
    prompts = held_out_prompts(corpus.held_out, tokenizer, PROMPTS)
    for kind in args.heads:
        torch.manual_seed(args.seed)
        head: Head
        if kind == EAGLE3:
            head = Eagle3Head(target.config, frequent_ids(generated, stream, target.config.vocab_size, DRAFT_VOCAB))
        else:
            head = EagleHead(target.config)
        start_from_target(head, target)
        began = time.monotonic()
        train_head(head, target, stream, generated, args.head_steps, args.seed)
        run = Run(args.head_steps, time.monotonic() - began, parameters(head), args.threads, args.seed)
        place = args.output / f"baton-demo-{kind}"
        save_head(head, target.config, place)
        stored_head = load_head(place, kind, target.config)
        measured = acceptance(stored_head, target, prompts, NEW_TOKENS)
        on_text = agreement(stored_head, target, held_out.windows(256))
        write_head_card(place, kind, run, measured, on_text, len(prompts), NEW_TOKENS)
        print(f"{kind}: acceptance {measured}, {measured.rates}; on held-out text {on_text}", flush=True)


if __name__ == "__main__":
    main()
