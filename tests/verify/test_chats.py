"""`baton verify --chat`: conversations through `/v1/chat/completions`, and prompts with two BOS tokens."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from testkit.servers.fake_openai import TIE, FakeOpenAI
from tests.verify.command import Verify

BOS = 60
ASKED = [{"role": "user", "content": "a\u2028b"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
LINES = [
    {"messages": ASKED, "id": "left out"},
    {"messages": [*ASKED, {"role": "assistant", "content": "c"}], "tools": [TOOL], "chat_template_kwargs": {"x": 1}},
    ASKED,
]


@pytest.fixture
def chats(tmp_path: Path) -> str:
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\r\n\n" for line in LINES), encoding="utf-8")
    return str(path)


def test_chats_go_to_the_servers_as_they_are(chats: str, verify: Verify) -> None:
    reference, candidate = FakeOpenAI(), FakeOpenAI()
    result = verify(reference, candidate, "--chat", chats)
    assert result.code == 0, result
    assert result.out.endswith("identical: 3/3\n")
    for fake in (reference, candidate):
        plain, full, bare = fake.requests
        assert plain["messages"] == bare["messages"] == ASKED
        assert full["messages"] == LINES[1]["messages"]
        assert full["tools"] == [TOOL]
        assert full["tool_choice"] == "none"
        assert full["chat_template_kwargs"] == {"x": 1}
        assert not {"tools", "tool_choice", "chat_template_kwargs", "prompt", "id"} & plain.keys()
        assert (plain["logprobs"], plain["top_logprobs"]) == (True, 2)


def test_token_ids_and_near_ties_are_read_from_a_chats_logprobs(chats: str, verify: Verify) -> None:
    def turned(answer: dict, index: int) -> None:
        """Without `token_ids`; the runner-up wins at a near-tie."""
        choice = answer["choices"][0]
        del choice["token_ids"]
        if index == 0:
            scored = choice["logprobs"]["content"][TIE]
            scored["token"] = scored["top_logprobs"][1]["token"]

    result = verify(FakeOpenAI(gap=1e-6), FakeOpenAI(change=turned), "--chat", chats)
    assert result.code == 0, result
    assert "near-tie candidate: request 0 (chat of 1 messages)" in result.out
    assert result.out.endswith("identical: 2/3, parted at near-ties of the reference: 1\n")


def test_a_template_that_writes_otherwise_is_named_and_no_near_tie(chats: str, verify: Verify) -> None:
    other = FakeOpenAI(template="{role}> {content}\n")
    result = verify(FakeOpenAI(), other, "--chat", chats, "--near-tie", "100")
    assert result.code == 1
    what = f"token 4 of the prompt, which the chat template wrote: expected {ord(':')}, got {ord('>')}"
    assert f"DIFFERENT candidate: request 1 (chat of 2 messages): {what}" in result.out
    longer = FakeOpenAI(template="{role}: {content}\n!")
    result = verify(FakeOpenAI(template="{role}: {content}\n"), longer, "--chat", chats)
    assert "request 0 (chat of 1 messages): token 12 of the prompt" in result.out
    assert "expected its end, got 33" in result.out


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("{", "line 1: "),
        ('{"prompt": "a"}', "line 1: Object missing required field `messages`"),
        ('{"messages": "a"}', "line 1: Expected `array`"),
        ("[]", "line 1: must hold at least one message"),
        ("", "must hold 1 to 100000 prompts, got 0"),
        ("[" * 100_000, "line 1: "),
    ],
)
def test_malformed_chats_name_their_line(line: str, what: str, tmp_path: Path, verify: Verify) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(line)
    result = verify(FakeOpenAI(), FakeOpenAI(), "--chat", str(path))
    assert result.code == 2, result
    assert result.err.splitlines()[-1].startswith("error: chat: ")
    assert what in result.err


def test_bos_that_is_there_twice_is_warned_of(tmp_path: Path, verify: Verify) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text(f"{chr(BOS)}one\ntwo\n")
    reference = FakeOpenAI(bos=BOS)
    result = verify(reference, FakeOpenAI(), "--prompts", str(path))
    assert result.code == 0, result
    assert f"warning: 1 of 2 prompts begin with BOS (token {BOS}) twice" in result.err
    assert [r["prompt"] for r in reference.requests] == [[BOS, BOS, *b"one"], [BOS, *b"two"]]
    reference = FakeOpenAI(bos=BOS)
    result = verify(reference, FakeOpenAI(), "--prompts", str(path), "--no-add-special-tokens")
    assert result.code == 0, result
    assert "warning" not in result.err
    assert [r["prompt"] for r in reference.requests] == [[BOS, *b"one"], list(b"two")]


def test_a_template_that_writes_bos_twice_is_warned_of(chats: str, verify: Verify) -> None:
    twice = chr(BOS) * 2 + "{content}"
    both = [FakeOpenAI(bos=BOS, template=twice) for _ in range(2)]
    assert f"warning: 3 of 3 prompts begin with BOS (token {BOS}) twice\n" in verify(*both, "--chat", chats).err
    silent = [FakeOpenAI(tokenizes=False, template=twice) for _ in range(2)]
    result = verify(*silent, "--chat", chats)
    assert result.code == 0, result
    assert "warning" not in result.err


@pytest.mark.parametrize("terminal", [True, False])
def test_answers_are_counted_on_a_terminal_where_that_takes_long(
    chats: str, verify: Verify, monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    monkeypatch.setattr("baton.verify.observe._BAR_DELAY_S", 0.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    result = verify(FakeOpenAI(delay_s=0.2), FakeOpenAI(), "--chat", chats)
    assert ("answers:" in result.err, "1/3" in result.err) == (terminal, terminal), result.err
