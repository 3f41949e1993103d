"""Random prompts, or texts, token ids and chats from files."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from baton.errors import ConfigError

MAX_PROMPTS = 100_000
# With or without special tokens.
Encode = Callable[[str, bool], Awaitable[list[int]]]
T = TypeVar("T")


class Chat(msgspec.Struct, frozen=True):
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class _Line(msgspec.Struct, frozen=True):
    prompt: str | list[int]


def parse_token_range(text: str) -> range:
    """`100-30000` is the ids 100 to 29,999. Raises `ConfigError`."""
    first, _, last = text.partition("-")
    try:
        low, high = int(first), int(last)
    except ValueError:
        raise ConfigError("token_range", f"must be like 100-30000, got {text!r}") from None
    if not 0 <= low < high <= 2**31:
        raise ConfigError("token_range", f"must be rising and at least 0, got {text!r}")
    return range(low, high)


def random_prompts(lengths: Sequence[int], token_range: range, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(token_range.start, token_range.stop) for _ in range(length)] for length in lengths]


async def read_prompts(path: str, encode: Encode, add_special_tokens: bool) -> list[list[int]]:
    """Lines of text, or in a `*.jsonl` file `{"prompt": text or token ids}`. Raises `ConfigError` with the line, and
    the errors of `encode`."""
    prompts: list[list[int]] = []
    for where, line in _lines("prompts", path):
        prompt = _parse("prompts", line, where, _Line).prompt if path.endswith(".jsonl") else line
        ids = await encode(prompt, add_special_tokens) if isinstance(prompt, str) else prompt
        if not ids or min(ids) < 0:
            raise ConfigError("prompts", f"{where}: must hold at least one token, and no negative one")
        prompts.append(ids)
    return prompts


def read_chats(path: str) -> list[Chat]:
    """Each line is a `Chat`, or a list of messages. Other fields and empty lines are ignored. Raises `ConfigError` with
    the line."""
    chats = []
    for where, line in _lines("chat", path):
        found = _parse("chat", line, where, Chat | list[dict[str, Any]])
        chat = found if isinstance(found, Chat) else Chat(found)
        if not chat.messages:
            raise ConfigError("chat", f"{where}: must hold at least one message")
        chats.append(chat)
    return chats


async def ask_bos(encode: Encode) -> int | None:
    """The BOS token that the tokenizer adds, or None. Raises the errors of `encode`."""
    first, plain = (await encode("a", True))[:1], (await encode("a", False))[:1]
    return first[0] if first and first != plain else None


def num_doubled(prompts: Sequence[Sequence[int]], bos: int | None) -> int:
    return 0 if bos is None else sum(list(ids[:2]) == [bos, bos] for ids in prompts)


def _lines(field: str, path: str) -> Iterator[tuple[str, str]]:
    try:
        # `splitlines` would also split at U+2028, which JSON strings may contain.
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(field, f"{path} cannot be read: {why}") from None
    numbered = [(f"{path}, line {n}", line.removesuffix("\r")) for n, line in enumerate(lines, 1) if line.strip()]
    if not 0 < len(numbered) <= MAX_PROMPTS:
        raise ConfigError(field, f"{path} must hold 1 to {MAX_PROMPTS} prompts, got {len(numbered)}")
    yield from numbered


def _parse(field: str, line: str, where: str, kind: type[T] | Any) -> T | Any:
    try:
        return msgspec.json.decode(line, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(field, f"{where}: {error}") from None
