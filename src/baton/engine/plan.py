"""A step as data: what the core asks of an executor, and what it gets.

Arrays, numbers and strings alone, so that a plan is run here or sent to other processes alike, and no code that
computes ever holds a request. A step has two plans. The drafter's cannot be made before the target's result is there:
which tokens were accepted decides its rows, the core alone knows which requests go on, and a token reaches its client
before the drafter runs.

Shapes: T rows of R requests side by side, N of them with logits, V vocabulary, F width of a row of features.
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
# The choice of a row whose logits are not all finite.
NOT_FINITE = -2
Written = Callable[[int], None]  # called in a forward with the id of each layer whose keys or latents are written


def _none() -> IntArray:
    return np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class PlanSpec:
    """What an executor's plans must hold: block tables of which groups, slots of which groups of states, the target's
    and the drafter's, whether it drafts, whether its drafter takes all known tokens of a request, and of how many
    modules it is a chain (or 1)."""

    target_groups: tuple[str, ...]
    draft_groups: tuple[str, ...]
    state_groups: tuple[str, ...]
    drafts: bool
    needs_contexts: bool
    num_modules: int = 1
    draft_state_groups: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StateSlots:
    """Slots of one group of states. No slot is both read and written."""

    read: IntArray  # [R]: the state before a request's rows; 0: it begins
    kept: IntArray  # [K], ascending: rows behind which the state is kept
    write: IntArray  # [K]: where


@dataclass(frozen=True, slots=True)
class DraftSlots:
    """Slots of one group of the drafter's states. Which forward writes which of them the drafter decides: see
    `baton.engine.draft_states`."""

    read: IntArray  # [R]: the state before a request's rows; 0: it begins
    scratch: IntArray  # [R, S]: for the state behind its last row, and for those behind drafts
    # Checkpoints on the way: behind so many tokens of which of the plan's requests, and where. [C] each, in order.
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
    """What the sampling noise of S tokens is drawn from, besides their positions: [S] each. Temperature 0: no noise."""

    seed: npt.NDArray[np.uint64]
    sample_index: npt.NDArray[np.uint64]
    temperature: FloatArray

    def take(self, which: IntArray) -> Noise:
        """The noise of some of the tokens."""
        return Noise(self.seed[which], self.sample_index[which], self.temperature[which])


@dataclass(frozen=True, slots=True)
class Entries:
    """A value for some token ids of some rows; `row`, ascending, indexes the rows of a `Sampling`."""

    row: IntArray
    token: IntArray
    value: FloatArray

    def take(self, rows: IntArray) -> Entries:
        """The entries of `rows`, which are ascending, and counted anew from 0."""
        if not len(self.row):
            return self
        kept = np.isin(self.row, rows)
        return Entries(np.searchsorted(rows, self.row[kept]), self.token[kept], self.value[kept])


@dataclass(frozen=True, slots=True)
class Masks:
    """Which tokens may be chosen in some rows; `row`, ascending, indexes the rows of a `Sampling`. `bits` uint8
    [rows, bytes]: a bit for each token, the lowest first, for the vocabulary or more."""

    row: IntArray
    bits: npt.NDArray[np.uint8]

    def take(self, rows: IntArray) -> Masks:
        """The masks of `rows`, which are ascending, and counted anew from 0."""
        kept = np.isin(self.row, rows)
        return Masks(np.searchsorted(rows, self.row[kept]), self.bits[kept])


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen in S of the rows with logits, where it is not just the likeliest: [S] arrays.

    The rows of a request stand together, and each but the last has a draft behind it: the next row takes it for
    granted. `rejection`: a draft is kept with the target's probability for it, instead of where the target chooses it.
    """

    row: IntArray  # index into the rows with logits, ascending
    draft: IntArray  # -1: the last row of its request
    position: IntArray  # of the token that is chosen
    noise: Noise
    log_min_p: FloatArray  # natural logarithm; -inf: no bound
    top_k: IntArray  # 0: no bound
    top_p: FloatArray
    repetition: FloatArray
    frequency: FloatArray
    presence: FloatArray
    bias: Entries  # added to logits
    masked: Entries  # -inf: not to be chosen
    allowed: Masks  # where a grammar says what may be chosen
    counts: Entries  # of tokens of the prompt and behind it: how often they were put out; where penalties want it
    rejection: bool

    def take(self, rows: IntArray) -> Sampling:
        """Some of the rows, ascending."""
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
class Scored:
    """Rows of a step behind which the prompt goes on: what the target thinks of the tokens there. [M] each, rows
    ascending; `num_top`: how many of the likeliest tokens are wanted too."""

    row: IntArray
    token: IntArray
    num_top: IntArray


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The target's half: `rows` are known tokens, and drafts behind them, whose KV is written.

    `sample_rows` [N], ascending: rows whose next token is chosen, the likeliest but where `sampling` says otherwise.
    `logit_rows`: indices into those whose logits are wanted too. `feature_rows`: rows of the step whose drafter
    features are wanted.
    """

    rows: Rows
    sample_rows: IntArray
    sampling: Sampling | None = None
    logit_rows: IntArray = field(default_factory=_none)
    feature_rows: IntArray = field(default_factory=_none)
    scored: Scored | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """`choices` int64 [N], -1 after a draft that was not chosen, `NOT_FINITE` where no token can be chosen; `logits`
    float32 [len(logit_rows), V]; `features` float32 [len(feature_rows), F], with no rows where there is no drafter or
    it takes none. `scores`: of the rows of `scored`, in order; None of a row whose logits are not all finite."""

    choices: IntArray
    logits: npt.NDArray[np.float32]
    features: npt.NDArray[np.float32]
    scores: Sequence[TokenLogprobs | None] = ()


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """The drafter's half of the step that was executed last.

    `rows.token_ids` holds the token after each row. `feature_rows` [T]: the step's row that each goes with.
    `num_drafts` [R]: tokens to draft behind a request's last row. `noise`: [R] each. `contexts`: as
    `PlanSpec.needs_contexts` asks. `first_entry` [R]: the position whose entry is the first of a request's pages; empty
    where it is 0 for all. `chain`: what a drafter of several modules needs besides.
    `constraints`: grammars of requests that have any; empty where none has. `states`: by group of the drafter's.
    """

    rows: Rows
    feature_rows: IntArray
    num_drafts: IntArray
    noise: Noise
    contexts: Sequence[IntArray] = ()
    constraints: Sequence[Known | None] = ()
    first_entry: IntArray = field(default_factory=_none)
    chain: ModuleChain | None = None
    states: Mapping[str, DraftSlots] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DraftResult:
    """`drafts`: at most `num_drafts` tokens per request. `carried` float32 [R, K - 1, E]: of a chain of K modules, what
    its next plan is to bring (zeros where a module lacks nothing); of other drafters empty."""

    drafts: list[list[int]]
    carried: npt.NDArray[np.float32]


def one_request(token_ids: Sequence[int], tables: Mapping[str, Sequence[int]], states: Container[str] = ()) -> Rows:
    """Rows for the first tokens of one request, whose pages per group are `tables`; of `states`, the slot to write."""
    begins, last = np.zeros(1, dtype=np.int64), np.array([len(token_ids) - 1])
    return Rows(
        token_ids=np.asarray(token_ids, dtype=np.int64),
        positions=np.arange(len(token_ids), dtype=np.int64),
        query_start=np.array([0, len(token_ids)], dtype=np.int32),
        tables={group: np.asarray([pages], dtype=np.int32) for group, pages in tables.items() if group not in states},
        states={group: StateSlots(begins, last, np.array(ids[:1])) for group, ids in tables.items() if group in states},
    )
