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

runs `tools/train_demo_models.py`, which needs no download. The text and so the weights depend on the Python
release; the last bits depend on the CPU and the number of threads too.
"""


@dataclass(frozen=True, slots=True)
class Run:
    """How one checkpoint was trained. `seconds` is wall time, of a CPU that may have been shared."""

    steps: int
    seconds: float
    parameters: int
    threads: int
    seed: int

    def lines(self) -> str:
        """Table rows about the run."""
        return (
            f"| parameters | {self.parameters:,} |\n"
            f"| training | {self.steps:,} steps, {self.seconds:.0f} s, "
            f"{self.threads} CPU threads, seed {self.seed} |\n"
            f"| made with | Python {platform.python_version()}, torch {torch.__version__.split('+')[0]} |\n"
        )


def write_target_card(directory: Path, run: Run, train_loss: float, held_out: float, tokens: int) -> None:
    """Card of the target. Losses in nats per token."""
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

{REPRODUCE}""",
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
) -> None:
    """Card of a head. `on_text`: per draft step, agreement with the target's argmax on held-out text."""
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
    rows = "".join(
        f"| {i + 1} | {rate:.3f} | {text:.3f} |\n"
        for i, (rate, text) in enumerate(zip(measured.rates, on_text, strict=True))
    )
    (directory / "README.md").write_text(
        f"""---
license: apache-2.0
base_model: baton-demo-llama
---
# {directory.name}

{what}

| | |
|---|---|
{run.lines()}| text | the target's own continuations of training prompts, and training text |
| stored as | bf16 |

Acceptance with 3 drafts, greedy, {prompts} held-out prompts, up to {new_tokens} new tokens each
({measured.rounds:,} rounds, {1 + sum(measured.rates):.2f} tokens per round). A position counts as accepted
only if all before it are. Beside it, how often the draft equals the target's argmax when both read held-out
text instead of the target's own.

| position | acceptance | agreement on held-out text |
|---|---|---|
{rows}
{REPRODUCE}""",
        encoding="utf-8",
    )
