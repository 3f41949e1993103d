"""`python -m simulation`: play many seeds, replay one, or show that mutations of the protocol are caught."""

from __future__ import annotations

import secrets
import sys
import time
from typing import Annotated

import typer

from baton.errors import ConfigError
from simulation.mutations import MUTATIONS, applied
from simulation.parallel import quiet_logs, run_seeds
from simulation.report import Summary, shortened
from simulation.scenario import run_seed
from simulation.settings import FAULTS

_SHOWN_FAILURES = 5
_MUTATION_SEEDS = 2000
# Upper bound of the random first seed, so that it stays short enough to type.
_FIRST_SEEDS = 1_000_000_000


def main(
    seeds: Annotated[int, typer.Option(help="How many schedules to play.")] = 20_000,
    first_seed: Annotated[int | None, typer.Option(help="The first of them; drawn anew without it.")] = None,
    workers: Annotated[int, typer.Option(help="Processes.")] = 2,
    faults: Annotated[str, typer.Option(help=f"Kinds of faults, comma-separated. All: {','.join(FAULTS)}")] = "all",
    seed: Annotated[int | None, typer.Option(help="Play only this one.")] = None,
    trace: Annotated[bool, typer.Option(help="With --seed: print everything that happens.")] = False,
    mutation: Annotated[str | None, typer.Option(help="Break the protocol in this way.")] = None,
    mutations: Annotated[
        bool, typer.Option(help="Show for each known way of breaking it the seed that finds it.")
    ] = False,
) -> None:
    """Play the handoff protocol over modelled engines, networks and clocks, and search for broken invariants."""
    quiet_logs()
    kinds = FAULTS if faults == "all" else tuple(faults.split(","))
    try:
        if unknown := sorted(set(kinds) - set(FAULTS)):
            raise ConfigError("faults", f"{unknown} are none of {', '.join(FAULTS)}")
        if mutations:
            first = first_seed or 0
            ok = _mutations(range(first, first + min(seeds, _MUTATION_SEEDS)), workers)
        elif seed is not None:
            ok = _replay(seed, kinds, mutation, trace)
        else:
            first = secrets.randbelow(_FIRST_SEEDS) if first_seed is None else first_seed
            print(f"seeds {first} to {first + seeds - 1} (again: --seeds {seeds} --first-seed {first})", flush=True)
            ok = _many(range(first, first + seeds), kinds, workers, mutation)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error
    raise typer.Exit(0 if ok else 1)


def _many(seeds: range, faults: tuple[str, ...], workers: int, mutation: str | None) -> bool:
    start = time.monotonic()

    def progress(total: Summary) -> None:
        if sys.stderr.isatty():
            print(f"\r{total.seeds:,} seeds, {len(total.failures)} violations", end="", file=sys.stderr)

    total = run_seeds(seeds, faults, workers, mutation, progress=progress)
    print(total.text(time.monotonic() - start))
    for failed, violation in total.failures[:_SHOWN_FAILURES]:
        print(f"\nseed {failed}: {violation}")
        with applied(mutation):
            print(shortened(run_seed(failed, faults, tracing=True)))
        print(f"replay: {_command(failed, faults, mutation)}")
    return not total.failures


def _command(seed: int, faults: tuple[str, ...], mutation: str | None) -> str:
    command = f"python -m simulation --seed {seed} --trace"
    if faults != FAULTS:
        command += f" --faults {','.join(faults)}"
    return command + (f" --mutation {mutation}" if mutation else "")


def _replay(seed: int, faults: tuple[str, ...], mutation: str | None, trace: bool) -> bool:
    with applied(mutation):
        result = run_seed(seed, faults, tracing=True)
    if trace:
        print("\n".join(result.trace))
    elif result.violation is not None:
        print(shortened(result))
    summary = Summary()
    summary.add(result)
    print(summary.text(0.0))
    if result.violation is not None:
        print(f"violation: {result.violation}")
    return result.violation is None


def _mutations(seeds: range, workers: int) -> bool:
    caught = True
    for mutation in MUTATIONS.values():
        start = time.monotonic()
        total = run_seeds(seeds, mutation.faults, workers, mutation.name, stop_early=True)
        seconds = time.monotonic() - start
        if total.failures:
            failed, violation = total.failures[0]
            found = f"seed {failed:>5}  {violation.partition(':')[0]:<20} {seconds:6.1f} s"
            print(f"{mutation.name:<28} {found}  {mutation.rule}", flush=True)
        else:
            caught = False
            print(f"{mutation.name:<28} NOT CAUGHT in {total.seeds} seeds")
    return caught


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    app()
