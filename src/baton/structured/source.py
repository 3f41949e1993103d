"""From what a client asks for to the source text of a grammar, and the bounds on its work."""

from __future__ import annotations

import json
import re
from typing import Any

from llguidance import LLMatcher, LLParserLimits, grammar_from

from baton.errors import RequestError
from baton.wire import MAX_GRAMMAR_CHARS, StructuredOutputsParams

PARAM = "structured_outputs"
_OPTIONS = "x-guidance"
MAX_EXPANDED = MAX_GRAMMAR_CHARS
_REPEATED = re.compile(r"\{(\d*),?(\d*)\}")
# An escaped character, or a class of them.
_ONE = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)


def source_of(asked: StructuredOutputsParams) -> str:
    """The grammar's source for `llguidance`. Raises `RequestError` for text that is none of its kind.

    Keywords of a schema that are not implemented are refused when it is compiled, also where the schema asks for less.
    """
    try:
        if asked.json is not None:
            options: Any = {"whitespace_flexible": not asked.disable_any_whitespace}
            return LLMatcher.grammar_from_json_schema(_checked(asked.json), overrides=options)
        if asked.regex is not None:
            check_repetition(asked.regex)
            return grammar_from("regex", asked.regex)
        if asked.choice is not None:
            # One terminal, which is one item of a parser's row, where a rule would be as many as there are texts.
            return grammar_from("lark", f"start: CHOICE\nCHOICE: {' | '.join(map(_quoted, asked.choice))}")
        check_repetition(asked.grammar or "")
        return grammar_from("grammar", asked.grammar or "")
    except (ValueError, RecursionError) as error:
        raise refused(str(error)) from None


def _quoted(text: str) -> str:
    """A text in a grammar, which takes no control character as it is; JSON escapes all but one."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _checked(schema: str) -> str:
    """A schema's text. Raises `ValueError` for what is none, and for one that says itself how it is to be read."""
    value = json.loads(schema)
    if isinstance(value, bool):
        return '{"not": {}}' if not value else "{}"
    if not isinstance(value, dict):
        raise ValueError("a JSON schema is an object")
    if _OPTIONS in value:
        raise ValueError(f"{_OPTIONS} is not a keyword of JSON schemas")
    _check_patterns(value)
    return schema


def _check_patterns(schema: Any) -> None:
    """Raise `ValueError` for a regular expression in a schema as `check_repetition` does."""
    if isinstance(schema, dict):
        pattern, properties = schema.get("pattern"), schema.get("patternProperties")
        for regex in (pattern, *(properties if isinstance(properties, dict) else ())):
            if isinstance(regex, str):
                check_repetition(regex)
    if isinstance(schema, dict | list):
        for part in schema.values() if isinstance(schema, dict) else schema:
            _check_patterns(part)


def check_repetition(regex: str) -> None:
    """Raise `ValueError` for a regular expression, or a grammar's text, that is too long when what is repeated a number
    of times is written out: one step in it would take seconds."""
    sizes, last, at = [0], 0, 0
    while at < len(regex):
        repeated = _REPEATED.match(regex, at)
        one = _ONE.match(regex, at)
        if repeated is not None:
            counts = [int(count[:9]) for count in repeated.groups() if count]
            sizes[-1] += last * (max(counts, default=1) - 1)
            last *= max(counts, default=1)
            at = repeated.end()
        elif regex[at] == "(":
            sizes.append(0)
            at += 1
        elif regex[at] == ")" and len(sizes) > 1:
            last = sizes.pop()
            sizes[-1] += last
            at += 1
        else:
            last = 1
            sizes[-1] += 1
            at = one.end() if one is not None else at + 1
        if sizes[-1] > MAX_EXPANDED:
            raise ValueError(f"what it repeats is more than {MAX_EXPANDED} characters long")


def limits() -> LLParserLimits:
    """Bounds on what compiling a grammar and one step in it may take. Beyond them a matcher is in error.

    One step stays within tens of milliseconds: it runs on the engine's thread.
    """
    return LLParserLimits(
        max_items_in_row=2000,
        initial_lexer_fuel=500_000,
        step_lexer_fuel=50_000,
        step_max_items=10_000,
        max_lexer_states=50_000,
        max_grammar_size=100_000,
        verbose_errors=False,
    )


def refused(why: str) -> RequestError:
    """The refusal of a grammar; `why` in one line of bounded length."""
    line = " ".join(why.split()) or "it allows no output"
    return RequestError(f"the grammar is refused: {line[:300]}", PARAM)
