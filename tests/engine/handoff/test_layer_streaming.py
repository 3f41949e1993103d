"""Layer streaming: the KV of a prompt is sent layer by layer while later layers are computed."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baton.engine.config import EngineConfig
from baton.engine.legs import layer_stream
from baton.engine.legs.layer_stream import LIMITS, LayerStream, StreamLimits
from baton.engine.runner import ModelRunner, TargetOutput
from baton.engine.step_plans import Written
from baton.errors import BatonError, ConfigError
from baton.handoff.agent.instance import InstanceAgent
from baton.handoff.agent.leg_events import LegEvent
from baton.handoff.protocol.events import Declared, LayersWithdrawn, LayersWritten
from baton.handoff.protocol.messages import AttemptKey
from baton.kernels.cpu.gemm.small_gemm import MAX_ROWS
from baton.models.fused_layers import BLOCK_ROWS
from testkit.engines import TARGET, Pair, Stepped, Stream, kv_of, pair, stepped
from testkit.layers import HAS_OWN_PRODUCTS, usual_quantization
from tests.engine.handoff.test_handoff_kinds import GREEDY, KINDS, SAMPLED, both_ways, prompt_of

NUM_LAYERS = 4  # of the demo target
LAYER_BYTES = 64 * 2 * 4 * 32 * 2  # of 64 tokens
OnReport = Callable[[int, Callable[[], None]], None]


@pytest.fixture(autouse=True)
def every_layer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Report every layer, however few bytes it has, and however few rows the forward."""
    monkeypatch.setattr(layer_stream, "LIMITS", StreamLimits(getattr(request, "param", 1), 0))


def copied(two: Pair, group: str = "target.full") -> int:
    """Bytes of a group that P has copied so far."""
    assert two.prefill.engine.agent is not None
    return two.prefill.engine.agent.stats().copies.bytes[group]


def in_forwards(two: Pair, monkeypatch: pytest.MonkeyPatch, do: OnReport, do_rows: OnReport | None = None) -> None:
    """In P's forwards, call `do(layer, go_on)` after the write of each layer; `go_on` reports it to the engine.
    `do_rows`: the same for numbers of rows."""
    forward = ModelRunner.forward

    def watched(runner: ModelRunner, rows: Any, written: Any = None) -> TargetOutput:
        if written is None:
            return forward(runner, rows)

        def tell_rows(rows: int) -> None:
            if do_rows is not None:
                do_rows(rows, lambda: written.tell_rows(rows))

        told = Written(lambda layer_id: do(layer_id, lambda: written(layer_id)), tell_rows, written.at_once)
        return forward(runner, rows, told)

    monkeypatch.setattr(ModelRunner, "forward", watched)


def await_copies(two: Pair, more_than: int) -> None:
    """Let D register its pages, and wait until P has copied more."""
    two.decode_until(lambda: copied(two) > more_than)


def handed_over(two: Pair, name: str, prompt: list[int]) -> Stream:
    told, rest = two.legs(name, prompt, GREEDY, "push")
    two.step_until(lambda: told.ended and rest.ended)
    two.settle()
    return rest


