"""Declares settings in annotations of fields, for flags, variables, files, help and documents."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from baton.errors import ConfigError

# Timers cannot wait for infinity.
MAX_SECONDS = 1e6
_SHOWN_CHARACTERS = 100
S = TypeVar("S", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class Rule:
    """What a value must be: words after "must be", and a test."""

    words: str
    holds: Callable[[Any], bool]


@dataclass(frozen=True, slots=True)
class Setting:
    """A field that users set.

    `help`: one line. `short`: a short flag. `rule`: for values other than None; literals have one by their type.
    `parse`: from a flag's text, or a file's table. `metavar`: what help shows for that text.
    """

    help: str
    short: str | None = None
    rule: Rule | None = None
    parse: Callable[[Any], Any] | None = None
    metavar: str | None = None


@dataclass(frozen=True, slots=True)
class DeclaredSetting:
    """A setting with its field's declaration. `default` is None if each object has its own."""

    name: str
    type: Any
    default: Any
    setting: Setting

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")


def in_range(least: float, most: float) -> Rule:
    return Rule(f"{least} to {most}", lambda value: least <= value <= most)


def at_least(least: float) -> Rule:
    return Rule(f"at least {least}", lambda value: value >= least)


def one_of(values: Sequence[Any]) -> Rule:
    return Rule(f"one of {', '.join(map(str, values))}", lambda value: value in values)


def matching(pattern: str, words: str) -> Rule:
    return Rule(words, lambda value: re.fullmatch(pattern, value) is not None)


def declared_settings(kind: type) -> dict[str, DeclaredSetting]:
    hints = get_type_hints(kind, include_extras=True)
    settings: dict[str, DeclaredSetting] = {}
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        for setting in getattr(hint, "__metadata__", ()):
            if isinstance(setting, Setting):
                default = None if field.default is dataclasses.MISSING else field.default
                settings[field.name] = DeclaredSetting(field.name, hint.__origin__, default, setting)
    return settings


def json_object(name: str, value: str | dict[str, Any] | None) -> dict[str, Any] | None:
    """A setting's JSON object. Raises `ConfigError` naming the setting, also for a key that is given twice: JSON takes
    the last."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) < len(pairs):
            keys = [key for key, _ in pairs]
            raise ConfigError(name, f"has {next(key for key in keys if keys.count(key) > 1)} twice")
        return fields

    if value is None:
        return None
    if isinstance(value, str):
        text = value
        try:
            value = json.loads(text, object_pairs_hook=once)
        except (ValueError, RecursionError) as error:
            raise ConfigError(name, f"is not JSON: {error}: {text[:_SHOWN_CHARACTERS]!r}") from None
    if not isinstance(value, dict):
        raise ConfigError(name, f"must be a JSON object, got {str(value)[:_SHOWN_CHARACTERS]}")
    return value


def refuse_unknown(name: str, data: dict[str, Any], known: Collection[str]) -> None:
    unknown = sorted(set(data) - set(known))
    if unknown:
        raise ConfigError(f"{name}.{unknown[0]}", f"is unknown; known: {', '.join(sorted(known))}")


def struct_of(name: str, value: str | dict[str, Any] | None, kind: type[S]) -> S:
    """A setting's JSON object. Raises `ConfigError` naming the key."""
    data = json_object(name, value) or {}
    refuse_unknown(name, data, kind.__struct_fields__)
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at `$")
        raise ConfigError(f"{name}{path.rstrip('`')}", f"{text[0].lower()}{text[1:]}") from None


def check_settings(settings: Any) -> None:
    """Check by type and rule. Raises `ConfigError`."""
    for name, one in declared_settings(type(settings)).items():
        value = getattr(settings, name)
        if value is None or dataclasses.is_dataclass(value):
            continue
        rule = one.setting.rule
        if get_origin(one.type) is Literal:
            rule = one_of(get_args(one.type))
        else:
            _check_type(name, value, one.type)
        if rule is not None and not rule.holds(value):
            raise ConfigError(name, f"must be {rule.words}, got {value!r}")


def _check_type(name: str, value: object, kind: Any) -> None:
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(name, f"{str(error)[0].lower()}{str(error)[1:]}: {value!r}") from None
