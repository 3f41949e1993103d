"""`python -m baton.engine.ranks.worker FD`: the process of a rank other than 0."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import NoReturn

import numpy as np
import torch

from baton.children import die_with_parent
from baton.engine.attention.registry import get_backend
from baton.engine.executor import LocalExecutor
from baton.engine.loading.checkpoints import load_checkpoints
from baton.engine.loading.engine_facts import numeric_probe
from baton.engine.memory.group_memory import GroupMemory
from baton.engine.memory.kv_memory import model_groups, parts_of
from baton.engine.ranks.collective import connect_ranks
from baton.engine.ranks.orders import (
    MAX_MESSAGE_BYTES,
    Allocate,
    Compute,
    Copy,
    Done,
    Draft,
    Failed,
    Order,
    Start,
    decode_order,
    drafts_digest,
    encode_message,
)
from baton.engine.runner import ModelRunner
from baton.errors import BatonError
from baton.kv.spec import GroupSpec
from baton.transports.mapped.populate import populate

log = logging.getLogger(__name__)


def serve_orders(pipe: Connection) -> None:
    """Raises `EOFError` when rank 0 closes the pipe."""
    start = _next(pipe)
    assert isinstance(start, Start)
    config, device = start.config, torch.device(start.config.device)
    ranks = connect_ranks(config, start.store, start.rank)
    drafts = ranks.stage.index == 0
    loaded = load_checkpoints(config if drafts else replace(config, speculative_config=None), lambda text: None, ranks)
    whole = model_groups(config, loaded.model, loaded.drafter)
    groups = [group for group, _ in parts_of(whole, config, loaded.model.config.num_layers, start.rank)]
    pipe.send_bytes(encode_message(Done()))
    pages = _next(pipe)
    assert isinstance(pages, Allocate)
    kv = {group.name: _group_memory(group, pages, device) for group in groups}
    backend = get_backend(config.attention_backend, config.device)
    aux_layers = [] if drafts else pages.aux_layers
    executor = LocalExecutor(
        ModelRunner(loaded.model, loaded.drafter, groups, kv, backend, device, loaded.grammars, aux_layers)
    )
    if config.batch_invariant:
        numeric_probe(loaded.model, groups, backend, device)
    pipe.send_bytes(encode_message(Done()))
    while True:
        drafted = None
        match _next(pipe):
            case Compute(plan):
                executor.compute_follower(plan)
            case Draft(plan):
                if drafts:
                    drafted = drafts_digest(executor.draft(plan))
                else:
                    executor.attend_for_drafter(plan, pages.target_reads)
            case Copy(group, source, destination):
                executor.copy_page(group, source, destination)
            case other:
                raise AssertionError(f"rank 0 said {type(other).__name__} to a rank that computes")
        pipe.send_bytes(encode_message(Done(drafted)))


def _next(pipe: Connection) -> Order:
    return decode_order(pipe.recv_bytes(MAX_MESSAGE_BYTES))


def _group_memory(group: GroupSpec, pages: Allocate, device: torch.device) -> GroupMemory:
    num_pages = pages.num_pages[group.name]
    if pages.files is None:
        return GroupMemory.zeros(group, num_pages, device)
    path, offset = pages.files[group.name]
    size = num_pages * group.page_bytes
    region = np.memmap(path, dtype=np.uint8, mode="r+", offset=offset, shape=(size,))
    populate(region)
    return GroupMemory.over(group, torch.from_numpy(region).view(-1, group.page_bytes))


def main(fd: int) -> NoReturn:
    """Errors are sent to rank 0 and end this process."""
    # Rank 0 may die while this process computes.
    die_with_parent(signal.SIGKILL, fd)
    for number in (signal.SIGINT, signal.SIGHUP):  # a terminal sends them to all; rank 0 decides
        signal.signal(number, signal.SIG_IGN)
    status = run(Connection(fd), serve_orders)
    # Library threads may still wait for other ranks, so a normal exit could hang.
    sys.stderr.flush()
    os._exit(status)


def run(pipe: Connection, serve: Callable[[Connection], None]) -> int:
    try:
        serve(pipe)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # rank 0 has closed the pipe
    except Exception as error:
        if not isinstance(error, BatonError):  # rank 0 reports a `BatonError` in one line
            log.exception("a rank fails")
        with contextlib.suppress(OSError):  # rank 0 may have died
            pipe.send_bytes(encode_message(Failed(f"{type(error).__name__}: {error}"[:1000])))
        return 1
    return 0


if __name__ == "__main__":
    main(int(sys.argv[1]))
