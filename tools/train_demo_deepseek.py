"""Train the DeepSeek-type demo checkpoints: a target with latent attention and experts, its MTP module, and a head.

    python -m tools.train_demo_deepseek [--output models] [--work build/demo-deepseek]

Text and tokenizer are those of baton-demo-llama, which `tools.train_demo_models` makes. It takes half an hour on one
core. An interrupted run continues from the files in WORK.
"""

import argparse
import math
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer

from tools.demo_training.cards import Run, write_deepseek_card, write_head_card
from tools.demo_training.corpus import load_corpus
from tools.demo_training.deepseek import (
    eagle3_config,
    load_deepseek,
    load_mtp,
    save_deepseek,
    save_mtp,
    train_deepseek,
)
from tools.demo_training.distil import frequent_ids, generate_corpus, save_head, train_head
from tools.demo_training.heads import EAGLE3, Eagle3Head, start_from_target
from tools.demo_training.joint import Schedule
from tools.demo_training.measure import acceptance, agreement, held_out_prompts, load_head
from tools.demo_training.target import TokenStream, held_out_loss
from tools.demo_training.vocabulary import copy_tokenizer
from tools.train_demo_models import DRAFT_VOCAB, NEW_TOKENS, PROMPTS, parameters

NAME = "baton-demo-deepseek"
HEAD_ROWS = 8


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("models"), help="directory of all checkpoints")
    parser.add_argument("--work", type=Path, default=Path("build/demo-deepseek"), help="directory of unfinished work")
    parser.add_argument("--target-steps", type=int, default=600)
    parser.add_argument("--target-seconds", type=float, default=math.inf, help="end the target's training by the clock")
    parser.add_argument("--generated-batches", type=int, default=4, help="batches of 96 rows of the target's text")
    parser.add_argument("--mtp-steps", type=int, default=140)
    parser.add_argument("--eagle3-steps", type=int, default=443)
    parser.add_argument("--mtp-seconds", type=float, default=math.inf, help="end the module's own training likewise")
    parser.add_argument("--eagle3-seconds", type=float, default=math.inf, help="end the head's training likewise")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    args.work.mkdir(parents=True, exist_ok=True)
    directory, donor = args.output / NAME, args.output / "baton-demo-llama"
    corpus = load_corpus()
    tokenizer = Tokenizer.from_file(str(donor / "tokenizer.json"))
    stream = TokenStream(corpus.train, tokenizer, chat=True)
    held_out = TokenStream(corpus.held_out, tokenizer, chat=False)
    windows = held_out.windows(256)[::4]

    schedule = Schedule(args.target_steps, args.target_seconds, args.seed)
    models, steps, seconds = train_deepseek(stream, schedule, args.work / "target.pt")
    run = Run(steps, seconds, parameters(models), args.threads, args.seed)
    save_deepseek(models, directory)
    copy_tokenizer(donor, directory)

    # Module and head learn from the stored weights, beside which they will run.
    target = load_deepseek(directory)
    prompts = held_out_prompts(corpus.held_out, tokenizer, PROMPTS)
    text = args.work / "generated.pt"
    if not text.exists():
        torch.save(generate_corpus(target, stream, args.generated_batches, args.seed), text)
    generated = torch.load(text, weights_only=True)

    joint = acceptance(load_mtp(directory), target, prompts[::3], NEW_TOKENS)
    print(f"mtp, trained with the target alone: {joint}, {joint.rates}", flush=True)
    began = time.process_time()
    own_steps = train_head(
        models["mtp"],
        target,
        stream,
        generated,
        args.mtp_steps,
        args.seed,
        peak_rate=1e-3,
        max_seconds=args.mtp_seconds,
        rows=HEAD_ROWS,
    )
    own_run = Run(own_steps, time.process_time() - began, parameters(models["mtp"]), args.threads, args.seed)
    save_mtp(models["mtp"], directory)
    mtp = load_mtp(directory)
    measured = acceptance(mtp, target, prompts, NEW_TOKENS)
    on_text = agreement(mtp, target, windows)
    plain = TokenStream(corpus.train, tokenizer, chat=False)
    losses = held_out_loss(target, plain, every=8), held_out_loss(target, held_out)
    write_deepseek_card(directory, run, own_run, losses, joint, measured, on_text, len(prompts), NEW_TOKENS)
    print(f"losses {losses}; mtp {measured}, {measured.rates}; on held-out text {on_text}", flush=True)

    config, place = eagle3_config(target.config), args.output / f"{NAME}-eagle3"
    torch.manual_seed(args.seed)
    head = Eagle3Head(config, frequent_ids(generated, stream, config.vocab_size, DRAFT_VOCAB))
    start_from_target(head, target)
    began = time.process_time()
    steps = train_head(
        head,
        target,
        stream,
        generated,
        args.eagle3_steps,
        args.seed,
        max_seconds=args.eagle3_seconds,
        rows=HEAD_ROWS,
    )
    run = Run(steps, time.process_time() - began, parameters(head), args.threads, args.seed)
    save_head(head, config, place)
    stored = load_head(place, EAGLE3, config)
    measured = acceptance(stored, target, prompts, NEW_TOKENS)
    on_text = agreement(stored, target, windows)
    write_head_card(place, EAGLE3, run, measured, on_text, len(prompts), NEW_TOKENS, NAME)
    print(f"eagle3: {measured}, {measured.rates}; on held-out text {on_text}", flush=True)


if __name__ == "__main__":
    main()
