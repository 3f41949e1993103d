"""`python -m benchmarks.topologies`: hand requests over between engines with different ranks, and compare every token.

Tensor ranks, data-parallel ranks and stages are processes that share the model. Drafters on fewer ranks or on the last
stage are modelled by agents: one rank computes the model, and each rank of the handoff has a share of its memory, an
agent and an address of its own. Exit code 1 if a cell is not identical to one engine of one rank.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from baton.engine.config import KVTransferConfig
from baton.handoff.protocol.ticket import load_or_create_key
from benchmarks.parity.cases import CONDITIONS, Case, block_sizes, cases
from benchmarks.parity.models import MakeTarget, louder, written
from benchmarks.parity.trial import Cell, Trial, compare
from benchmarks.topologies.agents import shaped
from benchmarks.topologies.data_rank import beside
from simulation.topologies import Shape
from testkit.checkpoints.gemma4 import make_gemma4
from testkit.checkpoints.granite import make_granite
from testkit.checkpoints.qwen_hybrid import make_qwen_hybrid
from testkit.engines import Pair, Stepped, Stream, pair, stepped
from testkit.processes import baton_forks

# Target and drafter of the parity matrix: heads with heads, latents with heads, latents with latents, states.
MODELS = {
    "GQA target with 2 KV heads, EAGLE-3": ("llama", "eagle3"),
    "MLA target, MHA EAGLE-3": ("deepseek_v2", "eagle3"),
    "MLA target, MTP": ("deepseek_v3", "mtp"),
    "gpt-oss with 2 KV heads, EAGLE-3": ("gpt_oss", "eagle3"),
    "Gemma 4, assistant": ("gemma4_text", "assistant"),
    "Gemma 4 without shared keys, assistant": ("gemma4_text", "assistant"),
    "Mamba-2 hybrid": ("granitemoehybrid", "none"),
    "Gated delta nets, MTP": ("qwen3_5_text", "mtp"),
    "Qwen3.5 with experts, MTP": ("qwen3_5_moe_text", "mtp"),
    "Qwen3-Next, MTP": ("qwen3_next", "mtp"),
    "GQA target, hybrid draft model": ("llama", "draft_model, states"),
    "Sparse MLA target, MTP": ("glm_moe_dsa", "mtp"),
    "DeepSeek-V4, MTP": ("deepseek_v4", "mtp"),
    "Nemotron-H, MTP": ("nemotron_h", "mtp"),
    "Kimi Linear, EAGLE-3": ("kimi_linear", "eagle3"),
    "MiniMax-M2, EAGLE-3": ("minimax_m2", "eagle3"),
    "GQA target, DFlash": ("llama", "dflash"),
    "GQA target, DSpark": ("llama", "dspark"),
}
# Played with data-parallel ranks only: for tensor ranks they add nothing to the models above.
MORE = {
    "GQA target with experts, EAGLE-3": ("qwen3_moe", "eagle3"),
    "Mamba-2 hybrid with experts": ("granitemoehybrid", "none"),
    "GQA target, draft model": ("llama", "draft_model"),
    "GQA target, ngram": ("llama", "ngram"),
}


def delta_nets(kind: str) -> MakeTarget:
    return lambda path, seed: louder(make_qwen_hybrid(path, kind, seed, with_mtp=True, linear_num_key_heads=4))


# Models with heads that four ranks can share.
MAKERS: dict[str, MakeTarget] = {
    "Gemma 4 without shared keys, assistant": lambda path, seed: make_gemma4(path, "gemma4-k_is_v", seed),
    "Gated delta nets, MTP": delta_nets("qwen3_5_text"),
    "Qwen3.5 with experts, MTP": delta_nets("qwen3_5_moe_text"),
    "Qwen3-Next, MTP": delta_nets("qwen3_next"),
    "DeepSeek-V4, MTP": written("deepseek_v4", o_groups=4),
    "Nemotron-H, MTP": written("nemotron_h", mamba_num_heads=8, n_groups=4),
    "Mamba-2 hybrid": lambda path, seed: louder(make_granite(path, seed, mamba_n_heads=8)),
    "Mamba-2 hybrid with experts": lambda path, seed: louder(
        make_granite(path, seed, mamba_n_heads=8, num_local_experts=4)
    ),
}
TENSOR_RANKS = {f"TP {p} to TP {d}": (Shape(p), Shape(d)) for p in (1, 2, 4) for d in (1, 2, 4)}
# Stages refuse shared keys.
STAGES = {
    "2 stages to TP 2": (Shape(stages=2), Shape(2)),
    "TP 2 to 2 stages": (Shape(2), Shape(stages=2)),
    "2 stages of TP 2 to 2 stages": (Shape(2, stages=2), Shape(stages=2)),
}
SHAPES: dict[str, tuple[Shape, Shape]] = {
    **TENSOR_RANKS,
    **STAGES,
    "2 stages to 1": (Shape(stages=2), Shape()),
    "1 stage to 2": (Shape(), Shape(stages=2)),
    "2 stages to 2 of TP 2": (Shape(stages=2), Shape(2, stages=2)),
    "TP 4 to TP 4, drafters on 1 rank": (Shape(4, draft_tp=1), Shape(4, draft_tp=1)),
}
# The numbers of data-parallel ranks of P and D; the other ranks compute requests of their own.
DATA_RANKS = {"attention-DP 2 to TP 1": (2, 1), "TP 2 to attention-DP 2": (1, 2)}
SHAPES |= {"attention-DP 2 to TP 1": (Shape(), Shape()), "TP 2 to attention-DP 2": (Shape(2), Shape())}
SIZES = ("16/16", "16/7")
_SLICES = 4
# A hang ends here, and not a machine with other work.
_LIMIT_S = 600.0


def as_processes(shape: str) -> bool:
    """Whether the ranks of a cell are computing processes; otherwise they are only agents."""
    return shape in TENSOR_RANKS or shape in STAGES or shape in DATA_RANKS


def is_played(name: str, shape: str) -> bool:
    return shape in DATA_RANKS or (name not in MORE and not (shape in STAGES and name == "Gemma 4, assistant"))


def trial_of(name: str, folder: Path, seed: int = 0, dtype: str = "auto") -> Trial:
    """A model whose sums do not depend on the number of ranks."""
    model = Trial(*{**MODELS, **MORE}[name], folder, seed, dtype, MAKERS.get(name))
    model.settings |= {"batch_invariant": True, "reduction_slices": _SLICES}
    return model


class Engines:
    """The engines of a model's cells. Engines that a later cell has too are kept, since starting ranks takes longer
    than all requests of a cell.
    """

    def __init__(self, model: Trial, kept: contextlib.ExitStack) -> None:
        self._model, self._kept = model, kept
        self._made: dict[tuple[str, str, Shape], Stepped] = {}

    @contextlib.contextmanager
    def pair(self, shape: str, sizes: str) -> Iterator[Pair]:
        model, (p, d) = self._model, SHAPES[shape]
        if shape in TENSOR_RANKS or shape in STAGES:
            prefill, decode = block_sizes(sizes, ())
            yield Pair(
                self._engine("prefill", prefill, p),
                self._engine("decode", decode, d),
                load_or_create_key(self._key_file),
            )
        elif shape in DATA_RANKS:
            with _data_ranks(model, shape, sizes) as made:
                yield made
        else:
            with shaped(p, d), model.pair(sizes) as made:
                yield made

    @property
    def _key_file(self) -> str:
        return str(self._model.folder / "ticket.key")

    def _engine(self, role: str, block_size: str, shape: Shape) -> Stepped:
        key = role, block_size, shape
        if key not in self._made:
            made = stepped(
                **self._model.settings,
                role=role,
                engine_id=f"{role}-{block_size}-{shape.tp}-{shape.stages}",
                ticket_key_file=self._key_file,
                kv_transfer_config=KVTransferConfig(kv_transport="shm://"),
                block_size=block_size,
                tensor_parallel_size=shape.tp,
                pipeline_parallel_size=shape.stages,
            )
            self._made[key] = self._kept.enter_context(made)
            self._model.prepare(self._made[key])
        return self._made[key]


@contextlib.contextmanager
def _data_ranks(model: Trial, shape: str, sizes: str) -> Iterator[Pair]:
    common = {**model.settings, "kv_transfer_config": KVTransferConfig(kv_transport="shm://")}
    settings = [
        {"block_size": size, "tensor_parallel_size": of.tp}
        for size, of in zip(block_sizes(sizes, ()), SHAPES[shape], strict=True)
    ]
    with contextlib.ExitStack() as others:
        for own, count in zip(settings, DATA_RANKS[shape], strict=True):
            alone = {"data_parallel_size": 1, "data_parallel_rank": 0, "data_parallel_store": None}
            own |= others.enter_context(beside({**model.settings, **own})) if count > 1 else alone
        with pair(model.folder, settings[1], **common, **settings[0]) as made:
            yield made


def run(engines: Engines, shape: str, sizes: str, alone: dict[Case, Stream]) -> Cell:
    """One cell: all cases, both modes. Those of one mode are handed over at once."""
    total = Cell()
    with engines.pair(shape, sizes) as made:
        for key in dict.fromkeys((case.chunked, case.mode) for case in alone):
            batch = {case: said for case, said in alone.items() if (case.chunked, case.mode) == key}
            # Other cells have left the same prompts in the prefix cache.
            total.add(compare(made, batch, _LIMIT_S, salt=shape))
    return total


def rows(name: str, model: Trial, batch: Sequence[Case], options: argparse.Namespace, failures: list[str]) -> list[str]:
    alone, out = model.alone(batch), []
    if model.settings["speculative_config"] is not None and not any(sum(one.accepted) for one in alone.values()):
        failures.append(f"{name}: no draft is right, so acceptance proves nothing")
    shapes = [s for s in SHAPES if is_played(name, s) and any(part in s for part in options.shape)]
    with contextlib.ExitStack() as kept:
        engines = Engines(model, kept)
        for shape in shapes:
            columns = [name, shape, "processes" if as_processes(shape) else "agents"]
            for sizes in options.sizes:
                began = time.monotonic()
                cell = run(engines, shape, sizes, alone)
                failures += [f"{name}, {shape}, {sizes}: {failure}" for failure in cell.failures]
                columns += [f"{cell.num_identical}/{cell.num_cases}", f"{cell.num_bytes:,}", f"{cell.wanted_bytes:,}"]
            out.append(f"| {' | '.join(columns)} |")
            print(f"{out[-1]} {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    return out


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.topologies", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--model", default="", help=f"models whose name contains this: {'; '.join([*MODELS, *MORE])}")
    parser.add_argument("--shape", nargs="+", default=[""], help="topologies whose name contains one of these")
    parser.add_argument("--seed", type=int, default=0, help="of weights, prompts and noise")
    parser.add_argument("--cases", type=int, default=2, help="requests of each mode and condition; 0: all lengths")
    parser.add_argument("--condition", choices=CONDITIONS, help="requests of this condition only")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=SIZES, help="tokens per page on P/on D")
    parser.add_argument("--dtype", default="auto", help="of weights and KV")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    began, lines, failures = time.process_time(), list[str](), list[str]()
    batch = cases(options.seed, options.cases, options.condition)
    with contextlib.closing(baton_forks.launcher()) as launcher, baton_forks.forking(launcher):
        for name in (*MODELS, *MORE):
            if options.model in name:
                with tempfile.TemporaryDirectory() as folder:
                    model = trial_of(name, Path(folder), options.seed, options.dtype)
                    lines += rows(name, model, batch, options, failures)
    heads = [f"{size}: {what}" for size in options.sizes for what in ("identical", "bytes sent", "least")]
    print(f"| model | P to D | ranks are | {' | '.join(heads)} |\n|{'---|' * (3 + len(heads))}")
    print("\n".join([*lines, "", f"{time.process_time() - began:.0f} s of CPU", *failures[:20]]))
    return 1 if failures or not lines else 0


if __name__ == "__main__":
    sys.exit(main())
