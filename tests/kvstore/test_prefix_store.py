"""Prefixes in a store: one engine loads what another computed, and no output differs."""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton import LLM, SamplingParams
from baton.engine.config import EngineConfig, KVTransferConfig
from baton.errors import ConfigError
from baton.kvstore.prefix_store import SPAN_TOKENS
from baton.kvstore.store import FileStore
from baton.text import Tokenizer
from baton.transports.base import ByteArray
from baton.verify.observe import make_cases
from testkit.engines import TARGET, Mode, Stepped, Stream, pair, request, stepped
from tests.engine.handoff.test_handoff_kinds import windowed_demo

PARAMS = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=12, temperature=0.8, seed=5, ignore_eos=True)
PAGE_BYTES = 16 * 2 * 4 * 32 * 2 * 5
LENGTHS = [255, 256, 257, 258, 300, 512, 513, 700]
Results = list[tuple[list[int], list[int]]]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return [list(case.prompt_token_ids) for case in make_cases(Tokenizer.load(TARGET), LENGTHS, PARAMS)]


def with_store(directory: Path, **more: Any) -> dict[str, Any]:
    return {"kv_transfer_config": KVTransferConfig.parse({"prefix_store": f"file://{directory}", **more})}


def settle(engine: Stepped) -> None:
    while not engine.is_idle():
        engine.step()


def outcome(stream: Stream) -> tuple[list[int], list[int]]:
    assert stream.finish_reason == "length"
    return stream.token_ids, stream.accepted


def serve(prompts: list[list[int]], params: SamplingParams, **settings: Any) -> tuple[Results, int]:
    """Answers of a fresh engine, and the number of tokens that it loaded from its store."""
    with stepped(**settings) as engine:
        results = [outcome(engine.run(str(i), prompt, params)) for i, prompt in enumerate(prompts)]
        settle(engine)
        return results, engine.core.metrics.num_loaded_tokens


@pytest.fixture(scope="module")
def expected(prompts: list[list[int]]) -> Results:
    return serve(prompts, PARAMS)[0]


def whole_spans(length: int) -> int:
    """Tokens of the spans that are loaded for a prompt: the drafter's last entry of each needs one token more."""
    return (length - 1) // SPAN_TOKENS * SPAN_TOKENS


def test_a_window_is_stored_whole_though_pages_slide_out_of_it(tmp_path: Path) -> None:
    """For a prompt in chunks, whose first pages no later query sees."""
    prompt = [[3 + (7 * i + i * i) % 200 for i in range(600)]]
    settings = {"model": str(windowed_demo(tmp_path / "windowed")), "max_num_batched_tokens": 64}
    want, _ = serve(prompt, PARAMS, **settings)
    assert serve(prompt, PARAMS, **settings, **with_store(tmp_path / "store")) == (want, 0)
    assert serve(prompt, PARAMS, **settings, **with_store(tmp_path / "store")) == (want, 512)


@pytest.mark.parametrize("params", [PARAMS, SAMPLED], ids=["greedy", "sampled"])
def test_a_later_engine_loads_what_an_earlier_one_computed(
    prompts: list[list[int]], params: SamplingParams, tmp_path: Path
) -> None:
    want, _ = serve(prompts, params)
    assert serve(prompts, params, **with_store(tmp_path)) == (want, 0)
    assert serve(prompts, params, **with_store(tmp_path)) == (want, sum(map(whole_spans, LENGTHS)))
    store = FileStore(tmp_path)
    entry = store.get(store.keys()[0], named=True)
    assert entry is not None
    assert {name: data.size for name, data in entry.tensors.items()} == {
        "target.full": SPAN_TOKENS // 16 * PAGE_BYTES // 5 * 4,
        "draft": SPAN_TOKENS // 16 * PAGE_BYTES // 5,
    }


def test_chunks_and_concurrency_change_nothing(prompts: list[list[int]], expected: Results, tmp_path: Path) -> None:
    serve(prompts, PARAMS, **with_store(tmp_path))
    with stepped(max_num_batched_tokens=64, **with_store(tmp_path)) as engine:
        streams = [engine.add(request(str(i), prompt, PARAMS)) for i, prompt in enumerate(prompts)]
        while not all(stream.ended for stream in streams):
            engine.step()
        assert [outcome(stream) for stream in streams] == expected
        settle(engine)


