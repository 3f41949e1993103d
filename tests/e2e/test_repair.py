"""Real engines with digests on: a flipped byte is detected, named in D's log, and repaired; the answer is exact."""

from __future__ import annotations

import asyncio
import json
import re

import aiohttp
import pytest

from baton.bench.timed_stream import stream_completion
from baton.sampling_params import SamplingParams
from baton.text import Tokenizer
from baton.verify.observe import Case, make_cases
from baton.verify.sides import EngineSide
from benchmarks.deployment import BreakableDeployment
from benchmarks.scrape import scrape

TARGET = "models/baton-demo-llama"
EAGLE3 = {"method": "eagle3", "model": "models/baton-demo-eagle3", "num_speculative_tokens": 3}
PARAMS = SamplingParams(max_tokens=24, temperature=0.0)
LENGTHS = [17, 32, 40, 63, 64, 65, 90, 130]
pytestmark = pytest.mark.usefixtures("forks")


async def ask(url: str, cases: list[Case], mode: str) -> list[tuple[int, ...]]:
    async with aiohttp.ClientSession() as session:
        answers = []
        for case in cases:
            # In each mode all prompts are handed over, because the salt differs.
            body = {"prompt": list(case.prompt_token_ids), "max_tokens": PARAMS.max_tokens, "temperature": 0.0}
            body |= {"seed": 0, "kv_mode": mode, "cache_salt": mode}
            answers.append(tuple((await stream_completion(session, url, body)).token_ids))
        return answers


async def figure(url: str, name: str, **labels: str) -> float:
    async with aiohttp.ClientSession() as session:
        return sum(await scrape(session, url, name, **labels))


@pytest.mark.parametrize(("region", "group"), [(0, "target.full"), (1, "draft")])
def test_a_flipped_byte_is_found_named_and_repaired(region: int, group: str) -> None:
    engine = {"model": TARGET, "speculative_config": EAGLE3, "batch_invariant": True}
    cases = make_cases(Tokenizer.load(TARGET), LENGTHS, PARAMS)
    want = [observed.token_ids for observed in EngineSide(engine).answers(cases).observed]
    flags = ["--batch-invariant", "--speculative-config", json.dumps(EAGLE3), "--integrity", "full"]
    # Every fifth copy of the group, so that a repair's copy is good, and never three handoffs in a row need one.
    flags += [
        "--kv-transfer-config",
        json.dumps({"kv_transport": f"faulty+shm://?fault=corrupt&region={region}&every=5"}),
    ]
    found = 0.0
    with BreakableDeployment(TARGET, engine_flags=flags, router_flags=["--allow-mode-override"]) as deployment:
        decode = deployment.decode_urls[0]
        for mode in ("push", "pull"):
            assert asyncio.run(ask(deployment.url, cases, mode)) == want, mode
            bad = asyncio.run(figure(decode, "baton:integrity_bad_pieces"))
            assert bad >= found + 2, mode
            found = bad
        assert asyncio.run(figure(decode, "baton:recoveries", rung="recompute")) == 0
        log = deployment.log("decode-0")
    named = re.findall(r"rank 0, group ([\w.]+), layers \[[\d, ]+\], tokens \[\d+, \d+\) do not match", log)
    assert set(named) == {group}
    assert len(named) >= found
