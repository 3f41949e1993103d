"""Per-request sampling state, and the `Sampling` of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from baton.engine.sampling.bad_words import BadWords
from baton.engine.step_plans import FloatArray, IntArray, Masks, Noise, Sampling, TokenValues
from baton.sampling_params import SamplingParams
from baton.structured import Allowed
from baton.structured.matcher import Bits

ForTokens = tuple[IntArray, FloatArray]


class SamplingState:
    """A request's sampling parameters and token counts for penalties. Mutated only by `advance`.

    `columns`: log(min_p), top_k, top_p, repetition, frequency and presence penalty.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        vocab_size: int,
        eos_ids: Sequence[int],
        bad_words: BadWords | None = None,
    ) -> None:
        self.params = params
        self._bad_words = bad_words or BadWords(())
        self.num_prompt = len(prompt_ids)
        self.num_output = 0
        stop_ids = [*params.stop_token_ids] if params.ignore_eos else [*eos_ids, *params.stop_token_ids]
        masked = np.unique(np.asarray([i for i in stop_ids if i < vocab_size], dtype=np.int64))
        self._min_tokens: ForTokens = masked, np.full(len(masked), -np.inf)
        self._bias: ForTokens | None = None
        if params.logit_bias:
            ids = np.array([*params.logit_bias], dtype=np.int64)
            self._bias = ids, np.array([*params.logit_bias.values()], dtype=np.float64)
        self.columns = (
            float(np.log(params.min_p)) if params.min_p > 0.0 else -np.inf,
            max(params.top_k, 0),
            params.top_p,
            params.repetition_penalty,
            params.frequency_penalty,
            params.presence_penalty,
        )
        self._penalised = (
            params.presence_penalty != 0.0 or params.frequency_penalty != 0.0 or params.repetition_penalty != 1.0
        )
        # Occurrences in the output. Prompt tokens have 0: the repetition penalty applies to them too.
        self._counts: dict[int, int] = dict.fromkeys(prompt_ids, 0) if self._penalised else {}
        self.plain_greedy = (
            params.temperature == 0.0
            and not self._penalised
            and not params.logit_bias
            and params.min_tokens == 0
            and params.structured_outputs is None
            and params.allowed_token_ids is None
            and not self._bad_words
        )
        self._allowed: Bits | None = None
        if params.allowed_token_ids is not None or self._bad_words:
            mask = np.full(vocab_size, params.allowed_token_ids is None, dtype=np.uint8)
            mask[list(params.allowed_token_ids or ())] = 1
            self._allowed = np.packbits(mask, bitorder="little")

    def advance(self, token_ids: Sequence[int]) -> None:
        self.num_output += len(token_ids)
        self._bad_words.advance(token_ids)
        if self._penalised:
            _count(self._counts, token_ids)

    @property
    def position(self) -> int:
        return self.num_prompt + self.num_output

    @property
    def restricts(self) -> bool:
        """Whether parameters restrict the tokens, without a grammar."""
        return self._allowed is not None

    def allowed(self, drafts: Sequence[int], grammar: Allowed | None) -> Allowed | None:
        """The allowed tokens for the next position and after each draft; None: all. `grammar` may cover only the first
        rows.
        """
        if self._allowed is None:
            return grammar
        width = 0 if grammar is None else grammar.bits.shape[1]
        bits = np.zeros((1 + len(drafts), max(width, len(self._allowed))), dtype=np.uint8)
        bits[:, : len(self._allowed)] = self._allowed
        for row, own in enumerate(bits if self._bad_words else ()):
            for token in self._bad_words.barred(drafts[:row]):
                own[token // 8] &= ~(1 << token % 8) & 0xFF
        if grammar is not None:
            bits[: len(grammar.bits)] &= np.pad(grammar.bits, ((0, 0), (0, bits.shape[1] - width)))
        return Allowed(bits)

    def biased(self) -> ForTokens | None:
        return self._bias

    def masked(self, row: int) -> ForTokens | None:
        """Tokens that `min_tokens` bars at `row` (i: after i drafts), each with -inf."""
        return self._min_tokens if self.num_output + row < self.params.min_tokens else None

    def counted(self, drafts_before: Sequence[int]) -> ForTokens | None:
        if not self._penalised:
            return None
        counts = self._counts
        if drafts_before:
            counts = counts.copy()
            _count(counts, drafts_before)
        num = len(counts)
        return np.fromiter(counts, np.int64, num), np.fromiter(counts.values(), np.float64, num)


def _count(counts: dict[int, int], token_ids: Sequence[int]) -> None:
    for token in token_ids:
        counts[token] = counts.get(token, 0) + 1


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """From `first_row` on: for the next token, and after each draft. `allowed` None: all."""

    state: SamplingState
    first_row: int
    drafts: Sequence[int]
    allowed: Allowed | None = None

    def masked(self, row: int) -> ForTokens | None:
        """`SamplingState.masked`, except for rows where only tokens that end the output are allowed."""
        masked = self.state.masked(row)
        if masked is None or self.allowed is None or row >= len(self.allowed.bits):
            return masked
        return masked if self.allowed.has_other_than(row, masked[0]) else None


def sampling_of(asked: Sequence[SamplingRows], rejection: bool) -> Sampling | None:
    if not asked:
        return None
    rows = [(one, row) for one in asked for row in range(1 + len(one.drafts))]
    columns = np.array([one.state.columns for one, _ in rows]).T
    return Sampling(
        row=np.array([one.first_row + row for one, row in rows], dtype=np.int64),
        draft=np.array([token for one in asked for token in (*one.drafts, -1)], dtype=np.int64),
        position=np.array([one.state.position + row for one, row in rows], dtype=np.int64),
        noise=noise_of([one.state.params for one, _ in rows]),
        log_min_p=columns[0],
        top_k=columns[1].astype(np.int64),
        top_p=columns[2],
        repetition=columns[3],
        frequency=columns[4],
        presence=columns[5],
        bias=_entries([one.state.biased() for one, _ in rows]),
        masked=_entries([one.masked(row) for one, row in rows]),
        allowed=_masks(asked),
        counts=_entries([one.state.counted(one.drafts[:row]) for one, row in rows]),
        rejection=rejection,
    )


def noise_of(params: Sequence[SamplingParams]) -> Noise:
    return Noise(
        # Greedy requests draw nothing.
        seed=np.array([p.seed or 0 for p in params], dtype=np.uint64),
        sample_index=np.array([p.sample_index for p in params], dtype=np.uint64),
        temperature=np.array([p.temperature for p in params], dtype=np.float64),
    )


def _masks(asked: Sequence[SamplingRows]) -> Masks:
    rows: list[int] = []
    bits = [np.zeros((0, 0), dtype=np.uint8)]
    first = 0
    for one in asked:
        if one.allowed is not None:
            rows += range(first, first + len(one.allowed.bits))
            bits.append(one.allowed.bits)
        first += 1 + len(one.drafts)
    # A grammar's bits end with a word of 32, others with a byte.
    width = max(part.shape[1] for part in bits)
    wide = [np.pad(part, ((0, 0), (0, width - part.shape[1]))) for part in bits]
    return Masks(np.array(rows, dtype=np.int64), np.concatenate(wide))


def _entries(by_row: Sequence[ForTokens | None]) -> TokenValues:
    rows = [row for row, present in enumerate(by_row) if present is not None]
    present = [present for present in by_row if present is not None]
    if not present:
        return TokenValues(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), np.zeros(0))
    return TokenValues(
        row=np.repeat(rows, [len(ids) for ids, _ in present]),
        token=np.concatenate([ids for ids, _ in present]),
        value=np.concatenate([values for _, values in present]),
    )
