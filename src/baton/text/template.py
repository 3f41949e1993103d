"""Chat templates: Jinja text that comes with a checkpoint, rendered in a sandbox.

A template is code from a downloaded directory, or an operator's own, so it gets Jinja's immutable sandbox: no attribute
that starts with an underscore, no mutation of its arguments. Clients cannot send one, only values for its variables.
"""

from __future__ import annotations

import datetime
import json
import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from baton.errors import CheckpointError, ConfigError, RequestError

# A text without any of them is no template, but the name of a file (as in vLLM).
_TEMPLATE_CHARS = frozenset("{}\n")


def chosen_template(given: str) -> str:
    """The text of an operator's `--chat-template`: of the file of that name, else what was given, as in vLLM.

    Raises `ConfigError` for a file that cannot be read, and for what is not valid Jinja.
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


class ChatTemplate:
    """One compiled template. Raises `CheckpointError` when `source` is not valid Jinja."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens` gives the names that templates use, such as `bos_token` and `eos_token`; `variables`: all
        the names that this one asks for."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        # The same three helpers that transformers gives to templates; checkpoints rely on them.
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda fmt: datetime.datetime.now().strftime(fmt)
        environment.filters["tojson"] = _to_json
        try:
            self._template = environment.from_string(source)
            self.variables = frozenset(jinja2.meta.find_undeclared_variables(environment.parse(source)))
        except jinja2.TemplateError as error:
            raise CheckpointError(f"the chat template does not compile: {error}") from None
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Return the prompt text of a conversation. `variables`: a client's own, such as `enable_thinking`. `tools`:
        what the model may call.

        Raises `RequestError("messages")` if the template refuses it, `RequestError("chat_template_kwargs")` for a
        variable that is not a client's to set.
        """
        given: dict[str, Any] = {
            "messages": [dict(message) for message in messages],
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
        except (
            jinja2.TemplateError,
            ArithmeticError,
            LookupError,
            MemoryError,
            RecursionError,
            TypeError,
            ValueError,
        ) as error:
            raise RequestError(f"the chat template refuses the messages: {error}", "messages") from None


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)
