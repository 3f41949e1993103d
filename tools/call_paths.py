"""`python -m tools.call_paths`: how long the way of a handoff through the code is.

Counts the calls, and the classes that they are methods of, from tokens that an engine declares final to a copy that is
posted to the transport, and from a received COMMIT to a runnable request; and how often the engine's calls of a
handoff are defined. The calls are those on the stack, on the engine's and on the agent's thread, in the simulator's
engines of one rank. Calls that have returned by then are not on the way.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

from baton.engine.request import Request
from baton.handoff.protocol.events import DecodeCommitted
from simulation.agent import SimRankAgent
from simulation.engine import Engine
from simulation.modelled.transport import SimTransport
from simulation.parallel import quiet_logs
from simulation.scenario import run_seed

SOURCE = Path(__file__).parents[1] / "src" / "baton"
CALLS = ("open_prefill", "admit_prefill", "declare_final", "stream_layers", "finish_prefill", "announce_decode",
         "open_decode", "abort")  # fmt: skip
SEED = 1


class Enough(Exception):
    """All ways were seen."""


def stack(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def way(first: str) -> list[tuple[str, str]]:
    """Class and function of the frames of Baton on the stack, from the last call of `first` on."""
    found: list[tuple[str, str]] = []
    for frame in stack(sys._getframe(1)):
        if Path(frame.f_code.co_filename).is_relative_to(SOURCE):
            name, own = frame.f_code.co_name, frame.f_locals.get("self")
            if name != "<listcomp>":
                found.append((defining(type(own), name) if own is not None else "", name))
            if name == first:
                return found[::-1]
    return []


def defining(cls: type, name: str) -> str:
    """The class of Baton that defines a method, rather than the simulator's subclass."""
    return next((base.__name__ for base in cls.__mro__ if name in vars(base) and base.__module__[:6] == "baton."), "")


def ways() -> dict[str, list[tuple[str, str]]]:
    """By name, the calls of each part of a way, of the first handoff of engines of one rank."""
    seen: dict[str, list[tuple[str, str]]] = {}

    def watch(owner: Any, attribute: str, name: str, first: str, when: Callable[..., bool] = lambda *_: True) -> Any:
        original = getattr(owner, attribute)

        def watched(*args: Any, **kwargs: Any) -> Any:
            if when(*args) and (found := way(first)):
                seen.setdefault(name, found)
                if len(seen) == 4:
                    raise Enough
            return original(*args, **kwargs)

        return mock.patch.object(owner, attribute, watched)

    with ExitStack() as patches:
        for patch in (
            watch(SimRankAgent, "_call", "FINAL, engine's thread", "declare"),
            watch(
                SimTransport, "submit", "FINAL, agent's thread", "<lambda>", lambda _, __, way, *rest: way == "write"
            ),
            watch(Engine, "hears", "COMMIT, agent's thread", "on_message", lambda _, e: isinstance(e, DecodeCommitted)),
            watch(Request, "transition", "COMMIT, engine's thread", "on_handoff"),
        ):
            patches.enter_context(patch)
        try:
            for seed in range(SEED, SEED + 50):
                run_seed(seed, ())
        except Enough:
            pass
    return seen


def definitions() -> list[str]:
    """Where `src` defines the engine's calls: file and class of each, with those of `Agent` and its kin."""
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                own = {each.name for each in node.body if isinstance(each, ast.FunctionDef)} & set(CALLS)
                if own - {"abort"} and ("agent" in path.parts or "Agent" in node.name):
                    found += [f"{path.relative_to(SOURCE)}:{node.name}.{name}" for name in sorted(own)]
    return found


def report(seen: dict[str, list[tuple[str, str]]], defined: Sequence[str]) -> str:
    lines = []
    for end in ("FINAL", "COMMIT"):
        parts = [(name, found) for name, found in seen.items() if name.startswith(end)]
        calls = [call for _, found in parts for call in found]
        classes = {cls for cls, _ in calls if cls}
        lines.append(f"{end}: {len(calls)} calls of {len(classes)} classes")
        for name, found in parts:
            lines += [f"  {name}:", *(f"    {cls + '.' if cls else ''}{function}" for cls, function in found)]
    return "\n".join([*lines, f"definitions of the engine's calls in src: {len(defined)}"])


if __name__ == "__main__":
    quiet_logs()
    print(report(ways(), definitions()))
