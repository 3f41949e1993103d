"""Prompts in token ids for servers whose checkpoint is not at hand: random ones, or those of a file."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import msgspec

from baton.errors import ConfigError

MAX_PROMPTS = 100_000
Tokenize = Callable[[str], Awaitable[list[int]]]


class _Line(msgspec.Struct, frozen=True):
    prompt: str | list[int]


def parse_token_range(text: str) -> range:
    """`100-30000` -> the ids from 100 to 29,999. Raises `ConfigError`."""
    first, _, last = text.partition("-")
    try:
        low, high = int(first), int(last)
    except ValueError:
        raise ConfigError("token_range", f"must be like 100-30000, got {text!r}") from None
    if not 0 <= low < high <= 2**31:
        raise ConfigError("token_range", f"must be rising and at least 0, got {text!r}")
    return range(low, high)


def random_prompts(lengths: Sequence[int], token_range: range, seed: int) -> list[list[int]]:
    """One prompt per length, the same for the same seed."""
    rng = random.Random(seed)
    return [[rng.randrange(token_range.start, token_range.stop) for _ in range(length)] for length in lengths]


async def read_prompts(path: str, tokenize: Tokenize) -> list[list[int]]:
    """Prompts of a file: lines of text, or of JSON, `{"prompt": text or token ids}`, in a file named `*.jsonl`.

    Empty lines are left out. Raises `ConfigError` naming the line, and what `tokenize` raises.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("prompts", f"{path}: {error}") from None
    prompts: list[list[int]] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        prompt = _parse(line, f"{path}, line {number}") if path.endswith(".jsonl") else line
        ids = await tokenize(prompt) if isinstance(prompt, str) else prompt
        if not ids or min(ids) < 0:
            raise ConfigError("prompts", f"{path}, line {number}: must hold at least one token, and no negative one")
        prompts.append(ids)
    if not 0 < len(prompts) <= MAX_PROMPTS:
        raise ConfigError("prompts", f"{path} must hold 1 to {MAX_PROMPTS} prompts, got {len(prompts)}")
    return prompts


def _parse(line: str, where: str) -> str | list[int]:
    try:
        return msgspec.json.decode(line, type=_Line).prompt
    except msgspec.DecodeError as error:
        raise ConfigError("prompts", f"{where}: {error}") from None
