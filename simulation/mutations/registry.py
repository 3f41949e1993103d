"""The registry of mutations."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from baton.errors import ConfigError
from baton.handoff.protocol.events import Action
from simulation.settings import FAULTS

Patch = tuple[Any, str, Any]


@dataclass(frozen=True, slots=True)
class Mutation:
    """`rule` is the rule that it undoes; `patches` are `(owner, attribute, replacement)`. `faults`: the kinds of faults
    to play it with, few if only a rare combination of them exposes it.
    """

    name: str
    rule: str
    patches: Callable[[], list[Patch]]
    faults: tuple[str, ...] = FAULTS


MUTATIONS: dict[str, Mutation] = {}


def mutation(
    rule: str, faults: tuple[str, ...] = FAULTS
) -> Callable[[Callable[[], list[Patch]]], Callable[[], list[Patch]]]:
    def register(patches: Callable[[], list[Patch]]) -> Callable[[], list[Patch]]:
        name = patches.__name__.lstrip("_")
        MUTATIONS[name] = Mutation(name, rule, patches, faults)
        return patches

    return register


@contextmanager
def applied(name: str | None) -> Iterator[None]:
    """Apply a mutation, or nothing for None. Raises `ConfigError` for a name that is not in `MUTATIONS`."""
    if name is not None and name not in MUTATIONS:
        raise ConfigError("mutation", f"{name!r} is none of {', '.join(MUTATIONS)}")
    with ExitStack() as stack:
        for owner, attribute, replacement in MUTATIONS[name].patches() if name is not None else []:
            _check_arguments(owner, attribute, replacement)
            stack.enter_context(mock.patch.object(owner, attribute, replacement))
        yield


def _check_arguments(owner: Any, attribute: str, replacement: Any) -> None:
    """Raise `TypeError` if a replacement takes other arguments than the original: otherwise every seed would end in
    such an error, and only that error would find the mutation.
    """
    original = inspect.getattr_static(owner, attribute)
    if not (inspect.isfunction(original) and inspect.isfunction(replacement)):
        return
    want, have = (inspect.signature(function).parameters for function in (original, replacement))
    if len(want) != len(have) and not any(p.kind is p.VAR_POSITIONAL for p in have.values()):
        raise TypeError(f"{attribute} takes {', '.join(want)}; what comes in its place {', '.join(have)}")


Handle = Callable[[Any], list[Action]]


def around_method(owner: type, attribute: str, around: Callable[[Any, Callable[..., Any], Any], Any]) -> list[Patch]:
    """Replace a method of one argument by `around(self, original, argument)`."""
    original = getattr(owner, attribute)
    return [(owner, attribute, lambda self, argument: around(self, lambda a: original(self, a), argument))]
