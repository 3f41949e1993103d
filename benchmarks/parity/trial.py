"""One pair of target and drafter: its cases on one engine, then handed over with all page sizes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from msgspec import structs

from baton.engine.config import SpeculativeConfig
from baton.engine.executor import LocalExecutor
from baton.engine.ranks.rank_executor import RankExecutor
from baton.handoff.agent.instance import InstanceAgent
from baton.handoff.plan.topology import RankGeometry
from baton.kv.interval import Interval
from baton.sampling_params import SamplingParams
from benchmarks.parity.cases import ALL_SIZES, CHUNK, HANDED_BACK, MAX_MODEL_LEN, Case, block_sizes
from benchmarks.parity.models import DRAFTERS, NUM_DRAFTS, TARGETS, MakeTarget
from benchmarks.topologies.agents import shaped
from simulation.topologies import Shape
from testkit.engines import Pair, Stepped, Stream, pair, request, stepped

_KV_BYTES = 16 << 20
# With a single token no drafter would run.
_TWO_TOKENS = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)


@dataclass(slots=True)
class Cell:
    """Identical requests of one mode and one choice of page sizes, and the bytes that were moved for them.
    `num_handed_back`: prompt tokens that P got from D before it computed the rest.
    """

    num_identical: int = 0
    num_cases: int = 0
    num_bytes: int = 0
    wanted_bytes: int = 0
    num_handed_back: int = 0
    failures: list[str] = field(default_factory=list)
    different: set[Case] = field(default_factory=set)

    def add(self, other: Cell) -> None:
        self.num_identical += other.num_identical
        self.num_cases += other.num_cases
        self.num_bytes += other.num_bytes
        self.wanted_bytes += other.wanted_bytes
        self.num_handed_back += other.num_handed_back
        self.failures += other.failures
        self.different |= other.different


@dataclass(slots=True)
class Outcome:
    """`cells` by mode and page sizes, `conditions` (identical, all) by condition. `rounds` and `accepted` (by draft
    position) are of one engine over all its requests.
    """

    cells: dict[tuple[str, str], Cell] = field(default_factory=lambda: defaultdict(Cell))
    conditions: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    rounds: int = 0
    accepted: list[int] = field(default_factory=lambda: [0] * NUM_DRAFTS)


class Trial:
    """One pair of target and drafter, in its own folder. `maker` replaces the named target."""

    def __init__(
        self,
        target: str,
        drafter: str,
        folder: Path,
        seed: int = 0,
        dtype: str = "auto",
        maker: MakeTarget | None = None,
    ) -> None:
        self.folder, self.prepare = folder, DRAFTERS[drafter].prepare
        model = (maker or TARGETS[target])(folder / "target", seed)
        make, spec = DRAFTERS[drafter].make, None
        if make is not None:
            config = make(folder / "drafter", model, seed + 1)
            spec = SpeculativeConfig.parse({"num_speculative_tokens": NUM_DRAFTS, **config})
        self.settings: dict[str, Any] = {
            "model": str(model),
            "speculative_config": spec,
            "skip_tokenizer_init": True,
            "dtype": dtype,
            "kv_cache_memory": _KV_BYTES,
            "max_model_len": MAX_MODEL_LEN,
            "mamba_block_size": 16,  # prompts are shorter than the usual interval of state checkpoints
            **DRAFTERS[drafter].settings,
        }

    def alone(self, cases: Sequence[Case], also_without: bool = True) -> dict[Case, Stream]:
        """One engine's stream for each case: accepted drafts with the drafter, all else from a run without it, or with
        the drafter too unless `also_without`.
        """
        with stepped(**self.settings) as single:
            self.prepare(single)
            self._groups = [name for name, rules in single.core.cache.rules.items() if rules.kind != "state"]
            streams = _said(single, cases)
        if self.settings["speculative_config"] is None or not also_without:
            return streams
        with stepped(**{**self.settings, "speculative_config": None}) as single:
            plain = _said(single, cases)
        for case, stream in streams.items():
            said = plain[case]
            stream.token_ids, stream.logprobs, stream.finish_reason = said.token_ids, said.logprobs, said.finish_reason
        return streams

    @contextmanager
    def pair(self, sizes: str) -> Iterator[Pair]:
        """P and D with pages of these sizes. `alone` must have run before."""
        p, d = block_sizes(sizes, self._groups)
        with pair(self.folder, {"block_size": d}, **self.settings, block_size=p) as two:
            self.prepare(two.prefill)
            self.prepare(two.decode)
            yield two


def run(
    target: str,
    drafter: str,
    folder: Path,
    cases: Sequence[Case],
    sizes: Sequence[str] = ALL_SIZES,
    dtype: str = "auto",
    ranks: Mapping[str, tuple[Shape, Shape]] | None = None,
) -> Outcome:
    """Run all cases of a pair. `ranks`: by page sizes, of P and D, if their handoffs have several. Raises whatever an
    engine raises.
    """
    trial = Trial(target, drafter, folder, cases[0].seed, dtype)
    alone, outcome, several = trial.alone(cases), Outcome(), ranks or {}
    for stream in alone.values():
        outcome.rounds += len(stream.accepted)
        for position in range(NUM_DRAFTS):
            outcome.accepted[position] += sum(count > position for count in stream.accepted)
    for name in sizes:
        with shaped(*several[name]) if name in several else nullcontext(), trial.pair(name) as two:
            for chunked, mode in dict.fromkeys((case.chunked, case.mode) for case in cases):
                batch = {case: alone[case] for case in cases if (case.chunked, case.mode) == (chunked, mode)}
                cell = compare(two, batch)
                outcome.cells[mode, name].add(cell)
                for case in batch:
                    outcome.conditions[case.condition].update(all=1, identical=case not in cell.different)
    return outcome


def compare(two: Pair, alone: Mapping[Case, Stream], limit_s: float = 120.0, salt: str | None = None) -> Cell:
    """Hand over requests of one mode, chunked or not, all at once, and compare them with one engine's streams
    `alone`. `salt`: of the prefix cache.
    """
    scheduler = two.prefill.core.scheduler
    budget, cell = scheduler.max_num_batched_tokens, Cell(num_cases=len(alone))
    for engine, label in ((two.prefill, "P"), (two.decode, "D")):
        _give_first(engine, [prompt for case in alone if (prompt := case.begins_alike(label)) is not None], label, salt)
    cell.num_handed_back = _hand_back(two, [case for case in alone if case.condition == HANDED_BACK], limit_s, salt)
    two.decode.core.forget_metrics()
    wanted = _Wanted(two.decode)
    scheduler.max_num_batched_tokens = CHUNK if next(iter(alone)).chunked else budget
    expected = {case: Expected(stream, known_rounds(case, stream)) for case, stream in alone.items()}
    names = {f"{case.mode}-{case.number}": case for case in alone}
    legs = {
        case: two.legs(name, case.prompt, case.params, case.mode, expected[case].known or None, salt=salt)
        for name, case in names.items()
    }
    waiting = {name for name, case in names.items() if case.condition == "preempted"}

    def over() -> bool:
        _preempt(two.decode, waiting, names)
        return all(told.ended and rest.ended for told, rest in legs.values())

    two.step_until(over, limit_s)
    two.step_until(lambda: two.prefill.is_idle() and two.decode.is_idle(), limit_s)
    scheduler.max_num_batched_tokens = budget
    for case, (_, rest) in legs.items():
        if difference := expected[case].difference(rest):
            cell.different.add(case)
            cell.failures.append(f"{case.name}: {difference}")
    cell.num_identical = len(alone) - len(cell.different)
    metrics = two.decode.core.metrics
    cell.num_bytes, cell.wanted_bytes = metrics.handoff_bytes, wanted.close()
    # D would recompute a failed handoff and give the same answer.
    if metrics.num_handoffs["committed"] != len(alone) or metrics.handoff_failures:
        cell.failures.append(f"of {len(alone)} handoffs not all succeeded: {metrics.handoff_failures}")
    if cell.num_bytes != cell.wanted_bytes:
        cell.failures.append(f"{cell.num_bytes} bytes were sent, {cell.wanted_bytes} wanted")
    if waiting:
        cell.failures.append(f"{len(waiting)} were not preempted")
    return cell


def _said(single: Stepped, cases: Sequence[Case]) -> dict[Case, Stream]:
    streams = {case: single.add(request(str(case.number), case.prompt, case.params)) for case in cases}
    while not all(stream.ended for stream in streams.values()):
        single.step()
    return streams


def _give_first(engine: Stepped, prompts: Sequence[list[int]], label: str, salt: str | None) -> None:
    wires = [request(f"first-{label}-{i}", prompt, _TWO_TOKENS) for i, prompt in enumerate(prompts)]
    streams = [engine.add(structs.replace(wire, cache_salt=salt)) for wire in wires]
    while not all(stream.ended for stream in streams):
        engine.step()


def _hand_back(two: Pair, cases: Sequence[Case], limit_s: float, salt: str | None) -> int:
    """Give P what D holds of these prompts. Returns how many tokens P holds afterwards."""
    held = 0
    for case in cases:
        if case.length < 2:
            continue  # P computes the last token in any case
        found = two.hand_back(f"back-{case.mode}-{case.number}", case.prompt, case.mode, salt)
        two.step_until(lambda: two.prefill.is_idle() and two.decode.is_idle(), limit_s)
        held += found.destination.num_cached if found.destination is not None else 0
    return held


def known_rounds(case: Case, alone: Stream) -> int:
    """The number of output rounds that both legs of a case begin with."""
    return 1 + case.number % (len(alone.chunks) - 1) if case.condition == "resumed" else 0


class Expected:
    """One engine's output after its first `rounds` chunks, whose tokens are `known`. Later rounds accept the same
    drafts.
    """

    def __init__(self, alone: Stream, rounds: int) -> None:
        self._alone = alone
        self.known = [token for chunk in alone.chunks[:rounds] for token in chunk.token_ids]
        self._accepted = [count for chunk in alone.chunks[rounds:] for count in chunk.accepted]

    def difference(self, rest: Stream) -> str:
        """How D's output differs; "" if it does not."""
        alone, num = self._alone, len(self.known)
        if rest.error is not None:
            return f"it ended with {rest.error}"
        if rest.token_ids != alone.token_ids[num:]:
            return f"tokens {rest.token_ids}, not {alone.token_ids[num:]}"
        if rest.accepted != self._accepted:
            return f"accepted {rest.accepted}, not {self._accepted}"
        if (rest.finish_reason, rest.logprobs) != (alone.finish_reason, alone.logprobs[num:]):
            return "another finish reason, or other logprobs"
        return ""


