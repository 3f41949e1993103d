"""The plans of one step, for an executor, and their results.

Plans hold only arrays, numbers and strings, to be sent to other processes. A step has two: the drafter's rows depend on
accepted drafts, and clients get tokens before it runs.

Shapes: T rows of R requests concatenated, N rows with logits, V vocabulary, F features per row.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from baton.drafters.chain import ModuleChain
from baton.structured import Known
from baton.wire import TokenLogprobs

IntArray = npt.NDArray[np.int64]
Int32Array = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float64]
# The chosen "token" of a row whose logits are not all finite.
NOT_FINITE = -2


@dataclass(frozen=True, slots=True)
class Written:
    """`tell` is called with each layer id once its KV is written, if `at_once` before the next layer; `tell_rows` with
    the number of rows whose KV all layers have."""

    tell: Callable[[int], None]
    tell_rows: Callable[[int], None]
    at_once: bool = True

    def __call__(self, layer_id: int) -> None:
        self.tell(layer_id)


def _none() -> IntArray:
    return np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class PlanSpec:
    """What an executor's plans must contain."""

    target_groups: tuple[str, ...]  # groups with block tables
    draft_groups: tuple[str, ...]  # those of the drafter, and the target's that it reads
    state_groups: tuple[str, ...]  # the target's groups with state slots
    drafts: bool
    needs_contexts: bool  # the drafter takes all known tokens of a request
    num_modules: int = 1
    draft_state_groups: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StateSlots:
    """Slots of one state group in one forward. No slot is both read and written."""

    read: IntArray  # [R]: the state before a request's rows; 0: the request begins
    kept: IntArray  # [K], ascending: rows after which the state is kept
    write: IntArray  # [K]: the slots for these states


@dataclass(frozen=True, slots=True)
class DraftSlots:
    """As `StateSlots`, for the drafter. `DraftStates` (`engine/memory`) selects the part of each forward."""

    read: IntArray
    scratch: IntArray  # [R, S]: for the state after the last row, then for states after drafts
    # Checkpoints to save, [C] each, in order: index of the request, number of tokens seen, slot.
    request: IntArray
    num_tokens: IntArray
    write: IntArray


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one forward. A request's rows have consecutive positions; unused entries of a table are 0."""

    token_ids: IntArray  # [T]
    positions: IntArray  # [T]
    query_start: Int32Array  # [R + 1]: rows of request r are query_start[r] .. query_start[r + 1]
    tables: Mapping[str, Int32Array]  # per group [R, max_pages]: page ids in token order
    states: Mapping[str, StateSlots] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Noise:
    """The noise of S tokens, with their positions: [S] each. Temperature 0: none."""

    seed: npt.NDArray[np.uint64]
    sample_index: npt.NDArray[np.uint64]
    temperature: FloatArray

    def take(self, which: IntArray) -> Noise:
        return Noise(self.seed[which], self.sample_index[which], self.temperature[which])


@dataclass(frozen=True, slots=True)
class TokenValues:
    """A value for some token ids of some rows; `row`, ascending, indexes the rows of a `Sampling`."""

    row: IntArray
    token: IntArray
    value: FloatArray

    def take(self, rows: IntArray) -> TokenValues:
        """`rows` (ascending) are renumbered from 0."""
        if not len(self.row):
            return self
        kept = np.isin(self.row, rows)
        return TokenValues(np.searchsorted(rows, self.row[kept]), self.token[kept], self.value[kept])


