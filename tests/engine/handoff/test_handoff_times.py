"""What engines tell of a leg for its trace: each forward over the prompt, and when the bytes of its handoff came."""

from __future__ import annotations

from pathlib import Path

from baton.engine.core import EngineCore
from baton.engine.request import Request
from baton.sampling_params import SamplingParams
from baton.wire import LegTimings, TokenChunk
from testkit.engines import Mode, Stream, pair


def test_a_handoff_tells_when_its_bytes_came(tmp_path: Path) -> None:
    params, prompt = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True), list(range(10, 110))
    with pair(tmp_path, max_num_batched_tokens=32, integrity="sampled", enable_prefix_caching=False) as both:
        modes: tuple[Mode, ...] = ("push", "pull")
        legs = {mode: both.legs(mode, prompt, params, mode, timings=True) for mode in modes}
        both.settle()
    for mode, (prefill, decode) in legs.items():
        told = _timings(prefill)
        assert len(told.chunks) > 2, "two prompts of 100 tokens in steps of 32"
        assert sum(count for _, count in told.chunks) == len(prompt)
        begins = [began for began, _ in told.chunks]
        assert begins == sorted(begins)
        assert told.started is not None
        assert told.sampled is not None
        assert told.started <= begins[0] < begins[-1] < told.sampled
        told = _timings(decode)
        names = ("announced", "admitted", "registered", "first_bytes", "last_bytes", "committed")
        times = [getattr(told, name) for name in names]
        assert None not in times, (mode, times)
        assert times == sorted(times), (mode, times)
        assert told.integrity == "sampled"
        assert told.num_bytes > 0


def _timings(stream: Stream) -> LegTimings:
    (told,) = [chunk.timings for chunk in stream.chunks if chunk.timings is not None]
    return told


def test_both_engines_give_way_after_their_first_step_alone(tmp_path: Path) -> None:
    """P before D may begin, whose step would take the cores from P's loop, and D before its next step is planned."""
    order: list[object] = []
    with pair(tmp_path, speculative_config=None) as two:
        for side, name in ((two.prefill, "P"), (two.decode, "D")):
            _note(side.core, name, order)
        _, rest = two.legs("one", [1, 2, 3], SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True), "push")
        two.step_until(lambda: rest.ended)
    on_p = ["P sends 0", "P gives way", "P declares"]
    assert order == [*on_p, "D sends 0", "D gives way", "D sends 2", "D sends 3"], "D's first chunk has two tokens"


def _note(core: EngineCore, name: str, order: list[object]) -> None:
    steps, legs = core.steps, core.legs
    assert legs is not None
    emit, declare = steps.emit, legs.declare

    def noted(chunk: TokenChunk, last: bool) -> None:
        if chunk.token_ids:
            order.append(f"{name} sends {chunk.position}")
        emit(chunk, last)

    def declared(request: Request) -> None:
        order.append(f"{name} declares")
        declare(request)

    steps.emit, steps.after_first = noted, lambda: order.append(f"{name} gives way")
    legs.declare = declared  # type: ignore[method-assign]
