"""Flags from a file (`--config`) and environment variables. As in vLLM, the command line overrides the environment,
which overrides the file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
import yaml

from baton.cli.logs import is_logging, log_to_stderr
from baton.deployment import FLAG_VARIABLES
from baton.errors import ConfigError

_MAX_BYTES = 1 << 20
_ENDINGS = (".toml", ".yaml", ".yml")
_ENVIRONMENT = "the environment"
_SOURCES = "baton.sources"
# Errors may name the first, a flag, or the second, a field of another flag's JSON.
_TRANSPORT = ("kv_transport", "kv_transfer_config.kv_transport")
_SETTERS = dict.fromkeys(("transport", *_TRANSPORT), _TRANSPORT)


def read_file(path: str) -> dict[str, Any]:
    """TOML or YAML, by flag name with underscores. Raises `ConfigError`."""
    file = Path(path)
    if file.suffix not in _ENDINGS:
        raise ConfigError("config", f"{path} must end in one of {', '.join(_ENDINGS)}")
    try:
        with file.open("rb") as source:
            data = source.read(_MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError("config", f"{path} cannot be read: {error.strerror}") from None
    if len(data) > _MAX_BYTES:
        raise ConfigError("config", f"{path} is larger than {_MAX_BYTES} bytes")
    try:
        if file.suffix == ".toml":
            values = msgspec.toml.decode(data)
        else:
            # YAML silently takes the last of two equal keys.
            for key in _keys_twice(yaml.compose(data.decode(), Loader=yaml.SafeLoader), []):
                raise ConfigError("config", f"{path} has {key} twice")
            values = msgspec.yaml.decode(data)
    except (msgspec.MsgspecError, yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError("config", f"{path}: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise ConfigError("config", f"{path} must map names of flags to values")
    settings: dict[str, Any] = {}
    for key, value in values.items():
        name = str(key).replace("-", "_")
        if name in settings:
            raise ConfigError("config", f"{path} has {name} twice")
        settings[name] = value
    return settings


def read_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Settings from variables `BATON_FLAG_NAME`, by flag name with underscores."""
    start = len(FLAG_VARIABLES)
    return {name[start:].lower(): value for name, value in environment.items() if name.startswith(FLAG_VARIABLES)}


def _apply(context: typer.Context, path: str | None) -> str | None:
    """Make file and environment the defaults of the command's other flags."""
    given = read_environment(os.environ)
    named = given.pop("config", None)
    path = named if path is None else path
    if path == "":
        raise ConfigError("config", "is empty: it must be the name of a file")
    settings = _as_flags(context, read_file(path), path) if path else {}
    context.meta[_SOURCES] = {name: _where(name, str(path)) for name in settings}
    settings |= _as_flags(context, given, _ENVIRONMENT)
    context.meta[_SOURCES] |= {name: _where(name, _ENVIRONMENT) for name in given}
    context.default_map = settings
    if settings.get("log_format") == "json" and not is_logging():
        log_to_stderr(form="json")
    return path


Config = Annotated[
    str | None,
    typer.Option(
        is_eager=True, callback=_apply, metavar="FILE", help="TOML or YAML with flags of this command; those given win."
    ),
]


def named_after_source(context: typer.Context, error: ConfigError) -> ConfigError:
    """Name the flag of a command's error, and the variable or file that its value came from. Idempotent."""
    setters = _SETTERS.get(error.field, (error.field,))
    for field in setters:
        flag = field.partition(".")[0]
        given = context.get_parameter_source(flag)
        if given is None or given.name == "DEFAULT":
            continue
        where = f"{context.meta[_SOURCES][flag]}: " if given.name == "DEFAULT_MAP" else ""
        return ConfigError(field, where * (not error.message.startswith(where)) + error.message)
    return ConfigError(setters[0], error.message)


def _where(flag: str, source: str) -> str:
    return f"in {source}" if source != _ENVIRONMENT else f"in the variable {FLAG_VARIABLES}{flag.upper()}"


def _as_flags(context: typer.Context, settings: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Raises `ConfigError`."""
    parameters = {p.name: p for p in context.command.params if p.name != "config" and not getattr(p, "hidden", False)}
    flags: dict[str, Any] = {}
    for name, value in settings.items():
        parameter, where = parameters.get(name), _where(name, source)
        if parameter is None:
            raise ConfigError(name, f"{where}: baton {context.info_name} has no such flag")
        switch, several = getattr(parameter, "is_flag", False), getattr(parameter, "multiple", False)
        if several:
            flags[name] = [_text(name, each, source) for each in (value if isinstance(value, list) else [value])]
        elif switch and not isinstance(value, bool | str):
            raise ConfigError(name, f"in {source}: must be true or false")
        else:
            flags[name] = value if switch else _text(name, value, source)
        try:  # click's own error would blame a flag that nobody gave
            parameter.process_value(context, flags[name])
        except typer.BadParameter as error:
            raise ConfigError(name, f"{where}: {error.message}, got {flags[name]!r}") from None
        except ConfigError as error:
            field = error.field if error.field.partition(".")[0] == name else name
            raise ConfigError(field, f"{where}: {error.message}") from None
    return flags


def _text(name: str, value: object, source: str) -> str:
    """A setting as a command-line argument; a table as JSON."""
    if isinstance(value, dict):
        try:
            return json.dumps(value)
        except (TypeError, ValueError):
            raise ConfigError(name, f"in {source}: has a value that JSON has not") from None
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ConfigError(name, f"in {source}: must be a text, a number or a table")
    return str(value)


def _keys_twice(node: yaml.Node | None, above: list[yaml.Node]) -> Iterator[str]:
    """A node that contains itself is skipped; the decoder refuses it."""
    if node is None or any(node is each for each in above):
        return
    if isinstance(node, yaml.MappingNode):
        keys = [str(key.value) for key, _ in node.value]
        yield from (key for number, key in enumerate(keys) if key in keys[:number])
    if isinstance(node, yaml.CollectionNode):
        for part in node.value:
            for child in part if isinstance(part, tuple) else (part,):
                yield from _keys_twice(child, [*above, node])
