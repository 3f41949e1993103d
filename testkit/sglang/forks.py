"""Starts SGLang servers as forks of this process, which has imported SGLang once and shares its memory with them.

SGLang spawns three or four processes for each server, and each imports all of it. A line of standard input is an
`Order`; the answer is the server's process id, the leader of its session.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import random
import runpy
import signal
import sys
import traceback
from typing import NoReturn

import msgspec

from baton.parent import die_with_parent


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """`folder`: for `sys.path`."""

    arguments: list[str]
    environment: dict[str, str]
    log: str
    folder: str


# All of a server's processes, all models, and the plug-in.
MODULES = ("sglang.srt.entrypoints.http_server", "sglang.srt.models.registry", "baton.sglang.conn")


def _import_sglang() -> None:
    for name in MODULES:
        importlib.import_module(name)
    gc.collect()
    # A collection would write to the shared pages.
    gc.freeze()


def _keep_forking(method: str, force: bool = False) -> None:
    """SGLang would choose to spawn."""


def _serve(order: Order) -> None:
    os.setsid()
    die_with_parent(signal.SIGKILL)
    log = os.open(order.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for number, file in enumerate((os.open(os.devnull, os.O_RDONLY), log, log)):
        os.dup2(file, number)
    os.environ.update(order.environment)
    sys.path.insert(0, order.folder)
    sys.argv = ["sglang.launch_server", *order.arguments]
    random.seed()
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = _keep_forking  # type: ignore[assignment]
    runpy.run_module("sglang.launch_server", run_name="__main__")


def _fork(order: Order) -> int:
    if (pid := os.fork()) == 0:
        _become(order)
    while os.getsid(pid) != pid:  # the caller may send a signal to it at once
        os.sched_yield()
    return pid


def _become(order: Order) -> NoReturn:
    try:
        _serve(order)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    # What is imported may print; answers are the only lines.
    os.dup2(2, 1)
    _import_sglang()
    print("ready", file=answers)
    for line in sys.stdin:
        print(_fork(msgspec.json.decode(line, type=Order)), file=answers)


if __name__ == "__main__":
    main()
