"""Sizes an engine's KV pools, and thereby the context (docs/lifecycle.md, "How much KV an engine holds")."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from baton.engine.config import EngineConfig
from baton.errors import ConfigError
from baton.kv.spec import GroupSpec
from baton.transports.mapped.segments import SHM_DIR, shm_status

# The rest is for activations, the page cache and other programs.
HOST_UTILIZATION = 0.6
DEVICE_UTILIZATION = 0.9
# Small models use the rest for the prefix cache.
MIN_POOL_BYTES = 256 << 20
# Sequences are expected to reach a quarter of the context.
USED_CONTEXT = 4


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes: `free` for all processes, `taken` by this one, and free in the `shm` file system."""

    free: int
    taken: int
    shm_free: int | None = None

    @classmethod
    def measure(cls, device: torch.device, uses_shm: bool) -> Memory:
        if device.type == "cuda":
            return cls(torch.cuda.mem_get_info(device)[0], torch.cuda.memory_reserved(device))
        free = _host_free()
        status = shm_status() if uses_shm else None
        return cls(free, _resident(), None if status is None else status.f_bavail * status.f_frsize)


@dataclass(frozen=True, slots=True)
class PoolSize:
    """`num_pages` by group. `num_tokens`: held at once. `max_model_len`: the context; `lowered` if it was reduced to
    fit.
    """

    num_pages: dict[str, int]
    num_tokens: int
    max_model_len: int
    lowered: bool

    def __str__(self) -> str:
        text = f"KV holds {self.num_tokens} tokens, context {self.max_model_len}"
        return f"{text}: more of the model's context needs more --kv-cache-memory" if self.lowered else text


