"""A closed engine keeps no memory: neither pages nor weights wait for the garbage collector."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.engine.build import Engine
from baton.engine.config import KVTransferConfig
from baton.engine.executor import LocalExecutor
from baton.engine.llm import LLM
from baton.sampling_params import SamplingParams
from testkit.engines import pair
from testkit.inside import engine_of

PARAMS = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)


@pytest.fixture
def no_garbage_collector() -> Iterator[None]:
    gc.collect()  # engines of earlier tests
    gc.disable()
    yield
    gc.enable()


def held(engine: Engine) -> dict[str, weakref.ref[Any]]:
    """Weak references to the largest parts of an engine's memory."""
    executor = engine.core.executor
    assert isinstance(executor, LocalExecutor)
    runner = executor.runner
    found = {name: weakref.ref(memory.pages) for name, memory in runner.kv.items()}
    assert found
    return found | {"weights": weakref.ref(runner.model), "drafter": weakref.ref(runner.drafter or runner.model)}


def left(refs: dict[str, weakref.ref[Any]]) -> list[str]:
    return [name for name, ref in refs.items() if ref() is not None]


def test_a_closed_llm_frees_its_memory_and_keeps_its_metrics(
    no_garbage_collector: None, checkpoint: Callable[..., Path]
) -> None:
    llm = LLM(str(checkpoint("qwen3")), kv_cache_memory=1 << 20, skip_tokenizer_init=True)
    refs = held(engine_of(llm))
    llm.generate([1, 2, 3], PARAMS)
    assert left(refs) == [*refs]
    llm.close()
    assert left(refs) == []
    assert llm.metrics.num_generation_tokens == 3


def test_engines_of_a_handoff(no_garbage_collector: None, tmp_path: Path) -> None:
    config = KVTransferConfig.parse({"kv_transport": "shm://", "prefix_store": f"file://{tmp_path}/store"})
    with pair(tmp_path, kv_transfer_config=config, kv_stream="layer", kv_cache_memory=32 << 20) as two:
        refs = [held(two.prefill.engine), held(two.decode.engine)]
        legs = two.legs("a", list(range(300)), PARAMS, "push")
        two.step_until(lambda: all(leg.ended for leg in legs))
        assert [leg.error for leg in legs] == [None, None]
        assert "/dev/shm/baton-" in mapped()
    assert [left(one) for one in refs] == [[], []]
    assert "/dev/shm/baton-" not in mapped()


def mapped() -> str:
    return Path("/proc/self/maps").read_text()
