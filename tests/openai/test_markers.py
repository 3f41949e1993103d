"""Special tokens in answers: parsers see those that are their markers, and clients see none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest
import tokenizers

from baton.openai.tools import Parsing
from baton.parsing import REASONING_PARSERS, TOOL_PARSERS
from testkit.servers.fake_serving import write_tokenizer
from tests.openai.test_tools import TEMPLATE, TOOLS, chat, streamed, with_client

JUNK = "<|junk|>"
HARMONY = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>"
# An answer with reasoning (if the parser reads any), a word, and a call; junk in between.
ANSWERS = {
    "hermes": f'A{JUNK}B<tool_call>{{"name": {JUNK}"stop", "arguments": {{}}}}</tool_call>{JUNK}',
    "llama3_json": f'{JUNK}<|python_tag|>{{"name": "stop", {JUNK}"parameters": {{}}}}',
    "mistral": f"A{JUNK}B[TOOL_CALLS]stop{JUNK}[CALL_ID]abcdefghi[ARGS]{{}}",
    "openai": f"{HARMONY}final<|message|>A{JUNK}B<|end|><|start|>assistant<|channel|>commentary to=functions.stop "
    f"<|constrain|>json<|message|>{{}}<|call|>",
    "qwen3_xml": f"A{JUNK}B<tool_call>{JUNK}<function=stop></function></tool_call>",
}


@pytest.fixture(scope="module")
def special(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer whose markers are all special tokens, as in most fine-tunes of other families."""
    directory = write_tokenizer(tmp_path_factory.mktemp("special"))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    backend = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    formats = [*TOOL_PARSERS.values(), *REASONING_PARSERS.values()]
    backend.add_special_tokens([JUNK, *sorted({marker for each in formats for marker in each.markers})])
    backend.save(str(directory / "tokenizer.json"))
    return directory


@pytest.mark.parametrize("name", sorted(TOOL_PARSERS))
async def test_calls_are_found_and_nothing_leaks(special: Path, name: str) -> None:
    async def act(client: openai.AsyncOpenAI) -> None:
        for more in ({}, {"extra_body": {"skip_special_tokens": True}}):
            message = (await chat(client, **more)).choices[0].message
            assert [(call.function.name, call.function.arguments) for call in message.tool_calls] == [("stop", "{}")]
            assert message.content == (None if name == "llama3_json" else "AB")
            stream, _ = await streamed(client, **more)
            assert (stream["content"], [call[1:] for call in stream["calls"]]) == (
                message.content or "",
                [["stop", "{}"]],
            )

    await with_client(special, ANSWERS[name], Parsing(True, name, None), act)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen3", f"<think>H{JUNK}m</think>A{JUNK}B"),
        ("deepseek_r1", f"H{JUNK}m</think>A{JUNK}B"),
        (
            "openai_gptoss",
            f"<|channel|>analysis<|message|>H{JUNK}m<|end|><|start|>assistant<|channel|>final<|message|>A{JUNK}B",
        ),
    ],
)
async def test_reasoning_is_found_between_special_markers(special: Path, name: str, text: str) -> None:
    async def act(client: openai.AsyncOpenAI) -> None:
        message: Any = (await chat(client, tools=openai.omit)).choices[0].message
        assert (message.content, message.reasoning_content) == ("AB", "Hm")
        stream, _ = await streamed(client, tools=openai.omit)
        assert (stream["content"], stream["reasoning"]) == ("AB", "Hm")
        shown: Any = (
            (await chat(client, tools=openai.omit, extra_body={"skip_special_tokens": False})).choices[0].message
        )
        assert (shown.content, shown.reasoning_content) == (f"A{JUNK}B", f"H{JUNK}m"), "unless the client asks for them"

    await with_client(special, text, Parsing(reasoning_parser=name), act)


async def test_markers_of_what_is_not_read_stay_hidden(special: Path) -> None:
    async def act(client: openai.AsyncOpenAI) -> None:
        for more in ({"tool_choice": "none"}, {"tools": openai.omit}):
            assert (await chat(client, **more)).choices[0].message.content == "AB[]"

    assert TOOLS
    await with_client(special, f"A{JUNK}B<tool_call>[]</tool_call>", Parsing(True, "hermes", None), act)
