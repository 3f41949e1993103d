"""Every kind of KV crosses a handoff: same tokens, same acceptance, with pages of any size.

A wrong handoff of a kind must be detected, so some of these tests break the engine on purpose.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from baton.engine.config import SpeculativeConfig
from baton.engine.core import EngineCore
from baton.engine.step_plans import DraftResult
from baton.handoff.agent.leg_events import LegEvent
from baton.handoff.protocol.events import Declared, Sampled
from baton.handoff.protocol.messages import AttemptKey
from baton.kv.block_tables import BlockTables
from baton.kv.cache import KVCache
from baton.kv.interval import Interval, Rules
from baton.sampling_params import SamplingParams
from testkit.checkpoints.common import make_checkpoint, make_drafter
from testkit.engines import (
    EAGLE3,
    TARGET,
    MakeDrafts,
    Mode,
    Pair,
    Stepped,
    Stream,
    draft_by,
    kv_of,
    pair,
    request,
    stepped,
)

EAGLE = {"method": "eagle", "model": "models/baton-demo-eagle", "num_speculative_tokens": 3}
WINDOW = 24
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=12, temperature=0.8, seed=3, ignore_eos=True)
Settings = dict[str, Any]


def settings_of(target: str | Path, drafter: dict[str, Any] | None) -> Settings:
    spec = None if drafter is None else SpeculativeConfig.parse(json.dumps(drafter))
    return {"model": str(target), "speculative_config": spec}


def windowed_demo(folder: Path) -> Path:
    """The demo target as a Mistral with a window in all layers: the heads trained for it still draft well."""
    folder.mkdir()
    for file in Path(TARGET).iterdir():
        (folder / file.name).symlink_to(file.resolve())
    changed = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": WINDOW}
    config = json.loads((folder / "config.json").read_text()) | changed
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def mixed_layers(folder: Path) -> Settings:
    """Alternating full and windowed layers, and a head: three groups."""
    types = ["full_attention", "sliding_attention", "full_attention"]
    window = {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": types}
    target = make_checkpoint(folder / "target", "qwen3", **window)
    head = make_drafter(folder / "head", "eagle", target)
    return settings_of(target, {"method": "eagle", "model": str(head), "num_speculative_tokens": 3})


KINDS: dict[str, Callable[[Path], Settings]] = {
    "eagle": lambda _: settings_of(TARGET, EAGLE),
    "eagle3": lambda _: settings_of(TARGET, EAGLE3),
    "window": lambda folder: settings_of(windowed_demo(folder / "windowed"), EAGLE3),
    "mixed": mixed_layers,
}


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [3 + (7 * i + 13 * salt + i * i) % 200 for i in range(length)]


def both_ways(single: Stepped, two: Pair, lengths: list[int], params: SamplingParams, mode: Mode) -> list[Stream]:
    """Prompts on one engine and through handoffs, all at once. Returns the streams after checking that they
    are equal.
    """
    prompts = [prompt_of(length, salt=length) for length in lengths]
    whole = [single.add(request(f"{mode}-{len(p)}-{params.seed}", p, params)) for p in prompts]
    while not all(stream.ended for stream in whole):
        single.step()
    legs = [two.legs(f"{mode}-{len(p)}-{params.seed}", p, params, mode) for p in prompts]
    two.step_until(lambda: all(told.ended and rest.ended for told, rest in legs), limit_s=300.0)
    two.settle()
    # D would recompute a failed handoff and give the same answer.
    assert not two.decode.core.metrics.recoveries
    assert not two.decode.core.metrics.handoff_failures
    for length, one, (_, rest) in zip(lengths, whole, legs, strict=True):
        assert rest.result == one.result, f"other tokens: {mode}, {length}"
        assert rest.accepted == one.accepted, f"other acceptance: {mode}, {length}"
    return whole


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_handoff_changes_neither_tokens_nor_acceptance(kind: str, tmp_path: Path) -> None:
    settings = KINDS[kind](tmp_path)
    lengths = [1, 15, 16, 17, WINDOW + 16, 70]
    modes: tuple[Mode, Mode] = ("push", "pull")
    with stepped(**settings) as single, pair(tmp_path, max_num_batched_tokens=32, **settings) as two:
        for mode, params in zip(modes, (GREEDY, SAMPLED), strict=True):
            streams = both_ways(single, two, lengths, params, mode)
            if kind != "mixed":  # its head is not trained
                assert sum(sum(stream.accepted) for stream in streams) > 0
        assert two.decode.core.metrics.num_handoffs["committed"] == 2 * len(lengths)
        for core, rest in ((two.prefill.core, "local_compute"), (two.decode.core, "external_kv_transfer")):
            sources = core.metrics.prompt_sources
            assert set(sources) == {rest, "local_cache_hit"}
            assert sum(sources.values()) == 2 * sum(lengths), "each token of a prompt came from somewhere"
            assert core.metrics.inference_time.count == 2 * len(lengths)
            assert core.metrics.step_tokens.count == core.metrics.num_steps
            assert core.metrics.step_tokens.total >= sources["local_compute"]


@pytest.mark.parametrize(("p_size", "d_size"), [(16, 32), (32, 16), (7, 16)])
@pytest.mark.parametrize("kind", ["eagle3", "window"])
def test_engines_with_pages_of_other_sizes(kind: str, p_size: int, d_size: int, tmp_path: Path) -> None:
    """With prompts that end at every slot of a page."""
    settings = KINDS[kind](tmp_path)
    sizes: Settings = {"block_size": p_size, "decode": {"block_size": d_size}}
    params = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
    with stepped(**settings) as single, pair(tmp_path, **sizes, **settings) as two:
        both_ways(single, two, list(range(33, 33 + 32)), params, "push" if kind == "eagle3" else "pull")
        both_ways(single, two, [1, 16, 31, 32, 96, 97], params, "pull" if kind == "eagle3" else "push")


def test_a_window_gives_its_pages_back_while_it_decodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = KINDS["mixed"](tmp_path)
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    prompts = [prompt_of(70, salt) for salt in range(3)]
    with stepped(**settings) as one, monkeypatch.context() as kept:
        kept.setattr(KVCache, "slide", lambda *_: None)
        expected = [one.run(str(i), prompt, params).result for i, prompt in enumerate(prompts)]
    with stepped(enable_prefix_caching=False, **settings) as one:
        streams = [one.add(request(str(i), prompt, params)) for i, prompt in enumerate(prompts)]
        while not all(stream.token_ids for stream in streams):
            one.step()
        pools = one.core.cache.pools
        (name,) = (name for name, rules in one.core.cache.rules.items() if rules.window is not None)
        while not all(stream.ended for stream in streams):
            one.step()
            num_running = len(one.core.scheduler.running)
            # The window and the draft slots, at any offset in their pages.
            assert pools[name].num_referenced <= num_running * (2 + -(-(WINDOW + 4) // 16))
        assert [stream.result for stream in streams] == expected
        assert one.is_idle()


# ------------------------------------------------------------ broken engines are detected


def drop_one_page_more(monkeypatch: pytest.MonkeyPatch) -> None:
    original = KVCache._free_before

    def free(self: KVCache, tables: BlockTables, group: str, token: int) -> None:
        original(self, tables, group, token + self.pools[group].page_size)

    monkeypatch.setattr(KVCache, "_free_before", free)


def want_one_page_less(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Rules.wanted

    def wanted(rules: Rules, n: int, hit: int) -> Interval:
        found = original(rules, n, hit)
        return Interval(min(found.start + 16, found.stop), found.stop) if rules.window is not None else found

    monkeypatch.setattr(Rules, "wanted", wanted)


@pytest.mark.parametrize(
    ("breaks", "shows"), [(drop_one_page_more, "register_refused"), (want_one_page_less, "other tokens: push, 70")]
)
@pytest.mark.parametrize("kind", ["window", "mixed"])
def test_a_page_of_the_window_that_is_missing_shows(
    kind: str,
    breaks: Callable[[pytest.MonkeyPatch], None],
    shows: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """P refuses to send a freed page, which is null; D decodes from a page that it did not want."""
    settings = KINDS[kind](tmp_path)
    with stepped(**settings) as single, pair(tmp_path, **settings) as two:
        breaks(monkeypatch)
        with pytest.raises(AssertionError, match=shows):
            both_ways(single, two, [70, 75], GREEDY, "push")


class Finals:
    """Remembers what a prefill engine declares final, and finds later changes."""

    def __init__(self, engine: Stepped) -> None:
        self.kv = kv_of(engine)
        self.held: dict[tuple[str, int], torch.Tensor] = {}
        self.pages: dict[str, list[int]] = {}
        assert engine.core.legs is not None
        agent = engine.core.legs.agent
        post = agent.post

        def posted(key: AttemptKey, event: LegEvent) -> None:
            match event:
                case Declared(prompt_len, pages, final):
                    self.pages, self.prompt_len = pages, prompt_len
                    self.hold(final)
                case Sampled(_, finished, final):
                    # With the first token everything is final, including the drafter's last entry.
                    assert finished or final == dict.fromkeys(self.pages, self.prompt_len)
                    self.hold(final)
            post(key, event)

        agent.post = posted  # type: ignore[method-assign]

    def hold(self, final: dict[str, int]) -> None:
        for group, end in final.items():
            for t in range(end):
                self.held.setdefault((group, t), self.entry(group, t).clone())

    def entry(self, group: str, t: int) -> torch.Tensor:
        size = self.kv[group].shape[3]
        return self.kv[group][self.pages[group][t // size], :, :, t % size]

    def changed(self) -> list[tuple[str, int]]:
        return [place for place, value in self.held.items() if not torch.equal(value, self.entry(*place))]


def finalise_before_the_drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting: list[Any] = []
    finalise = EngineCore._finalise

    def later(core: EngineCore, scheduled: Any, rows: Any) -> None:
        finalise(core, scheduled, rows)
        while waiting:
            before, plan = waiting.pop()
            before(plan)

    def put_off(before: MakeDrafts, plan: Any) -> DraftResult:
        waiting.append((before, plan))
        return DraftResult([[] for _ in plan.num_drafts], np.zeros((len(plan.num_drafts), 0, 0), dtype=np.float32))

    draft_by(monkeypatch, put_off)
    monkeypatch.setattr(EngineCore, "_finalise", later)


def finals_that_changed(tmp_path: Path, kind: str) -> list[tuple[str, int]]:
    """A prompt in several chunks, with D's leg present from the start."""
    settings = KINDS[kind](tmp_path)
    with pair(tmp_path, max_num_batched_tokens=32, **settings) as two:
        finals = Finals(two.prefill)
        told, rest = two.legs("r", prompt_of(100), GREEDY, "push")
        two.step_until(lambda: told.ended and rest.ended)
        changed = finals.changed()
        assert len(finals.held) == 100 * len(finals.kv)
        two.settle()
        return changed


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_final_entries_do_not_change(kind: str, tmp_path: Path) -> None:
    assert finals_that_changed(tmp_path, kind) == []


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_finalising_before_the_drafter_shows(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finalise_before_the_drafter(monkeypatch)
    changed = finals_that_changed(tmp_path, kind)
    assert {group for group, _ in changed} == {"draft"}
    assert len(changed) > 50
