"""Flags for the engines of one role, if P and D engines differ."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, TypeVar

import typer

from baton.cli.logs import logger
from baton.engine.config import RANKS, StepSettings, block_sizes
from baton.errors import ConfigError

BlockSize = Annotated[
    str | None, typer.Option(help="Tokens per KV page on engines of that role [default: --block-size].")
]
TensorRanks = Annotated[
    int | None, typer.Option(help="Tensor ranks of engines of that role [default: --tensor-parallel-size].")
]
Stages = Annotated[
    int | None, typer.Option(min=1, help="Stages of engines of that role [default: --pipeline-parallel-size].")
]
DataRankCount = Annotated[
    int | None,
    typer.Option(min=1, help="Data-parallel ranks of engines of that role [default: --data-parallel-size]."),
]
Options = TypeVar("Options", bound=StepSettings)


@dataclass(frozen=True, slots=True)
class RoleOptions:
    prefill_block_size: BlockSize = None
    decode_block_size: BlockSize = None
    prefill_tensor_parallel_size: TensorRanks = None
    decode_tensor_parallel_size: TensorRanks = None
    prefill_pipeline_parallel_size: Stages = None
    decode_pipeline_parallel_size: Stages = None
    prefill_data_parallel_size: DataRankCount = None
    decode_data_parallel_size: DataRankCount = None

    def flags(self) -> dict[str, list[str]]:
        """Flags by role. Raises `ConfigError`."""
        flags: dict[str, list[str]] = {}
        for role in ("prefill", "decode"):
            size, ranks = getattr(self, f"{role}_block_size"), getattr(self, f"{role}_tensor_parallel_size")
            own = flags.setdefault(role, [])
            if size is not None:
                block_sizes(size, f"{role}_block_size")
                own += ["--block-size", size]
            if (stages := getattr(self, f"{role}_pipeline_parallel_size")) is not None:
                own += ["--pipeline-parallel-size", str(stages)]
            if ranks is not None:
                if ranks not in RANKS:
                    raise ConfigError(f"{role}_tensor_parallel_size", f"must be one of {RANKS}, got {ranks}")
                own += ["--tensor-parallel-size", str(ranks)]
        return flags

    def named(self, role: str, error: ConfigError) -> ConfigError:
        """An engine's error, named after the role's own option if that was given."""
        field = f"{role}_{error.field}"
        return ConfigError(field, error.message) if getattr(self, field, None) is not None else error

    def data_ranks(self, options: StepSettings) -> dict[str, int]:
        own = {"prefill": self.prefill_data_parallel_size, "decode": self.decode_data_parallel_size, "both": None}
        return {role: size or options.data_parallel_size for role, size in own.items()}

    def alike(self, options: Options, batch_invariant: bool) -> Options:
        """`options` that make batch-invariant engines of both roles compute the same bits; warns otherwise."""
        sizes = (options.tensor_parallel_size, self.prefill_tensor_parallel_size, self.decode_tensor_parallel_size)
        prefill, decode = (size or options.tensor_parallel_size for size in sizes[1:])
        if prefill != decode and not batch_invariant:
            logger.warning(
                "%d and %d tensor ranks round differently: a request that loses its prefill engine may get another "
                "token where two are nearly equal, unless engines have --batch-invariant",
                prefill,
                decode,
            )
        most = max(size for size in sizes if size is not None)
        if not batch_invariant or options.reduction_slices is not None or most == 1:
            return options
        return replace(options, reduction_slices=most)