@dataclass(frozen=True, slots=True)
class Demand:
    """How to divide memory: pages for the same number of tokens in each group; state slots for one request, then for as
    many as take no more memory than the pages.

    `needs_context`: pages for `context` tokens come before slots for a second request. `checkpoints`: per request.
    """

    groups: Sequence[GroupSpec]
    num_drafts: int = 0
    context: int = 1
    max_num_seqs: int = 1
    needs_context: bool = True
    checkpoints: int = 0

    def num_pages(self, group: GroupSpec, num_tokens: int) -> int:
        """Pages with the null page, for requests with `num_tokens` tokens in all."""
        if group.kind != "state":
            return 1 + group.rules.num_pages(num_tokens, group.page_size)
        return 1 + self._num_seqs(num_tokens) * self._num_slots(group)

    def _num_slots(self, group: GroupSpec) -> int:
        return 1 + group.rules.num_scratch(self.num_drafts) + self.checkpoints

    def _slot_bytes(self) -> int:
        return sum(group.page_bytes * self._num_slots(group) for group in self.groups if group.kind == "state")

    def _paged_bytes(self, num_tokens: int) -> int:
        return sum(
            group.page_bytes * group.rules.num_pages(num_tokens, group.page_size)
            for group in self.groups
            if group.kind != "state"
        )

    def _num_seqs(self, num_tokens: int) -> int:
        if self.needs_context:
            first = self._paged_bytes(self.context + self.num_drafts)
            wanted = 1 + max(0, self._paged_bytes(num_tokens) - first) // self._slot_bytes()
        else:
            wanted = max(1, self._paged_bytes(num_tokens) // self._slot_bytes())
        return min(wanted, self.max_num_seqs, num_tokens)

    def request_bytes(self, num_tokens: int) -> int:
        return self._paged_bytes(num_tokens) + self._slot_bytes()

    def num_bytes(self, num_tokens: int) -> int:
        return sum(group.page_bytes * self.num_pages(group, num_tokens) for group in self.groups)

    def split(self, num_bytes: int) -> tuple[int, dict[str, int]]:
        """The most tokens that fit, and the pages of each group."""
        num_tokens = bisect_right(range(1, num_bytes + 1), num_bytes, key=self.num_bytes)
        pages = {group.name: self.num_pages(group, num_tokens) for group in self.groups}
        paged = ((pages[group.name] - 1) * group.page_size for group in self.groups if group.kind != "state")
        return min(paged, default=num_tokens), pages


def pool_size(
    config: EngineConfig,
    before: Memory,
    now: Memory,
    groups: Sequence[GroupSpec],
    num_lookahead_slots: int,
    max_position: int,
) -> PoolSize:
    """`before` and `now`: memory before and after loading weights. `max_position`: the checkpoint's context. Without
    `config.max_model_len` the context is as long as fits. Raises `ConfigError`, naming the setting to change.
    """
    context = config.max_model_len or max_position
    demand = Demand(
        groups,
        num_lookahead_slots,
        context,
        config.max_num_seqs,
        needs_context=config.max_model_len is not None,
        checkpoints=int(config.enable_prefix_caching),
    )

    def bytes_for(tokens: int) -> int:
        return demand.num_bytes(tokens + num_lookahead_slots)

    if config.kv_cache_memory is not None:
        num_bytes = config.kv_cache_memory
        if now.shm_free is not None and num_bytes > now.shm_free:
            raise ConfigError(
                "kv_cache_memory",
                f"is {num_bytes} bytes, and {SHM_DIR} has {now.shm_free} left: lower it, or enlarge {SHM_DIR}",
            )
        if num_bytes > now.free:
            raise ConfigError("kv_cache_memory", f"is {num_bytes} bytes, and {now.free} are free: lower it")
    else:
        usual = demand.request_bytes(context // USED_CONTEXT + num_lookahead_slots)
        used = max(bytes_for(context), config.max_num_seqs * usual)
        num_bytes = max(0, min(max(MIN_POOL_BYTES, used + demand.num_bytes(0)), _share(config, before, now)))
    num_tokens, num_pages = demand.split(num_bytes)
    longest = num_tokens - num_lookahead_slots
    if longest < 2:
        raise ConfigError(
            "kv_cache_memory", f"must be at least {bytes_for(2)} bytes, for 2 pages or more; there are {num_bytes}"
        )
    if config.max_model_len is not None and longest < context:
        raise ConfigError(
            "max_model_len",
            f"{context} tokens need {bytes_for(context)} bytes of KV cache, and there are {num_bytes}: the greatest "
            f"--max-model-len that fits is {longest}; or raise --kv-cache-memory or --gpu-memory-utilization",
        )
    return PoolSize(num_pages, num_tokens, min(context, longest), longest < context)


def _share(config: EngineConfig, before: Memory, now: Memory) -> int:
    utilization = config.gpu_memory_utilization
    if utilization is None:
        utilization = HOST_UTILIZATION if config.device == "cpu" else DEVICE_UTILIZATION
    part = int(utilization * before.free) // (config.engines_per_host or 1) - max(0, now.taken - before.taken)
    part = min(part, int(utilization * now.free))
    if before.shm_free is not None and now.shm_free is not None:
        part = min(part, int(utilization * before.shm_free) // (config.engines_per_host or 1))
        part = min(part, int(utilization * now.shm_free))
    return part


def _host_free(root: Path = Path("/sys/fs/cgroup"), process: Path = Path("/proc/self/cgroup")) -> int:
    """Available bytes, within the limits of this process's cgroups. Their usage includes cached files, such
    as checkpoints, which count as free.
    """
    lines = Path("/proc/meminfo").read_text().splitlines()
    sizes = {name: int(rest.split()[0]) << 10 for name, _, rest in (line.partition(":") for line in lines)}
    free = sizes["MemAvailable"]
    for group, limit, usage, prefix in _cgroups(root, process):
        try:
            left = int((group / limit).read_text()) - int((group / usage).read_text())
            counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue  # no such cgroup, or no limit
        files = sum(int(counts.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
        free = min(free, left + files)
    return max(0, free)


def _cgroups(root: Path, process: Path) -> Iterator[tuple[Path, str, str, str]]:
    """With files of limit and usage, and its counters' prefix."""
    try:
        lines = process.read_text().splitlines()
    except OSError:
        lines = []
    own = {controllers: path for _, controllers, path in (line.split(":", 2) for line in lines)}
    for mount, controller, names in (
        (root, "", ("memory.max", "memory.current", "")),
        (root / "memory", "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")),
    ):
        group = mount / own.get(controller, "").strip("/")
        yield from ((one, *names) for one in (group, *group.parents) if one.is_relative_to(mount))


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
