"""A process that checks grammars by compiling them: `python -m baton.structured.check_process`.

The compiler cannot be interrupted, and a hostile grammar may crash it. Input: one JSON value per line, first
`[tokenizer.json, vocab_size, eos_ids]`, then sources. Output per line: a JSON string that says what is wrong, or is
empty. The process ends with its input.
"""

from __future__ import annotations

import json
import resource
import sys
import time

from llguidance import LLMatcher, LLTokenizer

from baton.structured.source import parser_limits
from baton.structured.vocabulary import vocabulary

# More than a valid grammar can take within `parser_limits`, with the vocabulary.
_MAX_MEMORY = 4 << 30
_NUM_STEPS = 16
_STRIDE = 7919
_MAX_STEP_S = 0.25


def grammar_problem(tokens: LLTokenizer, source: str) -> str:
    """A fault of a grammar or its first steps; empty if none."""
    matcher = LLMatcher(tokens, source, log_level=0, limits=parser_limits())
    if matcher.is_error():
        return matcher.get_error()
    for step in range(_NUM_STEPS):
        began = time.thread_time()
        allowed = _ids(matcher.compute_bitmask())
        if matcher.is_error():
            return matcher.get_error()
        if not allowed:
            return "" if step else "it allows no output"
        matcher.try_consume_tokens([allowed[step * _STRIDE % len(allowed)]])
        if time.thread_time() - began > _MAX_STEP_S:
            return "one step of it takes too much work"
        if matcher.is_stopped():
            return matcher.get_error() if matcher.is_error() else ""
    return ""


def _ids(bits: bytes) -> list[int]:
    return [8 * index + bit for index, byte in enumerate(bits) if byte for bit in range(8) if byte >> bit & 1]


def limit_memory() -> None:
    """An operator's lower limit stays."""
    limits = [limit for limit in resource.getrlimit(resource.RLIMIT_AS) if limit != resource.RLIM_INFINITY]
    least = min([_MAX_MEMORY, *limits])
    resource.setrlimit(resource.RLIMIT_AS, (least, least))


def main() -> None:
    limit_memory()
    tokenizer_json, vocab_size, eos_ids = json.loads(sys.stdin.readline())
    try:
        tokens = vocabulary(tokenizer_json, vocab_size, eos_ids)
    except ValueError as error:
        write_line(str(error))
        return
    write_line("")
    for line in sys.stdin:
        write_line(grammar_problem(tokens, json.loads(line)))


def write_line(text: str) -> None:
    sys.stdout.write(json.dumps(text) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
