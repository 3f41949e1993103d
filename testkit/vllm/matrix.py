"""`python -m testkit.vllm.matrix`: what real vLLM servers with `BatonConnector` hand over: models with drafters by
parallel ranks, by push and by pull. Needs vLLM's environment (`tools/install_vllm.py`).

Prints a table. A cell counts the requests with the tokens of one vLLM, and after `d` those with its accepted drafts in
each verification. `t`: tokens part at a near-tie of the reference (`testkit.vllm.answers.NEAR_TIE`). What vLLM cannot
do itself has its own error instead. The status is 1 if any other cell is incomplete.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from testkit.vllm.answers import Answer, same, same_acceptance
from testkit.vllm.checks import alone_in_turn, leave_at_random
from testkit.vllm.limits.outcomes import RIGHT, limits_of
from testkit.vllm.matrix_models import DATA, LIMITS, MODELS, RANKS, TENSOR, Model
from testkit.vllm.quiet import small_servers
from testkit.vllm.servers import Mode, Pair, Server, ask, demo_prompts, handoff, outcomes, request, serve, wait_idle

MODES: tuple[Mode, ...] = ("push", "pull")
LEASE_S = 15.0
NUM_TOKENS = 20
COLUMNS = ("residues", "chunks", "hits", "aborts", "preempted")


@dataclass(slots=True)
class Cell:
    """`other_drafts` None: drafts were not compared. `note` is shown with the counts; without requests, alone."""

    right: int = 0
    total: int = 0
    ties: int = 0
    other_drafts: int | None = None
    note: str = ""
    wrong: list[str] = field(default_factory=list)

    @property
    def whole(self) -> bool:
        return self.right + self.ties == self.total and not self.wrong

    def __str__(self) -> str:
        if not self.total:
            return self.note
        ties = f" {self.ties}t" if self.ties else ""
        drafts = "" if self.other_drafts is None else f" d{self.total - self.other_drafts}/{self.total}"
        return f"{self.right}/{self.total}{ties}{drafts}" + (f" ({self.note})" if self.note else "")

    def count(self, found: Answer, want: Answer, num_drafts: int | None = None) -> None:
        """Compare an answer with one vLLM's; with `num_drafts`, its verifications too."""
        verdict = same(found, want)
        self.total += 1
        self.right += verdict is True
        self.ties += verdict is None
        if verdict is False:
            self.wrong.append(f"{found} instead of {want}")
        if num_drafts is not None:
            self.other_drafts = (self.other_drafts or 0) + (not same_acceptance(found, want, num_drafts))


