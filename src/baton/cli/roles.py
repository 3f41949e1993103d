"""Flags for the engines of one role, if P and D engines differ."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import typer

from baton.cli.logs import logger
from baton.engine.config import EngineConfig, StepSettings
from baton.errors import ConfigError
from baton.wire import Role

BlockSize = Annotated[
    str | None, typer.Option(help="Tokens per KV page on engines of that role [default: --block-size].")
]
TensorRanks = Annotated[
    int | None, typer.Option(help="Tensor ranks of engines of that role [default: --tensor-parallel-size].")
]
Stages = Annotated[int | None, typer.Option(help="Stages of engines of that role [default: --pipeline-parallel-size].")]
DataRankCount = Annotated[
    int | None, typer.Option(help="Data-parallel ranks of engines of that role [default: --data-parallel-size].")
]
ROLES: tuple[Role, ...] = ("prefill", "decode")
_MADE = "(made for the engines)"
_NAMES = ("block_size", "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
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
        flags: dict[str, list[str]] = {}
        for role in ROLES:
            own = {name: value for name, value in self._of(role).items() if name != "data_parallel_size"}
            flags[role] = [word for name, value in own.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        return flags

    def check(self, config: EngineConfig) -> None:
        """Raises `ConfigError` naming the role's option."""
        for role in ROLES:
            try:
                dataclasses.replace(config, role=role, keys=_MADE, ticket_key_file=_MADE, **self._of(role)).check()
            except ConfigError as error:
                raise self.named(role, error) from None

    def _of(self, role: str) -> dict[str, Any]:
        given = {name: getattr(self, f"{role}_{name}") for name in _NAMES}
        return {name: value for name, value in given.items() if value is not None}

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
        return dataclasses.replace(options, reduction_slices=most)