def _preempt(engine: Stepped, waiting: set[str], names: dict[str, Case]) -> None:
    """Preempt requests that have reached the output length of their cases, once each."""
    for running in list(engine.core.scheduler.running):
        name = running.request_id
        if name in waiting and names[name].preempted_at(running.num_output):
            waiting.discard(name)
            engine.core.scheduler.preempt(running)


class _Wanted:
    """Adds up the bytes that D's ranks hold of what D registers for, each rank's own, until it is closed."""

    def __init__(self, engine: Stepped) -> None:
        assert engine.core.legs is not None
        agent, self._num_bytes = engine.core.legs.agent, 0
        assert isinstance(agent, InstanceAgent)
        if any(len(ranks) > 1 for ranks in agent.instance.groups.values()):
            held = {name: entry_bytes(ranks) for name, ranks in agent.instance.groups.items()}
        else:
            # By the memory itself, so that a wrong geometry shows.
            executor = engine.core.executor
            local = executor.local if isinstance(executor, RankExecutor) else executor
            assert isinstance(local, LocalExecutor)
            specs = {name: memory.spec for name, memory in local.runner.kv.items()}
            held = {name: spec.num_layers * sum(p.token_bytes for p in spec.planes) for name, spec in specs.items()}
        original = agent.open_decode

        def open_decode(ticket: Any, prompt_len: int, wanted: dict[str, Interval], pages: dict[str, list[int]]) -> None:
            self._num_bytes += sum(len(interval) * held[name] for name, interval in wanted.items())
            original(ticket, prompt_len, wanted, pages)

        self._patch = mock.patch.object(agent, "open_decode", open_decode)
        self._patch.start()

    def close(self) -> int:
        """Stop counting. Returns the wanted bytes."""
        self._patch.stop()
        return self._num_bytes


def entry_bytes(ranks: Sequence[RankGeometry]) -> int:
    """Bytes of an entry of a group over all layers, on all ranks that hold a part of it."""
    held = [found.geometry for found in ranks]
    return sum(one.num_layers * plane.token_bytes for one in held for plane in one.planes)
