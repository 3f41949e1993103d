"""`baton verify --reference URL --candidate URL`: servers that differ, misbehave, or report too little."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baton.openai import client
from baton.verify import counters
from testkit.servers.fake_openai import METRICS, TIE, FakeOpenAI, Json, running, token, zipped
from tests.verify.command import Verify

NUM = 4  # requests
MODEL = "models/baton-demo-llama"


def of_choice(edit: Callable[[Json], object], only: int | None = None) -> Callable[[Json, int], None]:
    """Edits the choice of every answer, or of one."""

    def change(answer: Json, index: int) -> None:
        if only is None or index == only:
            edit(answer["choices"][0])

    return change


def put(position: int, by: int) -> Callable[[Json], object]:
    def edit(choice: Json) -> None:
        choice["token_ids"][position] = (choice["token_ids"][position] + by) % 1000

    return edit


def test_equal_servers_are_identical(verify: Verify) -> None:
    reference, candidate = FakeOpenAI(), FakeOpenAI(owned_by="other")
    result = verify(reference, candidate, "--api-key", "secret")
    assert result.code == 0, result
    assert f"acceptance candidate: accepted {NUM * 6} {NUM * 3} in {NUM * 10} rounds" in result.out
    assert f"reference {NUM * 6} {NUM * 3} in {NUM * 10}: equal" in result.out
    assert result.out.endswith(f"identical: {NUM}/{NUM}\n")
    assert [r["prompt"] for r in reference.requests] == [r["prompt"] for r in candidate.requests]
    assert all(100 <= i < 30000 for r in candidate.requests for i in r["prompt"])
    assert reference.authorization + candidate.authorization == ["Bearer secret"] * (2 * NUM)


def test_only_a_vllm_reference_is_salted(verify: Verify) -> None:
    reference, candidate = FakeOpenAI(), FakeOpenAI()
    verify(reference, candidate)
    assert len({r["cache_salt"] for r in reference.requests}) == NUM
    assert not any("cache_salt" in r for r in candidate.requests)
    other = FakeOpenAI(owned_by="other")
    verify(other, candidate)
    assert not any("cache_salt" in r for r in other.requests)


def test_token_ids_may_come_as_names(verify: Verify) -> None:
    named = FakeOpenAI(change=of_choice(lambda choice: choice.pop("token_ids")))
    assert verify(FakeOpenAI(), named).code == 0


# One side's settings of the fake, and the expected report.
DIFFERENT: dict[str, tuple[dict[str, Any], str]] = {
    "wrong token": ({"change": of_choice(put(5, 1))}, "token 5: expected"),
    "fewer tokens": ({"change": of_choice(lambda c: _cut(c, 7))}, "8 tokens expected, got 7"),
    "finish reason": (
        {"change": of_choice(lambda c: c.update(finish_reason="stop"))},
        "finish_reason: expected length, got stop",
    ),
    "usage": (
        {"change": lambda answer, _: answer["usage"].update(prompt_tokens=1)},
        "num_prompt_tokens: expected 5, got 1",
    ),
}
MALFORMED: dict[str, tuple[dict[str, Any], str]] = {
    "no token ids": (
        {"change": of_choice(lambda c: (c.pop("token_ids"), c.pop("logprobs")))},
        "the server does not tell token ids: it knows neither return_token_ids",
    ),
    "tokens as text": (
        {"change": of_choice(lambda c: (c.pop("token_ids"), c["logprobs"].update(tokens=["a"] * 8)))},
        "the server does not tell token ids",
    ),
    "more tokens": (
        {"change": of_choice(lambda c: c["token_ids"].append(1))},
        "the server sent 9 tokens where at most 8 were asked for",
    ),
    "logprobs of fewer tokens": (
        {"change": of_choice(lambda c: c["logprobs"]["token_logprobs"].pop())},
        "the server sent 7 logprobs for 8 tokens",
    ),
    "top logprobs of fewer tokens": (
        {"change": of_choice(lambda c: c["logprobs"]["top_logprobs"].pop())},
        "the server sent top_logprobs of 7 for 8 tokens",
    ),
    "negative id": ({"change": of_choice(lambda c: c["token_ids"].__setitem__(0, -1))}, "malformed"),
    "id as text": ({"change": of_choice(lambda c: c["token_ids"].__setitem__(0, "7"))}, "malformed"),
    "drafts without end": (
        {"change": of_choice(lambda c: c.update(spec_decode={"accepted": [], "num_speculative_tokens": 1 << 40}))},
        "malformed",
    ),
    "no choices": ({"raw": b'{"choices": []}'}, "the answer has no choices"),
    "no JSON": ({"raw": b"<html>"}, "malformed"),
    "not UTF-8": ({"raw": b'{"choices": [{"finish_reason": "\xff"}]}'}, "malformed"),
    "deep JSON": ({"raw": b"[" * 100_000}, "malformed"),
    "compressed": ({"raw": zipped({"choices": []}), "headers": {"Content-Encoding": "gzip"}}, "malformed"),
    "HTTP 500": ({"raw": b'{"error": {"message": "boom"}}', "status": 500}, "HTTP 500: boom"),
    "an error of another shape": ({"raw": b"out of \x1b[31mpaper", "status": 503}, "HTTP 503: out of  [31mpaper"),
    "redirect": (
        {"raw": b"", "status": 307, "headers": {"Location": "/elsewhere"}},
        "HTTP 307: redirects are not followed",
    ),
    "silence": ({"delay_s": 60.0}, "no answer in time"),
    "too large": ({"raw": b" " * 3_000_000}, "larger than 2000000 bytes"),
}


def _cut(choice: Json, num: int) -> None:
    choice["token_ids"] = choice["token_ids"][:num]
    for values in choice["logprobs"].values():
        del values[num:]


@pytest.mark.parametrize("name", DIFFERENT)
def test_other_answers_are_differences(name: str, verify: Verify) -> None:
    settings, message = DIFFERENT[name]
    result = verify(FakeOpenAI(), FakeOpenAI(**settings))
    assert result.code == 1, result
    assert f"DIFFERENT candidate: request 0 (prompt of 5 tokens): {message}" in result.out
    assert result.out.endswith(f"identical: 0/{NUM}\n")


@pytest.mark.parametrize("sides", [(0, 5), (5, 0)])
def test_one_wrong_token_of_one_request_is_found(verify: Verify, sides: Any) -> None:
    fakes = [FakeOpenAI(change=of_choice(put(5, by), only=2)) for by in sides]
    result = verify(*fakes)
    assert result.code == 1, result
    assert "DIFFERENT candidate: request 2 (prompt of 7 tokens): token 5: expected" in result.out
    assert result.out.endswith(f"identical: {NUM - 1}/{NUM}\n")


@pytest.mark.parametrize("name", MALFORMED)
@pytest.mark.parametrize("side", ["reference", "candidate"])
def test_bad_answers_are_no_answers(name: str, side: str, verify: Verify, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "MAX_BODY_BYTES", 2_000_000)
    settings, message = MALFORMED[name]
    fake = FakeOpenAI(**settings)
    sides = (fake, FakeOpenAI()) if side == "reference" else (FakeOpenAI(), fake)
    limits = ("--request-timeout", "2", "--lengths", "5") if name == "silence" else ()
    result = verify(*sides, *limits)
    assert result.code == 1, result
    assert f"DIFFERENT candidate: request 0 (prompt of 5 tokens): no answer from the {side}: " in result.out
    assert message in result.out
    assert "\x1b" not in result.out
    assert "/elsewhere" not in fake.visited


def _strip(answer: Json) -> None:
    del answer["usage"], answer["choices"][0]["logprobs"]


def test_fields_that_a_server_leaves_out_are_not_compared(verify: Verify) -> None:
    bare = FakeOpenAI(change=lambda answer, _: _strip(answer))
    assert verify(FakeOpenAI(), bare, "--logprob-tolerance", "0.1").code == 0


def test_logprobs_are_compared_when_asked(verify: Verify) -> None:
    other = FakeOpenAI(change=of_choice(lambda c: c["logprobs"]["token_logprobs"].__setitem__(4, -0.53)))
    assert verify(FakeOpenAI(), other).code == 0
    assert verify(FakeOpenAI(), other, "--logprob-tolerance", "0.05").code == 0
    result = verify(FakeOpenAI(), other, "--logprob-tolerance", "0.02")
    assert result.code == 1
    assert "logprob of token 4: expected -0.500000, got -0.530000" in result.out
    report = json.loads(verify(FakeOpenAI(), other, "--json").out)[0]
    assert report["max_logprob_difference"] == pytest.approx(0.03)


@pytest.mark.parametrize(
    ("gap", "by", "flags", "excused"),
    [
        (5e-5, 1, (), True),
        (0.0, 1, (), True),
        (2e-4, 1, (), False),
        (2e-4, 1, ("--near-tie", "1e-3"), True),
        (5e-5, 1, ("--near-tie", "0"), False),
        (5e-5, 2, (), False),
        (5e-5, 1, ("--temperature", "0.5"), False),
    ],
    ids=["near", "equal", "far", "wider bound", "strict", "not the runner-up", "sampled"],
)
def test_near_ties_are_excused_and_counted(
    gap: float, by: int, flags: tuple[str, ...], excused: bool, verify: Verify
) -> None:
    def part(choice: Json) -> None:
        for position in range(TIE, 8):
            put(position, by)(choice)

    result = verify(FakeOpenAI(gap=gap), FakeOpenAI(change=of_choice(part, only=1)), *flags)
    if excused:
        assert result.code == 0, result
        assert f"near-tie candidate: request 1 (prompt of 6 tokens): token {TIE}: expected" in result.out
        assert result.out.endswith(f"identical: {NUM - 1}/{NUM}, parted at near-ties of the reference: 1\n")
    else:
        assert result.code == 1, result
        assert f"DIFFERENT candidate: request 1 (prompt of 6 tokens): token {TIE}" in result.out


def test_a_near_tie_does_not_excuse_what_came_before(verify: Verify) -> None:
    def part(choice: Json) -> None:
        put(TIE - 1, 1)(choice)
        put(TIE, 1)(choice)

    result = verify(FakeOpenAI(gap=0.0), FakeOpenAI(change=of_choice(part, only=1)))
    assert result.code == 1
    assert f"token {TIE - 1}: expected" in result.out


def test_acceptance_that_differs_fails(verify: Verify) -> None:
    result = verify(FakeOpenAI(), FakeOpenAI(second=2))
    assert result.code == 1
    assert "acceptance at draft position 2: expected 12 accepted drafts, got 8" in result.out
    assert "0.1000 of the reference's 40 rounds" in result.out
    assert result.out.endswith(f"identical: {NUM}/{NUM}\n")
    assert verify(FakeOpenAI(), FakeOpenAI(second=2), "--acceptance-tolerance", "0.11").code == 0


def test_rounds_of_placeholders_are_explained(verify: Verify) -> None:
    result = verify(FakeOpenAI(), FakeOpenAI(rounds=11))
    assert result.code == 0
    assert f"the candidate counts {NUM} rounds more than the reference, for {NUM} requests" in result.out
    report = json.loads(verify(FakeOpenAI(), FakeOpenAI(rounds=11), "--json").out)[0]
    assert report["passed"]
    assert report["counts"] == {"rounds": NUM * 11, "accepted_per_position": [NUM * 6, NUM * 3]}
    assert report["reference_counts"]["rounds"] == NUM * 10


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"metrics": None}, "HTTP 404"),
        ({"metrics": "up 1\n"}, "has no counters of speculative decoding"),
        ({"metrics": "<html>no\n"}, "the metrics are malformed"),
        ({"metrics": METRICS.replace("{drafts}", "NaN")}, "the metrics are malformed: nan is not a count"),
        ({"metrics": METRICS.replace("{drafts}", "-1")}, "is not a count"),
        ({"metrics": METRICS.replace('"1"', '"999999999"')}, "draft positions must be below 1024"),
        ({"metrics": METRICS.replace('"1"', '"x"')}, "the metrics are malformed"),
        ({"metrics_status": 302}, "redirects are not followed"),
        ({"rounds": 0, "first": 0, "second": 0}, "no drafts were verified by the candidate"),
        ({"metrics": METRICS.replace('"1"', '"2"')}, "the reference drafts 2 tokens, the candidate 3"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_acceptance_that_cannot_be_read_is_said_and_fails_when_asked_for(
    changes: dict[str, Any], message: str, verify: Verify
) -> None:
    result = verify(FakeOpenAI(), FakeOpenAI(**changes))
    assert result.code == 0, result
    assert "note candidate: acceptance not compared: " in result.out
    assert message in result.out
    result = verify(FakeOpenAI(), FakeOpenAI(**changes), "--candidate-metrics", "{candidate}")
    assert result.code == 1, result
    assert message in result.out + result.err


def test_counters_of_several_engines_add_up(verify: Verify) -> None:
    engines = FakeOpenAI(), FakeOpenAI()
    with running(engines[0]) as first, running(engines[1]) as second:

        def share(answer: Json, index: int) -> None:
            engine = engines[index % 2]
            engine.drafts += 10
            engine.accepted = [engine.accepted[0] + 6, engine.accepted[1] + 3]

        router = FakeOpenAI(change=share, metrics=None)
        result = verify(FakeOpenAI(), router, "--candidate-metrics", f"{first},{second}/metrics")
    assert result.code == 0, result
    assert ": equal" in result.out


def test_counters_that_go_back_or_never_rest_are_errors(verify: Verify, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "_POLLS", 3)
    result = verify(FakeOpenAI(), FakeOpenAI(rounds=-1), "--candidate-metrics", "{candidate}")
    assert result.code == 1
    assert "the counters went back: an engine was restarted" in result.err
    result = verify(FakeOpenAI(), FakeOpenAI(rounds=-1))
    assert result.code == 0
    assert "not compared: candidate: the counters went back" in result.out

    class Busy(FakeOpenAI):
        async def other(self, request: Any) -> Any:
            self.drafts += 1
            return await super().other(request)

    result = verify(FakeOpenAI(), Busy(), "--candidate-metrics", "{candidate}")
    assert result.code == 1
    assert "the counters keep changing" in result.err


def test_prompts_of_a_file(tmp_path: Path, verify: Verify) -> None:
    text = tmp_path / "prompts.txt"
    text.write_text("one\n\ntwo words\n")
    reference = FakeOpenAI()
    assert verify(reference, FakeOpenAI(), "--prompts", str(text)).code == 0
    assert [r["prompt"] for r in reference.requests] == [list(b"one"), list(b"two words")]
    lines = tmp_path / "prompts.jsonl"
    lines.write_text('{"prompt": [5, 6]}\n{"prompt": "one", "id": 7}\n')
    reference = FakeOpenAI()
    assert verify(reference, FakeOpenAI(), "--prompts", str(lines)).code == 0
    assert [r["prompt"] for r in reference.requests] == [[5, 6], list(b"one")]
    result = verify(FakeOpenAI(tokenizes=False), FakeOpenAI(), "--prompts", str(text))
    assert result.code == 2
    assert "HTTP 404: Not Found; give MODEL" in result.err
    for content, message in (("", "1 to 100000 prompts, got 0"), ('{"prompt": []}', "line 1"), ("{", "line 1")):
        lines.write_text(content)
        result = verify(FakeOpenAI(), FakeOpenAI(), "--prompts", str(lines))
        assert result.code == 2
        assert message in result.err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--candidate", "ftp://x"), "candidate: must be http://HOST:PORT"),
        (("--candidate-metrics", "nowhere"), "candidate_metrics: must be http://HOST:PORT"),
        (("--lengths", "3", "--prompts", "x"), "lengths: cannot be chosen with --prompts"),
        (("--chat", "x", "--prompts", "x"), "prompts: cannot be chosen with --chat"),
        (("--prompts", "no/file"), "prompts: no/file cannot be read: No such file or directory"),
        (("--no-add-special-tokens",), "add_special_tokens: is for the texts of --prompts"),
        (("--token-range", "9-3"), "token_range: must be rising"),
        (("--near-tie", "nan"), "near_tie: must be at least 0"),
        (("--acceptance-tolerance", "-1"), "acceptance_tolerance: must be at least 0"),
        (("--modes", "single"), "modes: must be of push, pull"),
        (("--kv-transport", "local"), "kv_transport: local moves KV within one process only"),
        (("--kv-transport", "faulty+local://?fault=drop"), "kv_transport: local moves KV within one process only"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bad_options_are_one_line(flags: tuple[str, ...], message: str, verify: Verify) -> None:
    result = verify(FakeOpenAI(), FakeOpenAI(), *flags)
    assert result.code == 2, result
    assert result.err.endswith("\n")
    assert result.err.splitlines()[-1].startswith(f"error: {message}")


def test_modes_are_asked_of_the_candidate(verify: Verify) -> None:
    candidate = FakeOpenAI()
    result = verify(FakeOpenAI(), candidate, "--modes", "pull,push")
    assert result.code == 0
    assert [r["kv_mode"] for r in candidate.requests] == ["pull"] * NUM + ["push"] * NUM
    assert result.out.endswith(f"identical: {2 * NUM}/{2 * NUM}\n")


def test_a_server_that_is_not_there_is_an_error(verify: Verify) -> None:
    result = verify(FakeOpenAI(), FakeOpenAI(), "--candidate", "http://127.0.0.1:1")
    assert result.code == 1
    assert "error: http://127.0.0.1:1/v1/models: " in result.err


def test_the_fake_is_right_about_itself() -> None:
    assert token([1, 2], 0) != token([1, 2], 1) != token([1, 3], 1)
