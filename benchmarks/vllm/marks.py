"""When requests pass the parts of vLLM's processes, written by a vLLM plug-in that wraps their functions.

vLLM loads the entry points `vllm.general_plugins` in each of its processes. A mark is one line in `MARKS_DIR`/PID:
nanoseconds of CLOCK_MONOTONIC, which all processes of a host share, those of the thread's CPU time, and a label. It
costs 3 us.
"""

from __future__ import annotations

import functools
import importlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MARKS_DIR = "BATON_MARKS_DIR"  # environment variable
_NAME = "baton_marks"

Label = Callable[[tuple[Any, ...], Any], str | None]


def always(text: str) -> Label:
    return lambda arguments, result: text


def if_tokens(text: str) -> Label:
    """Of steps that compute something."""
    return lambda arguments, result: (
        text if getattr(_step(arguments, result), "total_num_scheduled_tokens", 0) else None
    )


def _step(arguments: tuple[Any, ...], result: Any) -> Any:
    return result if len(arguments) < 2 or hasattr(result, "total_num_scheduled_tokens") else arguments[1]


def _if_received(arguments: tuple[Any, ...], result: Any) -> str | None:
    return "vLLM told of the KV" if result.received else None


@dataclass(frozen=True, slots=True)
class Hop:
    """A method, and its marks before and after a call."""

    module: str
    method: str
    before: Label | None = None
    after: Label | None = None


HOPS = (
    Hop("vllm.v1.engine.async_llm", "AsyncLLM.add_request", always("request parsed")),
    Hop("vllm.v1.engine.core", "EngineCore.add_request", always("request in core")),
    Hop("vllm.v1.core.sched.scheduler", "Scheduler.schedule", after=if_tokens("scheduled")),
    Hop(
        "vllm.v1.worker.gpu_model_runner",
        "GPUModelRunner.execute_model",
        if_tokens("forward begins"),
        if_tokens("forward ends"),
    ),
    Hop("vllm.v1.worker.gpu_model_runner", "GPUModelRunner.sample_tokens", after=always("sampled")),
    Hop("vllm.v1.engine.output_processor", "OutputProcessor.process_outputs", always("output in API")),
    Hop("baton.vllm.worker", "WorkerSide.finalise", after=lambda given, _: "declared final" if given[1] else None),
    Hop("baton.vllm.worker", "WorkerSide.post", lambda given, _: type(given[1]).__name__),
    Hop("baton.vllm.worker", "WorkerSide.results", after=_if_received),
    Hop("baton.handoff.agent.operations", "Operations.start", lambda given, _: f"copies {given[2].group}"),
    Hop("baton.handoff.agent.operations", "Operations.ended", after=lambda _, ended: "copied" if ended else None),
    Hop("baton.handoff.session.sockets", "Channel.send", lambda given, _: f"sends {type(given[2]).__name__}"),
    Hop("baton.handoff.agent.routing", "Routing.on_message", lambda given, _: f"gets {type(given[2]).__name__}"),
)


def mark_hops(hops: Sequence[Hop] = HOPS) -> None:
    """The entry point."""
    file = os.open(Path(os.environ[MARKS_DIR]) / str(os.getpid()), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(label: str | None) -> None:
        if label is not None:
            os.write(file, f"{time.monotonic_ns()} {time.thread_time_ns()} {label}\n".encode())

    for hop in hops:
        owner, name = hop.method.split(".")
        found = getattr(importlib.import_module(hop.module), owner)
        setattr(found, name, _wrapped(getattr(found, name), hop, write))


def _wrapped(function: Callable[..., Any], hop: Hop, write: Callable[[str | None], None]) -> Callable[..., Any]:
    @functools.wraps(function)
    def marked(*arguments: Any, **named: Any) -> Any:
        if hop.before is not None:
            write(hop.before(arguments, None))
        result = function(*arguments, **named)
        if hop.after is not None:
            write(hop.after(arguments, result))
        return result

    return marked


def announce(folder: Path) -> dict[str, str]:
    """Make a package by whose entry point vLLM finds the plug-in. Returns the variables that servers need."""
    info = folder / f"{_NAME}-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {_NAME}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{_NAME} = {__name__}:mark_hops\n")
    (folder / "marks").mkdir()
    return {MARKS_DIR: str(folder / "marks"), "PYTHONPATH": str(folder)}


@dataclass(frozen=True, slots=True)
class Mark:
    """Seconds of CLOCK_MONOTONIC, and of the thread's CPU time."""

    at: float
    cpu: float
    label: str


def read_marks(folder: Path, pid: int, start: float, end: float) -> list[Mark]:
    """Those of one process between two times, in order."""
    try:
        lines = (folder / str(pid)).read_text().splitlines()
    except FileNotFoundError:
        return []
    marks = []
    for line in lines:
        at, cpu, label = line.split(" ", 2)
        if start <= (seconds := int(at) / 1e9) <= end:
            marks.append(Mark(seconds, int(cpu) / 1e9, label))
    return marks
