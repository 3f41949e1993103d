"""Flags as dataclasses. Names follow vLLM's."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import json
import os
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import msgspec
import typer

from baton.cli.flag_sources import Config
from baton.cli.logs import LogFormat, LogLevel, log_to_stderr
from baton.engine.config import EngineConfig, KVTransferConfig, ServingSettings, StepSettings, declared_settings
from baton.errors import ConfigError
from baton.openai.http.access import Access, ApiKeys
from baton.openai.http.limits import WRITE_TIMEOUT_S, HttpLimits
from baton.openai.http.serving import SHUTDOWN_TIMEOUT_S, bind
from baton.openai.request_metrics import PerRequestMetrics, SpecDecodeLevel
from baton.openai.tools import Parsing
from baton.parsing import REASONING_PARSERS, TOOL_PARSERS
from baton.router.config.router_settings import RoutingSettings
from baton.setting import MAX_SECONDS, DeclaredSetting, Setting, check_settings
from baton.text import ContentFormatOption, read_template_option
from baton.wire import Role

if TYPE_CHECKING:
    from baton.router.config.router_config import RouterConfig

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#\s]+")
# Options that an engine of one role refuses, with their defaults.
_FOR_CLIENTS = {
    "chat_template": None,
    "chat_template_content_format": "auto",
    "enable_auto_tool_choice": False,
    "tool_call_parser": None,
    "reasoning_parser": None,
    "enable_per_request_metrics": False,
    "per_request_spec_decode_metrics": "none",
}
ModelArgument = Annotated[
    str, typer.Argument(help="Checkpoint directory in Hugging Face format, or ORG/NAME on the hub.")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions(ServingSettings):
    """`kv_transport` overrides the one in `kv_transfer_config`."""

    kv_transport: Annotated[
        str | None, Setting("shm, nixl, mooncake, file or a URI; default: that of --kv-transfer-config.")
    ] = None

    def to_config(
        self,
        model: str,
        role: Role = "both",
        engine_id: str = "engine",
        process: ProcessOptions | None = None,
    ) -> EngineConfig:
        """The checked configuration, with models of the hub fetched. Raises `ConfigError` for the first bad field."""
        own = process or ProcessOptions()
        settings: dict[str, Any] = {name: getattr(self, name) for name in declared_settings(ServingSettings)}
        if self.kv_transport is not None:
            transfer = dataclasses.replace(self.kv_transfer_config, kv_transport=self.kv_transport)
            settings["kv_transfer_config"] = transfer
        config = EngineConfig(
            model=model,
            role=role,
            engine_id=engine_id,
            ticket_key_file=own.ticket_key_file,
            keys=own.keys,
            data_parallel_rank=own.data_parallel_rank or 0,
            data_parallel_store=own.data_parallel_store,
            **settings,
        )
        return config.check().located()

    def located(self, config: EngineConfig) -> EngineOptions:
        """Options for child processes, with the directories in `config` for hub names."""
        changes = {"served_model_name": config.served_model_name, "speculative_config": config.speculative_config}
        return dataclasses.replace(self, revision=None, **changes)  # type: ignore[arg-type]


def to_flags(settings: StepSettings) -> list[str]:
    flags: list[str] = []
    for name, one in declared_settings(type(settings)).items():
        value = getattr(settings, name)
        if isinstance(value, bool):
            flags.append(one.flag if value else f"--no-{one.flag[2:]}")
        elif value is not None:
            flags += [one.flag, _flag_value(value)]
    return flags


def _flag_value(value: Any) -> str:
    if isinstance(value, KVTransferConfig):
        parts = value.to_json()
    elif isinstance(value, msgspec.Struct):
        parts = msgspec.structs.asdict(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = dataclasses.asdict(value)
    else:
        return json.dumps(value) if isinstance(value, dict) else str(value)
    return json.dumps({name: part for name, part in parts.items() if part is not None})


@dataclass(frozen=True, slots=True)
class ListenOptions:
    """Flags of commands that serve HTTP: address, limits, access, and how answers are made."""

    config: Config = None
    host: Annotated[str, typer.Option(help="Address to listen on. Protect any other than loopback.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000
    shutdown_timeout: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=MAX_SECONDS,
            help="Seconds that requests have to end after SIGTERM; then they end in an error.",
        ),
    ] = SHUTDOWN_TIMEOUT_S
    http_write_timeout: Annotated[
        float,
        typer.Option(min=1.0, max=MAX_SECONDS, help="Seconds that a client has to read what is ready of its answer."),
    ] = WRITE_TIMEOUT_S
    api_key: Annotated[
        list[str] | None, typer.Option(envvar="BATON_API_KEY", help="Clients must bring one of these keys; repeat.")
    ] = None

    chat_template: Annotated[
        str | None, typer.Option(metavar="FILE|TEXT", help="Jinja template of chats; default: the checkpoint's.")
    ] = None
    chat_template_content_format: Annotated[
        ContentFormatOption,
        typer.Option(help="A message's content in the template: string, or openai: a list of parts."),
    ] = "auto"
    enable_auto_tool_choice: Annotated[
        bool, typer.Option("--enable-auto-tool-choice", help="Let models choose tools, by --tool-call-parser.")
    ] = False
    tool_call_parser: Annotated[str | None, typer.Option(help=f"One of {', '.join(TOOL_PARSERS)}.")] = None
    reasoning_parser: Annotated[str | None, typer.Option(help=f"One of {', '.join(REASONING_PARSERS)}.")] = None
    enable_per_request_metrics: Annotated[
        bool, typer.Option("--enable-per-request-metrics", help="Answers have an object `metrics` with their times.")
    ] = False
    per_request_spec_decode_metrics: Annotated[
        SpecDecodeLevel,
        typer.Option(help="Accepted drafts in `metrics`: none, sums (summary), or each step's too (detailed)."),
    ] = "none"
    allowed_origins: Annotated[
        str | None, typer.Option(metavar="JSON", help='Web pages that may read answers: ["https://HOST"], ["*"].')
    ] = None
    ssl_keyfile: Annotated[str | None, typer.Option(help="Key of --ssl-certfile, unless that holds it.")] = None
    ssl_certfile: Annotated[str | None, typer.Option(help="Certificate chain: serve HTTPS.")] = None
    ssl_ca_certs: Annotated[str | None, typer.Option(help="Certificates that sign those of clients.")] = None
    ssl_cert_reqs: Annotated[
        int, typer.Option(min=0, max=2, help="Clients need a certificate: 0 no, 1 if they send one, 2 yes.")
    ] = 0
    log_level: Annotated[LogLevel, typer.Option(help="Least level of log lines; info has a line for each request.")] = (
        "info"
    )
    log_format: Annotated[LogFormat, typer.Option(help="Format of log lines, on stderr.")] = "text"

    def bind(self) -> socket.socket:
        """Start logging, and listen. Raises `ConfigError`."""
        log_to_stderr(self.log_level, self.log_format)
        return bind(self.host, self.port)

    def bind_shared(self, num: int) -> list[socket.socket]:
        """`num` sockets on one port, which no other process has."""
        if num == 1:
            return [self.bind()]
        with contextlib.closing(self.bind()) as alone:
            port = alone.getsockname()[1]
        return [bind(self.host, port, shared=True) for _ in range(num)]

    def check_role(self, role: Role) -> None:
        for name, default in _FOR_CLIENTS.items():
            if getattr(self, name) != default and role != "both":
                raise ConfigError(name, f"is not for role {role}: the router makes prompts and answers")

    def template(self) -> dict[str, Any]:
        """As fields of `RouterConfig`. Raises the errors of `read_template_option`."""
        text = None if self.chat_template is None else read_template_option(self.chat_template)
        return {"chat_template": text, "chat_template_content_format": self.chat_template_content_format}

    def parsing(self) -> Parsing:
        return Parsing(self.enable_auto_tool_choice, self.tool_call_parser, self.reasoning_parser)

    def answers(self) -> dict[str, Any]:
        """As fields of `RouterConfig`. Raises `ConfigError`."""
        return {
            **self.template(),
            "limits": self.limits(),
            "access": self.access(),
            "parsing": self.parsing(),
            "per_request": self.per_request(),
        }

    def limits(self) -> HttpLimits:
        return HttpLimits(write_s=self.http_write_timeout)

    def per_request(self) -> PerRequestMetrics:
        return PerRequestMetrics(self.enable_per_request_metrics, self.per_request_spec_decode_metrics)

    def access(self) -> Access:
        """Raises `ConfigError`."""
        try:
            origins = msgspec.json.decode(self.allowed_origins or "[]", type=tuple[str, ...])
        except msgspec.DecodeError as error:
            raise ConfigError("allowed_origins", f"must be a JSON list of origins: {error}") from None
        for origin in origins:
            if origin not in ("*", "null") and not _ORIGIN.fullmatch(origin):
                raise ConfigError("allowed_origins", f"must be like https://HOST or https://HOST:PORT, got {origin!r}")
        files = self.ssl_keyfile, self.ssl_certfile, self.ssl_ca_certs
        access = Access(self.api_keys(), origins, *files, self.ssl_cert_reqs)
        # Fail before anything slow is loaded.
        access.tls()
        ApiKeys(access.api_keys)
        return access

    def api_keys(self) -> tuple[str, ...]:
        """Raises `ConfigError` if BATON_API_KEY is empty: a missing secret must not open the API."""
        if not self.api_key and "BATON_API_KEY" in os.environ:
            raise ConfigError("api_key", "BATON_API_KEY is set and empty")
        return tuple(self.api_key or ())


@dataclass(frozen=True, slots=True)
class ProcessOptions:
    """Hidden flags are set by a parent process: the pipe `ready_fd` is for reports (`deployment.child`)."""

    ticket_key_file: Annotated[str | None, typer.Option(help="32 random bytes shared by router and engines.")] = None
    keys: Annotated[
        str | None, typer.Option(metavar="DIR", help="Key directory of `baton keys`, ticket key included.")
    ] = None
    ready_fd: Annotated[int | None, typer.Option(hidden=True)] = None
    data_parallel_rank: Annotated[int | None, typer.Option(hidden=True)] = None
    data_parallel_store: Annotated[str | None, typer.Option(hidden=True)] = None


@dataclass(frozen=True, slots=True)
class AdminOptions:
    admin_token_file: Annotated[
        str | None,
        typer.Option(help="File of the token for POST /instances/..., made if missing. Default: BATON_ADMIN_TOKEN."),
    ] = None


def router_config(settings: RoutingSettings, admin: AdminOptions, host: str, **more: Any) -> RouterConfig:
    """Creates a missing admin token file."""
    from baton.router.admin import admin_token
    from baton.router.config.router_config import RouterConfig

    check_settings(settings)
    own = {name: getattr(settings, name) for name in declared_settings(type(settings))}
    return RouterConfig(host_names=(host,), admin_token=admin_token(admin.admin_token_file), **{**own, **more})


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replaces each dataclass parameter of a command by one option per field."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if dataclasses.is_dataclass(hint)}
    own, added = [], []
    for name, parameter in inspect.signature(command).parameters.items():
        if name in groups:
            added += _parameters(groups[name])
        else:
            own.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[name]))

    @functools.wraps(command)
    def run(**arguments: Any) -> None:
        for name, kind in groups.items():
            given = {option.name: arguments.pop(option.name) for option in dataclasses.fields(kind)}
            arguments[name] = kind(**{option: value for option, value in given.items() if value is not None})
        command(**arguments)

    run.__signature__ = inspect.Signature([*own, *added])  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in [*own, *added]}
    # typer would evaluate the original's annotations, which are text.
    del run.__wrapped__
    return run


def _parameters(group: type) -> list[inspect.Parameter]:
    hints, settings = get_type_hints(group, include_extras=True), declared_settings(group)
    parameters = []
    for field in dataclasses.fields(group):
        annotation, default = hints[field.name], field.default
        if field.name in settings:
            one = settings[field.name]
            annotation, default = _option(one), one.default
        parameters.append(
            inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        )
    return parameters


def _option(one: DeclaredSetting) -> Any:
    setting = one.setting
    flags = (one.flag, setting.short) if setting.short is not None else ()
    kind = one.type if setting.parse is None else Any
    return Annotated[kind, typer.Option(*flags, help=setting.help, parser=setting.parse, metavar=setting.metavar)]
