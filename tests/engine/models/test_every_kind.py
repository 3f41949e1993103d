"""Latents, a window and states in one model that the engine does not know: on one engine and after handoffs, always the
tokens of the model computed from scratch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.drafters.registry import DRAFTERS
from baton.engine.config import KVTransferConfig, SpeculativeConfig
from baton.errors import ConfigError
from baton.kv.block_tables import BlockTables
from baton.kv.cache import KVCache
from baton.kv.interval import Rules
from baton.kvstore.store import StoreOptions
from baton.sampling_params import SamplingParams
from testkit.checkpoints import kinds
from testkit.checkpoints.common import make_drafter
from testkit.engines import Mode, Pair, Stream, pair, request, stepped

NUM_TOKENS = 9
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
SIZES = "4,sliding_window=6,draft=5"
Settings = dict[str, Any]


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [3 + (7 * i + 13 * salt + i * i) % 200 for i in range(length)]


class Trial:
    """A checkpoint, and the model's output without an engine."""

    def __init__(self, path: Path) -> None:
        self.path, self.naive = kinds.checkpoint(path / "target"), kinds.Naive(path / "target")
        self.head = make_drafter(path / "head", "eagle", self.path)

    def settings(self, drafter: str | None, **more: Any) -> Settings:
        found: Settings = {"model": str(self.path), "block_size": SIZES.rpartition(",")[0], "dtype": "float32", **more}
        spec = {"method": drafter, "model": str(self.head), "num_speculative_tokens": 3}
        found["speculative_config"] = SpeculativeConfig.parse(json.dumps(spec)) if drafter else None
        if drafter == "eagle" and "block_size" not in more:
            found["block_size"] = SIZES
        return found

    def expect(self, prompts: list[list[int]]) -> list[list[int]]:
        kinds.Guesses.texts = [prompt + self.naive.tokens(prompt, NUM_TOKENS + 4) for prompt in prompts]
        return [self.naive.tokens(prompt, NUM_TOKENS) for prompt in prompts]


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(*kinds.REGISTERED)
        patch.setitem(DRAFTERS, "guesses", "testkit.checkpoints.kinds:Guesses")
        yield


@pytest.fixture(scope="module")
def trial(registered: None, tmp_path_factory: pytest.TempPathFactory) -> Trial:
    return Trial(tmp_path_factory.mktemp("every_kind"))


# Every residue of pages of 4 and of 6, shorter and longer than the window and the convolution.
PROMPTS = [prompt_of(length, salt=length) for length in [*range(1, 26), 40, 61]]


@pytest.mark.parametrize("drafter", [None, "guesses", "eagle"])
@pytest.mark.parametrize("budget", [2048, 7])
def test_tokens_are_those_of_the_model_computed_whole(trial: Trial, drafter: str | None, budget: int) -> None:
    expected = trial.expect(PROMPTS)
    with stepped(**trial.settings(drafter, max_num_batched_tokens=budget)) as one:
        streams = one.all_of(PROMPTS, GREEDY)
        assert [stream.token_ids for stream in streams] == expected
        accepted = {n for stream in streams for n in stream.accepted}
        if drafter == "guesses":
            assert accepted == {0, 1, 2, 3}, "every rollback was tried"
        # The same prompts again: cached pages of some groups are of no use without the state.
        again = one.all_of(PROMPTS[::5], GREEDY)
        assert [stream.token_ids for stream in again] == expected[::5]
        assert one.core.metrics.num_cached_tokens == 0


def test_little_memory_changes_no_token(trial: Trial) -> None:
    """State slots for a few requests, and pages that run out during decode."""
    expected = trial.expect(PROMPTS)
    settings = trial.settings("guesses", max_model_len=75, kv_cache_memory=100_000, max_num_batched_tokens=16)
    with stepped(**settings) as one:
        pools = one.core.cache.pools
        assert pools["target.state.2"].num_pages - 1 == 6 * 6, "slots for six requests"
        streams = one.all_of(PROMPTS, GREEDY)
        assert [stream.token_ids for stream in streams] == expected
        assert one.core.scheduler.num_preemptions > 0