def alter(directory: Path, change: Callable[[Mapping[str, ByteArray]], dict[str, ByteArray]]) -> None:
    store = FileStore(directory)
    for key in list(store.keys()):
        entry = store.get(key, named=True)
        assert entry is not None
        store.remove(key)
        store.put(change(entry.tensors), key=key)


@pytest.mark.parametrize("group", ["target.full", "draft"])
def test_every_group_comes_from_the_store(
    prompts: list[list[int]], expected: Results, tmp_path: Path, group: str
) -> None:
    """Wrong bytes show: the target's in tokens, the drafter's only in acceptance."""
    serve(prompts, PARAMS, **with_store(tmp_path))
    alter(tmp_path, lambda tensors: {**tensors, group: np.zeros_like(tensors[group])})
    results, _ = serve(prompts, PARAMS, **with_store(tmp_path))
    assert results != expected
    assert ([tokens for tokens, _ in results] == [tokens for tokens, _ in expected]) == (group == "draft")


def test_prompts_share_what_is_equal_and_no_more(prompts: list[list[int]], tmp_path: Path) -> None:
    prompt, other = prompts[-1], prompts[-2]
    serve([prompt, other[:256] + prompt[256:300]], PARAMS, **with_store(tmp_path))
    cases = [
        # The drafter's entry 255 was computed from token 256.
        (prompt[:256] + other[:100], 0),
        (prompt[:257] + other[:100], 256),
        (other[:1] + prompt[1:], 0),
        # Both spans are stored, but the second was computed after another first one.
        (other[:256] + prompt[256:], 256),
    ]
    tokens = [case for case, _ in cases]
    want, _ = serve(tokens, PARAMS, enable_prefix_caching=False)
    with stepped(**with_store(tmp_path)) as engine:
        for i, (case, loaded) in enumerate(cases):
            before = engine.core.metrics.num_loaded_tokens
            assert outcome(engine.run(str(i), case, PARAMS)) == want[i]
            assert engine.core.metrics.num_loaded_tokens - before == loaded
            settle(engine)


@pytest.mark.parametrize("settings", [{"block_size": 7}, {"speculative_config": None}, {"dtype": "float32"}], ids=str)
def test_another_model_or_layout_finds_nothing(
    prompts: list[list[int]], tmp_path: Path, settings: dict[str, Any]
) -> None:
    serve(prompts[-2:], PARAMS, **with_store(tmp_path))
    want, _ = serve(prompts[-2:], PARAMS, **settings)
    assert serve(prompts[-2:], PARAMS, **settings, **with_store(tmp_path)) == (want, 0)
    _, loaded = serve(prompts[-2:], PARAMS, **settings, **with_store(tmp_path))
    assert loaded > 0


