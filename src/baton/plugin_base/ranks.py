"""Joins the ranks of an engine, which run in separate processes, to one instance, by an exchange at the start."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import torch
import torch.distributed as dist

from baton.errors import ConfigError, ProtocolError
from baton.handoff.plan.planner import Instance, RankGeometry

AllGather = Callable[[bytes], list[bytes]]


class WorkerPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One worker: its `rank`, its geometry of each group, and the facts. The engine's `incarnation` is that of worker
    0. `has_states`: it has state layers (Mamba)."""

    rank: int
    incarnation: str
    geometries: dict[str, RankGeometry]
    facts: dict[str, str]
    has_states: bool


class JoinedWorkers(msgspec.Struct, frozen=True, kw_only=True):
    """`instance` is from this worker's point of view; the rest is as in `WorkerPart`."""

    instance: Instance
    incarnation: str
    facts: dict[str, str]
    has_states: bool


def gather_bytes(own: bytes, group: dist.ProcessGroup) -> list[bytes]:
    """Bytes of any length, by rank. `group` must move tensors in host memory."""
    count = dist.get_world_size(group)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(count)]
    dist.all_gather(lengths, torch.tensor([len(own)]), group=group)
    longest = max(int(length) for length in lengths)
    padded = torch.frombuffer(bytearray(own.ljust(longest, b"\0")), dtype=torch.uint8)
    received = [torch.empty(longest, dtype=torch.uint8) for _ in range(count)]
    dist.all_gather(received, padded, group=group)
    return [each.numpy().tobytes()[: int(length)] for each, length in zip(received, lengths, strict=True)]


def join_workers(own: WorkerPart, all_gather: AllGather) -> JoinedWorkers:
    """Raises `ConfigError` if the workers contradict each other."""
    parts = [msgspec.msgpack.decode(each, type=WorkerPart) for each in all_gather(msgspec.msgpack.encode(own))]
    if [part.rank for part in parts] != list(range(len(parts))):
        raise ConfigError("world_size", f"workers call themselves {[part.rank for part in parts]}")
    groups: dict[str, list[RankGeometry]] = {}
    facts: dict[str, str] = {}
    for part in parts:
        for name, found in part.geometries.items():
            groups.setdefault(name, []).append(msgspec.structs.replace(found, rank=part.rank))
        for name, value in part.facts.items():
            if facts.setdefault(name, value) != value:
                raise ConfigError(name, f"worker {part.rank} has {value!r}, another {facts[name]!r}")
    try:
        instance = Instance(rank=own.rank, groups=groups, apart=len(parts) > 1).check()
    except ProtocolError as error:
        raise ConfigError("kv_cache", str(error)) from error
    return JoinedWorkers(
        instance=instance,
        incarnation=parts[0].incarnation,
        facts=facts,
        has_states=any(part.has_states for part in parts),
    )


def joined_addresses(found: Sequence[tuple[int, str]], num_workers: int) -> list[str]:
    """Sorted by rank. Raises `ConfigError` unless there is exactly one of each worker."""
    if sorted(rank for rank, _ in found) != list(range(num_workers)):
        ranks = sorted(rank for rank, _ in found)
        raise ConfigError("world_size", f"{num_workers} workers, but those with ranks {ranks} have agents")
    return [address for _, address in sorted(found)]
