"""The `baton` command. A Baton error ends it with one line on stderr, with its code."""

from __future__ import annotations

import errno
import io
import logging
import os
import resource
import signal
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from baton import __version__
from baton.cli.bench import app as bench_app
from baton.cli.doctor import doctor_command
from baton.cli.generate import generate_command
from baton.cli.help import GroupedCommand
from baton.cli.keys import keys_command
from baton.cli.logs import is_logging, log_to_stderr, logger, wants_json
from baton.cli.router import router_command
from baton.cli.serve import serve_command, up_command
from baton.cli.verify import verify_command
from baton.cli.watch import status_command, top_command
from baton.deployment.processes import CONFIG_STATUS
from baton.error_help import CODE_BY_ERROR, code_of
from baton.errors import BatonError, CheckpointError, ConfigError, RequestError

# Polls of a GNU OpenMP thread before it sleeps: longer than pauses within a step, too short to slow other processes.
_SPIN_COUNT = 20_000

# typer contains or requires click, depending on its version.
_UsageError: Any = typer.BadParameter.__base__

app = typer.Typer(
    name="baton",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    # Tables would truncate flag names.
    rich_markup_mode=None,
)


def _show_version(asked: bool) -> None:
    if asked:
        print(__version__)
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Print the version and end.")
    ] = False,
) -> None:
    """Prefill/decode disaggregated serving with lossless speculative decoding."""


_UP = """Example:
  baton up ORG/NAME --prefill 1 --decode 1 --port 8000 \\
    --speculative-config '{"method": "eagle3", "model": "ORG/HEAD", "num_speculative_tokens": 3}'"""
_SERVE = """Example:
  baton serve ORG/NAME --port 8000"""
_ROUTER = """Example:
  baton router --prefill http://HOST:8101 --decode http://HOST:8102 --ticket-key-file FILE"""

app.command("serve", cls=GroupedCommand, epilog=_SERVE, short_help="Serve one engine with the OpenAI API.")(
    serve_command
)
app.command("up", cls=GroupedCommand, epilog=_UP, short_help="Router and P/D engines on this host.")(up_command)
app.command("router", cls=GroupedCommand, epilog=_ROUTER, short_help="The server for clients over running engines.")(
    router_command
)
app.command("generate", cls=GroupedCommand, short_help="Answer one prompt, in this process.")(generate_command)
app.command("keys", short_help="Make keys for engines and routers.")(keys_command)
app.command("verify", cls=GroupedCommand, short_help="Prove that two servers answer alike.")(verify_command)
app.command("doctor", short_help="Find what cannot be handed off between running servers.")(doctor_command)
app.command("status", short_help="Print the state of a router.")(status_command)
app.command("top", short_help="Watch the state of a router.")(top_command)
app.add_typer(bench_app, name="bench")


def with_dashes(arguments: Sequence[str]) -> list[str]:
    """Underscores in flags' names become dashes, as in vLLM."""
    renamed = list(arguments)
    num_flags = renamed.index("--") if "--" in renamed else len(renamed)
    for index, argument in enumerate(renamed[:num_flags]):
        name, equals, value = argument.partition("=")
        if name.startswith("--"):
            renamed[index] = name.replace("_", "-") + equals + value
    return renamed


def _print_error(text: str, code: str) -> None:
    if is_logging():
        logger.error("%s [%s]", text, code)
    else:
        print(f"error: {text} [{code}]", file=sys.stderr, flush=True)


def _given_value(error: Any, text: str, arguments: Sequence[str]) -> str:
    names = error.param.opts if isinstance(error, typer.BadParameter) and error.param is not None else ()
    values = [
        value if equals else next(iter(arguments[index + 1 :]), "")
        for index, argument in enumerate(arguments)
        for name, equals, value in [argument.partition("=")]
        if name in names
    ]
    return f", got {values[-1]!r}" if values and repr(values[-1]) not in text else ""


def _print_usage_error(error: Any, arguments: Sequence[str]) -> None:
    """JSON logs have no usage text."""
    text = error.format_message().replace(": Value error, ", ": ")
    if error.ctx is None or text == error.ctx.get_help():  # a command without arguments
        error.show()
        return
    if not is_logging():
        print(f"{error.ctx.get_usage()}\nTry '{error.ctx.command_path} --help' for help.\n", file=sys.stderr)
    _print_error(text + _given_value(error, text, arguments), CODE_BY_ERROR[ConfigError])


def _open_standard_streams() -> None:
    """On /dev/null, if closed: sockets would get their numbers."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))


def _leave_removed_directory() -> None:
    try:
        os.getcwd()
    except FileNotFoundError:  # MKL would load nothing
        os.chdir("/")


def _end_on_hangup() -> None:
    """As SIGTERM, except under `nohup`."""
    if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:
        signal.signal(signal.SIGHUP, lambda number, frame: signal.raise_signal(signal.SIGTERM))


def _memory_limit() -> str | None:
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return None
    return f"processes may have {limit / 2**30:.2g} GiB of addresses (ulimit -v), which is too little"


def main(given: Sequence[str] | None = None) -> None:
    """Exit status: 2 for a bad setting, checkpoint or request, else 1."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    _open_standard_streams()
    _leave_removed_directory()
    _end_on_hangup()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    arguments = with_dashes(sys.argv[1:] if given is None else given)
    if wants_json(arguments, os.environ):
        log_to_stderr(form="json")
    # The OpenMP runtime reads it when PyTorch loads. Child processes get `os.environ`, and must not have it.
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
        os.putenv("GOMP_SPINCOUNT", str(_SPIN_COUNT))
    try:
        status = app(arguments, standalone_mode=False)
        sys.stdout.flush()
        raise SystemExit(status if isinstance(status, int) else 0)
    except _UsageError as error:
        _print_usage_error(error, arguments)
        raise SystemExit(error.exit_code) from None
    except BatonError as error:
        _print_error(str(error), code_of(error))
        raise SystemExit(
            CONFIG_STATUS if isinstance(error, ConfigError | CheckpointError | RequestError) else 1
        ) from None
    except (MemoryError, ImportError) as error:
        if (limited := _memory_limit()) is None or isinstance(error, ModuleNotFoundError):
            raise
        _print_error(f"{limited}: {error}".removesuffix(": "), CODE_BY_ERROR[ConfigError])
        raise SystemExit(CONFIG_STATUS) from None
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EPIPE) or error.filename is not None or is_logging():
            raise
        _print_error(f"stdout: {error.strerror}", CODE_BY_ERROR[ConfigError])
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
        raise SystemExit(1) from None