@pytest.mark.parametrize("kind", ["eagle3", "mixed"])
def test_tokens_and_acceptance_are_those_of_one_engine(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With several chunks, unequal page sizes, prefix hits on P and D, and digests of everything."""
    told: list[int] = []
    stream = InstanceAgent.stream_layers

    def heard(agent: InstanceAgent, key: AttemptKey, event: LayersWritten | LayersWithdrawn) -> None:
        assert isinstance(event, LayersWritten)
        told.append(event.layers)
        stream(agent, key, event)

    monkeypatch.setattr(InstanceAgent, "stream_layers", heard)
    settings = KINDS[kind](tmp_path)
    sizes: dict[str, Any] = {"block_size": 7, "decode": {"block_size": 16}, "max_num_batched_tokens": 32}
    with stepped(**settings) as one, pair(tmp_path, kv_stream="layer", integrity="full", **sizes, **settings) as two:
        both_ways(one, two, [1, 15, 33, 64, 70], GREEDY, "push")
        both_ways(one, two, [33, 70, 90], SAMPLED, "push")
        num_told = len(told)
        both_ways(one, two, [80], SAMPLED, "pull")
        assert len(told) == num_told > max(told) > 1
        assert two.prefill.engine.agent is not None
        assert two.prefill.engine.agent.stats().repairs == 0


def test_layers_are_copied_while_later_ones_are_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer when it is written, and only once."""
    seen: list[int] = []
    with pair(tmp_path, kv_stream="layer") as two:

        def do(layer_id: int, tell: Callable[[], None]) -> None:
            tell()
            await_copies(two, seen[-1] if seen else 0)
            seen.append(copied(two))

        in_forwards(two, monkeypatch, do)
        handed_over(two, "one", prompt_of(64))
        assert seen == [seen[0] * (layer + 1) for layer in range(NUM_LAYERS)]
        assert copied(two) == seen[-1]


@pytest.mark.parametrize("every_layer", [3 * LAYER_BYTES], indirect=True)
def test_the_last_layers_are_copied_before_the_first_token_is_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However few bytes they have: D would wait for them."""
    seen: list[int] = []
    with pair(tmp_path, kv_stream="layer") as two:

        def do(layer_id: int, tell: Callable[[], None]) -> None:
            tell()
            if layer_id >= 2:
                await_copies(two, seen[-1])
            seen.append(copied(two))

        in_forwards(two, monkeypatch, do)
        handed_over(two, "in two parts", prompt_of(64))
    assert seen == [0, 0, 3 * LAYER_BYTES, 4 * LAYER_BYTES]


def test_the_last_chunk_is_copied_before_the_first_token_is_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without streaming by layer: all layers but the last one before it is computed, then the last one."""
    seen: list[int] = []
    with pair(tmp_path, kv_stream="chunk", max_num_batched_tokens=64) as two:

        def do(layer_id: int, tell: Callable[[], None]) -> None:
            tell()
            await_copies(two, LAYER_BYTES * NUM_LAYERS - 1 if layer_id < NUM_LAYERS - 2 else seen[-1])
            seen.append(copied(two))

        in_forwards(two, monkeypatch, do)
        handed_over(two, "two chunks", prompt_of(128))
    chunk = LAYER_BYTES * NUM_LAYERS
    assert seen == [*[chunk] * (NUM_LAYERS - 2), 2 * chunk - LAYER_BYTES, 2 * chunk]


@pytest.mark.skipif(not HAS_OWN_PRODUCTS, reason="no products of bfloat16 of our own")
def test_rows_are_copied_in_all_layers_while_later_rows_are_computed(
    checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first block of a last chunk, when it has run through all layers."""
    model = str(checkpoint("llama", torch_dtype="bfloat16", intermediate_size=192))
    quantization = usual_quantization()
    settings = {"model": model, "speculative_config": None, "batch_invariant": False, "quantization": quantization}
    seen: list[int] = []
    prompt = prompt_of(BLOCK_ROWS + 76)
    with stepped(**settings) as one, pair(tmp_path, integrity="full", **settings) as two:

        def do_rows(num_rows: int, tell: Callable[[], None]) -> None:
            tell()
            await_copies(two, 0)
            seen.append(copied(two))

        in_forwards(two, monkeypatch, lambda _, tell: tell(), do_rows)
        assert handed_over(two, "long", prompt).result == one.run("one", prompt, GREEDY).result
        assert two.prefill.engine.agent is not None
        assert two.prefill.engine.agent.stats().repairs == 0
        assert seen == [copied(two) // len(prompt) * BLOCK_ROWS]


def test_a_layer_that_is_told_before_it_is_written_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutation `layer_not_written`: without digests D continues with wrong KV, with them the layer is copied again."""
    prompt = prompt_of(64)
    with stepped() as one:
        expected = one.run("one", prompt, GREEDY).result
    written = LayerStream._written
    monkeypatch.setattr(LayerStream, "_written", lambda self, layer_id: written(self, layer_id + 1))
    for integrity in ("off", "full"):
        with pair(tmp_path, kv_stream="layer", integrity=integrity) as two, monkeypatch.context() as patched:

            def do(layer_id: int, tell: Callable[[], None], two: Pair = two) -> None:
                before = copied(two)
                tell()
                if layer_id + 1 < NUM_LAYERS:
                    await_copies(two, before)

            in_forwards(two, patched, do)
            rest = handed_over(two, integrity, prompt)
            assert two.prefill.engine.agent is not None
            assert (two.prefill.engine.agent.stats().repairs > 0) is (integrity == "full")
            assert (rest.result == expected) is (integrity == "full")


@pytest.mark.parametrize("withdraws", [True, False])
def test_layers_of_a_forward_that_failed_are_copied_again(
    withdraws: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failed forward's output is invalid; without a withdrawal D would keep it."""
    prompts = [prompt_of(64), prompt_of(70)]
    with stepped() as one:
        expected = [one.run(str(i), prompt, GREEDY).result for i, prompt in enumerate(prompts)]
    failed: list[bool] = []
    if not withdraws:
        monkeypatch.setattr(LayerStream, "withdraw", lambda self: None)
    with pair(tmp_path, kv_stream="layer") as two:

        def do(layer_id: int, tell: Callable[[], None]) -> None:
            if not failed:
                kv_of(two.prefill)["target.full"][:, 0] += 3.0
            tell()
            if not failed:
                two.decode_until(lambda: len(two.decode.core.scheduler.receiving) == len(prompts))
                await_copies(two, 0)
                failed.append(True)
                raise BatonError("on purpose")

        in_forwards(two, monkeypatch, do)
        legs = [two.legs(str(i), prompt, GREEDY, "push") for i, prompt in enumerate(prompts)]
        two.step_until(lambda: all(told.ended and rest.ended for told, rest in legs))
        two.settle()
        assert failed
        assert two.decode.core.metrics.num_handoffs["committed"] == len(prompts)
        assert ([rest.result for _, rest in legs] == expected) is withdraws


def test_a_client_that_leaves_between_two_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Client of D or of P: every page is freed, and the next prompt is computed correctly."""
    prompt = prompt_of(64)
    with stepped() as one, pair(tmp_path, kv_stream="layer", enable_prefix_caching=False) as two:
        sides: dict[str, Stepped] = {"d": two.decode, "p": two.prefill}
        for name, side in sides.items():
            with monkeypatch.context() as patched:

                def do(layer_id: int, tell: Callable[[], None], name: str = name, side: Stepped = side) -> None:
                    tell()
                    if layer_id == 1:
                        await_copies(two, 0)
                        side.core.post(lambda: side.core.abort(name))
                        two.decode.core.drain()
                    time.sleep(0.005)

                in_forwards(two, patched, do)
                two.legs(name, prompt, GREEDY, "push")
                two.step_until(lambda name=name: two.decode.streams[name].ended)  # type: ignore[misc]
                two.settle()
            if name == "d":
                assert not two.decode.core.metrics.num_handoffs["committed"]
        assert handed_over(two, "next", prompt).result == one.run("next", prompt, GREEDY).result


@pytest.mark.parametrize(("kv_stream", "num_declared"), [("off", 1), ("chunk", 3)])
def test_off_declares_nothing_before_the_prompt_is_computed(
    kv_stream: str, num_declared: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is not declared is not copied."""
    finals: list[dict[str, int]] = []
    post = InstanceAgent.post

    def posted(agent: InstanceAgent, key: AttemptKey, event: LegEvent) -> None:
        if isinstance(event, Declared):
            finals.append(event.final)
        post(agent, key, event)

    monkeypatch.setattr(InstanceAgent, "post", posted)
    with pair(tmp_path, kv_stream=kv_stream, max_num_batched_tokens=32) as two, stepped() as one:
        rest = handed_over(two, "one", prompt_of(96))
        assert len(finals) == num_declared
        assert finals[-1]["target.full"] == 96
        assert rest.result == one.run("one", prompt_of(96), GREEDY).result


def test_only_a_long_chunk_that_is_pushed_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No other forward gets a callback, which would keep few rows from running through all layers in one call."""
    monkeypatch.setattr(layer_stream, "LIMITS", StreamLimits(1 << 16, LIMITS.few_rows))
    assert LIMITS.few_rows == MAX_ROWS
    given: list[bool] = []
    forward = ModelRunner.forward

    def noted(runner: ModelRunner, rows: Any, written: Any = None) -> TargetOutput:
        given.append(written is not None)
        return forward(runner, rows, written)

    monkeypatch.setattr(ModelRunner, "forward", noted)
    with pair(tmp_path, kv_stream="layer") as two:
        for length in (16, 64):
            handed_over(two, f"{length}", prompt_of(length))
        told, rest = two.legs("pulled", prompt_of(200), GREEDY, "pull")
        two.step_until(lambda: told.ended and rest.ended)
        assert not any(given)
        handed_over(two, "long", prompt_of(300))
        assert given.count(True) == 1


@pytest.mark.parametrize(("setting", "device"), [("token", "cpu"), ("layer", "cuda")])
def test_settings_that_are_not_supported_are_named(setting: Any, device: str) -> None:
    with pytest.raises(ConfigError, match="kv_stream"):
        EngineConfig(model=TARGET, kv_stream=setting, device=device).check()