class Expected:
    """One vLLM's answers, each asked once."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._known: dict[tuple[tuple[int, ...], int], Answer] = {}

    def of(self, prompts: Sequence[Sequence[int]], num: int) -> list[Answer]:
        keys = [(tuple(prompt), num) for prompt in prompts]
        new = [key for key in dict.fromkeys(keys) if key not in self._known]
        self._known |= dict(
            zip(new, asyncio.run(alone_in_turn(self._server, [key[0] for key in new], num)), strict=True)
        )
        return [self._known[key] for key in keys]


def in_turn(pair: Pair, expected: Expected, lengths: Sequence[int], mode: Mode, salt: str) -> Cell:
    """Hand over prompts one after the other, each with blocks of its own. Sums of several ranks may change a draft in a
    hundred (vLLM tells no margins of drafts); one rank's change none.
    """
    cell, prompts = Cell(), demo_prompts(lengths, seed=61)
    wanted, before = expected.of(prompts, NUM_TOKENS), outcomes(pair.decode)

    async def run() -> None:
        async with aiohttp.ClientSession() as session:
            for prompt, want in zip(prompts, wanted, strict=True):
                _, found = await handoff(session, pair, prompt, NUM_TOKENS, mode, salt=salt)
                cell.count(found, want, pair.decode.identity["num_speculative_tokens"])

    asyncio.run(run())
    wait_idle(pair.prefill, pair.decode)
    if (ends := outcomes(pair.decode, before)) != {"committed": len(prompts)}:
        cell.wrong.append(f"handoffs ended as {ends}")
    workers = [len(server.identity["control_addresses"]) for server in (pair.prefill, pair.decode)]
    alone = workers == [1, 1] and pair.decode.rank is None
    if (cell.other_drafts or 0) > (0 if alone else len(prompts) // 10):
        cell.wrong.append(f"{cell.other_drafts} answers have other accepted drafts")
    if sum(sum(want.accepted) for want in wanted) < len(prompts):
        cell.wrong.append("the drafter is right too rarely to prove anything")
    return cell


def hits(pair: Pair, expected: Expected, mode: Mode, salt: str, primed: bool) -> Cell:
    """Prompts with a prefix hit on the decode server, of a part or of all but the last token, legs in any order.
    `primed`: it has answered one of them by itself.
    """
    rng, cell, name = random.Random(11), Cell(), "vllm:prefix_cache_hits_total"
    (base,) = demo_prompts([400], seed=12)
    cases: list[tuple[list[int], float]] = [
        (base[:cut] + [rng.randrange(3, 2000) for _ in range(tail)], 0.0) for cut in (64, 399) for tail in (1, 40)
    ]
    cases += [([*base, rng.randrange(3, 2000)], late) for late in (-0.3, 0.3)] + [(base, 0.0), (base, 0.0)]
    wanted = expected.of([prompt for prompt, _ in cases], NUM_TOKENS)
    before = pair.decode.metrics(name)[name]

    async def run() -> None:
        async with aiohttp.ClientSession() as session:
            if primed:
                await ask(session, pair.decode, request(base, 70, cache_salt=salt))
            for (prompt, late), want in zip(cases, wanted, strict=True):
                cell.count((await handoff(session, pair, prompt, NUM_TOKENS, mode, late, salt))[1], want)

    asyncio.run(run())
    wait_idle(pair.prefill, pair.decode)
    cell.note = f"{pair.decode.metrics(name)[name] - before:.0f} tokens hit"
    if pair.decode.metrics(name)[name] == before:
        cell.wrong.append("nothing was hit")
    return cell


def aborts(pair: Pair, mode: Mode) -> Cell:
    """Clients of both legs leave at random moments. Raises AssertionError if a block is held afterwards."""
    leave_at_random([pair], 12, 4, 700, [mode])
    return Cell(12, 12)


def preempted(pair: Pair, expected: Expected, lengths: Sequence[int], mode: Mode, salt: str) -> Cell:
    """More requests at once than their pools hold, at P and at D."""
    cell, prompts, num = Cell(), demo_prompts(lengths, seed=41), 60
    wanted, name = expected.of(prompts, num), "vllm:num_preemptions_total"
    before = [server.metrics(name)[name] for server in (pair.prefill, pair.decode)]

    async def run() -> None:
        async with aiohttp.ClientSession() as session:
            legs = [handoff(session, pair, prompt, num, mode, salt=salt) for prompt in prompts]
            for (_, found), want in zip(await asyncio.gather(*legs), wanted, strict=True):
                cell.count(found, want)

    asyncio.run(run())
    wait_idle(pair.prefill, pair.decode)
    counts = [
        server.metrics(name)[name] - then for server, then in zip((pair.prefill, pair.decode), before, strict=True)
    ]
    cell.note = "P {:.0f}, D {:.0f} times".format(*counts)
    if not any(counts):
        cell.wrong.append("nothing was preempted")
    return cell


def cells(model: Model, pair: Pair, expected: Expected, mode: Mode, salt: str) -> dict[str, Cell]:
    """A row of the table."""
    return {
        "residues": in_turn(pair, expected, model.residues, mode, f"{salt} residues"),
        "chunks": in_turn(pair, expected, model.chunks, mode, f"{salt} chunks")
        if model.chunks
        else Cell(note=model.no_chunks),
        "hits": Cell(note=model.no_hits) if model.no_hits else hits(pair, expected, mode, f"{salt} hits", model.primed),
        "aborts": aborts(pair, mode),
        "preempted": preempted(pair, expected, model.crowd, mode, f"{salt} crowd"),
    }


def fleet_of(model: Model, ranks: Sequence[str]) -> list[tuple[str, str, Sequence[str]]]:
    """The servers that `ranks` need."""
    own = {"ONE": [], "OTHER": [], "TWO": TENSOR, "DATA": DATA}
    needed = {"ONE", *("DATA" if name in ("ZERO", "FIRST") else name for each in ranks for name in RANKS[each])}
    return [(name, "kv_both", [*model.flags, *more]) for name, more in own.items() if name in needed]


def run_model(name: str, folder: Path, ranks: Sequence[str]) -> list[tuple[str, str, dict[str, Cell]]]:
    """The rows of a model."""
    model, rows = MODELS[name], []
    ranks = [which for which in ranks if model.experts or "DP" not in which]
    model.make(folder / "model")
    spec = model.spec_in(folder / "model")
    hooks = {"DATA": "collectives.Gathering"}
    with serve(folder, fleet_of(model, ranks), {"lease": LEASE_S}, spec, folder / "model", hooks=hooks) as found:
        servers = {server.name: server for server in found}
        if "DATA" in servers:
            servers |= {"ZERO": servers["DATA"].of_rank(0), "FIRST": servers["DATA"].of_rank(1)}
        expected = Expected(servers["ONE"])
        for which in ranks:
            pair = Pair(*(servers[side] for side in RANKS[which]))
            for mode in MODES:
                row = cells(model, pair, expected, mode, f"{which} {mode}")
                rows.append((which, mode, row))
                print(line(name, which, mode, row), flush=True)
                for column, cell in row.items():
                    print("\n".join(f"    {column}: {text}" for text in cell.wrong[:2]) or "", end="", flush=True)
    return rows


def without_servers(name: str) -> dict[str, Cell]:
    """The row of what vLLM cannot do itself, on any ranks, in any mode."""
    ((alone, _),) = limits_of([LIMITS[name]])
    row = {column: Cell(note=f"vLLM: {alone}" if column == COLUMNS[0] else "") for column in COLUMNS}
    if alone.startswith(RIGHT):
        row[COLUMNS[0]].wrong.append("vLLM can do this")
    print(line(name, "all", "both", row), flush=True)
    return row


def line(*parts: Any) -> str:
    """A row in Markdown. The last part is the cells, by column."""
    *names, row = parts
    return f"| {' | '.join([*names, *(str(row[column]) for column in COLUMNS)])} |"


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*MODELS, *LIMITS]
    parser.add_argument("--models", nargs="+", default=names, choices=names)
    parser.add_argument("--ranks", nargs="+", default=[*RANKS], choices=[*RANKS])
    arguments = parser.parse_args()
    incomplete, began = 0, time.monotonic()
    print(line("model", "ranks", "mode", dict(zip(COLUMNS, COLUMNS, strict=True))))
    print(f"|{'---|' * (3 + len(COLUMNS))}")
    for name in arguments.models:
        if name in LIMITS:
            incomplete += sum(not cell.whole for cell in without_servers(name).values())
            continue
        with tempfile.TemporaryDirectory(prefix="baton-matrix-") as directory, small_servers(Path(directory) / "quiet"):
            for _, _, row in run_model(name, Path(directory), arguments.ranks):
                incomplete += sum(not cell.whole for cell in row.values())
    print(f"{incomplete} incomplete cells, {time.monotonic() - began:.0f} s")
    return 1 if incomplete else 0


if __name__ == "__main__":
    sys.exit(main())