def test_a_window_gives_pages_back_while_a_prompt_is_computed(trial: Trial, tmp_path: Path) -> None:
    """For an engine's own requests, which get pages per chunk, and for a prefill leg, which gets them all at once."""
    prompt, budget, most = prompt_of(120), 7, -(-(kinds.WINDOW - 1 + 7 + 3) // 6) + 1
    settings = trial.settings("guesses", max_num_batched_tokens=budget, enable_prefix_caching=False)
    expected = trial.expect([prompt])[0]
    with stepped(**settings) as one:
        stream = one.add(request("r", prompt, GREEDY))
        pool = one.core.cache.pools["target.sliding_window.1"]
        while not stream.ended:
            one.step()
            assert pool.num_referenced <= most
        assert stream.token_ids == expected
    with pair(tmp_path, **settings) as two:
        told, rest = two.legs("r", prompt, GREEDY, "push")
        pool, held = two.prefill.core.cache.pools["target.sliding_window.1"], []
        while not told.token_ids:
            two.prefill.step()
            held.append(pool.num_referenced)
        assert max(held) >= 120 // 6
        assert sorted(held, reverse=True) == held
        assert held[-1] <= most
        two.settle()
        assert rest.token_ids == expected


def test_prefixes_of_every_kind_are_stored(trial: Trial, tmp_path: Path) -> None:
    """Another engine continues from the last span that ends with a checkpoint."""
    prompts = [prompt_of(300, salt=9), [*prompt_of(270, salt=9)[:255], 1, 2, 3, 4, 5]]
    expected = trial.expect(prompts)
    transfer = KVTransferConfig(prefix_store=StoreOptions(path=str(tmp_path)))
    settings = trial.settings("guesses", kv_transfer_config=transfer, mamba_block_size=36, max_num_batched_tokens=100)
    for loaded in ([0, 0], [252, 252]):
        with stepped(**settings) as one:
            for prompt, tokens, num in zip(prompts, expected, loaded, strict=True):
                before = one.core.metrics.num_cached_tokens
                assert one.run(f"{len(prompt)}", prompt, GREEDY).token_ids == tokens
                assert one.core.metrics.num_cached_tokens - before >= num
            while not one.is_idle():
                one.step()
            assert (one.core.metrics.num_loaded_tokens > 0) is (loaded[0] > 0)


def test_known_tokens_are_gone_on_from(trial: Trial) -> None:
    """As after a failover: the state of prompt and known output is computed from scratch."""
    prompts = PROMPTS[3:24:4]
    expected = trial.expect(prompts)
    with stepped(**trial.settings("guesses")) as one:
        for number, (prompt, tokens) in enumerate(zip(prompts, expected, strict=True)):
            known = number % (NUM_TOKENS - 1) + 1
            stream = one.run(f"r{number}", prompt, GREEDY, tokens[:known])
            assert stream.token_ids == tokens[known:]


def test_block_sizes_are_of_groups_that_there_are(trial: Trial) -> None:
    with stepped(**trial.settings("eagle", block_size="16,target=8,mla=32,draft=5,target.mla=3")) as one:
        sizes = {name: pool.page_size for name, pool in one.core.cache.pools.items()}
    assert sizes == {"target.mla": 3, "target.sliding_window.1": 8, "target.state.2": 1, "draft": 5}


@pytest.mark.parametrize("wrong", ["16,window=3", "0", "4,mla=", "mla", "16,state=4", "target.state.2=4"])
def test_block_sizes_of_groups_that_are_not_there_are_refused(trial: Trial, wrong: str) -> None:
    with pytest.raises(ConfigError, match="block_size"), stepped(**trial.settings("eagle", block_size=wrong)):
        pass


# ------------------------------------------------------------ handoffs

OTHER_SIZES = "6,sliding_window=4,draft=7"


def both_legs(two: Pair, prompts: list[list[int]], mode: Mode) -> list[Stream]:
    """D's streams of prompts that are handed over, all at once."""
    legs = [two.legs(f"{mode}-{len(prompt)}", prompt, GREEDY, mode) for prompt in prompts]
    two.step_until(lambda: all(told.ended and rest.ended for told, rest in legs), limit_s=300.0)
    two.settle()
    return [rest for _, rest in legs]


@pytest.mark.parametrize("drafter", [None, "guesses", "eagle"])
def test_a_handoff_changes_neither_tokens_nor_acceptance(trial: Trial, drafter: str | None, tmp_path: Path) -> None:
    expected = trial.expect(PROMPTS)
    settings = trial.settings(drafter, integrity="full", max_num_batched_tokens=16)
    other = OTHER_SIZES if drafter == "eagle" else OTHER_SIZES.rpartition(",")[0]
    modes: tuple[Mode, Mode] = ("push", "pull")
    with stepped(**settings) as single, pair(tmp_path, {"block_size": other}, **settings) as two:
        whole = single.all_of(PROMPTS, GREEDY)
        for mode in modes:
            streams = both_legs(two, PROMPTS, mode)
            assert not two.decode.core.metrics.recoveries
            assert [stream.token_ids for stream in streams] == expected
            assert [stream.accepted for stream in streams] == [stream.accepted for stream in whole]
        assert two.decode.core.metrics.num_handoffs["committed"] == 2 * len(PROMPTS)


def test_groups_that_d_has_cached_are_not_sent_but_the_state_is(trial: Trial, tmp_path: Path) -> None:
    prompts = [prompt_of(40, salt=5)]
    expected = trial.expect(prompts)
    with pair(tmp_path, **trial.settings("guesses", integrity="full")) as two:
        sent = []
        for _ in range(2):
            before = two.decode.core.metrics.handoff_bytes
            (stream,) = [two.legs(f"r{len(sent)}", prompts[0], GREEDY, "push")[1]]
            two.settle()
            assert stream.token_ids == expected[0]
            sent.append(two.decode.core.metrics.handoff_bytes - before)
    cache = {"latent": 2 * 4 * (kinds.LATENT + 16), "window": 2 * 2 * 2 * 16 * 4}
    state = 2 * (2 * kinds.CHANNELS * (kinds.TAPS - 1) + 4 * kinds.CHANNELS)
    assert sent[0] == 40 * cache["latent"] + (kinds.WINDOW - 1) * cache["window"] + state
    assert sent[1] == (kinds.WINDOW - 1) * cache["window"] + state, "a window in part is no prefix"


@pytest.mark.parametrize("fault", ["corrupt", "fail"])
def test_copies_that_fail_are_recovered_from_nothing(trial: Trial, fault: str, tmp_path: Path) -> None:
    """D computes the prompt itself, from its first token: a partial state is useless."""
    expected = trial.expect(PROMPTS[::4])
    transfer = KVTransferConfig(kv_transport=f"faulty+local://?fault={fault}&every=3")
    settings = trial.settings("guesses", integrity="full", kv_transfer_config=transfer, recovery="recompute")
    modes: tuple[Mode, Mode] = ("push", "pull")
    with pair(tmp_path, **settings) as two:
        for mode in modes:
            streams = both_legs(two, PROMPTS[::4], mode)
            assert [stream.token_ids for stream in streams] == expected


# ------------------------------------------------------------ broken engines are detected


def free_a_page_of_the_window_too_early(patch: pytest.MonkeyPatch) -> None:
    original = KVCache._free_before

    def free(self: KVCache, tables: BlockTables, group: str, token: int) -> None:
        original(self, tables, group, token + self.pools[group].page_size)

    patch.setattr(KVCache, "_free_before", free)


def send_a_scratch_slot(patch: pytest.MonkeyPatch) -> None:
    original = KVCache.offered

    def offered(self: KVCache, tables: BlockTables, num_tokens: int) -> dict[str, list[int]]:
        return {**original(self, tables, num_tokens), **{name: slots[:1] for name, slots in tables.scratch.items()}}

    patch.setattr(KVCache, "offered", offered)


def send_the_state_of_the_step_before(patch: pytest.MonkeyPatch) -> None:
    """Declared final before the last chunk is computed, and never sent again."""
    original, offered, first = Rules.final, KVCache.offered, {}

    def final(self: Rules, n: int, computed: int, *, seeded: bool = False) -> int:
        return int(computed > 0) if self.kind == "state" else original(self, n, computed, seeded=seeded)

    def held(self: KVCache, tables: BlockTables, num_tokens: int) -> dict[str, list[int]]:
        return first.setdefault(id(tables), {}) | offered(self, tables, num_tokens)

    patch.setattr(Rules, "final", final)
    patch.setattr(KVCache, "offered", held)


def forget_to_roll_back(patch: pytest.MonkeyPatch) -> None:
    original = KVCache.accept
    patch.setattr(KVCache, "accept", lambda self, tables, num_accepted, *more: original(self, tables, 0, *more))


def begin_from_the_slot_of_another(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("baton.engine.planning.NULL_PAGE", 1)


@pytest.mark.parametrize(
    ("breaks", "handed_over"),
    [
        (free_a_page_of_the_window_too_early, False),
        (forget_to_roll_back, False),
        (begin_from_the_slot_of_another, False),
        (send_a_scratch_slot, True),
        (send_the_state_of_the_step_before, True),
    ],
)
def test_a_broken_engine_shows(
    trial: Trial,
    breaks: Callable[[pytest.MonkeyPatch], None],
    handed_over: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    # A decode engine that registers late gets the last state by chance, so there are several tries.
    tries = [PROMPTS[first::4] for first in range(10, 14 if handed_over else 11)]
    expected = [trial.expect(prompts) for prompts in tries]
    settings = trial.settings("guesses", max_num_batched_tokens=16)
    breaks(monkeypatch)
    if handed_over:
        with pair(tmp_path, **settings) as two:
            found = [both_legs(two, prompts, "push") for prompts in tries]
    else:
        with stepped(**settings) as one:
            found = [one.all_of(prompts, GREEDY) for prompts in tries]
    refused = breaks is free_a_page_of_the_window_too_early
    assert ("a row's slot is in the null page" in caplog.text) == refused
    assert any(stream.error for streams in found for stream in streams) == refused, "the others show by wrong tokens"
    assert [[stream.token_ids for stream in streams] for streams in found] != expected
