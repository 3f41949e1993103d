"""`python -m testkit.vllm.misconfigured`: `baton doctor` over pairs of real vLLM servers, whose decode servers are each
wrong in one way. Needs vLLM's environment (`tools/install_vllm.py`).

Prints what was planted and what the doctor found. The status is 1 unless each fault is found by its name, and none on
the healthy pair.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from baton.doctor.diagnose import check_up, findings_of
from baton.doctor.report import format_checkup
from baton.handoff.session.keys import make_keys
from benchmarks.vllm.servers import ONE_PROCESS, ServerConfig, free_port, serve
from testkit.vllm.quiet import small_servers
from testkit.vllm.servers import EAGLE3, MODEL


@dataclass(frozen=True, slots=True)
class Planted:
    """One wrong decode server. `found`: the finding's name. `transfer`: changes of its `kv_transfer_config`."""

    found: str
    flags: Sequence[str] = ()
    spec: Mapping[str, Any] | None = field(default_factory=lambda: EAGLE3)
    transfer: Mapping[str, Any] = field(default_factory=dict)

    def config(self, name: str, folder: Path, port: int) -> ServerConfig:
        flags = [*ONE_PROCESS, "--port", str(port), *self.flags]
        if self.spec is not None:
            flags += ["--speculative-config", json.dumps(self.spec)]
        transfer = {
            "kv_connector": "BatonConnector",
            "kv_connector_module_path": "baton.vllm",
            "kv_role": "kv_consumer",
            "engine_id": "D",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"keys": str(folder / "keys")},
            **self.transfer,
        }
        return ServerConfig(name, flags, transfer)


def planted(folder: Path) -> dict[str, Planted]:
    """By what is wrong. Makes in `folder` the servers' keys."""
    make_keys(folder / "keys", ["P", "D"])
    fewer = EAGLE3 | {"num_speculative_tokens": 2}
    return {
        "other blocks": Planted("block_size", ["--block-size", "64"]),
        "no drafter": Planted("drafter.method", spec=None),
        "fewer drafts": Planted("num_speculative_tokens", spec=fewer),
        "the wrong role": Planted("no_decode", transfer={"kv_role": "kv_producer"}),
    }


class _Check:
    def __init__(self, folder: Path) -> None:
        self._folder, self.num_wrong = folder, 0
        self._keys = str(folder / "keys")

    def run(self, chosen: Sequence[str]) -> None:
        """Start P, then each decode server beside it."""
        cases = planted(self._folder)
        port = free_port()
        self._p = f"http://127.0.0.1:{port}"
        with self._served(Planted("", transfer={"kv_role": "kv_producer", "engine_id": "P"}), "P", port):
            for what, case in {"nothing": Planted(""), **cases}.items():
                if not chosen or what in chosen:
                    self._check(what, case)

    @contextlib.contextmanager
    def _served(self, case: Planted, name: str, port: int) -> Iterator[None]:
        config = case.config(name, self._folder, port)
        with serve(sys.executable, str(MODEL), self._folder, [config]):
            yield

    def _check(self, what: str, case: Planted) -> None:
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        with self._served(case, "D", port):
            checkup = asyncio.run(check_up([self._p, url], keys=self._keys, timeout_s=60.0, clock_s=0.0))
        found = findings_of(checkup)
        names = {finding.name for finding in found}
        right = case.found in names if case.found else not names
        self.num_wrong += not right
        verdict = "found" if right else "NOT FOUND"
        print(f"{verdict}: {what}: {', '.join(sorted(names)) or 'ready'}")
        print(format_checkup(checkup, found), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=[], help="what is planted")
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="baton-planted-") as directory,
        small_servers(Path(directory) / "quiet"),
    ):
        check = _Check(Path(directory))
        check.run(arguments.only)
    print(f"{check.num_wrong} not found")
    return 1 if check.num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
