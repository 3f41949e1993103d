"""`python -m testkit.vllm.uncured`: what gated delta nets with MTP lose between real vLLM servers without each of the
connector's cures. Needs vLLM's environment (`tools/install_vllm.py`).

Prints cells as `testkit.vllm.matrix` does. The status is not 0 if the cell with all cures is incomplete, or one without
a cure is complete.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from baton.vllm import compat
from baton.vllm.connector import BatonConnector
from testkit.vllm.matrix import LEASE_S, Cell, Expected, in_turn
from testkit.vllm.matrix_models import MODELS
from testkit.vllm.quiet import small_servers
from testkit.vllm.servers import Pair, request, serve

ALL = "all of them"
NUM = 16


class AllButTheLast(BatonConnector):
    """Hands over all tokens but the last, as for other models: the decode server's first step is then a verification
    of one token and placeholders, not the rest of the prompt (vllm-project/vllm#47466).
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        compat.prefill_multiple = lambda config: 1
        super().__init__(vllm_config, role, kv_cache_config)


class Sampling(Pair):
    """The prefill server samples any token, not the prompt's next one, on which the drafter's last entry depends."""

    def prefill_leg(self, prompt: Sequence[int], ticket: str, **more: Any) -> dict[str, Any]:
        """The request of a prefill leg."""
        return request(prompt[: self.handed_over(prompt)], 1, {"role": "prefill", "ticket": ticket}, **more)


# The connector of both servers of a pair.
HOOKS = {"CURED": "", "VERIFYING": "uncured.AllButTheLast"}
# What is cured -> the servers, and how they are asked.
CASES: dict[str, tuple[str, type[Pair]]] = {
    ALL: ("CURED", Pair),
    "handed over at a multiple of 64 tokens": ("VERIFYING", Pair),
    "the prompt's next token is what the prefill server samples": ("CURED", Sampling),
}


def run(folder: Path) -> Iterator[tuple[str, Cell]]:
    """Hand over prompts between two servers of one rank, with and without each cure."""
    model = MODELS["GDN + MTP"]
    model.make(folder / "model")
    configs = [(f"{name}{side}", "kv_both", model.flags) for name in HOOKS for side in (1, 2)]
    hooks = {f"{name}{side}": hook for name, hook in HOOKS.items() if hook for side in (1, 2)}
    with serve(folder, configs, {"lease": LEASE_S}, model.spec, folder / "model", hooks=hooks) as found:
        servers = {server.name: server for server in found}
        expected = {name: Expected(servers[f"{name}1"]) for name in HOOKS}
        for cure, (name, pair) in CASES.items():
            asked = pair(servers[f"{name}1"], servers[f"{name}2"])
            yield cure, in_turn(asked, expected[name], model.residues[:NUM], "push", cure)


def main() -> int:
    """Command line."""
    wrong = 0
    print("| cure | with it | without it |\n|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="baton-uncured-") as directory, small_servers(Path(directory) / "quiet"):
        for cure, cell in run(Path(directory)):
            wrong += cell.whole == (cure != ALL)
            print(f"| {cure} | {cell} | |" if cure == ALL else f"| {cure} | | {cell} |", flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(main())