@dataclass(frozen=True, slots=True)
class Masks:
    """Tokens allowed in some rows. `row`: as `TokenValues`. `bits` uint8 [rows, bytes]: one bit per token id, lowest
    bit first, for at least the vocabulary."""

    row: IntArray
    bits: npt.NDArray[np.uint8]

    def take(self, rows: IntArray) -> Masks:
        kept = np.isin(self.row, rows)
        return Masks(np.searchsorted(rows, self.row[kept]), self.bits[kept])


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to choose tokens in the S rows that are not plain greedy: [S] arrays.

    The rows of a request are adjacent. Each but the last is followed by a draft, the next row's input. `rejection`:
    accept a draft with the target's probability for it, instead of when the target chooses it.
    """

    row: IntArray  # index into the rows with logits, ascending
    draft: IntArray  # the draft after the row; -1: the last row of its request
    position: IntArray  # of the token to choose
    noise: Noise
    log_min_p: FloatArray  # natural logarithm; -inf: no bound
    top_k: IntArray  # 0: no bound
    top_p: FloatArray
    repetition: FloatArray
    frequency: FloatArray
    presence: FloatArray
    bias: TokenValues
    masked: TokenValues  # -inf: must not be chosen
    allowed: Masks  # for rows with a grammar, allowed_token_ids or bad words
    counts: TokenValues  # for rows with penalties: how often each token of prompt and output occurs in the output
    rejection: bool

    def take(self, rows: IntArray) -> Sampling:
        if len(rows) == len(self.row):
            return self
        changed: dict[str, Any] = {
            name: getattr(self, name).take(rows) for name in ("noise", "bias", "masked", "allowed", "counts")
        }
        for name in _COLUMNS:
            changed[name] = getattr(self, name)[rows]
        return replace(self, **changed)


_COLUMNS = ("row", "draft", "position", "log_min_p", "top_k", "top_p", "repetition", "frequency", "presence")


@dataclass(frozen=True, slots=True)
class PromptLogprobRows:
    """Rows whose next token is a prompt token that needs a logprob: [M] each, rows ascending."""

    row: IntArray
    token: IntArray
    num_top: IntArray


@dataclass(frozen=True, slots=True)
class StepPlan:
    rows: Rows  # each request's known tokens, then its drafts; their KV is written
    sample_rows: IntArray  # [N], ascending: rows whose next token is chosen, greedily except for the rows of `sampling`
    sampling: Sampling | None = None
    logit_rows: IntArray = field(default_factory=_none)  # indices into `sample_rows` whose logits are returned
    feature_rows: IntArray = field(default_factory=_none)  # rows whose drafter features are returned
    scored: PromptLogprobRows | None = None
    # If later draft plans may need the step's features: its number, and that of the first step whose features are still
    # needed. Else 0.
    number: int = 0
    oldest: int = 0


@dataclass(frozen=True, slots=True)
class StepResult:
    # [N]: -1 after a draft that was not chosen, `NOT_FINITE` if the row's logits are not finite.
    choices: IntArray
    logits: npt.NDArray[np.float32]  # [len(logit_rows), V]
    features: npt.NDArray[np.float32]  # [len(feature_rows), F]
    # For the rows of `scored`, in order; None for a row whose logits are not all finite.
    scores: Sequence[TokenLogprobs | None] = ()


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """The drafter's plan for the step executed last, and for rows of earlier steps whose features are kept."""

    rows: Rows  # their `token_ids` are the tokens after each row
    feature_rows: IntArray  # [T]: the step's row with each row's features
    num_drafts: IntArray  # [R]: tokens to draft after a request's last row
    noise: Noise  # [R] each
    contexts: Sequence[IntArray] = ()  # a request's known tokens, if `PlanSpec.needs_contexts`
    constraints: Sequence[Known | None] = ()  # grammars; empty if no request has one
    # [R]: the position of the first entry in a request's pages; empty if 0 for all.
    first_entry: IntArray = field(default_factory=_none)
    chain: ModuleChain | None = None  # for a drafter with several modules
    feature_steps: IntArray = field(default_factory=_none)  # [T]: each row's step; empty if the last for all
    states: Mapping[str, DraftSlots] = field(default_factory=dict)
    margins: bool = False  # whether the result has them


@dataclass(frozen=True, slots=True)
class DraftResult:
    """`mtp_hidden` float32 [R, K - 1, E]: rows for the next plan of a drafter with K modules (zeros if a module needs
    none); empty for other drafters. `margins`: as `DraftBatch.margins`, None if the plan wants none."""

    drafts: list[list[int]]
    mtp_hidden: npt.NDArray[np.float32]
    margins: FloatArray | None = None


def one_request(token_ids: Sequence[int], tables: Mapping[str, Sequence[int]], states: Container[str] = ()) -> Rows:
    """Rows for the first tokens of one request. `tables`: page ids per group, or the slot to write for `states`."""
    begins, last = np.zeros(1, dtype=np.int64), np.array([len(token_ids) - 1])
    return Rows(
        token_ids=np.asarray(token_ids, dtype=np.int64),
        positions=np.arange(len(token_ids), dtype=np.int64),
        query_start=np.array([0, len(token_ids)], dtype=np.int32),
        tables={group: np.asarray([pages], dtype=np.int32) for group, pages in tables.items() if group not in states},
        states={group: StateSlots(begins, last, np.array(ids[:1])) for group, ids in tables.items() if group in states},
    )
