"""Engine processes with different drafters, behind a router: the answers are those of one engine without a drafter."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from typing import Any

import pytest

from baton.deployment import Deployment
from baton.errors import EngineUnavailableError
from baton.openai.client import connected_client
from baton.sampling_params import SamplingParams
from baton.text import Tokenizer
from baton.verify.observe import REQUEST_TIMEOUT_S, Case, Observed, make_cases, observe_client
from baton.verify.sides import EngineSide

TARGET = "models/baton-demo-llama"
EAGLE3 = {"method": "eagle3", "model": "models/baton-demo-eagle3", "num_speculative_tokens": 3, "draft_kv": "prefer"}
FLAGS = ["--batch-invariant", "--recovery", "none", "--no-enable-prefix-caching"]
pytestmark = pytest.mark.usefixtures("forks")


def speculative(**changed: Any) -> list[str]:
    return ["--speculative-config", json.dumps({**EAGLE3, **changed})]


async def ask(url: str, cases: list[Case]) -> list[Observed]:
    async with connected_client(url, REQUEST_TIMEOUT_S) as client:
        return await observe_client(client, "baton-demo-llama", cases, 4)


@pytest.mark.slow
def test_processes_that_draft_unlike_each_other_give_one_engines_tokens() -> None:
    params = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
    cases = make_cases(Tokenizer.load(TARGET), [1, 2, 16, 17, 48, 100], params)
    expected = EngineSide({"model": TARGET, "batch_invariant": True}).answers(cases).observed
    for on_p in ([], speculative(num_speculative_tokens=0), speculative(draft_kv="drop")):
        roles = {"prefill": on_p, "decode": speculative()}
        with Deployment(TARGET, engine_flags=FLAGS, role_flags=roles) as up:
            have = asyncio.run(ask(up.url, cases))
            with urllib.request.urlopen(f"{up.url}/status", timeout=60) as response:
                handoffs = json.load(response)["handoffs"]
        assert [observed.token_ids for observed in have] == [observed.token_ids for observed in expected]
        assert sum(sum(observed.accepted or ()) for observed in have) > 0
        assert handoffs["completed"] == len(cases), handoffs
        assert handoffs["failures"] == {}


@pytest.mark.slow
def test_a_router_refuses_engines_of_which_one_requires_what_the_other_lacks() -> None:
    roles = {"decode": speculative(draft_kv="require")}
    with pytest.raises(EngineUnavailableError, match=r"drafter\.method"):
        Deployment(TARGET, engine_flags=FLAGS, role_flags=roles)