def test_damaged_and_foreign_entries_are_computed_again(
    prompts: list[list[int]], expected: Results, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    serve(prompts[-1:], PARAMS, **with_store(tmp_path))
    for path in tmp_path.iterdir():
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    assert serve(prompts[-1:], PARAMS, **with_store(tmp_path)) == (expected[-1:], 0)
    assert "a stored prefix is computed again: entry" in caplog.text
    # The first entry was removed, and written again.
    assert serve(prompts[-1:], PARAMS, **with_store(tmp_path)) == (expected[-1:], SPAN_TOKENS)
    alter(tmp_path, lambda tensors: {"target.full": tensors["target.full"]})
    assert serve(prompts[-1:], PARAMS, **with_store(tmp_path)) == (expected[-1:], 0)


@pytest.mark.parametrize("link", [os.link, os.symlink, shutil.copy])
def test_an_entry_under_the_key_of_another_prompt_is_not_used(
    prompts: list[list[int]], expected: Results, tmp_path: Path, link: Callable[[Path, Path], object]
) -> None:
    """Its bytes are whole, but they are other tokens' KV."""
    store, kept = tmp_path / "store", tmp_path / "kept"
    kept.mkdir()
    serve(prompts, PARAMS, **with_store(store))
    paths = sorted(store.iterdir())
    assert len({path.stat().st_size for path in paths}) == 1
    for path in paths:
        path.rename(kept / path.name)
    for path, other in zip(paths, paths[1:] + paths[:1], strict=True):
        link(kept / other.name, path)
    results, loaded = serve(prompts, PARAMS, **with_store(store))
    assert results == expected
    assert loaded < serve(prompts, PARAMS, **with_store(store))[1], "all were computed again, and stored"


def test_a_store_that_is_full_costs_no_answer(
    prompts: list[list[int]], expected: Results, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = KVTransferConfig.parse({"prefix_store": f"file://{tmp_path}?max_bytes=2000"})
    assert serve(prompts, PARAMS, kv_transfer_config=config) == (expected, 0)
    assert "a prefix was not stored: " in caplog.text


@pytest.mark.parametrize("method", ["get", "put"])
def test_whatever_the_store_raises_costs_no_answer(
    prompts: list[list[int]],
    expected: Results,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
) -> None:
    def fail(*arguments: Any, **named: Any) -> None:
        raise MemoryError("too much")

    monkeypatch.setattr(FileStore, method, fail)
    with stepped(**with_store(tmp_path)) as engine:
        assert outcome(engine.run("a", prompts[-1], PARAMS)) == expected[-1]
        settle(engine)
        failures = engine.core.metrics.prefix_store_failures
        while not failures:
            engine.step()
        assert failures == {{"get": "read", "put": "write"}[method]: 1}
    assert "too much" in caplog.text


def test_a_small_pool_loads_what_it_has_room_for(prompts: list[list[int]], expected: Results, tmp_path: Path) -> None:
    serve(prompts, PARAMS, **with_store(tmp_path))
    with stepped(kv_cache_memory=48 * PAGE_BYTES, **with_store(tmp_path)) as engine:
        names = [i for i, prompt in enumerate(prompts) if len(prompt) < 600]
        streams = {i: engine.add(request(str(i), prompts[i], PARAMS)) for i in names}
        while not all(stream.ended for stream in streams.values()):
            engine.step()
        assert [outcome(stream) for stream in streams.values()] == [expected[i] for i in names]
        settle(engine)


def test_a_client_that_leaves_while_files_are_read_leaves_nothing(prompts: list[list[int]], tmp_path: Path) -> None:
    serve(prompts[-1:], PARAMS, **with_store(tmp_path))
    with stepped(**with_store(tmp_path)) as engine:
        stream = engine.add(request("a", prompts[-1], PARAMS))
        engine.core.abort("a")
        assert stream.finish_reason == "abort"
        while engine.core.metrics.num_loaded_tokens == 0:
            engine.step()
        assert not engine.step()
        assert engine.is_idle()
        assert engine.core.load().num_cached_pages > 0


def test_a_slow_disk_takes_no_more_than_a_quarter_of_the_pages(
    prompts: list[list[int]], expected: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, put = threading.Event(), FileStore.put

    def slow(*arguments: Any, **named: Any) -> str:
        assert go_on.wait(60)
        return put(*arguments, **named)

    monkeypatch.setattr(FileStore, "put", slow)
    with stepped(kv_cache_memory=80 * PAGE_BYTES, **with_store(tmp_path)) as engine:
        try:
            results = [outcome(engine.run(str(i), prompt, PARAMS)) for i, prompt in enumerate(prompts)]
            held = engine.core.load().num_referenced_pages
        finally:
            go_on.set()
        assert results == expected
        assert held == 2 * SPAN_TOKENS // 16  # one span of two groups
        settle(engine)
    assert len(FileStore(tmp_path).keys()) == 1


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_handoffs_after_a_restart(prompts: list[list[int]], expected: Results, tmp_path: Path, mode: Mode) -> None:
    store = with_store(tmp_path / "kv", kv_transport="local://")
    for restarted in (False, True):
        with pair(tmp_path, **store) as two:
            streams = [two.legs(str(i), prompt, PARAMS, mode)[1] for i, prompt in enumerate(prompts)]
            two.step_until(lambda: len(two.decode.core.requests) == 0)
            assert [outcome(stream) for stream in streams] == expected
            two.settle()
            loaded = [engine.core.metrics.num_loaded_tokens for engine in (two.prefill, two.decode)]
            assert loaded == [restarted * sum(map(whole_spans, LENGTHS))] * 2


def test_a_decode_engine_writes_nothing(prompts: list[list[int]], tmp_path: Path) -> None:
    """Not even when it computes a prompt: it may have started from received pages."""
    local = {"kv_transfer_config": KVTransferConfig(kv_transport="local://")}
    with pair(tmp_path, with_store(tmp_path / "kv", kv_transport="local://"), **local) as two:
        _, d = two.legs("a", prompts[-1], PARAMS, "push")
        two.step_until(lambda: d.ended)
        two.decode.run("b", prompts[-2], PARAMS)
        two.settle()
    assert list((tmp_path / "kv").iterdir()) == []


def test_sliding_windows_and_other_weights(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    window = {"sliding_window": 40, "max_position_embeddings": 1024}
    model, other = (str(checkpoint("mistral", seed=seed, **window)) for seed in (1, 2))
    prompt = [3 + i * i % 250 for i in range(560)]

    def ask(model: str, **settings: Any) -> tuple[list[int], int]:
        with LLM(model, batch_invariant=True, **settings) as llm:
            result = llm.generate([prompt], PARAMS)[0]
        return result.outputs[0].token_ids, result.num_cached_tokens

    tokens, _ = ask(model)
    assert ask(model, **with_store(tmp_path)) == (tokens, 0)
    assert ask(model, **with_store(tmp_path)) == (tokens, 512)
    assert ask(other, **with_store(tmp_path)) == ask(other)


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("shm", "kv_transfer_config.prefix_store: must be file:///DIRECTORY, got 'shm'"),
        ("/mnt/kv", "kv_transfer_config.prefix_store: must be file:///DIRECTORY, got '/mnt/kv'"),
        ("file:///mnt/kv?host=::1", "file has no option 'host'; known: path, max_bytes"),
        ("file:///proc/nothing", "cannot use the directory"),
    ],
)
def test_bad_settings_are_refused(uri: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        Stepped(kv_transfer_config=KVTransferConfig.parse({"prefix_store": uri}))


def test_an_engine_that_does_not_start_gives_its_memory_back(tmp_path: Path) -> None:
    def own() -> set[str]:
        files = {name for name in os.listdir("/dev/shm") if name.startswith(f"baton-{os.getpid()}-")}
        return files | {thread.name for thread in threading.enumerate() if thread.name.startswith("baton-shm")}

    before = own()
    transfer = KVTransferConfig.parse({"prefix_store": "file:///proc/nothing"})
    with pytest.raises(ConfigError, match="cannot use the directory"):
        Stepped(kv_transfer_config=transfer, ticket_key_file=str(tmp_path / "key"))
    assert own() == before


def test_it_needs_the_prefix_cache() -> None:
    transfer = KVTransferConfig.parse({"prefix_store": "file"})
    with pytest.raises(ConfigError, match="prefix_store: needs prefix caching"):
        EngineConfig(TARGET, enable_prefix_caching=False, kv_transfer_config=transfer).check()


def test_a_prefix_from_another_engine_and_what_follows_it_are_not_stored(tmp_path: Path) -> None:
    prompt = [3 + (7 * i + i * i) % 200 for i in range(600)]
    prefix = FileStore(tmp_path / "store")
    with pair(tmp_path, **with_store(tmp_path / "store", kv_transport="local://")) as two:
        two.decode.run("first", prompt[:400], PARAMS)
        moved = two.hand_back("back", prompt, "push")
        two.settle()
        assert moved.num_tokens == 399
        assert outcome(two.prefill.run("r", prompt, PARAMS)) is not None
        two.settle()
        assert two.prefill.streams["r"].num_cached == 384
        assert not list(prefix.keys())
        two.prefill.run("own", prompt[1:], PARAMS)
        two.settle()
        assert len(list(prefix.keys())) == 2
