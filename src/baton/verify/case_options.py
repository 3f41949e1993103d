"""The options of `baton verify`."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass

from baton.errors import ConfigError, RequestError
from baton.openai.tokens import chat_tokens
from baton.sampling_params import SamplingParams
from baton.text import Tokenizer
from baton.verify.acceptance_check import AcceptanceCheck, check_acceptance
from baton.verify.compare import of_answers
from baton.verify.observe import Case, make_cases
from baton.verify.prompts import Chat, Encode, ask_bos, parse_token_range, random_prompts, read_chats, read_prompts
from baton.verify.sides import Answers, ServerSide

MODES = ("push", "pull", "single-nospec", "single")
DEFAULT_MODES = MODES[:3]
DEFAULT_LENGTHS = "1-96"
DEFAULT_NEAR_TIE = 1e-4
DEFAULT_LOGPROB_TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True)
class Bounds:
    """Tolerances. `near_tie` and `logprob_tolerance` (None: not compared) are in nats, `acceptance` in accepted drafts
    per verification. `acceptance_required`: counters must be available. `servers`: verify did not start both sides."""

    near_tie: float
    logprob_tolerance: float | None
    acceptance: float
    acceptance_required: bool
    servers: bool

    @classmethod
    def parse(
        cls,
        near_tie: float | None,
        logprob_tolerance: float | None,
        acceptance_tolerance: float,
        acceptance_required: bool,
        servers: bool,
        temperature: float,
    ) -> Bounds:
        """None: the default, strict unless a side is a server.

        Raises `ConfigError`.
        """
        given_near_tie = near_tie is not None
        if near_tie is None:
            near_tie = DEFAULT_NEAR_TIE if servers else 0.0
        if logprob_tolerance is None and not servers:
            logprob_tolerance = DEFAULT_LOGPROB_TOLERANCE
        given = {
            "near_tie": near_tie,
            "logprob_tolerance": logprob_tolerance,
            "acceptance_tolerance": acceptance_tolerance,
        }
        for name, value in given.items():
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ConfigError(name, f"must be at least 0, got {value}")
        if temperature > 0:
            if near_tie and given_near_tie:
                raise ConfigError("near_tie", f"is for greedy requests, and temperature is {temperature}")
            near_tie = 0.0  # logprobs do not include the noise of sampling
        return cls(near_tie, logprob_tolerance, acceptance_tolerance, acceptance_required, servers)

    def check(self, want: Answers, have: Answers) -> AcceptanceCheck:
        """Compare counters, or else the answers."""
        reference, candidate = of_answers(want.observed), of_answers(have.observed)
        check = check_acceptance(want.counters, have.counters, self.acceptance, self.acceptance_required)
        if check.compared or self.acceptance_required:
            return check
        if reference is not None and candidate is not None:
            return check_acceptance(reference, candidate, self.acceptance, required=False)
        if self.servers:
            return check
        # An engine of verify's own that reports no verifications does not draft. Other modes are compared with the
        # reference's counters.
        return AcceptanceCheck(reference if isinstance(want.counters, str) else want.counters, candidate)


def parse_lengths(text: str) -> list[int]:
    """`1-4,9` is [1, 2, 3, 4, 9]. Raises `ConfigError`."""
    lengths: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        try:
            low, high = int(first), int(last or first)
        except ValueError:
            raise ConfigError("lengths", f"must be like 1-96 or 1,5,9, got {text!r}") from None
        if not 1 <= low <= high <= 1_000_000:
            raise ConfigError("lengths", f"must be rising and positive, got {text!r}")
        lengths += range(low, high + 1)
    return lengths


def parse_modes(text: str | None, served: bool = False) -> list[str]:
    """Names of `MODES`. A `served` candidate has one own mode, or the given kv_modes. Raises `ConfigError`."""
    if text is None:
        return ["candidate"] if served else list(DEFAULT_MODES)
    known = MODES[:2] if served else MODES
    modes = text.split(",")
    for mode in modes:
        if mode not in known:
            raise ConfigError("modes", f"must be of {', '.join(known)}, got {mode!r}")
    if len(set(modes)) < len(modes):
        raise ConfigError("modes", f"has one mode twice: {text!r}")
    return modes


def choose_cases(
    model: str | None,
    server: ServerSide | None,
    lengths: str | None,
    prompts: str | None,
    chat: str | None,
    add_special_tokens: bool,
    token_range: str,
    params: SamplingParams,
) -> list[Case]:
    """Cases from a file of prompts or chats, text for the model's tokenizer, or random tokens.

    Raises `ConfigError`, `CheckpointError`.
    """
    _check_exclusive(lengths=lengths, prompts=prompts, chat=chat)
    if prompts is None and not add_special_tokens:
        raise ConfigError("add_special_tokens", "is for the texts of --prompts")
    ids_of = parse_token_range(token_range)
    if chat is not None:
        chats = read_chats(chat)
        tokenizer = None if model is None else Tokenizer.load(model)
        return [Case(_written(f"{chat}: chat {n}", c, tokenizer), params, c) for n, c in enumerate(chats, 1)]
    if prompts is not None:
        if model is None:
            assert server is not None
            return _cases(server.read_prompts(prompts, add_special_tokens), params)
        return _cases(asyncio.run(read_prompts(prompts, _encoder(model), add_special_tokens)), params)
    wanted = parse_lengths(DEFAULT_LENGTHS if lengths is None else lengths)
    if model is not None:
        return make_cases(Tokenizer.load(model), wanted, params)
    return _cases(random_prompts(wanted, ids_of, params.seed or 0), params)


def find_bos(model: str | None, server: ServerSide | None) -> int | None:
    """The BOS token of the model's tokenizer, or else the server's; None if it adds none to texts. Raises
    `CheckpointError`."""
    if model is not None:
        return asyncio.run(ask_bos(_encoder(model)))
    return None if server is None else server.bos()


def _encoder(model: str) -> Encode:
    tokenizer = Tokenizer.load(model)

    async def encode(text: str, add_special_tokens: bool) -> list[int]:
        return tokenizer.encode(text, add_special_tokens)

    return encode


def _check_exclusive(**given: str | None) -> None:
    first, *others = [name for name, value in given.items() if value is not None] or [""]
    if others:
        raise ConfigError(first, f"cannot be chosen with --{others[0]}")


def _written(where: str, chat: Chat, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """A chat's token ids by the checkpoint's template; none without a tokenizer."""
    if tokenizer is None:
        return ()
    try:
        return tuple(chat_tokens(chat.messages, chat.tools, chat.chat_template_kwargs, tokenizer))
    except RequestError as error:
        raise ConfigError("chat", f"{where}: {error}") from None


def _cases(prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[Case]:
    return [Case(tuple(ids), params) for ids in prompts]
