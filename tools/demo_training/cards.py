"""Model cards (README.md) of the demo checkpoints."""

import platform
from dataclasses import dataclass
from pathlib import Path

import torch

from .heads import EAGLE3
from .measure import Acceptance

REPRODUCE = """## Reproduce

```
make train
```

runs `tools/{script}.py`, which needs no download. The text and so the weights depend on the Python
release; the last bits depend on the CPU and the number of threads too.
"""
LLAMA_SCRIPT, DEEPSEEK_SCRIPT = "train_demo_models", "train_demo_deepseek"


@dataclass(frozen=True, slots=True)
class Run:
    """How one checkpoint was trained. `seconds` is wall time of a CPU that may have been shared, or CPU time."""

    steps: int
    seconds: float
    parameters: int
    threads: int
    seed: int

    def lines(self) -> str:
        return (
            f"| parameters | {self.parameters:,} |\n"
            f"| training | {self.steps:,} steps, {self.seconds:.0f} s, "
            f"{self.threads} CPU thread{'s' if self.threads > 1 else ''}, seed {self.seed} |\n"
            f"| made with | Python {platform.python_version()}, torch {torch.__version__.split('+')[0]} |\n"
        )


def write_target_card(directory: Path, run: Run, train_loss: float, held_out: float, tokens: int) -> None:
    """Write the target's card. Losses in nats per token."""
    (directory / "README.md").write_text(
        f"""---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
---
# baton-demo-llama

A very small `LlamaForCausalLM` to show and test Baton with: it loads, streams and speculates like a large
one, and knows only some of Python's manual. It is no assistant; do not rely on what it says.

| | |
|---|---|
| architecture | 4 layers, width 256, 8 query and 4 KV heads of 32, 2,048 tied embeddings, 4,096 positions |
{run.lines()}| text | `pydoc_data.topics` and docstrings of the library, {tokens:,} tokens with chats, 5 % held out |
| training loss | {train_loss:.3f} nats per token (plain training text, windows of 256) |
| held-out loss | {held_out:.3f} nats per token (plain held-out text, windows of 256) |
| stored as | bf16 |

Trained on windows of 256 and, every eighth step, 1,024 tokens: positions beyond 1,024 work but were never
seen. The text is CPython's documentation (PSF licence). The chat template has no system role of its own; a
system message is read like a user's.

{REPRODUCE.format(script=LLAMA_SCRIPT)}""",
        encoding="utf-8",
    )


def write_head_card(
    directory: Path,
    kind: str,
    run: Run,
    measured: Acceptance,
    on_text: tuple[float, ...],
    prompts: int,
    new_tokens: int,
    target: str = "baton-demo-llama",
) -> None:
    """Write a head's card. `on_text`: per draft step, agreement with the target's argmax on held-out text."""
    if kind == EAGLE3:
        what = (
            "An EAGLE-3 head (`LlamaForCausalLMEagle3`): hidden states entering layers 1, 2 and 3,\n"
            "a draft vocabulary of 1,024 tokens (`d2t`, `t2d`), trained with three unrolled draft steps."
        )
    else:
        what = (
            "An EAGLE-1 head (`EagleLlamaForCausalLM`): the feature is the target's final\n"
            "hidden state after its norm; embedding and output projection are the target's. Trained with\n"
            "three unrolled draft steps."
        )
    script = LLAMA_SCRIPT if target == "baton-demo-llama" else DEEPSEEK_SCRIPT
    (directory / "README.md").write_text(
        f"""---
license: apache-2.0
base_model: {target}
---
# {directory.name}

{what}

| | |
|---|---|
{run.lines()}| text | the target's own continuations of training prompts, and training text |
| stored as | bf16 |

{acceptance_table(measured, on_text, prompts, new_tokens)}
{REPRODUCE.format(script=script)}""",
        encoding="utf-8",
    )


def acceptance_table(measured: Acceptance, on_text: tuple[float, ...], prompts: int, new_tokens: int) -> str:
    """A head's acceptance, as text and table."""
    rows = "".join(
        f"| {i + 1} | {rate:.3f} | {text:.3f} |\n"
        for i, (rate, text) in enumerate(zip(measured.rates, on_text, strict=True))
    )
    return f"""Acceptance with 3 drafts, greedy, {prompts} held-out prompts, up to {new_tokens} new tokens each
({measured.rounds:,} rounds, {1 + sum(measured.rates):.2f} tokens per round). A position counts as accepted
only if all before it are. Beside it, how often the draft equals the target's argmax when both read held-out
text instead of the target's own.

| position | acceptance | agreement on held-out text |
|---|---|---|
{rows}"""


def write_deepseek_card(
    directory: Path,
    run: Run,
    own_run: Run,
    losses: tuple[float, float],
    joint: Acceptance,
    measured: Acceptance,
    on_text: tuple[float, ...],
    prompts: int,
    new_tokens: int,
) -> None:
    """Write the card of the DeepSeek-type target. `losses`: training and held-out text, in nats per token. `own_run`:
    the training of the MTP module alone; `joint`: the module's acceptance before that, on every third prompt.
    """
    before = ", ".join(f"{rate:.3f}" for rate in joint.rates)
    (directory / "README.md").write_text(
        f"""---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
---
# {directory.name}

A very small `DeepseekV3ForCausalLM` with a multi-token prediction (MTP) module, to show and test Baton with: latent
attention, experts behind a router with groups, one module that drafts. It knows only some of Python's manual and is
no assistant; do not rely on what it says.

| | |
|---|---|
| architecture | 4 layers of width 192, the first dense; 6 heads of 32 + 16 and 32, latents of 64 + 16 |
| experts | 8 of 128, two a token from 2 of 4 groups, and a shared one; sigmoid router with a trained choice bias |
{run.lines()}| module alone | {own_run.parameters:,} parameters, {own_run.steps:,} more steps, {own_run.seconds:.0f} s |
| text | that of baton-demo-llama, whose tokenizer it has |
| training loss | {losses[0]:.3f} nats per token (plain training text, every eighth window of 256) |
| held-out loss | {losses[1]:.3f} nats per token (plain held-out text, windows of 256) |
| stored as | bf16, the choice bias fp32 |

Target and module were trained together from scratch (the module's loss weighs 0.3), then the module alone, with three
unrolled draft steps, on the target's own continuations. Seconds are CPU time. Windows of 256 and, every eighth step,
1,024 tokens: positions beyond 1,024 work but were never seen.

The module is `model.layers.4`, without the copies of the target's embedding and output projection that published
checkpoints repeat there. It drafts all positions, each from its own last state.

{acceptance_table(measured, on_text, prompts, new_tokens)}
Before the module was trained alone, on a third of these prompts: {before}.

{REPRODUCE.format(script=DEEPSEEK_SCRIPT)}""",
        encoding="utf-8",
    )
