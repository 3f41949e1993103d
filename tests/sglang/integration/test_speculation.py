"""Drafters through the handoff: tokens, and how many drafts are accepted, are those of one SGLang."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

import pytest

from baton.wire import Mode
from testkit.sglang.drafts import compare, draft_flags, drafter, one_answer
from testkit.sglang.launch import ROOT
from testkit.sglang.residues import leave, verify
from testkit.sglang.servers import Config, Pair, Server, check_whole, demo_prompts, pair_configs, serve, ticket_key

pytestmark = pytest.mark.timeout(600)
NUM = 40
LENGTHS = [5, 16, 17, 33, 64, 90]
NUM_LEAVING = 30
# A file; while it exists, D does not ask for the drafter's last entry (`support/sgl_kernel/plugin.py`).
FAULT = "boundary"


@dataclass(frozen=True, slots=True)
class Method:
    """`head`: None if it is in the target's checkpoint. `pages`: the page sizes of P and D."""

    algorithm: str
    target: str
    head: str | None
    pages: tuple[int, int] = (1, 1)


METHODS = {
    "EAGLE-3": Method("EAGLE3", "baton-demo-llama", "baton-demo-eagle3", (16, 1)),
    "EAGLE": Method("EAGLE", "baton-demo-llama", "baton-demo-eagle", (1, 16)),
    "MTP over latents": Method("NEXTN", "baton-demo-deepseek", None),
    "EAGLE-3 over latents": Method("EAGLE3", "baton-demo-deepseek", "baton-demo-deepseek-eagle3", (16, 1)),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("speculation")


@pytest.fixture(scope="module", params=METHODS.values(), ids=METHODS)
def method(request: pytest.FixtureRequest) -> Method:
    found: Method = request.param
    return found


@pytest.fixture(scope="module")
def servers(folder: Path, method: Method) -> Iterator[tuple[Pair, Server]]:
    flags = draft_flags(method.algorithm, None if method.head is None else drafter(folder, method.head))
    flags += ["--chunked-prefill-size", "64"]
    pages = [["--page-size", str(size)] for size in method.pages]
    prefill, decode = pair_configs(folder, pages[0], [*pages[1], "--disaggregation-decode-enable-radix-cache"], flags)
    decode = replace(decode, environment={"BATON_TEST_FAULT": str(folder / FAULT)})
    with serve(folder, [prefill, decode, Config("one", flags)], ROOT / "models" / method.target) as (p, d, one):
        yield Pair(p, d, ticket_key(folder)), one


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_a_drafter_goes_on_as_on_one_server(servers: tuple[Pair, Server], mode: Mode) -> None:
    """Field classes B and C."""
    (pair, one), found = servers, demo_prompts(LENGTHS, seed=1 if mode == "push" else 2)
    known = asyncio.run(one_answer(one, found, NUM))

    def check(hits: str) -> int:
        before = pair.decode.counts().get("bytes", 0)
        compared = asyncio.run(compare(pair, known, mode, found, NUM))
        print(f"{mode}, {hits}: {compared}")
        assert not compared.differing
        assert compared.accepted[0] > 0, "no draft was accepted, so equal figures would prove nothing"
        return pair.decode.counts()["bytes"] - before

    moved = check("no hits")
    assert check("hits on both") < moved / 2


def test_a_drafters_entry_that_is_not_sent_is_found(servers: tuple[Pair, Server], folder: Path) -> None:
    """Field class B: tokens are right whatever the drafter knows, so that only acceptance tells. D must not have the
    entry from an earlier handoff, so the prompts are new."""
    (pair, one), found = servers, demo_prompts(LENGTHS, seed=3)
    known = asyncio.run(one_answer(one, found, NUM))
    (folder / FAULT).touch()
    try:
        compared = asyncio.run(compare(pair, known, "push", found, NUM))
    finally:
        (folder / FAULT).unlink()
    print(f"without the last entry: {compared}")
    assert compared.differing


def test_clients_that_leave_change_no_other_answer(servers: tuple[Pair, Server]) -> None:
    """Field classes F and K: the pages of drafts go back too."""
    (pair, one), found = servers, demo_prompts(LENGTHS, seed=4)
    answers = asyncio.run(one_answer(one, found, NUM))
    known = [(prompt, answer["output_ids"]) for prompt, answer in zip(found, answers, strict=True)]
    exact, left, wrong = asyncio.run(leave(pair, known, [pair.minter(mode) for mode in get_args(Mode)], NUM_LEAVING))
    print(f"{exact} exact, {left} left by their clients")
    assert not wrong
    assert min(exact, left) > 0
    check_whole(pair.prefill, pair.decode)


def test_verify_finds_no_difference(servers: tuple[Pair, Server], method: Method) -> None:
    """Through a router, which continues a stream of the prefill server's first token."""
    pair, one = servers
    lengths = ",".join(map(str, LENGTHS))
    assert asyncio.run(verify(pair, one, "--lengths", lengths, model=ROOT / "models" / method.target)) == 0
