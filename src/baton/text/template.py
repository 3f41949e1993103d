"""Chat templates: Jinja text from a checkpoint or the operator, rendered in a sandbox.

Templates are downloaded code: the immutable sandbox forbids attributes with a leading underscore, and mutation of
arguments. Clients send only values for its variables.
"""

from __future__ import annotations

import datetime
import functools
import json
import logging
import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jinja2
import jinja2.meta
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from baton.checkpoint_files import read_text
from baton.errors import CheckpointError, ConfigError, RequestError
from baton.text.content_format import (
    ContentFormat,
    ContentFormatOption,
    content_text,
    detect_content_format,
    with_content,
)

log = logging.getLogger(__name__)

DEFAULT, TOOL_USE = "default", "tool_use"
TEMPLATE_DIRECTORY = "additional_chat_templates"
# Templates read the first, gpt-oss's the second.
_REASONING = ("reasoning_content", "thinking", "reasoning")
# Text without any of these is a file name, as in vLLM.
_TEMPLATE_CHARS = frozenset("{}\n")


def read_template_option(given: str) -> str:
    """`--chat-template`: a file's name, else the text itself, as in vLLM.

    Raises `ConfigError`.
    """
    try:
        text = Path(given).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        if _TEMPLATE_CHARS.isdisjoint(given):
            why = getattr(error, "strerror", None) or error
            what = f"{given!r} is no template, and cannot be read as a file: {why}"
            raise ConfigError("chat_template", what) from None
        text = given
    try:
        ChatTemplate(text, {})
    except CheckpointError as error:
        raise ConfigError("chat_template", str(error)) from None
    return text


def read_templates(root: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """By name. As in transformers, files replace those in `settings` (tokenizer_config.json).

    Raises `CheckpointError`.
    """
    templates: dict[str, str] = {}
    value = settings.get("chat_template")
    if isinstance(value, str):
        templates[DEFAULT] = value
    elif isinstance(value, list):
        entries = [entry for entry in value if isinstance(entry, Mapping)]
        templates = {str(entry.get("name")): str(entry.get("template")) for entry in entries}
    files = {DEFAULT: root / "chat_template.jinja"}
    files |= {path.stem: path for path in sorted((root / TEMPLATE_DIRECTORY).glob("*.jinja"))}
    own = {name: read_text(path) for name, path in files.items() if path.is_file()}
    return own or templates


class _Compiled(NamedTuple):
    template: jinja2.Template
    variables: frozenset[str]
    content_format: ContentFormat
    knows_developer: bool


@functools.lru_cache(maxsize=8)
def _compile(source: str) -> _Compiled:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    # Helpers of transformers that templates rely on.
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda fmt: datetime.datetime.now().strftime(fmt)
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = _Namespace
    environment.filters["tojson"] = _to_json
    try:
        template = environment.from_string(source)
        parsed = environment.parse(source)
        variables = frozenset(jinja2.meta.find_undeclared_variables(parsed))
    except jinja2.TemplateError as error:
        raise CheckpointError(f"the chat template does not compile: {error}") from None
    texts = [*parsed.find_all(nodes.Const), *parsed.find_all(nodes.TemplateData)]
    knows_developer = any("developer" in str(getattr(node, "value", getattr(node, "data", ""))) for node in texts)
    return _Compiled(template, variables, detect_content_format(parsed), knows_developer)


class ChatTemplate:
    """Raises `CheckpointError`."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], content_format: ContentFormatOption = "auto"
    ) -> None:
        """`special_tokens` by name, such as `bos_token`. The attribute `variables` has all names that the template
        uses."""
        self._template, self.variables, detected, self._knows_developer = _compile(source)
        self.content_format = detected if content_format == "auto" else content_format
        if self.content_format != detected:
            what = "chat_template_content_format is %s, but the chat template seems to read %s"
            log.warning(what, content_format, detected)
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """`variables`: set by the client, such as `enable_thinking`.

        Raises `RequestError("messages")` if the template refuses them, and `RequestError("chat_template_kwargs")` for a
        variable that clients may not set.
        """
        given: dict[str, Any] = {
            "messages": self._shown(messages),
            "add_generation_prompt": add_generation_prompt,
            "tools": tools,
            "documents": None,
            **self._special_tokens,
        }
        for name in variables or {}:
            if name in given or not name.isidentifier():
                shown = reprlib.repr(name)
                raise RequestError(f"chat_template_kwargs: {shown} cannot be set there", "chat_template_kwargs")
        try:
            return self._template.render({**given, **(variables or {})})
        except Exception as error:  # of filters too
            raise RequestError(f"the chat template refuses the messages: {error}", "messages") from None

    def _shown(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """As in vLLM, if the template does not know the role `developer`, all developer and system messages become one
        system message at the beginning, as strict templates require."""
        shown = [with_content(_with_reasoning(message), self.content_format) for message in messages]
        if self._knows_developer or all(message.get("role") != "developer" for message in shown):
            return shown
        system = [message for message in shown if message.get("role") in ("system", "developer")]
        text = "\n\n".join(content_text(message) for message in system)
        first = with_content({**system[0], "role": "system", "content": text}, self.content_format)
        return [first, *(message for message in shown if message.get("role") not in ("system", "developer"))]


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _with_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    reasoning = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    if reasoning is None:
        return dict(message)
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text, which only training needs."""

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Dict:
    """`dict` without the attributes of a type, through which a template could leave the sandbox."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """Jinja's namespace, without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # `self` may be a key of `kwargs`
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold {name!r}")
