"""Keeps KV of prompts in a `FileStore`, which outlives a model's engines and is shared by them.

An entry holds the pages of one span (about `SPAN_TOKENS` tokens) in every group (docs/transports.md). Only engines that
compute prompts write: received KV must not be shared. States have one entry per prompt, after its last span that ends
at a checkpoint.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from baton.kv.block_tables import BlockTables
from baton.kv.interval import MAX_TOKENS
from baton.kv.page_pool import PagePool
from baton.kv.prefix import Chain
from baton.kv.state_pool import StatePool
from baton.kvstore.store import ByteArray, FileStore, content_key
from baton.kvstore.threads import started_executor
from baton.log_limit import LogLimit

log = logging.getLogger(__name__)
log.addFilter(LogLimit())

SPAN_TOKENS = 256
Post = Callable[[Callable[[], None]], None]
_GroupPages = dict[str, list[int]]


class PrefixRequest(Protocol):
    """What the store reads of a `Request`. `prefill_len`: tokens whose KV is computed or looked up. Salted requests are
    not stored."""

    @property
    def token_ids(self) -> list[int]: ...
    @property
    def prefill_len(self) -> int: ...
    @property
    def is_salted(self) -> bool: ...
    @property
    def kv(self) -> BlockTables: ...


class PrefixStore:
    """Only the engine thread calls it. Files are read and written on threads of this class."""

    def __init__(
        self, store: FileStore, model: str, pools: Mapping[str, PagePool], kv: Mapping[str, Tensor], writes: bool
    ) -> None:
        """`model` names everything that decides the KV of given tokens. `pools` and `kv` (`[pages, ...]`) are by
        group."""
        self._store, self._model, self._pools, self._kv, self._writes = store, model, pools, kv, writes
        self._states = {name: pool for name, pool in pools.items() if isinstance(pool, StatePool)}
        self._paged = {name: pool for name, pool in pools.items() if name not in self._states}
        # A span has whole pages in every group and ends at a checkpoint.
        ends = [pool.interval for pool in self._states.values()]
        whole = math.lcm(*ends, *(pool.page_size for pool in self._paged.values()))
        self._span = max(1, SPAN_TOKENS // whole) * whole
        self._span_pages = {name: self._span // pool.page_size for name, pool in self._paged.items()}
        self._reach = max(pool.reach for pool in pools.values())
        self._num_writing = 0
        self._readers = started_executor(2, "baton-prefix-read")
        self._writer = started_executor(1, "baton-prefix-write")
        self._post: Post
        self._on_failure: Callable[[str], None]

    def bind(self, post: Post, on_failure: Callable[[str], None]) -> None:
        """`post` runs a call on the engine thread, where `on_failure` is called with "read" or "write"."""
        self._post, self._on_failure = post, on_failure

    def close(self) -> None:
        self._readers.shutdown(cancel_futures=True)
        self._writer.shutdown()
        self._kv = {}

    # ------------------------------------------------------------ engine thread

    def load(self, request: PrefixRequest, then: Callable[[int], None]) -> bool:
        """Returns False if there is nothing to look up, else calls `then` later with the number of tokens that entered
        the prefix cache."""
        if request.is_salted:
            return False  # salted prompts are only shared in memory
        tokens = request.token_ids[: request.prefill_len]
        first = min(pool.lookup(tokens, len(tokens)).num_tokens for pool in self._pools.values()) // self._span
        last = min(self._num_spans(len(tokens)), first + self._num_free_spans())
        if first >= last:
            return False

        def look() -> None:
            entries = self._read(tokens, first, last)
            self._post(lambda: then(self._insert(tokens, first, entries)))

        self._readers.submit(look)
        return True

    def save(self, request: PrefixRequest, num_final: int) -> None:
        """Write the entries in [0, `num_final`) that the store lacks. Their pages stay in use until then."""
        if request.is_salted:
            return
        num = min(num_final // self._span, self._num_spans(len(request.token_ids)))
        for name, pool in self._paged.items():
            num = min(num, pool.num_computed(request.kv.pages[name]) // self._span_pages[name])
        tokens = list(request.token_ids)
        slots: _GroupPages = {}
        while num > 0 and self._states:
            hits = {name: pool.lookup(tokens, num * self._span) for name, pool in self._states.items()}
            slots = {name: hit.pages for name, hit in hits.items() if hit.num_tokens == num * self._span}
            if len(slots) == len(hits):
                break
            num -= 1
        # A slow disk must not hold pages that requests need.
        room = min((pool.num_pages // 4 // self._span_pages[name] for name, pool in self._paged.items()), default=num)
        if self._states and self._num_writing:
            room = 0  # requests can spare only one checkpoint slot
        if not self._writes or not 0 < num <= room - self._num_writing:
            return
        pages = {name: request.kv.pages[name][: num * count] for name, count in self._span_pages.items()} | slots
        self._num_writing += num
        for name, pool in self._pools.items():
            pool.share(pages[name])

        def write() -> None:
            try:
                self._write(tokens, num, pages)
            except Exception as error:
                log.warning("a prefix was not stored: %s", error)
                self._failed("write")
            finally:
                self._post(lambda: self._written(num, pages))

        self._writer.submit(write)

    def _written(self, num: int, pages: _GroupPages) -> None:
        self._num_writing -= num
        for name, pool in self._pools.items():
            pool.release(pages[name])

    def _insert(self, tokens: Sequence[int], first: int, found: Sequence[Mapping[str, ByteArray]]) -> int:
        # Pages before the new ones must not be evicted.
        held = {name: pool.lookup(tokens, first * self._span).pages for name, pool in self._pools.items()}
        for name, pool in self._pools.items():
            pool.share(held[name])
        num = min(len(found), self._num_free_spans())
        if self._states and num < len(found):
            num = 0  # the stored state is the one after all spans found
        for name, pool in self._paged.items():
            count = self._span_pages[name]
            pages = pool.allocate(num * count)
            for index in range(num):
                self._put(name, pages[index * count : (index + 1) * count], found[index][name])
            pool.cache(tokens, [0] * (first * count) + pages, Chain(), (first + num) * self._span)
            pool.release(held[name] + pages)
        for name, states in self._states.items():
            slots = states.allocate(min(num, 1))
            if slots:
                self._put(name, slots, found[-1][name])
                states.enter(tokens, (first + num) * self._span, slots[0], Chain())
            states.release(held[name] + slots)
        return num * self._span

    def _put(self, name: str, pages: list[int], data: ByteArray) -> None:
        kv = self._kv[name]
        kv[torch.tensor(pages)] = torch.from_numpy(data).view(kv.dtype).view(len(pages), *kv.shape[1:]).to(kv.device)

    def _num_spans(self, num_tokens: int) -> int:
        return max(0, num_tokens - self._reach) // self._span

    def _num_free_spans(self) -> int:
        if not all(pool.num_available for pool in self._pools.values()):
            return 0
        free = (pool.num_available // self._span_pages[name] for name, pool in self._paged.items())
        return min(free, default=MAX_TOKENS)

    # ------------------------------------------------------------ threads of the store

    def _keys(self, tokens: Sequence[int], num: int) -> Iterator[str]:
        """Keys of the first `num` spans, each also over all earlier tokens."""
        key = self._model
        for start in range(0, num * self._span, self._span):
            key = content_key(key, tokens[start : start + self._span + self._reach])
            yield key

    def _read(self, tokens: Sequence[int], first: int, last: int) -> list[dict[str, ByteArray]]:
        entries: list[dict[str, ByteArray]] = []
        keys = list(self._keys(tokens, last))
        try:
            for key in keys[first:]:
                entry = self._store.get(key, named=True)
                if entry is None or not self._fits(entry.tensors, self._paged):
                    break
                entries.append(entry.tensors)
            while entries and self._states:
                entry = self._store.get(_of_states(keys[first + len(entries) - 1]), named=True)
                if entry is not None and self._fits(entry.tensors, self._states):
                    entries[-1] |= entry.tensors
                    break
                entries.pop()
        except Exception as error:  # the request waits for this
            log.warning("a stored prefix is computed again: %s", error)
            self._failed("read")
            if self._states:
                entries.clear()
        return entries

    def _failed(self, operation: str) -> None:
        self._post(lambda: self._on_failure(operation))

    def _fits(self, tensors: Mapping[str, ByteArray], groups: Iterable[str]) -> bool:
        sizes = {name: self._kv[name][0].nbytes * self._span_pages.get(name, 1) for name in groups}
        return {name: data.size for name, data in tensors.items()} == sizes

    def _write(self, tokens: Sequence[int], num: int, pages: _GroupPages) -> None:
        keys = list(self._keys(tokens, num))
        for index, key in enumerate(keys):
            spans = {name: slice(index * count, (index + 1) * count) for name, count in self._span_pages.items()}
            self._save(key, {name: pages[name][span] for name, span in spans.items()})
        if self._states:
            self._save(_of_states(keys[-1]), {name: pages[name] for name in self._states})

    def _save(self, key: str, pages: _GroupPages) -> None:
        if not self._store.use(key):
            tensors = {name: self._kv[name][torch.tensor(ids)].cpu() for name, ids in pages.items()}
            self._store.put({name: kv.reshape(-1).view(torch.uint8).numpy() for name, kv in tensors.items()}, key=key)


def _of_states(key: str) -> str:
    return content_key(f"{key} states", ())
