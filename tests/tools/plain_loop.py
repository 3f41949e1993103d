"""Draft steps of a head one by one, to compare its unrolled training pass with."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tools.demo_training import measure
from tools.demo_training.heads import Head


def plain_loop(head: Head, embeds: Tensor, features: Tensor, steps: int) -> Iterator[Tensor]:
    """The last state [E] of each step. `features` [1, n, F]: of the known tokens; `embeds` [1, n + steps - 1, E]: of
    the tokens after them."""
    known = features.shape[1]
    hidden = head.combine(features)
    for step in range(steps):
        stream = measure.run_entries(head, embeds[:, : known + step], hidden)
        yield stream[0, -1]
        hidden = torch.cat([hidden, stream[:, -1:]], 1)
