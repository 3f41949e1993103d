"""Joint training of a target and its MTP module, from scratch."""

import math
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .experts import Balance
from .target import TokenStream, descend, fast_products, make_optimizers, set_rate

MTP_WEIGHT = 0.3  # as DeepSeek-V3 for most of its training
BALANCE_RATE = 5e-3  # at the first step; it falls with the learning rate
DECAY_FROM = 0.5  # of the run
SAVE_SECONDS = 60


@dataclass(frozen=True, slots=True)
class Schedule:
    """`rows` windows of 256 tokens a step, every eighth step a quarter as many of 1,024. The run ends after `steps` or
    `max_seconds`, whichever comes first.
    """

    steps: int
    max_seconds: float = math.inf
    seed: int = 0
    rows: int = 8
    peak_rate: float = 3e-3


def joint_loss(models: nn.ModuleDict, ids_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropies in nats per token: the target's of the next token, the MTP module's of the one after it."""
    target, mtp = models["target"], models["mtp"]
    hidden = target.model(input_ids=ids_BT, use_cache=False).last_hidden_state
    head = target.lm_head.weight
    next_logits = F.linear(hidden[:, :-1], head).float()
    later = mtp.whole(target.model.embed_tokens(ids_BT[:, 1:-1]), hidden[:, :-2])
    later_logits = mtp.logits(later, head).float()
    return (
        F.cross_entropy(next_logits.flatten(0, 1), ids_BT[:, 1:].flatten()),
        F.cross_entropy(later_logits.flatten(0, 1), ids_BT[:, 2:].flatten()),
    )


def stable_rate(done: float, step: int, warmup: int = 30) -> float:
    """Share of the peak rate: a linear warm-up over `warmup` steps, then constant, then from `DECAY_FROM` linearly down
    to 2 %.

    While it is constant, an interrupted run may continue with another length.
    """
    falling = 1 - 0.98 * max(0.0, done - DECAY_FROM) / (1 - DECAY_FROM)
    return min(1.0, (step + 1) / warmup) * falling


def train_joint(
    models: nn.ModuleDict, stream: TokenStream, schedule: Schedule, state: Path, balance: Balance | None = None
) -> tuple[int, float]:
    """Train `target` and `mtp` in place, from their present weights or from those in the file `state`.

    Weights and optimizer state are fp32; products: `fast_products`. Returns the number of steps and the CPU seconds.
    """
    device = next(models.parameters()).device
    optimizers = make_optimizers(models)
    first, spent = 0, 0.0
    if state.exists():
        stored = torch.load(state, weights_only=True, map_location=device)
        models.load_state_dict(stored["models"])
        for optimizer, values in zip(optimizers, stored["optimizers"], strict=True):
            optimizer.load_state_dict(values)
        first, spent = stored["step"], stored["seconds"]
        if stored["finished"]:
            models.eval()
            return first, spent
    began, cpu, saved = time.monotonic(), time.process_time(), time.monotonic()
    step = first
    while step < schedule.steps:
        elapsed = time.monotonic() - began
        # The clock decides how many of this process's steps fit.
        share = first / schedule.steps
        done = max(step / schedule.steps, share + (1 - share) * elapsed / schedule.max_seconds)
        if done >= 1:
            break
        rate = stable_rate(done, step)
        set_rate(optimizers, schedule.peak_rate * rate)
        rows, length = (schedule.rows // 4, 1024) if step % 8 == 7 else (schedule.rows, 256)
        batch = stream.batch(np.random.default_rng((schedule.seed, step)), rows, length).to(device)
        with fast_products(device):
            main, later = joint_loss(models, batch)
        descend(models, optimizers, main + MTP_WEIGHT * later)
        if step % 20 == 0:
            busiest = "" if balance is None else f"busiest expert {balance.busiest():.2f}, "
            print(
                f"target step {step}/{schedule.steps} {done:.3f} loss {main.item():.3f}, mtp {later.item():.3f}, "
                f"{busiest}{spent + time.process_time() - cpu:.0f} s of CPU, {elapsed:.0f} s",
                flush=True,
            )
        if balance is not None:
            balance.step(BALANCE_RATE * rate)
        step += 1
        if time.monotonic() - saved > SAVE_SECONDS:
            _save_state(state, models, optimizers, step, spent + time.process_time() - cpu, finished=False)
            saved = time.monotonic()
    spent += time.process_time() - cpu
    _save_state(state, models, optimizers, step, spent, finished=True)
    models.eval()
    return step, spent


def _save_state(
    path: Path,
    models: nn.ModuleDict,
    optimizers: list[torch.optim.Optimizer],
    step: int,
    seconds: float,
    finished: bool,
) -> None:
    values = {"models": models.state_dict(), "optimizers": [o.state_dict() for o in optimizers]}
    torch.save({**values, "step": step, "seconds": seconds, "finished": finished}, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)
