"""A grammar's source text from a client's parameters, with bounds on its work."""

from __future__ import annotations

import json
import re
from typing import Any

from llguidance import LLMatcher, LLParserLimits, grammar_from

from baton.errors import RequestError
from baton.sampling_params import MAX_GRAMMAR_CHARS, StructuredOutputsParams

PARAM = "structured_outputs"
_OPTIONS = "x-guidance"
MAX_EXPANDED = MAX_GRAMMAR_CHARS
_NO_OUTPUT = "NoExtensionBias"  # llguidance's word
_REPEATED = re.compile(r"\{(\d*),?(\d*)\}")
# An escaped character or a character class.
_ONE = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)


def source_of(asked: StructuredOutputsParams) -> str:
    """The source for `llguidance`. Raises `RequestError` for malformed text; schemas with unimplemented keywords are
    refused when they are compiled."""
    try:
        if asked.json is not None:
            options: Any = {"whitespace_flexible": not asked.disable_any_whitespace}
            return LLMatcher.grammar_from_json_schema(_checked(asked.json), overrides=options)
        if asked.regex is not None:
            check_repetition(asked.regex)
            return grammar_from("regex", asked.regex)
        if asked.choice is not None:
            # A terminal is one item in a parser row; a rule would be one per text.
            return grammar_from("lark", f"start: CHOICE\nCHOICE: {' | '.join(map(_quoted, asked.choice))}")
        check_repetition(asked.grammar or "")
        return grammar_from("grammar", asked.grammar or "")
    except (ValueError, RecursionError) as error:
        raise grammar_error(str(error)) from None


def _quoted(text: str) -> str:
    """JSON escapes all control characters but DEL."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _checked(schema: str) -> str:
    """Raises `ValueError` if the text is not a schema, or sets options of `llguidance`."""
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
    if isinstance(schema, dict):
        pattern, properties = schema.get("pattern"), schema.get("patternProperties")
        for regex in (pattern, *(properties if isinstance(properties, dict) else ())):
            if isinstance(regex, str):
                check_repetition(regex)
    if isinstance(schema, dict | list):
        for part in schema.values() if isinstance(schema, dict) else schema:
            _check_patterns(part)


def check_repetition(regex: str) -> None:
    """Raises `ValueError` for text that is too long with its counted repetitions expanded: one step would take
    seconds."""
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


def parser_limits() -> LLParserLimits:
    """Beyond these limits a matcher is in error. A step, on the engine thread, must stay within tens of
    milliseconds."""
    return LLParserLimits(
        max_items_in_row=2000,
        initial_lexer_fuel=500_000,
        step_lexer_fuel=50_000,
        step_max_items=10_000,
        max_lexer_states=50_000,
        max_grammar_size=100_000,
        verbose_errors=False,
    )


def grammar_error(why: str) -> RequestError:
    line = " ".join(why.replace("<non-verbose/>", "").split())
    line = "it allows no output" if line in ("", _NO_OUTPUT) else line[:300]
    return RequestError(f"the grammar is refused: {line}", PARAM)
