"""What the options of `baton verify` mean: lengths, modes, prompts, and how much may differ."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass

from baton.errors import ConfigError
from baton.text import Tokenizer
from baton.verify.acceptance import AcceptanceCheck, check_acceptance
from baton.verify.compare import of_answers
from baton.verify.observe import Case, make_cases
from baton.verify.prompts import parse_token_range, random_prompts, read_prompts
from baton.verify.sides import Answers, Served
from baton.wire import SamplingParams

MODES = ("push", "pull", "single-nospec", "single")
DEFAULT_MODES = MODES[:3]
DEFAULT_LENGTHS = "1-96"
DEFAULT_NEAR_TIE = 1e-4
DEFAULT_LOGPROB_TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much may differ. `near_tie` and `logprob_tolerance` (None: not compared) are logprobs, `acceptance` is
    accepted drafts per round. `acceptance_required`: it must be told; `servers`: a side was not started by verify.
    """

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
        """None is the default: strict, but for servers, which promise less than Baton's engines do.

        Raises `ConfigError` naming what is out of range.
        """
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
            near_tie = 0.0  # a sampled token is the best of logits plus noise, which logprobs do not show
        return cls(near_tie, logprob_tolerance, acceptance_tolerance, acceptance_required, servers)

    def check(self, want: Answers, have: Answers) -> AcceptanceCheck:
        """Compare by the counters of both sides; without them by the answers, unless counters are required."""
        reference, candidate = of_answers(want.observed), of_answers(have.observed)
        found = check_acceptance(want.counters, have.counters, self.acceptance, self.acceptance_required)
        if found.compared or self.acceptance_required:
            return found
        if reference is not None and candidate is not None:
            return check_acceptance(reference, candidate, self.acceptance, required=False)
        if self.servers:
            return found
        # Engines that verify started tell of their rounds: without any they do not draft. The reference is then shown
        # by what the other modes are held against, its counters.
        return AcceptanceCheck(reference if isinstance(want.counters, str) else want.counters, candidate)


def parse_lengths(text: str) -> list[int]:
    """`1-4,9` -> [1, 2, 3, 4, 9]. Raises ConfigError."""
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
    """Comma-separated names of MODES; for a `served` candidate, which has its own, of kv_modes to ask for.

    Raises ConfigError.
    """
    if text is None:
        return ["candidate"] if served else list(DEFAULT_MODES)
    known = MODES[:2] if served else MODES
    modes = text.split(",")
    for mode in modes:
        if mode not in known:
            raise ConfigError("modes", f"must be of {', '.join(known)}, got {mode!r}")
    return modes


def choose_cases(
    model: str | None,
    server: Served | None,
    lengths: str | None,
    prompts: str | None,
    token_range: str,
    params: SamplingParams,
) -> list[Case]:
    """Requests of a file of prompts, of text for the model's tokenizer, or of random tokens.

    Raises ConfigError, CheckpointError.
    """
    ids_of = parse_token_range(token_range)
    if prompts is None:
        wanted = parse_lengths(lengths or DEFAULT_LENGTHS)
        if model is not None:
            return make_cases(Tokenizer.load(model), wanted, params)
        return _cases(random_prompts(wanted, ids_of, params.seed or 0), params)
    if lengths is not None:
        raise ConfigError("lengths", "cannot be chosen with --prompts")
    if model is None:
        assert server is not None
        return _cases(server.read_prompts(prompts), params)
    tokenizer = Tokenizer.load(model)

    async def encode(text: str) -> list[int]:
        return tokenizer.encode(text)

    return _cases(asyncio.run(read_prompts(prompts, encode)), params)


def _cases(prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[Case]:
    return [Case(tuple(ids), params) for ids in prompts]
