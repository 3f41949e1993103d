"""Tool calls and reasoning in text: results do not depend on how the text is split, and nothing is lost."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.parsing import REASONING_PARSERS, TOOL_PARSERS, CallDelta, Content, Parser, Reasoning
from baton.parsing.forced import NamedParser, PlainParser, RequiredParser

Found = tuple[str, str, list[tuple[str, str]]]
SCHEMAS = {
    "get_weather": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    "stop": None,
}


def found(parser: Parser, pieces: Sequence[str]) -> Found:
    """Content, reasoning, and (name, arguments) of each call. Checks the order of events."""
    events = [event for piece in pieces for event in parser.push(piece)] + parser.finish()
    calls: list[tuple[str, str]] = []
    for event in events:
        if isinstance(event, CallDelta) and event.name is not None:
            assert event.index == len(calls)
            calls.append((event.name, event.arguments))
        elif isinstance(event, CallDelta):
            assert event.index == len(calls) - 1
            calls[-1] = calls[-1][0], calls[-1][1] + event.arguments
    words = "".join(event.text for event in events if isinstance(event, Content))
    return words, "".join(event.text for event in events if isinstance(event, Reasoning)), calls


# Examples from the formats' own templates and model cards, then deviations.
CALL = '{"name": "get_weather", "arguments": {"city": "Br\\"u}ck", "days": [1, {"a": "]"}]}}'
ARGUMENTS = '{"city": "Br\\"u}ck", "days": [1, {"a": "]"}]}'
QUOTED = json.dumps(ARGUMENTS)
LLAMA = CALL.replace("arguments", "parameters")
XML = "<function=get_weather>\n<parameter=city>\n12 Main\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>"
CASES: dict[str, list[tuple[str, Found]]] = {
    "hermes": [
        ("no call", ("no call", "", [])),
        (f"<tool_call>\n{CALL}\n</tool_call>", ("", "", [("get_weather", ARGUMENTS)])),
        (
            f'See.\n\n<tool_call>{CALL}</tool_call>\n<tool_call>{{"arguments": {{}}, "name": "stop"}}</tool_call>\n',
            ("See.\n\n", "", [("get_weather", ARGUMENTS), ("stop", "{}")]),
        ),
        (f"<tool_call>{CALL}</tool_call> and so", (" and so", "", [("get_weather", ARGUMENTS)])),
        ('<tool_call>{"name": "stop"}', ('<tool_call>{"name": "stop"}', "", [])),
        ('<tool_call>{"name": "stop", "arguments": no}', ('<tool_call>{"name": "stop", "arguments": no}', "", [])),
        ('<tool_call>{"name": "stop", "arguments": {"a', ("", "", [("stop", '{"a')])),
        ("<tool_call>no JSON</tool_call>", ("<tool_call>no JSON</tool_call>", "", [])),
        ('<tool_call>{"nam": 1}</tool_call>', ('<tool_call>{"nam": 1}</tool_call>', "", [])),
        ('<tool_call>{"name": 7}</tool_call>', ('<tool_call>{"name": 7}</tool_call>', "", [])),
        ("a < b <tool", ("a < b <tool", "", [])),
        # Granite 4 writes the arguments as a string of JSON.
        (
            f'<tool_call>{{"name": "get_weather", "arguments": {QUOTED}}}</tool_call>',
            ("", "", [("get_weather", ARGUMENTS)]),
        ),
        (f'<tool_call>{{"arguments": {QUOTED}, "name": "stop"}}</tool_call>', ("", "", [("stop", ARGUMENTS)])),
        ('<tool_call>{"name": "stop", "arguments": " "}</tool_call>', ("", "", [("stop", "{}")])),
        *(
            (text := f'<tool_call>{{"name": "stop", "arguments": {value}}}</tool_call>', (text, "", []))
            for value in ('"no JSON"', '"[1]"', '"\\ud800"', "null")
        ),
    ],
    "llama3_json": [
        ("no call", ("no call", "", [])),
        (LLAMA, ("", "", [("get_weather", ARGUMENTS)])),
        (f'{{"name": "get_weather", "parameters": {QUOTED}}}', ("", "", [("get_weather", ARGUMENTS)])),
        (
            f'<|python_tag|>{LLAMA}; {{"name": "stop", "parameters": {{}}}}',
            ("", "", [("get_weather", ARGUMENTS), ("stop", "{}")]),
        ),
        ('{"name": "Ada", "age": 36}', ('{"name": "Ada", "age": 36}', "", [])),
        ('{"answer": 1} it is', ('{"answer": 1} it is', "", [])),
        (f"See {LLAMA}", (f"See {LLAMA}", "", [])),
        ("<|python", ("<|python", "", [])),
    ],
    "mistral": [
        ("no call", ("no call", "", [])),
        (
            f'[TOOL_CALLS][{CALL}, {{"name": "stop", "arguments": {{}}}}]',
            ("", "", [("get_weather", ARGUMENTS), ("stop", "{}")]),
        ),
        (
            f"Well.[TOOL_CALLS]get_weather{ARGUMENTS}[TOOL_CALLS]stop[ARGS]{{}}",
            ("Well.", "", [("get_weather", ARGUMENTS), ("stop", "{}")]),
        ),
        *(
            (
                f"[TOOL_CALLS]stop[CALL_ID]{given}[ARGS]{{}}[TOOL_CALLS]get_weather[CALL_ID]bcdefghij[ARGS]{ARGUMENTS}",
                ("", "", [("stop", "{}"), ("get_weather", ARGUMENTS)]),
            )
            for given in ("abcdefghi", "", "call_1-x")
        ),
        ("[TOOL_CALLS]stop[CALL_ID]a b[ARGS]{}", ("[TOOL_CALLS]stop[CALL_ID]a b[ARGS]{}", "", [])),
        ("[TOOL_CALLS]stop[CALL_ID]", ("[TOOL_CALLS]stop[CALL_ID]", "", [])),
        ("[TOOL_CALLS] none of them", ("[TOOL_CALLS] none of them", "", [])),
        ("[TOOL_CALLS][1]", ("[TOOL_CALLS][1]", "", [])),
    ],
    "openai": [
        ("no call", ("no call", "", [])),
        ("<|channel|>final<|message|>Yes.<|return|>", ("Yes.", "", [])),
        (
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather "
            f"<|constrain|>json<|message|>{ARGUMENTS}<|call|>",
            ("", "Hm.", [("get_weather", ARGUMENTS)]),
        ),
        (
            f" to=functions.get_weather<|channel|>commentary json<|message|>{ARGUMENTS}<|call|><|start|>assistant"
            " to=functions.stop<|channel|>commentary<|message|>",
            ("", "", [("get_weather", ARGUMENTS), ("stop", "{}")]),
        ),
        (
            "<|channel|>commentary<|message|>I look.\n<|end|><|start|>assistant<|channel|>commentary"
            " to=functions.stop<|message|>{<|call|>",
            ("I look.\n", "", [("stop", "{")]),
        ),
        # Without the prefix, in another channel.
        (
            "<|channel|>analysis to=get_weather<|constrain|>json<|message|>" + ARGUMENTS + "<|call|><|start|>assistant"
            " to=python_stop<|channel|>commentary<|message|>{}<|call|>",
            ("", "", [("get_weather", ARGUMENTS), ("python_stop", "{}")]),
        ),
        ("<|channel|>commentary to=assistant<|message|>A<|call|>", ("A", "", [])),
        ("<|channel|>analysis to=python<|message|>A<|call|>", ("", "A", [])),
        ("<|channel|>analysis to=browser.search code<|message|>A<|call|>", ("", "A", [])),
        ("<|channel|>commentary to=functions.<|message|>A<|call|>", ("A", "", [])),
        ("<|channel|>analysis<|message|>cut", ("", "cut", [])),
        ("<|channel|>analysis", ("<|channel|>analysis", "", [])),
        ("to be", ("to be", "", [])),
        *(
            (text := "<|channel|>" + "x" * size + "<|message|>A<|end|>", ("A" if size < 1014 else text, "", []))
            for size in (1000, 1013, 1014, 1024, 2000)
        ),
    ],
    "qwen3_xml": [
        ("no call", ("no call", "", [])),
        (f"<tool_call>\n{XML}\n</tool_call>", ("", "", [("get_weather", '{"city": "12 Main", "days": 3}')])),
        (
            f"I look.\n<tool_call>{XML}</tool_call>\n<tool_call><function=stop></function></tool_call>",
            ("I look.\n", "", [("get_weather", '{"city": "12 Main", "days": 3}'), ("stop", "{}")]),
        ),
        (
            "<tool_call><function=stop><parameter=x>[1, 2]</parameter><parameter=y>a\nb</parameter></function>",
            ("", "", [("stop", '{"x": "[1, 2]", "y": "a\\nb"}')]),
        ),
        *(
            (  # Python reads these as numbers, but they are not JSON.
                f"<tool_call><function=stop><parameter=x>{text}</parameter></function></tool_call>",
                ("", "", [("stop", f'{{"x": "{text}"}}')]),
            )
            for text in ("NaN", "-Infinity", "1e999")
        ),
        ("<tool_call>no function", ("<tool_call>no function", "", [])),
        # Models omit tags: the opening one, a value's end, and those between two calls.
        (
            "See.\n<function=stop>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
            ("See.\n", "", [("stop", '{"a": "1"}')]),
        ),
        ("write <function=other> or <function=", ("write <function=other> or <function=", "", [])),
        (
            "<tool_call><function=get_weather><parameter=city>\nBern\n<parameter=days>2</parameter></function></tool_call>",
            ("", "", [("get_weather", '{"city": "Bern", "days": 2}')]),
        ),
        (
            "<tool_call><function=stop></function><function=get_weather></function></tool_call>",
            ("", "", [("stop", "{}"), ("get_weather", "{}")]),
        ),
        ("<tool_call><function=stop><parameter=x>never ends", ("", "", [("stop", "{")])),
        # The end of a line instead of the end of the tag; a value without its end at the end of a function.
        (
            "<tool_call><function=get_weather>\n<parameter=days\n2\n</parameter>\n"
            "<parameter=city >Bern</parameter></function>",
            ("", "", [("get_weather", '{"days": 2, "city": "Bern"}')]),
        ),
        (
            "<tool_call><function=get_weather><parameter=city>\nBern\n</function>\n</tool_call>\n"
            "<tool_call><function=stop></function></tool_call>",
            ("", "", [("get_weather", '{"city": "Bern"}'), ("stop", "{}")]),
        ),
        (
            "<tool_call><function=get_weather><parameter=city>a</function>b</function>\n",
            ("", "", [("get_weather", '{"city": "a</function>b"}')]),
        ),
    ],
}


@pytest.mark.parametrize("name", sorted(TOOL_PARSERS))
def test_every_format_has_cases(name: str) -> None:
    for text, expected in CASES[name]:
        for pieces in ([text], list(text)):
            assert found(TOOL_PARSERS[name].make(SCHEMAS), pieces) == expected, text


STOP = {
    "hermes": '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>',
    "llama3_json": '{"name": "stop", "parameters": {}}',
    "mistral": "[TOOL_CALLS]stop[ARGS]{}",
    "openai": "<|start|>assistant to=functions.stop<|channel|>commentary<|message|>{}<|call|>",
    "qwen3_xml": "<tool_call>\n<function=stop>\n</function>\n</tool_call>",
}


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        # As the streams of vLLM 0.32's parsers. Its whole answers of qwen3_xml and mistral are stripped.
        ("A{0}", "A"),
        ("A\n\n{0}", "A\n\n"),
        ("  A \n{0}", "  A \n"),
        ("\n\n{0}", ""),
        ("{0}\n", ""),
        ("{0}\n{0}", ""),
        ("A\n{0}\n{0}", "A\n"),
        ("A\n\n{0}\n\n{0}\n", "A\n\n"),
        ("A\n{0}\n\n", "A\n"),
        ("A \n", "A \n"),
        ("\n A", "\n A"),
        ("\n\n", "\n\n"),
        # As the streams of its qwen3_xml; the others drop words after a call.
        ("{0}\nB", "\nB"),
        ("{0}\n\nB \n", "\n\nB \n"),
        ("A\n{0}\nB\n", "A\n\nB\n"),
        ("A\n{0}\n B \n{0}\nC", "A\n\n B \n\nC"),
    ],
)
@pytest.mark.parametrize("name", sorted(TOOL_PARSERS))
def test_white_space_next_to_calls(name: str, shape: str, expected: str) -> None:
    text, num_calls = shape.replace("{0}", STOP[name]), shape.count("{0}")
    if name == "llama3_json" and not shape.lstrip().startswith("{0}"):
        expected, num_calls = text, 0  # not a call, as in vLLM's streams
    for pieces in ([text], list(text)):
        assert found(TOOL_PARSERS[name].make(SCHEMAS), pieces) == (expected, "", [("stop", "{}")] * num_calls)


@pytest.mark.parametrize(("gap", "expected"), [("\n\n", ""), ("\n\nA\n", "\n\nA\n")])
@pytest.mark.parametrize("name", ["hermes", "qwen3_xml"])
def test_white_space_between_reasoning_and_a_call(name: str, gap: str, expected: str) -> None:
    text = f"<think>\nR\n</think>{gap}{STOP[name]}"
    for pieces in ([text], list(text)):
        parser = REASONING_PARSERS["qwen3"].make(TOOL_PARSERS[name].make(SCHEMAS), False)
        assert found(parser, pieces) == (expected, "\nR\n", [("stop", "{}")])


JSON = ["{", "}", "[", "]", ",", ":", '"', "\\", '"name"', '"stop"', '"arguments"', CALL, LLAMA]
MARKERS = [
    "[CALL_ID]",
    "<tool_call>",
    "</tool_call>",
    "<tool",
    "[TOOL_CALLS]",
    "[ARGS]",
    ";",
    "<|python_tag|>",
    "<think>",
    "</think>",
]
TAGS = ["<function=stop>", "<parameter=a>", "</parameter>", "</function>", ">"]
HARMONY = [
    "<|start|>",
    "<|channel|>",
    "<|message|>",
    "<|end|>",
    "<|call|>",
    "to=functions.stop",
    "analysis",
    "final",
    "to=",
]
WORDS = [*JSON, *MARKERS, *TAGS, " ", "\n", "x", "1", "stop"]


@st.composite
def cut_texts(draw: st.DrawFn, words: Sequence[str]) -> list[str]:
    text = "".join(draw(st.lists(st.sampled_from(words), max_size=14)))
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return [text[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(text)], strict=True)]


MAKERS: list[Callable[[], Parser]] = [
    *(lambda form=form: form.make(SCHEMAS) for form in TOOL_PARSERS.values()),  # type: ignore[misc]
    *(
        lambda form=form, opened=opened: form.make(TOOL_PARSERS["hermes"].make(SCHEMAS), opened)  # type: ignore[misc]
        for form in REASONING_PARSERS.values()
        for opened in (None, False, True)
    ),
    RequiredParser,
    lambda: NamedParser("stop"),
]


@settings(max_examples=150, deadline=None)
@given(st.one_of(cut_texts([*WORDS, *HARMONY]), cut_texts([*HARMONY, "x", " ", "{"])))
def test_results_do_not_depend_on_how_the_text_is_cut(pieces: list[str]) -> None:
    """No text, however malformed, breaks a parser."""
    text = "".join(pieces)
    for make in MAKERS:
        whole = found(make(), [text])
        assert found(make(), pieces) == whole
        assert found(make(), list(text)) == whole


@settings(max_examples=100, deadline=None)
@given(cut_texts(WORDS))
def test_without_calls_every_character_is_content(pieces: list[str]) -> None:
    for form in TOOL_PARSERS.values():
        words, _, calls = found(form.make(SCHEMAS), pieces)
        if not calls:
            assert words == "".join(pieces)


def test_answers_that_a_grammar_forces() -> None:
    text = '[{"name": "get_weather", "parameters": {"city": "Bern"}}, {"name": "stop", "parameters": {}}]'
    for pieces in ([text], list(text)):
        assert found(RequiredParser(), pieces) == ("", "", [("get_weather", '{"city": "Bern"}'), ("stop", "{}")])
    # Truncated by max_tokens.
    assert found(RequiredParser(), [text[:45]]) == ("", "", [("get_weather", '{"city')])
    assert found(NamedParser("stop"), ['{"a"', ": 1}"]) == ("", "", [("stop", '{"a": 1}')])


def test_a_malformed_forced_call_and_what_follows_it_is_content() -> None:
    call = '{"name": "stop", "parameters": {}}'
    # Only what separates valid calls is not content.
    for pieces in ([f"[{call}, x, [y], {call}]"], list(f"[{call}, x, [y], {call}]")):
        assert found(RequiredParser(), pieces) == (", x, [y], ", "", [("stop", "{}"), ("stop", "{}")])


@pytest.mark.parametrize("text", ['[{"name": 5}, [hello], bye]', "[1, 2]", '[{"nam', ", ] no"])
def test_a_forced_call_that_is_not_one_is_content(text: str) -> None:
    for pieces in ([text], list(text)):
        assert found(RequiredParser(), pieces) == (text, "", [])


@pytest.mark.parametrize(
    ("name", "opened", "text", "expected"),
    [
        ("qwen3", False, "<think>\nhm\n</think>\n\nYes.\n", ("\n\nYes.\n", "\nhm\n")),
        ("deepseek_r1", None, "R\n</think>\n\n A", ("\n\n A", "R\n")),
        ("qwen3", True, "hm</think>Yes.", ("Yes.", "hm")),
        ("qwen3", False, "Yes.", ("Yes.", "")),
        ("qwen3", False, "<think>cut", ("", "cut")),
        ("deepseek_r1", None, "hm</think>Yes.", ("Yes.", "hm")),
        # The template has ended the reasoning, because the client disabled it.
        ("deepseek_r1", False, "Yes.", ("Yes.", "")),
        ("deepseek_r1", None, "<think>hm</think>Yes <think>.", ("Yes <think>.", "hm")),
        (
            "openai_gptoss",
            False,
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
            ("Yes.", "hm"),
        ),
        ("openai_gptoss", False, "Yes.", ("Yes.", "")),
    ],
)
def test_reasoning(name: str, opened: bool | None, text: str, expected: tuple[str, str]) -> None:
    assert found(REASONING_PARSERS[name].make(PlainParser(), opened), list(text))[:2] == expected


@pytest.mark.parametrize("opened", [False, True])
def test_a_call_ends_reasoning_that_nothing_closed(opened: bool) -> None:
    call = f"<tool_call>{CALL}</tool_call>"
    text = ("" if opened else "<think>") + f"I look. {call}"
    for pieces in ([text], list(text)):
        parser = REASONING_PARSERS["qwen3"].make(TOOL_PARSERS["hermes"].make(SCHEMAS), opened)
        assert found(parser, pieces) == ("", "I look. ", [("get_weather", ARGUMENTS)])
        plain = REASONING_PARSERS["qwen3"].make(PlainParser(), opened)
        assert found(plain, pieces) == ("", f"I look. {call}", []), "without tools there are no calls"


@pytest.mark.parametrize(
    "schema", [True, [], {"properties": []}, {"properties": {"x": True}}, {"properties": {"x": 1}}]
)
def test_schemas_may_be_anything(schema: object) -> None:
    text = "<tool_call><function=f><parameter=x>1</parameter></function></tool_call>"
    assert found(TOOL_PARSERS["qwen3_xml"].make({"f": schema}), [text])[2] == [("f", '{"x": "1"}')]


def test_a_long_value_takes_linear_time() -> None:
    """Each piece costs the same, however much of a value came before it."""
    pieces = ["<tool_call><function=stop><parameter=x>", *["abcd "] * 60_000, "</parameter></function></tool_call>"]
    ((name, arguments),) = found(TOOL_PARSERS["qwen3_xml"].make(SCHEMAS), pieces)[2]
    assert name == "stop"
    assert len(json.loads(arguments)["x"]) == 5 * 60_000


def test_half_a_surrogate_pair_is_no_name_and_no_value() -> None:
    """JSON can express it, but an answer in UTF-8 cannot: the text stays as the model wrote it."""
    text = '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'
    assert found(TOOL_PARSERS["hermes"].make(SCHEMAS), [text]) == (text, "", [])
    text = '<tool_call><function=f><parameter=x>["\\ud800"]</parameter></function></tool_call>'
    ((_, arguments),) = found(TOOL_PARSERS["qwen3_xml"].make({}), [text])[2]
    assert arguments.encode() == b'{"x": "[\\"\\\\ud800\\"]"}'
